"""A surrogate for groups that contain demonstrations (LUFFY)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.surrogates.surrogate import AS_REINFORCE, Clipped, Result
from mmrl.protocols.requirements import Needs
from mmrl.schedules.schedule import Schedule, number

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.rollouts import Replay, Rollouts


class Guided(Clipped):
    """PPO's clip for the policy's own rollouts, and a shaped likelihood p / (p + gamma) for demonstrations.

    The gradient for a demonstration is largest at tokens of probability about gamma. The surrogate needs a source of
    demonstrations such as `guided_groups`.
    """

    equation: ClassVar[str] = "clip's; for demonstrations -A p / (p + gamma), p = exp(logp), not clipped"
    source: ClassVar[str] = "policy shaping of LUFFY, arXiv 2504.14945"
    test: ClassVar[str] = "tests/joints/test_guidance.py"
    at_one_update: ClassVar[str] = f"{AS_REINFORCE} for the policy's own rollouts: low and high have no effect"
    type: str = "guided"
    gamma: Schedule = number(0.1, "probability of a demonstrated token at which its objective is half", gt=0)

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"tokens"}))

    def values(self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay) -> Result:
        """Computes PPO's clipped objective for the policy's own rollouts, and -A p / (p + gamma) for demonstrations, p
        the probability of the token; [rollout, decision]."""
        import torch

        from mmrl.core.surrogates import surrogate
        from mmrl.rollouts import DEMONSTRATION

        values, stats = surrogate(log_ratio, advantages, kind="clip", **self.bounds)
        # without origins all rollouts are the policy's own, origin 0
        origin = torch.zeros(len(micro), dtype=torch.int64) if micro.origin is None else micro.origin
        is_demonstration = (origin == DEMONSTRATION).to(values.device)[:, None].expand(values.shape)
        p = replay.logp.exp()
        shaped = p / (p + self.gamma.value)
        stats["shaped"] = shaped.detach().where(is_demonstration, torch.nan)
        return (-advantages * shaped).where(is_demonstration, values), stats
