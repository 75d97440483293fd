"""Optional abilities of policies, each a Protocol with the methods that a policy must implement. Algorithms, sources of
rollouts and measurements name the abilities that they need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from mmrl.engine.flops import PolicyWork
    from mmrl.protocols.trajectory import RobotObservation, Trajectory
    from mmrl.rollouts import Prompt, Replay, Rollouts, Sample

Ability = TypeVar("Ability", bound=type)
DESCRIPTIONS: dict[type, str] = {}  # ability -> what error messages write after "needs"


def ability(description: str) -> Callable[[Ability], Ability]:
    """Returns a class decorator that registers a Protocol as an ability. description: what a policy without it lacks;
    error messages read "KEY needs DESCRIPTION"."""

    def register(protocol: Ability) -> Ability:
        DESCRIPTIONS[protocol] = description
        return runtime_checkable(protocol)

    return register


def require_ability(policy: object, protocol: type) -> Any:
    """Returns the policy, which must implement the ability `protocol`. Raises TypeError with the missing methods where
    it does not, although its settings declare the ability."""
    if not isinstance(policy, protocol):
        missing = sorted(name for name in vars(protocol) if not name.startswith("_") and name not in dir(policy))
        raise TypeError(
            f"{type(policy).__name__} lacks {', '.join(missing)} of {protocol.__name__}, which its settings offer"
        )
    return policy


@ability("decisions that are indices into a list, such as token ids")
class DiscreteDecisions(Protocol):
    """A policy whose decisions are indices into a fixed list, such as token ids."""

    def decision_ids(self, rollouts: Rollouts) -> Tensor:
        """Returns the index of each decision, [rollout, decision] int64."""


@ability("rollouts that can be stored and restored")
class Storing(Protocol):
    """A policy whose rollouts can be stored as plain data and restored."""

    def serialize(self, rollouts: Rollouts) -> list[dict[str, Any]]:
        """Returns the state of each rollout as numbers, strings and lists, without its prompt and rewards."""

    def deserialize(self, prompts: Sequence[Prompt], states: Sequence[dict[str, Any]]) -> Rollouts:
        """Restores rollouts from their prompts and the states that `serialize` returned. Rewards are not set."""


@ability("responses that can be joined")
class JoiningResponses(Protocol):
    """A policy that can join two responses into one."""

    def join_responses(self, first: Rollouts, second: Rollouts, text: str) -> Rollouts:
        """Joins, row by row, a response of `first`, the text and a response of `second` into one response. Only the
        decisions of `second` are under the mask. Rewards are not set."""


@ability("responses that can be resampled from a decision on")
class ContinuingResponses(Protocol):
    """A policy that can resample a response from any of its decisions on."""

    def continue_from(self, rollouts: Rollouts, lengths: Sequence[int], seeds: Sequence[int]) -> Rollouts:
        """Keeps the first lengths[i] decisions of rollout i and samples the rest anew. Rewards are not set."""


@ability("chains that can be completed from each of their steps")
class Completing(Protocol):
    """A policy that can finish a denoising chain deterministically from any of its steps."""

    def complete_steps(self, rollouts: Rollouts, *, ends: bool = False) -> list[Sample]:
        """Denoises the latents at each decision to a finished image without adding noise. ends: start from the latents
        after the decision instead of those before it. Returns rollouts x decisions samples, ordered by rollout and then
        by decision."""


@ability("images that it can read again (model.type=autoregressive_image)")
class ScoringPrompts(Protocol):
    """A policy that can read the images that it generates, and score a prompt given an image."""

    def prompt_logp(self, rollouts: Rollouts) -> Tensor:
        """Returns the mean log-probability of the prompt's tokens given the image that was generated from it,
        [rollout]."""


@ability("latents before each of its decisions (denoising.likelihood.type=chain)")
class Latent(Protocol):
    """A policy whose decisions are steps from latents, such as denoising steps."""

    def latents(self, rollouts: Rollouts) -> Tensor:
        """Returns features of the latents before each decision as the input of a small value network, [rollout,
        decision, feature]."""


@ability("decisions in segments (denoising.likelihood.chunks, rollout.segment)")
class Segmented(Protocol):
    """A policy whose rollouts are cut into segments of decisions."""

    def segments(self, rollouts: Rollouts) -> Tensor:
        """Returns the segment of its rollout that each decision belongs to, [rollout, decision] int64."""


@ability("the likeliest alternatives to each of its decisions")
class TopK(Protocol):
    """A policy that can list the likeliest alternatives to its decisions, such as the top-k tokens. Where
    `Rollouts.extras["alternatives"]` holds ids of alternatives, its replay returns their log-probabilities with a
    gradient; see `mmrl.rollouts.ALTERNATIVES`."""

    def top_k(self, rollouts: Rollouts, model: Any, count: int) -> Tensor:
        """Returns the ids of the `count` likeliest alternatives to each decision, [rollout, decision, count] int64, in
        falling order of probability. model: as in `Policy.replay`."""


@ability("responses whose text is known decision by decision")
class DecisionTexts(Protocol):
    """A policy that knows the text of each decision, such as a token's."""

    def decision_texts(self, rollouts: Rollouts) -> list[list[str]]:
        """Returns the text that each decision adds to the response, as a list for each rollout."""


