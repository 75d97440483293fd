"""Prompt samplers that prefer some prompts according to their earlier outcomes."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import PrivateAttr

from mmrl.prompts.sampler import Outcome, Permutation, PromptSampler
from mmrl.settings import option

if TYPE_CHECKING:
    import numpy as np

TEST = "tests/prompts/test_curriculum.py"


class SuccessTrackingSampler(PromptSampler):
    """A sampler that keeps a moving average of each prompt's success: the accuracy, or the reward if that is
    unknown."""

    decay: float = option(0.5, "weight of a prompt's newest group in its average", gt=0, le=1)
    _size: int = PrivateAttr(0)
    _seed: int = PrivateAttr(0)
    _num_drawn: int = PrivateAttr(0)
    _rates: dict[int, float] = PrivateAttr(default_factory=dict)

    def start(self, size: int, seed: int) -> None:
        self._size, self._seed, self._num_drawn, self._rates = size, seed, 0, {}

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Moves each prompt's average success toward that of its new group."""
        for outcome in outcomes:
            rate = success_rate(outcome)
            if math.isfinite(rate):
                previous = self._rates.get(outcome.prompt, rate)
                self._rates[outcome.prompt] = previous + self.decay * (rate - previous)

    def state(self) -> dict[str, Any]:
        return {"drawn": self._num_drawn, "rates": {str(prompt): rate for prompt, rate in self._rates.items()}}

    def load(self, state: dict[str, Any]) -> None:
        self._num_drawn = state["drawn"]
        self._rates = {int(prompt): rate for prompt, rate in state["rates"].items()}

    def rng(self, *extra_seeds: int) -> np.random.Generator:
        """Returns a random generator seeded by the run's seed, the number of prompts sampled so far, and
        `extra_seeds`."""
        import numpy as np

        return np.random.default_rng([self._seed, self._num_drawn, *extra_seeds])


def values_by_prompt(values: Mapping[int, float], size: int, default: float) -> np.ndarray:
    """Returns an array [size] float64 with `values[i]` at prompt i, and `default` for prompts without a value."""
    import numpy as np

    column = np.full(size, default, np.float64)
    column[list(values)] = list(values.values())
    return column


def success_rate(outcome: Outcome) -> float:
    """Returns the mean accuracy of a prompt's rollouts, or their mean reward if no accuracy is known; NaN without
    either."""
    for values in (outcome.accuracies, outcome.rewards):
        finite = [value for value in values if math.isfinite(value)]
        if finite:
            return sum(finite) / len(finite)
    return math.nan


class WeightedSampler(SuccessTrackingSampler):
    """Samples prompts in proportion to their weights, without replacement as long as there are enough prompts."""

    @abstractmethod
    def weights(self) -> np.ndarray:
        """Returns the weight of each prompt, [prompt] float64."""

    def draw(self, count: int) -> list[int]:
        """Samples prompts in proportion to their weights, each once before any is repeated."""
        import numpy as np

        sampled: list[int] = []
        weights = self.weights()
        while len(sampled) < count:
            # The prompts with the largest log(u) / w are a weighted sample without replacement (Efraimidis and Spirakis
            # 2006).
            keys = np.log(self.rng(len(sampled)).random(self._size)) / np.maximum(weights, 1e-12)
            sampled += [int(prompt) for prompt in np.argsort(-keys, kind="stable")[: count - len(sampled)]]
        self._num_drawn += count
        return sampled


class SuccessWeighted(WeightedSampler):
    """Samples prompts that are not yet solved more often."""

    equation: ClassVar[str] = (
        "p(i) proportional to floor + (1 - s_i) (hard), or floor + 4 s_i (1 - s_i) (uncertain); s the average success, "
        "`prior` where it is unknown"
    )
    source: ClassVar[str] = "prioritised sampling of Kimi k1.5, arXiv 2501.12599; uncertain: the variance of the reward"
    test: ClassVar[str] = TEST
    type: str = "success_weighted"
    favour: Literal["hard", "uncertain"] = option(
        "hard", "hard: prompts that are solved seldom; uncertain: prompts that are solved half of the time"
    )
    floor: float = option(0.05, "weight of a prompt that is always solved", gt=0)
    prior: float = option(0.5, "success of a prompt that was never sampled", ge=0, le=1)

    def weights(self) -> np.ndarray:
        rates = values_by_prompt(self._rates, self._size, self.prior).clip(0.0, 1.0)
        return self.floor + (1 - rates if self.favour == "hard" else 4 * rates * (1 - rates))


