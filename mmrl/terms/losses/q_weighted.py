"""Imitation of stored or demonstrated policy steps, weighted by the advantage of a Q function."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from mmrl.protocols.requirements import Needs
from mmrl.schedules.schedule import Schedule, number
from mmrl.settings import Section, option
from mmrl.terms.losses.advantage_weighted import AdvantageWeights, StepReturns, check_returns, demonstrated
from mmrl.terms.term import Term

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.measurements.q_values import QValues
    from mmrl.protocols.batch import Batch
    from mmrl.protocols.parts import RolloutKind
    from mmrl.rollouts import Replay, Rollouts


BEST_OF = (
    "several chunks are sampled for each observation in episodes of training and its evaluations, and the one with the "
    "largest Q is played (best-of-n of Q-chunking, arXiv 2507.07969); null: one chunk"
)


class BestChunk(Section):
    """Number of chunks that are sampled for each observation in play, and the value by which one of them is chosen. It
    needs chunks that differ: evaluation.temperature above 0, unless the head is a flow."""

    count: int = option(8, "chunks for each observation", ge=2)
    of: Literal["least", "mean"] = option(
        "least", "value that chooses: the least of the Q networks' values, or their mean"
    )

    def check(self, rollout: Any) -> None:
        """Raises ValueError if other processes sample rollouts. rollout: the job's section."""
        from mmrl.generation.settings import WorkerSampling

        if isinstance(rollout, WorkerSampling) and rollout.workers is not None:
            key = "algorithm.q.best_of"
            raise ValueError(f"{key} chooses by Q networks, which rollout.workers do not have; set one of them to null")


def with_choice(measurement: QValues, best_of: BestChunk | None) -> QValues:
    """Returns the measurement whose Q networks choose as `best_of` says."""
    if best_of is None:
        return measurement
    return replace(measurement, best_of=best_of.count, best_by_mean=best_of.of == "mean")


class QNetworks(Section):
    """Q networks with target networks, which learn beside the policy from its features. Their targets bootstrap from
    the current policy's own actions."""

    members: int = option(2, "number of Q networks; the least of their values is used", ge=1)
    width: int = option(256, "width of the two hidden layers of each network", ge=1)
    lr: float = option(3e-4, "learning rate of Adam", gt=0)
    tau: float = option(
        0.005, "fraction by which the target networks move toward the Q networks per update", gt=0, le=1
    )
    updates: int = option(1, "updates of Q and V per training step, on that step's recorded policy steps", ge=1)
    batch: int | None = option(
        None, "recorded policy steps of a rank that each of these updates draws; null: all of the training step", ge=1
    )

    def measurement(self, returns: StepReturns) -> QValues:
        """Returns the measurement that trains the networks. returns: rewards that Q sums."""
        from mmrl.measurements.q_values import QValues

        return QValues(
            gamma=returns.gamma,
            simulator_reward=returns.simulator_reward,
            members=self.members,
            width=self.width,
            lr=self.lr,
            tau=self.tau,
            updates=self.updates,
            batch=self.batch,
        )


class QFunctions(QNetworks):
    """Q networks with target networks, and a value function V, which learn beside the policy from its features."""

    expectile: float = option(
        0.7, "expectile of the Q values that V learns; 0.5: their mean; higher: nearer to the best actions'", gt=0, lt=1
    )

    def measurement(self, returns: StepReturns) -> QValues:
        return replace(super().measurement(returns), expectile=self.expectile)


class GuidingQFunctions(QFunctions):
    """Q networks with target networks and a value function V, by which actions may be chosen."""

    best_of: BestChunk | None = option(None, BEST_OF)

    def measurement(self, returns: StepReturns) -> QValues:
        return with_choice(super().measurement(returns), self.best_of)


class PolicyQFunctions(QFunctions):
    """Q networks with target networks, whose targets bootstrap from V or from the current policy's own actions."""

    target: Literal["value", "next_action"] = option(
        "value",
        "what targets bootstrap from. value: V; next_action: the least Q of a chunk that the current policy samples at "
        "the next observation",
    )

    def measurement(self, returns: StepReturns) -> QValues:
        measured = super().measurement(returns)
        return measured if self.target == "value" else replace(measured, expectile=None)


