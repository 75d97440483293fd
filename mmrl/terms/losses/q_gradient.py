"""Gradients of Q networks through the policy's actions: the actor of SAC."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.protocols.requirements import Needs
from mmrl.schedules.schedule import Schedule, number
from mmrl.settings import Section, option
from mmrl.terms.losses.advantage_weighted import StepReturns
from mmrl.terms.losses.q_weighted import QNetworks, report_agreement
from mmrl.terms.term import Term

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.measurements.action_values import ActionValues
    from mmrl.measurements.noise_values import NoiseQValues
    from mmrl.measurements.q_values import QValues
    from mmrl.protocols.batch import Batch
    from mmrl.protocols.parts import RolloutKind
    from mmrl.rollouts import Replay, Rollouts


class EntropyBonus(Section):
    """The weight of the policy's entropy in the targets of Q and in the policy's objective."""

    temperature: float = option(0.1, "weight of the entropy before training", gt=0)
    target: float | None = option(
        -1.0,
        "target entropy in nats per sampled number, of the actions or of the noise of a steered head, to which the "
        "weight is adapted; null: the weight is fixed",
    )
    lr: float = option(3e-4, "learning rate of the weight's logarithm", gt=0)


class NoiseQFunctions(Section):
    """Q networks of the noise of a `steered` head, which learn the Q values of the actions denoised from it."""

    updates: int = option(1, "updates per training step, after those of Q; each draws new noise", ge=1)


class SoftQFunctions(QNetworks):
    """Q networks with target networks, whose targets bootstrap from the current policy's own actions and entropy."""

    entropy: EntropyBonus | None = option(EntropyBonus(), "bonus for entropy; null: none")
    noise: NoiseQFunctions | None = option(
        None,
        "Q networks of the noise of action.head.type=steered, whose gradient the policy follows (DSRL-NA); null: the "
        "gradient goes through the actions",
    )

    def measurement(self, returns: StepReturns) -> QValues:
        """Returns the measurement that trains the Q networks, with the settings of the entropy bonus. returns: rewards
        that Q sums."""
        measured, bonus = super().measurement(returns), self.entropy
        if bonus is None:
            return measured
        return replace(measured, temperature=bonus.temperature, temperature_lr=bonus.lr, entropy=bonus.target)


class QGradient(Term):
    """The Q value of an action that the policy samples at each recorded observation: its gradient goes through the
    action. Q networks learn from recorded steps, which rollout.extras=[stored_steps] brings; with
    rollout.extras=[action_proposals] it also works for action heads that cannot score recorded actions."""

    equation: ClassVar[str] = (
        "coefficient (temperature log pi(a | s) - min_i Q_i(s, a)), a = a(s, noise) of the current policy, s recorded; "
        "Q_i: (r + gamma^k (min_j Q'_j(s', a') - temperature log pi(a' | s')) - Q_i(s, a))^2; with q.noise: a = flow(w)"
        " with noise w, pi(a | s) = pi(w | s), and the policy climbs N_i(s, w) in place of Q_i(s, a), N_i: "
        "(Q_i(s, flow(e)) - N_i(s, e))^2, e standard normal"
    )
    source: ClassVar[str] = (
        "the actor of SAC, arXiv 1812.05905, on chunks of actions as in Q-chunking, arXiv 2507.07969; of=mean as in "
        "RLPD, arXiv 2302.02948; q.noise: DSRL-NA, arXiv 2506.15799; its bound of the noise is action.head.bound"
    )
    test: ClassVar[str] = "tests/joints/test_q_gradient.py"
    type: str = "q_gradient"
    coefficient: Schedule = number(1.0, "weight of the term", ge=0)
    of: Literal["least", "mean"] = option(
        "least", "value that the policy maximizes: the least of the Q networks' values, or their mean"
    )
    returns: StepReturns = option(StepReturns(), "rewards that Q sums")
    q: SoftQFunctions = option(SoftQFunctions(), "the Q networks, and the bonus for entropy")

    @property
    def values_of_actions(self) -> ActionValues:
        """Returns the measurement of Q at what the policy samples."""
        from mmrl.measurements.action_values import ActionValues
        from mmrl.measurements.noise_values import NoiseActionValues

        values, noise = self.q.measurement(self.returns), self.distilled
        return ActionValues(values, self.of) if noise is None else NoiseActionValues(values, self.of, noise)

    @property
    def distilled(self) -> NoiseQValues | None:
        """Returns the measurement that trains Q networks of the noise, None if there are none."""
        from mmrl.measurements.noise_values import NoiseQValues

        noise = self.q.noise
        return None if noise is None else NoiseQValues(self.q.measurement(self.returns), noise.updates)

    @property
    def learns_from(self) -> frozenset[RolloutKind]:
        return frozenset({"replayed", "proposals", "demonstrations"})

    @property
    def needs(self) -> Needs:
        measured = self.values_of_actions
        distilled = () if self.distilled is None else (self.distilled,)
        return Needs(measurements=(measured.values, *distilled, measured))

    def prepare(self, batch: Batch) -> None:
        report_agreement(batch, self.q.measurement(self.returns), self.returns)
        if self.distilled is not None:
            errors = batch.gather(batch.measured(self.distilled).values)
            if len(errors := errors[~errors.isnan()]):
                batch.report({"q/noise_error": float(errors.mean())})

    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes coefficient (temperature logp - Q) of the action that the policy sampled at a recorded observation,
        and statistics, NaN for other rollouts; [rollout, decision]."""
        import torch

        sampled = replay.extras[self.values_of_actions.name]
        cost = (sampled.temperature * sampled.logp - sampled.q).to(replay.logp)
        shape, recorded = replay.logp.shape, sampled.recorded.to(replay.logp.device)[:, None]
        columns = {"q": sampled.q, "logp": sampled.logp, "temperature": torch.full_like(sampled.q, sampled.temperature)}
        stats = {
            f"q_gradient/{name}": column.detach().to(replay.logp)[:, None].expand(shape).where(recorded, torch.nan)
            for name, column in columns.items()
        }
        return self.coefficient.value * cost[:, None].expand(shape), stats
