"""Likelihoods of known responses, and of a policy's own, as loss terms."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.measurements.responses import ViewReplay
from mmrl.prompts.views import View
from mmrl.protocols.requirements import Needs
from mmrl.schedules.schedule import Schedule, number
from mmrl.settings import option
from mmrl.terms.term import Term

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.rollouts import Replay, Rollouts


class LikelihoodTerm(Term):
    """The likelihood of demonstrations, of replayed rollouts, or of those better than their group. With of=all it keeps
    the policy's entropy low; with `under` it accompanies a kl against the same view, whose divergence nonsense under
    the view would make large."""

    equation: ClassVar[str] = (
        "-coefficient exp(doubt H) logp, of the chosen rollouts; H the mean entropy of a rollout's decisions, detached"
    )
    source: ClassVar[str] = (
        "demonstrations: LUFFY, arXiv 2504.14945; positive rollouts: VAPO, arXiv 2504.05118; all, also under a view: "
        "the double entropy loss of PAPO, arXiv 2507.06448; doubt: reconstructed from SRFT, arXiv 2506.19767, where H "
        "is of the policy"
    )
    type: str = "likelihood"
    coefficient: Schedule = number(0.1, "weight of the term", ge=0)
    of: Literal["demonstrations", "replayed", "positive", "own_positive", "all"] = option(
        "demonstrations",
        "demonstrations, replayed: those of rollout.extras; positive: decisions whose advantage is above 0; "
        "own_positive: those of them that are in no demonstration; all: every decision",
    )
    doubt: float = option(
        0.0, "a rollout weighs exp(doubt x its mean entropy): above 0 more the more the policy was in doubt, below less"
    )
    under: View | None = option(None, "the view of the prompt under which the likelihood is; null: the prompt itself")

    @property
    def needs(self) -> Needs:
        entropy = Needs(offers=frozenset({"entropy"} if self.doubt else ()))
        return entropy if self.under is None else entropy | Needs(measurements=(ViewReplay(self.under),))

    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        logp = replay.logp if self.under is None else ViewReplay(self.under).of(replay).logp
        name = "likelihood" if self.under is None else "view_likelihood"
        chosen = self._chosen(micro).to(logp.device)
        values, stats = -self.coefficient.value * logp.where(chosen, 0), {name: logp.detach().where(chosen, torch.nan)}
        if self.doubt:
            weights = (self.doubt * mean_entropy(micro, replay)).exp()
            values, stats = weights * values, stats | {f"{name}/weight": weights.where(chosen, torch.nan)}
        return values, stats

    def _chosen(self, micro: Rollouts) -> Tensor:
        """Returns the decisions in the term, [rollout, decision] bool."""
        import torch

        from mmrl.rollouts import DEMONSTRATION, REPLAYED

        if self.of == "all":
            return torch.ones_like(micro.mask)
        origin = torch.zeros(len(micro), dtype=torch.long) if micro.origin is None else micro.origin
        if self.of in ("positive", "own_positive"):
            assert micro.advantages is not None
            better = micro.advantages > 0
            return better if self.of == "positive" else better & (origin != DEMONSTRATION)[:, None]
        wanted = REPLAYED if self.of == "replayed" else DEMONSTRATION
        return (origin == wanted)[:, None].expand(micro.mask.shape)


def mean_entropy(micro: Rollouts, replay: Replay) -> Tensor:
    """Returns the mean entropy of each rollout's decisions without its gradient, [rollout, 1], on the device of
    `replay`."""
    assert replay.entropy is not None
    mask = micro.mask.to(replay.logp.device)
    return replay.entropy.detach().where(mask, 0).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


class LikelihoodDrop(Term):
    """A penalty on tokens that became less likely, in responses that became less likely as a whole. Its metric is the
    share of such responses. It acts from the second update of a step on, for at the first nothing has moved."""

    equation: ClassVar[str] = (
        "coefficient max(0, old_logp - logp) in rollouts with sum_t logp < sum_t old_logp, of those with A >= 0; else 0"
    )
    source: ClassVar[str] = "reconstructed from the regulariser against lazy likelihood displacement, arXiv 2512.04220"
    test: ClassVar[str] = "tests/joints/test_more_terms.py"
    at_one_update: ClassVar[str] = "nothing has moved, so that the penalty and its gradient are 0"
    type: str = "likelihood_drop"
    coefficient: Schedule = number(0.1, "weight of the penalty", ge=0)
    of: Literal["not_negative", "all"] = option(
        "not_negative", "rollouts: those with an advantage of at least 0, or all"
    )

    @property
    def needs(self) -> Needs:
        return Needs(old=True)

    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        from mmrl.rollouts import old_logp

        device = replay.logp.device
        mask = micro.mask.to(device)
        moved = (replay.logp - old_logp(micro, replay)).where(mask, 0)
        fell = (moved.detach().sum(1, keepdim=True) < 0).expand_as(moved)
        chosen = fell
        if self.of == "not_negative":
            assert micro.advantages is not None
            chosen = fell & (micro.advantages.to(device) >= 0)
        values = self.coefficient.value * (-moved).relu().where(chosen, 0)
        return values, {"likelihood_fell": fell.to(values.dtype)}
