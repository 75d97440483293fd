"""Settings of evaluations while training."""

from __future__ import annotations

from mmrl.settings import Section, option


class Evaluation(Section):
    """Evaluation on held-out prompts during training."""

    every: int = option(50, "steps between two evaluations; 0: only before and after training", unit="steps", ge=0)
    prompts: int = option(256, "the first N held-out prompts", ge=1)
    before: bool = option(True, "evaluate before training too")
    max_unscored: float = option(0.5, "share of unscored rollouts above which the run stops", ge=0, le=1)
    micro_batch: int = option(256, "prompts answered at once on a rank", ge=1)
