"""Discrete diffusion language models as policies. Each token of the response is one decision."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmrl.engine.flops import CallMeter, PolicyWork, Tally
from mmrl.generation.sampling import add_gumbel_noise
from mmrl.policies import codebook
from mmrl.policies.discrete_diffusion.inputs import StateCollator
from mmrl.policies.discrete_diffusion.likelihoods import States, scoring_state_index
from mmrl.policies.discrete_diffusion.responses import MaskedRecord, ResponseLayout
from mmrl.policies.discrete_diffusion.schedule import text_and_image_schedule
from mmrl.policies.discrete_diffusion.scorer import MaskScorer
from mmrl.policies.discrete_diffusion.settings import MaskedLikelihood, RandomStates, Unmasking
from mmrl.policies.models import Scorer, TrainingEngine, write_model
from mmrl.policies.vlm.critic import write_critic
from mmrl.rollouts import MOMENTS, OLD_CROSS_ENTROPY, SEGMENTS, Prompt, Replay, Rollouts, Sample, text_image_parts
from mmrl.runtime.files import use_default_permissions
from mmrl.samplers.chain import derive_seed
from mmrl.schedules.schedule import Schedule


@dataclass(frozen=True)
class TokenDiffusionOptions:
    """Options of sampling responses and of replaying them."""

    temperature: Schedule
    evaluation_temperature: float
    # Replays hold the log-probabilities of all tokens at each position, which take as much memory as the logits
    keeps_distributions: bool = False


class DiscreteDiffusionPolicy(ABC):
    """Base of policies that sample a response of fixed length by denoising its tokens.

    Log-probabilities of a response are estimated from several states, partly masked or noised copies of it, in one
    forward pass. The states follow from the seed of the rollout, and for some estimates from its trace: the step in
    which each token was sampled. `layout` converts prompts and responses, `collator` builds model inputs.
    """

    kind: ClassVar[str]  # the value of `model.type`

    def __init__(self, scorer: MaskScorer, layout: ResponseLayout, options: TokenDiffusionOptions) -> None:
        """options: the sampling temperatures, and whether replays return distributions."""
        self.module, self.layout, self.collator = scorer, layout, StateCollator(layout, scorer)
        self.temperature, self.evaluation_temperature = options.temperature, options.evaluation_temperature
        self.keeps_distributions = options.keeps_distributions
        tally = Tally()
        CallMeter(scorer.model, tally)  # hooks itself into the model and adds the operations of calls to the tally
        self.work = PolicyWork([tally], layout.units)
        self.module.eval()  # dropout would make replay differ from sampling

    @abstractmethod
    def _sample(self, prompts: list[Tensor], seeds: Sequence[int], temperature: float) -> list[MaskedRecord]:
        """Samples one response per prompt ([token] ids); response i depends on seeds[i] alone. temperature: 0 takes the
        most likely tokens."""

    @abstractmethod
    def scoring_states(self, record: MaskedRecord) -> States:
        """Returns the states in which the model scores a response."""

    @abstractmethod
    def _noised_response(self, record: MaskedRecord, states: States, state: int) -> Tensor:
        """Returns the token ids of the response in one of its states, [position]: some are masked, or replaced by
        random tokens."""

    def _forwards(self, record: MaskedRecord) -> int:
        """Returns the number of forward passes that sampled a response."""
        return len(record.steps.unique())

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.collator.device

    @property
    def max_decisions(self) -> int:
        """The number of tokens of a response."""
        return self.layout.length

    # --- prompts to responses ---

    @torch.no_grad()
    def rollout(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], *, step: int = 0) -> Rollouts:
        """Samples `group_size` responses per prompt. seeds: one per rollout, prompt by prompt. step: not used."""
        row_prompts = [prompt for prompt in prompts for _ in range(group_size)]
        ids = [row for row in map(self.layout.encode, prompts) for _ in range(group_size)]
        records = self._sample(ids, seeds, self.temperature.value)
        return self.layout.rollouts(row_prompts, records, group_size, self._forwards)

    @torch.no_grad()
    def respond(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Sample]:
        """Samples one response per prompt at the evaluation temperature."""
        ids = [self.layout.encode(prompt) for prompt in prompts]
        records = self._sample(ids, seeds, self.evaluation_temperature)
        return self.layout.rollouts(list(prompts), records, 1, self._forwards).samples

    def demonstrate(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> Rollouts:
        """Returns the prompts with demonstrated responses, for supervised fine-tuning.

        The text is metadata["demonstration"] of the prompt, or else its answer; it is padded with end tokens. For a
        model that generates images, the image is metadata["target"], and the text before it metadata["reasoning"].
        seeds: one per prompt; they determine the states in which the responses are scored.
        """
        layout, temperature = self.layout, self.temperature.value
        steps = torch.zeros(layout.length, dtype=torch.long)
        records = [
            MaskedRecord(layout.encode(p), layout.demonstration(p), steps, int(s), temperature)
            for p, s in zip(prompts, seeds, strict=True)
        ]
        return layout.rollouts(list(prompts), records, 1, self._forwards)

    # --- responses to log-probabilities ---

    def replay(self, rollouts: Rollouts, model: Scorer, *, reference: bool = False) -> Replay:
        """Returns the log-probability of each token: the weighted sum over the states that score it. Entropies and sums
        of squared probabilities are means with the same weights. If the job needs them, the replay also has the
        critic's values, the distributions in all states, and the cross-entropy with the old policy.

        model: `self.module`, or the engine that wraps it; called once. reference: not used.
        """
        records: list[MaskedRecord] = rollouts.inputs
        states = [self.scoring_states(record) for record in records]
        weight = torch.stack([row_states.weight for row_states in states])  # [rollout, state, position]
        rollout, state, position = weight.nonzero().unbind(1)  # of each score
        ids, mask, response_start, options = self._inputs(records, states)
        temperature = torch.tensor([record.temperature for record in records])[rollout]
        row, column = rollout * weight.shape[1] + state, response_start[rollout] + position
        responses = torch.stack([record.response for record in records])
        score_inputs = [row, column, responses[rollout, position], temperature]
        if (is_image := self.layout.image_mask(position)) is not None:
            options["is_image"] = is_image.to(self.device)
        if self.keeps_distributions and rollouts.old_prediction is not None:
            options["old"] = rollouts.old_prediction[rollout, position, state].to(self.device)
        scored = model(ids, mask, *(values.to(self.device) for values in score_inputs), **options)
        score_weight = weight[rollout, state, position].to(self.device)
        mean_weight = score_weight / weight.sum(1)[rollout, position].to(self.device)
        index = (rollout.to(self.device), position.to(self.device))
        zeros = torch.zeros(len(records), self.layout.length, device=self.device)
        # scored: logp, entropy, square_sum, distributions, cross-entropy with `old`, value; the last three are optional
        logp, entropy, square_sum = (
            zeros.index_put(index, values * weights, accumulate=True)
            for values, weights in zip(scored[:3], (score_weight, mean_weight, mean_weight), strict=True)
        )
        replay = Replay(logp, entropy, square_sum)
        if self.layout.has_text_and_image:
            replay.extras[SEGMENTS.name] = self.segments(rollouts).to(self.device)
        if self.module.critic is not None:
            replay.value = zeros.index_put(index, scored[-1] * mean_weight, accumulate=True)
            replay.extras[MOMENTS.name] = torch.stack([scoring_state_index(row_states) for row_states in states])
        if self.keeps_distributions:
            distributions = torch.zeros(len(records), self.layout.length, weight.shape[1], scored[3].shape[-1])
            distributions[rollout, position, state] = scored[3].cpu()
            replay.prediction = distributions
        if "old" in options:
            replay.extras[OLD_CROSS_ENTROPY.name] = zeros.index_put(index, scored[4] * score_weight, accumulate=True)
        return replay

    def segments(self, rollouts: Rollouts) -> Tensor:
        """Returns the part of each position, [rollout, position] int64: 0 for text, 1 for the image."""
        return text_image_parts(len(rollouts), self.layout.text_length, self.layout.length)

    def _inputs(
        self, records: list[MaskedRecord], states: list[States]
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        """Returns token ids, their attention mask, the column at which the scored response starts [rollout], and
        further arguments of `MaskScorer.forward`. States with an order or with blocks need an attention mask and
        position ids of their own."""
        options: dict[str, Any] = {"distributions": True} if self.keeps_distributions else {}
        prompt_lengths = torch.tensor([len(record.prompt) for record in records])
        orders, blocks = [row_states.order for row_states in states if row_states.order is not None], states[0].blocks
        if not orders and blocks is None:
            return *self.collator.collate_states(records, states, self._noised_response), prompt_lengths, options
        if blocks is None:
            ids, mask, options["positions"] = self.collator.collate_one_pass(records, orders)
        else:
            ids, mask, options["positions"] = self.collator.collate_blocks(
                records, states, blocks, self._noised_response
            )
        # The masked copy, which is scored, comes after the response
        return ids, mask, prompt_lengths + self.layout.length, options

    def resample_states(self, rollouts: Rollouts, epoch: int, keep: Tensor) -> Rollouts | None:
        """Returns None: every epoch of updates scores responses in the same states."""
        return None

    def view(self, rollouts: Rollouts, change: Callable[[Prompt], Prompt]) -> Rollouts:
        """Returns the same responses to changed prompts."""
        inputs = [
            replace(record, prompt=self.layout.encode(change(sample.prompt)))
            for sample, record in zip(rollouts.samples, rollouts.inputs, strict=True)
        ]
        return replace(rollouts, inputs=inputs)

    def decision_ids(self, rollouts: Rollouts) -> Tensor:
        """Returns the token id of each decision, [rollout, decision] int64; -1 where the mask is false."""
        return torch.stack([record.response for record in rollouts.inputs]).where(rollouts.mask, -1)

    # --- other methods of a policy ---

    def set_engine(self, engine: TrainingEngine) -> None:  # noqa: B027
        """Does nothing: all ranks make the same number of forward passes anyway."""

    def counts(self) -> dict[str, float]:
        """Returns no metrics."""
        return {}

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Saves the model (or its LoRA) and tokenizer with `save_pretrained`, and the critic and codebook if there are
        any.

        state: the gathered state dict of `self.module`.
        """
        write_model(self.module.model, folder, state)
        self.layout.tokenizer.save_pretrained(folder)
        if self.module.critic is not None:
            write_critic(folder, state)
        if self.layout.codebook is not None:
            codebook.write(folder, self.layout.codebook)
        use_default_permissions(folder)


