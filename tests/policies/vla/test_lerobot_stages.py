"""LeRobot policies through the trainer under every ZeRO stage, whole, as LoRA and in bf16: the ratio is exactly 1
before the first update, what shall learn does, and LeRobot acts with what was saved."""

import json
import os

import pytest
import torch

from tests.policies.vla.test_lerobot_lora import assert_equal_actions, lerobots
from tests.policies.vla.test_lerobot_policy import KINDS, lerobot, load
from tests.whole_runs.parts import ROBOTS, call, make, metrics, ratio_gaps, release

FLOW = "{type: flow, steps: 3, evaluation_steps: 3, likelihood: {window: {type: random, size: 1}}}"
RUN = ["steps=2", "algorithm.epochs=2", "task.rewards=[{name: random}]", "task.train_size=30"]
RUN += ["model.build=null", "action.chunk=4", f"action.head={FLOW}", "optim.lr=1e-2"]
LORA, HALF = "model.lora={rank: 2, alpha: 8}", "model.dtype=bfloat16"
MODES = {"whole": [], "lora": [LORA], "bf16": [HALF], "bf16 lora": [LORA, HALF]}


def cases():
    for kind in KINDS:
        for mode, options in MODES.items():
            for stage in (1, 2) if HALF in options else (0, 1, 2):  # bf16 needs an optimizer with weights of its own
                yield pytest.param(kind, stage, options, id=f"{kind}-{stage}-{mode}")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    from tests.policies.vla import tiny_lerobot

    folder = tmp_path_factory.mktemp("stages")
    with pytest.MonkeyPatch.context() as changed:
        tiny_lerobot.shrink(changed, folder)
        for kind in KINDS:
            tiny_lerobot.write(folder / kind, kind)
        yield folder


def trained(folder, checkpoint, *options):
    """The largest gaps of the ratio from 1, by step and update, and the names of parameters that have changed."""
    trainer = make(folder, *RUN, f"model.path={checkpoint}", *options, base=ROBOTS)
    gaps = ratio_gaps(trainer)
    before = {n: p.detach().clone() for n, p in trainer.policy.module.named_parameters()}
    trainer.train()
    release(trainer)
    after = dict(trainer.policy.module.named_parameters())
    return gaps, {n for n in after if not torch.equal(before[n], after[n])}


def assert_learned(gaps, changed, options):
    assert gaps[0, 0] == gaps[1, 0] == 0 < min(gaps[0, 1], gaps[1, 1])
    assert any("action_out_proj" in name for name in changed)
    assert all(("lora_" in name) == (LORA in options) for name in changed)


@lerobot
@pytest.mark.parametrize(("kind", "stage", "options"), cases())
def test_the_ratio_is_one_and_lerobot_acts_with_what_was_saved(checkpoints, tmp_path, kind, stage, options):
    gaps, changed = trained(tmp_path, checkpoints / kind, f"engine.zero_stage={stage}", *options)
    assert_learned(gaps, changed, options)
    rows = [row for row in metrics(tmp_path) if "loss" in row]
    assert len(rows) == 2 and all(row["grad_norm"] > 0 and row["updates_skipped"] == 0 for row in rows)
    final = tmp_path / "final"
    assert (final / "adapter_model.safetensors").is_file() == (LORA in options)
    assert_equal_actions(load(final), lerobots(final))


def on_a_rank(folder, kind, options):
    from tests.policies.vla import tiny_lerobot

    rank = os.environ["RANK"]
    with pytest.MonkeyPatch.context() as changed:
        tiny_lerobot.shrink(changed, folder / rank)
        gaps, names = trained(folder / "run", folder / kind, *options)
    told = {"gaps": {"-".join(map(str, place)): gap for place, gap in gaps.items()}, "changed": sorted(names)}
    (folder / f"{rank}.json").write_text(json.dumps(told))


@lerobot
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "stage", "mode"), [("smolvla", 2, "bf16"), ("pi0", 1, "bf16 lora"), ("pi05", 2, "lora")]
)
def test_two_ranks(tmp_path, kind, stage, mode):
    from tests.policies.vla import tiny_lerobot

    options = [*MODES[mode], f"engine.zero_stage={stage}"]
    with tiny_lerobot.written(tmp_path / kind, kind):
        call(on_a_rank, tmp_path, kind, options, log=tmp_path / "log", ranks=2, timeout=400)
        told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
        assert told[0]["changed"] == told[1]["changed"]
        for rank in told:
            gaps = {tuple(map(int, place.split("-"))): gap for place, gap in rank["gaps"].items()}
            assert_learned(gaps, rank["changed"], options)
        assert_equal_actions(load(tmp_path / "run/final"), lerobots(tmp_path / "run/final"))
