"""Search at inference: more than one answer to a prompt is made, and the task's rewards choose one."""

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
    """The search for the answer to a prompt."""

    title: ClassVar[str] = "search"
    kinds: ClassVar[dict[str, str]] = {
        "best_of": "mmrl.evaluation.search:BestOf",
        "particles": "mmrl.evaluation.search:Particles",
    }
    test: ClassVar[str] = "tests/evaluation/test_search.py"

    @abstractmethod
    def respond(self, policy: Policy, task: Task, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Sample]:
        """Returns one answer a prompt."""

    def check(self, offered: Capabilities) -> None:
        """Raises ValueError in one line for a policy that can not be searched so."""


class BestOf(Search):
    """Several answers from other seeds, of which the one with the highest reward is kept. Of denoisers that is a search
    over initial noises; of text it needs evaluation.temperature above 0."""

    equation: ClassVar[str] = "argmax_i r(x_i), i from 1 to count"
    source: ClassVar[str] = "random search of Inference-Time Scaling beyond Denoising Steps, arXiv 2501.09732"
    type: str = "best_of"
    count: int = option(8, "answers a prompt", ge=1)

    def respond(self, policy: Policy, task: Task, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Sample]:
        import torch

        from mmrl.samplers.chain import derive_seed

        each = [prompt for prompt in prompts for _ in range(self.count)]
        each_seed = [derive_seed(int(seed), n) % 2**32 for seed in seeds for n in range(self.count)]
        samples = policy.respond(each, each_seed)
        earned = rewards_of(task, samples, torch.arange(len(prompts)).repeat_interleave(self.count))
        return [samples[i * self.count + int(part.argmax())] for i, part in enumerate(earned.view(-1, self.count))]


class Particles(Search):
    """Chains of a prompt are stochastic, and at some of their steps those go on, several times, whose image is
    expected to earn more (Feynman-Kac steering with potentials of differences). The best at the end is kept."""

    equation: ClassVar[str] = "resampled with weights softmax_i strength (r(E[x_0 | x_s]) - the same where it was last)"
    source: ClassVar[str] = "A General Framework for Inference-time Scaling and Steering, arXiv 2501.06848"
    type: str = "particles"
    count: int = option(4, "chains a prompt", ge=1)
    every: int = option(3, "steps of the chain between two choices", unit="steps", ge=1)
    strength: float = option(1.0, "strength of rewards in the weights; 0: no chain is duplicated", ge=0)
    transition: DenoisingTransition = option(FlowSDE(), "the stochastic step")

    def check(self, offered: Capabilities) -> None:
        if "steering" not in offered.offers:
            raise ValueError(
                "sample.search.type=particles steers the denoising chains of model.type=diffusion, which "
                f"{offered.source} does not have; use best_of"
            )

    def respond(self, policy: Policy, task: Task, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Sample]:
        from mmrl.policies.diffusion.policy import DiffusionPolicy
        from mmrl.policies.diffusion.steering import Steering, steered

        assert isinstance(policy, DiffusionPolicy)
        steering = Steering(self.count, self.every, self.strength, self.transition)
        return steered(policy, prompts, seeds, steering, lambda samples, group: rewards_of(task, samples, group))


class SampleSettings(Section):
    """Settings of `mmrl sample` and `mmrl eval`."""

    search: Search | None = option(None, "make several answers a prompt, and keep the best by the rewards; null: one")


@dataclass
class SearchingPolicy:
    """A policy whose answers are searched for."""

    policy: Policy
    task: Task
    search: Search

    def respond(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Sample]:
        return self.search.respond(self.policy, self.task, prompts, seeds)

    def counts(self) -> dict[str, float]:
        return self.policy.counts()


def rewards_of(task: Task, samples: Sequence[Sample], group: Tensor) -> Tensor:
    """[rollout] the weighted sum of rewards; -inf where one could not be scored."""
    import torch

    from mmrl.core.advantages import combined_reward

    rewards = combined_reward(task.score(samples, group), torch.tensor(task.reward_weights))
    return rewards.where(~rewards.isnan(), -torch.inf)
