"""The script for a first hour on a GPU: its jobs are configurations that load, and what they gave is told."""

import json
import subprocess

import pytest

from mmrl.config import load
from mmrl.settings.recipes import shipped
from scripts.gpu_day import __main__ as day
from scripts.gpu_day import arms, models
from tests.house.layout import ROOT


def every(folder, small):
    questions, prompts = folder / "questions.jsonl", folder / "prompts.txt"
    yield from arms.learning(small)
    yield from arms.language(folder, questions, small)
    yield from arms.images(folder, prompts, small)
    yield from arms.robots(folder, small)


@pytest.mark.parametrize("small", [True, False])
def test_every_job_is_a_configuration(tmp_path, small):
    names = []
    for arm in every(tmp_path, small):
        recipe, *overrides = arm.command(tmp_path / "run")
        config = load(shipped()[recipe], overrides)
        names.append(f"{arm.part} {arm.name}")
        if arm.part == "language":
            assert (config.model.lora is None) == (arm.name == "full weights")
            assert config.engine.packing == (arm.name != "lora, padded")
    assert len(names) == len(set(names)) and {name.split()[0] for name in names} == set(day.PARTS) - {"kernels"}


def test_what_a_job_gave_is_told_and_what_failed_costs_its_row(tmp_path):
    made = day.Day(tmp_path / "out", tmp_path / "scratch", True, 60.0, "")
    made.out.mkdir()
    run = tmp_path / "run"
    run.mkdir()
    steps = [
        {"step": 1, "loss": 1.0, "time/step": 9.0},
        {"step": 2, "loss": 0.5, "time/step": 2.0, "throughput/mfu": 0.4},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    assert day.metrics_of(run, timed=True) == {"time/step": 2.0, "throughput/mfu": 0.4}
    made.command("kernels", "sum", ["-c", "print(1 + 1); print('|a|')"], lambda line: "|" in line)
    made.command("kernels", "breaks", ["-c", "raise SystemExit('no such thing')"], lambda line: True)
    results = json.loads((made.out / "gpu_day.json").read_text())
    assert [row["status"] for row in results] == ["done", "exit 1: no such thing"] and results[0]["lines"] == ["|a|"]
    assert "## kernels: breaks" in (made.out / "gpu_day.md").read_text()


def test_the_first_and_the_last_evaluation_are_what_was_learned(tmp_path):
    rows = [{"step": s, "evaluation/accuracy": a} for s, a in ((0, 0.1), (5, 0.3), (10, 0.8))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert day.metrics_of(tmp_path, timed=False) == {"first evaluation/accuracy": 0.1, "last evaluation/accuracy": 0.8}


def test_questions_differ_in_length_and_show_their_own_image(tmp_path):
    file = models.write_questions(tmp_path, small=False)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    lengths = [len(row["problem"].split()) for row in rows]
    assert len(rows) == 64 and min(lengths) < 120 and max(lengths) > 380
    assert len({(tmp_path / row["images"][0]).read_bytes() for row in rows}) == 64


@pytest.mark.slow
def test_a_part_runs_in_small(tmp_path):
    command = ["bash", "scripts/gpu_day.sh", "--out", str(tmp_path / "out"), "--small", "--parts", "language"]
    environment = {
        "PATH": f"{ROOT}/.venv/bin:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "GPU_DAY_SCRATCH": str(tmp_path / "s"),
    }
    subprocess.run([*command, "--only", "packed|full"], cwd=ROOT, env=environment, check=True, timeout=300)
    results = json.loads((tmp_path / "out" / "gpu_day.json").read_text())
    assert [row["status"] for row in results] == ["done"] * 4
    assert results[3]["lines"][0].startswith("update: ") and any("aten::" in line for line in results[3]["lines"])
    assert results[1]["metrics"]["throughput/update_tokens_per_second"] > 0
