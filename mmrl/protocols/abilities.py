"""Optional abilities of policies, one Protocol each. A job asks for an ability by its Protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from mmrl.engine.flops import PolicyWork
    from mmrl.protocols.trajectory import RobotObservation, Trajectory
    from mmrl.rollouts import Prompt, Replay, Rollouts, Sample

Kind = TypeVar("Kind", bound=type)
SENTENCES: dict[type, str] = {}  # what a policy with each ability has, for error messages


def ability(sentence: str) -> Callable[[Kind], Kind]:
    """Registers a Protocol as an ability, which settings of a model offer and parts of a job ask for. sentence: what
    error messages say after "needs" where a policy does not have it."""

    def register(kind: Kind) -> Kind:
        SENTENCES[kind] = sentence
        return runtime_checkable(kind)

    return register


def require_ability(policy: object, kind: type) -> Any:
    """Returns the policy if it has the ability `kind`. Raises TypeError, which names the missing methods, where the
    settings of a policy offer more than the policy has."""
    if not isinstance(policy, kind):
        lacks = sorted(name for name in vars(kind) if not name.startswith("_") and name not in dir(policy))
        raise TypeError(
            f"{type(policy).__name__} lacks {', '.join(lacks)} of {kind.__name__}, which its settings offer"
        )
    return policy


@ability("decisions that are numbers of a list, as tokens of a vocabulary")
class DiscreteDecisions(Protocol):
    """A policy whose decisions are indices into a fixed list, such as token ids."""

    def decision_ids(self, rollouts: Rollouts) -> Tensor:
        """Returns the index of each decision, [rollout, decision] int64."""


@ability("rollouts that can be put away and made again")
class Storing(Protocol):
    """A policy whose rollouts can be stored as plain data and restored."""

    def serialize(self, rollouts: Rollouts) -> list[dict[str, Any]]:
        """Returns the numbers, strings and lists of each rollout from which `deserialize` restores it."""

    def deserialize(self, prompts: Sequence[Prompt], states: Sequence[dict[str, Any]]) -> Rollouts:
        """Restores rollouts of these prompts, without rewards, from what `stored` returned."""


@ability("responses that can be put together")
class JoiningResponses(Protocol):
    """A policy that can join two responses to one."""

    def join_responses(self, first: Rollouts, second: Rollouts, text: str) -> Rollouts:
        """Joins a response of `first`, the text and a response of `second` to one response, without rewards. Only the
        decisions of `second` count."""


@ability("responses that can go on anew from inside")
class ContinuingResponses(Protocol):
    """A policy that can resample a response from any of its decisions on."""

    def continue_from(self, rollouts: Rollouts, lengths: Sequence[int], seeds: Sequence[int]) -> Rollouts:
        """Keeps the first `lengths` decisions of each rollout and samples the rest anew; without rewards."""


@ability("chains that can be completed from each of their steps")
class Completing(Protocol):
    """A policy whose decisions are the steps of a denoising chain."""

    def complete_steps(self, rollouts: Rollouts, *, ends: bool = False) -> list[Sample]:
        """Completes the chain without further noise from the state before each decision, with `ends` from the state
        after it. Returns rollouts x decisions samples: all of the first rollout, then all of the next."""


@ability("images that it can read again (model.type=autoregressive_image)")
class ScoringPrompts(Protocol):
    """A policy that can read the images that it makes."""

    def prompt_logp(self, rollouts: Rollouts) -> Tensor:
        """Returns the mean log-probability of each prompt's tokens given the image that was made of it, [rollout]."""


@ability("latents before each of its decisions (denoising.likelihood.type=chain)")
class Latent(Protocol):
    """A policy whose decisions are made from latents."""

    def latents(self, rollouts: Rollouts) -> Tensor:
        """Returns features of the state before each decision for a small network, [rollout, decision, feature]."""


@ability("decisions in segments (denoising.likelihood.chunks, rollout.segment)")
class Segmented(Protocol):
    """A policy whose rollouts are cut into segments of decisions."""

    def segments(self, rollouts: Rollouts) -> Tensor:
        """Returns the segment of its rollout that each decision belongs to, [rollout, decision] int64."""


