"""Blocks that take too long end by name; others are left alone."""

import time

import pytest

from mmrl.errors import UserError
from mmrl.runtime.time_limits import time_limit


def endless():
    while True:
        try:
            sum(range(100))
        except Exception:  # what loops may catch errors, too
            continue


def test_a_loop_without_an_end_is_stopped_by_name():
    began = time.monotonic()
    with pytest.raises(UserError, match="it loops"), time_limit(0.2, "it loops"):
        endless()
    assert 0.2 <= time.monotonic() - began < 5


def test_what_ends_in_time_is_not_stopped_later():
    with time_limit(0.1, "late"):
        value = 1
    time.sleep(0.3)
    assert value == 1


def test_an_error_of_the_block_stays_its_own():
    with pytest.raises(KeyError), time_limit(5.0, "late"):
        raise KeyError("of the block")


def test_a_time_limit_within_another_one_is_its_own():
    with time_limit(5.0, "outer"), pytest.raises(UserError, match="inner"), time_limit(0.1, "inner"):
        endless()
