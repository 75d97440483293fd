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
    """The order in which empty positions are filled."""

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
    def scores(self, chosen: Tensor, entropy: Tensor, chance: Tensor) -> Tensor:
        """Returns scores [row, position], the higher the sooner. chosen: log-probability of the token that was drawn
        for a position; entropy: of its distribution; chance: uniform draws of the row. Each is [row, position]."""


class Confidence(Order):
    """Fills first the positions whose drawn token is most likely."""

    equation: ClassVar[str] = "argmax p(x_k | state)"
    type: str = "confidence"

    def scores(self, chosen: Tensor, entropy: Tensor, chance: Tensor) -> Tensor:
        return chosen


class LowEntropy(Order):
    """Fills first the positions at which the model is surest, whatever token was drawn."""

    equation: ClassVar[str] = "argmin H(. | state)"
    source: ClassVar[str] = "Dream 7B, arXiv 2508.15487"
    type: str = "entropy"

    def scores(self, chosen: Tensor, entropy: Tensor, chance: Tensor) -> Tensor:
        return -entropy


class RandomOrder(Order):
    """Fills positions in random order. Only then is the likelihood of a trace that of the whole rollout."""

    equation: ClassVar[str] = "uniform"
    type: str = "random"

    def scores(self, chosen: Tensor, entropy: Tensor, chance: Tensor) -> Tensor:
        return chance


class LeftToRight(Order):
    """Fills the first empty position next, as in an autoregressive model."""

    equation: ClassVar[str] = "argmin k"
    type: str = "left_to_right"

    def scores(self, chosen: Tensor, entropy: Tensor, chance: Tensor) -> Tensor:
        import torch

        return -torch.arange(chosen.shape[1], device=chosen.device).expand_as(chosen).float()


