"""Settings of the task of sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.rewards.settings import RewardSpec
from mmrl.settings import load_attribute, option
from mmrl.tasks.settings import TaskSettings

if TYPE_CHECKING:
    from mmrl.protocols.parts import Task


class TextSumsSettings(TaskSettings):
    """Sums of two numbers, `27+45=`. Every fourth pair of numbers is held out, whatever the seeds."""

    test: ClassVar[str] = "tests/tasks/test_text_sums.py"
    type: str = "text_sums"
    largest: int = option(99, "largest summand", ge=3)
    train_size: int = option(20_000, "training sums", ge=1)
    eval_size: int = option(500, "held-out sums", ge=1)
    eval_seed: int = option(0, "random seed of the held-out sums", ge=0)
    careless: float = option(0.0, "share of training demonstrations that forget the carry", ge=0, le=1)
    rewards: list[RewardSpec] = option([RewardSpec(name="exact_match")], "rewards of a response", min_length=1)

    def build(self, seed: int) -> Task:
        return load_attribute("mmrl.tasks.text_sums.task:TextSums")(self, seed)
