"""Prompt samplers that divide a step's prompts among categories."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import PrivateAttr

from mmrl.errors import UserError
from mmrl.prompts.curriculum import success_rate
from mmrl.prompts.sampler import Outcome, PromptSampler
from mmrl.settings import option

if TYPE_CHECKING:
    import numpy as np

TEST = "tests/prompts/test_curriculum.py"


class CategorySampler(PromptSampler):
    """A sampler that first samples a category and then takes the next of its prompts. It reads every prompt once at the
    start for its category."""

    by: str = option("task", "key of the prompts' metadata that holds their category")
    _seed: int = PrivateAttr(0)
    _members: dict[str, list[int]] = PrivateAttr(default_factory=dict)  # prompts by category
    _category_of: dict[int, str] = PrivateAttr(default_factory=dict)
    _num_drawn: dict[str, int] = PrivateAttr(default_factory=dict)  # sampled prompts by category
    _num_draws: int = PrivateAttr(0)  # calls of `draw`
    _values: dict[str, float] = PrivateAttr(default_factory=dict)  # preference by category

    def inspect(self, source: Any) -> None:
        """Reads the category of every prompt. Raises UserError for a prompt whose metadata has none."""
        members: dict[str, list[int]] = {}
        for index in range(len(source)):
            prompt = source[index]
            if self.by not in prompt.metadata:
                raise UserError(
                    f"rollout.sampler.by={self.by}: prompt {prompt.id!r} has no such metadata; it has "
                    f"{', '.join(sorted(prompt.metadata)) or 'none'}; name a key that the rows of all prompts have"
                )
            members.setdefault(str(prompt.metadata[self.by]), []).append(index)
        self._members = {name: members[name] for name in sorted(members)}
        self._category_of = {index: name for name, indices in members.items() for index in indices}

    def start(self, size: int, seed: int) -> None:
        self._seed, self._num_draws = seed, 0
        self._num_drawn = dict.fromkeys(self._members, 0)
        self._values = dict.fromkeys(self._members, 0.0)

    def draw(self, count: int) -> list[int]:
        indices = [self._next(name) for name in self._categories(count)]
        self._num_draws += 1
        return indices

    @abstractmethod
    def _categories(self, count: int) -> list[str]:
        """Returns the category of each of the next `count` prompts."""

    def _next(self, name: str) -> int:
        """Returns the next prompt of category `name`: each prompt once per round, in a new random order in each
        round."""
        import numpy as np

        members, num_drawn = self._members[name], self._num_drawn[name]
        self._num_drawn[name] += 1
        round_, position = divmod(num_drawn, len(members))
        # the first member differs between categories of equal size, so that their orders differ
        order = np.random.default_rng([self._seed, round_, len(members), members[0]]).permutation(len(members))
        return members[int(order[position])]

    def rng(self) -> np.random.Generator:
        """Returns a random generator seeded by the run's seed and the number of draws so far."""
        import numpy as np

        return np.random.default_rng([self._seed, self._num_draws])

    def _by_category(self, outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
        """Groups outcomes by the category of their prompt."""
        grouped: dict[str, list[Outcome]] = {}
        for outcome in outcomes:
            grouped.setdefault(self._category_of[outcome.prompt], []).append(outcome)
        return grouped

    def state(self) -> dict[str, Any]:
        return {"draws": self._num_draws, "drawn": dict(self._num_drawn), "values": dict(self._values)}

    def load(self, state: dict[str, Any]) -> None:
        self._num_draws, self._num_drawn, self._values = state["draws"], dict(state["drawn"]), dict(state["values"])


class CategoryBandit(CategorySampler):
    """A bandit over categories: the larger the recent advantages of a category's prompts, the more often it is
    sampled."""

    equation: ClassVar[str] = "P(c) = softmax(Q / temperature); Q_c <- Q_c + rate (mean |r - mean of the group| - Q_c)"
    source: ClassVar[str] = "self-evolving curriculum, arXiv 2505.14970"
    test: ClassVar[str] = TEST
    type: str = "category_bandit"
    temperature: float = option(0.2, "temperature of the softmax; higher: categories are sampled more evenly", gt=0)
    rate: float = option(0.3, "weight of the newest step in a category's average", gt=0, le=1)

    def _categories(self, count: int) -> list[str]:
        """Returns `count` categories, drawn with the probabilities softmax(values / temperature)."""
        names = list(self._members)
        max_value = max(self._values.values())  # subtracted, so that exp does not overflow
        weights = [math.exp((self._values[name] - max_value) / self.temperature) for name in names]
        probabilities = [w / sum(weights) for w in weights]
        return [names[int(i)] for i in self.rng().choice(len(names), size=count, p=probabilities)]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Moves the value of each category toward the mean |reward - group mean| of its new rollouts."""
        for name, category_outcomes in self._by_category(outcomes).items():
            deviations = []
            for outcome in category_outcomes:
                scored = [reward for reward in outcome.rewards if math.isfinite(reward)]
                if len(scored) > 1:
                    mean = sum(scored) / len(scored)
                    deviations += [abs(reward - mean) for reward in scored]
            if deviations:
                self._values[name] += self.rate * (sum(deviations) / len(deviations) - self._values[name])


class TaskQuotas(CategorySampler):
    """Every task has a share of the step's prompts, and shares grow for the tasks that improve least."""

    equation: ClassVar[str] = (
        "shares = softmax(w); w_c <- w_c - rate share_c (d_c - sum_k share_k d_k), d the fall of log "
        "loss, loss = 1 - average success, at least 0.001; quotas are shares of the step's prompts; the largest "
        "remainders are rounded up"
    )
    source: ClassVar[str] = "FAMO's rule as MT-GRPO uses it, arXiv 2602.05547, by plain steps"
    test: ClassVar[str] = TEST
    type: str = "task_quotas"
    rate: float = option(1.0, "learning rate of the weights", ge=0)
    decay: float = option(0.3, "weight of the newest step in a task's average success", gt=0, le=1)
    least: float = option(0.05, "smallest share of a task, before shares are scaled to 1", ge=0, lt=1)
    _losses: dict[str, float] = PrivateAttr(default_factory=dict)  # 1 - average success, by task

    def start(self, size: int, seed: int) -> None:
        super().start(size, seed)
        self._losses = {}

    @property
    def shares(self) -> dict[str, float]:
        """Returns the share of each task in a step's prompts; they add up to 1."""
        max_value = max(self._values.values())
        weights = {name: math.exp(value - max_value) for name, value in self._values.items()}
        total = sum(weights.values())
        floored = {name: max(self.least, w / total) for name, w in weights.items()}
        return {name: share / sum(floored.values()) for name, share in floored.items()}

    def _categories(self, count: int) -> list[str]:
        """Returns each task as often as its share of `count` says. Numbers are rounded down, and those with the largest
        remainders up, so that they add up to `count`."""
        targets = {name: share * count for name, share in self.shares.items()}
        quotas = {name: int(number) for name, number in targets.items()}
        ranked = sorted(targets, key=lambda name: quotas[name] - targets[name])  # largest remainder first
        for name in ranked[: count - sum(quotas.values())]:
            quotas[name] += 1
        return [name for name, number in quotas.items() for _ in range(number)]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Updates the average loss (1 - success) of each task, and lowers the weights of tasks whose log loss fell more
        than the mean."""
        gains: dict[str, float] = {}
        for name, category_outcomes in self._by_category(outcomes).items():
            rates = [rate for rate in map(success_rate, category_outcomes) if math.isfinite(rate)]
            if rates:
                loss = max(0.001, 1 - sum(rates) / len(rates))
                previous = self._losses.get(name, loss)
                self._losses[name] = previous + self.decay * (loss - previous)
                gains[name] = math.log(previous) - math.log(self._losses[name])
        shares = self.shares
        mean = sum(shares[name] * gain for name, gain in gains.items())
        for name, gain in gains.items():
            self._values[name] -= self.rate * shares[name] * (gain - mean)

    def state(self) -> dict[str, Any]:
        return super().state() | {"losses": dict(self._losses)}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self._losses = dict(state["losses"])
