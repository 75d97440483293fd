"""Loss terms on the log-likelihood of demonstrations, of replayed rollouts, or of the policy's own responses."""

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

    from mmrl.protocols.parts import RolloutKind
    from mmrl.rollouts import Replay, Rollouts


class LikelihoodTerm(Term):
    """The negative log-likelihood (an SFT loss) of demonstrations, replayed rollouts, or decisions with a positive
    advantage. With of=all it keeps the policy's entropy low. With `under`, it belongs to a `kl` term against the same
    view: it keeps responses under the view sensible, since nonsense there would raise the divergence."""

    equation: ClassVar[str] = (
        "-coefficient exp(doubt H) logp, of the selected rollouts; H the mean entropy of the rollout, detached"
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
        "demonstrations, replayed: those of rollout.extras; positive: decisions with an advantage above 0; "
        "own_positive: the same, but not in demonstrations; all: every decision",
    )
    doubt: float = option(
        0.0, "weight of a rollout is exp(doubt x its mean entropy): above 0, uncertain rollouts weigh more; below, less"
    )
    under: View | None = option(None, "change of the prompt that the likelihood is conditioned on; null: none")

    @property
    def learns_from(self) -> frozenset[RolloutKind]:
        if self.of == "demonstrations" or self.of == "replayed":
            return frozenset({self.of})
        return frozenset()

    @property
    def needs(self) -> Needs:
        entropy = Needs(offers=frozenset({"entropy"} if self.doubt else ()))
        return entropy if self.under is None else entropy | Needs(measurements=(ViewReplay(self.under),))

    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes -coefficient logp of the selected decisions, 0 for others, and statistics; [rollout, decision].
        `doubt` weights rollouts by their mean entropies."""
        import torch

        logp = replay.logp if self.under is None else ViewReplay(self.under).of(replay).logp
        name = "likelihood" if self.under is None else "view_likelihood"
        selected = self._selected(micro).to(logp.device)
        stats = {name: logp.detach().where(selected, torch.nan)}
        values = -self.coefficient.value * logp.where(selected, 0)
        if self.doubt:
            weights = (self.doubt * mean_entropy(micro, replay)).exp()
            values, stats = weights * values, stats | {f"{name}/weight": weights.where(selected, torch.nan)}
        return values, stats

    def _selected(self, micro: Rollouts) -> Tensor:
        """Returns the decisions that the term applies to, [rollout, decision] bool."""
        import torch

        from mmrl.rollouts import DEMONSTRATION, REPLAYED

        if self.of == "all":
            return torch.ones_like(micro.mask)
        # without a column all rollouts are fresh ones of the policy, origin 0
        origin = torch.zeros(len(micro), dtype=torch.long) if micro.origin is None else micro.origin
        if self.of in ("positive", "own_positive"):
            assert micro.advantages is not None
            positive = micro.advantages > 0
            return positive if self.of == "positive" else positive & (origin != DEMONSTRATION)[:, None]
        selected_origin = REPLAYED if self.of == "replayed" else DEMONSTRATION
        return (origin == selected_origin)[:, None].expand(micro.mask.shape)


def mean_entropy(micro: Rollouts, replay: Replay) -> Tensor:
    """Returns the detached mean entropy of each rollout's decisions, [rollout, 1], on the device of `replay`."""
    assert replay.entropy is not None
    mask = micro.mask.to(replay.logp.device)
    return replay.entropy.detach().where(mask, 0).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


class LikelihoodDrop(Term):
    """A penalty on tokens that became less likely since sampling, in responses that became less likely as a whole.

    The metric likelihood_fell is the fraction of such responses. At the first update of a step the term is 0, since the
    policy has not changed yet.
    """

    equation: ClassVar[str] = (
        "coefficient max(0, old_logp - logp) in rollouts with sum_t logp < sum_t old_logp, of those with A >= 0; else 0"
    )
    source: ClassVar[str] = "reconstructed from the regulariser against lazy likelihood displacement, arXiv 2512.04220"
    test: ClassVar[str] = "tests/joints/test_more_terms.py"
    at_one_update: ClassVar[str] = "no likelihood has changed, so the penalty and its gradient are 0"
    type: str = "likelihood_drop"
    coefficient: Schedule = number(0.1, "weight of the penalty", ge=0)
    of: Literal["not_negative", "all"] = option(
        "not_negative", "not_negative: rollouts with an advantage of at least 0; all: all rollouts"
    )

    @property
    def needs(self) -> Needs:
        return Needs(old=True)

    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes coefficient max(0, old_logp - logp) in responses whose likelihood fell, else 0, and whether it fell;
        [rollout, decision]."""
        from mmrl.rollouts import old_logp

        device = replay.logp.device
        mask = micro.mask.to(device)
        log_ratio = (replay.logp - old_logp(micro, replay)).where(mask, 0)
        response_fell = (log_ratio.detach().sum(1, keepdim=True) < 0).expand_as(log_ratio)
        selected = response_fell
        if self.of == "not_negative":
            assert micro.advantages is not None
            selected = response_fell & (micro.advantages.to(device) >= 0)
        values = self.coefficient.value * (-log_ratio).relu().where(selected, 0)
        return values, {"likelihood_fell": response_fell.to(values.dtype)}
