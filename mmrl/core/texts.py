"""How alike texts are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor


def similarity(texts: Sequence[str], n: int) -> Tensor:
    """[text, text] float64, 0 to 1: the cosine of the counts of n-grams of characters. A shorter text is one gram; an
    empty one is like nothing but itself."""
    counts = [Counter(text[i : i + n] for i in range(max(1, len(text) - n + 1))) for text in texts]
    places = {gram: i for i, gram in enumerate({gram for count in counts for gram in count})}
    table = torch.zeros(len(texts), max(1, len(places)), dtype=torch.float64)
    for row, count in enumerate(counts):
        for gram, times in count.items():
            table[row, places[gram]] = times
    table = table / table.norm(dim=1, keepdim=True).clamp(min=1e-12)
    return (table @ table.T).clamp(0, 1)
