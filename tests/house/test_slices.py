"""Slices of the slow tests: together they are all of them, each test is in one, and they take about as long."""

import json

from tests.conftest import TIMES, slices


def test_each_test_is_in_one_slice_and_they_are_alike():
    times = {file: took["slow"] for file, took in json.loads(TIMES.read_text()).items() if took["slow"]}
    tests = {f"{file}::{number}": file for file in times for number in range(5)}
    parts = slices(tests, 12)
    assert sorted(name for part in parts for name in part) == sorted(tests)
    seconds = [sum(times[tests[name]] / 5 for name in part) for part in parts]
    assert max(seconds) < 1.5 * sum(seconds) / 12
    assert slices(dict(reversed(tests.items())), 12) == parts


def test_a_file_that_nobody_timed_is_in_a_slice_too():
    assert sorted(map(sorted, slices({"a": "new.py", "b": "new.py", "c": "other.py"}, 2))) == [["a", "b"], ["c"]]
