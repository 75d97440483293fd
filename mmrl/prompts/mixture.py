"""Samplers that divide a step among categories of prompts."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import PrivateAttr

from mmrl.errors import UserError
from mmrl.prompts.curriculum import solved
from mmrl.prompts.sampler import Outcome, PromptSampler
from mmrl.settings import option

if TYPE_CHECKING:
    import numpy as np

TEST = "tests/prompts/test_curriculum.py"


class Categorised(PromptSampler):
    """A sampler that draws a category and then the next of its prompts. It reads every prompt once for its category."""

    by: str = option("task", "key of the prompts' metadata that says what kind they are")
    _seed: int = PrivateAttr(0)
    _members: dict[str, list[int]] = PrivateAttr(default_factory=dict)
    _of: dict[int, str] = PrivateAttr(default_factory=dict)
    _drawn: dict[str, int] = PrivateAttr(default_factory=dict)
    _draws: int = PrivateAttr(0)
    _values: dict[str, float] = PrivateAttr(default_factory=dict)

    def inspect(self, source: Any) -> None:
        members: dict[str, list[int]] = {}
        for index in range(len(source)):
            prompt = source[index]
            if self.by not in prompt.metadata:
                raise UserError(
                    f"rollout.sampler.by={self.by}: prompt {prompt.id!r} has no such metadata; it has "
                    f"{', '.join(sorted(prompt.metadata)) or 'none'}"
                )
            members.setdefault(str(prompt.metadata[self.by]), []).append(index)
        self._members = {name: members[name] for name in sorted(members)}
        self._of = {index: name for name, indices in members.items() for index in indices}

    def start(self, size: int, seed: int) -> None:
        self._seed, self._draws = seed, 0
        self._drawn = dict.fromkeys(self._members, 0)
        self._values = dict.fromkeys(self._members, 0.0)

    def draw(self, count: int) -> list[int]:
        indices = [self._next(name) for name in self._categories(count)]
        self._draws += 1
        return indices

    @abstractmethod
    def _categories(self, count: int) -> list[str]:
        """Returns the category of each of the next `count` prompts."""

    def _next(self, name: str) -> int:
        """Returns the next prompt of a category: each once a round, in an order that is drawn anew each round."""
        import numpy as np

        members, drawn = self._members[name], self._drawn[name]
        self._drawn[name] += 1
        round_, within = divmod(drawn, len(members))
        order = np.random.default_rng([self._seed, round_, len(members), members[0]]).permutation(len(members))
        return members[int(order[within])]

    def chance(self) -> np.random.Generator:
        import numpy as np

        return np.random.default_rng([self._seed, self._draws])

    def _by_category(self, outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
        grouped: dict[str, list[Outcome]] = {}
        for outcome in outcomes:
            grouped.setdefault(self._of[outcome.prompt], []).append(outcome)
        return grouped

    def state(self) -> dict[str, Any]:
        return {"draws": self._draws, "drawn": dict(self._drawn), "values": dict(self._values)}

    def load(self, state: dict[str, Any]) -> None:
        self._draws, self._drawn, self._values = state["draws"], dict(state["drawn"]), dict(state["values"])


class CategoryBandit(Categorised):
    """A bandit over categories: those whose prompts taught most of late come most often."""

    equation: ClassVar[str] = "P(c) = softmax(Q / temperature); Q_c <- Q_c + rate (mean |r - mean of the group| - Q_c)"
    source: ClassVar[str] = "self-evolving curriculum, arXiv 2505.14970"
    test: ClassVar[str] = TEST
    type: str = "category_bandit"
    temperature: float = option(0.2, "the higher, the more alike categories are drawn", gt=0)
    rate: float = option(0.3, "weight of the newest step in a category's average", gt=0, le=1)

    def _categories(self, count: int) -> list[str]:
        names = list(self._members)
        most = max(self._values.values())
        weights = [math.exp((self._values[name] - most) / self.temperature) for name in names]
        shares = [w / sum(weights) for w in weights]
        return [names[int(i)] for i in self.chance().choice(len(names), size=count, p=shares)]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for name, visited in self._by_category(outcomes).items():
            gaps = []
            for outcome in visited:
                scored = [reward for reward in outcome.rewards if math.isfinite(reward)]
                if len(scored) > 1:
                    mean = sum(scored) / len(scored)
                    gaps += [abs(reward - mean) for reward in scored]
            if gaps:
                self._values[name] += self.rate * (sum(gaps) / len(gaps) - self._values[name])


class TaskQuotas(Categorised):
    """Every task has a share of the step, and shares move towards the tasks that improve least."""

    equation: ClassVar[str] = (
        "shares = softmax(w); w_c <- w_c - rate share_c (d_c - sum_k share_k d_k), d the fall of log "
        "loss, loss = 1 - average success, at least 0.001; quotas are fractions of the step's prompts, largest "
        "remainders rounded up"
    )
    source: ClassVar[str] = "FAMO's rule as MT-GRPO uses it, arXiv 2602.05547, by plain steps"
    test: ClassVar[str] = TEST
    type: str = "task_quotas"
    rate: float = option(1.0, "of the weights", ge=0)
    decay: float = option(0.3, "weight of the newest step in a task's average success", gt=0, le=1)
    least: float = option(0.05, "smallest share of a task, before shares are scaled to 1", ge=0, lt=1)
    _losses: dict[str, float] = PrivateAttr(default_factory=dict)

    def start(self, size: int, seed: int) -> None:
        super().start(size, seed)
        self._losses = {}

    @property
    def shares(self) -> dict[str, float]:
        most = max(self._values.values())
        weights = {name: math.exp(value - most) for name, value in self._values.items()}
        total = sum(weights.values())
        raised = {name: max(self.least, w / total) for name, w in weights.items()}
        return {name: share / sum(raised.values()) for name, share in raised.items()}

    def _categories(self, count: int) -> list[str]:
        wanted = {name: share * count for name, share in self.shares.items()}
        quotas = {name: int(number) for name, number in wanted.items()}
        ranked = sorted(wanted, key=lambda name: quotas[name] - wanted[name])  # the largest remainders first
        for name in ranked[: count - sum(quotas.values())]:
            quotas[name] += 1
        return [name for name, number in quotas.items() for _ in range(number)]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        gained: dict[str, float] = {}
        for name, visited in self._by_category(outcomes).items():
            rates = [rate for rate in map(solved, visited) if math.isfinite(rate)]
            if rates:
                now = max(0.001, 1 - sum(rates) / len(rates))
                before = self._losses.get(name, now)
                self._losses[name] = before + self.decay * (now - before)
                gained[name] = math.log(before) - math.log(self._losses[name])
        shares = self.shares
        mean = sum(shares[name] * gain for name, gain in gained.items())
        for name, gain in gained.items():
            self._values[name] -= self.rate * shares[name] * (gain - mean)

    def state(self) -> dict[str, Any]:
        return super().state() | {"losses": dict(self._losses)}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self._losses = dict(state["losses"])
