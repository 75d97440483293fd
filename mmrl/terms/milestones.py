"""Credit for the segments between milestones of conversations."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.needs import Needs
from mmrl.settings import option
from mmrl.terms.base import Shaper

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.facts import Batch


class Milestones(Shaper):
    """A turn that the environment rewards is a milestone, and the turns up to it are a segment. A segment is worth the
    more the fewer turns it took, and is compared with the same segment of the others of the group; what the whole
    conversation earned counts beside it."""

    equation: ClassVar[str] = (
        "A = outcome A_rollout + weight (w_k - mean w_k) / (std w_k + eps), by group; w_k = gamma^(turns - 1) of the "
        "k-th segment if it ends with a reward above 0, else 0"
    )
    source: ClassVar[str] = "reconstructed from BEACON: credit of milestone segments beside that of the trajectory"
    test: ClassVar[str] = "tests/joints/test_milestones.py"
    type: str = "milestones"
    gamma: float = option(0.9, "discount of a turn within a segment", ge=0, le=1)
    weight: float = option(1.0, "of the segments' advantages", ge=0)
    outcome: float = option(1.0, "weight of the advantages that the algorithm gave the whole rollout", ge=0)
    scale: Literal["group_std", "none"] = option("group_std", "what differences are divided by")

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"turns"}))

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        from mmrl.core.turns import milestone_segments, turn_advantages
        from mmrl.rollouts import Turns

        turns = batch.rollouts.extras["turns"]
        assert isinstance(turns, Turns)
        number, worth, there = milestone_segments(turns.rewards, turns.mask, self.gamma)
        found = turn_advantages(worth, there & batch.kept[:, None], batch.rollouts.group, scale=self.scale)
        return self.outcome * advantages + self.weight * found.gather(1, number.gather(1, turns.number))
