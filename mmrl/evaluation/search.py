"""Search at inference: several responses to a prompt are sampled, and the task's rewards select one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mmrl.protocols.requirements import Capabilities
from mmrl.samplers.settings import DenoisingTransition, FlowSDE
from mmrl.settings import Choice, Section, option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.parts import Policy, Task
    from mmrl.rollouts import Prompt, Sample


class Search(Choice):
    """A way to search for the response to a prompt."""

    title: ClassVar[str] = "search"
    kinds: ClassVar[dict[str, str]] = {
        "best_of": "mmrl.evaluation.search:BestOf",
        "particles": "mmrl.evaluation.search:Particles",
    }
    test: ClassVar[str] = "tests/evaluation/test_search.py"

    @abstractmethod
    def respond(self, policy: Policy, task: Task, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Sample]:
        """Returns one response for each prompt. seeds: one for each prompt."""

    def check(self, offered: Capabilities) -> None:
        """Raises ValueError if the policy does not support this search. offered: what the policy offers."""


class BestOf(Search):
    """Samples several responses with different seeds and keeps the one with the highest reward. For diffusion models
    the seeds are initial noises; text needs evaluation.temperature above 0."""

    equation: ClassVar[str] = "argmax_i r(x_i), i from 1 to count"
    source: ClassVar[str] = "random search of Inference-Time Scaling beyond Denoising Steps, arXiv 2501.09732"
    type: str = "best_of"
    count: int = option(8, "responses per prompt", ge=1)

    def respond(self, policy: Policy, task: Task, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Sample]:
        """Samples `count` responses to each prompt, and returns for each prompt the one with the highest reward."""
        import torch

        from mmrl.samplers.chain import derive_seed

        repeated_prompts = [prompt for prompt in prompts for _ in range(self.count)]
        repeated_seeds = [derive_seed(int(seed), n) % 2**32 for seed in seeds for n in range(self.count)]
        samples = policy.respond(repeated_prompts, repeated_seeds)
        rewards = rewards_of(task, samples, torch.arange(len(prompts)).repeat_interleave(self.count))
        return [
            samples[i * self.count + int(candidate_rewards.argmax())]
            for i, candidate_rewards in enumerate(rewards.view(-1, self.count))
        ]


class Particles(Search):
    """Denoises several chains of latents for each prompt and resamples them at some steps by the reward of the
    predicted final image (Feynman-Kac steering, difference potential). The best at the end is kept."""

    equation: ClassVar[str] = (
        "resampled with weights softmax_i strength (r(E[x_0 | x_s]) - the same at the previous resampling)"
    )
    source: ClassVar[str] = "A General Framework for Inference-time Scaling and Steering, arXiv 2501.06848"
    type: str = "particles"
    count: int = option(4, "chains per prompt", ge=1)
    every: int = option(3, "denoising steps between two resamplings", unit="steps", ge=1)
    strength: float = option(1.0, "factor of rewards in the resampling weights; 0: no resampling", ge=0)
    transition: DenoisingTransition = option(FlowSDE(), "the stochastic step")

    def check(self, offered: Capabilities) -> None:
        """Raises ValueError unless the policy is a diffusion model."""
        if "steering" not in offered.offers:
            raise ValueError(
                f"sample.search.type=particles is for model.type=diffusion, not for {offered.source}; set "
                "sample.search.type=best_of"
            )

    def respond(self, policy: Policy, task: Task, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Sample]:
        """Denoises `count` chains for each prompt, resampled by rewards. Returns the best image of each prompt."""
        from mmrl.policies.diffusion.policy import DiffusionPolicy
        from mmrl.policies.diffusion.steering import Steering, steered

        assert isinstance(policy, DiffusionPolicy)
        steering = Steering(self.count, self.every, self.strength, self.transition)
        return steered(policy, prompts, seeds, steering, lambda samples, group: rewards_of(task, samples, group))


class SampleSettings(Section):
    """Settings of `mmrl sample` and `mmrl eval`."""

    search: Search | None = option(
        None, "sample several responses per prompt, and keep the one with the highest reward; null: one response"
    )


@dataclass
class SearchingPolicy:
    """A policy whose responses are the results of a search."""

    policy: Policy
    task: Task
    search: Search

    def respond(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Sample]:
        return self.search.respond(self.policy, self.task, prompts, seeds)

    def counts(self) -> dict[str, float]:
        return self.policy.counts()


def rewards_of(task: Task, samples: Sequence[Sample], group: Tensor) -> Tensor:
    """Returns the weighted sum of rewards [rollout]; -inf where a reward could not be scored. group: [rollout], the
    index of the prompt."""
    import torch

    from mmrl.core.advantages import combined_reward

    rewards = combined_reward(task.score(samples, group), torch.tensor(task.reward_weights))
    return rewards.where(~rewards.isnan(), -torch.inf)
