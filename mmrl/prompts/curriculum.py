"""Samplers that prefer some prompts by their outcomes so far."""

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


class Remembering(PromptSampler):
    """A sampler that keeps a moving average of each prompt's success: accuracy, or the reward where that is unknown."""

    decay: float = option(0.5, "weight of the newest visit in a prompt's average", gt=0, le=1)
    _size: int = PrivateAttr(0)
    _seed: int = PrivateAttr(0)
    _drawn: int = PrivateAttr(0)
    _rates: dict[int, float] = PrivateAttr(default_factory=dict)

    def start(self, size: int, seed: int) -> None:
        self._size, self._seed, self._drawn, self._rates = size, seed, 0, {}

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            rate = solved(outcome)
            if math.isfinite(rate):
                before = self._rates.get(outcome.prompt, rate)
                self._rates[outcome.prompt] = before + self.decay * (rate - before)

    def state(self) -> dict[str, Any]:
        return {"drawn": self._drawn, "rates": {str(prompt): rate for prompt, rate in self._rates.items()}}

    def load(self, state: dict[str, Any]) -> None:
        self._drawn = state["drawn"]
        self._rates = {int(prompt): rate for prompt, rate in state["rates"].items()}

    def chance(self, *more: int) -> np.random.Generator:
        """Returns a generator seeded by the run's seed, the number of prompts drawn so far, and `more`."""
        import numpy as np

        return np.random.default_rng([self._seed, self._drawn, *more])


def spread_out(values: Mapping[int, float], size: int, otherwise: float) -> np.ndarray:
    """Returns values by prompt, [prompt] float64: `values` where a prompt has one, else `otherwise`."""
    import numpy as np

    column = np.full(size, otherwise, np.float64)
    column[list(values)] = list(values.values())
    return column


def solved(outcome: Outcome) -> float:
    """Returns the mean accuracy of a prompt's rollouts, or their mean reward where it is unknown; NaN where both
    are."""
    for values in (outcome.accuracies, outcome.rewards):
        finite = [value for value in values if math.isfinite(value)]
        if finite:
            return sum(finite) / len(finite)
    return math.nan


class Weighted(Remembering):
    """Prompts are drawn by weights, each at most once a draw while there are enough."""

    @abstractmethod
    def weights(self) -> np.ndarray:
        """Returns the weight of each prompt, [prompt] float64."""

    def draw(self, count: int) -> list[int]:
        import numpy as np

        drawn: list[int] = []
        weights = self.weights()
        while len(drawn) < count:
            # The largest of log(u) / w are a draw without putting back (Efraimidis and Spirakis 2006).
            keys = np.log(self.chance(len(drawn)).random(self._size)) / np.maximum(weights, 1e-12)
            drawn += [int(prompt) for prompt in np.argsort(-keys, kind="stable")[: count - len(drawn)]]
        self._drawn += count
        return drawn


class SuccessWeighted(Weighted):
    """Prompts that are not yet solved come more often."""

    equation: ClassVar[str] = (
        "p(i) proportional to floor + (1 - s_i) (hard), or floor + 4 s_i (1 - s_i) (uncertain); s the average success, "
        "`prior` where it is unknown"
    )
    source: ClassVar[str] = "prioritised sampling of Kimi k1.5, arXiv 2501.12599; uncertain: the variance of the reward"
    test: ClassVar[str] = TEST
    type: str = "success_weighted"
    favour: Literal["hard", "uncertain"] = option("hard", "hard: the less solved; uncertain: solved half of the time")
    floor: float = option(0.05, "weight of a prompt that is always solved", gt=0)
    prior: float = option(0.5, "success of a prompt that was never seen", ge=0, le=1)

    def weights(self) -> np.ndarray:
        rates = spread_out(self._rates, self._size, self.prior).clip(0.0, 1.0)
        return self.floor + (1 - rates if self.favour == "hard" else 4 * rates * (1 - rates))


class SuccessWindow(Remembering):
    """An order of all prompts, in which those that are mastered, or out of reach, are passed over; every so many rounds
    they get another chance."""

    equation: ClassVar[str] = "pass over i where s_i < low or s_i > high, except in every recheck-th round"
    source: ClassVar[str] = (
        "rollout-based instance filtering, reconstructed from RIF-RFT's abstract; dropping what is mastered: POLARIS"
    )
    test: ClassVar[str] = TEST
    type: str = "success_window"
    low: float = option(0.01, "smallest average success of a prompt that is sampled", ge=0, le=1)
    high: float = option(0.99, "largest average success of a prompt that is sampled", ge=0, le=1)
    recheck: int = option(4, "every so many rounds no prompt is passed over", unit="rounds", ge=1)
    _order: Permutation = PrivateAttr(default_factory=Permutation)

    def start(self, size: int, seed: int) -> None:
        super().start(size, seed)
        self._order.start(size, seed)

    def draw(self, count: int) -> list[int]:
        """Draws the next prompts. If a whole round is passed over, the next prompt is taken."""
        drawn: list[int] = []
        passed = 0
        while len(drawn) < count:
            (prompt,) = self._order.draw(1)
            passed = 0 if self._accepts(prompt) else passed + 1
            if passed == 0 or passed > self._size:
                drawn.append(prompt)
        self._drawn += count
        return drawn

    def _accepts(self, prompt: int) -> bool:
        round_ = (self._order.state()["drawn"] - 1) // self._size
        rate = self._rates.get(prompt)
        return rate is None or round_ % self.recheck == self.recheck - 1 or self.low <= rate <= self.high

    def state(self) -> dict[str, Any]:
        return super().state() | {"order": self._order.state()}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self._order.load(state["order"])


