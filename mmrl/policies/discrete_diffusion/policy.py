"""Masked diffusion models as policies: masked positions are filled step by step, one decision a token of the
response."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmrl.engine.flops import CallMeter, PolicyWork, Tally
from mmrl.generation.sampling import draw
from mmrl.policies import codebook
from mmrl.policies.discrete_diffusion.inputs import StateCollator
from mmrl.policies.discrete_diffusion.likelihoods import States, moments
from mmrl.policies.discrete_diffusion.responses import MaskedRecord, ResponseLayout
from mmrl.policies.discrete_diffusion.schedule import in_parts
from mmrl.policies.discrete_diffusion.scorer import MaskScorer
from mmrl.policies.discrete_diffusion.settings import MaskedLikelihood, RandomStates, Unmasking
from mmrl.policies.models import Scorer, TrainingEngine, write_model
from mmrl.policies.vlm.critic import write_critic
from mmrl.rollouts import MOMENTS, OLD_CROSS_ENTROPY, SEGMENTS, Prompt, Replay, Rollouts, Sample, text_image_parts
from mmrl.runtime.files import use_default_mode
from mmrl.samplers.chain import derive_seed
from mmrl.schedules.schedule import Schedule


@dataclass(frozen=True)
class TokenDiffusionOptions:
    """Sampling and replay of responses. keeps_distributions: replays hold the whole distribution of every decision in
    every state, which takes as much memory as the logits."""

    temperature: Schedule
    evaluation_temperature: float
    keeps_distributions: bool = False


class DiscreteDiffusionPolicy(ABC):
    """Base of policies that turn noise into a response of tokens. It is replayed from states that its seed (and its
    trace) decide, in one forward. `layout` knows the kinds of positions, `collator` builds model inputs."""

    kind: ClassVar[str]  # as `model.type` has it

    def __init__(self, scorer: MaskScorer, layout: ResponseLayout, options: TokenDiffusionOptions) -> None:
        self.module, self.layout, self.collator = scorer, layout, StateCollator(layout, scorer)
        self.temperature, self.evaluation_temperature = options.temperature, options.evaluation_temperature
        self.keeps_distributions = options.keeps_distributions
        tally = Tally()
        CallMeter(scorer.model, tally)
        self.work = PolicyWork([tally], layout.units)
        self.module.eval()  # dropout would make replay differ from sampling

    @abstractmethod
    def _draw(self, prompts: list[Tensor], seeds: Sequence[int], temperature: float) -> list[MaskedRecord]:
        """Samples one response a prompt, from its seed alone. temperature: 0 for the most likely token each time."""

    @abstractmethod
    def states_of(self, record: MaskedRecord) -> States:
        """Returns the states in which a response is replayed."""

    @abstractmethod
    def _response_in_state(self, record: MaskedRecord, states: States, state: int) -> Tensor:
        """Returns the response as it is read in a state, [position]."""

    def _forwards(self, record: MaskedRecord) -> int:
        """Returns how many forwards a response took."""
        return len(record.steps.unique())

    @property
    def device(self) -> torch.device:
        return self.collator.device

    @property
    def max_decisions(self) -> int:
        return self.layout.length

    # --- prompts to responses ---

    @torch.no_grad()
    def rollout(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], *, step: int = 0) -> Rollouts:
        """Samples `group_size` responses a prompt. seeds: one a rollout, prompt by prompt."""
        each = [prompt for prompt in prompts for _ in range(group_size)]
        ids = [row for row in map(self.layout.encode, prompts) for _ in range(group_size)]
        records = self._draw(ids, seeds, self.temperature.value)
        return self.layout.rollouts(each, records, group_size, self._forwards)

    @torch.no_grad()
    def respond(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Sample]:
        """Samples one response a prompt at the temperature of evaluation."""
        ids = [self.layout.encode(prompt) for prompt in prompts]
        records = self._draw(ids, seeds, self.evaluation_temperature)
        return self.layout.rollouts(list(prompts), records, 1, self._forwards).samples

    def demonstrate(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> Rollouts:
        """Returns the prompts with the responses that they carry in metadata["demonstration"], or with their answers;
        positions behind the end are filled with end tokens. For a model that writes images: with those in
        metadata["target"], and with the text in metadata["reasoning"] before them."""
        layout, temperature = self.layout, self.temperature.value
        steps = torch.zeros(layout.length, dtype=torch.long)
        records = [
            MaskedRecord(layout.encode(p), layout.demonstration(p), steps, int(s), temperature)
            for p, s in zip(prompts, seeds, strict=True)
        ]
        return layout.rollouts(list(prompts), records, 1, self._forwards)

    # --- responses to likelihoods ---

    def replay(self, rollouts: Rollouts, model: Scorer, *, reference: bool = False) -> Replay:
        """Returns logp of every token under `model` (`self.module` or the engine around it), weighted over the states
        in which the likelihood scores it; entropies and squares are means with the same weights. One forward computes
        all."""
        records: list[MaskedRecord] = rollouts.inputs
        states = [self.states_of(record) for record in records]
        weight = torch.stack([row_states.weight for row_states in states])
        rollout, state, position = weight.nonzero().unbind(1)
        ids, mask, first, options = self._inputs(records, states)
        temperature = torch.tensor([record.temperature for record in records])[rollout]
        row, column = rollout * weight.shape[1] + state, first[rollout] + position
        responses = torch.stack([record.response for record in records])
        queries = [row, column, responses[rollout, position], temperature]
        if (is_image := self.layout.image_mask(position)) is not None:
            options["is_image"] = is_image.to(self.device)
        if self.keeps_distributions and rollouts.old_prediction is not None:
            options["old"] = rollouts.old_prediction[rollout, position, state].to(self.device)
        scored = model(ids, mask, *(part.to(self.device) for part in queries), **options)
        w = weight[rollout, state, position].to(self.device)
        total = weight.sum(1)[rollout, position].to(self.device)
        where = (rollout.to(self.device), position.to(self.device))
        blank = torch.zeros(len(records), self.layout.length, device=self.device)
        logp, entropy, square_sum = (
            blank.index_put(where, values * share_of, accumulate=True)
            for values, share_of in zip(scored[:3], (w, w / total, w / total), strict=True)
        )
        replay = Replay(logp, entropy, square_sum)
        if self.layout.in_parts:
            replay.extras[SEGMENTS.name] = self.segments(rollouts).to(self.device)
        if self.module.critic is not None:
            replay.value = blank.index_put(where, scored[-1] * (w / total), accumulate=True)
            replay.extras[MOMENTS.name] = torch.stack([moments(row_states) for row_states in states])
        if self.keeps_distributions:
            distributions = torch.zeros(len(records), self.layout.length, weight.shape[1], scored[3].shape[-1])
            distributions[rollout, position, state] = scored[3].cpu()
            replay.prediction = distributions
        if "old" in options:
            replay.extras[OLD_CROSS_ENTROPY.name] = blank.index_put(where, scored[4] * w, accumulate=True)
        return replay

    def segments(self, rollouts: Rollouts) -> Tensor:
        """Returns the part of each position, text or image, [rollout, position] int64."""
        return text_image_parts(len(rollouts), self.layout.text_length, self.layout.length)

    def _inputs(
        self, records: list[MaskedRecord], states: list[States]
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        """Returns token ids, their attention mask, the column at which each response is scored [rollout], and further
        inputs."""
        options: dict[str, Any] = {"distributions": True} if self.keeps_distributions else {}
        first = torch.tensor([len(record.prompt) for record in records])
        orders, blocks = [row_states.order for row_states in states if row_states.order is not None], states[0].blocks
        if not orders and blocks is None:
            return *self.collator.in_states(records, states, self._response_in_state), first, options
        if blocks is None:
            ids, mask, options["positions"] = self.collator.in_one_pass(records, orders)
        else:
            ids, mask, options["positions"] = self.collator.in_blocks(records, states, blocks, self._response_in_state)
        return ids, mask, first + self.layout.length, options  # behind the response

    def resample_states(self, rollouts: Rollouts, epoch: int, keep: Tensor) -> Rollouts | None:
        """Implements `ResamplingStates`: every epoch has the same states."""
        return None

    def view(self, rollouts: Rollouts, change: Callable[[Prompt], Prompt]) -> Rollouts:
        """Returns the same responses to changed prompts."""
        inputs = [
            replace(record, prompt=self.layout.encode(change(sample.prompt)))
            for sample, record in zip(rollouts.samples, rollouts.inputs, strict=True)
        ]
        return replace(rollouts, inputs=inputs)

    def decision_ids(self, rollouts: Rollouts) -> Tensor:
        """Returns the id of each decided token, [rollout, decision] int64; -1 where no decision counts."""
        return torch.stack([record.response for record in rollouts.inputs]).where(rollouts.mask, -1)

    # --- the rest of a policy ---

    def set_engine(self, engine: TrainingEngine) -> None:  # noqa: B027
        """Does nothing: every replay is one forward, and every rank takes as many steps."""

    def counts(self) -> dict[str, float]:
        return {}

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Saves model (or adapter) and tokenizer in transformers' own format, and a critic beside them. state: the
        weights of `self.module`."""
        write_model(self.module.model, folder, state)
        self.layout.tokenizer.save_pretrained(folder)
        if self.module.critic is not None:
            write_critic(folder, state)
        if self.layout.codebook is not None:
            codebook.write(folder, self.layout.codebook)
        use_default_mode(folder)


