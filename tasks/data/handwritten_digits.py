"""The test part of the UCI set "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak, 1998): 1797 images of
8 x 8, in handwritten_digits.csv.gz. Its licence is in handwritten_digits.txt."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray


def load_digits() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Returns the images [image, 8, 8], 0 to 16, and their labels [image]."""
    table = np.loadtxt(Path(__file__).with_suffix(".csv.gz"), delimiter=",")
    return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64)
