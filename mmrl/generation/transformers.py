"""Token generation: transformers' own `generate`, and a loop that reads each prompt once for all of its responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from mmrl.generation.decoding import decoding, growing_cache
from mmrl.generation.sampling import Sampling, draw, shape_logits

LEAVING = 8  # responses that have ended leave when they are one of so many; the others' keys and values are copied then


class _Draw(LogitsProcessor):
    """Turns greedy decoding into sampling from `shape_logits`, with a generator for each row."""

    def __init__(self, sampling: Sampling, seeds: list[int], device: torch.device) -> None:
        self.sampling = sampling
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        logits = shape_logits(scores, self.sampling)
        return logits if self.sampling.temperature == 0 else draw(logits, self.generators)


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    inputs: dict[str, Tensor],
    *,
    sampling: Sampling,
    seeds: list[int],
    eos: tuple[int, ...],
    pad: int,
    max_new_tokens: int,
    synced: bool = False,
) -> list[Tensor]:
    """Samples one response a row. inputs: left-padded, `input_ids` [row, length] among them.

    Returns a list of int64 tensors [tokens], each with its end token if it produced one. `synced` keeps all ranks in
    the decoding loop until the last has finished, which ZeRO-3 needs because a forward pass is a collective there.
    """
    config = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=list(eos), pad_token_id=pad, use_cache=True
    )
    processors = LogitsProcessorList([_Draw(sampling, seeds, inputs["input_ids"].device)])
    generator: Any = model  # the stubs of nn.Module take its methods for tensors
    output = generator.generate(**inputs, generation_config=config, logits_processor=processors, synced_gpus=synced)
    responses = output[:, inputs["input_ids"].shape[1] :].cpu()
    return [_until_end(row, eos) for row in responses]


class Prefix:
    """Prompts that a model has read, to be continued: by drawn tokens in generation, by known ones in replay.

    Gradients pass from what continues a prompt into the prompt and its images. Positions are given to the model and
    not left to it, so that it keeps no state between calls (Qwen's models would remember an offset).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        inputs: dict[str, Tensor],
        *,
        every_layer: bool = False,
        cache: DynamicCache | None = None,
    ) -> None:
        """inputs: padded on either side, `input_ids` and `attention_mask` [prompt, length] among them. cache: an empty
        one; None: one through which gradients pass.

        `layers` holds the hidden states [row, token, hidden] that came last: of every layer, the input's embeddings
        first, with `every_layer`; else of the last layer alone."""
        self.model, self.every_layer = model.base_model, every_layer
        self.layers: tuple[Tensor, ...] = ()
        self.cache = DynamicCache(config=model.config.get_text_config()) if cache is None else cache
        self.mask = inputs["attention_mask"]
        position_ids = positions(model, inputs)
        self.next_position = position_ids.amax(-1).view(-1, len(self.mask)).amax(0) + 1  # [row]
        self.hidden = self._forward(**inputs, position_ids=position_ids)  # [row, length, hidden]
        end = self.mask.cumsum(1).argmax(1)  # the first column at which all tokens have been counted
        self.last = self.hidden[torch.arange(len(end), device=end.device), end]  # [row, hidden]

    def select(self, index: Tensor) -> Prefix:
        """Replaces the prompts by rows `index` of them: a prompt may come often, or not at all. Returns self."""
        self.cache.batch_select_indices(index)
        self.mask, self.next_position = self.mask[index], self.next_position[index]
        self.last = self.last[index]
        # Of prompts, not of rows: a copy for every response would be large, and is not needed.
        self.hidden = self.hidden.new_empty(0)
        return self

    def begin(self, begun: Sequence[Tensor]) -> Prefix:
        """Reads what each prompt's response begins with, [token] int64, which may be nothing. Returns self."""
        width, device = max(map(len, begun)), self.mask.device
        if width == 0:
            return self
        ids = torch.stack([F.pad(own, (width - len(own), 0)) for own in begun]).to(device)
        lengths = torch.tensor([len(own) for own in begun], device=device)
        mask = (torch.arange(width, device=device) >= width - lengths[:, None]).to(self.mask)
        position_ids = self.next_position[:, None] + (mask.cumsum(1) - 1).clamp_min(0)
        self.mask, self.next_position = torch.cat([self.mask, mask], 1), self.next_position + lengths
        hidden = self._forward(input_ids=ids, attention_mask=self.mask, position_ids=position_ids)
        self.last = hidden[:, -1].where((lengths > 0)[:, None], self.last)
        return self

    def extend(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """tokens: ids [row, token], or embeddings [row, token, hidden]; mask: [row, token], padded on the right.
        Returns the last hidden states [row, token, hidden]."""
        position_ids = self.next_position[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        self.mask = torch.cat([self.mask, mask], 1)
        self.next_position = self.next_position + tokens.shape[1]
        inputs = {"inputs_embeds" if tokens.is_floating_point() else "input_ids": tokens}
        return self._forward(**inputs, attention_mask=self.mask, position_ids=position_ids)

    def _forward(self, **inputs: Tensor) -> Tensor:
        output = self.model(**inputs, past_key_values=self.cache, use_cache=True, output_hidden_states=self.every_layer)
        self.layers = output.hidden_states if self.every_layer else (output.last_hidden_state,)
        return output.last_hidden_state


# Inputs of the positions of tokens in models with images and videos. second_per_grid_ts, the seconds between two rows
# of a video's grid, is there where a family counts seconds.
POSITION_INPUTS = (
    "input_ids",
    "mm_token_type_ids",
    "image_grid_thw",
    "video_grid_thw",
    "second_per_grid_ts",
    "attention_mask",
)


def positions(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    """The position of each token: [row, length], or [3, row, length], time, row and column, with images or videos."""
    if "image_grid_thw" in inputs or "video_grid_thw" in inputs:
        base: Any = model.base_model
        return base.get_rope_index(**{key: inputs[key] for key in POSITION_INPUTS if key in inputs})[0]
    return (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)


@torch.no_grad()
def generate_groups(
    model: PreTrainedModel,
    inputs: dict[str, Tensor],
    *,
    prompts: Tensor,
    begun: Sequence[Tensor],
    rows: Tensor,
    sampling: Sampling,
    seeds: list[int],
    eos: tuple[int, ...],
    limits: Sequence[int],
) -> list[Tensor]:
    """Samples responses as `generate` does, and reads each prompt once for all of its responses, and once what several
    begin with.

    inputs: one row a prompt. begun: beginnings of responses, [token] int64 each; prompts: [beginning] int64, the prompt
    that each answers. rows: [response] int64, which beginning it goes on from. seeds, limits: one a response; a limit
    is of its new tokens, which are what is returned.
    """
    device, count, longest = inputs["input_ids"].device, len(rows), max(limits)
    ends, config = torch.tensor(eos, device=device), model.config.get_text_config()
    generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
    cache = growing_cache(config, inputs["input_ids"].shape[1] + max(map(len, begun)) + longest)
    tokens = torch.full((count, longest), eos[0], device=device)
    active = torch.arange(count, device=device)  # responses that the model continues
    ended = torch.zeros_like(active, dtype=torch.bool)  # of these, those that have ended
    room = torch.tensor(limits, device=device)
    with decoding(config):
        prefix = Prefix(model, inputs, cache=cache).select(prompts.to(device)).begin(begun).select(rows.to(device))
        hidden = prefix.last
        for step in range(longest):
            logits = shape_logits(model.get_output_embeddings()(hidden), sampling)
            if sampling.temperature != 0:
                logits = draw(logits, [generators[response] for response in active.tolist()])
            token = logits.argmax(-1)
            tokens[active, step] = token
            ended |= torch.isin(token, ends) | (room[active] == step + 1)
            if ended.all():
                break
            if ended.sum() * LEAVING >= len(ended):
                stay = (~ended).nonzero().flatten()
                prefix.select(stay)
                active, token, ended = active[stay], token[stay], ended[stay]
            hidden = prefix.extend(token[:, None], torch.ones_like(token[:, None]))[:, -1]
    return [_until_end(row[:limit], eos) for row, limit in zip(tokens.cpu(), limits, strict=True)]


def _until_end(tokens: Tensor, eos: tuple[int, ...]) -> Tensor:
    ends = torch.isin(tokens, torch.tensor(eos)).nonzero()
    return tokens if len(ends) == 0 else tokens[: int(ends[0]) + 1]
