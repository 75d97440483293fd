"""What `mmrl eval` of robots leaves behind, and the script that makes a table of it."""

import json
from argparse import Namespace
from types import SimpleNamespace

import pytest

from mmrl.cli.evaluation import eval_episodes
from scripts.bench import evaluations
from tests.evaluation.test_evaluation import PPO, job, sample
from tests.helpers.command_line import mmrl
from tests.whole_runs.parts import ROBOTS


def test_the_command_writes_a_line_that_can_be_run_again(tmp_path, capsys, monkeypatch):
    _, _, policy = job(*PPO)
    (tmp_path / "run").mkdir()
    policy.save(tmp_path / "run" / "final", policy.module.state_dict())
    for _ in range(2):
        done = mmrl(tmp_path, "eval", tmp_path / "run", ROBOTS, "run_dir=x", *PPO)
        assert (done.code, done.err) == (0, "")
    assert "start states 0 to 3 of each task" in done.out and "held out" in done.out
    folder = tmp_path / "run"
    lines = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    assert lines[0] == lines[1] and lines[0]["command"][:2] == ["mmrl", "eval"]
    assert set(lines[0]["found"]) == {"greedy", "sampled"} and lines[0]["found"]["greedy"]["go"]["episodes"] == 4
    assert json.loads((folder / "evaluation.json").read_text())["greedy"] == lines[0]["found"]["greedy"]
    assert not list(folder.glob("evaluation.*-0.jsonl"))  # it came to its end
    shown = lines[0]["found"]["greedy"]["go"]
    better = {**lines[1]["found"], "greedy": {"go": {**shown, "success": 9.0}}}
    monkeypatch.setattr("sys.argv", ["evaluations.py", str(folder / "evaluations.jsonl"), "--again"])
    for now, code in ((lines[1], 0), ({**lines[1], "found": better}, 1)):
        monkeypatch.setattr(evaluations, "again", lambda line, now=now: now)
        with pytest.raises(SystemExit) as ended:
            evaluations.main()
        assert ended.value.code == code
    table = capsys.readouterr().out
    assert f"| go | 4 | 0 to 3 | 4 | greedy | {shown['success']:.3f} (" in table and "OTHER" in table


def test_the_rates_are_those_of_the_episodes_of_all_ranks(tmp_path):
    """Of this rank's two episodes one is a success, of the other rank's three all."""
    config, task, policy = job("evaluation.decoding=greedy")
    own, others = [sample("go"), sample("go", False)], [sample("go")] * 3
    measured = SimpleNamespace(
        config=config,
        task=task,
        policy=policy,
        ranks=SimpleNamespace(rank=0, gather=lambda samples: [samples, others]),
        measure=lambda count, journal: ({}, own, None),
    )
    journal = tmp_path / "evaluation.greedy-0.jsonl"
    journal.write_text("")
    eval_episodes(Namespace(model=str(tmp_path), overrides=[]), measured)
    (line,) = (tmp_path / "evaluations.jsonl").read_text().splitlines()
    found = json.loads(line)["found"]["greedy"]["go"]
    assert (found["success"], found["episodes"]) == (4 / 5, 5) and not journal.exists()


FLOW = "action.head={type: flow, width: 32, depth: 1, steps: 4, evaluation_steps: 4}"


@pytest.mark.parametrize(
    ("options", "decodings"),
    [
        (["evaluation.decoding=sampled"], ["sampled"]),
        (["evaluation.decoding=greedy"], ["greedy"]),
        ([FLOW], ["sampled"]),
    ],
)
def test_episodes_are_played_once_where_one_decoding_is_asked_for_or_there_is_but_one(tmp_path, options, decodings):
    _, _, policy = job(*([FLOW, "evaluation={prompts: 10, micro_batch: 4}"] if FLOW in options else []))
    (tmp_path / "run").mkdir()
    policy.save(tmp_path / "run" / "final", policy.module.state_dict())
    done = mmrl(tmp_path, "eval", tmp_path / "run", ROBOTS, "run_dir=x", *options)
    assert (done.code, done.err) == (0, "")
    line = json.loads((tmp_path / "run" / "evaluations.jsonl").read_text())
    record = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert list(line["found"]) == decodings and record[decodings[0]] == line["found"][decodings[0]]


def test_evaluations_of_prompts_leave_a_line_each_and_are_listed_with_their_overrides(tmp_path, capsys, monkeypatch):
    train = mmrl(tmp_path, "train", "image_digits_base", "run_dir=run", "steps=1", "evaluation.prompts=8", cwd=tmp_path)
    assert (train.code, train.err) == (0, "")
    records = []
    for overrides in ((), ("seed=5", "evaluation.prompts=12")):
        done = mmrl(tmp_path, "eval", "run", *overrides, cwd=tmp_path)
        assert (done.code, done.err) == (0, "")
        records.append(json.loads((tmp_path / "run" / "evaluation.json").read_text()))
    file = tmp_path / "run" / "evaluations.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["command"] for line in lines] == [
        ["mmrl", "eval", "run"],
        ["mmrl", "eval", "run", "seed=5", "evaluation.prompts=12"],
    ]
    assert [line["metrics"]["evaluation/n"] for line in lines] == [8, 12]
    for record, line in zip(records, lines, strict=True):
        assert {name: record[name] for name in line["metrics"]} == line["metrics"]
    monkeypatch.setattr("sys.argv", ["evaluations.py", str(file)])
    with pytest.raises(SystemExit) as ended:
        evaluations.main()
    table, second = capsys.readouterr().out, lines[1]["metrics"]
    accuracy, error = second["evaluation/accuracy"], second["evaluation/standard_error"]
    assert ended.value.code == 0
    assert f"| run | seed=5 evaluation.prompts=12 | 5 | 12 | accuracy | {accuracy:.4f} ± {error:.4f} |" in table
    monkeypatch.setattr("sys.argv", ["evaluations.py", str(file), "--again"])
    changed = {**lines[0], "metrics": {**lines[0]["metrics"], "evaluation/accuracy": 9.0}}
    for first, code in ((lines[0], 0), (changed, 1)):
        answers = iter([first, lines[1]])
        monkeypatch.setattr(evaluations, "again", lambda line, answers=answers: next(answers))
        with pytest.raises(SystemExit) as ended:
            evaluations.main()
        assert ended.value.code == code
    assert capsys.readouterr().out.count(" OTHER |") == 1
