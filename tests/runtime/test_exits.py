"""User code that exits in the training process: an incomplete run is no success, whichever function it calls."""

import importlib
import os
import posix
import sys
from pathlib import Path

import pytest

from mmrl.cli import main as cli
from mmrl.runtime.user_code import exits_refused
from mmrl.tasks.settings import TaskSettings
from tests.whole_runs.parts import TINY, Fixed, command, metrics, spread, start, wait

HERE = "tests.runtime.test_exits"
MODULE = """
import posix
from os import _exit
import os, sys
FORMS = {"os": os._exit, "import": _exit, "posix": posix._exit, "sys": sys.exit}
FORMS["later"] = lambda status: os._exit(status)
"""


def leave(form):
    """Exits with 0 as a user's module does that is imported when the run is built."""
    Path("leaving_user.py").write_text(MODULE)
    importlib.import_module("leaving_user").FORMS[form](0)


class Leaving(TaskSettings):
    """A task that exits where it is built, or where it scores its second step."""

    form: str = "os"
    place: str = "build"

    def build(self, seed):
        scored = []

        def mark(sample):
            scored.append(sample)
            if self.place == "score" and len(scored) > 16:
                leave(self.form)
            return spread(sample)

        if self.place == "build":
            leave(self.form)
        return Fixed(mark)


def leaves(sample):
    leave("import")


def elsewhere(folder, *arguments):
    """`mmrl ...` in a folder that a user's modules are imported from."""
    os.chdir(folder)
    sys.path.append(str(folder))
    command(*arguments)


def ended(folder, *options):
    log = folder / "log.txt"
    options = [*options, "steps=2", f"run_dir={folder / 'run'}"]
    (code,) = wait(start(elsewhere, str(folder), "train", str(TINY), *options, log=log), log)
    return code, [line for line in log.read_text().splitlines() if line.startswith("mmrl: ")], log.read_text()


@pytest.mark.quick("import-build", "posix-score", "sys-build")
@pytest.mark.parametrize("place", ["build", "score"])
@pytest.mark.parametrize("form", ["os", "import", "posix", "later", "sys"])
def test_an_exit_of_user_code_is_no_success(tmp_path, form, place):
    code, lines, said = ended(tmp_path, f"task={{type: '{HERE}:Leaving', form: {form}, place: {place}}}")
    what = "0" if form == "sys" else "os._exit(0) was called in the training process by "
    assert code == 1 and "Traceback" not in said
    assert len(lines) == 1 and lines[0].startswith(f"mmrl: code outside of mmrl ended the command: SystemExit: {what}")
    assert lines[0].endswith("; raise an exception instead") and "(test_exits.py:" in lines[0] or form != "sys"
    assert not (tmp_path / "run" / "final").exists()


def test_a_reward_that_exits_costs_its_samples(tmp_path):
    rewards = f"task.rewards=[{{name: '{HERE}:leaves'}}, {{name: 'tests.whole_runs.parts:spread'}}]"
    code, lines, said = ended(tmp_path, rewards)
    assert (code, lines) == (0, []) and "os._exit(0) was called in the training process by test_exits.py:" in said
    assert len([row for row in metrics(tmp_path / "run") if "loss" in row]) == 2


@pytest.mark.parametrize(("status", "expected"), [(0, 1), (None, 1), (3, 3), (256, 1), ("text", 1), (-1, 255)])
def test_the_commands_code_is_not_0_where_other_code_ends_it(monkeypatch, capsys, status, expected):
    monkeypatch.setattr(cli, "run_train", lambda options: sys.exit(status))
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as left:
        cli.main(["train", str(TINY)])
    assert left.value.code == expected
    (line,) = capsys.readouterr().err.splitlines()
    text = "" if status is None else f" {status}"
    assert line.startswith(f"mmrl: code outside of mmrl ended the command: SystemExit:{text} (test_exits.py:")


def test_exits_are_as_before_outside_of_the_block():
    before = os._exit, posix._exit
    with exits_refused():
        with exits_refused():
            pass
        kept = os._exit
        with pytest.raises(SystemExit, match=r"os._exit\(4\) .* by test_exits.py:"):
            kept(4)
        assert os.fork() or kept(7)  # a copy of this process may end
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
    assert (os._exit, posix._exit) == before
    assert os.fork() or kept(9)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 9