class SkipFlat(Remembering):
    """An order of all prompts, in which a prompt whose groups had equal rewards at its last visits is skipped, the more
    likely the more often that was so: its rollouts would most likely teach nothing, and are not made."""

    equation: ClassVar[str] = "skip with probability 1 - explore^z, z the visits in a row without two different rewards"
    source: ClassVar[str] = "GRESO, arXiv 2506.02177, with one chance to explore for easy and hard prompts alike"
    test: ClassVar[str] = TEST
    type: str = "skip_flat"
    explore: float = option(0.5, "probability of a prompt whose last group had equal rewards", gt=0, lt=1)
    _order: Permutation = PrivateAttr(default_factory=Permutation)
    _flat: dict[int, int] = PrivateAttr(default_factory=dict)

    def start(self, size: int, seed: int) -> None:
        super().start(size, seed)
        self._order.start(size, seed)
        self._flat = {}

    def draw(self, count: int) -> list[int]:
        """Draws the next prompts. If a whole round was skipped, the next prompt is taken."""
        drawn: list[int] = []
        skipped = 0
        while len(drawn) < count:
            (prompt,) = self._order.draw(1)
            chance = self.chance(self._order.state()["drawn"]).random()
            if chance < self.explore ** self._flat.get(prompt, 0) or skipped >= self._size:
                drawn.append(prompt)
                skipped = 0
            else:
                skipped += 1
        self._drawn += count
        return drawn

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        super().observe(outcomes)
        for outcome in outcomes:
            scored = [reward for reward in outcome.rewards if math.isfinite(reward)]
            if len(scored) > 1:  # otherwise nothing was compared
                flat = len(set(scored)) == 1
                self._flat[outcome.prompt] = self._flat.get(outcome.prompt, 0) + 1 if flat else 0

    def state(self) -> dict[str, Any]:
        flat = {str(prompt): count for prompt, count in self._flat.items()}
        return super().state() | {"order": self._order.state(), "flat": flat}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self._order.load(state["order"])
        self._flat = {int(prompt): count for prompt, count in state["flat"].items()}


class Volatility(Remembering):
    """The prompts whose rewards vary most, and those that were seldom seen, come first."""

    equation: ClassVar[str] = (
        "the highest of v_i + c sqrt(log(1 + N) / (1 + n_i)), v the average std of its groups' rewards"
    )
    source: ClassVar[str] = "reconstructed from DoPR's abstract: reward volatility and an exploration bonus"
    test: ClassVar[str] = TEST
    type: str = "volatility"
    c: float = option(0.5, "weight of the bonus for what was seldom seen", ge=0)
    _spread: dict[int, float] = PrivateAttr(default_factory=dict)
    _visits: dict[int, int] = PrivateAttr(default_factory=dict)

    def start(self, size: int, seed: int) -> None:
        super().start(size, seed)
        self._spread, self._visits = {}, {}

    def draw(self, count: int) -> list[int]:
        import numpy as np

        visits = spread_out(self._visits, self._size, 0)
        bonus = self.c * np.sqrt(math.log1p(sum(self._visits.values())) / (1 + visits))
        score = spread_out(self._spread, self._size, 0.0) + bonus
        ranked = np.lexsort((self.chance().permutation(self._size), -score))  # equal ones in an order of chance
        self._drawn += count
        return [int(ranked[i % self._size]) for i in range(count)]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        super().observe(outcomes)
        for outcome in outcomes:
            scored = [reward for reward in outcome.rewards if math.isfinite(reward)]
            self._visits[outcome.prompt] = self._visits.get(outcome.prompt, 0) + 1
            if scored:
                mean = sum(scored) / len(scored)
                std = math.sqrt(sum((r - mean) ** 2 for r in scored) / len(scored))
                before = self._spread.get(outcome.prompt, std)
                self._spread[outcome.prompt] = before + self.decay * (std - before)

    def state(self) -> dict[str, Any]:
        named: dict[str, dict[int, Any]] = {"spread": self._spread, "visits": self._visits}
        return super().state() | {name: {str(p): v for p, v in values.items()} for name, values in named.items()}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self._spread = {int(prompt): value for prompt, value in state["spread"].items()}
        self._visits = {int(prompt): value for prompt, value in state["visits"].items()}