@ability("actions that are a differentiable function of its weights")
class DifferentiableActions(Protocol):
    """A robot policy whose actions are a differentiable function of its weights."""

    def actions(self, rollouts: Rollouts) -> Tensor:
        """Recomputes the actions at the recorded observations with their gradient, [policy step, chunk, action]: all
        policy steps of the first rollout, then all of the next."""


@ability("observations of its own episodes that an expert can label (action heads that learn from demonstrations)")
class ExpertLabelling(Protocol):
    """A robot policy that can have an expert label the observations of its own episodes, as in DAgger."""

    def label_with_expert(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Prompt]:
        """Plays an episode from each prompt, which is a start state. Returns its observations as prompts that hold the
        expert's actions."""


@ability("episodes in a simulator, whose observations and actions can be stored")
class EpisodeStoring(Protocol):
    """A policy whose rollouts are episodes that it records."""

    def trajectories(self, rollouts: Rollouts) -> list[Trajectory | None]:
        """Returns the episode of each rollout; None where a rollout is not a whole episode."""


@dataclass(frozen=True)
class SampledActions:
    """Chunks of actions that the current policy samples at n observations.

    observations: as `OffPolicy.encode_observations` returns them; chunks: as `OffPolicy.encode_chunks` does, for whole
    chunks; logp: the log-probability of each chunk, None if it was not requested."""

    observations: Tensor  # [n, size] without gradient
    chunks: Tensor  # [n, size]
    logp: Tensor | None  # [n] float32


@dataclass(frozen=True)
class SampledNoise:
    """Noise from which a frozen flow denoises chunks, at n observations.

    observations, chunks: as in `SampledActions`, chunks None if they were not denoised; logp: the log-probability of
    the noise under the policy, None if it was not requested."""

    observations: Tensor  # [n, size] without gradient
    noise: Tensor  # [n, noise size]
    chunks: Tensor | None  # [n, size]
    logp: Tensor | None  # [n] float32


@dataclass(frozen=True)
class ChunkChoice:
    """A choice among the chunks that a policy samples at an observation while it plays.

    count: chunks for each observation; ready: whether `score` can be called yet, before that the first chunk is played;
    score: takes n observations and chunks, encoded as in `SampledActions`, and returns their scores [n]; the chunk with
    the highest one is played."""

    count: int
    ready: Callable[[], bool]
    score: Callable[[Tensor, Tensor], Tensor]


