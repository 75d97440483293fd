"""Settings of masked diffusion models, which fill the positions of a response in any order."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import model_validator

from mmrl.policies.settings import Collects, LoRA, ModelSettings, Sections
from mmrl.protocols.abilities import DiscreteDecisions, Segmented
from mmrl.protocols.critic import CriticSettings, SharedCritic
from mmrl.protocols.offers import Offer
from mmrl.protocols.requirements import Capabilities
from mmrl.schedules.schedule import Schedule, number
from mmrl.settings import Choice, Section, load_attribute, option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.policies.discrete_diffusion.likelihoods import States
    from mmrl.protocols.job import JobConfig
    from mmrl.protocols.parts import Policy

_HERE = "mmrl.policies.discrete_diffusion.settings"


class Order(Choice):
    """The order in which masked positions are filled."""

    title: ClassVar[str] = "order of unmasking"
    kinds: ClassVar[dict[str, str]] = {
        "confidence": f"{_HERE}:Confidence",
        "entropy": f"{_HERE}:LowEntropy",
        "random": f"{_HERE}:RandomOrder",
        "left_to_right": f"{_HERE}:LeftToRight",
    }
    source: ClassVar[str] = "LLaDA, arXiv 2502.09992"
    test: ClassVar[str] = "tests/policies/discrete_diffusion/test_unmasking.py"

    @abstractmethod
    def scores(self, token_logp: Tensor, entropy: Tensor, uniform: Tensor) -> Tensor:
        """Returns scores [row, position]; masked positions with higher scores are filled first.

        token_logp: log-probability of the token that was sampled for a position; entropy: the entropy of the model's
        distribution at the position; uniform: random numbers in [0, 1). Each is [row, position].
        """


class Confidence(Order):
    """Fills the positions first whose sampled token has the highest probability."""

    equation: ClassVar[str] = "argmax p(x_k | state)"
    type: str = "confidence"

    def scores(self, token_logp: Tensor, entropy: Tensor, uniform: Tensor) -> Tensor:
        return token_logp


class LowEntropy(Order):
    """Fills the positions first whose distribution has the lowest entropy, whatever token was sampled."""

    equation: ClassVar[str] = "argmin H(. | state)"
    source: ClassVar[str] = "Dream 7B, arXiv 2508.15487"
    type: str = "entropy"

    def scores(self, token_logp: Tensor, entropy: Tensor, uniform: Tensor) -> Tensor:
        return -entropy


class RandomOrder(Order):
    """Fills positions in random order. Only then is the likelihood of a trace that of the whole rollout: other orders
    depend on the model too."""

    equation: ClassVar[str] = "uniform"
    type: str = "random"

    def scores(self, token_logp: Tensor, entropy: Tensor, uniform: Tensor) -> Tensor:
        return uniform


class LeftToRight(Order):
    """Fills the first masked position next, as an autoregressive model does."""

    equation: ClassVar[str] = "argmin k"
    type: str = "left_to_right"

    def scores(self, token_logp: Tensor, entropy: Tensor, uniform: Tensor) -> Tensor:
        """Returns minus the index of each position, [row, position], so that the first masked position is filled
        next."""
        import torch

        return -torch.arange(token_logp.shape[1], device=token_logp.device).expand_as(token_logp).float()


class MaskedLikelihood(Choice):
    """The estimate of a response's log-likelihood: the states (partly masked copies) in which the model scores it, and
    the weights of the scores.

    The states follow from the seed of a rollout, and for some estimates from its trace (the step in which each position
    was filled) or the epoch of updates. So the old, the current and the reference policy score the same states.
    """

    title: ClassVar[str] = "likelihood of a masked response"
    kinds: ClassVar[dict[str, str]] = {
        "one_step": f"{_HERE}:OneStep",
        "coupled": f"{_HERE}:Coupled",
        "elbo": f"{_HERE}:ELBO",
        "spread": f"{_HERE}:Spread",
        "trace": f"{_HERE}:Trace",
        "step_merge": f"{_HERE}:StepMerge",
        "any_order": f"{_HERE}:AnyOrder",
        "staircase": f"{_HERE}:StaircaseBound",
    }
    test: ClassVar[str] = "tests/policies/discrete_diffusion/test_likelihoods.py"
    # Each position is scored once, in a state in which sampling was before it filled the position
    follows_trace: ClassVar[bool] = False
    type: str = "one_step"

    @abstractmethod
    def states(self, seed: int, prompt_length: int, steps: Tensor, num_steps: int) -> States:
        """Returns the partly masked copies of one rollout in which the model scores its response.

        seed: the seed of the rollout. prompt_length: number of tokens of the prompt. steps: [position] int64, the
        sampling step that filled each position of the response. num_steps: sampling steps of a rollout.
        """

    def states_in_blocks(self, seed: int, prompt_length: int, steps: Tensor, num_steps: int, blocks: Tensor) -> States:
        """Returns `states` of a response that is sampled block by block. blocks: [position] int64, the block of each
        position; most estimates do not depend on it."""
        return self.states(seed, prompt_length, steps, num_steps)


class RandomStates(MaskedLikelihood):
    """An estimate from random states."""

    redraw: bool = option(
        True,
        "every epoch of updates samples new states, in which the old policy and the reference score responses too "
        "(d1, DiffuCoder); false: all epochs use the states of the first epoch, which costs no further passes",
    )


class OneStep(RandomStates):
    """Scores all positions at once, with the whole response masked and some tokens of the prompt masked."""

    equation: ClassVar[str] = "log p(x_k | partly masked prompt, all positions masked)"
    source: ClassVar[str] = "d1 (diffu-GRPO), arXiv 2504.12216"
    type: str = "one_step"
    prompt_mask: float = option(0.15, "probability that a token of the prompt is masked", ge=0, lt=1)

    def states(self, seed: int, prompt_length: int, steps: Tensor, num_steps: int) -> States:
        """Returns one state, in which the whole response and a random part of the prompt are masked."""
        from mmrl.policies.discrete_diffusion.likelihoods import one_step

        return one_step(seed, prompt_length, len(steps), self.prompt_mask)


class Coupled(RandomStates):
    """Scores the fully masked response, and pairs of states with complementary masks, so that each pair scores each
    position once."""

    equation: ClassVar[str] = (
        "(log p(x_k | all masked) + mean over pairs of log p(x_k | the state in which k is masked) / the probability "
        "of its mask, t or 1 - t) / 2"
    )
    source: ClassVar[str] = "DiffuCoder (coupled-GRPO), arXiv 2506.20639"
    type: str = "coupled"
    pairs: int = option(1, "pairs of states", ge=1)
    levels: tuple[float, float] = option(
        (0.2, 0.8), "smallest and largest share of positions that are masked in the first state of a pair"
    )

    @model_validator(mode="after")
    def _levels_are_ordered(self) -> Coupled:
        """Raises ValueError unless 0 < low <= high < 1."""
        low, high = self.levels
        if not 0 < low <= high < 1:
            raise ValueError(f"levels={list(self.levels)} must be two numbers between 0 and 1, the smaller one first")
        return self

    def states(self, seed: int, prompt_length: int, steps: Tensor, num_steps: int) -> States:
        """Returns the fully masked state of a response of len(steps) tokens, then `pairs` pairs of states with
        complementary masks. The first mask of a pair covers a share within `levels`. Depends on the seed and on the
        length alone."""
        from mmrl.policies.discrete_diffusion.likelihoods import coupled

        return coupled(seed, len(steps), self.pairs, self.levels)


class ELBO(RandomStates):
    """The evidence lower bound, from stratified numbers of masked positions; which positions are masked is random."""

    equation: ClassVar[str] = (
        "E_l (L / l) sum over l masked positions log p(x_k | the unmasked positions), l from 1 to L"
    )
    source: ClassVar[str] = "LLaDA, arXiv 2502.09992 (its low-variance form); LLaDA 1.5 (VRPO), arXiv 2505.19223"
    type: str = "elbo"
    draws: int = option(
        4, "states of a response; their numbers of masked positions are stratified over 1 to its length", ge=1
    )
    antithetic: bool = option(
        False, "states come in pairs: the second of a pair masks the positions that the first one does not"
    )

    @model_validator(mode="after")
    def _draws_are_even(self) -> ELBO:
        """Raises ValueError for antithetic states, which come in pairs, if their number is odd."""
        if self.antithetic and self.draws % 2:
            raise ValueError(
                f"draws={self.draws} is odd, but antithetic=true makes pairs of states; set an even number"
            )
        return self

    def states(self, seed: int, prompt_length: int, steps: Tensor, num_steps: int) -> States:
        """Returns `draws` states, whose numbers of masked positions are stratified over 1 .. L."""
        from mmrl.policies.discrete_diffusion.likelihoods import elbo

        return elbo(seed, len(steps), self.draws, self.antithetic)


class Spread(RandomStates):
    """Scores masked tokens in states whose mask ratios are spread evenly, from a random start. The prompt is not
    masked. All states of a response are scored in every update; UniGRPO scores one per update, and spreads the mask
    ratios over the updates of a step."""

    equation: ClassVar[str] = (
        "mean of log p(x_k | prompt, unmasked positions) over the states in which k is masked; state j of n "
        "masks each position with probability (u + j / n) mod 1"
    )
    source: ClassVar[str] = "reconstructed from summaries of MMaDA (UniGRPO), arXiv 2505.15809"
    test: ClassVar[str] = "tests/policies/discrete_diffusion/test_parts.py"
    type: str = "spread"
    draws: int = option(4, "states of a response", ge=1)

    def states(self, seed: int, prompt_length: int, steps: Tensor, num_steps: int) -> States:
        """Returns `draws` states, whose mask ratios are evenly spaced from a random start."""
        from mmrl.policies.discrete_diffusion.likelihoods import spread

        return spread(seed, len(steps), self.draws)


class Trace(MaskedLikelihood):
    """Scores each token in the state of sampling in which it was sampled."""

    equation: ClassVar[str] = "log p(x_k | the state before the step that filled k), with each `shrink` steps merged"
    source: ClassVar[str] = "TraceRL, arXiv 2509.06949"
    follows_trace: ClassVar[bool] = True
    type: str = "trace"
    shrink: int = option(1, "consecutive steps that are merged into one state", unit="steps", ge=1)

    def states(self, seed: int, prompt_length: int, steps: Tensor, num_steps: int) -> States:
        """Returns the states in which the tokens were sampled, with `shrink` steps merged into one."""
        from mmrl.policies.discrete_diffusion.likelihoods import trace

        return trace(steps, num_steps, self.shrink)


class StepMerge(MaskedLikelihood):
    """Divides the sampling steps into segments of equal length, and scores each token in the state before its segment.
    More segments come nearer to `trace`, which is one step per segment."""

    equation: ClassVar[str] = "log p(x_k | the state before the segment of steps that filled k)"
    source: ClassVar[str] = "d2-StepMerge, arXiv 2509.21474"
    test: ClassVar[str] = "tests/policies/discrete_diffusion/test_traces.py"
    follows_trace: ClassVar[bool] = True
    type: str = "step_merge"
    segments: int = option(4, "segments of the sampling steps, at most as many as there are steps", ge=1)

    def states(self, seed: int, prompt_length: int, steps: Tensor, num_steps: int) -> States:
        """Returns the states before each of `segments` segments of sampling steps."""
        from mmrl.policies.discrete_diffusion.likelihoods import step_merge

        return step_merge(steps, num_steps, self.segments)


class AnyOrder(MaskedLikelihood):
    """Scores the whole trace in one pass: a mask token for each position comes after the response, and attends to the
    prompt and to the positions that were filled before it; filled positions attend to no later ones either. Exact for
    models that sample with this attention; an approximation for models with bidirectional attention."""

    equation: ClassVar[str] = "log p(x_k | prompt, positions filled before k, which attend to none filled later)"
    source: ClassVar[str] = "d2-AnyOrder, arXiv 2509.21474"
    test: ClassVar[str] = "tests/policies/discrete_diffusion/test_traces.py"
    follows_trace: ClassVar[bool] = True
    type: str = "any_order"

    def states(self, seed: int, prompt_length: int, steps: Tensor, num_steps: int) -> States:
        """Returns one state, which scores all positions in the order in which they were filled."""
        from mmrl.policies.discrete_diffusion.likelihoods import any_order

        return any_order(steps)


class StaircaseBound(RandomStates):
    """The bound of `elbo` block by block, for block diffusion models (`unmasking.causal_blocks`). One pass scores all
    blocks, each partly masked and given the unmasked blocks before it: a row holds the response and its masked copy,
    with an attention mask in the form of a staircase."""

    equation: ClassVar[str] = (
        "sum over blocks b of n positions of E_l n / l log p(x_k | prompt, blocks before b, positions of b that are "
        "not masked), k masked, l = 1 ... n"
    )
    source: ClassVar[str] = (
        "reconstructed from the abstract of StableDRL, arXiv 2603.06743; block diffusion: arXiv 2503.09573"
    )
    test: ClassVar[str] = "tests/policies/discrete_diffusion/test_staircase.py"
    type: str = "staircase"
    draws: int = option(2, "states of a response; each has masked positions in every block", ge=1)

    def states(self, seed: int, prompt_length: int, steps: Tensor, num_steps: int) -> States:
        """Returns the states of a response that is a single block."""
        import torch

        return self.states_in_blocks(seed, prompt_length, steps, num_steps, torch.zeros_like(steps))

    def states_in_blocks(self, seed: int, prompt_length: int, steps: Tensor, num_steps: int, blocks: Tensor) -> States:
        """Returns `draws` states; in each of them every block [position] has masked positions."""
        from mmrl.policies.discrete_diffusion.likelihoods import staircase

        return staircase(seed, blocks, self.draws)


class MaskedLimits(Section):
    """Lengths of prompts and responses."""

    max_prompt_length: int = option(1024, "longest prompt", unit="tokens", ge=1)
    response_length: int = option(
        64, "length of every response; tokens after its end token are not trained on", unit="tokens", ge=1
    )


class MaskedSampling(MaskedLimits):
    """Sampling of responses."""

    temperature: Schedule = number(1.0, "temperature of sampling and of recomputed log-probabilities", gt=0)


class WritingLimits(MaskedLimits):
    """Lengths of prompts and responses, and of text before an image."""

    reasoning_length: int = option(
        0, "tokens of text before those of an image; 0: only an image, or only text", unit="tokens", ge=0
    )


class WritingSampling(MaskedSampling, WritingLimits):
    """Sampling of responses with text and an image."""


class MaskedEvaluation(Section):
    """Sampling of responses in evaluation."""

    temperature: float = option(0.0, "sampling temperature; 0: the most likely token", ge=0)


class Unmasking(Section):
    """The number of steps and the order in which the positions of a response are filled."""

    steps: int | None = option(
        None, "unmasking steps of a response; default: one for each position", unit="steps", ge=1
    )
    block: int | None = option(
        None, "length of a block; blocks are filled one after the other; default: no blocks", unit="tokens", ge=1
    )
    reasoning_steps: int | None = option(
        None, "unmasking steps of the text before an image; default: one for each position", unit="steps", ge=1
    )
    order: Order = option(Confidence(), "which positions are filled next")
    causal_blocks: bool = option(
        False,
        "a block attends to the prompt, earlier blocks and itself, as in block diffusion models (SDAR, TraDo); "
        "false: every position attends to all others",
    )
    threshold: float | None = option(
        None,
        "each step also fills all positions whose sampled token has at least this probability, so that a response may "
        "need fewer steps; null: it fills only its own number of positions",
        gt=0,
        le=1,
    )


class UnmaskingRollouts(Unmasking):
    """Sampling of responses in training, and the estimate of their likelihoods."""

    likelihood: MaskedLikelihood = option(OneStep(), "how the log-likelihood of a response is estimated")


class UnmaskingDemonstrations(Unmasking):
    """Supervised fine-tuning of a masked diffusion model on demonstrations."""

    draws: int = option(1, "masked copies of a response that the loss averages over", ge=1)

    @property
    def likelihood(self) -> ELBO | StaircaseBound:
        """The evidence lower bound of a demonstration, by blocks for block diffusion models."""
        return StaircaseBound(draws=self.draws) if self.causal_blocks else ELBO(draws=self.draws)


class TokenDiffusionModel(ModelSettings):
    """Options of all discrete diffusion models."""

    type: str = "discrete_diffusion"
    attention: Literal["sdpa", "eager"] = option("sdpa", "implementation of attention")
    lora: LoRA | None = option(None, "train low-rank adapters in place of the weights")
    activation_checkpointing: bool = option(False, "recompute activations in the backward pass: less memory, more time")
    shifted: bool | None = option(
        None,
        "the output at a position predicts the next token, as in models made from autoregressive ones (Dream); "
        "default: what `mmrl convert` wrote into config.json, else false",
    )

    def capabilities(self, config: JobConfig) -> Capabilities:
        offers: set[Offer] = {"entropy", "square_sum", "tokens", "text", DiscreteDecisions, "single_sample_kl", "views"}
        offers |= {"lengths", "reference_ratio", "distribution", "reference_rollouts"}
        return Capabilities(f"model.type={self.type}", frozenset(offers))


class MaskedModel(TokenDiffusionModel):
    """A masked diffusion language model: a masked language model of transformers, or a causal one with bidirectional
    attention. Each token of the response is one decision. With a codebook file in its folder it generates images as
    tokens, after a text if `rollout.reasoning_length` is set."""

    test: ClassVar[str] = "tests/policies/discrete_diffusion/test_policy.py"
    source: ClassVar[str] = "LLaDA, arXiv 2502.09992; text and images: MMaDA, arXiv 2505.15809"
    type: str = "discrete_diffusion"
    mask_token: str | None = option(None, "the mask token; default: the tokenizer's own")

    @classmethod
    def sections(cls, tree: Mapping[str, Any], collects: Collects) -> Sections:
        """Returns the sections `rollout`, `unmasking` and `evaluation`; see `ModelSettings.sections`."""
        supervised = collects == "demonstrations"
        return {
            "rollout": WritingLimits if supervised else WritingSampling,
            "unmasking": UnmaskingDemonstrations if supervised else UnmaskingRollouts,
            "evaluation": MaskedEvaluation,
        }

    def capabilities(self, config: JobConfig) -> Capabilities:
        """Returns what the decisions of this model support; see `ModelSettings.capabilities`."""
        shared = super().capabilities(config)
        limits: WritingLimits = config.rollout
        parts: set[Offer] = {"parts", Segmented} if limits.reasoning_length else set()
        return Capabilities(shared.source, shared.offers | {"critic"} | parts, groups=("critic",))

    def check(self, config: JobConfig) -> None:
        """Raises ValueError for settings of `unmasking`, `rollout` and the critic that do not fit one another."""
        from mmrl.policies.discrete_diffusion.schedule import text_and_image_schedule

        unmasking: UnmaskingRollouts | UnmaskingDemonstrations = config.section("unmasking")
        limits: WritingLimits = config.rollout
        text, text_steps = limits.reasoning_length, unmasking.reasoning_steps
        if text_steps is not None and not text:
            raise ValueError(
                f"unmasking.reasoning_steps={text_steps} is for text before an image, but rollout.reasoning_length is "
                "0; set that, or leave out unmasking.reasoning_steps"
            )
        text_and_image_schedule(text, limits.response_length, text_steps, unmasking.steps, unmasking.block)
        _check_critic(config.needs.critic, unmasking.likelihood)
        likelihood = unmasking.likelihood
        redraws = isinstance(likelihood, RandomStates) and likelihood.redraw
        check_redraw(config, redraws, "unmasking.likelihood.redraw")
        check_shift(unmasking, shifted=self.shifted is True)

    def load(self, config: JobConfig, task: object, path: str) -> Policy:
        return load_attribute("mmrl.policies.discrete_diffusion.loading:load")(path, self, config)


def check_shift(unmasking: UnmaskingRollouts | UnmaskingDemonstrations, *, shifted: bool) -> None:
    """Raises ValueError for options that do not work with `model.shifted`, where a token is predicted at the position
    before it."""
    _check_blocks(unmasking, shifted)
    if shifted and isinstance(unmasking, UnmaskingRollouts) and unmasking.likelihood.type == "any_order":
        raise ValueError(
            "unmasking.likelihood=any_order scores a token at its own mask token, but with model.shifted=true the "
            "model predicts it at the position before; set another likelihood, such as step_merge"
        )


def _check_critic(critic: CriticSettings | None, likelihood: MaskedLikelihood) -> None:
    """Raises ValueError for a critic that is not of type `shared`, and for one whose likelihood scores responses in
    states that sampling never had."""
    if critic is None:
        return
    if not isinstance(critic, SharedCritic):
        raise ValueError(
            f"algorithm.critic.type={critic.type} does not work with a masked diffusion model; set it to shared, with "
            "algorithm.critic.detach=true if the critic's loss must not train the model"
        )
    if not likelihood.follows_trace:
        raise ValueError(
            f"unmasking.likelihood={likelihood.type} scores responses in states that sampling never had, but "
            "algorithm.critic needs the states of sampling; set the likelihood to trace, step_merge or any_order"
        )


def _check_blocks(unmasking: UnmaskingRollouts | UnmaskingDemonstrations, shifted: bool) -> None:
    """Raises ValueError if only one of sampling and scoring uses block attention. Block attention also needs the length
    of a block, and a model that is not shifted."""
    by_blocks = unmasking.likelihood.type == "staircase"
    if not unmasking.causal_blocks:
        if by_blocks:
            raise ValueError(
                "unmasking.likelihood=staircase is for block diffusion models; set unmasking.causal_blocks=true for "
                "one, or set the likelihood to elbo"
            )
        return
    if unmasking.block is None:
        raise ValueError("unmasking.causal_blocks=true needs the length of a block; set unmasking.block, in tokens")
    if not by_blocks:
        raise ValueError(
            f"unmasking.likelihood={unmasking.likelihood.type} scores a response with attention to all of its tokens, "
            "but unmasking.causal_blocks=true limits attention to blocks; set the likelihood to staircase"
        )
    if shifted:
        raise ValueError(
            "unmasking.causal_blocks=true scores a token in its own block, but with model.shifted=true the model "
            "predicts it at the position before; set one of them to false"
        )


def check_redraw(config: JobConfig, redraws: bool, key: str) -> None:
    """Raises ValueError if a method needs log-probabilities that are computed once before the updates, while every
    epoch scores responses in new states.

    redraws: every epoch scores responses in new states. key: the option that sets this, for the message.
    """
    if not redraws or config.algorithm.epochs == 1:
        return
    if measured := [measurement for measurement in config.needs.prepared if measurement.scores]:
        # the part of the algorithm that needs these log-probabilities
        parts = (part for part, needs in config.algorithm.parts() if measured[0] in needs.measurements)
        raise ValueError(
            f"with algorithm.epochs={config.algorithm.epochs} and {key}=true every epoch scores responses in new "
            f"states, but {next(parts, measured[0].name)} needs log-probabilities that are computed only in the states "
            f"of the first epoch; set {key}=false, or algorithm.epochs=1"
        )
