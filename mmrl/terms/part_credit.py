"""Credit for the text and for the picture of a response, each from the rewards that it answers for."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.needs import Needs
from mmrl.settings import option
from mmrl.terms.base import Shaper

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.facts import Batch


class PartCredit(Shaper):
    """What a picture earns need not be owed to the words before it, nor what the words earn to the picture: each part
    has a weight, and may be compared with its group by rewards of its own."""

    equation: ClassVar[str] = (
        "A_part = weight x A, or weight x (r - mean) / scale by group, r the weighted sum of the part's own rewards"
    )
    source: ClassVar[str] = "reconstructed from T2I-R1, arXiv 2505.00703: credit of the two levels of its reasoning"
    test: ClassVar[str] = "tests/joints/test_parts.py"
    type: str = "part_credit"
    text: float = option(1.0, "weight of the text's advantages", ge=0)
    picture: float = option(1.0, "weight of the picture's advantages", ge=0)
    text_rewards: list[str] = option([], "rewards that text is compared by; none: the advantage that there is")
    picture_rewards: list[str] = option(
        [], "rewards that the picture is compared by; none: the advantage that there is"
    )
    scale: Literal["group_std", "none"] = option("group_std", "what differences of its own rewards are divided by")

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"parts"}))

    def check_rewards(self, names: list[str]) -> None:
        for key in ("text_rewards", "picture_rewards"):
            for name in vars(self)[key]:
                if name not in names:
                    raise ValueError(f"algorithm.shaping: {key}: {name} is none of the rewards, {', '.join(names)}")

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        from mmrl.rollouts import PICTURE, TEXT, in_part

        text = self.text * self._own(self.text_rewards, advantages, batch)
        picture = self.picture * self._own(self.picture_rewards, advantages, batch)
        found = text.where(in_part(batch.rollouts, TEXT), advantages)
        return picture.where(in_part(batch.rollouts, PICTURE), found)

    def _own(self, names: list[str], advantages: Tensor, batch: Batch) -> Tensor:
        """[rollout, decision] by these rewards alone."""
        from mmrl.core.advantages import group_advantages

        if not names:
            return advantages
        columns = [batch.reward_names.index(name) for name in names]
        found, _ = group_advantages(
            batch.fact("rewards")[:, columns],
            batch.fact("group"),
            weights=batch.reward_weights[columns],
            scale=self.scale,
        )
        return batch.mine(found)[:, None].expand(advantages.shape).to(advantages)
