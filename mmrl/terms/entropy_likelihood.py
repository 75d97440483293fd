"""The likelihood of demonstrations and of right rollouts, weighted by how sure the policy is."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.controls import Control, number
from mmrl.needs import Needs
from mmrl.terms.base import Term

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.rollouts import Replay, Rollouts


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
    demonstrations: Control = number(0.5, "weight of demonstrations", ge=0)
    positive: Control = number(0.1, "weight of rollouts whose advantage is above 0", ge=0)

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
