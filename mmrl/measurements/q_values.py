"""Q and value functions that learn from recorded policy steps, beside the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from mmrl.protocols.abilities import OffPolicyLearning
from mmrl.protocols.measurement import PreparedContext, PreparedMeasurement

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.core.values import QEnsemble, ValueNetwork
    from mmrl.protocols.auxiliary import AuxiliaryModule
    from mmrl.rollouts import Column, Prompt, Rollouts

# Columns of the estimates of recorded steps: the least target Q value of the executed chunk, V of the observation, and
# the mean squared error of the Q networks before their update, NaN where the next observation was not recorded.
ESTIMATES = ("q", "value", "td_error")


@dataclass(frozen=True)
class Transitions:
    """Transitions of n recorded chunks, encoded. reward, discount: [n]; terminated, known: [n] bool, where `known` says
    that the target is known: the episode terminated, or its next observation was recorded. copies: [n] int64, how many
    prompts have this recorded step; the mean over transitions weights them by it, as the mean over prompts does."""

    observation: Tensor  # [n, number]
    chunk: Tensor  # [n, number]
    reward: Tensor
    discount: Tensor
    terminated: Tensor
    known: Tensor
    next_observation: Tensor  # [n, number], 0 where there is none
    copies: Tensor

    @property
    def pairs(self) -> Tensor:
        """Returns observations and chunks side by side, [n, number]."""
        import torch

        return torch.cat([self.observation, self.chunk], 1)


@dataclass(frozen=True)
class QValues(PreparedMeasurement["Column"]):
    """Implicit Q-learning (IQL, arXiv 2110.06169) on the recorded policy steps among a step's rollouts: V learns the
    expectile of the target networks' least Q, the Q networks learn r + gamma^k V(s') of a chunk of k actions, and the
    targets follow. The estimates are those of V after its update, and of the targets before theirs.

    gamma: discount of an action; simulator_reward: weight of the simulator's rewards; expectile: of V; members, width:
    of the Q networks; lr: of Adam; tau: share by which targets follow; updates: of both functions a step.
    """

    gamma: float
    simulator_reward: float
    expectile: float
    members: int
    width: int
    lr: float
    tau: float
    updates: int
    requires: ClassVar[type] = OffPolicyLearning
    cost: ClassVar[str] = "a forward pass of two observations a recorded step, and updates of small networks on the CPU"

    @property
    def name(self) -> str:
        return "q_values " + " ".join(f"{value:g}" for value in vars(self).values())

    def measure(self, rollouts: Rollouts, context: PreparedContext) -> Column:
        return QLearner(self, context).estimates(rollouts)


class QLearner:
    """Estimates advantages of recorded steps and updates the networks that do so, once a training step."""

    def __init__(self, settings: QValues, context: PreparedContext) -> None:
        self.settings, self.context = settings, context
        self.off_policy = context.policy.off_policy

    def estimates(self, rollouts: Rollouts) -> Column:
        """Returns ESTIMATES [rollout, 3], NaN for rollouts whose prompts are no recorded steps. A collective."""
        import torch

        from mmrl.rollouts import Column

        values = torch.full((len(rollouts), len(ESTIMATES)), torch.nan)
        recorded = [i for i, sample in enumerate(rollouts.samples) if "tail" in sample.prompt.metadata]
        if int(self.context.sum(torch.tensor(len(recorded)))):  # on all ranks
            prompts = [rollouts.samples[i].prompt for i in recorded]
            values[recorded] = self._update_and_estimate(prompts).float()
        return Column(values)

    def _update_and_estimate(self, prompts: Sequence[Prompt]) -> Tensor:
        """Updates both functions on recorded steps. Returns ESTIMATES [prompt, 3]. Prompts of one recorded step share
        its transition; each of them gets the Q value of its own proposal, if it has one."""
        import torch

        steps = {prompt.id: prompt for prompt in prompts}
        row_of_step = {name: row for row, name in enumerate(steps)}
        rows = torch.tensor([row_of_step[prompt.id] for prompt in prompts], dtype=torch.int64)
        copies = rows.bincount(minlength=len(steps))
        transitions = self._encode(list(steps.values()), copies, max(map(len, self.context.micro_batches)))
        proposals = [i for i, prompt in enumerate(prompts) if "proposal" in prompt.metadata]
        chunks = torch.zeros(len(prompts), self.off_policy.encoding_sizes[1])
        if proposals:
            chunks[proposals] = self.off_policy.encode_chunks([prompts[i].metadata["proposal"] for i in proposals])
        pairs = torch.cat([transitions.observation[rows], chunks], 1)
        estimates, proposal_values = self._update(transitions, pairs[proposals])
        estimates = estimates[rows]
        estimates[proposals, 0] = proposal_values
        return estimates

    def _encode(self, prompts: Sequence[Prompt], copies: Tensor, size: int) -> Transitions:
        """Returns the transitions of distinct recorded steps. size: observations that the policy encodes at once."""
        import torch

        policy, (width, chunk_width) = self.off_policy, self.off_policy.encoding_sizes
        encode = policy.encode_observations
        chunks = [prompt.metadata["actions"] for prompt in prompts]
        steps = [
            prompt.metadata["tail"].transition(
                min(len(chunk), policy.chunk_length), self.settings.gamma, self.settings.simulator_reward
            )
            for prompt, chunk in zip(prompts, chunks, strict=True)
        ]
        has_next = [i for i, step in enumerate(steps) if step.next_observation is not None]
        next_observation = torch.zeros(len(steps), width)
        next_observation[has_next] = in_parts(encode, [steps[i].next_observation for i in has_next], size, width)
        terminated = torch.tensor([step.terminated for step in steps], dtype=torch.bool)
        known = terminated.clone()
        known[has_next] = True
        return Transitions(
            in_parts(encode, [prompt.metadata["observation"] for prompt in prompts], size, width),
            policy.encode_chunks(chunks) if chunks else torch.zeros(0, chunk_width),
            torch.tensor([step.reward for step in steps], dtype=torch.float64),
            torch.tensor([step.discount for step in steps], dtype=torch.float64),
            terminated,
            known,
            next_observation,
            copies,
        )

    def _update(self, transitions: Transitions, proposals: Tensor) -> tuple[Tensor, Tensor]:
        """Updates both functions on the transitions of all ranks. Returns ESTIMATES of this rank's, [n, 3], and the
        least target Q value of further pairs of observation and chunk, `proposals` [m, number]; both are of before the
        last update of the targets."""
        import torch

        from mmrl.core.values import QEnsemble, ValueNetwork

        width, inputs = transitions.observation.shape[1], transitions.pairs.shape[1]
        value = self.context.modules.get(
            f"{self.settings.name} value",
            lambda: ValueNetwork(width, self.settings.width, self.context.seed, layer_norm=True),
            self.settings.lr,
        )
        q = self.context.modules.get(
            f"{self.settings.name} q",
            lambda: QEnsemble(inputs, self.settings.width, self.settings.members, self.context.seed + 1),
            self.settings.lr,
        )
        for _ in range(self.settings.updates):
            target = q.module.target(transitions.pairs)
            self._update_value(value, transitions, target)
            td_error = self._update_q(q, value, transitions)
            proposed = q.module.target(proposals)
            q.module.update_targets(self.settings.tau)
        return torch.stack([target, value.predict(transitions.observation), td_error], 1), proposed

    def _update_value(self, value: AuxiliaryModule[ValueNetwork], transitions: Transitions, target: Tensor) -> None:
        """Takes a step of V to the expectile of the target networks' Q values, [n]."""
        from mmrl.core.values import expectile_error

        count = int(self.context.sum(transitions.copies.sum()))
        error = expectile_error(target - value.module(transitions.observation), self.settings.expectile)
        value.descend([(transitions.copies * error).sum() / count], self.context.sum)

    def _update_q(
        self, q: AuxiliaryModule[QEnsemble], value: AuxiliaryModule[ValueNetwork], transitions: Transitions
    ) -> Tensor:
        """Takes a step of the Q networks to their targets. Returns their squared errors from before, [n]; NaN where no
        target is known."""
        import torch

        from mmrl.core.values import td_target

        known = transitions.known
        next_value = value.predict(transitions.next_observation)
        targets = td_target(transitions.reward, transitions.discount, transitions.terminated, next_value)
        errors = (q.module(transitions.pairs) - targets).square()
        copies = transitions.copies.where(known, 0)
        count = max(1, int(self.context.sum(copies.sum())))
        q.descend([(copies * errors).sum() / count], self.context.sum)
        return errors.detach().mean(0).where(known, torch.nan)


def in_parts(encode: Any, observations: list[Any], size: int, width: int) -> Tensor:
    """Encodes observations, `size` at once, [observation, width]."""
    import torch

    parts = [encode(observations[i : i + size]) for i in range(0, len(observations), size)]
    return torch.cat([torch.zeros(0, width), *parts])
