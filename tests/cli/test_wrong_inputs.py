"""Overrides of scripts/attack that a configuration alone refuses, in this process: one line that names what is wrong,
before anything is built. The whole is `scripts/attack/inputs.py`."""

import sys

import pytest
import yaml

from mmrl.cli.main import at_least_one, main
from mmrl.config import load
from mmrl.errors import UserError
from mmrl.job import rank_and_world_size
from tests.helpers.command_line import ROOT

ATTACKS = ROOT / "scripts" / "attack"


@pytest.fixture(scope="module")
def tables():
    sys.path.insert(0, str(ATTACKS))  # as where it runs: its own modules of rewards and environments are found
    import inputs
    import wrong_files
    import wrong_inputs

    yield inputs, wrong_files, wrong_inputs
    sys.path.remove(str(ATTACKS))


@pytest.mark.parametrize(
    ("job", "name", "at_least"),
    [("visual_qa", "ANY_JOB", 110), ("visual_qa", "VISUAL_QA", 35), ("images", "IMAGES", 30), ("robots", "ROBOTS", 22)],
)
def test_what_a_configuration_refuses_names_what_is_wrong(tables, tmp_path, job, name, at_least):
    inputs, wrong_files, wrong_inputs = tables
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(wrong_files.jobs(tmp_path)[job] | {"run_dir": "r"}))
    refused = 0
    for case, overrides, wanted in vars(wrong_inputs)[name]:
        if "--" in overrides:
            continue
        tried = inputs.training("", case, overrides, wanted, path, tmp_path)
        try:
            load(path, [word for word in tried.arguments[2:] if not word.startswith("run_dir=/")])
        except UserError as error:
            assert wanted and tried.wanted in str(error) and len(str(error).splitlines()) == 1, (case, str(error))
            refused += 1
    assert refused >= at_least


@pytest.mark.parametrize("count", ["0", "-3", "many", "1.5", ""])
def test_a_count_is_a_whole_number_of_at_least_one(count, capsys):
    with pytest.raises(SystemExit) as left:
        main(["sample", "run", "job.yaml", "--count", count])
    assert left.value.code == 2 and "at least 1" in capsys.readouterr().err
    assert at_least_one("16") == 16


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"WORLD_SIZE": "three", "RANK": "0"}, "WORLD_SIZE=three"),
        ({"WORLD_SIZE": "1", "RANK": "5"}, "RANK=5"),
        ({"WORLD_SIZE": "0", "RANK": "0"}, "WORLD_SIZE=0"),
    ],
)
def test_ranks_that_no_launcher_gives_are_refused(monkeypatch, environment, named):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=named):
        rank_and_world_size()
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv("RANK", "5")
    assert rank_and_world_size() == (5, 6)


@pytest.mark.parametrize("words", [["--print-config", "seed=3"], ["seed=3", "--print-config"]])
def test_overrides_may_stand_on_both_sides_of_an_option(tmp_path, capsys, words):
    path = tmp_path / "job.yaml"
    path.write_text("run_dir: r\n")
    with pytest.raises(SystemExit) as left:
        main(["train", str(path), "steps=7", *words])
    assert left.value.code == 0
    made = yaml.safe_load(capsys.readouterr().out)
    assert (made["steps"], made["seed"]) == (7, 3)