@ability("the likeliest alternatives to each of its decisions")
class TopK(Protocol):
    """A policy that lists the likeliest alternatives to its decisions. Where `Rollouts.extras["alternatives"]` holds
    their indices, its replay returns their log-probabilities with a gradient; see `mmrl.rollouts.ALTERNATIVES`."""

    def top_k(self, rollouts: Rollouts, model: Any, count: int) -> Tensor:
        """Returns the indices of the likeliest decisions, [rollout, decision, count] int64, best first. model: as in
        `Policy.replay`."""


@ability("responses whose text is known decision by decision")
class DecisionTexts(Protocol):
    """A policy whose decisions add text."""

    def decision_texts(self, rollouts: Rollouts) -> list[list[str]]:
        """Returns the text that each decision adds, by rollout."""


@ability("what it would do now where it was, with its gradient")
class DifferentiableActions(Protocol):
    """A policy whose actions are a differentiable function of its weights."""

    def actions(self, rollouts: Rollouts) -> Tensor:
        """Returns actions with their gradient, [policy step, chunk, action]: all policy steps of the first rollout,
        then all of the next."""


@ability("observations of its own that an expert can label (heads that can be shown what to do)")
class ExpertLabelling(Protocol):
    """A policy that can ask an expert what to do where it went."""

    def label_with_expert(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Prompt]:
        """Plays an episode from each prompt. Returns what it saw as prompts whose answer is the expert's."""


@ability("episodes in a simulator, whose observations and actions can be stored")
class EpisodeStoring(Protocol):
    """A policy whose rollouts are episodes that it records."""

    def trajectories(self, rollouts: Rollouts) -> list[Trajectory | None]:
        """Returns the episode of each rollout; None for what is not a whole episode."""


@ability("observations and chunks of actions that a Q function can read (model.type=vision_language_action)")
class StateActionEncoding(Protocol):
    """A policy that encodes observations and chunks of actions as vectors, for value functions beside it."""

    @property
    def encoding_sizes(self) -> tuple[int, int]:
        """Returns how many numbers encode an observation, and a chunk."""

    @property
    def chunk_length(self) -> int:
        """Returns the number of actions of a chunk."""

    def encode_observations(self, observations: Sequence[RobotObservation]) -> Tensor:
        """Returns features of observations of one row each, without gradient, [observation, number] float32."""

    def encode_chunks(self, chunks: Sequence[NDArray[np.float32]]) -> Tensor:
        """Returns chunks [executed, action] in the robot's units as [chunk, number] float32: actions in the policy's
        units, 0 for those that were not executed, and which were executed."""


@ability("prompts that say how an action turned out (action.labels)")
class AdvantageLabelling(Protocol):
    """A policy whose prompts may hold a label, from metadata["label"] of those that are demonstrated."""

    @property
    def advantage_labels(self) -> tuple[str, str]:
        """Returns the words for a good and for a bad action."""


@ability("steps of an episode that can be learned from one by one")
class Stepwise(Protocol):
    """A policy whose rollouts are episodes of steps that can be replayed one by one."""

    def by_step(self, rollouts: Rollouts) -> Rollouts:
        """Splits episodes: returns every step as a separate rollout."""


@runtime_checkable
class UnevenCost(Protocol):
    """A policy whose rollouts differ in the cost of an update."""

    def lengths(self, rollouts: Rollouts) -> Tensor:
        """Returns lengths to which that cost is about proportional, [rollout] int64."""


@runtime_checkable
class Counting(Protocol):
    """A policy that counts its work."""

    work: PolicyWork


@runtime_checkable
class Recording(Protocol):
    """A policy that may keep the log-probabilities of its rollouts from sampling."""

    def recorded_replay(self, rollouts: Rollouts) -> Replay | None:
        """Returns the replay under the weights that sampled, equal to rounding, without a forward pass; None, on all
        ranks alike, where it was not kept."""


@runtime_checkable
class ResamplingStates(Protocol):
    """A policy whose likelihoods are estimates from states that are drawn at random, and may be drawn anew."""

    def resample_states(self, rollouts: Rollouts, epoch: int, keep: Tensor) -> Rollouts | None:
        """Returns the rollouts with states that an epoch of updates scores them in, 1 for the second; those of `keep`
        [rollout] stay in theirs. None, on all ranks alike, where every epoch has the same states."""
