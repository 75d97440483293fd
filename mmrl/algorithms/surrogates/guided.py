"""A surrogate for groups that hold demonstrations."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.surrogates.surrogate import AS_REINFORCE, Clipped, Result
from mmrl.protocols.requirements import Needs
from mmrl.schedules.schedule import Schedule, number

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.rollouts import Replay, Rollouts


class Guided(Clipped):
    """The clipped objective for the policy's own rollouts, and for demonstrations a shaped likelihood whose gradient is
    largest for tokens that are rare but not out of reach. It needs a source such as `guided_groups`."""

    equation: ClassVar[str] = (
        "clip's; of demonstrations -A p / (p + gamma), p = exp(logp), from any source, not clipped"
    )
    source: ClassVar[str] = "policy shaping of LUFFY, arXiv 2504.14945"
    test: ClassVar[str] = "tests/joints/test_guidance.py"
    at_one_update: ClassVar[str] = f"{AS_REINFORCE} for the policy's own rollouts: low and high bind nothing"
    type: str = "guided"
    gamma: Schedule = number(0.1, "probability of a demonstrated token that has half of the objective", gt=0)

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"tokens"}))

    def values(self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay) -> Result:
        import torch

        from mmrl.core.surrogates import surrogate
        from mmrl.rollouts import DEMONSTRATION

        values, stats = surrogate(log_ratio, advantages, kind="clip", **self.bounds)
        origin = torch.zeros(len(micro), dtype=torch.int64) if micro.origin is None else micro.origin
        shown = (origin == DEMONSTRATION).to(values.device)[:, None].expand(values.shape)
        p = replay.logp.exp()
        shaped = p / (p + self.gamma.value)
        stats["shaped"] = shaped.detach().where(shown, torch.nan)
        return (-advantages * shaped).where(shown, values), stats
