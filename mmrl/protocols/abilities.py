"""What some policies can do and others can not, a Protocol each, under which a job may ask for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.rollouts import Prompt, Replay, Rollouts, Sample

Kind = TypeVar("Kind", bound=type)
SENTENCES: dict[type, str] = {}  # of every ability, what a policy has that has it; for messages


def ability(sentence: str) -> Callable[[Kind], Kind]:
    """Makes a Protocol an ability, which settings of a model offer and parts of a job ask for. sentence: what is
    missing where a policy has it not, after "needs"."""

    def made(kind: Kind) -> Kind:
        SENTENCES[kind] = sentence
        return runtime_checkable(kind)

    return made


def able(policy: Any, kind: type) -> Any:
    """The policy, which has this ability. Raises TypeError where a method of it is missing, of settings that offer
    more than their policy has."""
    if not isinstance(policy, kind):
        lacks = sorted(name for name in vars(kind) if not name.startswith("_") and name not in dir(policy))
        raise TypeError(
            f"{type(policy).__name__} lacks {', '.join(lacks)} of {kind.__name__}, which its settings offer"
        )
    return policy


@ability("decisions that are numbers of a list, as tokens of a vocabulary")
class Numbered(Protocol):
    """A policy whose decisions are numbers of a list."""

    def numbers(self, rollouts: Rollouts) -> Tensor:
        """[rollout, decision] int64."""


@ability("rollouts that can be put away and made again")
class Storing(Protocol):
    """A policy whose rollouts can be put away and made again."""

    def stored(self, rollouts: Rollouts) -> list[dict[str, Any]]:
        """The numbers, texts and lists of each rollout from which `recalled` makes it again."""

    def recalled(self, prompts: Sequence[Prompt], states: Sequence[dict[str, Any]]) -> Rollouts:
        """Rollouts of these prompts, not scored, as they were put away."""


@ability("responses that can be put together")
class Recombining(Protocol):
    """A policy whose responses can be put together."""

    def recombined(self, first: Rollouts, second: Rollouts, text: str) -> Rollouts:
        """Responses that are one of `first`, the text, and one of `second`, which alone counts; not scored."""


@ability("responses that can go on anew from inside")
class Continuing(Protocol):
    """A policy whose responses can go on anew from inside."""

    def continued(self, rollouts: Rollouts, lengths: Sequence[int], seeds: Sequence[int]) -> Rollouts:
        """The first so many decisions of each rollout, and what the policy decides after them now; not scored."""


@ability("chains that can be completed from each of their steps")
class Completing(Protocol):
    """A policy whose decisions are steps of chains."""

    def complete_steps(self, rollouts: Rollouts, *, ends: bool = False) -> list[Sample]:
        """What the states before each decision lead to without further noise, with `ends` those behind it: all of the
        first rollout, then of the next."""


@ability("images that it can read again (model.type=autoregressive_image)")
class Inverting(Protocol):
    """A policy that can read what it makes."""

    def inverse(self, rollouts: Rollouts) -> Tensor:
        """[rollout] how likely it finds each prompt, given what was made of it: a mean over the prompt's tokens."""


@ability("latents before each of its decisions (denoising.likelihood.type=chain)")
class Latent(Protocol):
    """A policy whose decisions are made from latents."""

    def latents(self, rollouts: Rollouts) -> Tensor:
        """[rollout, decision, number]: what a small network can read of the state before each decision."""


@ability("the likeliest alternatives to each of its decisions")
class Ranking(Protocol):
    """A policy that says what else might have been decided. Where `Rollouts.extras["alternatives"]` brings such numbers
    along, its replay says how likely they are, with a gradient; see `mmrl.rollouts.ALTERNATIVES`."""

    def likeliest(self, rollouts: Rollouts, model: Any, count: int) -> Tensor:
        """[rollout, decision, count] int64, best first; model: as in `Policy.replay`."""


@ability("responses whose text is known decision by decision")
class Spelling(Protocol):
    """A policy whose decisions add text."""

    def pieces(self, rollouts: Rollouts) -> list[list[str]]:
        """The text that each decision of each rollout adds."""


@ability("what it would do now where it was, with its gradient")
class Acting(Protocol):
    """A policy whose actions follow from its weights without a draw between them."""

    def actions(self, rollouts: Rollouts) -> Tensor:
        """[look, chunk, action] with their gradient, of all looks of the first rollout, then of the next."""


@ability("steps of an episode that can be learned from one by one")
class Stepwise(Protocol):
    """A policy whose rollouts are episodes of steps that can be replayed one by one."""

    def by_step(self, rollouts: Rollouts) -> Rollouts:
        """Every step as a rollout of its own."""


@runtime_checkable
class Uneven(Protocol):
    """A policy whose rollouts differ in what it costs to learn from them."""

    def lengths(self, rollouts: Rollouts) -> Tensor:
        """[rollout] int64, to which that cost is about proportional."""


@runtime_checkable
class Recording(Protocol):
    """A policy that may keep what it said of rollouts when it made them."""

    def recorded(self, rollouts: Rollouts) -> Replay | None:
        """What a replay by the weights that made them says, to rounding, without a pass of the network; None where it
        was not kept, on all ranks alike."""
