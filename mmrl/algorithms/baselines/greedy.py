"""The reward of the most likely response as the baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.baselines.baseline import Baseline, CombineRewards
from mmrl.measurements.answers import GreedyRewards
from mmrl.protocols.requirements import Needs

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch
    from mmrl.protocols.job import JobConfig


class Greedy(Baseline):
    """The reward of a greedy response to the same prompt, which is not trained on (ReMax). It needs no group."""

    equation: ClassVar[str] = "A = r - r(greedy response)"
    source: ClassVar[str] = "ReMax, arXiv 2310.10505"
    test: ClassVar[str] = "tests/joints/test_baselines.py"
    uses_other_rollouts: ClassVar[bool] = False
    single_reward_only: ClassVar[bool] = True
    default_scale: ClassVar[str] = "none"
    type: str = "greedy"

    @property
    def needs(self) -> Needs:
        return Needs(measurements=(GreedyRewards(),))

    def check(self, config: JobConfig) -> None:
        temperature = vars(config.evaluation).get("temperature", 0.0)
        if temperature != 0:
            raise ValueError(
                f"evaluation.temperature={temperature} does not work with algorithm.baseline=greedy, whose greedy "
                "responses are sampled at that temperature; set evaluation.temperature=0"
            )

    def compute(self, rewards: Tensor, batch: Batch, combine: CombineRewards) -> Tensor:
        return batch.gather(combine(batch.measured(GreedyRewards()).values))
