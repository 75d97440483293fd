"""Preferences between the candidates of single denoising steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.algorithm import Reduction
from mmrl.algorithms.preference.group_loss import GroupLoss
from mmrl.algorithms.preference.pairs import StepwisePreference, gains
from mmrl.measurements.chains import CandidateCompletions
from mmrl.protocols.requirements import Needs, Reference

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch
    from mmrl.rollouts import Replay, Rollouts


class CandidatePreference(StepwisePreference):
    """At every step of a chain a group draws candidates from one state. The candidate whose completion earns most is
    preferred to the one whose completion earns least, so that the preference is about this step alone."""

    equation: ClassVar[str] = (
        "-log sigmoid(beta (logp_t - ref_logp_t of the best candidate of step t - the same of the worst)), a mean over "
        "steps whose candidates differ; they share x_t, and are worth r of their ODE completion"
    )
    source: ClassVar[str] = "SPO, arXiv 2406.04314, with rewards of completions in place of its step-aware scorer"
    test: ClassVar[str] = "tests/joints/test_candidates.py"
    type: str = "candidate_preference"

    @property
    def base_needs(self) -> Needs:
        offers, measurements = frozenset({"reference_ratio"}), (CandidateCompletions(),)
        return Needs(offers=offers, whole_groups=True, reference=Reference(), measurements=measurements)

    def advantages(self, batch: Batch) -> Tensor:
        """Computes 1 for the best candidate of a step, -1 for the worst, of equal ones the first, and 0 for others;
        [rollout, decision]."""
        import torch

        worth, group = batch.measured(CandidateCompletions()).values, batch.rollouts.group
        signs = torch.zeros(worth.shape)
        for g in group.unique():
            for t in range(worth.shape[1]):
                rows = ((group == g) & batch.rollout_mask & ~worth[:, t].isnan()).nonzero().flatten()
                rewards = worth[rows, t]
                if len(rows) > 1 and rewards.max() > rewards.min():
                    signs[rows[rewards.argmax()], t] = 1.0
                    signs[rows[rewards.argmin()], t] = -1.0
        return signs

    def denominators(self, micro: Rollouts) -> dict[str, Tensor]:
        import torch

        return super(GroupLoss, self).denominators(micro) | {"pairs": torch.tensor(len(pairs(micro)[0]))}

    def objective(self, micro: Rollouts, replay: Replay, over: Reduction) -> tuple[Tensor, dict[str, Tensor]]:
        import torch
        import torch.nn.functional as F

        gained = gains(micro, replay)
        good, bad, step = (part.to(gained.device) for part in pairs(micro))
        margin = self.beta.value * (gained[good, step] - gained[bad, step])
        weight = torch.ones_like(margin) if replay.weight is None else replay.weight[good, step]
        total = (F.softplus(-margin) * weight).sum() + gained.where(over.mask, 0).sum() * 0
        stats = {name: torch.full(micro.mask.shape, torch.nan) for name in ("margin", "right")}
        stats["margin"][good.cpu(), step.cpu()] = margin.detach().cpu()
        stats["right"][good.cpu(), step.cpu()] = (margin > 0).float().cpu()
        loss = total / over.totals["pairs"].to(total.device).clamp(min=1)
        return loss, {f"preference/{name}": values for name, values in stats.items()}

    def counted_mask(self, name: str, micro: Rollouts) -> Tensor:
        return micro.mask


def pairs(micro: Rollouts) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the rows of the good and of the bad candidate, and the step, of counted decisions; [pair] int64 each."""
    import torch

    assert micro.advantages is not None
    triples: list[tuple[int, int, int]] = []
    sign = micro.advantages.where(micro.mask, 0.0)
    for g in micro.group.unique():
        rows = (micro.group == g).nonzero().flatten()
        for t in range(sign.shape[1]):
            good, bad = rows[sign[rows, t] > 0], rows[sign[rows, t] < 0]
            if len(good) and len(bad):
                triples.append((int(good[0]), int(bad[0]), t))
    good_, bad_, step = torch.tensor(triples, dtype=torch.int64).view(-1, 3).unbind(1)
    return good_, bad_, step
