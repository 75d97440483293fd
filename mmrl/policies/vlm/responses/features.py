"""Features of images that a frozen vision tower has computed, kept while rollouts with these images exist."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from mmrl.policies.vlm.prompts import PIXELS, RolloutTokens, joined_images

INPUT = "mm_encoder_outputs"  # the input of transformers' models that holds features of images
# `model_type` of families for which reuse of features, sharing a prompt between its responses, and packing are tested.
FAMILIES = {"qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "idefics3", "llava_onevision", "internvl"}

Parts = Tensor | tuple[Tensor, ...]  # one part for each image, or each crop of an image, on the first dimension
ImageInputs = dict[str, Tensor]  # inputs of all images of a prompt or an observation, such as pixel_values


class Features(NamedTuple):
    """Outputs of `get_image_features` for the images of one prompt or one observation."""

    kind: type[ModelOutput]
    pooled: Parts
    deeper: tuple[Parts, ...]  # one for each layer of the decoder that adds features of its own (Qwen3-VL)


class ImageFeatures:
    """Computes the features of images once, and keeps them as long as the tensors of the images exist.

    Keys are the tensor objects of the pixels, which the rollouts of a group share. So nothing has to be removed: when
    the rollouts of a step are gone, so are its features.
    """

    def __init__(self) -> None:
        self._kept: Any = WeakTensorKeyDictionary()

    def __len__(self) -> int:
        """Returns the number of prompts and observations whose features are kept."""
        return len(self._kept)

    def inputs(self, core: PreTrainedModel, images: Sequence[ImageInputs]) -> dict[str, Any]:
        """Returns the features of `images`, in their order, as an input of `core.base_model` in place of pixels.

        images: one entry for each prompt or observation with images. The tower computes all missing features at once.
        """
        missing = [*{id(part[PIXELS]): part for part in images if part[PIXELS] not in self._kept}.values()]
        if missing:
            for part, features in zip(missing, compute_features(core, missing), strict=True):
                self._kept[part[PIXELS]] = features
        reused: list[Features] = [self._kept[part[PIXELS]] for part in images]
        values: dict[str, Any] = {"pooler_output": join([features.pooled for features in reused])}
        if reused[0].deeper:
            layers = zip(*(features.deeper for features in reused), strict=True)
            values["deepstack_features"] = [join(layer) for layer in layers]
        return {INPUT: {"image": reused[0].kind(**values)}}


@torch.no_grad()
def compute_features(core: PreTrainedModel, images: Sequence[ImageInputs]) -> list[Features]:
    """Returns the features of the images of each entry, computed in one pass of the vision tower."""
    base: Any = core.base_model
    accepted = inspect.signature(base.get_image_features).parameters
    joined = {key: value.to(core.device) for key, value in joined_images(images).items() if key in accepted}
    output = base.get_image_features(**joined, return_dict=True)
    pooled: Parts = output.pooler_output if isinstance(output.pooler_output, Tensor) else tuple(output.pooler_output)
    deeper = [tuple(layer) for layer in output.get("deepstack_features") or ()]
    features, start = [], 0
    for part in images:
        end = start + (num_crops(part) if isinstance(pooled, Tensor) else num_images(part))
        features.append(Features(type(output), pooled[start:end], tuple(layer[start:end] for layer in deeper)))
        start = end
    return features


def join(parts: Sequence[Parts]) -> Parts:
    """Concatenates parts of several entries."""
    if isinstance(parts[0], Tensor):
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    return tuple(chain.from_iterable(parts))


def num_images(part: ImageInputs) -> int:
    """Returns the number of images of an entry."""
    return len(part["image_grid_thw"] if "image_grid_thw" in part else part["image_sizes"])


def num_crops(part: ImageInputs) -> int:
    """Returns the number of crops of the images of an entry. Crops that are 0 everywhere pad an entry of Idefics3,
    whose pixels are [row, crop, channel, height, width]."""
    pixels = part[PIXELS]
    return len(pixels) if pixels.dim() == 4 else int(pixels.flatten(2).any(-1).sum())


def images_in(rows: Sequence[RolloutTokens]) -> list[ImageInputs]:
    """Returns the images of all prompts and observations of `rows`, in the order in which `collate` joins them."""
    return [part for row in rows for part in (row.images, row.observed_images) if PIXELS in part]


def can_reuse(core: PreTrainedModel) -> bool:
    """Returns whether a model may get features in place of pixels: its family is tested, and the installed version of
    transformers accepts them."""
    return core.config.model_type in FAMILIES and INPUT in inspect.signature(core.base_model.forward).parameters
