"""A baseline from the rewards of each prompt in earlier steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.baselines.baseline import Baseline, Total
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class Running(Baseline):
    """The mean reward of the prompt in earlier steps, in which older rewards count less. It needs no group: one rollout
    a prompt learns, and a group that is all right learns that it was not always so."""

    equation: ClassVar[str] = (
        "A = r - s / n of the prompt; then s <- rho s + sum r, n <- rho n + count, rho = 2^(-steps passed / half_life) "
        "within [keep_least, keep_most]; at first s = strength x prior, n = strength"
    )
    source: ClassVar[str] = (
        "the value tracker of single-stream policy optimization, arXiv 2509.13232, whose rho follows the divergence of "
        "the policy where this one follows the steps that have passed"
    )
    test: ClassVar[str] = "tests/joints/test_baselines.py"
    compares: ClassVar[bool] = False
    single: ClassVar[bool] = True
    usual_scale: ClassVar[str] = "batch_std"
    type: str = "running"
    prior: float = option(0.5, "reward that is expected of a prompt that was never seen")
    strength: float = option(2.0, "rollouts that the prior counts as", gt=0)
    half_life: float = option(50.0, "steps after which an old reward counts half", unit="steps", gt=0)
    keep_least: float = option(0.5, "what is left of the memory of a prompt that was not seen for long", ge=0, le=1)
    keep_most: float = option(1.0, "what is left of one that was just seen", ge=0, le=1)

    def of(self, rewards: Tensor, batch: Batch, total: Total) -> Tensor:
        import torch

        memory = batch.memory.setdefault("baseline running", {"step": 0, "prompts": {}})
        memory["step"] += 1
        prompts, means = batch.column("prompt"), torch.full_like(rewards, torch.nan)
        for prompt in prompts.unique().tolist():
            rows = prompts == prompt
            scored = rewards[rows][~rewards[rows].isnan()]
            if not len(scored):
                continue
            total_reward, count, last = memory["prompts"].get(
                str(prompt), (self.strength * self.prior, self.strength, memory["step"])
            )
            means[rows] = total_reward / count
            decay = 2.0 ** (-(memory["step"] - last) / self.half_life)
            decay = min(max(decay, self.keep_least), self.keep_most)
            memory["prompts"][str(prompt)] = (
                decay * total_reward + float(scored.sum()),
                decay * count + len(scored),
                memory["step"],
            )
        return means
