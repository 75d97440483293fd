"""A part of each attack of scripts/attack; the whole is for whoever changes what they attack."""

import subprocess
import sys
from pathlib import Path

import pytest

ATTACKS = Path(__file__).parents[2] / "scripts" / "attack"


PARTS = [("rewards", 180), ("data", 300), ("simulators", 100), ("inputs", 80), ("surroundings", 7), ("checks", 2)]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("attack", "at_least"), PARTS)
def test_every_outcome_is_wanted(attack, at_least):
    command = [sys.executable, str(ATTACKS / f"{attack}.py"), "--part"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "not as wanted: 0" in done.stdout
    assert int(done.stdout.split(" tries in ")[0].split()[-1]) >= at_least
