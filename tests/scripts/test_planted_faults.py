"""The faults of `scripts/attack/faults.py` can be planted in the sources as they are."""

from pathlib import Path

from scripts.attack import planted

FAULTS = planted.every()
ROOT = Path(__file__).parents[2]


def test_every_fault_has_its_place_and_tests_that_could_notice():
    assert len(FAULTS) >= 125 and len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert {f.name: f.file for f in FAULTS if (ROOT / f.file).read_text().count(f.old) != 1} == {}
    assert {f.name for f in FAULTS if f.new in (f.old, None)} == set()
    assert {name for f in FAULTS for name in f.tests if not exists(*name.split("::"))} == set()


def exists(file, test=""):
    """A file of tests, or one of its tests."""
    path = ROOT / "tests" / file
    return path.exists() and (not test or f"def {test}(" in path.read_text())
