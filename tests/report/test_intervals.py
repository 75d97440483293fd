"""Confidence intervals, by hand."""

import pytest

from mmrl.report.intervals import mean_interval, wilson


def test_wilson_interval_by_hand():
    """Share 0.5 of 4: the centre is 0.5 and the half width z sqrt(0.25 / 4 + z^2 / 64) / (1 + z^2 / 4)."""
    low, high = wilson(2, 4)
    half = 1.96 * (0.25 / 4 + 1.96**2 / 64) ** 0.5 / (1 + 1.96**2 / 4)
    assert (low, high) == pytest.approx((0.5 - half, 0.5 + half))
    assert wilson(0, 10)[0] == 0.0 and wilson(0, 10)[1] == pytest.approx(0.2775, abs=1e-3)
    assert wilson(10, 10)[1] == 1.0


def test_the_interval_of_a_mean_is_wilsons_where_values_are_right_or_wrong():
    """Of 1, 1, 1, 0 the standard error is sqrt(0.75 * 0.25 / 3); scores of other values have another one. Tables
    of Student's t: 3.182 with 3 degrees of freedom, 1.984 with 100."""
    assert mean_interval(0.75, 0.25, 4) == wilson(3, 4)
    assert mean_interval(0.75, 0.1, 4) == pytest.approx((0.4318, 1.0682), abs=1e-4)
    assert mean_interval(0.75, 0.1, 101) == pytest.approx((0.5516, 0.9484), abs=1e-4)
    assert mean_interval(0.0, 0.0, 8) == wilson(0, 8) and mean_interval(1.0, 0.0, 1) == wilson(1, 1)
    assert mean_interval(-2.0, 0.5, 4) == pytest.approx((-3.591, -0.409), abs=1e-3) and mean_interval(-2, 0, 1) == (
        -2,
        -2,
    )
