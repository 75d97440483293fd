"""Rewards and metrics of multi-turn conversations with an environment."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from mmrl.rewards.overlap import iou
from mmrl.rewards.types import Reward
from mmrl.rollouts import Conversation, Sample, Spans

MIN_IOU = 0.5  # smallest IoU of a zoomed box and the target box that counts as right


def is_lost(sample: Sample) -> bool:
    """Returns whether the conversation's environment failed."""
    return sample.conversation is not None and sample.conversation.end == "lost"


def environment_return(*, gamma: float = 1.0) -> Reward:
    """Builds a reward: the discounted return of the environment, sum over turns t of gamma^t reward_t. None if the
    sample is not a conversation."""

    def score(sample: Sample) -> float | None:
        if sample.conversation is None:
            return None
        return sum(gamma**t * turn.reward for t, turn in enumerate(sample.conversation.turns))

    return score


def tool_bonus(*, success: Reward | None = None) -> Reward:
    """Builds a reward: 1 if a tool was used and the answer is right, else 0 (DeepEyes' conditional tool reward, arXiv
    2505.14362).

    success: the reward that gives 1 to a right answer; default: exact_match. None if the sample is not a conversation.
    """
    from mmrl.rewards.verifiers import exact_match

    success = exact_match() if success is None else success

    def score(sample: Sample) -> float | None:
        """Returns 1 if a tool was used and `success` gives 1 or more, else 0; None without a conversation or number."""
        if sample.conversation is None:
            return None
        value = success(sample)
        if value is None or isinstance(value, Spans):
            return None
        return float(used_tool(sample.conversation) and value >= 1)

    return score


def used_tool(conversation: Conversation) -> bool:
    """Returns whether a tool was called without an error."""
    return any(turn.tool is not None and turn.error is None for turn in conversation.turns)


def zoomed_right(sample: Sample) -> float:
    """Returns 1.0 if a tool zoomed into the box metadata["target"] of the prompt, else 0.0; NaN without a target."""
    target = sample.prompt.metadata.get("target")
    if target is None or sample.conversation is None:
        return math.nan
    # image 0 is the image of the prompt; further images are results of tools
    boxes = [turn.facts["box"] for turn in sample.conversation.turns if turn.facts.get("image") == 0]
    return float(any(iou(box, target) >= MIN_IOU for box in boxes))


def conversation_measures(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Computes metrics by name, [rollout] each; {} unless all samples are conversations."""
    conversations = [sample.conversation for sample in samples if sample.conversation is not None]
    if len(conversations) < len(samples) or not samples:
        return {}
    metrics: dict[str, Callable[[Conversation], float]] = {
        "turns/count": lambda conversation: len(conversation.turns),
        "turns/tool_share": used_tool,
        "turns/error_share": lambda conversation: any(turn.error is not None for turn in conversation.turns),
        "turns/over_limit": lambda conversation: conversation.end in ("turns", "length"),
        "turns/lost": lambda conversation: conversation.end == "lost",
        "turns/reward": lambda conversation: sum(turn.reward for turn in conversation.turns),
    }
    measures = {
        name: torch.tensor([float(metric(conversation)) for conversation in conversations])
        for name, metric in metrics.items()
    }
    zoomed = torch.tensor([zoomed_right(sample) for sample in samples])
    return measures if zoomed.isnan().all() else {**measures, "turns/zoomed_right": zoomed}
