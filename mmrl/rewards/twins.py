"""Prompts with a twin, a second prompt that differs in a word, and a reward that compares an image under both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from mmrl.errors import UserError
from mmrl.rewards.types import BatchReward, Reward, Score, load_object, to_scores
from mmrl.rollouts import Prompt, Sample


def twin_of(prompt: Prompt) -> Prompt:
    """Returns the prompt in metadata["twin"], which has `prompt` as its own twin.

    The twin is a string or a Prompt. Raises UserError if there is none.
    """
    twin = prompt.metadata.get("twin")
    metadata = {key: value for key, value in prompt.metadata.items() if key != "twin"}
    if isinstance(twin, str):
        twin = replace(prompt, id=f"{prompt.id}-twin", text=twin, metadata=metadata)
    if not isinstance(twin, Prompt):
        raise UserError(
            f"prompt {prompt.id} has no twin: rollout.twins=true and twin_margin need metadata['twin'], a string that "
            "differs in a word, such as the key `twin` of a .jsonl file or task.data.twins=true"
        )
    return replace(twin, metadata=twin.metadata | {"twin": replace(prompt, metadata=metadata)})


class TwinMargin:
    """The score of another reward under the image's prompt, minus the score under the prompt's twin (FocusDiff, arXiv
    2506.05501, reconstructed).

    reward, options: name and options of the other reward, which scores samples one by one or in batches. The score is
    None if one of the two scores is.
    """

    scope: Literal["sample"] = "sample"

    def __init__(self, *, reward: str, options: dict[str, Any] | None = None):
        self.reward: Reward | BatchReward = load_object("mmrl.rewards.registry:build")(reward, options)
        if isinstance(self.reward, BatchReward) and self.reward.scope != "sample":
            raise ValueError(
                f"twin_margin cannot use {reward}, which compares samples with one another; name another reward"
            )

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        with_twins = [replace(sample, prompt=twin_of(sample.prompt)) for sample in samples]
        pairs = zip(self._scores(list(samples)), self._scores(with_twins), strict=True)
        return [None if score is None or twin is None else score - twin for score, twin in pairs]

    def _scores(self, samples: list[Sample]) -> list[Score]:
        """Scores samples by the reward that the option `reward` names."""
        if isinstance(self.reward, BatchReward):
            return to_scores(self.reward.score(samples), len(samples))
        return to_scores([self.reward(sample) for sample in samples], len(samples))
