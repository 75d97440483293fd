"""Samplers of prompts: the order in which a run reads its training prompts. A sampler may adapt to earlier outcomes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import PrivateAttr

from mmrl.settings import Choice

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Outcome:
    """The rewards and accuracies of one sampled prompt, over all rollouts of its new group."""

    prompt: int  # its index in the training set
    rewards: tuple[float, ...]  # the combined reward of each rollout; NaN where it could not be scored
    accuracies: tuple[float, ...]  # NaN where unknown


class PromptSampler(Choice):
    """The order of prompts. All ranks hold the same sampler in the same state, and `draw` depends on nothing else.

    State lives in private attributes (their names begin with an underscore). If rollouts are made ahead of time or over
    several steps, prompts are sampled before the outcomes of the last steps are known.
    """

    title: ClassVar[str] = "prompt sampler"
    changes: ClassVar[frozenset[str]] = frozenset({"prompts"})  # what the sampler changes in a step
    kinds: ClassVar[dict[str, str]] = {
        "permutation": "mmrl.prompts.sampler:Permutation",
        "success_weighted": "mmrl.prompts.curriculum:SuccessWeighted",
        "success_window": "mmrl.prompts.curriculum:SuccessWindow",
        "skip_flat": "mmrl.prompts.curriculum:SkipFlat",
        "rollback": "mmrl.prompts.curriculum:Rollback",
        "volatility": "mmrl.prompts.curriculum:Volatility",
        "category_bandit": "mmrl.prompts.mixture:CategoryBandit",
        "task_quotas": "mmrl.prompts.mixture:TaskQuotas",
    }
    test: ClassVar[str] = "tests/prompts/test_sampler.py"

    def inspect(self, source: Any) -> None:
        """Reads the prompts before `start`, for samplers that sort them by content. source: a sequence of Prompt."""

    @abstractmethod
    def start(self, size: int, seed: int) -> None:
        """Resets the sampler for a training set of `size` prompts."""

    @abstractmethod
    def draw(self, count: int) -> list[int]:
        """Samples the indices of the next `count` prompts; an index may occur more than once."""

    @abstractmethod
    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Receives the outcomes of the prompts of a rollout round, in the order in which they were sampled, also of
        groups that dynamic sampling drops."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, which `load` restores: numbers, strings, lists and dicts of them. Later
        draws do not change the returned value."""

    @abstractmethod
    def load(self, state: dict[str, Any]) -> None:
        """Restores what `state` returned."""


class Permutation(PromptSampler):
    """Every prompt once an epoch, in a new random order each epoch."""

    equation: ClassVar[str] = "a random permutation, seeded by the run's seed and the epoch"
    source: ClassVar[str] = "random reshuffling"

    type: str = "permutation"
    _size: int = PrivateAttr(0)
    _seed: int = PrivateAttr(0)
    _num_drawn: int = PrivateAttr(0)
    _epoch: tuple[int, Any] = PrivateAttr((-1, None))  # the last epoch that was used, and its order

    def start(self, size: int, seed: int) -> None:
        self._size, self._seed, self._num_drawn, self._epoch = size, seed, 0, (-1, None)

    def draw(self, count: int) -> list[int]:
        positions = range(self._num_drawn, self._num_drawn + count)
        self._num_drawn += count
        return [int(self._order(p // self._size)[p % self._size]) for p in positions]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {"drawn": self._num_drawn}

    def load(self, state: dict[str, Any]) -> None:
        self._num_drawn = state["drawn"]

    def _order(self, epoch: int) -> np.ndarray:
        """Returns the order of an epoch, [prompt]."""
        import numpy as np

        if self._epoch[0] != epoch:
            self._epoch = (epoch, np.random.default_rng([self._seed, epoch]).permutation(self._size))
        return self._epoch[1]
