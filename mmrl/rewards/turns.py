"""What conversations earn, and what is measured of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from mmrl.rewards.overlap import iou
from mmrl.rewards.types import Reward
from mmrl.rollouts import Conversation, Sample

RIGHT = 0.5  # least overlap (intersection over union) of a zoom with what it should have shown


def is_lost(sample: Sample) -> bool:
    """Whether its environment failed."""
    return sample.conversation is not None and sample.conversation.end == "lost"


def environment_return(*, gamma: float = 1.0) -> Reward:
    """The sum of the environment's rewards, that of turn t times gamma^t. None for what is no conversation."""

    def score(sample: Sample) -> float | None:
        talk = sample.conversation
        return None if talk is None else sum(gamma**t * turn.reward for t, turn in enumerate(talk.turns))

    return score


def tool_bonus(*, success: Reward | None = None) -> Reward:
    """1 where a tool was used and the answer is right, else 0 (DeepEyes' conditional tool reward, arXiv 2505.14362).
    Right is what `success` gives 1; default: exact_match."""
    from mmrl.rewards.verifiers import exact_match

    right = exact_match() if success is None else success

    def score(sample: Sample) -> float | None:
        if sample.conversation is None:
            return None
        value = right(sample)
        return None if value is None else float(used_tool(sample.conversation) and value >= 1)

    return score


def used_tool(talk: Conversation) -> bool:
    """Whether a tool was called and did what it was asked for."""
    return any(turn.tool is not None and turn.error is None for turn in talk.turns)


def zoomed_right(sample: Sample) -> float:
    """1.0 where a tool looked at the box `target` of the prompt's metadata; NaN where there is no target."""
    target = sample.prompt.metadata.get("target")
    if target is None or sample.conversation is None:
        return math.nan
    boxes = [turn.facts["box"] for turn in sample.conversation.turns if turn.facts.get("image") == 0]
    return float(any(iou(box, target) >= RIGHT for box in boxes))


def conversation_measures(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """[rollout] each, where the samples are conversations; else nothing."""
    talks = [sample.conversation for sample in samples if sample.conversation is not None]
    if len(talks) < len(samples) or not samples:
        return {}
    measured: dict[str, Callable[[Conversation], float]] = {
        "turns/count": lambda talk: len(talk.turns),
        "turns/tool_share": used_tool,
        "turns/error_share": lambda talk: any(turn.error is not None for turn in talk.turns),
        "turns/over_limit": lambda talk: talk.end in ("turns", "length"),
        "turns/lost": lambda talk: talk.end == "lost",
        "turns/reward": lambda talk: sum(turn.reward for turn in talk.turns),
    }
    found = {name: torch.tensor([float(measure(talk)) for talk in talks]) for name, measure in measured.items()}
    right = torch.tensor([zoomed_right(sample) for sample in samples])
    return found if right.isnan().all() else {**found, "turns/zoomed_right": right}
