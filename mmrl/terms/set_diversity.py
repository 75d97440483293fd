"""Advantages for what a rollout adds to the diversity of its group."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.needs import Needs
from mmrl.settings import option
from mmrl.terms.base import Shaper

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.facts import Batch


class SetDiversity(Shaper):
    """A rollout gains what its group's diversity would lose without it; the rarer, the more."""

    equation: ClassVar[str] = (
        "A_i <- A_i + weight (d_i - mean d), d_i = logdet(I + K / tau) - logdet of the same without i, K the cosine of "
        "counted n-grams of characters of the group's responses"
    )
    source: ClassVar[str] = "reconstructed from the abstract on set-level diversity: leave-one-out of a kernel's logdet"
    test: ClassVar[str] = "tests/joints/test_shapers.py"
    type: str = "set_diversity"
    weight: float = option(0.1, "of the diversity", gt=0)
    tau: float = option(1.0, "the kernel is divided by it", gt=0)
    n: int = option(3, "characters of an n-gram", ge=1)
    threshold: float | None = option(None, "only for rollouts whose reward is above it; null: for all")

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"text"}))

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        import torch

        from mmrl.core.texts import similarity

        rollouts, gained = batch.rollouts, torch.zeros(len(batch.rollouts))
        rewards = batch.mine(batch.combined())
        allowed = ~rewards.isnan() if self.threshold is None else rewards > self.threshold
        for group in rollouts.group.unique():  # a group lies on one rank
            rows = ((rollouts.group == group) & allowed).nonzero().flatten()
            if not len(rows):
                continue
            kernel = similarity([rollouts.samples[row].response for row in rows.tolist()], self.n) / self.tau
            inverse = torch.linalg.inv(torch.eye(len(rows), dtype=kernel.dtype) + kernel)
            lost = -inverse.diagonal().log()  # det(M without i) / det M is the inverse's diagonal
            gained[rows] = (lost - lost.mean()).to(gained)
        return advantages + self.weight * gained[:, None]
