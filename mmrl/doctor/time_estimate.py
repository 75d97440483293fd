"""Estimates how long the update of a step takes on given GPUs, from operations counted without weights."""

from __future__ import annotations

from collections.abc import Sequence

from mmrl.config import Config
from mmrl.engine.device_peaks import PEAKS
from mmrl.engine.flops import Flops, count
from mmrl.engine.memory import MemoryModel
from mmrl.settings import plain

REACHED = 0.4  # share of a GPU's peak that an update is assumed to reach; small micro-batches and models reach less


def update_flops(config: Config, memory: MemoryModel, ranks: int) -> float:
    """Returns the operations of a rank in one step's update, of rollouts as long as they may get. They hold what
    activation checkpointing computes again."""
    of_rollout: Flops = count(lambda: memory.train(1))
    again = of_rollout.forward if plain(config.model).get("activation_checkpointing") else 0.0
    return (of_rollout.total + again) * config.rollouts_per_step * config.algorithm.epochs / ranks


def update_lines(config: Config, memory: MemoryModel, ranks: int, gpus: Sequence[str]) -> list[str]:
    """Returns a line on the time of an update for each GPU whose peak is known."""
    known = [gpu for gpu in gpus if gpu in PEAKS]
    flops = update_flops(config, memory, ranks) if known else 0.0
    lines = []
    for gpu in known:
        peak = PEAKS[gpu].flops(config.model.dtype)
        lines.append(
            f"{gpu}: {flops / (REACHED * peak):.3g} s an update ({flops / 1e15:.3g} PFLOP a rank, at an assumed "
            f"{REACHED:.0%} of {peak / 1e12:.0f} TFLOP/s, all rollouts at their longest); rollouts and rewards come on "
            "top"
        )
    return lines
