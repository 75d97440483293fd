"""Distances between sets of features, and similarity of strings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Distance = Callable[[Tensor, Tensor], Tensor]


def frechet(features: Tensor, reference: Tensor) -> Tensor:
    """Computes the Frechet distance (FID, arXiv 1706.08500) of features [n, d] and [m, d]; 0-d fp64.

    It is |mu - mu'|^2 + tr(C + C' - 2 (C' C)^(1/2)) of their means and unbiased covariances. The covariance of fewer
    than two rows is 0.
    """
    mean, covariance = _mean_and_covariance(features)
    reference_mean, reference_covariance = _mean_and_covariance(reference)
    root = _matrix_sqrt(reference_covariance)
    cross = torch.linalg.eigvalsh(root @ covariance @ root).clamp(min=0).sqrt().sum()
    return (mean - reference_mean).square().sum() + covariance.trace() + reference_covariance.trace() - 2 * cross


def kernel_distance(features: Tensor, reference: Tensor) -> Tensor:
    """Computes the kernel inception distance (KID, arXiv 1801.01401) of features [n, d] and [m, d], n, m > 1; 0-d fp64.

    It is the unbiased squared maximum mean discrepancy under the kernel (x . y / d + 1)^3, which may be negative.
    """
    x, y = features.double(), reference.double()

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b.T / a.shape[1] + 1) ** 3

    def mean_off_diagonal(a: Tensor) -> Tensor:
        gram = kernel(a, a)
        return (gram.sum() - gram.diagonal().sum()) / (len(a) * (len(a) - 1))

    return mean_off_diagonal(x) + mean_off_diagonal(y) - 2 * kernel(x, y).mean()


def replacement_gains(features: Tensor, member: Tensor, distance: Callable[[Tensor], Tensor]) -> Tensor:
    """Computes by how much the distance of a set falls when one subset replaces another one. Returns [row] fp32.

    features: [row, d], the set; member: [row] int64, the subset of each row; distance: the distance of features [n, d]
    to a fixed reference. Each row gets the gain of its subset i: distance(set) - mean over the other subsets j of
    distance(set with i in place of j). It is 0 if there is only one subset.
    """
    subsets = member.unique()
    gains = torch.zeros(len(features), dtype=torch.float64)
    if len(subsets) < 2:
        return gains.float()
    full_distance = distance(features)
    for i in subsets:
        subset = features[member == i]
        replaced = [distance(torch.cat([features[member != j], subset])) for j in subsets if j != i]
        gains[member == i] = full_distance - torch.stack(replaced).mean()
    return gains.float()


def _mean_and_covariance(features: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the mean [d] and the unbiased covariance [d, d] of features [n, d], fp64."""
    features = features.double()
    mean = features.mean(0)
    centered = features - mean
    return mean, centered.T @ centered / max(len(features) - 1, 1)


def _matrix_sqrt(matrix: Tensor) -> Tensor:
    """Returns the square root of a symmetric positive semi-definite matrix [d, d]."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.clamp(min=0).sqrt() @ vectors.T


def ngram_similarity(texts: Sequence[str], n: int) -> Tensor:
    """Computes the cosine similarity of the character n-gram counts of texts, [text, text] fp64, 0 to 1.

    A text shorter than n is a single n-gram.
    """
    counts = [Counter(text[i : i + n] for i in range(max(1, len(text) - n + 1))) for text in texts]
    vocabulary = {ngram for ngrams in counts for ngram in ngrams}
    columns = {ngram: i for i, ngram in enumerate(vocabulary)}
    table = torch.zeros(len(texts), max(1, len(columns)), dtype=torch.float64)
    for row, ngrams in enumerate(counts):
        for ngram, frequency in ngrams.items():
            table[row, columns[ngram]] = frequency
    table = table / table.norm(dim=1, keepdim=True).clamp(min=1e-12)
    return (table @ table.T).clamp(0, 1)