class SuccessWindow(SuccessTrackingSampler):
    """Visits all prompts in random order and skips those whose success rate is outside [low, high]. Every `recheck`
    rounds none is skipped."""

    equation: ClassVar[str] = "skip i where s_i < low or s_i > high, except in every recheck-th round"
    source: ClassVar[str] = (
        "rollout-based instance filtering, reconstructed from RIF-RFT's abstract; dropping what is mastered: POLARIS"
    )
    test: ClassVar[str] = TEST
    type: str = "success_window"
    low: float = option(0.01, "smallest average success of a prompt that is sampled", ge=0, le=1)
    high: float = option(0.99, "largest average success of a prompt that is sampled", ge=0, le=1)
    recheck: int = option(4, "period of the rounds in which no prompt is skipped", unit="rounds", ge=1)
    _order: Permutation = PrivateAttr(default_factory=Permutation)

    def start(self, size: int, seed: int) -> None:
        super().start(size, seed)
        self._order.start(size, seed)

    def draw(self, count: int) -> list[int]:
        """Samples the next prompts. If a whole round would be skipped, the next prompt is taken."""
        sampled: list[int] = []
        num_skipped = 0
        while len(sampled) < count:
            (prompt,) = self._order.draw(1)
            num_skipped = 0 if self._accepts(prompt) else num_skipped + 1
            if num_skipped == 0 or num_skipped > self._size:
                sampled.append(prompt)
        self._num_drawn += count
        return sampled

    def _accepts(self, prompt: int) -> bool:
        """Returns whether a prompt is not skipped."""
        # -1: this prompt has been drawn already
        round_ = (self._order.state()["drawn"] - 1) // self._size
        rate = self._rates.get(prompt)
        return rate is None or round_ % self.recheck == self.recheck - 1 or self.low <= rate <= self.high

    def state(self) -> dict[str, Any]:
        return super().state() | {"order": self._order.state()}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self._order.load(state["order"])


class SkipFlat(SuccessTrackingSampler):
    """Visits all prompts in random order and skips, at random, prompts whose last groups had equal rewards.

    The more such groups in a row, the likelier the skip: rollouts with equal rewards have no advantage to learn from.
    """

    equation: ClassVar[str] = "skip with probability 1 - explore^z, z the visits in a row without two different rewards"
    source: ClassVar[str] = "GRESO, arXiv 2506.02177, with one chance to explore for easy and hard prompts alike"
    test: ClassVar[str] = TEST
    type: str = "skip_flat"
    explore: float = option(0.5, "probability of sampling a prompt whose last group had equal rewards", gt=0, lt=1)
    _order: Permutation = PrivateAttr(default_factory=Permutation)
    # by prompt: number of its last groups in a row with equal rewards
    _flat: dict[int, int] = PrivateAttr(default_factory=dict)

    def start(self, size: int, seed: int) -> None:
        super().start(size, seed)
        self._order.start(size, seed)
        self._flat = {}

    def draw(self, count: int) -> list[int]:
        """Samples the next prompts. If a whole round was skipped, the next prompt is taken."""
        sampled: list[int] = []
        num_skipped = 0
        while len(sampled) < count:
            (prompt,) = self._order.draw(1)
            # a new random number for every visit of a prompt
            uniform = self.rng(self._order.state()["drawn"]).random()
            if uniform < self.explore ** self._flat.get(prompt, 0) or num_skipped >= self._size:
                sampled.append(prompt)
                num_skipped = 0
            else:
                num_skipped += 1
        self._num_drawn += count
        return sampled

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Updates each prompt's average success, and its number of groups in a row with equal rewards."""
        super().observe(outcomes)
        for outcome in outcomes:
            scored = [reward for reward in outcome.rewards if math.isfinite(reward)]
            if len(scored) > 1:  # a single reward says nothing about equality
                flat = len(set(scored)) == 1
                self._flat[outcome.prompt] = self._flat.get(outcome.prompt, 0) + 1 if flat else 0

    def state(self) -> dict[str, Any]:
        flat = {str(prompt): num_groups for prompt, num_groups in self._flat.items()}
        return super().state() | {"order": self._order.state(), "flat": flat}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self._order.load(state["order"])
        self._flat = {int(prompt): num_groups for prompt, num_groups in state["flat"].items()}


