"""Confidence intervals, by hand."""

import pytest

from mmrl.report.intervals import wilson


def test_wilson_interval_by_hand():
    """Share 0.5 of 4: the centre is 0.5 and the half width z sqrt(0.25 / 4 + z^2 / 64) / (1 + z^2 / 4)."""
    low, high = wilson(2, 4)
    half = 1.96 * (0.25 / 4 + 1.96**2 / 64) ** 0.5 / (1 + 1.96**2 / 4)
    assert (low, high) == pytest.approx((0.5 - half, 0.5 + half))
    assert wilson(0, 10)[0] == 0.0 and wilson(0, 10)[1] == pytest.approx(0.2775, abs=1e-3)
    assert wilson(10, 10)[1] == 1.0
