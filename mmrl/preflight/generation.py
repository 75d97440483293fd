"""Probes of prompts and rewards of image and video generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mmrl.preflight.alarms import Alarm, abbreviate
from mmrl.rollouts import Prompt, Sample


def probe_pairs(prompts: Sequence[Prompt]) -> Iterator[Alarm]:
    """Yields an alarm for preference pairs whose chosen and rejected images are equal."""
    identical = [
        prompt.id
        for prompt in prompts
        if isinstance(target := prompt.metadata.get("target"), Tensor)
        and isinstance(rejected := prompt.metadata.get("rejected"), Tensor)
        and torch.equal(target, rejected)
    ]
    if identical:
        yield Alarm(
            "data",
            "warned",
            f"chosen and rejected are the same image in {abbreviate(identical)}: nothing is learned from such a pair; "
            "remove it",
        )


def probe_truncation(prompts: Sequence[Prompt], count_excess_tokens: Callable[[str], int]) -> Iterator[Alarm]:
    """Yields an alarm for prompts whose end the text encoders cut off.

    count_excess_tokens: returns how many tokens of a text are beyond the encoders' limit.
    """
    excess_tokens = {prompt.id: tokens for prompt in prompts if (tokens := count_excess_tokens(prompt.text)) > 0}
    if excess_tokens:
        rows = abbreviate(f"{row} ({tokens} tokens too long)" for row, tokens in excess_tokens.items())
        yield Alarm(
            "data",
            "warned",
            f"{rows}: the end of these prompts is "
            "cut off by the text encoder; shorten them, or raise model.text_tokens where the encoder allows it",
        )


def probe_guidance(guidance: float, built_in_guidance: str | None) -> Iterator[Alarm]:
    """Yields an alarm for classifier-free guidance of a model with guidance built in, such as a distilled one.

    guidance: denoising.guidance. built_in_guidance: a sentence on the model's own guidance; None if it has none.
    """
    if built_in_guidance is not None and guidance != 1:
        yield Alarm(
            "model",
            "warned",
            f"denoising.guidance={guidance:g}, but the model has guidance built in: {built_in_guidance}. Set it to 1: "
            "otherwise images are guided twice, and every step costs twice",
        )


Score = Callable[[Sequence[Sample], Tensor], Tensor]  # [sample, component]


def reference_images(image: Tensor) -> dict[str, Tensor]:
    """Returns images, by name, that a reward should give different values, in the shape of `image` [channel, height,
    width]."""
    ramp = torch.linspace(0, 1, image.shape[-1]).expand(image.shape).clone()
    noise = torch.rand(image.shape, generator=torch.Generator().manual_seed(0))
    return {"black": torch.zeros_like(image), "white": torch.ones_like(image), "a ramp": ramp, "noise": noise}


def probe_own_rewards(samples: Sequence[Sample], score: Score, names: Sequence[str], key: str) -> Iterator[Alarm]:
    """Yields an alarm for each of the user's own rewards that gives very different images the same value.

    samples: the policy's. score: returns rewards [sample, component]. names: the names of the components. key: the
    configuration key that holds the rewards.
    """
    generated = [sample for sample in samples if sample.image is not None][:1]
    custom_columns = [column for column, name in enumerate(names) if ":" in name and not name.startswith("mmrl.")]
    if not generated or not custom_columns or generated[0].image is None:
        return
    references: Mapping[str, Tensor] = reference_images(generated[0].image)
    scored_samples = [generated[0], *(replace(generated[0], image=image) for image in references.values())]
    rewards = score(scored_samples, torch.zeros(len(scored_samples), dtype=torch.long))
    for column in custom_columns:
        values = rewards[:, column]
        if values.isfinite().all() and values.unique().numel() == 1:
            yield Alarm(
                "rewards",
                "warned",
                f"{key}: {names[column]} gives the same value, {values[0]:g}, to an image of the model, "
                f"{', '.join(references)}; check that it reads images as tensors [channel, height, width] in 0 .. 1",
            )
