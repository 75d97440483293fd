"""The likelihood of chosen rollouts as a loss term."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.controls import Control, number
from mmrl.settings import option
from mmrl.terms.base import Term

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.rollouts import Replay, Rollouts


class Likelihood(Term):
    """It makes demonstrations, replayed rollouts, or those that were better than their group, more likely."""

    equation: ClassVar[str] = "-coefficient logp, of the chosen rollouts"
    source: ClassVar[str] = "demonstrations: LUFFY, arXiv 2504.14945; positive rollouts: VAPO, arXiv 2504.05118"
    type: str = "likelihood"
    coefficient: Control = number(0.1, "weight of the term", ge=0)
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
