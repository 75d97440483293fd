"""A bonus for answers that depend on what a view of the prompt removes."""

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
    """A right response earns a bonus where the group's accuracy is high enough compared with that under a view: with
    shuffled frames, where the policy uses the order of a video's frames."""

    equation: ClassVar[str] = (
        "r <- r + bonus where accuracy = 1 and the group's mean accuracy >= margin * that under the view"
    )
    source: ClassVar[str] = "T-GRPO, Video-R1, arXiv 2503.21776"
    test: ClassVar[str] = "tests/joints/test_view_contrast.py"
    type: str = "view_contrast"
    view: View = option(ShuffledFrames(), "under which the prompt is answered again, by as many responses")
    bonus: float = option(0.3, "for a right response", gt=0)
    margin: float = option(0.8, "factor of the accuracy under the view", gt=0)

    @property
    def needs(self) -> Needs:
        return Needs(measurements=(ViewAnswers(self.view),))

    def change(self, rewards: Tensor, batch: Batch) -> Tensor:
        under = batch.gather(batch.measured(ViewAnswers(self.view)).accuracy)
        right = batch.column("accuracy") == 1
        accuracy = batch.column("group/accuracy")
        batch.report({"view_contrast/accuracy_under_view": float(under.nanmean())})
        return rewards + self.bonus * (right & (accuracy >= self.margin * under)).to(rewards)
