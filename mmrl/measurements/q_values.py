"""Q and value functions that learn from recorded policy steps, beside the policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from mmrl.protocols.abilities import OffPolicyLearning
from mmrl.protocols.measurement import PreparedContext, PreparedMeasurement

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.core.values import EntropyTemperature, QEnsemble, ValueNetwork
    from mmrl.protocols.auxiliary import AuxiliaryModule, AuxiliaryModules
    from mmrl.rollouts import Column, Prompt, Rollouts

# Columns of the estimates of recorded steps: the least target Q value of the executed chunk, V of the observation, and
# the mean squared error of the Q networks before their update, NaN where the next observation was not recorded.
ESTIMATES = ("q", "value", "td_error")


@dataclass(frozen=True)
class Transitions:
    """Transitions of n recorded chunks of actions, with observations and chunks encoded as vectors.

    reward, discount: [n]; terminated: [n] bool; known: [n] bool, whether the target can be computed, because the
    episode terminated or its next observation was recorded. copies: [n] int64, the number of prompts with this recorded
    step, which is the weight of the transition in means."""

    observation: Tensor  # [n, number]
    chunk: Tensor  # [n, number]
    reward: Tensor
    discount: Tensor
    terminated: Tensor
    known: Tensor
    next_observation: Tensor  # [n, number], 0 where none was recorded
    copies: Tensor
    next_chunk: Tensor | None = None  # [n, number], sampled by the current policy; None if no target needs it
    next_logp: Tensor | None = None  # [n], log-probability of the next chunk; None if entropy is not used

    def select(self, rows: Tensor) -> Transitions:
        """Returns the transitions `rows` [m]."""
        columns: dict[str, Any] = vars(self)
        selected: dict[str, Any] = {name: None if values is None else values[rows] for name, values in columns.items()}
        return Transitions(**selected)

    @property
    def pairs(self) -> Tensor:
        """Returns observations and executed chunks concatenated, [n, number], the input of Q networks."""
        import torch

        return torch.cat([self.observation, self.chunk], 1)

    @property
    def next_pairs(self) -> Tensor:
        """Returns next observations and the chunks sampled there concatenated, [n, number]."""
        import torch

        assert self.next_chunk is not None
        return torch.cat([self.next_observation, self.next_chunk], 1)


@dataclass(frozen=True)
class QValues(PreparedMeasurement["Column"]):
    """Q-learning on the recorded policy steps among a step's rollouts. The Q networks learn r + gamma^k V(s') for a
    chunk of k actions, and target networks follow them as a moving average. Estimates are those of the target networks
    before their last update.

    V(s') is a network that learns the expectile of the target networks' least Q (IQL, arXiv 2110.06169), or, without an
    expectile, the least Q of the target networks for a chunk that the current policy samples at s', minus temperature
    times its log-probability (SAC, arXiv 1812.05905).

    gamma: discount per action; simulator_reward: weight of the simulator's rewards; members: number of Q networks;
    width: of their hidden layers; lr: learning rate of Adam; tau: fraction by which target networks move per update;
    updates: updates of all networks per training step; batch: recorded steps per rank and update, None: all; expectile:
    the one that V learns, None: no V; temperature: initial weight of the entropy, 0: none; temperature_lr: its learning
    rate; entropy: target entropy in nats per number that is sampled for a chunk, of its actions or of the noise of a
    steered head, to which the temperature is adapted, None: fixed; best_of: chunks that the policy samples for each
    observation in play, where the one with the largest Q is executed, None: one; best_by_mean: whether the mean of the
    networks chooses, and not their least value.
    """

    gamma: float
    simulator_reward: float
    members: int
    width: int
    lr: float
    tau: float
    updates: int
    batch: int | None = None
    expectile: float | None = None
    temperature: float = 0.0
    temperature_lr: float = 0.0
    entropy: float | None = None
    best_of: int | None = None
    best_by_mean: bool = False
    requires: ClassVar[type] = OffPolicyLearning
    cost: ClassVar[str] = "a forward pass of two observations a recorded step, and updates of small networks on the CPU"

    @property
    def name(self) -> str:
        chosen = {name: value for name, value in vars(self).items() if value is not None and value is not False}
        return " ".join(["q_values", *(f"{name}={value:g}" for name, value in chosen.items())])

    def q_networks(self, modules: AuxiliaryModules, inputs: int, seed: int) -> AuxiliaryModule[QEnsemble]:
        """Returns the Q networks of a run. inputs: size of an encoded observation and chunk together; seed: the run's
        seed."""
        from mmrl.core.values import QEnsemble

        first_seed = seed + 1  # `seed` is that of the value network
        return modules.get(
            f"{self.name} q", lambda: QEnsemble(inputs, self.width, self.members, first_seed), lr=self.lr
        )

    def start(self, policy: Any, modules: AuxiliaryModules, seed: int) -> None:
        """Makes the policy choose among `best_of` chunks by the Q networks, once they have been updated or restored
        from a checkpoint."""
        self._choose(
            policy,
            lambda: modules.has(f"{self.name} q"),
            lambda pairs: self.q_networks(modules, pairs.shape[1], seed).predict(pairs),
        )

    def played_with(self, modules: AuxiliaryModules) -> dict[str, Tensor]:
        """Returns the tensors of the Q networks if they choose chunks."""
        return {} if self.best_of is None else modules.weights(f"{self.name} q")

    def check_saved(self, tensors: Mapping[str, Tensor], folder: str) -> None:
        """Raises UserError if the Q networks choose, and `folder` has none."""
        from mmrl.errors import UserError

        if self.best_of is not None and not tensors:
            key = "algorithm.q.best_of"
            raise UserError(
                f"{key} chooses by Q networks, which the weights in {folder} do not have; set {key}=null to play the "
                "policy alone"
            )

    def start_saved(self, policy: Any, tensors: Mapping[str, Tensor], folder: str) -> None:
        """Makes the policy choose among `best_of` chunks by the Q networks that were saved with its weights."""
        import torch

        from mmrl.core.values import QEnsemble
        from mmrl.errors import UserError

        if self.best_of is None:
            return
        networks = QEnsemble(sum(policy.off_policy.encoding_sizes), self.width, self.members, seed=0)
        try:
            networks.load_state_dict(tensors)
        except RuntimeError:
            raise UserError(
                f"algorithm: the Q networks in {folder} have other sizes than q.members={self.members} of "
                f"q.width={self.width} for this policy; set these keys as in the run's config.yaml"
            ) from None

        def predict(pairs: Tensor) -> Tensor:
            with torch.no_grad():
                values: Tensor = networks(pairs)
            return values

        self._choose(policy, lambda: True, predict)

    def _choose(self, policy: Any, ready: Callable[[], bool], predict: Callable[[Tensor], Tensor]) -> None:
        """Makes the policy play the best of `best_of` chunks, if that is set. ready: whether `predict` can be called;
        predict: returns the Q values of pairs of an observation and a chunk by each network, [network, pair]."""
        import torch

        from mmrl.protocols.abilities import ChunkChoice

        def score(observations: Tensor, chunks: Tensor) -> Tensor:
            by_member = predict(torch.cat([observations, chunks], 1))
            return by_member.mean(0) if self.best_by_mean else by_member.amin(0)

        if self.best_of is not None:
            policy.off_policy.choose_by(ChunkChoice(self.best_of, ready, score))

    def entropy_temperature(self, modules: AuxiliaryModules) -> AuxiliaryModule[EntropyTemperature] | None:
        """Returns the weight of the entropy, a trained module; None if entropy is not used."""
        from mmrl.core.values import EntropyTemperature

        if not self.temperature:
            return None
        return modules.get(
            f"{self.name} temperature", lambda: EntropyTemperature(self.temperature), lr=self.temperature_lr
        )

    def measure(self, rollouts: Rollouts, context: PreparedContext) -> Column:
        return QLearner(self, context).estimates(rollouts)


class QLearner:
    """Estimates the values of recorded steps and updates the networks that estimate them, once per training step."""

    def __init__(self, settings: QValues, context: PreparedContext) -> None:
        self.settings, self.context = settings, context
        self.off_policy = context.policy.off_policy

    def estimates(self, rollouts: Rollouts) -> Column:
        """Returns ESTIMATES [rollout, 3], NaN for rollouts that are not recorded steps. A collective."""
        import torch

        from mmrl.rollouts import Column

        values = torch.full((len(rollouts), len(ESTIMATES)), torch.nan)
        recorded = rollouts.recorded.nonzero().flatten().tolist()
        if int(self.context.sum(torch.tensor(len(recorded)))):  # on all ranks
            prompts = [rollouts.samples[i].prompt for i in recorded]
            values[recorded] = self._update_and_estimate(prompts).float()
        return Column(values)

    def _update_and_estimate(self, prompts: Sequence[Prompt]) -> Tensor:
        """Updates Q and V on recorded steps. Returns ESTIMATES [prompt, 3]. Prompts of the same recorded step share its
        transition; a prompt with a proposed chunk (metadata["proposal"]) gets the Q value of this chunk."""
        import torch

        steps = {prompt.id: prompt for prompt in prompts}
        row_of_step = {name: row for row, name in enumerate(steps)}
        rows = torch.tensor([row_of_step[prompt.id] for prompt in prompts], dtype=torch.int64)
        copies = rows.bincount(minlength=len(steps))
        transitions = self._encode(list(steps.values()), copies, max(map(len, self.context.micro_batches)))
        proposals = [i for i, prompt in enumerate(prompts) if "proposal" in prompt.metadata]
        _, chunk_width = self.off_policy.encoding_sizes
        chunks = torch.zeros(len(prompts), chunk_width)
        if proposals:
            chunks[proposals] = self.off_policy.encode_chunks([prompts[i].metadata["proposal"] for i in proposals])
        pairs = torch.cat([transitions.observation[rows], chunks], 1)
        estimates, proposal_values = self._update(transitions, pairs[proposals])
        estimates = estimates[rows]
        estimates[proposals, 0] = proposal_values  # column 0 of ESTIMATES is q
        return estimates

    def _encode(self, prompts: Sequence[Prompt], copies: Tensor, size: int) -> Transitions:
        """Returns the transitions of distinct recorded steps; if V is not learned, with a chunk that the current policy
        samples at each next observation. copies: [step] int64, see `Transitions`; size: number of observations that
        the policy encodes at once."""
        import torch

        policy, (width, chunk_width) = self.off_policy, self.off_policy.encoding_sizes
        encode = policy.encode_observations
        chunks = [prompt.metadata["actions"] for prompt in prompts]
        steps = [
            prompt.metadata["tail"].transition(policy.chunk_length, self.settings.gamma, self.settings.simulator_reward)
            for prompt in prompts
        ]
        from mmrl.samplers.chain import derive_seed

        has_next = [i for i, step in enumerate(steps) if step.next_observation is not None]
        next_observation = torch.zeros(len(steps), width)
        following = [step.next_observation for step in steps if step.next_observation is not None]
        next_chunk: Tensor | None = None
        next_logp: Tensor | None = None
        if self.settings.expectile is None:
            next_chunk, next_logp = torch.zeros(len(steps), chunk_width), torch.zeros(len(steps), dtype=torch.float64)
            for first in range(0, len(following), size):
                rows = has_next[first : first + size]
                seeds = [derive_seed(derive_seed(self.context.seed, self.context.step), row) for row in rows]
                sampled = policy.sample(following[first : first + size], seeds, logp=bool(self.settings.temperature))
                next_observation[rows], next_chunk[rows] = sampled.observations, sampled.chunks.cpu()
                if sampled.logp is not None:
                    next_logp[rows] = sampled.logp.double().cpu()
        else:
            next_observation[has_next] = in_parts(encode, following, size, width)
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
            next_chunk,
            next_logp,
        )

    def _update(self, transitions: Transitions, proposals: Tensor) -> tuple[Tensor, Tensor]:
        """Updates Q and V on the transitions of all ranks. Returns the estimates of this rank's transitions, [n, 3]
        (least target Q, V, TD error), and the least target Q values [m] of `proposals` [m, number], further pairs of
        observation and chunk. Both are computed before the last update of the target networks."""
        import torch

        from mmrl.samplers.chain import derive_seed

        settings, n = self.settings, len(transitions.reward)
        q = settings.q_networks(self.context.modules, transitions.pairs.shape[1], self.context.seed)
        td_error = torch.full((n,), torch.nan, dtype=torch.float64)
        stream = derive_seed(self.context.seed, self.context.step)
        following: FollowingValue = SampledNextValue(settings, self.context)
        if settings.expectile is not None:
            following = ExpectileValue(settings, self.context, settings.expectile)
        for update in range(settings.updates):
            rows = draw_rows(n, settings.batch, derive_seed(stream, update))
            drawn = transitions.select(rows)
            following.update(drawn, q.module)
            td_error[rows] = self._update_q(q, drawn, following.of_next(drawn, q.module))
            if update == settings.updates - 1:
                target, proposed = q.module.target(transitions.pairs), q.module.target(proposals)
            q.module.update_targets(settings.tau)
        return torch.stack([target, following.of(transitions), td_error], 1), proposed

    def _update_q(self, q: AuxiliaryModule[QEnsemble], transitions: Transitions, next_value: Tensor) -> Tensor:
        """Takes an optimizer step of the Q networks toward their targets. next_value: V(s'), [n]. Returns their mean
        squared errors before it, [n]; NaN where the target is not known."""
        import torch

        from mmrl.core.values import td_target

        known = transitions.known
        targets = td_target(transitions.reward, transitions.discount, transitions.terminated, next_value)
        errors = (q.module(transitions.pairs) - targets).square()
        copies = transitions.copies.where(known, 0)
        count = max(1, int(self.context.sum(copies.sum())))
        q.descend([(copies * errors).sum() / count], self.context.sum)
        return errors.detach().mean(0).where(known, torch.nan)


class FollowingValue(ABC):
    """V(s'), the value of the observation after a chunk, which targets of Q networks bootstrap from."""

    def __init__(self, settings: QValues, context: PreparedContext) -> None:
        self.settings, self.context = settings, context

    @abstractmethod
    def update(self, transitions: Transitions, q: QEnsemble) -> None:
        """Learns from transitions, before the Q networks do."""

    @abstractmethod
    def of_next(self, transitions: Transitions, q: QEnsemble) -> Tensor:
        """Returns V(s') of each transition, [n] float64; undefined where s' was not recorded."""

    @abstractmethod
    def of(self, transitions: Transitions) -> Tensor:
        """Returns V(s) of each transition, [n] float64; NaN where V is not learned."""


class ExpectileValue(FollowingValue):
    """A network that learns the expectile of the target networks' least Q (IQL)."""

    def __init__(self, settings: QValues, context: PreparedContext, expectile: float) -> None:
        super().__init__(settings, context)
        self.expectile = expectile

    def update(self, transitions: Transitions, q: QEnsemble) -> None:
        """Takes an optimizer step of V on the expectile error of the target networks' Q of the executed chunks."""
        from mmrl.core.values import expectile_error

        count = int(self.context.sum(transitions.copies.sum()))
        value = self._network(transitions)
        target = q.target(transitions.pairs)
        error = expectile_error(target - value.module(transitions.observation), self.expectile)
        value.descend([(transitions.copies * error).sum() / count], self.context.sum)

    def of_next(self, transitions: Transitions, q: QEnsemble) -> Tensor:
        return self._network(transitions).predict(transitions.next_observation)

    def of(self, transitions: Transitions) -> Tensor:
        return self._network(transitions).predict(transitions.observation)

    def _network(self, transitions: Transitions) -> AuxiliaryModule[ValueNetwork]:
        from mmrl.core.values import ValueNetwork

        settings, width = self.settings, transitions.observation.shape[1]
        return self.context.modules.get(
            f"{settings.name} value",
            lambda: ValueNetwork(width, settings.width, self.context.seed, layer_norm=True),
            settings.lr,
        )


class SampledNextValue(FollowingValue):
    """The least Q of the target networks for the chunk that the current policy sampled at s', minus its weighted
    log-probability. The weight of the entropy is adapted to the entropy of these chunks."""

    def update(self, transitions: Transitions, q: QEnsemble) -> None:
        """Takes an optimizer step of the weight of the entropy toward the target entropy, if there is one."""
        temperature = self.settings.entropy_temperature(self.context.modules)
        if temperature is None or self.settings.entropy is None:
            return
        assert transitions.next_logp is not None
        sampled = transitions.copies.where(transitions.known & ~transitions.terminated, 0)
        count = int(self.context.sum(sampled.sum()))
        if count:
            policy = self.context.policy.off_policy
            losses = temperature.module(transitions.next_logp, self.settings.entropy * policy.noise_size)
            temperature.descend([(sampled * losses).sum() / count], self.context.sum)

    def of_next(self, transitions: Transitions, q: QEnsemble) -> Tensor:
        """Returns the least target Q of the chunk sampled at s', minus the temperature times its log-probability,
        [n]."""
        value = q.target(transitions.next_pairs)
        temperature = self.settings.entropy_temperature(self.context.modules)
        if temperature is None:
            return value
        assert transitions.next_logp is not None
        return value - temperature.module.value * transitions.next_logp

    def of(self, transitions: Transitions) -> Tensor:
        return transitions.reward.new_full(transitions.reward.shape, float("nan"))


def draw_rows(n: int, batch: int | None, seed: int) -> Tensor:
    """Returns the rows of an update among `n` recorded steps, int64: all if `batch` is None, or `batch` of them drawn
    with replacement."""
    import torch

    if batch is None or not n:
        return torch.arange(n)
    return torch.randint(n, (batch,), generator=torch.Generator().manual_seed(seed))


def in_parts(encode: Any, observations: list[Any], size: int, width: int) -> Tensor:
    """Returns the vectors of observations, [observation, width]. encode: encodes at most `size` observations at once;
    it is not called without observations."""
    import torch

    parts = [encode(observations[i : i + size]) for i in range(0, len(observations), size)]
    return torch.cat([torch.zeros(0, width), *parts])
