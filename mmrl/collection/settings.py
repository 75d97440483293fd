"""Settings of collection: prompts per step, rollouts per prompt, and dynamic sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import model_validator

from mmrl.collection.extra_sources import ExtraSource
from mmrl.prompts.sampler import Permutation, PromptSampler
from mmrl.settings import Section, option

if TYPE_CHECKING:
    from mmrl.generation.settings import GeneratorSettings, RolloutWorkers


class DynamicSampling(Section):
    """Groups without a learning signal are replaced by new ones until the batch is full (DAPO, arXiv 2503.14476)."""

    max_rounds: int = option(
        4, "largest number of generation rounds per step; then it continues with the groups that it has", ge=1
    )
    low: float | None = option(None, "keep groups whose mean accuracy is at least this")
    high: float | None = option(None, "keep groups whose mean accuracy is at most this")
    shared: bool = option(
        True,
        "ranks with surplus groups that have a signal give them to other ranks, so that the batch does not depend on "
        "the number of ranks; false: each rank samples until its own share is full",
    )

    @model_validator(mode="after")
    def _check_range(self) -> DynamicSampling:
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(
                f"low={self.low} is above high={self.high}, so no group would be kept; lower low or raise high"
            )
        return self


class Demonstrations(Section):
    """Settings of `rollout` for algorithms that train on demonstrations."""

    prompts: int = option(16, "prompts per step, over all ranks", ge=1)
    sampler: PromptSampler = option(Permutation(), "order of the prompts")
    max_idle_steps: int = option(
        50,
        "steps in a row with a gradient of exactly 0, for example because all rewards of every group are equal, after "
        "which the run ends; after a fifth of them a warning is printed",
        unit="steps",
        ge=1,
    )

    @property
    def rollouts_per_prompt(self) -> int:
        return 1

    @property
    def generated_at_once(self) -> int | None:
        return None

    @property
    def scores_in_background(self) -> bool:
        return False

    @property
    def unscored_limit(self) -> int:
        """Returns the number of consecutive unscored steps after which the run ends."""
        return 1

    @property
    def producer(self) -> GeneratorSettings | RolloutWorkers | None:
        """Returns settings of the generator that makes rollouts in place of the policy; None: the policy makes them."""
        return None

    @property
    def filters(self) -> DynamicSampling | None:
        return None

    @property
    def paired(self) -> bool:
        """Returns whether half of a group answers a prompt and half its twin."""
        return False

    @property
    def extra_sources(self) -> list[ExtraSource]:
        return []


class Independent(Demonstrations):
    """Settings of `rollout` for algorithms that do not compare rollouts of the same prompt."""

    group_size: int = option(1, "rollouts per prompt", ge=1)
    micro_batch: int | None = option(None, "rollouts that a rank generates at once; null: all", ge=1)
    max_unscored_steps: int = option(
        3, "steps in a row in which no rollout could be scored, after which the run ends", unit="steps", ge=1
    )
    score_in_background: bool = option(False, "score one micro-batch while the next is generated")
    extras: list[ExtraSource] = option([], "extra sources of rollouts, besides newly sampled ones")

    @property
    def rollouts_per_prompt(self) -> int:
        return self.group_size

    @property
    def generated_at_once(self) -> int | None:
        return self.micro_batch

    @property
    def scores_in_background(self) -> bool:
        return self.score_in_background

    @property
    def unscored_limit(self) -> int:
        return self.max_unscored_steps

    @property
    def extra_sources(self) -> list[ExtraSource]:
        return self.extras


class Groups(Independent):
    """Settings of `rollout` for algorithms that compare a group of rollouts of the same prompt."""

    group_size: int = option(8, "rollouts per prompt", ge=1)
    dynamic_sampling: DynamicSampling | None = option(None, "replace groups without a learning signal; null: keep all")
    twins: bool = option(
        False,
        "half of a group answers the prompt, half its twin, which differs in a word (FocusDiff)",
    )

    @model_validator(mode="after")
    def _check_halves(self) -> Groups:
        if self.twins and self.group_size % 2:
            raise ValueError(f"group_size={self.group_size} is odd, and each twin gets half of a group; make it even")
        return self

    @property
    def paired(self) -> bool:
        return self.twins

    @property
    def filters(self) -> DynamicSampling | None:
        return self.dynamic_sampling


CollectionSettings = type[Demonstrations]  # a separate name: inside a choice, `type` is a key
