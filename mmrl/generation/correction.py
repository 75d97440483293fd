"""Importance-sampling correction for tokens whose log-probabilities in a generator, such as vLLM, differ from the
trainer's."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmrl.core.correction import correction_weight
from mmrl.generation.settings import Correction
from mmrl.rollouts import ROUTING_DIFFERS, Replay, Rollouts, old_logp, require


def apply_correction(micro: Rollouts, replay: Replay, correction: Correction) -> dict[str, Tensor]:
    """Multiplies `replay.weight` by the correction weights of a micro-batch, and returns statistics by metric name.

    The weights are truncated ratios of the trainer's to the generator's probabilities, 0 for rejected tokens, and 1 for
    rollouts that the trainer itself sampled (NaN in `micro.behaviour_logp`).
    """
    old = old_logp(micro, replay)
    sampled = require(micro.behaviour_logp, "likelihoods of a generator").to(old.device)
    sampled = sampled.where(~sampled.isnan(), old)  # NaN: the trainer itself sampled the rollout
    options: dict[str, Any] = {"weight": None}
    if correction.weight is not None:
        options = {"weight": correction.weight.level, "cap": correction.weight.cap}
    if correction.reject is not None:
        options |= {"reject": correction.reject.level, "low": correction.reject.low, "high": correction.reject.high}
    weight, stats = correction_weight(old, sampled, micro.mask.to(old.device), **options)
    weight = weight.to(replay.logp.device)
    replay.weight = weight if replay.weight is None else replay.weight * weight
    if (differs := ROUTING_DIFFERS.get(replay)) is not None:
        stats[ROUTING_DIFFERS.name] = differs
    return {f"correction/{name}": value for name, value in stats.items()}
