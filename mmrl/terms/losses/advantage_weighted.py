"""Imitation of stored or demonstrated policy steps, weighted by how much their return exceeds the critic's value."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.protocols.requirements import Needs
from mmrl.schedules.schedule import Schedule, number
from mmrl.settings import Section, option
from mmrl.terms.term import Term

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from mmrl.protocols.batch import Batch
    from mmrl.protocols.parts import RolloutKind
    from mmrl.rollouts import Prompt, Replay, Rollouts


class AdvantageWeights(Section):
    """The weight of a step whose return exceeds its value by A."""

    form: Literal["exponential", "positive", "binary"] = option(
        "exponential",
        "exponential: min(exp(A / temperature), most); positive: max(A, 0); binary: 1 where A > 0, else 0",
    )
    temperature: float = option(
        1.0, "temperature of the exponential, in units of the return; smaller: more weight on the best steps", gt=0
    )
    most: float = option(20.0, "largest weight of the exponential", gt=0)

    def of(self, advantages: Tensor) -> Tensor:
        """Returns weights, of the shape of `advantages`."""
        if self.form == "exponential":
            return (advantages / self.temperature).exp().clamp(max=self.most)
        return advantages.relu() if self.form == "positive" else (advantages > 0).to(advantages.dtype)


class StepReturns(Section):
    """The return of a stored step: the discounted rewards of the simulator and the task from this step on."""

    gamma: float = option(0.99, "discount of an action of the simulator", gt=0, le=1)
    simulator_reward: float = option(0.0, "weight of the simulator's own reward, beside the outcome", ge=0)

    def of(self, prompts: Sequence[Prompt]) -> Tensor:
        """Returns the return of each step, [prompt] float32; NaN where no reward of its episode was recorded, so that
        the prompt's metadata has no `tail` (`EpisodeTail`)."""
        import torch

        tails = [prompt.metadata.get("tail") for prompt in prompts]
        returns = [
            torch.nan if tail is None else tail.rewards.discounted(self.gamma, self.simulator_reward) for tail in tails
        ]
        return torch.tensor(returns, dtype=torch.float32)


def check_returns(key: str, prompts: Sequence[Prompt]) -> None:
    """Raises UserError for the first recorded step whose episode has no recorded reward. key: the configuration key of
    the part that learns from these steps."""
    from mmrl.errors import UserError

    for prompt in prompts:
        if "tail" not in prompt.metadata:
            raise UserError(
                f"{key}: the recorded episode of {prompt.id} has no reward; add the feature next.reward or "
                "next.success to a LeRobot data set, or set task.demonstrations.actions=executed for a disturbed "
                "expert; or use algorithm.type=supervised or the term likelihood"
            )


def demonstrated(rollouts: Rollouts) -> list[Prompt]:
    """Returns the prompts of demonstrations among rollouts."""
    from mmrl.rollouts import DEMONSTRATION, require

    origins = require(rollouts.origin, "origins").tolist()
    return [s.prompt for s, origin in zip(rollouts.samples, origins, strict=True) if origin == DEMONSTRATION]


class AdvantageWeightedTerm(Term):
    """The likelihood of stored policy steps (rollout.extras=[stored_steps]) or of demonstrated ones, weighted by their
    advantage over the critic's value. It needs an algorithm with a critic."""

    equation: ClassVar[str] = "-coefficient w(R - V(s)) logp, of the chosen rollouts; R the return from the step on"
    source: ClassVar[str] = (
        "exponential: AWR, arXiv 1910.00177; positive: self-imitation learning, arXiv 1806.05635; binary: CRR, arXiv "
        "2006.15134"
    )
    test: ClassVar[str] = "tests/joints/test_advantage_weighted.py"
    type: str = "advantage_weighted"
    coefficient: Schedule = number(0.1, "weight of the term", ge=0)
    of: Literal["replayed", "demonstrations"] = option(
        "replayed", "rollouts that the term applies to: those of this kind from rollout.extras"
    )
    weights: AdvantageWeights = option(AdvantageWeights(), "weight of a step by its advantage")
    returns: StepReturns = option(StepReturns(), "return of a step, which is compared with the critic's value")

    @property
    def learns_from(self) -> frozenset[RolloutKind]:
        return frozenset({self.of})

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"critic", "demonstrations"}))

    def prepare(self, batch: Batch) -> None:
        """Stores the return of each rollout's policy step, [rollout]; NaN where it is unknown."""
        from mmrl.rollouts import Column

        if self.of == "demonstrations":
            check_returns(f"algorithm.terms ({self.type})", demonstrated(batch.rollouts))
        batch.rollouts.extras[self.key] = Column(self.returns.of([sample.prompt for sample in batch.rollouts.samples]))

    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes -coefficient w(R - V) logp of rollouts of the kind `of`, 0 for others, and statistics; [rollout,
        decision]."""
        import torch

        from mmrl.rollouts import DEMONSTRATION, REPLAYED, Column, require

        value, logp = require(replay.value, "values"), replay.logp
        selected_origin = REPLAYED if self.of == "replayed" else DEMONSTRATION
        returns = micro.extra(self.key, Column).values.to(logp.device)
        origin = require(micro.origin, "origins").to(logp.device)
        chosen = ((origin == selected_origin) & ~returns.isnan())[:, None].expand(logp.shape)
        advantages = (returns - value[:, 0].detach())[:, None].expand(logp.shape)
        weights = self.weights.of(advantages.nan_to_num())
        stats = {"advantage": advantages, "weight": weights}
        named = {f"advantage_weighted/{name}": column.where(chosen, torch.nan) for name, column in stats.items()}
        return -self.coefficient.value * (weights * logp).where(chosen, 0), named
