"""The commands do what they say, on a model and a batch small enough for a test."""

import json
import math
import re
import subprocess
import sys

import pytest
import yaml
from transformers import AutoModelForImageTextToText, AutoProcessor

from mmrl.config import load, to_yaml
from tests.helpers.command_line import GRPO, ROOT, TINY, WARM_START, mmrl


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """A run directory made by the real command line."""
    run = tmp_path_factory.mktemp("cli") / "warm"
    command = [sys.executable, "-m", "mmrl", "train", WARM_START, *TINY, f"run_dir={run}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert f"run directory {run}" in done.stdout
    return run


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_directory_is_complete_in_itself(warm):
    config = load(WARM_START, [*TINY, f"run_dir={warm}"])
    assert (warm / "config.yaml").read_text() == to_yaml(config)
    assert load(warm / "config.yaml") == config
    assert {"python", "mmrl", "torch", "transformers", "deepspeed"} <= json.loads(
        (warm / "versions.json").read_text()
    ).keys()
    assert not (warm / "tensorboard").exists()  # nobody asked for it
    assert (warm / "samples" / "evaluation-000002.html").is_file()
    rows = metrics(warm)
    assert [row["step"] for row in rows] == [0, 1, 2, 2]
    for row in rows[1:3]:
        assert {"loss", "entropy", "grad_norm", "lr", "time/rollout", "time/update"} <= row.keys()
        assert math.isfinite(row["loss"]) and row["grad_norm"] > 0 and row["updates_skipped"] == 0
    for row in (rows[0], rows[3]):
        assert row["evaluation/n"] == 8 and {"evaluation/accuracy", "evaluation/accuracy/sum"} <= row.keys()


def test_final_weights_load_in_transformers(warm):
    model = AutoModelForImageTextToText.from_pretrained(warm / "final")
    assert AutoProcessor.from_pretrained(warm / "final").tokenizer.eos_token_id is not None
    assert not any(weight.isnan().any() for weight in model.parameters())


def test_eval_writes_protocol_seed_and_versions(warm, tmp_path):
    result = mmrl(tmp_path, "eval", warm, WARM_START, *TINY, "seed=3")
    assert (result.code, result.err) == (0, "")
    record = json.loads((warm / "evaluation.json").read_text())
    assert record["evaluation/n"] == 8 and record["model"] == str(warm)
    assert record["protocol"]["seed"] == 3 and record["protocol"]["evaluation"]["temperature"] == 0
    assert record["protocol"]["task"]["data"]["type"] == "digits"
    assert record["versions"] == json.loads((warm / "versions.json").read_text())
    assert record["evaluation/accuracy"] == metrics(warm)[-1]["evaluation/accuracy"]  # the same weights and prompts
    assert re.search(r"accuracy +\d\.\d{4}", result.out)


def test_eval_takes_a_run_directory_whose_name_yaml_would_read_otherwise(warm, tmp_path):
    (tmp_path / "lr: 3 #2").symlink_to(warm)
    result = mmrl(tmp_path, "eval", "lr: 3 #2", WARM_START, *TINY, "rollout.max_prompt_length=999", cwd=str(tmp_path))
    assert (result.code, result.err) == (0, "")


def test_sample_writes_images_and_answers(warm, tmp_path):
    result = mmrl(tmp_path, "sample", warm, WARM_START, *TINY, "--count", "5")
    assert (result.code, result.err) == (0, "")
    page = (warm / "samples.html").read_text()
    assert page.count("<tr>") == 1 + 5 and page.count("data:image/png;base64,") == 5
    assert len(result.out.splitlines()) == 5 + 1


def test_grpo_logs_what_a_run_is_judged_by(warm, tmp_path):
    run, random = tmp_path / "run", "task.rewards=[{name: exact_match}, {name: random, weight: 0.5}]"
    grpo = [*GRPO, "algorithm.minibatches=2", "log.samples_every=1"]
    origin = ["model.build=null", f"model.path={warm / 'final'}"]
    result = mmrl(tmp_path, "train", WARM_START, *TINY, *grpo, *origin, random, f"run_dir={run}", "optim.lr=1e-2")
    assert (result.code, result.err) == (0, "")
    first, second = metrics(run)[1:3]
    named = {"reward/exact_match", "reward/random", "unscored", "accuracy", "advantages/zero_variance_groups"}
    named |= {"entropy", "surrogate/ratio_gap", "surrogate/clip_low", "surrogate/clip_high", "grad_norm", "lr", "loss"}
    named |= {"response/length", "response/truncated", "time/rollout", "time/update", "time/step"}
    named |= {"throughput/rollouts_per_second", "memory/host_gib"}
    for row in (first, second):
        assert named <= row.keys()
        assert 0 <= row["reward/random"] <= 1 and row["unscored"] == 0
        assert 1 <= row["response/length"] <= 4 and 0 <= row["response/truncated"] <= 1
        assert row["throughput/rollouts_per_second"] == pytest.approx(32 / row["time/step"])
    assert first["grad_norm"] > 0 and first["entropy"] > 0
    assert second["surrogate/ratio_gap_max"] > 0  # the second minibatch follows an update
    page = (run / "samples" / "train-000001.html").read_text()
    assert "<th>random</th>" in page and "<th>advantage</th>" in page


def test_the_ratio_is_exactly_one_before_the_first_update(warm, tmp_path):
    grpo = [*GRPO, "task.rewards=[{name: random}]", "engine.micro_batch=5"]
    # Weights that can hardly move, but whose old_logp is computed as for any run with several updates.
    grpo += ["steps=1", "optim.lr=1e-30", "algorithm.epochs=2"]
    result = mmrl(tmp_path, "train", WARM_START, *TINY, *grpo, f"run_dir={tmp_path / 'run'}")
    assert (result.code, result.err) == (0, "")
    row = metrics(tmp_path / "run")[1]
    assert row["surrogate/ratio_gap_max"] == 0.0 and row["surrogate/ratio"] == 1.0 and row["grad_norm"] > 0


def test_dry_run_prints_the_arithmetic_and_keeps_nothing(tmp_path):
    grpo = [*GRPO, "algorithm.minibatches=2", "engine.micro_batch=6", "engine.micro_tokens=90"]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    arguments = ["train", WARM_START, *TINY, *grpo, f"run_dir={tmp_path / 'run'}", "--dry-run"]
    result = mmrl(tmp_path, *arguments, TMPDIR=str(scratch))
    assert (result.code, result.err) == (0, "")
    assert "prompts 8 x group size 4 = 32 rollouts" in result.out
    assert (
        "32 rollouts = 1 ranks x 2 minibatches x 16 rollouts, replayed as 3 micro-batches of up to 6, "
        "or more of up to 90 tokens\n"
    ) in result.out
    assert "MiB" in result.out and "step 1/1" in result.out
    assert not (tmp_path / "run").exists() and list(scratch.iterdir()) == []


def test_a_dry_run_does_not_run_a_warm_start(tmp_path):
    """Nor the warm start's own, whose beginning is where the weights come from here."""
    files = {
        "first": f"extends: {WARM_START}",
        "second": "extends: first.yaml\nmodel: {build: null, warm_start: first.yaml}",
    }
    files["last"] = "extends: second.yaml\nmodel: {warm_start: second.yaml}"
    for name, text in files.items():
        (tmp_path / f"{name}.yaml").write_text(f"{text}\nrun_dir: {tmp_path / name}\n")
    result = mmrl(tmp_path, "train", tmp_path / "last.yaml", *TINY, *GRPO, "--dry-run")
    assert (result.code, result.err) == (0, "")
    assert result.out.count("has not been run") == 2 and "dry run: one step done" in result.out
    assert not any((tmp_path / name).exists() for name in files)


def test_print_config_is_complete_and_stops(tmp_path):
    result = mmrl(tmp_path, "train", WARM_START, "optim.lr=3e-5", f"run_dir={tmp_path / 'run'}", "--print-config")
    assert (result.code, result.err) == (0, "")
    printed = yaml.safe_load(result.out)
    assert printed["optim"]["lr"] == 3e-5 and printed["algorithm"]["epochs"] == 1
    assert (
        printed["task"]["rewards"]
        == [{"name": "exact_match", "weight": 1.0, "signature": "mmrl", "total": "mean", "on_timeout": "unscored"}]
        and "surrogate" not in result.out
    )
    assert not (tmp_path / "run").exists()


def test_doctor_says_what_is_there_and_what_is_not(tmp_path):
    result = mmrl(tmp_path, "doctor")
    assert (result.code, result.err) == (0, "")
    lines = dict(line.split(maxsplit=1) for line in result.out.splitlines())
    assert lines["python"] == sys.version.split()[0]
    assert lines["torch"][0].isdigit() and {"transformers", "deepspeed", "device"} <= lines.keys()
    said = [line.split(maxsplit=1)[1] for line in result.out.splitlines() if line.startswith("kernels ")]
    assert [line.split(":")[0] for line in said] == ["cpu", "cuda"] and "numerically right" in said[0]


def test_a_machine_without_a_compiler_runs_and_one_line_says_so(tmp_path):
    recipe, folder = ROOT / "tests" / "whole_runs" / "tiny_images.yaml", tmp_path / "run"
    nothing = {"CXX": "no-such-compiler", "MMRL_KERNEL_CACHE": str(tmp_path / "cache")}
    settings = ["steps=1", f"run_dir={folder}", "checkpoint.best=false"]
    result = mmrl(tmp_path, "train", recipe, *settings, **nothing)
    assert (result.code, result.err) == (0, "")
    said = [line for line in result.out.splitlines() if "kernels" in line]
    assert said == ["no compiled kernels for cpu, plain PyTorch is used instead: no C++ compiler found"]
    refused = mmrl(
        tmp_path, "train", recipe, *settings, f"run_dir={tmp_path / 'other'}", "kernels.backend=cpu", **nothing
    )
    assert (refused.code, refused.err) == (
        2,
        "mmrl: kernels.backend=cpu: no C++ compiler found; correct this, or set kernels.backend=auto\n",
    )


def test_help_answers_without_the_heavy_imports():
    code = "import sys; from mmrl.cli.main import parser; print(parser().format_help()); print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "train" in out and "doctor" in out
    assert not {"torch", "transformers", "deepspeed", "omegaconf", "pydantic"} & set(out.split("\n")[-2].split())


def test_a_run_is_evaluated_and_sampled_with_its_own_configuration(warm, tmp_path):
    """Words may stand in any order; weights that the run wrote know their configuration too."""
    result = mmrl(tmp_path, "eval", warm, "seed=3", "evaluation.prompts=6")
    assert (result.code, result.err) == (0, "")
    record = json.loads((warm / "evaluation.json").read_text())
    assert record["evaluation/n"] == 6 and record["protocol"]["seed"] == 3
    assert record["protocol"]["task"]["data"]["train_size"] == 100  # of the run, not of the recipe
    result = mmrl(tmp_path, "sample", "--count", "3", warm / "final", "seed=3")
    assert (result.code, result.err) == (0, "") and len(result.out.splitlines()) == 3 + 1
    assert (warm / "final" / "samples.html").unlink() is None
    result = mmrl(tmp_path, "eval", warm, "seed=3", WARM_START, "also.yaml")
    assert (result.code, result.err) == (
        2,
        f"mmrl: give one configuration, not 2: {WARM_START} also.yaml; overrides are KEY=VALUE\n",
    )
    result = mmrl(tmp_path, "eval", warm, "none.yaml")
    assert (result.code, result.err) == (2, "mmrl: no configuration file none.yaml\n")


def test_a_run_says_how_it_ended(warm, tmp_path):
    assert json.loads((warm / "end.json").read_text()) == {
        "state": "finished",
        "sentence": "It reached its end, step 2.",
    }
    nan = [
        "optim.lr=1e30",
        "optim.clip_grad_norm=0",
        "engine.max_bad_steps=1",
        "steps=4",
        f"run_dir={tmp_path / 'run'}",
    ]
    result = mmrl(tmp_path, "train", WARM_START, *TINY, *nan)
    assert result.code == 2
    said = json.loads((tmp_path / "run" / "end.json").read_text())
    assert said["state"] == "failed" and said["sentence"].startswith("It ended at step ")
    assert result.err.removeprefix("mmrl: ").strip() in said["sentence"]
