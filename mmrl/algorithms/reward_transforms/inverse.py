"""A self-reward of unified models: the likelihood of the prompt given the generated image."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.reward_transforms.transform import Transform
from mmrl.measurements.responses import PromptLikelihoods
from mmrl.protocols.requirements import Needs
from mmrl.schedules.schedule import Schedule, number

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class InverseLikelihood(Transform):
    """Adds the mean log-likelihood of the prompt given the generated image to the reward.

    It is computed by the same (unified) model with the current weights, without a gradient.
    """

    equation: ClassVar[str] = "r + weight x mean_t log p(prompt_t | image, prompt_<t)"
    source: ClassVar[str] = "dual self-rewards, arXiv 2506.07963; the direction I2T of Co-RL, arXiv 2505.17534"
    test: ClassVar[str] = "tests/joints/test_inverse.py"
    type: str = "inverse_likelihood"
    weight: Schedule = number(1.0, "weight of the log-likelihood, which is in nats per token")

    @property
    def needs(self) -> Needs:
        return Needs(measurements=(PromptLikelihoods(),))

    def change(self, rewards: Tensor, batch: Batch) -> Tensor:
        likelihood = batch.gather(batch.measured(PromptLikelihoods()).values).to(rewards)
        batch.report({"inverse/likelihood": float(likelihood.nanmean())})
        return rewards + self.weight.value * likelihood
