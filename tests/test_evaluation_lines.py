"""What `mmrl eval` of robots leaves behind, and the script that makes a table of it."""

import json

import pytest

from scripts.bench import evaluations
from tests.command_line import mmrl
from tests.engine.parts import ROBOTS
from tests.test_evaluation import PPO, job


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
