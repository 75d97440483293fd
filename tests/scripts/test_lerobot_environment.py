"""LeRobot's policies, tested in an environment of their own: its pins do not go with those of mmrl's other extras."""

import importlib.util
import os
import re
import shutil
import subprocess

import pytest

from tests.helpers.command_line import ROOT

FOLDER = ROOT / "tests/policies/vla"
NO_PYTHON = 75  # exit code of scripts/lerobot.sh
SECONDS = 1500  # to download and to test


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
@pytest.mark.skipif(
    importlib.util.find_spec("lerobot") is not None, reason="lerobot is installed here, and tested here"
)
@pytest.mark.skipif(
    shutil.which("uv") is None and not (ROOT / ".venv/uv/bin/uv").exists(), reason="there is no uv to make it with"
)
def test_lerobot_s_policies_pass_in_their_own_environment():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    # without those of several ranks, which are slow by themselves
    command = ["bash", "scripts/lerobot.sh", *map(str, sorted(FOLDER.glob("test_lerobot_*.py"))), "-m", "not slow"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode == NO_PYTHON:
        pytest.skip(f"uv cannot provide Python 3.12: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 20, done.stdout[-300:]
