"""Passes of the model on rows of tokens, in lockstep with other ranks where these wait for one another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import torch
from PIL import Image
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from mmrl.generation.decoding import PACKED
from mmrl.generation.sampling import Sampling
from mmrl.generation.transformers import generate, generate_groups
from mmrl.policies.vlm.prompts import RolloutTokens, collate
from mmrl.policies.vlm.responses.flops import ResponseFlops
from mmrl.policies.vlm.responses.packing import pack_rows, worthwhile
from mmrl.policies.vlm.responses.tokens import ChatTokenizer
from mmrl.policies.vlm.routing import Routing
from mmrl.policies.vlm.scorer import TokenScorer, recompute, transformers_model
from mmrl.rollouts import Prompt

# Families (model_type) whose prompts are read once for all of their responses, and whose rows can be packed.
PREFIX_SHARING = {"qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "idefics3", "llava_onevision", "internvl"}


@dataclass
class Lockstep:
    """Keeps ranks doing the same collectives under ZeRO-3. `max` is the maximum of a number over the ranks; inside
    `whole` passes of the network are not collectives."""

    max: Callable[[int], int]
    whole: Callable[[], AbstractContextManager[None]]
    ballast: RolloutTokens | None = None


class ModelRunner:
    """Runs the model that is trained: generates with it, and collates its inputs.

    lockstep: under ZeRO-3. routing: where engines record the experts they routed tokens to, and replay repeats them.
    """

    def __init__(self, module: TokenScorer, tokens: ChatTokenizer, *, gathers: bool, packing: bool = True) -> None:
        """gathers: see `gathered_weights`. packing: rows are replayed without padding, where the model can."""
        self.module, self.tokens, self.gathers = module, tokens, gathers
        self.lockstep: Lockstep | None = None
        self.routing: Routing | None = None
        self.flops = ResponseFlops(self.core)
        if packing and self.can_pack:
            pack_rows(self.core.get_decoder())
            module.packs = True

    @property
    def core(self) -> PreTrainedModel:
        return transformers_model(self.module.model)

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @contextmanager
    def gathered_weights(self) -> Iterator[None]:
        """Lets this rank generate without the others inside the context, also under ZeRO-3, which gathers all weights
        for that long: otherwise every token would gather them layer by layer. A collective at both ends."""
        lockstep = self.lockstep
        if lockstep is None or not self.gathers:
            yield
            return
        with lockstep.whole():
            self.lockstep = None
            try:
                yield
            finally:
                self.lockstep = lockstep

    def anywhere(self, count: int) -> bool:
        """Returns whether `count` is above 0; under ZeRO-3, on any rank."""
        return (count if self.lockstep is None else self.lockstep.max(count)) > 0

    def replay_routing(self) -> None:
        """Requires engines to return the experts they routed tokens to, and has replay repeat their choice.

        Raises UserError as `Routing` does.
        """
        self.routing = Routing(self.core)

    def shares_prompts(self, *, training: bool) -> bool:
        """Returns whether a prompt is read once for all of its responses, and these then continue from its cache.

        Not in a family for which it was not tested, nor where a layer remembers less than all keys and values; nor
        under ZeRO-3, where ranks would make different numbers of passes; nor in training if activations are recomputed,
        which does without a cache.
        """
        recomputes = training and self.core.is_gradient_checkpointing
        return self._attends_to_all and self.lockstep is None and not recomputes

    @property
    def can_pack(self) -> bool:
        """Returns whether rows can be replayed without padding: in the families whose prompts can be shared, with
        attention by SDPA."""
        return self._attends_to_all and self.core.config.get_text_config()._attn_implementation in ("sdpa", PACKED)

    @property
    def _attends_to_all(self) -> bool:
        """Returns whether the model is of a tested family and each of its layers attends to all earlier tokens."""
        layers = DynamicCache(config=self.core.config.get_text_config()).layers
        return self.core.config.model_type in PREFIX_SHARING and all(type(layer) is DynamicLayer for layer in layers)

    def packs(self, lengths: list[int]) -> bool:
        """Returns whether rows of these lengths are replayed without padding."""
        return self.module.packs and worthwhile(lengths)

    def generate(
        self, rows: list[RolloutTokens], seeds: Sequence[int], sampling: Sampling, limits: Sequence[int]
    ) -> list[Tensor]:
        """Generates continuations of `rows` by the model, of at most limits[i] tokens: [token] int64 each."""
        recompute(self.module, False)
        shares = self.shares_prompts(training=False)
        responses = (self._generate_shared if shares else self._generate_apart)(rows, seeds, sampling, limits)
        recompute(self.module, True)
        read, shared = distinct_rows(rows)[0] if shares else rows, shares and not any(row.read_images for row in rows)
        self.flops.sampled(rows, read, responses[: len(rows)], shared=shared)
        return responses[: len(rows)]

    def _generate_shared(
        self, rows: list[RolloutTokens], seeds: Sequence[int], sampling: Sampling, limits: Sequence[int]
    ) -> list[Tensor]:
        """Samples responses, [token] int64 each; rows with equal prompts share one prefill."""
        begun, which = distinct_rows(rows)
        prompts, answered = distinct_prompts(begun)
        beginnings = [row.response for row in begun]
        if any(row.read_images for row in rows):  # images are read with the prompt alone: here all that came before is
            prompts, answered, beginnings = begun, list(range(len(begun))), [row.response[:0] for row in begun]
        return generate_groups(
            self.core,
            self.collate(prompts, padding_side="left"),
            prompts=torch.tensor(answered),
            begun=beginnings,
            rows=torch.tensor(which),
            sampling=sampling,
            seeds=list(seeds),
            eos=self.tokens.eos,
            limits=limits,
        )

    def _generate_apart(
        self, rows: list[RolloutTokens], seeds: Sequence[int], sampling: Sampling, limits: Sequence[int]
    ) -> list[Tensor]:
        """Samples responses, [token] int64 each, every row with a prefill of its own, as ZeRO-3 needs."""
        padded = self.with_ballast(rows)
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
        return [response[:limit] for response, limit in zip(responses, limits, strict=False)]

    def collate(self, rows: Sequence[RolloutTokens], *, padding_side: str) -> dict[str, Tensor]:
        return collate(rows, pad=self.tokens.pad, padding_side=padding_side, device=self.device)

    def with_ballast(self, rows: list[RolloutTokens]) -> list[RolloutTokens]:
        """Adds a row with an image where a batch has none under ZeRO-3: such a rank would skip the vision tower,
        whose parameters the others wait for. Nothing of that row is ever counted."""
        if self.lockstep is None or any(r.images for r in rows):
            return rows
        if self.lockstep.ballast is None:
            blank = Prompt("ballast", "<image>", (Image.new("RGB", (64, 64)),))
            self.lockstep.ballast = replace(self.tokens.encode([blank])[0], response=torch.tensor(self.tokens.eos[:1]))
        return [*rows, self.lockstep.ballast]


def distinct_rows(rows: Sequence[RolloutTokens]) -> tuple[list[RolloutTokens], list[int]]:
    """Returns the rows to be continued, each once, and for each row its index among them: rows of one prompt, whose
    responses so far are equal, are one. A row that has read images is its own."""
    indices: dict[tuple[int, int, tuple[int, ...]], int] = {}
    keys = [(id(t.prompt), number if t.read_images else -1, (*t.response.tolist(),)) for number, t in enumerate(rows)]
    which = [indices.setdefault(key, len(indices)) for key in keys]
    return [rows[which.index(number)] for number in range(len(indices))], which


def distinct_prompts(rows: Sequence[RolloutTokens]) -> tuple[list[RolloutTokens], list[int]]:
    """Returns each prompt once, without a response, and for each row the index of its prompt. Rollouts of one `rollout`
    call hold the same tensor; equal prompts that were encoded apart stay apart."""
    indices: dict[int, int] = {}
    which = [indices.setdefault(id(tokens.prompt), len(indices)) for tokens in rows]
    firsts = [rows[which.index(number)] for number in range(len(indices))]
    return [tokens.without_response() for tokens in firsts], which