class QWeightedTerm(Term):
    """The likelihood of stored policy steps (rollout.extras=[stored_steps]) or of demonstrated ones, weighted by the
    advantage of their actions under Q networks, which learn from the same steps beside the policy."""

    equation: ClassVar[str] = "-coefficient w(Q(s, a) - V(s)) logp(a | s), of the chosen rollouts"
    source: ClassVar[str] = "policy extraction of IQL, arXiv 2110.06169, beside another algorithm"
    test: ClassVar[str] = "tests/joints/test_q_weighted.py"
    type: str = "q_weighted"
    coefficient: Schedule = number(0.1, "weight of the term", ge=0)
    of: Literal["replayed", "demonstrations"] = option(
        "replayed", "rollouts that the term applies to: those of this kind from rollout.extras"
    )
    weights: AdvantageWeights = option(AdvantageWeights(), "weight of a step by its advantage")
    returns: StepReturns = option(StepReturns(), "rewards that Q sums")
    q: QFunctions = option(QFunctions(), "the Q networks and V")

    @property
    def learns_from(self) -> frozenset[RolloutKind]:
        return frozenset({self.of})

    @property
    def needs(self) -> Needs:
        offers = frozenset({"demonstrations"})
        return Needs(offers=offers, measurements=(self.q.measurement(self.returns),))

    def prepare(self, batch: Batch) -> None:
        if self.of == "demonstrations":
            check_returns(f"algorithm.terms ({self.type})", demonstrated(batch.rollouts))
        report_agreement(batch, self.q.measurement(self.returns), self.returns)

    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes -coefficient w(Q - V) logp of rollouts of the kind `of`, 0 for others, and statistics; [rollout,
        decision]."""
        import torch

        from mmrl.rollouts import DEMONSTRATION, REPLAYED, require

        logp = replay.logp
        advantages = estimates_of(micro, self.q.measurement(self.returns))["advantage"].to(logp)
        origin = require(micro.origin, "origins").to(logp.device)
        chosen = (origin == (REPLAYED if self.of == "replayed" else DEMONSTRATION)) & ~advantages.isnan()
        weights = self.weights.of(advantages.nan_to_num())
        rows = {"advantage": advantages, "weight": weights}
        stats = {
            f"q_weighted/{name}": column.where(chosen, torch.nan)[:, None].expand(logp.shape)
            for name, column in rows.items()
        }
        losses = (weights[:, None] * logp).where(chosen[:, None], 0)
        return -self.coefficient.value * losses, stats


def estimates_of(micro: Rollouts, measurement: QValues) -> dict[str, Tensor]:
    """Returns the estimates of `measurement` by name (q, value, td_error, advantage = q - value), [rollout] float32
    each; NaN for rollouts without an estimate."""
    from mmrl.measurements.q_values import ESTIMATES
    from mmrl.rollouts import Column

    values = dict(zip(ESTIMATES, micro.extra(measurement.name, Column).values.unbind(1), strict=True))
    return {**values, "advantage": values["q"] - values["value"]}


def report_agreement(batch: Batch, measurement: QValues, returns: StepReturns) -> None:
    """Reports the mean squared TD error of the Q networks, and Spearman's rank correlation of Q values and the returns
    that the episodes earned, over the recorded steps of all ranks."""
    import torch
    from scipy.stats import spearmanr

    q, _, td_error = batch.measured(measurement).values.unbind(1)
    prompts = [sample.prompt for sample in batch.rollouts.samples]
    proposed = torch.tensor(["proposal" in prompt.metadata for prompt in prompts])
    # a proposed chunk has no return of its own: the recorded one is of the executed chunk
    earned = returns.of(prompts).masked_fill(proposed, torch.nan)
    columns = batch.gather(torch.stack([q, earned, td_error], 1))
    td_error = columns[:, 2][~columns[:, 2].isnan()]
    if len(td_error):
        batch.report({"q/td_error": float(td_error.mean())})
    q, earned = columns[~columns[:, :2].isnan().any(1), :2].unbind(1)
    if len(q) > 1 and len(q.unique()) > 1 and len(earned.unique()) > 1:
        batch.report({"q/rank_correlation": float(spearmanr(q.numpy(), earned.numpy()).statistic)})
