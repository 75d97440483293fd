"""A small part of the attacks of scripts/attack."""

import pytest

from scripts.attack import resume


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_runs_survive_a_few_of_each_attack(capfd):
    assert resume.main(["--kills", "2", "--flips", "40", "--only", "kills", "flips", "two_runs", "shapes"]) == 0
    assert "| bits flipped in a checkpoint | 40 | 40 noticed |" in capfd.readouterr().out