class MaskedPolicy(DiscreteDiffusionPolicy):
    """Fills the positions of a response step by step, and estimates likelihoods of responses as `likelihood` says."""

    kind: ClassVar[str] = "discrete_diffusion"

    def __init__(
        self,
        scorer: MaskScorer,
        layout: ResponseLayout,
        options: TokenDiffusionOptions,
        unmasking: Unmasking,
        likelihood: MaskedLikelihood,
    ) -> None:
        super().__init__(scorer, layout, options)
        self.unmasking, self.likelihood = unmasking, likelihood
        text = layout.text_length if layout.in_parts else 0
        text_steps, steps, block = unmasking.reasoning_steps, unmasking.steps, unmasking.block
        self.steps = in_parts(text, layout.length - text, text_steps, steps, block)
        starts = torch.tensor(sorted({step.start for step in self.steps}))
        self.blocks = torch.searchsorted(starts, torch.arange(layout.length), right=True) - 1  # [position]

    def _draw(self, prompts: list[Tensor], seeds: Sequence[int], temperature: float) -> list[MaskedRecord]:
        """Samples one response a prompt, from its seed alone. temperature: 0 for the most likely token each time."""
        generators = [torch.Generator(self.device).manual_seed(int(seed)) for seed in seeds]
        response = torch.full((len(prompts), self.layout.length), self.layout.vocabulary.mask)
        filled = torch.zeros_like(response)
        rows = torch.arange(len(prompts)).repeat_interleave(self.layout.length).to(self.device)
        position = torch.arange(self.layout.length).repeat(len(prompts)).to(self.device)
        first = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        is_image = self.layout.image_mask(position)
        for turn, step in enumerate(self.steps):
            ids, mask, positions = self._partial_inputs(prompts, response)
            logits = self.module.logits(ids, mask, rows, first[rows] + position, positions, is_image)
            logits = logits.view(len(prompts), self.layout.length, -1) / (temperature or 1.0)
            noisy = draw(logits, generators) if temperature else logits
            tokens = noisy.argmax(-1)
            logp = logits.log_softmax(-1)
            chosen = logp.gather(-1, tokens[..., None])[..., 0].cpu()
            entropy = -(logp.exp() * logp.clamp(min=-1e9)).sum(-1).cpu()
            chance = torch.stack(
                [torch.rand(self.layout.length, generator=g, device=self.device) for g in generators]
            ).cpu()
            open_ = torch.zeros_like(response, dtype=torch.bool)
            open_[:, step.start : step.stop] = response[:, step.start : step.stop] == self.layout.vocabulary.mask
            scores = self.unmasking.order.scores(chosen, entropy, chance).masked_fill(~open_, -torch.inf)
            now = torch.zeros_like(open_).scatter(1, scores.topk(step.number, -1).indices, True)
            if self.unmasking.threshold is not None:
                now |= chosen.exp() >= self.unmasking.threshold
            now &= open_  # a response that is done keeps what it has
            response = torch.where(now, tokens.cpu(), response)
            filled = filled.masked_fill(now, turn)
        replay_temperature = temperature or 1.0  # responses of the most likely tokens are replayed as they are
        return [
            MaskedRecord(prompt, response[i], filled[i], int(seeds[i]), replay_temperature)
            for i, prompt in enumerate(prompts)
        ]

    def _partial_inputs(self, prompts: list[Tensor], response: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns unfinished responses as `MaskScorer.logits` reads them."""
        rows = [torch.cat(pair) for pair in zip(prompts, response, strict=True)]
        if not self.unmasking.causal_blocks:
            return *self.collator.collate(rows), None
        return self.collator.with_block_mask(rows, [len(prompt) for prompt in prompts], self.blocks, noised=False)

    def states_of(self, record: MaskedRecord) -> States:
        return self.likelihood.states_in_blocks(
            record.seed, len(record.prompt), record.steps, len(self.steps), self.blocks
        )

    def resample_states(self, rollouts: Rollouts, epoch: int, keep: Tensor) -> Rollouts | None:
        """Implements `ResamplingStates` where the likelihood has `redraw`. Seeds depend on the rollout's seed and the
        epoch."""
        if not (isinstance(self.likelihood, RandomStates) and self.likelihood.redraw):
            return None
        inputs = [
            record if stays else replace(record, seed=derive_seed(record.seed, epoch))
            for record, stays in zip(rollouts.inputs, keep.tolist(), strict=True)
        ]
        return replace(rollouts, inputs=inputs)

    def _response_in_state(self, record: MaskedRecord, states: States, state: int) -> Tensor:
        return record.response.masked_fill(states.empty[state], self.layout.vocabulary.mask)
