"""Likelihoods of known responses, and of a policy's own, as loss terms."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.protocols.requirements import Needs
from mmrl.schedules.schedule import Schedule, number
from mmrl.settings import option
from mmrl.terms.term import Term

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.rollouts import Replay, Rollouts


class LikelihoodTerm(Term):
    """It makes demonstrations, replayed rollouts, or those that were better than their group, more likely."""

    equation: ClassVar[str] = "-coefficient logp, of the chosen rollouts"
    source: ClassVar[str] = "demonstrations: LUFFY, arXiv 2504.14945; positive rollouts: VAPO, arXiv 2504.05118"
    type: str = "likelihood"
    coefficient: Schedule = number(0.1, "weight of the term", ge=0)
    of: Literal["demonstrations", "replayed", "positive"] = option(
        "demonstrations",
        "demonstrations, replayed: those of rollout.extras; positive: decisions whose advantage is above 0",
    )

    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        from mmrl.rollouts import DEMONSTRATION, REPLAYED

        if self.of == "positive":
            assert micro.advantages is not None
            chosen = micro.advantages > 0
        else:
            origin = torch.zeros(len(micro), dtype=torch.long) if micro.origin is None else micro.origin
            wanted = REPLAYED if self.of == "replayed" else DEMONSTRATION
            chosen = (origin == wanted)[:, None].expand(micro.mask.shape)
        chosen = chosen.to(replay.logp.device)
        values = -self.coefficient.value * replay.logp.where(chosen, 0)
        return values, {"likelihood": replay.logp.detach().where(chosen, torch.nan)}


class LikelihoodDrop(Term):
    """Where a response as a whole has become less likely than it was, the tokens that are to blame are held. Its metric
    tells how often that is so. It acts from the second update of a step on, for at the first nothing has moved."""

    equation: ClassVar[str] = (
        "coefficient max(0, old_logp - logp) in rollouts with sum_t logp < sum_t old_logp, of those with A >= 0; else 0"
    )
    source: ClassVar[str] = "reconstructed from the regulariser against lazy likelihood displacement, arXiv 2512.04220"
    test: ClassVar[str] = "tests/joints/test_more_terms.py"
    type: str = "likelihood_drop"
    coefficient: Schedule = number(0.1, "weight of the penalty", ge=0)
    of: Literal["not_negative", "all"] = option(
        "not_negative", "rollouts: those with an advantage of at least 0, or all"
    )

    @property
    def needs(self) -> Needs:
        return Needs(old=True)

    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        device = replay.logp.device
        old = replay.logp.detach() if micro.old_logp is None else micro.old_logp.to(device)
        mask = micro.mask.to(device)
        moved = (replay.logp - old).where(mask, 0)
        fell = (moved.detach().sum(1, keepdim=True) < 0).expand_as(moved)
        chosen = fell
        if self.of == "not_negative":
            assert micro.advantages is not None
            chosen = fell & (micro.advantages.to(device) >= 0)
        values = self.coefficient.value * (-moved).relu().where(chosen, 0)
        return values, {"likelihood_fell": fell.to(values.dtype)}


class EntropyLikelihood(Term):
    """Demonstrations count less the more in doubt the policy is about them, so that they do not overturn it; its own
    rollouts of positive advantage count more the more it was in doubt."""

    equation: ClassVar[str] = (
        "-demonstrations exp(-H) logp of demonstrations, -positive exp(H) logp of rollouts with A > 0; H the mean "
        "entropy of the rollout's decisions, detached"
    )
    source: ClassVar[str] = "reconstructed from SRFT, arXiv 2506.19767; there H is of the policy, here of the rollout"
    test: ClassVar[str] = "tests/joints/test_guidance.py"
    type: str = "entropy_likelihood"
    demonstrations: Schedule = number(0.5, "weight of demonstrations", ge=0)
    positive: Schedule = number(0.1, "weight of rollouts whose advantage is above 0", ge=0)

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"entropy"}))

    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        from mmrl.rollouts import DEMONSTRATION

        assert replay.entropy is not None and micro.advantages is not None
        mask = micro.mask.to(replay.logp.device)
        entropy = replay.entropy.detach().where(mask, 0).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        origin = torch.zeros(len(micro), dtype=torch.int64) if micro.origin is None else micro.origin
        shown = (origin == DEMONSTRATION).to(mask.device)[:, None]
        good = (micro.advantages > 0).to(mask.device) & ~shown
        weight = self.demonstrations.value * (-entropy).exp() * shown + self.positive.value * entropy.exp() * good
        return -weight * replay.logp, {"entropy_likelihood/weight": weight.expand(mask.shape)}
