"""Two policies as one: prompts to prompts that are written anew, and these to images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from mmrl.policies.diffusion.decisions.records import ImageRecord
from mmrl.policies.diffusion.policy import DiffusionPolicy
from mmrl.policies.diffusion.small import SmallFamily
from mmrl.policies.models import Scorer, TrainingEngine
from mmrl.policies.networks import Networks, Part, state_of
from mmrl.policies.prompt_rewriting.settings import GENERATOR, WRITER, PromptWriter
from mmrl.policies.vlm.policy import VisionLanguagePolicy
from mmrl.policies.vlm.prompts import RolloutTokens
from mmrl.rollouts import PARTS, SEGMENTS, DecisionColumn, Prompt, Replay, Rollouts, Sample, parts_of, text_and_image


@dataclass(frozen=True)
class RewrittenRecord:
    """What was written, and the image that was drawn of it."""

    text: RolloutTokens
    image: ImageRecord


class RewrittenPolicy:
    """Writes prompts anew and draws them; says how likely words and steps were.

    The first decisions of a rollout are its words, as many as there may be; the steps of its image come after them.
    """

    def __init__(self, writer: VisionLanguagePolicy, generator: DiffusionPolicy, settings: PromptWriter) -> None:
        self.writer, self.generator, self.settings = writer, generator, settings
        self.module = Networks(**{WRITER: writer.module, GENERATOR: generator.module})

    @property
    def max_decisions(self) -> int:
        return self.writer.max_decisions + self.generator.max_decisions

    # --- prompts to images ---

    def rollout(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], *, step: int = 0) -> Rollouts:
        """`group_size` texts a prompt, and one image of each. seeds: one a rollout, prompt by prompt. The first
        `originals` images of a group are drawn from the prompt as it is; no word of theirs counts."""
        written = self.writer.rollout([self._asked(prompt) for prompt in prompts], group_size, seeds, step=step)
        place = torch.arange(len(written)) % group_size
        kept = place < self.settings.originals
        each = [prompt for prompt in prompts for _ in range(group_size)]
        rows = list(zip(each, kept.tolist(), written.samples, strict=True))
        texts = [prompt.text if own else said.response for prompt, own, said in rows]
        drawn = self.generator.rollout(self._told(each, texts), 1, seeds, step=step)
        words = F.pad(written.mask, (0, self.writer.max_decisions - written.mask.shape[1])) & ~kept[:, None]
        samples = [
            replace(image, prompt=prompt, response=prompt.text) if own else spoken(image, prompt, said)
            for image, (prompt, own, said) in zip(drawn.samples, rows, strict=True)
        ]
        parts = text_and_image(len(each), self.writer.max_decisions, self.max_decisions)
        return Rollouts(
            samples=samples,
            inputs=[RewrittenRecord(*row) for row in zip(written.inputs, drawn.inputs, strict=True)],
            group=torch.arange(len(each)) // group_size,
            mask=torch.cat([words, drawn.mask], 1),
            extras={PARTS: DecisionColumn(parts)},
        )

    def respond(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Sample]:
        """One image of what the writer makes of each prompt, as evaluation asks both."""
        written = self.writer.respond([self._asked(prompt) for prompt in prompts], seeds)
        texts = [sample.response for sample in written]
        drawn = self.generator.respond(self._told(prompts, texts), seeds)
        return [spoken(image, prompt, said) for image, prompt, said in zip(drawn, prompts, written, strict=True)]

    def demonstrate(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> Rollouts:
        raise NotImplementedError("a writer and a generator learn from demonstrations each for itself")

    def _asked(self, prompt: Prompt) -> Prompt:
        """The prompt as it is put to the writer."""
        return replace(prompt, text=self.settings.template.replace("{}", prompt.text))

    def _told(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Prompt]:
        """The prompts as they are put to the generator. A small network, which refuses words that it does not know, is
        shown the others."""
        family = self.generator.family
        if isinstance(family, SmallFamily):
            texts = [family.known(text) for text in texts]
        return [replace(prompt, text=text) for prompt, text in zip(prompts, texts, strict=True)]

    def view(self, rollouts: Rollouts, change: Callable[[Prompt], Prompt]) -> Rollouts:
        raise NotImplementedError("what was drawn hangs on what was written, not on the prompt alone")

    # --- images to likelihoods ---

    def replay(self, rollouts: Rollouts, model: Scorer, *, reference: bool = False) -> Replay:
        """What `model` (`self.module`, or the engine around it) says of every decision; a forward of each network."""
        records: list[RewrittenRecord] = rollouts.inputs
        width = self.writer.max_decisions
        words = Rollouts(rollouts.samples, [r.text for r in records], rollouts.group, rollouts.mask[:, :width])
        steps = Rollouts(rollouts.samples, [r.image for r in records], rollouts.group, rollouts.mask[:, width:])
        text = self.writer.replay(words, Part(model, WRITER), reference=reference)
        image = self.generator.replay(steps, Part(model, GENERATOR), reference=reference)
        weight = None
        if image.weight is not None:
            weight = torch.cat([torch.ones_like(text.logp), image.weight], 1)
        return Replay(
            logp=torch.cat([text.logp, image.logp], 1),
            weight=weight,
            extras={SEGMENTS.name: parts_of(rollouts).to(text.logp.device)},
        )

    def lengths(self, rollouts: Rollouts) -> Tensor:
        """[rollout] int64: tokens of the writer; images cost the same."""
        return self.writer.lengths(replace(rollouts, inputs=[record.text for record in rollouts.inputs]))

    # --- the rest of a policy ---

    def trained_by(self, engine: TrainingEngine) -> None:
        self.writer.trained_by(engine)
        self.generator.trained_by(engine)

    def counts(self) -> dict[str, float]:
        return {**self.writer.counts(), **self.generator.counts()}

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Each of the two in its own library's format, in a folder of its own."""
        for name, policy in ((WRITER, self.writer), (GENERATOR, self.generator)):
            policy.save(folder / name, state_of(name, state))


def spoken(image: Sample, prompt: Prompt, said: Sample) -> Sample:
    """The sample of an image as one of `prompt`, with what was written for it."""
    return replace(
        image,
        prompt=prompt,
        response=said.response,
        response_length=said.response_length,
        truncated=said.truncated,
        max_response_length=said.max_response_length,
    )
