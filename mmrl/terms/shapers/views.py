"""An advantage bonus for responses that depend on the image."""

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
    """A bonus for the pointwise mutual information of response and image, minus its mean over the group.

    It is estimated by the log-probability of the response given the prompt minus that given a view of the prompt, such
    as one with a masked image.
    """

    equation: ClassVar[str] = (
        "A_i <- A_i + weight (I_i - mean of I over the group), I = min(bound, mean_t (logp_t - logp_t under the view))"
    )
    source: ClassVar[str] = "reconstructed from MIRL's reward: the pointwise mutual information of text and image"
    test: ClassVar[str] = "tests/joints/test_shapers.py"
    type: str = "view_information"
    weight: float = option(0.1, "weight of the bonus", gt=0)
    bound: float = option(5.0, "largest information that is rewarded", unit="nats", gt=0)
    view: View = option(MaskedPatches(), "change of the prompt")

    @property
    def needs(self) -> Needs:
        offers, statistics = frozenset({"single_sample_kl"}), frozenset({"logp"})
        return Needs(offers=offers, statistics=statistics, measurements=(ViewLikelihoods(self.view),))

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        """Returns the advantages plus weight x (the rollout's mean log-ratio of prompt and view, at most `bound`, minus
        its mean over the group); [rollout, decision]."""
        rollouts, shaped = batch.rollouts, advantages.clone()
        assert rollouts.old_logp is not None
        view_logp = batch.measured(ViewLikelihoods(self.view)).values
        difference = (rollouts.old_logp - view_logp).where(rollouts.mask, 0)
        num_decisions = rollouts.mask.sum(1)
        information = (difference.sum(1) / num_decisions.clamp(min=1)).clamp(max=self.bound)
        for group in rollouts.group.unique():  # a group lies on one rank
            rows = (rollouts.group == group) & (num_decisions > 0)
            centered = information[rows] - information[rows].mean()
            shaped[rows] = advantages[rows] + self.weight * centered[:, None]
        return shaped
