"""Distances between sets of features, and similarity of strings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Distance = Callable[[Tensor, Tensor], Tensor]


def frechet(features: Tensor, reference: Tensor) -> Tensor:
    """FID of two sets, [n, d] and [m, d]: |mu - mu'|^2 + tr(C + C' - 2 (C' C)^(1/2)) of their means and unbiased
    covariances (arXiv 1706.08500), 0-d fp64. Of fewer than two members a covariance is 0."""
    mean, spread = _moments(features)
    other, wanted = _moments(reference)
    root = _root(wanted)
    shared = torch.linalg.eigvalsh(root @ spread @ root).clamp(min=0).sqrt().sum()
    return (mean - other).square().sum() + spread.trace() + wanted.trace() - 2 * shared


def kernel_distance(features: Tensor, reference: Tensor) -> Tensor:
    """KID of two sets, [n, d] and [m, d], n and m above 1: the unbiased squared maximum mean discrepancy under the
    kernel (x . y / d + 1)^3 (arXiv 1801.01401), 0-d fp64. It may be below 0."""
    x, y = features.double(), reference.double()

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b.T / a.shape[1] + 1) ** 3

    def inside(a: Tensor) -> Tensor:
        gram = kernel(a, a)
        return (gram.sum() - gram.diagonal().sum()) / (len(a) * (len(a) - 1))

    return inside(x) + inside(y) - 2 * kernel(x, y).mean()


def replacement_gains(features: Tensor, member: Tensor, distance: Callable[[Tensor], Tensor]) -> Tensor:
    """[row] how much nearer a set comes to what `distance` measures when a subset of it takes another one's place.

    features: [row, d], the whole set; member: [row] int64, which subset a row is in; distance: of features. The gain of
    subset i is distance(all) - mean_j distance(all, with subset j left out and i twice), over the others j, fp32; 0
    where there is one subset.
    """
    subsets = member.unique()
    gains = torch.zeros(len(features), dtype=torch.float64)
    if len(subsets) < 2:
        return gains.float()
    whole = distance(features)
    for i in subsets:
        subset = features[member == i]
        changed = [distance(torch.cat([features[member != j], subset])) for j in subsets if j != i]
        gains[member == i] = whole - torch.stack(changed).mean()
    return gains.float()


def _moments(features: Tensor) -> tuple[Tensor, Tensor]:
    wide = features.double()
    mean = wide.mean(0)
    apart = wide - mean
    return mean, apart.T @ apart / max(len(wide) - 1, 1)


def _root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.clamp(min=0).sqrt() @ vectors.T


def similarity(texts: Sequence[str], n: int) -> Tensor:
    """[text, text] float64, 0 to 1: the cosine of the counts of n-grams of characters. A shorter text is one gram; an
    empty one is like nothing but itself."""
    counts = [Counter(text[i : i + n] for i in range(max(1, len(text) - n + 1))) for text in texts]
    columns = {gram: i for i, gram in enumerate({gram for count in counts for gram in count})}
    table = torch.zeros(len(texts), max(1, len(columns)), dtype=torch.float64)
    for row, count in enumerate(counts):
        for gram, times in count.items():
            table[row, columns[gram]] = times
    table = table / table.norm(dim=1, keepdim=True).clamp(min=1e-12)
    return (table @ table.T).clamp(0, 1)
