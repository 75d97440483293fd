"""Rewards and measures of conversations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from mmrl.rewards.overlap import iou
from mmrl.rewards.types import Reward
from mmrl.rollouts import Conversation, Sample, Spans

RIGHT = 0.5  # least intersection over union of a zoom with the target box


def is_lost(sample: Sample) -> bool:
    """Returns whether the conversation's environment failed."""
    return sample.conversation is not None and sample.conversation.end == "lost"


def environment_return(*, gamma: float = 1.0) -> Reward:
    """The sum of the environment's rewards, that of turn t times gamma^t. None for what is not a conversation."""

    def score(sample: Sample) -> float | None:
        conversation = sample.conversation
        return (
            None if conversation is None else sum(gamma**t * turn.reward for t, turn in enumerate(conversation.turns))
        )

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
        if value is None or isinstance(value, Spans):
            return None
        return float(used_tool(sample.conversation) and value >= 1)

    return score


def used_tool(conversation: Conversation) -> bool:
    """Returns whether a tool was called without an error."""
    return any(turn.tool is not None and turn.error is None for turn in conversation.turns)


def zoomed_right(sample: Sample) -> float:
    """Returns 1.0 where a tool zoomed into the box `target` of the prompt's metadata, else 0.0; NaN without a
    target."""
    target = sample.prompt.metadata.get("target")
    if target is None or sample.conversation is None:
        return math.nan
    boxes = [turn.facts["box"] for turn in sample.conversation.turns if turn.facts.get("image") == 0]
    return float(any(iou(box, target) >= RIGHT for box in boxes))


def conversation_measures(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Computes measures by name, [rollout] each, where all samples are conversations; else none."""
    conversations = [sample.conversation for sample in samples if sample.conversation is not None]
    if len(conversations) < len(samples) or not samples:
        return {}
    measured: dict[str, Callable[[Conversation], float]] = {
        "turns/count": lambda conversation: len(conversation.turns),
        "turns/tool_share": used_tool,
        "turns/error_share": lambda conversation: any(turn.error is not None for turn in conversation.turns),
        "turns/over_limit": lambda conversation: conversation.end in ("turns", "length"),
        "turns/lost": lambda conversation: conversation.end == "lost",
        "turns/reward": lambda conversation: sum(turn.reward for turn in conversation.turns),
    }
    measures = {
        name: torch.tensor([float(measure(conversation)) for conversation in conversations])
        for name, measure in measured.items()
    }
    right = torch.tensor([zoomed_right(sample) for sample in samples])
    return measures if right.isnan().all() else {**measures, "turns/zoomed_right": right}
