"""Steps that several rollouts have in common count once."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.needs import Needs
from mmrl.terms.base import Shaper

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.facts import Batch


class SharedPrefix(Shaper):
    """The advantage of a decision is divided by the rollouts of its group that begin with the same decisions up to and
    with it, for a step that many rollouts share would otherwise count as often."""

    equation: ClassVar[str] = "A_t <- A_t / #{j in the group: the first t decisions of j are those of i}"
    source: ClassVar[str] = "lambda-GRPO, arXiv 2509.21154"
    test: ClassVar[str] = "tests/joints/test_shapers.py"
    type: str = "shared_prefix"

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"numbers"}), numbers=True)

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        rollouts, shaped = batch.rollouts, advantages.clone()
        numbers, mask = batch.column("numbers"), rollouts.mask
        for group in rollouts.group.unique():  # a group lies on one rank
            rows = rollouts.group == group
            own, counted = numbers[rows], mask[rows]
            same = (own[:, None] == own[None]) & counted[:, None] & counted[None]  # [rollout, other, decision]
            sharing = same.long().cumprod(2).sum(1)
            shaped[rows] = advantages[rows] / sharing.clamp(min=1)
        return shaped
