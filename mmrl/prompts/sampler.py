"""Samplers of prompts. A sampler may adapt to the outcomes of earlier prompts."""

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
    """The outcome of one prompt that was drawn, over all rollouts of its fresh group."""

    prompt: int  # its index in the task's training source
    rewards: tuple[float, ...]  # the combined reward of each rollout; NaN where it could not be scored
    accuracies: tuple[float, ...]  # NaN where unknown


class PromptSampler(Choice):
    """An order of prompts. All ranks hold the same sampler in the same state: `draw` depends on nothing else.

    State lives in private attributes (their names begin with an underscore). With rollouts that are made ahead of time
    or over several steps, prompts are drawn before the outcomes of the last steps are known.
    """

    title: ClassVar[str] = "prompt sampler"
    changes: ClassVar[frozenset[str]] = frozenset({"prompts"})  # in a step, by itself
    kinds: ClassVar[dict[str, str]] = {
        "permutation": "mmrl.prompts.sampler:Permutation",
        "success_weighted": "mmrl.prompts.curriculum:SuccessWeighted",
        "success_window": "mmrl.prompts.curriculum:SuccessWindow",
        "skip_flat": "mmrl.prompts.curriculum:SkipFlat",
        "volatility": "mmrl.prompts.curriculum:Volatility",
        "category_bandit": "mmrl.prompts.mixture:CategoryBandit",
        "task_quotas": "mmrl.prompts.mixture:TaskQuotas",
    }
    test: ClassVar[str] = "tests/prompts/test_sampler.py"

    def inspect(self, source: Any) -> None:
        """Reads the prompts before `start`: `source[index]` of each of `len(source)`; for samplers that sort them by
        content."""

    @abstractmethod
    def start(self, size: int, seed: int) -> None:
        """Starts on a source of `size` prompts."""

    @abstractmethod
    def draw(self, count: int) -> list[int]:
        """Returns the indices of the next `count` prompts; one may occur more than once."""

    @abstractmethod
    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Observes the outcomes of a round's prompts, in the order of their draw, whether or not dynamic sampling keeps
        their groups."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Returns numbers, strings, lists and mappings of them that `load` restores; later draws do not change them."""

    @abstractmethod
    def load(self, state: dict[str, Any]) -> None: ...


class Permutation(PromptSampler):
    """Every prompt once an epoch, in an order that is drawn anew each epoch."""

    equation: ClassVar[str] = "a permutation of the seed and the epoch"
    source: ClassVar[str] = "random reshuffling"

    type: str = "permutation"
    _size: int = PrivateAttr(0)
    _seed: int = PrivateAttr(0)
    _drawn: int = PrivateAttr(0)
    _epoch: tuple[int, Any] = PrivateAttr((-1, None))

    def start(self, size: int, seed: int) -> None:
        self._size, self._seed, self._drawn, self._epoch = size, seed, 0, (-1, None)

    def draw(self, count: int) -> list[int]:
        positions = range(self._drawn, self._drawn + count)
        self._drawn += count
        return [int(self._order(p // self._size)[p % self._size]) for p in positions]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {"drawn": self._drawn}

    def load(self, state: dict[str, Any]) -> None:
        self._drawn = state["drawn"]

    def _order(self, epoch: int) -> np.ndarray:
        import numpy as np

        if self._epoch[0] != epoch:
            self._epoch = (epoch, np.random.default_rng([self._seed, epoch]).permutation(self._size))
        return self._epoch[1]
