"""Estimates how long the policy update of a step takes on given GPUs, from a count of operations without weights."""

from __future__ import annotations

from collections.abc import Sequence

from mmrl.config import Config
from mmrl.engine.device_peaks import PEAKS
from mmrl.engine.flops import Flops, count
from mmrl.engine.memory import MemoryModel
from mmrl.settings import plain

ASSUMED_UTILIZATION = 0.4  # of the GPU's peak FLOP/s; small micro-batches and models reach less


def update_flops(config: Config, memory: MemoryModel, ranks: int) -> float:
    """Returns the floating-point operations of one rank in the update of a step, if all rollouts have the maximum
    length. The second forward pass of activation checkpointing is included."""
    flops_per_rollout: Flops = count(lambda: memory.train(1))
    recomputed = flops_per_rollout.forward if plain(config.model).get("activation_checkpointing") else 0.0
    return (flops_per_rollout.total + recomputed) * config.rollouts_per_step * config.algorithm.epochs / ranks


def update_lines(config: Config, memory: MemoryModel, ranks: int, gpus: Sequence[str]) -> list[str]:
    """Returns a line on the time of an update for each GPU in `gpus` whose peak FLOP/s is known."""
    known_gpus = [gpu for gpu in gpus if gpu in PEAKS]
    flops = update_flops(config, memory, ranks) if known_gpus else 0.0
    lines = []
    for gpu in known_gpus:
        peak = PEAKS[gpu].flops(config.model.dtype)
        lines.append(
            f"{gpu}: {flops / (ASSUMED_UTILIZATION * peak):.3g} s an update ({flops / 1e15:.3g} PFLOP a rank, at an "
            f"assumed {ASSUMED_UTILIZATION:.0%} of {peak / 1e12:.0f} TFLOP/s, all rollouts at their maximum length), "
            "without the time for rollouts and rewards"
        )
    return lines
