"""Probes of prompts and rewards of image and video generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mmrl.preflight.alarms import Alarm, some
from mmrl.rollouts import Prompt, Sample


def probe_pairs(prompts: Sequence[Prompt]) -> Iterator[Alarm]:
    """Finds pairs of a better and a worse image that are one and the same."""
    same = [
        prompt.id
        for prompt in prompts
        if isinstance(target := prompt.metadata.get("target"), Tensor)
        and isinstance(rejected := prompt.metadata.get("rejected"), Tensor)
        and torch.equal(target, rejected)
    ]
    if same:
        yield Alarm(
            "data", "warned", f"chosen and rejected are the same image in {some(same)}: such a pair teaches nothing"
        )


def probe_cut(prompts: Sequence[Prompt], cut: Callable[[str], int]) -> Iterator[Alarm]:
    """Finds prompts whose end the text encoders do not read. cut: tokens of a string beyond their limit."""
    lost = {prompt.id: tokens for prompt in prompts if (tokens := cut(prompt.text)) > 0}
    if lost:
        yield Alarm(
            "data",
            "warned",
            f"{some(f'{row} ({tokens} tokens too long)' for row, tokens in lost.items())}: the end of these prompts is "
            "cut off by the text encoder; shorten them, or raise model.text_tokens where the encoder allows it",
        )


def probe_guidance(guidance: float, held: str | None) -> Iterator[Alarm]:
    """Finds classifier-free guidance of a model that holds its guidance already."""
    if held is not None and guidance != 1:
        yield Alarm(
            "model",
            "warned",
            f"denoising.guidance={guidance:g} guides a model that holds its guidance already: {held}. Leave it at 1: "
            "else it is guided twice, and every step costs twice",
        )


Score = Callable[[Sequence[Sample], Tensor], Tensor]  # [sample, component]


def reference_images(like: Tensor) -> dict[str, Tensor]:
    """Returns images of the shape of one, [channel, height, width], that a reward of images should tell apart."""
    ramp = torch.linspace(0, 1, like.shape[-1]).expand(like.shape).clone()
    noise = torch.rand(like.shape, generator=torch.Generator().manual_seed(0))
    return {"black": torch.zeros_like(like), "white": torch.ones_like(like), "a ramp": ramp, "noise": noise}


def probe_own_rewards(samples: Sequence[Sample], score: Score, names: Sequence[str], key: str) -> Iterator[Alarm]:
    """Finds rewards of the user's own that pay the same for every image. samples: drawn by the model."""
    drawn = [sample for sample in samples if sample.image is not None][:1]
    own = [column for column, name in enumerate(names) if ":" in name and not name.startswith("mmrl.")]
    if not drawn or not own or drawn[0].image is None:
        return
    shown: Mapping[str, Tensor] = reference_images(drawn[0].image)
    tried = [drawn[0], *(replace(drawn[0], image=image) for image in shown.values())]
    paid = score(tried, torch.zeros(len(tried), dtype=torch.long))
    for column in own:
        values = paid[:, column]
        if values.isfinite().all() and values.unique().numel() == 1:
            yield Alarm(
                "rewards",
                "warned",
                f"{key}: {names[column]} pays the same, {values[0]:g}, for an image of the model, {', '.join(shown)}: "
                "images are tensors [channel, height, width] in 0 .. 1",
            )