class Volatility(SuccessTrackingSampler):
    """Samples first the prompts whose rewards vary most within a group, and those that were seldom visited."""

    equation: ClassVar[str] = (
        "the highest of v_i + c sqrt(log(1 + N) / (1 + n_i)), v the average std of its groups' rewards"
    )
    source: ClassVar[str] = "reconstructed from DoPR's abstract: reward volatility and an exploration bonus"
    test: ClassVar[str] = TEST
    type: str = "volatility"
    c: float = option(0.5, "weight of the bonus for seldom sampled prompts", ge=0)
    _spread: dict[int, float] = PrivateAttr(default_factory=dict)  # average std of the rewards, by prompt
    _visits: dict[int, int] = PrivateAttr(default_factory=dict)

    def start(self, size: int, seed: int) -> None:
        super().start(size, seed)
        self._spread, self._visits = {}, {}

    def draw(self, count: int) -> list[int]:
        """Returns the `count` prompts of the highest average std of rewards + bonus; after the last prompt, begins
        again with the first."""
        import numpy as np

        visits = values_by_prompt(self._visits, self._size, 0)
        bonus = self.c * np.sqrt(math.log1p(sum(self._visits.values())) / (1 + visits))
        score = values_by_prompt(self._spread, self._size, 0.0) + bonus
        ranked = np.lexsort((self.rng().permutation(self._size), -score))  # ties in random order
        self._num_drawn += count
        return [int(ranked[i % self._size]) for i in range(count)]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Updates each prompt's average success. Updates its average std of rewards and counts a visit if at least two
        rollouts were scored."""
        super().observe(outcomes)
        for outcome in outcomes:
            scored = [reward for reward in outcome.rewards if math.isfinite(reward)]
            if len(scored) > 1:  # fewer rewards say nothing about their spread
                self._visits[outcome.prompt] = self._visits.get(outcome.prompt, 0) + 1
                mean = sum(scored) / len(scored)
                std = math.sqrt(sum((r - mean) ** 2 for r in scored) / len(scored))
                previous = self._spread.get(outcome.prompt, std)
                self._spread[outcome.prompt] = previous + self.decay * (std - previous)

    def state(self) -> dict[str, Any]:
        spread = {str(prompt): value for prompt, value in self._spread.items()}
        visits = {str(prompt): value for prompt, value in self._visits.items()}
        return super().state() | {"spread": spread, "visits": visits}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self._spread = {int(prompt): value for prompt, value in state["spread"].items()}
        self._visits = {int(prompt): value for prompt, value in state["visits"].items()}


class Rollback(Permutation):
    """Visits all prompts in random order. Prompts without a right response return: they are visited again soon, before
    new ones, at most `times` times in a row. With rollout.dynamic_sampling their failed groups leave the step."""

    equation: ClassVar[str] = (
        "the first ceil(share x prompts) places go to prompts that returned, the oldest first; a prompt returns if "
        "all its rollouts have an accuracy below `accuracy`"
    )
    source: ClassVar[str] = (
        "reconstructed from the abstract of TACO, arXiv 2505.20777: rollback resampling, which removes problematic "
        "samples and gives them back to the sampler"
    )
    test: ClassVar[str] = TEST
    type: str = "rollback"
    share: float = option(0.5, "largest share of the drawn prompts that returned, rounded up", gt=0, le=1)
    times: int = option(2, "times that a prompt returns before it waits for the next epoch", ge=1)
    accuracy: float = option(1.0, "smallest accuracy of a right response", unit="accuracy")
    _waiting: list[int] = PrivateAttr(default_factory=list)  # prompts that returned, oldest first
    _returns: dict[int, int] = PrivateAttr(default_factory=dict)  # how often each prompt returned in a row

    def start(self, size: int, seed: int) -> None:
        super().start(size, seed)
        self._waiting, self._returns = [], {}

    def draw(self, count: int) -> list[int]:
        """Draws prompts that returned, at most `share` of `count`, and then the next ones of the permutation."""
        num_returned = math.ceil(self.share * count)
        returned, self._waiting = self._waiting[:num_returned], self._waiting[num_returned:]
        return returned + super().draw(count - len(returned))

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Lets prompts return whose rollouts are all known to be wrong."""
        for outcome in outcomes:
            known = [accuracy for accuracy in outcome.accuracies if math.isfinite(accuracy)]
            failed = bool(known) and max(known) < self.accuracy
            returns = self._returns.pop(outcome.prompt, 0)
            if failed and returns < self.times and outcome.prompt not in self._waiting:
                self._returns[outcome.prompt] = returns + 1
                self._waiting.append(outcome.prompt)

    def state(self) -> dict[str, Any]:
        returns = {str(prompt): count for prompt, count in self._returns.items()}
        return super().state() | {"waiting": list(self._waiting), "returns": returns}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self._waiting = list(state["waiting"])
        self._returns = {int(prompt): count for prompt, count in state["returns"].items()}
