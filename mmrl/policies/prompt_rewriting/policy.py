"""A policy of two models: a language model (the writer) rewrites prompts, and an image generator renders them."""

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
from mmrl.policies.networks import NamedNetwork, Networks, select_state
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
    """Inputs of a rollout's replay: the writer's tokens and the image's denoising steps."""

    text: RolloutTokens
    image: ImageRecord


class PromptRewritingPolicy:
    """Rewrites prompts and renders them, and computes the log-likelihoods of tokens and denoising steps.

    The first decisions of a rollout are the writer's tokens, padded to the length limit; the denoising steps of the
    image follow.
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
        """Samples `group_size` rewritten texts for each prompt, and one image for each text. seeds: one for each
        rollout, prompt by prompt.

        The first `originals` images of a group are rendered from the prompt itself; their tokens are masked."""
        written = self.writer.rollout([self._writer_prompt(prompt) for prompt in prompts], group_size, seeds, step=step)
        use_original = torch.arange(len(written)) % group_size < self.settings.originals
        row_prompts = [prompt for prompt in prompts for _ in range(group_size)]
        rows = list(zip(row_prompts, use_original.tolist(), written.samples, strict=True))
        texts = [prompt.text if is_original else text.response for prompt, is_original, text in rows]
        images = self.generator.rollout(self._generator_prompts(row_prompts, texts), 1, seeds, step=step)
        padding = self.writer.max_decisions - written.mask.shape[1]
        text_mask = F.pad(written.mask, (0, padding)) & ~use_original[:, None]
        samples = []
        for image, (prompt, is_original, text) in zip(images.samples, rows, strict=True):
            if is_original:
                samples.append(replace(image, prompt=prompt, response=prompt.text))
            else:
                samples.append(with_response(image, prompt, text))
        parts = text_image_parts(len(row_prompts), self.writer.max_decisions, self.max_decisions)
        return Rollouts(
            samples=samples,
            inputs=[PromptRewritingRecord(*row) for row in zip(written.inputs, images.inputs, strict=True)],
            group=torch.arange(len(row_prompts)) // group_size,
            mask=torch.cat([text_mask, images.mask], 1),
            extras={PARTS: DecisionColumn(parts)},
        )

    def respond(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Sample]:
        """Rewrites each prompt and samples one image for it, with the evaluation settings of both models."""
        written = self.writer.respond([self._writer_prompt(prompt) for prompt in prompts], seeds)
        texts = [sample.response for sample in written]
        images = self.generator.respond(self._generator_prompts(prompts, texts), seeds)
        return [with_response(*row) for row in zip(images, prompts, written, strict=True)]

    def demonstrate(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> Rollouts:
        raise NotImplementedError(
            "model.type=prompt_rewriting does not learn from demonstrations; train its language model and its image "
            "model in runs of their own"
        )

    def _writer_prompt(self, prompt: Prompt) -> Prompt:
        """Returns the prompt for the writer: its template, filled with the task's prompt."""
        return replace(prompt, text=self.settings.template.replace("{}", prompt.text))

    def _generator_prompts(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Prompt]:
        """Returns the prompts for the generator: `prompts` with their texts replaced by `texts`. mmrl's small networks
        raise UserError for words outside their vocabulary, so such words are removed for them."""
        family = self.generator.family
        if isinstance(family, SmallFamily):
            texts = [family.readable(text) for text in texts]
        return [replace(prompt, text=text) for prompt, text in zip(prompts, texts, strict=True)]

    def view(self, rollouts: Rollouts, change: Callable[[Prompt], Prompt]) -> Rollouts:
        raise NotImplementedError(
            "model.type=prompt_rewriting does not support views (changed prompts with the same response): images are "
            "generated from the rewritten text"
        )

    # --- images to likelihoods ---

    def replay(self, rollouts: Rollouts, model: Scorer, *, reference: bool = False) -> Replay:
        """Computes the log-likelihoods of all decisions under `model` (`self.module` or the engine that wraps it), in
        one forward pass of each network.

        For denoising steps, the log-ratios to the old and the reference policy are computed from predictions, which is
        more precise than from log-likelihoods. `prediction` holds denoising steps only, [rollout, step, ...]."""
        records: list[PromptRewritingRecord] = rollouts.inputs
        num_tokens = self.writer.max_decisions
        text_rollouts = Rollouts(
            rollouts.samples, [record.text for record in records], rollouts.group, rollouts.mask[:, :num_tokens]
        )
        image_rollouts = Rollouts(
            rollouts.samples,
            [record.image for record in records],
            rollouts.group,
            rollouts.mask[:, num_tokens:],
            old_prediction=rollouts.old_prediction,
            ref_prediction=rollouts.ref_prediction,
        )
        text = self.writer.replay(text_rollouts, NamedNetwork(model, WRITER), reference=reference)
        image = self.generator.replay(image_rollouts, NamedNetwork(model, GENERATOR), reference=reference)
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
            text_log_ratio = text.logp - old_logp(rollouts, replay)[:, :num_tokens]
            replay.log_ratio = torch.cat([text_log_ratio, image.log_ratio], 1)
        image_ref_log_ratio = REFERENCE_LOG_RATIO.get(image)
        if image_ref_log_ratio is not None and rollouts.ref_logp is not None:
            text_ref_log_ratio = text.logp - rollouts.ref_logp[:, :num_tokens].to(text.logp.device)
            replay.extras[REFERENCE_LOG_RATIO.name] = torch.cat([text_ref_log_ratio, image_ref_log_ratio], 1)
        return replay

    def segments(self, rollouts: Rollouts) -> Tensor:
        """Returns the segment of each decision, [rollout, decision] int64: TEXT or IMAGE of `mmrl.rollouts`."""
        return decision_parts(rollouts)

    def lengths(self, rollouts: Rollouts) -> Tensor:
        """Returns the number of the writer's tokens, [rollout] int64, by which ranks balance their load; all images
        have the same number of steps."""
        return self.writer.lengths(replace(rollouts, inputs=[record.text for record in rollouts.inputs]))

    # --- engine, metrics and files ---

    def set_engine(self, engine: TrainingEngine) -> None:
        self.writer.set_engine(engine)
        self.generator.set_engine(engine)

    def counts(self) -> dict[str, float]:
        return {**self.writer.counts(), **self.generator.counts()}

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Saves each of the two models in its own library's format, in the folders `writer` and `generator`."""
        for name, policy in ((WRITER, self.writer), (GENERATOR, self.generator)):
            policy.save(folder / name, select_state(name, state))


def with_response(image: Sample, prompt: Prompt, written: Sample) -> Sample:
    """Returns the generator's sample with the task's prompt and the writer's response. written: the writer's sample."""
    return replace(
        image,
        prompt=prompt,
        response=written.response,
        response_length=written.response_length,
        truncated=written.truncated,
        max_response_length=written.max_response_length,
    )