class OffPolicy(Protocol):
    """Encodes stored observations and chunks of actions as vectors, for value functions, and samples the current
    policy's chunks at stored observations."""

    @property
    def encoding_sizes(self) -> tuple[int, int]:
        """Returns the sizes of the vectors of an observation and of a chunk."""

    @property
    def chunk_length(self) -> int:
        """Returns the number of actions of a chunk."""

    @property
    def noise_size(self) -> int:
        """Returns how many random numbers the head samples for a chunk: those of the actions, or of the noise from
        which they are denoised."""

    def choose_by(self, choice: ChunkChoice) -> None:
        """Makes the policy choose among several chunks wherever it plays episodes from now on."""

    def encode_observations(self, observations: Sequence[RobotObservation]) -> Tensor:
        """Returns features of observations of one row each, without gradient, [observation, size] float32."""

    def encode_chunks(self, chunks: Sequence[NDArray[np.float32]]) -> Tensor:
        """Encodes chunks [executed, action] in the robot's units, [chunk, size] float32: the actions in the policy's
        units, 0 for those that were not executed, and a mask of the executed ones."""

    def sample(self, observations: Sequence[RobotObservation], seeds: Sequence[int], *, logp: bool) -> SampledActions:
        """Samples a chunk at each observation of one row, without gradient. seeds: one for each; logp: whether its
        log-probability is computed too."""

    def resample(self, rollouts: Rollouts, rows: Sequence[int], seeds: Sequence[int], *, logp: bool) -> SampledActions:
        """Samples another chunk at the first observation of each of the rollouts `rows`, as a function of the policy's
        weights: chunks and log-probabilities have a gradient. It needs `DifferentiableActions`."""

    def denoise_prior(self, observations: Sequence[RobotObservation], seeds: Sequence[int]) -> SampledNoise:
        """Samples standard normal noise at each observation of one row, and the chunk denoised from it, without
        gradient. It needs the offer "noise". seeds: one for each."""

    def resample_noise(
        self, rollouts: Rollouts, rows: Sequence[int], seeds: Sequence[int], *, logp: bool
    ) -> SampledNoise:
        """Samples noise as `resample` samples chunks, without denoising it. It needs the offer "noise"."""

    def propose(self, prompts: Sequence[Prompt], seeds: Sequence[int], groups: Sequence[int]) -> Rollouts:
        """Samples a chunk for each prompt as in a rollout, at metadata["observation"], without executing it.

        seeds: one for each prompt; groups: a seed for each prompt, equal within a group. Returns single policy steps
        without rewards. The prompts of their samples have the chunk as metadata["proposal"], [chunk, action] in the
        robot's units, and its seed as metadata["proposal_seed"]."""


@ability("stored observations and actions that a Q function can read (model.type=vision_language_action)")
class OffPolicyLearning(Protocol):
    """A policy that can be trained from stored steps by a Q function."""

    @property
    def off_policy(self) -> OffPolicy: ...


@ability("prompts that say how an action turned out (action.labels)")
class AdvantageLabelling(Protocol):
    """A policy whose prompts may contain a text label that says whether an action is good or bad. For demonstrations it
    is taken from metadata["label"]."""

    @property
    def advantage_labels(self) -> tuple[str, str]:
        """Returns the label of a good action and that of a bad one."""


@ability("steps of an episode that can be learned from one by one")
class Stepwise(Protocol):
    """A policy whose rollouts are episodes of steps that can be replayed one by one."""

    def by_step(self, rollouts: Rollouts) -> Rollouts:
        """Splits episodes into their policy steps. Returns each step as a rollout of its own."""


@runtime_checkable
class UnevenCost(Protocol):
    """A policy whose rollouts differ in how long a training update on them takes."""

    def lengths(self, rollouts: Rollouts) -> Tensor:
        """Returns a length, such as the number of tokens, that is roughly proportional to the cost of an update,
        [rollout] int64."""


@runtime_checkable
class Counting(Protocol):
    """A policy that counts its units of work (such as tokens) and its floating-point operations."""

    work: PolicyWork


@runtime_checkable
class Recording(Protocol):
    """A policy that may keep the log-probabilities that it computed while sampling."""

    def recorded_replay(self, rollouts: Rollouts) -> Replay | None:
        """Returns the replay under the weights that sampled the rollouts, without a forward pass. It equals a computed
        one up to rounding. Returns None, on all ranks, if it was not kept."""


@runtime_checkable
class ResamplingStates(Protocol):
    """A policy that estimates likelihoods from randomly sampled states, such as partly masked responses, and may
    resample these states for each epoch of updates."""

    def resample_states(self, rollouts: Rollouts, epoch: int, keep: Tensor) -> Rollouts | None:
        """Returns the rollouts with new states. epoch: number of finished epochs, at least 1. keep: [rollout] bool,
        True where a rollout keeps its states. Returns None, on all ranks, if all epochs use the same states."""
