"""A bonus for right answers that depend on what a changed prompt (a view) lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.reward_transforms.transform import Transform
from mmrl.measurements.answers import ViewAnswers
from mmrl.prompts.counterfactual_views import ShuffledFrames
from mmrl.prompts.views import View
from mmrl.protocols.requirements import Needs
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class ViewContrast(Transform):
    """A bonus for right responses if the group's accuracy is high compared with the accuracy under a view.

    With shuffled frames it rewards groups in which the policy uses the order of a video's frames (T-GRPO).
    """

    equation: ClassVar[str] = (
        "r <- r + bonus where accuracy = 1 and the group's mean accuracy >= margin * that under the view"
    )
    source: ClassVar[str] = "T-GRPO, Video-R1, arXiv 2503.21776"
    test: ClassVar[str] = "tests/joints/test_view_contrast.py"
    type: str = "view_contrast"
    view: View = option(
        ShuffledFrames(),
        "change of the prompt; the policy answers the changed prompt too, as often as the original one",
    )
    bonus: float = option(0.3, "bonus of a right response", gt=0)
    margin: float = option(0.8, "factor of the accuracy under the view", gt=0)

    @property
    def needs(self) -> Needs:
        return Needs(measurements=(ViewAnswers(self.view),))

    def change(self, rewards: Tensor, batch: Batch) -> Tensor:
        """Returns the rewards plus `bonus` for right responses of groups whose mean accuracy is at least margin x the
        mean accuracy under the view; [rollout of all ranks]."""
        view_accuracy = batch.gather(batch.measured(ViewAnswers(self.view)).accuracy)
        right = batch.column("accuracy") == 1
        accuracy = batch.column("group/accuracy")
        batch.report({"view_contrast/accuracy_under_view": float(view_accuracy.nanmean())})
        return rewards + self.bonus * (right & (accuracy >= self.margin * view_accuracy)).to(rewards)
