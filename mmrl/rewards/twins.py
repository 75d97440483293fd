"""Prompts with a twin, which differs in a word, and the reward of an image under its prompt less that under the
twin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from mmrl.errors import UserError
from mmrl.rewards.types import BatchReward, Reward, Score, load_object, numbers
from mmrl.rollouts import Prompt, Sample


def twin_of(prompt: Prompt) -> Prompt:
    """Returns the prompt in metadata["twin"], a string or a prompt, with this prompt as its twin. Raises UserError
    without one."""
    other = prompt.metadata.get("twin")
    metadata = {key: value for key, value in prompt.metadata.items() if key != "twin"}
    if isinstance(other, str):
        other = replace(prompt, id=f"{prompt.id}-twin", text=other, metadata=metadata)
    if not isinstance(other, Prompt):
        raise UserError(
            f"prompt {prompt.id} has no twin: rollout.twins=true and twin_margin need metadata['twin'], a string that "
            "differs in a word, such as the key `twin` of a .jsonl file or task.data.twins=true"
        )
    return replace(other, metadata=other.metadata | {"twin": replace(prompt, metadata=metadata)})


class TwinMargin:
    """The score of another reward under the image's prompt, less that under the prompt's twin (FocusDiff, arXiv
    2506.05501, reconstructed).

    reward, options: of a reward that scores samples one by one or in batches. None where either could not be scored.
    """

    scope: Literal["sample"] = "sample"

    def __init__(self, *, reward: str, options: dict[str, Any] | None = None):
        self.reward: Reward | BatchReward = load_object("mmrl.rewards.registry:build")(reward, options)
        if isinstance(self.reward, BatchReward) and self.reward.scope != "sample":
            raise ValueError(f"twin_margin can not be of {reward}, which compares samples with one another")

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        others = [replace(sample, prompt=twin_of(sample.prompt)) for sample in samples]
        scores, twin_scores = (self._of(part) for part in (list(samples), others))
        return [None if a is None or b is None else a - b for a, b in zip(scores, twin_scores, strict=True)]

    def _of(self, samples: list[Sample]) -> list[Score]:
        if isinstance(self.reward, BatchReward):
            return numbers(self.reward.score(samples), len(samples))
        return numbers([self.reward(sample) for sample in samples], len(samples))