class MaskedPolicy(DiscreteDiffusionPolicy):
    """A masked diffusion model: a response starts as mask tokens, and each step fills in some of them."""

    kind: ClassVar[str] = "discrete_diffusion"

    def __init__(
        self,
        scorer: MaskScorer,
        layout: ResponseLayout,
        options: TokenDiffusionOptions,
        unmasking: Unmasking,
        likelihood: MaskedLikelihood,
    ) -> None:
        """unmasking: how responses are sampled. likelihood: the estimate of their log-probabilities."""
        super().__init__(scorer, layout, options)
        self.unmasking, self.likelihood = unmasking, likelihood
        text_length = layout.text_length if layout.has_text_and_image else 0
        text_steps, steps, block = unmasking.reasoning_steps, unmasking.steps, unmasking.block
        self.steps = text_and_image_schedule(text_length, layout.length - text_length, text_steps, steps, block)
        starts = torch.tensor(sorted({step.start for step in self.steps}))
        self.blocks = torch.searchsorted(starts, torch.arange(layout.length), right=True) - 1  # [position], its block

    def _sample(self, prompts: list[Tensor], seeds: Sequence[int], temperature: float) -> list[MaskedRecord]:
        """Samples responses by the unmasking schedule; see `DiscreteDiffusionPolicy._sample`.

        Each step samples a token for every masked position, and keeps those whose positions come first in the order
        `unmasking.order`, and with `unmasking.threshold` also all tokens whose probability reaches it.
        """
        generators = [torch.Generator(self.device).manual_seed(int(seed)) for seed in seeds]
        response = torch.full((len(prompts), self.layout.length), self.layout.vocabulary.mask)
        filled_in_step = torch.zeros_like(response)
        rows = torch.arange(len(prompts)).repeat_interleave(self.layout.length).to(self.device)
        position = torch.arange(self.layout.length).repeat(len(prompts)).to(self.device)
        prompt_lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        is_image = self.layout.image_mask(position)
        for step_index, step in enumerate(self.steps):
            ids, mask, positions = self._partial_inputs(prompts, response)
            logits = self.module.logits(ids, mask, rows, prompt_lengths[rows] + position, positions, is_image)
            logits = logits.view(len(prompts), self.layout.length, -1) / (temperature or 1.0)
            noisy = add_gumbel_noise(logits, generators) if temperature else logits
            tokens = noisy.argmax(-1)
            logp = logits.log_softmax(-1)
            token_logp = logp.gather(-1, tokens[..., None])[..., 0].cpu()
            # Clamped, because for a suppressed token 0 x -inf is NaN
            entropy = -(logp.exp() * logp.clamp(min=-1e9)).sum(-1).cpu()
            uniform = torch.stack(
                [torch.rand(self.layout.length, generator=g, device=self.device) for g in generators]
            ).cpu()
            masked = torch.zeros_like(response, dtype=torch.bool)
            masked[:, step.start : step.stop] = response[:, step.start : step.stop] == self.layout.vocabulary.mask
            scores = self.unmasking.order.scores(token_logp, entropy, uniform).masked_fill(~masked, -torch.inf)
            fill = torch.zeros_like(masked).scatter(1, scores.topk(step.number, -1).indices, True)
            if self.unmasking.threshold is not None:
                fill |= token_logp.exp() >= self.unmasking.threshold
            fill &= masked  # positions that were filled earlier keep their tokens
            response = torch.where(fill, tokens.cpu(), response)
            filled_in_step = filled_in_step.masked_fill(fill, step_index)
        logp_temperature = temperature or 1.0  # log-probabilities of greedy responses (temperature 0) are those at 1
        return [
            MaskedRecord(prompt, response[i], filled_in_step[i], int(seeds[i]), logp_temperature)
            for i, prompt in enumerate(prompts)
        ]

    def _partial_inputs(self, prompts: list[Tensor], response: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns token ids, attention mask and position ids of unfinished responses [row, position], for
        `MaskScorer.logits`."""
        rows = [torch.cat(pair) for pair in zip(prompts, response, strict=True)]
        if not self.unmasking.causal_blocks:
            return *self.collator.collate(rows), None
        return self.collator.with_block_mask(rows, [len(prompt) for prompt in prompts], self.blocks, noised=False)

    def scoring_states(self, record: MaskedRecord) -> States:
        return self.likelihood.states_in_blocks(
            record.seed, len(record.prompt), record.steps, len(self.steps), self.blocks
        )

    def resample_states(self, rollouts: Rollouts, epoch: int, keep: Tensor) -> Rollouts | None:
        """Returns the rollouts with new seeds, so that epoch `epoch` of the updates scores them in new states; None if
        `likelihood.redraw` is false. keep: [rollout] bool, rollouts that keep their seed."""
        if not (isinstance(self.likelihood, RandomStates) and self.likelihood.redraw):
            return None
        inputs = [
            record if keep_states else replace(record, seed=derive_seed(record.seed, epoch))
            for record, keep_states in zip(rollouts.inputs, keep.tolist(), strict=True)
        ]
        return replace(rollouts, inputs=inputs)

    def _noised_response(self, record: MaskedRecord, states: States, state: int) -> Tensor:
        return record.response.masked_fill(states.masked[state], self.layout.vocabulary.mask)
