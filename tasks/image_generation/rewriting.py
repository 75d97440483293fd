"""The task of prompt rewriting: a language model rewrites prompts for a frozen image generator."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mmrl.errors import name_second_model
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
    """The prompts of a source as prompts for the rewriter. template: the text of such a prompt, with {} in
    place of the original prompt.

    Metadata: that of the source; `original`, the source's prompt; and `demonstration`, the target of supervised
    training: metadata["reasoning"] of the source (a better prompt), or else the prompt unchanged.
    """

    def __init__(self, source: Source, template: str) -> None:
        self.source, self.template = source, template

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Prompt:
        """Returns prompt `index` for the rewriter: the template, filled with the original prompt's text. Its metadata
        has the original prompt, and as the demonstration a rewritten prompt (the original text if the source has
        none)."""
        prompt = self.source[index]
        demonstration = prompt.metadata.get("reasoning", prompt.text)
        metadata = {"demonstration": demonstration, **prompt.metadata, "original": prompt}
        return replace(prompt, text=self.template.replace("{}", prompt.text), metadata=metadata)


class FrozenImageGenerator:
    """Generates images with a diffusion model that is not trained. Raises UserError as
    `mmrl.policies.diffusion.loading.load` does."""

    def __init__(self, settings: FrozenGenerator) -> None:
        model_options = {name: vars(settings)[name] for name in ("dtype", "text_tokens", "decoding")}
        path = str(settings.existing())
        with name_second_model("task.generator.path"):
            family = load(path, DiffusionModel(path=path, **model_options))
        sampling_options = {name: vars(settings)[name] for name in ("guidance", "resolution", "negative_prompt")}
        self.policy = DiffusionPolicy(
            family, Denoising(steps=settings.steps, evaluation_steps=settings.steps, **sampling_options)
        )
        self.policy.module.requires_grad_(False)
        self.batch_size, self.device = settings.at_once, settings.device

    def generate(self, texts: Sequence[str], seeds: Sequence[int]) -> list[Tensor]:
        """Generates one image for each text, [channel, height, width], whose noise depends on its seed only. Words that
        a tiny model does not know are left out."""
        family = self.policy.family
        if isinstance(family, SmallFamily):
            texts = [family.readable(text) for text in texts]
        self.policy.module.to(device_of(self.device))
        images: list[Tensor] = []
        for i in range(0, len(texts), self.batch_size):
            prompts = [Prompt(str(i + k), text) for k, text in enumerate(texts[i : i + self.batch_size])]
            samples = self.policy.respond(prompts, seeds[i : i + self.batch_size])
            images += [sample.image for sample in samples if sample.image is not None]
        return images


class PromptRewriting:
    """A task whose responses are prompts for a frozen image generator. seed: the random seed of the training prompts.

    A response gets the rewards of its images, which are computed for the original prompt. All rollouts of a prompt use
    the same noise.
    """

    def __init__(self, settings: PromptRewritingSettings, seed: int) -> None:
        self.image_task = ImageGeneration.from_settings(settings, seed)
        self.generator, self.settings = FrozenImageGenerator(settings.generator), settings
        train = self.image_task.train
        self.train = None if train is None else RewriterPrompts(train, settings.template)
        self.evaluation = RewriterPrompts(self.image_task.evaluation, settings.template)
        self.reward_names, self.reward_weights = self.image_task.reward_names, self.image_task.reward_weights
        self._cached_images: dict[Rewrite, list[Tensor]] = {}

    def score(self, samples: Sequence[Sample], group: Tensor | None = None) -> Tensor:
        """Returns unweighted rewards [rollout, component], averaged over the images of a rollout. group: [rollout], the
        index of each rollout's prompt."""
        images = self._image_samples(samples)
        image_group = None if group is None else group.repeat_interleave(self.settings.images)
        return self.image_task.score(images, image_group).view(len(samples), self.settings.images, -1).mean(1)

    def accuracy(self, samples: Sequence[Sample]) -> Tensor:
        """Returns the accuracy [rollout], averaged over the images of a rollout."""
        return self._mean(self.image_task.accuracy(self._image_samples(samples)))

    def measures(self, samples: Sequence[Sample], group: Tensor | None = None) -> dict[str, Tensor]:
        """Returns metrics [rollout] by name: the guards of image generation, and the length of the response in
        tokens."""
        image_group = None if group is None else group.repeat_interleave(self.settings.images)
        guards = self.image_task.measures(self._image_samples(samples), image_group)
        lengths = torch.tensor([float(s.response_length) for s in samples])
        return {name: self._mean(values) for name, values in guards.items()} | {"response/length": lengths}

    def _mean(self, values: Tensor) -> Tensor:
        """Averages values [rollout * image] over the images of each rollout: [rollout]."""
        return values.view(-1, self.settings.images).mean(1)

    def _image_samples(self, samples: Sequence[Sample]) -> list[Sample]:
        """Generates the images of each sample's rewritten prompt. Returns samples with these images and the original
        prompts, `settings.images` for each sample in turn.

        The images of the last call are cached, since rewards, accuracy and guards use the same images.
        """
        rewrites = [(sample.prompt.id, self.extract_prompt(sample.response)) for sample in samples]
        new = [rewrite for rewrite in dict.fromkeys(rewrites) if rewrite not in self._cached_images]
        num_images = self.settings.images
        # A seed does not depend on the text, so that all rollouts of a prompt use the same noise
        seeds = [zlib.crc32(f"{prompt_id} {k}".encode()) for prompt_id, _ in new for k in range(num_images)]
        images = self.generator.generate([text for _, text in new for _ in range(num_images)], seeds)
        known = self._cached_images | {
            rewrite: images[i * num_images : (i + 1) * num_images] for i, rewrite in enumerate(new)
        }
        self._cached_images = {rewrite: known[rewrite] for rewrite in rewrites}
        return [
            replace(sample, prompt=sample.prompt.metadata["original"], image=image)
            for sample, rewrite in zip(samples, rewrites, strict=True)
            for image in self._cached_images[rewrite]
        ]

    def extract_prompt(self, response: str) -> str:
        """Returns the rewritten prompt in a response: all of it, or the text in the last <tag> ("" if there is
        none)."""
        if self.settings.tag is None:
            return response.strip()
        tag = self.settings.tag
        inside = texts_between(response, f"<{tag}>", f"</{tag}>")
        return inside[-1].strip() if inside else ""