class MaskedLikelihood(Choice):
    """The estimate of a response's likelihood: the states in which the model scores it, and the weights of the scores.

    The states follow from a rollout's seed (and from its trace, or the epoch of updates), so that the old, the present
    and the reference policy score it in the same ones.
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
    of_trace: ClassVar[bool] = False  # each position is scored once, in a state that the rollout went through
    type: str = "one_step"

    @abstractmethod
    def states(self, seed: int, prompt: int, steps: Tensor, last: int) -> States:
        """Returns the partly masked copies of one rollout in which the model scores its response.

        seed: of the rollout; prompt: number of prompt tokens; steps: [position] int64, the sampling step that filled
        each position of the response; last: number of sampling steps of a rollout."""

    def states_in_blocks(self, seed: int, prompt: int, steps: Tensor, last: int, blocks: Tensor) -> States:
        """Returns `states` of a response that is decoded block by block. blocks: [position] int64, the block of each;
        most estimates do not depend on it."""
        return self.states(seed, prompt, steps, last)


class RandomStates(MaskedLikelihood):
    """An estimate from states that are drawn at random."""

    redraw: bool = option(
        True,
        "states are drawn anew for every epoch of updates, in which the old policy and the reference score them too "
        "(d1, DiffuCoder); false: all epochs have the first one's, which costs no further passes",
    )


class OneStep(RandomStates):
    """Scores all positions at once, with the whole response masked and some tokens of the prompt masked."""

    equation: ClassVar[str] = "log p(x_k | prompt with tokens hidden, all positions empty)"
    source: ClassVar[str] = "d1 (diffu-GRPO), arXiv 2504.12216"
    type: str = "one_step"
    prompt_mask: float = option(0.15, "probability that a token of the prompt is masked", ge=0, lt=1)

    def states(self, seed: int, prompt: int, steps: Tensor, last: int) -> States:
        """Returns one state, in which the whole response and a random part of the prompt are masked."""
        from mmrl.policies.discrete_diffusion.likelihoods import one_step

        return one_step(seed, prompt, len(steps), self.prompt_mask)


class Coupled(RandomStates):
    """Scores complementary pairs of masks, so that each position is scored once a pair, and the fully masked
    response."""

    equation: ClassVar[str] = (
        "(log p(x_k | all empty) + mean over pairs of log p(x_k | the state in which k is empty) / its chance of being "
        "empty, t or 1 - t) / 2"
    )
    source: ClassVar[str] = "DiffuCoder (coupled-GRPO), arXiv 2506.20639"
    type: str = "coupled"
    pairs: int = option(1, "pairs of states", ge=1)
    levels: tuple[float, float] = option(
        (0.2, 0.8), "least and largest share of positions that are empty in one of a pair"
    )

    @model_validator(mode="after")
    def _rising(self) -> Coupled:
        low, high = self.levels
        if not 0 < low <= high < 1:
            raise ValueError(f"levels must lie inside (0, 1) and not fall, got {self.levels}")
        return self

    def states(self, seed: int, prompt: int, steps: Tensor, last: int) -> States:
        """Returns the fully masked state, then `pairs` pairs of complementary masks."""
        from mmrl.policies.discrete_diffusion.likelihoods import coupled

        return coupled(seed, len(steps), self.pairs, self.levels)


class ELBO(RandomStates):
    """The evidence lower bound, from stratified numbers of masked positions; which positions are masked is random."""

    equation: ClassVar[str] = "E_l (L / l) sum over l empty positions log p(x_k | the others), l from 1 to L"
    source: ClassVar[str] = "LLaDA, arXiv 2502.09992 (its form of low variance); LLaDA 1.5 (VRPO), arXiv 2505.19223"
    type: str = "elbo"
    draws: int = option(4, "states of a response, one in each of as many parts of the levels", ge=1)
    antithetic: bool = option(
        False, "states come in pairs: where the first of a pair has few empty positions, the second has the many others"
    )

    @model_validator(mode="after")
    def _even(self) -> ELBO:
        if self.antithetic and self.draws % 2:
            raise ValueError(f"draws={self.draws} is odd, and antithetic=true makes pairs; use an even number")
        return self

    def states(self, seed: int, prompt: int, steps: Tensor, last: int) -> States:
        """Returns `draws` states, whose numbers of masked positions are stratified over 1 .. L."""
        from mmrl.policies.discrete_diffusion.likelihoods import elbo

        return elbo(seed, len(steps), self.draws, self.antithetic)


class Spread(RandomStates):
    """Scores tokens where they are masked, with masks of all densities: mask ratios are spread evenly from a random
    start. The prompt is not masked. All states of a response are scored in every update; UniGRPO scores one an update,
    and spreads its mask ratios over the updates of a step."""

    equation: ClassVar[str] = (
        "mean of log p(x_k | prompt, unmasked positions) over the states in which k is masked; state j of n "
        "masks each position with probability (u + j / n) mod 1"
    )
    source: ClassVar[str] = "reconstructed from summaries of MMaDA (UniGRPO), arXiv 2505.15809"
    test: ClassVar[str] = "tests/policies/discrete_diffusion/test_parts.py"
    type: str = "spread"
    draws: int = option(4, "states of a response", ge=1)

    def states(self, seed: int, prompt: int, steps: Tensor, last: int) -> States:
        """Returns `draws` states, whose mask ratios are evenly spaced from a random start."""
        from mmrl.policies.discrete_diffusion.likelihoods import spread

        return spread(seed, len(steps), self.draws)


class Trace(MaskedLikelihood):
    """Scores what was drawn in each step, in the state in which it was drawn."""

    equation: ClassVar[str] = (
        "log p(x_k | the state before the step that filled k), `shrink` steps that filled a position merged"
    )
    source: ClassVar[str] = "TraceRL, arXiv 2509.06949"
    of_trace: ClassVar[bool] = True
    type: str = "trace"
    shrink: int = option(1, "steps that filled a position and become one state", unit="steps", ge=1)

    def states(self, seed: int, prompt: int, steps: Tensor, last: int) -> States:
        """Returns the states in which the rollout drew its tokens, `shrink` steps merged into one."""
        from mmrl.policies.discrete_diffusion.likelihoods import trace

        return trace(steps, last, self.shrink)


class StepMerge(MaskedLikelihood):
    """Scores what was drawn in the states before runs of steps of equal length: with more of them it comes nearer to
    the trace, which it equals with one step a run."""

    equation: ClassVar[str] = "log p(x_k | the state before the segment of steps that filled k)"
    source: ClassVar[str] = "d2-StepMerge, arXiv 2509.21474"
    test: ClassVar[str] = "tests/policies/discrete_diffusion/test_traces.py"
    of_trace: ClassVar[bool] = True
    type: str = "step_merge"
    segments: int = option(4, "states of a response; at most as many as it has steps", ge=1)

    def states(self, seed: int, prompt: int, steps: Tensor, last: int) -> States:
        """Returns the states before each of `segments` runs of sampling steps."""
        from mmrl.policies.discrete_diffusion.likelihoods import step_merge

        return step_merge(steps, last, self.segments)


class AnyOrder(MaskedLikelihood):
    """Scores the whole trace in one pass: each position's mask token stands beside the response and sees the prompt and
    what was filled before, and what was filled sees no more than that either. Exact for models that decode this way; an
    approximation for others, which read states in both directions and with their masked positions."""

    equation: ClassVar[str] = "log p(x_k | prompt, positions filled before k, which see nothing that was filled later)"
    source: ClassVar[str] = "d2-AnyOrder, arXiv 2509.21474"
    test: ClassVar[str] = "tests/policies/discrete_diffusion/test_traces.py"
    of_trace: ClassVar[bool] = True
    type: str = "any_order"

    def states(self, seed: int, prompt: int, steps: Tensor, last: int) -> States:
        """Returns one state, which scores all positions in the order in which they were filled."""
        from mmrl.policies.discrete_diffusion.likelihoods import any_order

        return any_order(steps)


class StaircaseBound(RandomStates):
    """The bound of `elbo` block by block, for models that are read by blocks (`unmasking.causal_blocks`): all blocks
    are scored at once, each with masked positions of its own, and sees the finished blocks before it. Response and
    noised copy stand in one row, and the attention mask is a staircase."""

    equation: ClassVar[str] = (
        "sum over blocks b of n positions of E_l n / l log p(x_k | prompt, blocks before b, positions of b that are "
        "not empty), k empty, l = 1 ... n"
    )
    source: ClassVar[str] = (
        "reconstructed from the abstract of StableDRL, arXiv 2603.06743; block diffusion: arXiv 2503.09573"
    )
    test: ClassVar[str] = "tests/policies/discrete_diffusion/test_staircase.py"
    type: str = "staircase"
    draws: int = option(2, "states of a response, each of which has empty positions in every block", ge=1)

    def states(self, seed: int, prompt: int, steps: Tensor, last: int) -> States:
        """Returns the states of a response that is a single block."""
        import torch

        return self.states_in_blocks(seed, prompt, steps, last, torch.zeros_like(steps))

    def states_in_blocks(self, seed: int, prompt: int, steps: Tensor, last: int, blocks: Tensor) -> States:
        """Returns `draws` states; in each of them every block [position] has masked positions."""
        from mmrl.policies.discrete_diffusion.likelihoods import staircase

        return staircase(seed, blocks, self.draws)


class MaskedLimits(Section):
    """Lengths of prompts and responses."""

    max_prompt_length: int = option(1024, "longest prompt", unit="tokens", ge=1)
    response_length: int = option(
        64, "positions of every response; those behind its end token are left out", unit="tokens", ge=1
    )


class MaskedSampling(MaskedLimits):
    """Sampling of responses."""

    temperature: Schedule = number(1.0, "temperature of sampling and of recomputed log-probabilities", gt=0)


class WritingLimits(MaskedLimits):
    """Lengths of prompts and responses, and of text before an image."""

    reasoning_length: int = option(
        0, "positions of text before the tokens of an image; 0: an image alone, or text alone", unit="tokens", ge=0
    )


class WritingSampling(MaskedSampling, WritingLimits):
    """Sampling of responses with text and an image."""


class MaskedEvaluation(Section):
    """Sampling of responses in evaluation."""

    temperature: float = option(0.0, "0: the most likely token each time", ge=0)


class Unmasking(Section):
    """The number of steps and the order in which the positions of a response are filled."""

    steps: int | None = option(
        None, "unmasking steps of a response; default: one for each position", unit="steps", ge=1
    )
    block: int | None = option(
        None, "positions that are filled before those behind them; default: all", unit="tokens", ge=1
    )
    reasoning_steps: int | None = option(
        None, "unmasking steps of the text before an image; default: one for each position", unit="steps", ge=1
    )
    order: Order = option(Confidence(), "which positions are filled next")
    causal_blocks: bool = option(
        False,
        "a block sees the prompt, the blocks before it and itself, as block diffusion models (SDAR, TraDo) do; "
        "false: every position sees all others",
    )
    threshold: float | None = option(
        None,
        "positions whose drawn token has at least this probability are filled at once, besides those of the step, so "
        "that a response may need fewer steps; null: those of the step alone",
        gt=0,
        le=1,
    )


class UnmaskingRollouts(Unmasking):
    """Sampling of responses in training, and the estimate of their likelihoods."""

    likelihood: MaskedLikelihood = option(OneStep(), "the estimate of a response's likelihood")


class UnmaskingDemonstrations(Unmasking):
    """Learning of a masked diffusion model from demonstrations."""

    draws: int = option(1, "states of a response", ge=1)

    @property
    def likelihood(self) -> ELBO | StaircaseBound:
        return StaircaseBound(draws=self.draws) if self.causal_blocks else ELBO(draws=self.draws)


class TokenDiffusionModel(ModelSettings):
    """Options that all kinds of discrete diffusion share."""

    type: str = "discrete_diffusion"
    attention: Literal["sdpa", "eager"] = option("sdpa", "implementation of attention")
    lora: LoRA | None = option(None, "train low-rank adapters in place of the weights")
    activation_checkpointing: bool = option(False, "recompute activations in the backward pass: less memory, more time")
    shifted: bool | None = option(
        None,
        "the model predicts at each position the token at the next, as those made of autoregressive ones do (Dream); "
        "default: what `mmrl convert` wrote into its config.json, else false",
    )

    def capabilities(self, config: JobConfig) -> Capabilities:
        offers: set[Offer] = {"entropy", "square_sum", "tokens", "text", DiscreteDecisions, "single_sample_kl", "views"}
        offers |= {"lengths", "reference_ratio", "distribution", "reference_rollouts"}
        return Capabilities(f"model.type={self.type}", frozenset(offers))


class MaskedModel(TokenDiffusionModel):
    """A masked diffusion model of text: a masked language model of transformers, or a causal one that is read in both
    directions. One decision a token of the response. With a codebook beside it it writes images, and text about them
    before, in the same way."""

    test: ClassVar[str] = "tests/policies/discrete_diffusion/test_policy.py"
    source: ClassVar[str] = "LLaDA, arXiv 2502.09992; text and images: MMaDA, arXiv 2505.15809"
    type: str = "discrete_diffusion"
    mask_token: str | None = option(None, "the mask token; default: the tokenizer's own")

    @classmethod
    def sections(cls, tree: Mapping[str, Any], collects: Collects) -> Sections:
        supervised = collects == "demonstrations"
        return {
            "rollout": WritingLimits if supervised else WritingSampling,
            "unmasking": UnmaskingDemonstrations if supervised else UnmaskingRollouts,
            "evaluation": MaskedEvaluation,
        }

    def capabilities(self, config: JobConfig) -> Capabilities:
        shared = super().capabilities(config)
        limits: WritingLimits = config.rollout
        parts: set[Offer] = {"parts", Segmented} if limits.reasoning_length else set()
        return Capabilities(shared.source, shared.offers | {"critic"} | parts, groups=("critic",))

    def check(self, config: JobConfig) -> None:
        from mmrl.policies.discrete_diffusion.schedule import in_parts

        unmasking: UnmaskingRollouts | UnmaskingDemonstrations = config.section("unmasking")
        limits: WritingLimits = config.rollout
        text, text_steps = limits.reasoning_length, unmasking.reasoning_steps
        if text_steps is not None and not text:
            raise ValueError(
                f"unmasking.reasoning_steps={text_steps} fills text before the tokens of an image; set "
                "rollout.reasoning_length, or leave it out"
            )
        in_parts(text, limits.response_length, text_steps, unmasking.steps, unmasking.block)
        _check_critic(config.needs.critic, unmasking.likelihood)
        likelihood = unmasking.likelihood
        redraws = isinstance(likelihood, RandomStates) and likelihood.redraw
        check_redraw(config, redraws, "unmasking.likelihood.redraw")
        check_shift(unmasking, shifted=self.shifted is True)

    def load(self, config: JobConfig, task: object, path: str) -> Policy:
        return load_attribute("mmrl.policies.discrete_diffusion.loading:load")(path, self, config)


def check_shift(unmasking: UnmaskingRollouts | UnmaskingDemonstrations, *, shifted: bool) -> None:
    """Raises ValueError for what is read at a position itself, where the model predicts it at the position before."""
    _check_blocks(unmasking, shifted)
    if shifted and isinstance(unmasking, UnmaskingRollouts) and unmasking.likelihood.type == "any_order":
        raise ValueError(
            "unmasking.likelihood=any_order scores a position at its own mask token, and with model.shifted=true "
            "the model predicts it at the position before; choose another likelihood, such as step_merge"
        )


def _check_critic(critic: CriticSettings | None, likelihood: MaskedLikelihood) -> None:
    """Raises ValueError for a critic of states that are not those of the trace."""
    if critic is None:
        return
    if not isinstance(critic, SharedCritic):
        raise ValueError(
            f"algorithm.critic.type={critic.type} is not a critic of a masked diffusion model; use shared, with "
            "detach=true where the model shall not learn from it"
        )
    if not likelihood.of_trace:
        raise ValueError(
            f"unmasking.likelihood={likelihood.type} shows the model states that the rollout was never in, "
            "and algorithm.critic values those of its trace; use trace, step_merge or any_order"
        )


def _check_blocks(unmasking: UnmaskingRollouts | UnmaskingDemonstrations, shifted: bool) -> None:
    """Raises ValueError where a model is read by blocks in sampling or in replay alone."""
    by_blocks = unmasking.likelihood.type == "staircase"
    if not unmasking.causal_blocks:
        if by_blocks:
            raise ValueError(
                "unmasking.likelihood=staircase is of models that are read by blocks; set unmasking.causal_blocks=true "
                "for one, or choose elbo"
            )
        return
    if unmasking.block is None:
        raise ValueError("unmasking.causal_blocks=true needs to know how large blocks are; set unmasking.block")
    if not by_blocks:
        raise ValueError(
            f"unmasking.likelihood={unmasking.likelihood.type} shows a model all of a response at once, and with "
            "unmasking.causal_blocks=true it is read by blocks; use staircase"
        )
    if shifted:
        raise ValueError(
            "unmasking.causal_blocks=true scores a position in its own block, and with model.shifted=true the model "
            "predicts it at the position before; set one of them to false"
        )


def check_redraw(config: JobConfig, redraws: bool, key: str) -> None:
    """Raises ValueError for measured likelihoods that would be of the first epoch's states alone. key: of `redraws`."""
    if not redraws or config.algorithm.epochs == 1:
        return
    if measured := [measurement for measurement in config.needs.prepared if measurement.scores]:
        raise ValueError(
            f"algorithm.epochs={config.algorithm.epochs} with {key}=true scores every epoch in states of its own, and "
            f"{measured[0].name} is measured in the first one's; set redraw: false, or epochs=1"
        )
