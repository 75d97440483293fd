"""Samplers that prefer some prompts to others by what became of them."""

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
    """A sampler that knows of each prompt how often it was seen, and an average of how often it was solved: accuracy,
    or the reward where that is unknown."""

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
        """For the draws of this place: it depends on the seed and on how many were drawn alone."""
        import numpy as np

        return np.random.default_rng([self._seed, self._drawn, *more])


def spread_out(known: Mapping[int, float], size: int, otherwise: float) -> np.ndarray:
    """[prompt] float64 of what is known of some prompts."""
    import numpy as np

    found = np.full(size, otherwise, np.float64)
    found[list(known)] = list(known.values())
    return found


def solved(outcome: Outcome) -> float:
    """The mean accuracy of a prompt's rollouts, or their mean reward where it is unknown; NaN where that is too."""
    for values in (outcome.accuracies, outcome.rewards):
        known = [value for value in values if math.isfinite(value)]
        if known:
            return sum(known) / len(known)
    return math.nan


class Weighted(Remembering):
    """Prompts are drawn by weights, each at most once a draw while there are enough."""

    @abstractmethod
    def weights(self) -> np.ndarray:
        """[prompt] float64."""

    def draw(self, count: int) -> list[int]:
        import numpy as np

        found: list[int] = []
        weights = self.weights()
        while len(found) < count:
            # The largest of log(u) / w are a draw without putting back (Efraimidis and Spirakis 2006).
            keys = np.log(self.chance(len(found)).random(self._size)) / np.maximum(weights, 1e-12)
            found += [int(prompt) for prompt in np.argsort(-keys, kind="stable")[: count - len(found)]]
        self._drawn += count
        return found


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
    low: float = option(0.01, "smallest average success of a prompt that is drawn", ge=0, le=1)
    high: float = option(0.99, "largest average success of a prompt that is drawn", ge=0, le=1)
    recheck: int = option(4, "every so many rounds nobody is passed over", unit="rounds", ge=1)
    _order: Permutation = PrivateAttr(default_factory=Permutation)

    def start(self, size: int, seed: int) -> None:
        super().start(size, seed)
        self._order.start(size, seed)

    def draw(self, count: int) -> list[int]:
        """If a whole round holds nobody that is not passed over, whoever comes next is taken."""
        found: list[int] = []
        passed = 0
        while len(found) < count:
            (prompt,) = self._order.draw(1)
            passed = 0 if self._welcome(prompt) else passed + 1
            if passed == 0 or passed > self._size:
                found.append(prompt)
        self._drawn += count
        return found

    def _welcome(self, prompt: int) -> bool:
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
    explore: float = option(0.5, "chance of a prompt whose last group was flat", gt=0, lt=1)
    _order: Permutation = PrivateAttr(default_factory=Permutation)
    _flat: dict[int, int] = PrivateAttr(default_factory=dict)

    def start(self, size: int, seed: int) -> None:
        super().start(size, seed)
        self._order.start(size, seed)
        self._flat = {}

    def draw(self, count: int) -> list[int]:
        """If a whole round was skipped, whoever comes next is taken."""
        found: list[int] = []
        skipped = 0
        while len(found) < count:
            (prompt,) = self._order.draw(1)
            chance = self.chance(self._order.state()["drawn"]).random()
            if chance < self.explore ** self._flat.get(prompt, 0) or skipped >= self._size:
                found.append(prompt)
                skipped = 0
            else:
                skipped += 1
        self._drawn += count
        return found

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        super().observe(outcomes)
        for outcome in outcomes:
            known = {reward for reward in outcome.rewards if math.isfinite(reward)}
            self._flat[outcome.prompt] = self._flat.get(outcome.prompt, 0) + 1 if len(known) < 2 else 0

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
            known = [reward for reward in outcome.rewards if math.isfinite(reward)]
            self._visits[outcome.prompt] = self._visits.get(outcome.prompt, 0) + 1
            if known:
                mean = sum(known) / len(known)
                std = math.sqrt(sum((r - mean) ** 2 for r in known) / len(known))
                before = self._spread.get(outcome.prompt, std)
                self._spread[outcome.prompt] = before + self.decay * (std - before)

    def state(self) -> dict[str, Any]:
        named: dict[str, dict[int, Any]] = {"spread": self._spread, "visits": self._visits}
        return super().state() | {name: {str(p): v for p, v in kept.items()} for name, kept in named.items()}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self._spread = {int(prompt): value for prompt, value in state["spread"].items()}
        self._visits = {int(prompt): value for prompt, value in state["visits"].items()}
