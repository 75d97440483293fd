"""Credit of tokens by an implicit process reward model, which is trained on outcomes only (PRIME)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.measurements.implicit import ImplicitRewards
from mmrl.protocols.requirements import Needs, Reference, needs_column
from mmrl.settings import option
from mmrl.terms.term import Shaper

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class ImplicitProcess(Shaper):
    """Adds returns of implicit process rewards to the advantages (PRIME).

    A copy of the policy is trained, on the policy's rollouts, to predict the outcome from the sum of its log-ratios to
    the reference policy. The log-ratio at a token is the token's process reward. With algorithm.baseline=leave_one_out
    and algorithm.scale=none this is PRIME's advantage. Its released code has in addition: baseline: released,
    normalise: true, updates: after, and a second shaper, whitening.
    """

    equation: ClassVar[str] = (
        "r_t = beta (log pi_phi(y_t) - log pi_ref(y_t)); phi minimizes -o log s - (1 - o) log(1 - s), s = "
        "sigmoid(sum_t r_t), o the outcome; A_t = outcome A + weight sum_{u >= t} gamma^(u - t) (r_u - b), b the mean "
        "over the other rollouts of the group of their mean r"
    )
    source: ClassVar[str] = "PRIME, arXiv 2502.01456, and PRIME-RL/PRIME at 18ad596f; Implicit PRM, arXiv 2412.01981"
    test: ClassVar[str] = "tests/whole_runs/test_implicit_process.py"
    type: str = "implicit_process"
    label: str = option("accuracy", "outcome, 0 or 1, that the copy is trained on: accuracy or reward/NAME")
    beta: float = option(0.05, "factor of the log-ratio", gt=0)
    lr: float = option(1e-6, "learning rate of the copy (Adam)", ge=0)
    gamma: float = option(1.0, "discount per decision", ge=0, le=1)
    weight: float = option(1.0, "weight of the process advantages", ge=0)
    outcome: float = option(1.0, "weight of the algorithm's own advantage of the rollout", ge=0)
    baseline: Literal["others", "released"] = option(
        "others",
        "others: the mean reward of the group's G - 1 other rollouts; released: as in PRIME's code, G / (G - 1) (r_u - "
        "the group's mean)",
    )
    normalise: bool = option(
        False, "divide the process rewards by the largest absolute sum of rewards from any decision on, over the batch"
    )
    updates: Literal["before", "after"] = option(
        "before",
        "before: train the copy on a step's rollouts, then score them (one more forward pass); after: score first",
    )

    @property
    def measurement(self) -> ImplicitRewards:
        return ImplicitRewards(self.label, self.beta, self.lr, self.updates)

    @property
    def needs(self) -> Needs:
        return needs_column(self.label) | Needs(reference=Reference(), measurements=(self.measurement,))

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        """Returns outcome x the advantages + weight x the discounted returns of the implicit process rewards, minus
        their baseline from the group's other rollouts; [rollout, decision]."""
        from mmrl.core.credit import leave_one_out_returns

        rewards = batch.measured(self.measurement).values
        scored = batch.rollout_mask & batch.scored()
        mask = batch.rollouts.mask & scored[:, None]
        self._report(rewards, batch)
        if self.normalise:
            rewards = rewards / self._largest_return(rewards, batch)
        process = leave_one_out_returns(rewards, mask, batch.rollouts.group, self.gamma, baseline=self.baseline)
        return self.outcome * advantages + self.weight * process.to(advantages)

    def _largest_return(self, rewards: Tensor, batch: Batch) -> Tensor:
        """Returns the largest absolute sum of a rollout's rewards from a decision on, of all ranks, plus 1e-6; 0-d."""
        from mmrl.core.turns import discounted_returns

        largest = discounted_returns(rewards, 1.0).abs().amax(1)
        return batch.gather(largest).max() + 1e-6

    def _report(self, rewards: Tensor, batch: Batch) -> None:
        """Logs the copy's cross-entropy and its accuracy in predicting the outcome, for the rewards [rollout,
        decision] as they are used: after its update or before it, by `updates`."""
        from mmrl.measurements.implicit import outcome_loss

        logits, outcome = batch.gather(rewards.sum(1)), batch.column(self.label)
        known = outcome.isfinite() & (batch.column("length") > 0)
        if bool(known.any()):
            logits, outcome = logits[known], outcome[known]
            batch.report(
                {
                    "implicit_process/loss": float(outcome_loss(logits, outcome) / len(logits)),
                    "implicit_process/accuracy": float(((logits > 0) == (outcome > 0.5)).float().mean()),
                }
            )
