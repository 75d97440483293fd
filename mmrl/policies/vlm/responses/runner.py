"""Runs the model on rows of tokens, in lockstep with the other ranks where ZeRO-3 needs that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from mmrl.generation.decoding import PACKED
from mmrl.generation.sampling import Sampling
from mmrl.generation.transformers import generate, generate_groups
from mmrl.policies.vlm.prompts import VIDEO_PIXELS, RolloutTokens, collate
from mmrl.policies.vlm.responses.features import FAMILIES, ImageInputs, images_in
from mmrl.policies.vlm.responses.flops import ResponseFlops
from mmrl.policies.vlm.responses.packing import pack_rows, worthwhile
from mmrl.policies.vlm.responses.tokens import ChatTokenizer
from mmrl.policies.vlm.routing import Routing
from mmrl.policies.vlm.scorer import TokenScorer, transformers_model, without_checkpointing
from mmrl.rollouts import Prompt


@dataclass
class Lockstep:
    """Functions and inputs with which all ranks make the same collective calls under ZeRO-3."""

    max: Callable[[int], int]  # returns the maximum of a number over the ranks
    gather_weights: Callable[[], AbstractContextManager[None]]  # inside, forward passes need no collective calls
    dummy: RolloutTokens | None = None  # a row with an image, see `ModelRunner.with_dummy`


class ModelRunner:
    """Generates with the model that is trained, and collates its inputs.

    `lockstep` is set under ZeRO-3. `routing` is set if vLLM records the experts of each token and replay reuses them.
    """

    def __init__(self, module: TokenScorer, tokens: ChatTokenizer, *, gathers: bool, packing: bool = True) -> None:
        """gathers: whether `gathered_weights` gathers all weights. packing: whether replay computes rows without
        padding, if the model supports it."""
        self.module, self.tokens, self.gathers = module, tokens, gathers
        self.lockstep: Lockstep | None = None
        self.routing: Routing | None = None
        self.flops = ResponseFlops(self.core)
        if packing and self.can_pack:
            pack_rows(self.core.get_decoder())
            module.can_pack = True

    @property
    def core(self) -> PreTrainedModel:
        """The transformers model, without its PEFT wrapper."""
        return transformers_model(self.module.model)

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @contextmanager
    def gathered_weights(self) -> Iterator[None]:
        """Gathers all weights for the duration of the context under ZeRO-3, so that this rank can generate
        independently of the other ranks. Outside the context, every token would gather the weights layer by layer.
        Entering and leaving are collective calls."""
        lockstep = self.lockstep
        if lockstep is None or not self.gathers:
            yield
            return
        with lockstep.gather_weights():
            self.lockstep = None
            try:
                yield
            finally:
                self.lockstep = lockstep

    def any_rank_positive(self, number: int) -> bool:
        """Returns whether `number` is above 0 on this rank, or under ZeRO-3 on any rank."""
        return (number if self.lockstep is None else self.lockstep.max(number)) > 0

    def replay_routing(self) -> None:
        """Makes replay route tokens to the experts that the engine recorded, and requires engines to record them.

        Raises UserError for a model without experts, or of a family for which routing replay was not tested.
        """
        self.routing = Routing(self.core)

    def shares_prompts(self, *, training: bool) -> bool:
        """Returns whether a prompt is computed once for all of its responses, which then use its key-value cache.

        False for families that were not tested or whose layers do not keep all keys and values; under ZeRO-3, where
        ranks would make different numbers of passes; and in training with gradient checkpointing, which uses no cache.
        """
        recomputes = training and self.core.is_gradient_checkpointing
        return self._attends_to_all and self.lockstep is None and not recomputes

    @property
    def can_pack(self) -> bool:
        """True if the model can compute rows without padding: a family in FAMILIES, with attention by SDPA."""
        return self._attends_to_all and self.core.config.get_text_config()._attn_implementation in ("sdpa", PACKED)

    @property
    def _attends_to_all(self) -> bool:
        """True if the model is of a family in FAMILIES and each of its layers attends to all earlier tokens."""
        layers = DynamicCache(config=self.core.config.get_text_config()).layers
        return self.core.config.model_type in FAMILIES and all(type(layer) is DynamicLayer for layer in layers)

    def should_pack(self, lengths: list[int]) -> bool:
        """Returns whether replay packs rows of these lengths in tokens: if the model supports it, and it saves time."""
        return self.module.can_pack and worthwhile(lengths)

    def generate(
        self, rows: list[RolloutTokens], seeds: Sequence[int], sampling: Sampling, limits: Sequence[int]
    ) -> list[Tensor]:
        """Generates at most limits[i] tokens after the prompt and response of row i, with seeds[i]. Returns the new
        token ids of each row, [token] int64."""
        shares = self.shares_prompts(training=False)
        with without_checkpointing(self.module):
            responses = (self._generate_shared if shares else self._generate_unshared)(rows, seeds, sampling, limits)
        prefilled = distinct_rows(rows)[0] if shares else rows
        shared = shares and not any(row.observed_images for row in rows)
        self.flops.sampled(rows, prefilled, responses[: len(rows)], shared=shared)
        return responses[: len(rows)]

    def _generate_shared(
        self, rows: list[RolloutTokens], seeds: Sequence[int], sampling: Sampling, limits: Sequence[int]
    ) -> list[Tensor]:
        """Samples responses as `generate`; rows with the same prompt share its prefill."""
        distinct, row_index = distinct_rows(rows)
        prompts, prompt_index = distinct_prompts(distinct)
        prefixes = [row.response for row in distinct]
        if any(row.observed_images for row in rows):
            # Images can only be computed in the prefill, so it includes the responses so far
            prompts, prompt_index = distinct, list(range(len(distinct)))
            prefixes = [row.response[:0] for row in distinct]
        images = self.reusable_images(prompts)
        inputs: dict[str, Any] = self.collate(prompts, padding_side="left", pixels=images is None)
        if images is not None:
            inputs |= self.module.features.inputs(self.core, images)
        return generate_groups(
            self.core,
            inputs,
            prompts=torch.tensor(prompt_index),
            prefixes=prefixes,
            rows=torch.tensor(row_index),
            sampling=sampling,
            seeds=list(seeds),
            eos=self.tokens.eos,
            limits=limits,
        )

    def _generate_unshared(
        self, rows: list[RolloutTokens], seeds: Sequence[int], sampling: Sampling, limits: Sequence[int]
    ) -> list[Tensor]:
        """Samples responses as `generate`, with one prefill per row; under ZeRO-3 all ranks make the same passes."""
        padded = self.with_dummy(rows)
        responses = generate(
            self.core,
            self.collate(padded, padding_side="left"),
            sampling=sampling,
            seeds=[*seeds, *[0] * (len(padded) - len(rows))],
            pad=self.tokens.pad,
            synced=self.lockstep is not None,
            eos=self.tokens.eos,
            max_new_tokens=max(limits),
        )
        # strict=False: the dummy row, which comes last, has no limit
        return [response[:limit] for response, limit in zip(responses, limits, strict=False)]

    def collate(self, rows: Sequence[RolloutTokens], *, padding_side: str, pixels: bool = True) -> dict[str, Tensor]:
        """Returns the rows as one batch of model inputs on the device of the model; see `prompts.collate`."""
        return collate(rows, pad=self.tokens.pad, padding_side=padding_side, device=self.device, pixels=pixels)

    def reusable_images(self, rows: Sequence[RolloutTokens]) -> list[ImageInputs] | None:
        """Returns the images of `rows` if the model takes their kept features in place of pixels; else None: if the
        vision tower is trained, if there are no images, if there are videos, and under ZeRO-3, where all ranks must run
        the tower equally often."""
        if not self.module.reuses_features or self.lockstep is not None:
            return None
        if any(VIDEO_PIXELS in part for row in rows for part in (row.images, row.observed_images)):
            return None
        return images_in(rows) or None

    def with_dummy(self, rows: list[RolloutTokens]) -> list[RolloutTokens]:
        """Returns `rows`; under ZeRO-3 a batch without images gets a further, dummy row with an image. Without it this
        rank would skip the vision tower, while other ranks wait for it to gather the tower's weights. No result of the
        dummy row is used."""
        if self.lockstep is None or any(r.images for r in rows):
            return rows
        if self.lockstep.dummy is None:
            prompt = Prompt("dummy", "<image>", (Image.new("RGB", (64, 64)),))
            self.lockstep.dummy = replace(self.tokens.encode([prompt])[0], response=torch.tensor(self.tokens.eos[:1]))
        return [*rows, self.lockstep.dummy]


def distinct_rows(rows: Sequence[RolloutTokens]) -> tuple[list[RolloutTokens], list[int]]:
    """Returns the distinct rows, and for each row the index of the distinct row that equals it.

    Rows are equal if they have the same prompt tensor object and equal responses so far. A row with images in its
    response is never equal to another one.
    """
    indices: dict[tuple[int, int, tuple[int, ...]], int] = {}
    keys = []
    for number, row in enumerate(rows):
        image_key = number if row.observed_images else -1  # unique for a row with images
        keys.append((id(row.prompt), image_key, (*row.response.tolist(),)))
    row_index = [indices.setdefault(key, len(indices)) for key in keys]
    return [rows[row_index.index(number)] for number in range(len(indices))], row_index


def distinct_prompts(rows: Sequence[RolloutTokens]) -> tuple[list[RolloutTokens], list[int]]:
    """Returns the distinct prompts, with empty responses, and for each row the index of its prompt.

    Two prompts are the same if they are the same tensor object, as in a group of rollouts; values are not compared.
    """
    indices: dict[int, int] = {}
    prompt_index = [indices.setdefault(id(tokens.prompt), len(indices)) for tokens in rows]
    first_rows = [rows[prompt_index.index(number)] for number in range(len(indices))]
    return [tokens.without_response() for tokens in first_rows], prompt_index
