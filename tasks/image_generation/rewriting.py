"""Prompts that a language model writes anew for a frozen generator, which draws what it wrote."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mmrl.policies.diffusion.loading import load
from mmrl.policies.diffusion.policy import DiffusionPolicy
from mmrl.policies.diffusion.settings import Denoising, DiffusionModel
from mmrl.policies.diffusion.small import SmallFamily
from mmrl.protocols.parts import Source
from mmrl.rewards.types import device_of
from mmrl.rollouts import Prompt, Sample
from mmrl.tasks.image_generation.rewriting_settings import FrozenGenerator, PromptRewritingSettings
from mmrl.tasks.image_generation.task import ImageGeneration

Written = tuple[str, str]  # the prompt's id, and what was made of it


class RewriterPrompts:
    """The prompts of a source, as they are put to the rewriter. Metadata: `original`, the prompt itself."""

    def __init__(self, source: Source, template: str) -> None:
        self.source, self.template = source, template

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Prompt:
        prompt = self.source[index]
        shown = prompt.metadata.get("reasoning", prompt.text)
        metadata = {"demonstration": shown, **prompt.metadata, "original": prompt}
        return replace(prompt, text=self.template.replace("{}", prompt.text), metadata=metadata)


class FrozenImageGenerator:
    """Draws prompts with weights that nobody trains."""

    def __init__(self, settings: FrozenGenerator) -> None:
        """Raises UserError as `policies.diffusion.loading.load`."""
        kept = {name: vars(settings)[name] for name in ("dtype", "text_tokens", "decoding")}
        family = load(settings.path, DiffusionModel(path=settings.path, **kept))
        drawn = {name: vars(settings)[name] for name in ("guidance", "resolution", "negative_prompt")}
        self.policy = DiffusionPolicy(family, Denoising(steps=settings.steps, evaluation_steps=settings.steps, **drawn))
        self.policy.module.requires_grad_(False)
        self.at_once, self.device = settings.at_once, settings.device

    def draw(self, texts: Sequence[str], seeds: Sequence[int]) -> list[Tensor]:
        """One image a text, [channel, height, width], from its seed alone. A small network, which refuses words that
        it does not know, is shown the others."""
        family = self.policy.family
        if isinstance(family, SmallFamily):
            texts = [family.readable(text) for text in texts]
        self.policy.module.to(device_of(self.device))
        found: list[Tensor] = []
        for i in range(0, len(texts), self.at_once):
            prompts = [Prompt(str(i + k), text) for k, text in enumerate(texts[i : i + self.at_once])]
            made = self.policy.respond(prompts, seeds[i : i + self.at_once])
            found += [sample.image for sample in made if sample.image is not None]
        return found


class PromptRewriting:
    """A task whose responses are prompts. What they earn is what the images earn that the generator draws of them, by
    the rewards of image generation, which know the prompt that was asked for. Rollouts of a prompt are drawn from the
    same noises."""

    def __init__(self, settings: PromptRewritingSettings, seed: int) -> None:
        self.inner = ImageGeneration.of(settings, seed)
        self.generator, self.settings = FrozenImageGenerator(settings.generator), settings
        train = self.inner.train
        self.train = None if train is None else RewriterPrompts(train, settings.template)
        self.evaluation = RewriterPrompts(self.inner.evaluation, settings.template)
        self.reward_names, self.reward_weights = self.inner.reward_names, self.inner.reward_weights
        self._drawn: dict[Written, list[Tensor]] = {}

    def score(self, samples: Sequence[Sample], group: Tensor | None = None) -> Tensor:
        """Unweighted reward components [rollout, component], means over the images of a rollout."""
        shown = self._shown(samples)
        own = None if group is None else group.repeat_interleave(self.settings.images)
        return self.inner.score(shown, own).view(len(samples), self.settings.images, -1).mean(1)

    def accuracy(self, samples: Sequence[Sample]) -> Tensor:
        return self._mean(self.inner.accuracy(self._shown(samples)))

    def measures(self, samples: Sequence[Sample], group: Tensor | None = None) -> dict[str, Tensor]:
        """The guards of image generation, and the length of what was written."""
        own = None if group is None else group.repeat_interleave(self.settings.images)
        found = {name: self._mean(values) for name, values in self.inner.measures(self._shown(samples), own).items()}
        return found | {"response/length": torch.tensor([float(s.response_length) for s in samples])}

    def _mean(self, values: Tensor) -> Tensor:
        return values.view(-1, self.settings.images).mean(1)

    def _shown(self, samples: Sequence[Sample]) -> list[Sample]:
        """The images of each sample's text, as answers to the prompt that was asked for. What was drawn for the last
        samples is kept, for rewards, accuracy and guards ask for the same."""
        asked = [(sample.prompt.id, self.written(sample.response)) for sample in samples]
        new = [one for one in dict.fromkeys(asked) if one not in self._drawn]
        count = self.settings.images
        seeds = [zlib.crc32(f"{name} {k}".encode()) for name, _ in new for k in range(count)]
        images = self.generator.draw([text for _, text in new for _ in range(count)], seeds)
        found = {one: images[i * count : (i + 1) * count] for i, one in enumerate(new)}
        self._drawn = {one: self._drawn[one] if one in self._drawn else found[one] for one in asked}
        return [
            replace(sample, prompt=sample.prompt.metadata["original"], image=image)
            for sample, one in zip(samples, asked, strict=True)
            for image in self._drawn[one]
        ]

    def written(self, response: str) -> str:
        """The prompt in a response: all of it, or what stands in the last `tag`; nothing where there is none."""
        if self.settings.tag is None:
            return response.strip()
        tag = re.escape(self.settings.tag)
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", response, flags=re.DOTALL)
        return found[-1].strip() if found else ""
