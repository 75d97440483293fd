"""The 1797 8x8 handwritten digits that scikit-learn's package carries (the test part of the UCI set "Optical
Recognition of Handwritten Digits", Alpaydin and Kaynak, 1998), read without importing it, which takes seconds."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmrl.errors import UserError


def load_digits() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Pictures [image, 8, 8], 0 to 16, and their labels [image]: what `sklearn.datasets.load_digits` gives. Raises
    UserError where the package is not installed."""
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise UserError("the digits are a file of scikit-learn's package: pip install scikit-learn")
    table = np.loadtxt(Path(found.submodule_search_locations[0]) / "datasets/data/digits.csv.gz", delimiter=",")
    return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64)
