"""Two policies as one: a writer rewrites prompts, a generator draws the new ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from mmrl.engine.flops import PolicyWork
from mmrl.policies.diffusion.decisions.records import ImageRecord
from mmrl.policies.diffusion.policy import DiffusionPolicy
from mmrl.policies.diffusion.small import SmallFamily
from mmrl.policies.models import Scorer, TrainingEngine
from mmrl.policies.networks import Networks, Part, state_of
from mmrl.policies.prompt_rewriting.settings import GENERATOR, WRITER, PromptWriter
from mmrl.policies.vlm.policy import VisionLanguagePolicy
from mmrl.policies.vlm.prompts import RolloutTokens
from mmrl.rollouts import (
    PARTS,
    REFERENCE_LOG_RATIO,
    SEGMENTS,
    DecisionColumn,
    Prompt,
    Replay,
    Rollouts,
    Sample,
    decision_parts,
    old_logp,
    text_image_parts,
)


@dataclass(frozen=True)
class PromptRewritingRecord:
    """The tokens that the writer sampled, and the image that was drawn of them."""

    text: RolloutTokens
    image: ImageRecord


class PromptRewritingPolicy:
    """Rewrites prompts and draws them; computes the log-likelihoods of tokens and denoising steps.

    The first decisions of a rollout are its tokens, padded to the writer's limit; the steps of its image follow.
    """

    def __init__(self, writer: VisionLanguagePolicy, generator: DiffusionPolicy, settings: PromptWriter) -> None:
        self.writer, self.generator, self.settings = writer, generator, settings
        self.module = Networks(**{WRITER: writer.module, GENERATOR: generator.module})
        self.work = PolicyWork([*writer.work.tallies, *generator.work.tallies], generator.work.units)

    @property
    def max_decisions(self) -> int:
        return self.writer.max_decisions + self.generator.max_decisions

    # --- prompts to images ---

    def rollout(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], *, step: int = 0) -> Rollouts:
        """Draws `group_size` texts of each prompt, and one image of each text. seeds: one a rollout, prompt by prompt.
        The first `originals` images of a group are drawn from the prompt itself; their tokens are masked."""
        written = self.writer.rollout([self._writer_prompt(prompt) for prompt in prompts], group_size, seeds, step=step)
        position = torch.arange(len(written)) % group_size
        original = position < self.settings.originals
        row_prompts = [prompt for prompt in prompts for _ in range(group_size)]
        rows = list(zip(row_prompts, original.tolist(), written.samples, strict=True))
        texts = [prompt.text if is_original else response.response for prompt, is_original, response in rows]
        drawn = self.generator.rollout(self._generator_prompts(row_prompts, texts), 1, seeds, step=step)
        text_mask = F.pad(written.mask, (0, self.writer.max_decisions - written.mask.shape[1])) & ~original[:, None]
        samples = [
            replace(image, prompt=prompt, response=prompt.text)
            if is_original
            else with_response(image, prompt, response)
            for image, (prompt, is_original, response) in zip(drawn.samples, rows, strict=True)
        ]
        parts = text_image_parts(len(row_prompts), self.writer.max_decisions, self.max_decisions)
        return Rollouts(
            samples=samples,
            inputs=[PromptRewritingRecord(*row) for row in zip(written.inputs, drawn.inputs, strict=True)],
            group=torch.arange(len(row_prompts)) // group_size,
            mask=torch.cat([text_mask, drawn.mask], 1),
            extras={PARTS: DecisionColumn(parts)},
        )

    def respond(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Sample]:
        """Draws one image of each rewritten prompt, with the settings of evaluation of both models."""
        written = self.writer.respond([self._writer_prompt(prompt) for prompt in prompts], seeds)
        texts = [sample.response for sample in written]
        drawn = self.generator.respond(self._generator_prompts(prompts, texts), seeds)
        return [
            with_response(image, prompt, response)
            for image, prompt, response in zip(drawn, prompts, written, strict=True)
        ]

    def demonstrate(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> Rollouts:
        raise NotImplementedError(
            "model.type=prompt_rewriting learns from no demonstrations; warm its two models up apart"
        )

    def _writer_prompt(self, prompt: Prompt) -> Prompt:
        """Returns the prompt inside the writer's template."""
        return replace(prompt, text=self.settings.template.replace("{}", prompt.text))

    def _generator_prompts(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Prompt]:
        """Returns the prompts with the writer's texts. A small network raises UserError for unknown words; these are
        left out of its texts."""
        family = self.generator.family
        if isinstance(family, SmallFamily):
            texts = [family.readable(text) for text in texts]
        return [replace(prompt, text=text) for prompt, text in zip(prompts, texts, strict=True)]

    def view(self, rollouts: Rollouts, change: Callable[[Prompt], Prompt]) -> Rollouts:
        raise NotImplementedError(
            "images of model.type=prompt_rewriting follow from the written text, not from the prompt alone"
        )

    # --- images to likelihoods ---

    def replay(self, rollouts: Rollouts, model: Scorer, *, reference: bool = False) -> Replay:
        """Computes the log-likelihoods of all decisions under `model` (`self.module`, or the engine around it), in one
        forward of each network. Ratios of steps to the old and the reference policy are in their exact form;
        `prediction` is of steps alone, [rollout, step, ...]."""
        records: list[PromptRewritingRecord] = rollouts.inputs
        width = self.writer.max_decisions
        text_rollouts = Rollouts(rollouts.samples, [r.text for r in records], rollouts.group, rollouts.mask[:, :width])
        image_rollouts = Rollouts(
            rollouts.samples,
            [r.image for r in records],
            rollouts.group,
            rollouts.mask[:, width:],
            old_prediction=rollouts.old_prediction,
            ref_prediction=rollouts.ref_prediction,
        )
        text = self.writer.replay(text_rollouts, Part(model, WRITER), reference=reference)
        image = self.generator.replay(image_rollouts, Part(model, GENERATOR), reference=reference)
        weight = None
        if image.weight is not None:
            weight = torch.cat([torch.ones_like(text.logp), image.weight], 1)
        replay = Replay(
            logp=torch.cat([text.logp, image.logp], 1),
            weight=weight,
            prediction=image.prediction,
            extras={SEGMENTS.name: self.segments(rollouts).to(text.logp.device)},
        )
        if image.log_ratio is not None:
            before = old_logp(rollouts, replay)[:, :width]
            replay.log_ratio = torch.cat([text.logp - before, image.log_ratio], 1)
        exact = REFERENCE_LOG_RATIO.get(image)
        if exact is not None and rollouts.ref_logp is not None:
            apart = text.logp - rollouts.ref_logp[:, :width].to(text.logp.device)
            replay.extras[REFERENCE_LOG_RATIO.name] = torch.cat([apart, exact], 1)
        return replay

    def segments(self, rollouts: Rollouts) -> Tensor:
        """Returns the part of each decision, text or image, [rollout, decision] int64."""
        return decision_parts(rollouts)

    def lengths(self, rollouts: Rollouts) -> Tensor:
        """Returns the number of the writer's tokens [rollout] int64; all images take the same time."""
        return self.writer.lengths(replace(rollouts, inputs=[record.text for record in rollouts.inputs]))

    # --- the rest of a policy ---

    def set_engine(self, engine: TrainingEngine) -> None:
        self.writer.set_engine(engine)
        self.generator.set_engine(engine)

    def counts(self) -> dict[str, float]:
        return {**self.writer.counts(), **self.generator.counts()}

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Writes each of the two in its own library's format, in a folder of its own."""
        for name, policy in ((WRITER, self.writer), (GENERATOR, self.generator)):
            policy.save(folder / name, state_of(name, state))


def with_response(image: Sample, prompt: Prompt, written: Sample) -> Sample:
    """Returns the image's sample as a sample of `prompt`, with the writer's response."""
    return replace(
        image,
        prompt=prompt,
        response=written.response,
        response_length=written.response_length,
        truncated=written.truncated,
        max_response_length=written.max_response_length,
    )
