"""A baseline from the rewards of each prompt in earlier steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.baselines.baseline import Baseline, CombineRewards
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class Running(Baseline):
    """The mean reward of the prompt in earlier steps, with smaller weights for older rewards.

    It needs no group: one rollout per prompt is enough, and a group of equal rewards has a learning signal if earlier
    rewards of the prompt differ.
    """

    equation: ClassVar[str] = (
        "A = r - s / n of the prompt; then s <- rho s + sum r, n <- rho n + count, rho = 2^(-steps passed / half_life) "
        "within [keep_least, keep_most]; at first s = strength x prior, n = strength"
    )
    source: ClassVar[str] = (
        "the value tracker of single-stream policy optimization, arXiv 2509.13232, whose rho depends on the divergence "
        "of the policy, here on the number of steps"
    )
    test: ClassVar[str] = "tests/joints/test_baselines.py"
    uses_other_rollouts: ClassVar[bool] = False
    single_reward_only: ClassVar[bool] = True
    default_scale: ClassVar[str] = "batch_std"
    type: str = "running"
    prior: float = option(0.5, "expected reward of a new prompt")
    strength: float = option(2.0, "weight of the prior, in rollouts", gt=0)
    half_life: float = option(50.0, "steps after which an old reward has half its weight", unit="steps", gt=0)
    keep_least: float = option(0.5, "smallest factor rho of old weights, for prompts not sampled for long", ge=0, le=1)
    keep_most: float = option(1.0, "largest factor rho of old weights, for prompts sampled recently", ge=0, le=1)

    def compute(self, rewards: Tensor, batch: Batch, combine: CombineRewards) -> Tensor:
        """Returns the average reward of each rollout's prompt in earlier steps, [rollout of all ranks], and adds this
        step's rewards to the averages."""
        import torch

        # saved in checkpoints; "prompts" maps an id to its (weighted sum of rewards, weight, last step)
        memory = batch.memory.setdefault("baseline running", {"step": 0, "prompts": {}})
        memory["step"] += 1
        prompts, means = batch.column("prompt"), torch.full_like(rewards, torch.nan)
        for prompt in prompts.unique().tolist():
            rows = prompts == prompt
            scored = rewards[rows][~rewards[rows].isnan()]
            if not len(scored):
                continue
            total_reward, weight, last_step = memory["prompts"].get(
                str(prompt), (self.strength * self.prior, self.strength, memory["step"])
            )
            means[rows] = total_reward / weight
            decay = 2.0 ** (-(memory["step"] - last_step) / self.half_life)
            decay = min(max(decay, self.keep_least), self.keep_most)
            memory["prompts"][str(prompt)] = (
                decay * total_reward + float(scored.sum()),
                decay * weight + len(scored),
                memory["step"],
            )
        return means
