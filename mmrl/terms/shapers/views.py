"""Advantages for responses that were read off the image."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.measurements.responses import ViewLikelihoods
from mmrl.prompts.views import MaskedPatches, View
from mmrl.protocols.requirements import Needs
from mmrl.settings import option
from mmrl.terms.term import Shaper

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class ViewInformation(Shaper):
    """A bonus for the pointwise mutual information of response and view: the log-likelihood under the prompt less that
    under another view, such as one without its image, compared within the group."""

    equation: ClassVar[str] = (
        "A_i <- A_i + weight (I_i - mean of I over the group), I = mean_t (logp_t - logp_t under the view), "
        "at most bound"
    )
    source: ClassVar[str] = "reconstructed from MIRL's reward: the pointwise mutual information of text and image"
    test: ClassVar[str] = "tests/joints/test_shapers.py"
    type: str = "view_information"
    weight: float = option(0.1, "of the information", gt=0)
    bound: float = option(5.0, "largest information that is rewarded", unit="nats", gt=0)
    view: View = option(MaskedPatches(), "the other view")

    @property
    def needs(self) -> Needs:
        offers, statistics = frozenset({"single_sample_kl"}), frozenset({"logp"})
        return Needs(offers=offers, statistics=statistics, measurements=(ViewLikelihoods(self.view),))

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        rollouts, shaped = batch.rollouts, advantages.clone()
        assert rollouts.old_logp is not None
        apart = (rollouts.old_logp - batch.measured(ViewLikelihoods(self.view)).values).where(rollouts.mask, 0)
        counted = rollouts.mask.sum(1)
        information = (apart.sum(1) / counted.clamp(min=1)).clamp(max=self.bound)
        for group in rollouts.group.unique():  # a group lies on one rank
            rows = (rollouts.group == group) & (counted > 0)
            centred = information[rows] - information[rows].mean()
            shaped[rows] = advantages[rows] + self.weight * centred[:, None]
        return shaped
