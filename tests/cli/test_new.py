"""`mmrl new`: what it writes is valid, refuses what it should, passes its own tests, and learns."""

import json
import os
import subprocess
import sys

import pytest

from mmrl.cli import new
from mmrl.cli.main import SKELETONS, main
from mmrl.config import load
from mmrl.errors import UserError

OWN = ("task", "reward", "simulator", "environment")
BY_HAND = ("algorithm", "term", "shaper", "mask", "surrogate", "baseline", "transform", "measurement")
COLUMNS = {"task": "reward/digits", "reward": "reward/my_reward", "simulator": "accuracy"}
COLUMNS["environment"] = "reward/environment_return"


def run(folder, *arguments):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, timeout=550)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """One folder that holds one of each of our own kinds."""
    folder = tmp_path_factory.mktemp("new")
    for kind in OWN:
        new.write(kind, f"My{kind.title()}", folder)
    return folder


def test_the_command_line_knows_all_kinds_and_says_how_to_go_on(tmp_path, capsys):
    assert sorted(SKELETONS) == sorted(new.KINDS)
    with pytest.raises(SystemExit) as ended:
        main(["new", "reward", "Polite", "--folder", str(tmp_path)])
    recipe = tmp_path / "polite.yaml"
    assert (
        ended.value.code == 0 and f"written {recipe}; train it with: mmrl train {recipe}\n" in capsys.readouterr().out
    )


@pytest.mark.parametrize("kind", new.KINDS)
def test_every_kind_is_a_module_a_valid_recipe_and_a_test(kind, tmp_path, monkeypatch):
    files = new.write(kind, "ABetterThing2", tmp_path)
    assert [file.name for file in files] == ["abetter_thing2.py", "abetter_thing2.yaml", "test_abetter_thing2.py"]
    for file in files:
        text = file.read_text()
        assert text.endswith("\n") and "{{" not in text and "{%" not in text
        assert max(map(len, text.splitlines())) <= 120
        if file.suffix == ".py":
            compile(text, str(file), "exec")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "abetter_thing2", raising=False)
    assert load("abetter_thing2.yaml").run_dir == "runs/abetter_thing2"
    monkeypatch.delitem(sys.modules, "abetter_thing2", raising=False)


def test_what_it_refuses(tmp_path):
    with pytest.raises(UserError, match="'my_task' is not a class name in CamelCase; write it like MyAlgorithm"):
        new.write("task", "my_task", tmp_path)
    new.write("task", "MyTask", tmp_path)
    with pytest.raises(UserError, match="my_task.py exists; choose another name or remove it"):
        new.write("reward", "MyTask", tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="^--folder="):
        new.write("task", "MyTask", tmp_path / "file")


def test_what_the_parts_give_is_what_their_tests_say(written):
    done = run(written, "pytest", "-q", "-p", "no:cacheprovider", "-k", "not trains", ".")
    assert done.returncode == 0, done.stdout
    assert "11 passed, 4 deselected" in done.stdout


def test_what_methods_give_is_what_was_worked_out_by_hand(tmp_path):
    for kind in BY_HAND:
        new.write(kind, f"My{kind.title()}", tmp_path)
    done = run(tmp_path, "pytest", "-q", "-p", "no:cacheprovider", "-k", "values", ".")
    assert done.returncode == 0, done.stdout
    assert f"{len(BY_HAND)} passed, {len(BY_HAND)} deselected" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", OWN)
def test_it_trains_in_its_own_test(written, kind):
    done = run(written, "pytest", "-q", "-p", "no:cacheprovider", "-k", "trains", f"test_my_{kind}.py")
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout


@pytest.mark.parametrize("kind", sorted({*new.KINDS} - {*OWN}))
@pytest.mark.quick("source")
def test_every_step_of_a_method_has_a_gradient(kind, tmp_path):
    """From a model of random weights: its recipe pays for something that is earned at once."""
    new.write(kind, "MyPart", tmp_path)
    sizes = ["steps=4", "rollout.prompts=8", "evaluation.before=false", "evaluation.every=0", "evaluation.prompts=4"]
    done = run(tmp_path, "mmrl", "train", "my_part.yaml", *sizes)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "runs/my_part/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert len(steps) == 4 and all(row["grad_norm"] > 0.01 for row in steps)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", OWN)
def test_it_learns_as_it_stands(written, kind):
    """The recipe as it is written: its reward rises from what random weights get."""
    done = run(written, "mmrl", "train", f"my_{kind}.yaml", f"run_dir=runs/learned_{kind}", "evaluation.prompts=4")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (written / f"runs/learned_{kind}/metrics.jsonl").read_text().splitlines()]
    values = [row[COLUMNS[kind]] for row in rows if "loss" in row]
    assert len(values) == 30 and sum(values[-5:]) / 5 > sum(values[:2]) / 2 + 0.2
