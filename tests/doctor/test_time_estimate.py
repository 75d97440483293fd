"""The time of an update, told without a GPU: operations by hand, and at the sizes of published models."""

import torch
from torch import nn

from mmrl.config import load
from mmrl.doctor.memory_plan import Gpu, memory_lines
from mmrl.doctor.time_estimate import update_flops, update_lines
from mmrl.engine.memory import MemoryModel
from mmrl.settings.recipes import shipped

QWEN3 = "Qwen/Qwen2.5-VL-3B-Instruct"


def job(*overrides):
    return load(shipped()["visual_qa_geometry3k"], [f"model.path={QWEN3}", *overrides])


def of_linear():
    """A layer of 3 x 5, four tokens a rollout: 2 * 4 * 3 * 5 operations forward, as many for the weight's gradient."""
    layer = nn.Linear(3, 5, device="meta")
    return MemoryModel(layer, lambda rows: layer(torch.empty(4 * rows, 3, device="meta")))


def test_operations_are_those_of_all_rollouts_epochs_and_of_recomputation():
    assert update_flops(job("model.activation_checkpointing=false"), of_linear(), 1) == 64 * 8 * 240
    assert update_flops(job(), of_linear(), 1) == 64 * 8 * (240 + 120)
    assert update_flops(job("algorithm.epochs=3"), of_linear(), 4) == 64 * 8 * 360 * 3 / 4


def test_seconds_are_operations_over_a_share_of_the_peak():
    config = job("rollout.prompts=1000000", "rollout.group_size=1000")
    h100, l40s = update_lines(config, of_linear(), 1, ["h100", "80 GiB", "l40s"])  # of the second no peak is known
    assert h100.startswith("h100: 0.00091 s an update (0.00036 PFLOP a rank, at an assumed 40% of 989 TFLOP/s, ")
    assert l40s.startswith("l40s: 0.00249 s an update (0.00036 PFLOP a rank, at an assumed 40% of 362 TFLOP/s, ")


def test_a_dry_run_says_it_for_a_model_of_3b():
    """Eight operations a weight and token, and attention: 512 rollouts of 3072 tokens, 3.09e9 weights."""
    lines = memory_lines(lambda more: job(*more), 8, [Gpu.parse("h100"), Gpu.parse("80")])
    (line,) = [line for line in lines if "an update (" in line]
    petaflops = float(line.split("(")[1].split()[0])
    plain = 8 * 3.09e9 * 3072 * 512 / 8 / 1e15
    assert plain < petaflops < 1.5 * plain


def test_without_a_known_peak_nothing_is_counted():
    def refused(rows):
        raise AssertionError("operations were counted")

    assert update_lines(job(), MemoryModel(nn.Linear(1, 1, device="meta"), refused), 1, ["24 GiB"]) == []
