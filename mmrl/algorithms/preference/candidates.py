"""Preference optimization between candidates of single denoising steps (SPO)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.algorithm import Reduction
from mmrl.algorithms.preference.group_loss import GroupLoss
from mmrl.algorithms.preference.pairs import StepwisePreference, reference_log_ratios
from mmrl.measurements.chains import CandidateCompletions
from mmrl.protocols.requirements import Needs, Reference

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch
    from mmrl.rollouts import Replay, Rollouts


class CandidatePreference(StepwisePreference):
    """DPO on each denoising step: the group's rollouts are candidates for the next state, from a shared state.

    The candidate whose noise-free completion has the highest reward is chosen, the one with the lowest is rejected. So
    a preference depends on this step alone.
    """

    equation: ClassVar[str] = (
        "-log sigmoid(beta (l_t of the best candidate of step t - l_t of the worst)), l = logp - ref_logp, clamped to "
        "log(1 - clip) and log(1 + clip), a mean over steps whose candidates differ; they share x_t, and their reward "
        "is r of their ODE completion"
    )
    source: ClassVar[str] = "SPO, arXiv 2406.04314, with rewards of completions in place of its step-aware scorer"
    test: ClassVar[str] = "tests/joints/test_candidates.py"
    type: str = "candidate_preference"

    @property
    def base_needs(self) -> Needs:
        offers, measurements = frozenset({"reference_ratio"}), (CandidateCompletions(),)
        return Needs(offers=offers, whole_groups=True, reference=Reference(), measurements=measurements)

    def advantages(self, batch: Batch) -> Tensor:
        """Returns 1 for the best candidate of each step, -1 for the worst (the first of equal ones), else 0; [rollout,
        decision]."""
        import torch

        all_rewards, group = batch.measured(CandidateCompletions()).values, batch.rollouts.group
        signs = torch.zeros(all_rewards.shape)
        for g in group.unique():
            for t in range(all_rewards.shape[1]):
                rows = ((group == g) & batch.rollout_mask & ~all_rewards[:, t].isnan()).nonzero().flatten()
                rewards = all_rewards[rows, t]
                if len(rows) > 1 and rewards.max() > rewards.min():
                    signs[rows[rewards.argmax()], t] = 1.0
                    signs[rows[rewards.argmin()], t] = -1.0
        return signs

    def denominators(self, micro: Rollouts) -> dict[str, Tensor]:
        """Returns the divisors of the loss, with "pairs", the number of this micro-batch's pairs of candidates."""
        import torch

        # without GroupLoss's number of groups, since this loss is a mean over pairs
        return super(GroupLoss, self).denominators(micro) | {"pairs": torch.tensor(len(step_pairs(micro)[0]))}

    def objective(self, micro: Rollouts, replay: Replay, reduction: Reduction) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes the mean of the pairs' losses, 0-d, and statistics [rollout, decision]."""
        import torch
        import torch.nn.functional as F

        log_ratios = self._clamp(reference_log_ratios(micro, replay), replay)
        chosen, rejected, step = (indices.to(log_ratios.device) for indices in step_pairs(micro))
        margin = self.beta.value * (log_ratios[chosen, step] - log_ratios[rejected, step])
        weight = torch.ones_like(margin) if replay.weight is None else replay.weight[chosen, step]
        # the last term is 0: it attaches the loss to the graph if there are no pairs
        total = (F.softplus(-margin) * weight).sum() + log_ratios.where(reduction.mask, 0).sum() * 0
        stats = {name: torch.full(micro.mask.shape, torch.nan) for name in ("margin", "right")}
        stats["margin"][chosen.cpu(), step.cpu()] = margin.detach().cpu()
        stats["right"][chosen.cpu(), step.cpu()] = (margin > 0).float().cpu()
        loss = total / reduction.totals["pairs"].to(total.device).clamp(min=1)
        return loss, {f"preference/{name}": values for name, values in stats.items()}

    def counted_mask(self, name: str, micro: Rollouts) -> Tensor:
        return micro.mask


def step_pairs(micro: Rollouts) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the row of the chosen candidate, of the rejected one, and the step of each pair; [pair] int64 each.
    Advantages are 1 for the chosen candidate of a step, -1 for the rejected one, else 0."""
    import torch

    assert micro.advantages is not None
    triples: list[tuple[int, int, int]] = []
    sign = micro.advantages.where(micro.mask, 0.0)
    for g in micro.group.unique():
        rows = (micro.group == g).nonzero().flatten()
        for t in range(sign.shape[1]):
            chosen, rejected = rows[sign[rows, t] > 0], rows[sign[rows, t] < 0]
            if len(chosen) and len(rejected):
                triples.append((int(chosen[0]), int(rejected[0]), t))
    chosen_rows, rejected_rows, step = torch.tensor(triples, dtype=torch.int64).view(-1, 3).unbind(1)
    return chosen_rows, rejected_rows, step
