"""A bonus for short right responses and a penalty for long ones, within the group (Kimi k1.5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.reward_transforms.transform import Transform, group_rows
from mmrl.protocols.requirements import Needs
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class Length(Transform):
    """Adds a length reward to each reward: positive for right responses that are short for their group, negative for
    long ones, and never positive for wrong ones."""

    equation: ClassVar[str] = (
        "right: r + weight x, wrong: r + weight min(0, x), x = 1/2 - (l - min l) / (max l - min l) over the group; x = "
        "0 where all lengths are equal"
    )
    source: ClassVar[str] = "Kimi k1.5, arXiv 2501.12599, section 2.3.3"
    type: str = "length"
    weight: float = option(0.5, "weight of the length reward", gt=0)
    threshold: float = option(0.5, "a response is right if its reward is above it")

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"text"}))

    def change(self, rewards: Tensor, batch: Batch) -> Tensor:
        """Returns the rewards plus weight x length reward, [rollout of all ranks]. Lengths are compared with those of
        the group's scored rollouts."""
        changed, length = rewards.clone(), batch.column("length").to(rewards)
        for rows in group_rows(rewards, batch.column("group")):
            shortest, longest = length[rows].aminmax() if len(rows) else (0, 0)
            if longest > shortest:
                bonus = 0.5 - (length[rows] - shortest) / (longest - shortest)
                bonus = bonus.where(rewards[rows] > self.threshold, bonus.clamp(max=0))
                changed[rows] = rewards[rows] + self.weight * bonus
        return changed
