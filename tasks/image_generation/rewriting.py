"""Prompt rewriting: a language model writes prompts anew for a frozen generator, which draws them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mmrl.errors import of_second_model
from mmrl.policies.diffusion.loading import load
from mmrl.policies.diffusion.policy import DiffusionPolicy
from mmrl.policies.diffusion.settings import Denoising, DiffusionModel
from mmrl.policies.diffusion.small import SmallFamily
from mmrl.protocols.parts import Source
from mmrl.rewards.parsing.responses import texts_between
from mmrl.rewards.types import device_of
from mmrl.rollouts import Prompt, Sample
from mmrl.tasks.image_generation.rewriting_settings import FrozenGenerator, PromptRewritingSettings
from mmrl.tasks.image_generation.task import ImageGeneration

Rewrite = tuple[str, str]  # the prompt's id, and the text that the model wrote for it


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
    """Draws prompts with weights that are not trained."""

    def __init__(self, settings: FrozenGenerator) -> None:
        """Raises UserError as `policies.diffusion.loading.load`."""
        model_options = {name: vars(settings)[name] for name in ("dtype", "text_tokens", "decoding")}
        path = str(settings.existing())
        with of_second_model("task.generator.path"):
            family = load(path, DiffusionModel(path=path, **model_options))
        sampling_options = {name: vars(settings)[name] for name in ("guidance", "resolution", "negative_prompt")}
        self.policy = DiffusionPolicy(
            family, Denoising(steps=settings.steps, evaluation_steps=settings.steps, **sampling_options)
        )
        self.policy.module.requires_grad_(False)
        self.at_once, self.device = settings.at_once, settings.device

    def draw(self, texts: Sequence[str], seeds: Sequence[int]) -> list[Tensor]:
        """Returns one image per text, [channel, height, width], from its seed alone. Words that a small network does
        not know are left out of its texts."""
        family = self.policy.family
        if isinstance(family, SmallFamily):
            texts = [family.readable(text) for text in texts]
        self.policy.module.to(device_of(self.device))
        images: list[Tensor] = []
        for i in range(0, len(texts), self.at_once):
            prompts = [Prompt(str(i + k), text) for k, text in enumerate(texts[i : i + self.at_once])]
            samples = self.policy.respond(prompts, seeds[i : i + self.at_once])
            images += [sample.image for sample in samples if sample.image is not None]
        return images


class PromptRewriting:
    """A task whose responses are prompts. They earn what the images earn that the generator draws of them, by the
    rewards of image generation, which know the original prompt. Rollouts of a prompt are drawn from the
    same noises."""

    def __init__(self, settings: PromptRewritingSettings, seed: int) -> None:
        self.inner = ImageGeneration.of(settings, seed)
        self.generator, self.settings = FrozenImageGenerator(settings.generator), settings
        train = self.inner.train
        self.train = None if train is None else RewriterPrompts(train, settings.template)
        self.evaluation = RewriterPrompts(self.inner.evaluation, settings.template)
        self.reward_names, self.reward_weights = self.inner.reward_names, self.inner.reward_weights
        self._drawn: dict[Rewrite, list[Tensor]] = {}

    def score(self, samples: Sequence[Sample], group: Tensor | None = None) -> Tensor:
        """Returns unweighted reward components [rollout, component], means over the images of a rollout."""
        images = self._image_samples(samples)
        image_group = None if group is None else group.repeat_interleave(self.settings.images)
        return self.inner.score(images, image_group).view(len(samples), self.settings.images, -1).mean(1)

    def accuracy(self, samples: Sequence[Sample]) -> Tensor:
        return self._mean(self.inner.accuracy(self._image_samples(samples)))

    def measures(self, samples: Sequence[Sample], group: Tensor | None = None) -> dict[str, Tensor]:
        """Returns the guards of image generation, and the length of the response in tokens."""
        image_group = None if group is None else group.repeat_interleave(self.settings.images)
        guards = {
            name: self._mean(values)
            for name, values in self.inner.measures(self._image_samples(samples), image_group).items()
        }
        return guards | {"response/length": torch.tensor([float(s.response_length) for s in samples])}

    def _mean(self, values: Tensor) -> Tensor:
        return values.view(-1, self.settings.images).mean(1)

    def _image_samples(self, samples: Sequence[Sample]) -> list[Sample]:
        """Returns samples of the images of each sample's text, as answers to its original prompt. The images of the
        last call are cached, for rewards, accuracy and guards ask for the same."""
        rewrites = [(sample.prompt.id, self.rewritten(sample.response)) for sample in samples]
        new = [rewrite for rewrite in dict.fromkeys(rewrites) if rewrite not in self._drawn]
        count = self.settings.images
        seeds = [zlib.crc32(f"{name} {k}".encode()) for name, _ in new for k in range(count)]
        images = self.generator.draw([text for _, text in new for _ in range(count)], seeds)
        drawn = {rewrite: images[i * count : (i + 1) * count] for i, rewrite in enumerate(new)}
        self._drawn = {
            rewrite: self._drawn[rewrite] if rewrite in self._drawn else drawn[rewrite] for rewrite in rewrites
        }
        return [
            replace(sample, prompt=sample.prompt.metadata["original"], image=image)
            for sample, rewrite in zip(samples, rewrites, strict=True)
            for image in self._drawn[rewrite]
        ]

    def rewritten(self, response: str) -> str:
        """Returns the prompt in a response: all of it, or the text in the last `tag`; empty where there is none."""
        if self.settings.tag is None:
            return response.strip()
        tag = self.settings.tag
        inside = texts_between(response, f"<{tag}>", f"</{tag}>")
        return inside[-1].strip() if inside else ""
