"""What decisions can support, what algorithms and terms need of them, and the one place where the two are compared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import reduce
from typing import TYPE_CHECKING, Any

from mmrl.settings import SettingsError

if TYPE_CHECKING:
    from mmrl.prompts.views import View
    from mmrl.protocols.critic import CriticSettings

# What a policy's decisions may offer, and how a message says that they do not.
OFFERS = {
    "entropy": "an entropy of each decision (that of a Gaussian step of fixed width is constant)",
    "square_sum": "the sum of squared probabilities of each decision's distribution",
    "tokens": "decisions that are tokens",
    "text": "responses in words",
    "distribution": "the whole distribution of each decision, kept from the policy that made the rollouts",
    "numbers": "decisions that are numbers of a list, as tokens of a vocabulary",
    "divergence": "the exact divergence of each decision from the old policy",
    "gaussian": "decisions that are Gaussian steps of a chain",
    "velocity": "predictions of a denoiser",
    "steering": "chains that can be steered while they are drawn (model.type=diffusion)",
    "matching": "decisions that compare the final sample with a prediction",
    "source": "pictures to compare with those that were edited (denoising.likelihood.type=contrast or matching)",
    "contrast": "decisions that are errors of implicit policies (denoising.likelihood.type=contrast, or "
    "action.head.likelihood.type=contrast of a flow head)",
    "picture_gradient": "pictures with their gradient (denoising.likelihood.type=last_steps)",
    "segments": "decisions in segments (denoising.likelihood.chunks, rollout.segment)",
    "parts": "responses in parts, text before a picture (model.type=rewritten_diffusion, or rollout.reasoning_length "
    "of a model that writes codes)",
    "reference_ratio": "a likelihood that can be compared with the reference policy's",
    "single_sample_kl": "a KL divergence estimated from single samples",
    "critic": "a critic",
    "steps": "steps of an episode that can be learned from one by one",
    "views": "prompts of which there are other views",
    "drafts": "responses that can be continued",
    "demonstrations": "answers that it can learn from beside its rollouts",
    "storage": "rollouts that can be put away and made again",
    "temperatures": "rollouts at a temperature of their own, made beside the others of a step",
    "turns": "turns of a conversation (task.environment)",
    "recombination": "responses that can be put together",
    "continuations": "responses that can go on anew from inside",
    "completions": "chains that can be completed from each of their steps",
    "candidates": "steps from states that a group shares (denoising.likelihood.shared_states=true)",
    "distillation": "a sampler of few steps that is distilled beside it (model.type=few_step_diffusion)",
    "inverse": "pictures that it can read again (model.type=picture_codes)",
    "latents": "latents before each of its decisions (denoising.likelihood.type=chain)",
    "reference_rollouts": "responses of the reference policy (rollout.generator=transformers)",
    "information": "a code that tells a gate of the prompt (action.head.type=residual with noise above 0)",
    "imbalance": "horizons that share the work (action.head.type=horizons)",
    "nodes": "rollouts that share decisions, as leaves of a tree",
}


@dataclass(frozen=True)
class Continuations:
    """How responses are continued again from inside: every so many decisions, so many times."""

    every: int
    count: int

    @property
    def name(self) -> str:
        return f"continued {self.count} times every {self.every}"


@dataclass(frozen=True)
class Needs:
    """What an algorithm or a part of it asks of the rest of the job.

    offers: what decisions must support; keys of OFFERS. old: likelihoods under the policy that made the rollouts, in
    the micro-batches of a loss; None where that is the policy that is trained. reference: likelihoods under the
    reference policy, which the present policy becomes every so many steps of reference_resets, or which follows it as
    an average of its weights with the decay in reference_decays. critic: what gives a value of every observation.
    statistics: of decisions ("logp", "entropy", "square_sum"), before the advantages. whole_groups: every micro-batch
    holds whole groups. views: other views of the prompt, under which responses are replayed; views_before: those under
    which they are before the advantages, for `Batch.viewed`. greedy: the rewards of a greedy response to each prompt,
    as `Rollouts.extras["greedy"]`. answered_under: views under which as many responses are sampled again, for
    `Batch.answered`. numbers: what was decided, as `Rollouts.extras["numbers"]`. completions: the rewards of what a
    chain's states lead to without further noise, before its first stochastic step and behind each, as
    `Rollouts.extras["completions"]` [rollout, 1 + decision]. outcomes: the same behind each step of candidates that
    share their state, as `Rollouts.extras["outcomes"]` [rollout, decision]. latents: those before each decision,
    pooled, and their noise level, as `Rollouts.extras["latents"]` [rollout, decision, number]. inverse: how likely the
    policy finds the prompt where it sees what it made of it, as `Rollouts.extras["inverse"]` [rollout], a mean over
    tokens. reference_responses: the rewards of a response of the reference policy to each prompt, as
    `Rollouts.extras["reference_reward"]` [rollout]. continuations: what the segments of a response add to the reward
    that is expected, as `Rollouts.extras[Continuations.name]` [rollout, decision].
    """

    offers: frozenset[str] = frozenset()
    old: bool = False
    reference: bool = False
    reference_resets: frozenset[int] = frozenset()
    reference_decays: frozenset[float] = frozenset()
    critic: CriticSettings | None = None
    statistics: frozenset[str] = frozenset()
    whole_groups: bool = False
    views: tuple[View, ...] = ()
    views_before: tuple[View, ...] = ()
    greedy: bool = False
    answered_under: tuple[View, ...] = ()
    numbers: bool = False
    completions: bool = False
    outcomes: bool = False
    latents: bool = False
    inverse: bool = False
    reference_responses: bool = False
    continuations: tuple[Continuations, ...] = ()

    def __or__(self, other: Needs) -> Needs:
        return Needs(**{f.name: _either(vars(self)[f.name], vars(other)[f.name]) for f in fields(Needs)})


def _either(one: Any, other: Any) -> Any:
    """Of tuples each member once; of a thing that there is one of, the one that is there."""
    if one is None or other is None:
        return one if other is None else other
    return tuple(dict.fromkeys((*one, *other))) if isinstance(one, tuple) else one | other


def together(parts: Iterable[Needs]) -> Needs:
    return reduce(Needs.__or__, parts, Needs())


@dataclass(frozen=True)
class Capabilities:
    """What the decisions of a job's policy support. of: the key and value that decide it, for messages."""

    of: str
    offers: frozenset[str] = frozenset()
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    groups: tuple[str, ...] = field(default=())  # named groups of parameters beside the policy's own


def check(parts: Iterable[tuple[str, Needs]], offered: Capabilities) -> None:
    """Raises SettingsError for the first part, named by its key, that needs what is not offered, or another reference
    than a part before it."""
    parts = list(parts)
    _one_reference([(key, needs.reference_decays) for key, needs in parts if needs.reference])
    for key, needs in parts:
        for name in sorted(needs.offers):
            if name not in offered.offers:
                raise SettingsError(f"{key} needs {OFFERS[name]}, which {offered.of} does not have")


def _one_reference(asked: list[tuple[str, frozenset[float]]]) -> None:
    """There is one reference policy: where it follows the present one, all that ask for it must mean that."""
    for key, decays in asked:
        if decays != asked[0][1]:
            first, other = (", ".join(map(str, found)) or "none" for found in (asked[0][1], decays))
            raise SettingsError(
                f"{key} asks for a reference that follows with decay {other}, {asked[0][0]} with {first}: a job has "
                "one reference; leave one of them out, or give both the same decay"
            )
