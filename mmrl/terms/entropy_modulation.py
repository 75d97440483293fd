"""Advantages scaled by how sure each decision was."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.needs import Needs
from mmrl.settings import option
from mmrl.terms.base import Shaper

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.facts import Batch


class EntropyModulation(Shaper):
    """Sure decisions count more and doubtful ones less, for the gradient of a doubtful one is larger by itself; a
    decision after which things were clear gets a bonus. In the end the mean is taken away."""

    equation: ClassVar[str] = (
        "A_t exp(-k H_t) / mean exp(-k H) + zeta exp(-k_future H_{t+1}), less the mean over the batch; H scaled to "
        "0..1 over the decisions of the batch, no bonus for the last"
    )
    source: ClassVar[str] = "reconstructed from memory of EMPG, arXiv 2509.09265, which has it for steps of agents"
    test: ClassVar[str] = "tests/joints/test_shapers.py"
    type: str = "entropy_modulation"
    k: float = option(1.0, "how quickly doubt lowers an advantage", ge=0)
    k_future: float = option(1.0, "how quickly doubt in the next decision lowers the bonus", ge=0)
    zeta: float = option(0.05, "weight of the bonus", ge=0)

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"entropy"}), statistics=frozenset({"entropy"}))

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        import torch

        rollouts = batch.rollouts
        assert rollouts.old_entropy is not None
        mask = rollouts.mask
        everyone = batch.decisions(rollouts.old_entropy)
        if not len(everyone):
            return advantages
        spread = (everyone.max() - everyone.min()).clamp(min=1e-12)
        doubt = (rollouts.old_entropy - everyone.min()) / spread
        sure = (-self.k * doubt).exp()
        follows = torch.zeros_like(mask)
        follows[:, :-1] = mask[:, 1:] & mask[:, :-1]
        clear = (-self.k_future * doubt.roll(-1, 1)).exp().where(follows, 0)
        shaped = advantages * sure / batch.decisions(sure).mean() + self.zeta * clear
        return (shaped - batch.decisions(shaped).mean()).where(mask, 0)
