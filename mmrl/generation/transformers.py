"""Token generation with transformers: its own `generate`, and a loop that processes each prompt once for all of its
responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from mmrl.generation.decoding import decoding, growing_cache
from mmrl.generation.sampling import Sampling, add_gumbel_noise, shape_logits

# Ended responses are removed from the batch once they are at least 1/LEAVING of it. They are not removed one by one,
# because each removal copies the cache of the others.
LEAVING = 8


class _Draw(LogitsProcessor):
    """A logits processor that turns greedy decoding into sampling from `shape_logits`, with one generator for each
    row."""

    def __init__(self, sampling: Sampling, seeds: list[int], device: torch.device) -> None:
        self.sampling = sampling
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        logits = shape_logits(scores, self.sampling)
        return logits if self.sampling.temperature == 0 else add_gumbel_noise(logits, self.generators)


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
    """Samples one response for each row. Returns int64 tensors [token], with the end token if one was sampled.

    inputs: the model's inputs, left-padded, with `input_ids` [row, length]. seeds: one for each row. eos: ids that end
    a response. synced: whether all ranks stay in the decoding loop until the last has finished, as ZeRO-3 needs, where
    a forward pass is a collective operation.
    """
    config = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=list(eos), pad_token_id=pad, use_cache=True
    )
    processors = LogitsProcessorList([_Draw(sampling, seeds, inputs["input_ids"].device)])
    untyped: Any = model  # mypy takes methods of an nn.Module for tensors
    output = untyped.generate(**inputs, generation_config=config, logits_processor=processors, synced_gpus=synced)
    responses = output[:, inputs["input_ids"].shape[1] :].cpu()
    return [_until_end(row, eos) for row in responses]


class Prefix:
    """Prompts that a model has processed, with their key-value cache. They are continued by sampled tokens in
    generation and by known ones in replay.

    Gradients flow from the continuation into the prompt and its images. Positions are always passed to the model, since
    Qwen's models would otherwise keep an offset from one call to the next.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        inputs: dict[str, Tensor],
        *,
        every_layer: bool = False,
        cache: DynamicCache | None = None,
    ) -> None:
        """Processes the prompts.

        inputs: the model's inputs, padded on either side, with `input_ids` and `attention_mask` [prompt, length].
        cache: an empty cache; None: a new one, through which gradients flow. every_layer: whether `layers` holds the
        hidden states [row, token, hidden] of all layers in the last call, the input embeddings first, or only those of
        the last layer.
        """
        self.model, self.every_layer = model.base_model, every_layer
        self.layers: tuple[Tensor, ...] = ()
        self.cache = DynamicCache(config=model.config.get_text_config()) if cache is None else cache
        self.mask = inputs["attention_mask"]
        position_ids = positions(model, inputs)
        # with images, positions have three axes (time, row, column), and text continues after the largest of all
        self.next_position = position_ids.amax(-1).view(-1, len(self.mask)).amax(0) + 1  # [row]
        self.hidden = self._forward(**inputs, position_ids=position_ids)  # [row, length, hidden]
        end = self.mask.cumsum(1).argmax(1)  # column of the last token: the first one with the largest count
        self.last = self.hidden[torch.arange(len(end), device=end.device), end]  # [row, hidden]

    def select(self, index: Tensor) -> Prefix:
        """Replaces the prompts by those with the indices `index` [row], which may repeat or leave out prompts. Returns
        self."""
        self.cache.batch_select_indices(index)
        self.mask, self.next_position = self.mask[index], self.next_position[index]
        self.last = self.last[index]
        # hidden states of the prompts are not needed again, and a copy for each row would be large
        self.hidden = self.hidden.new_empty(0)
        return self

    def begin(self, prefixes: Sequence[Tensor]) -> Prefix:
        """Processes the given beginnings of the prompts' responses. prefixes: one int64 tensor [token] for each row,
        possibly empty. Returns self."""
        width, device = max(map(len, prefixes)), self.mask.device
        if width == 0:
            return self
        # padded on the left, so that each row ends with its last token
        ids = torch.stack([F.pad(tokens, (width - len(tokens), 0)) for tokens in prefixes]).to(device)
        lengths = torch.tensor([len(tokens) for tokens in prefixes], device=device)
        mask = (torch.arange(width, device=device) >= width - lengths[:, None]).to(self.mask)
        position_ids = self.next_position[:, None] + (mask.cumsum(1) - 1).clamp_min(0)
        self.mask, self.next_position = torch.cat([self.mask, mask], 1), self.next_position + lengths
        hidden = self._forward(input_ids=ids, attention_mask=self.mask, position_ids=position_ids)
        self.last = hidden[:, -1].where((lengths > 0)[:, None], self.last)
        return self

    def extend(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Processes further tokens, and returns their last hidden states [row, token, hidden].

        tokens: ids [row, token], or embeddings [row, token, hidden]. mask: [row, token], padded on the right.
        """
        position_ids = self.next_position[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        self.mask = torch.cat([self.mask, mask], 1)
        self.next_position = self.next_position + tokens.shape[1]
        inputs = {"inputs_embeds" if tokens.is_floating_point() else "input_ids": tokens}
        return self._forward(**inputs, attention_mask=self.mask, position_ids=position_ids)

    def _forward(self, **inputs: Tensor) -> Tensor:
        output = self.model(**inputs, past_key_values=self.cache, use_cache=True, output_hidden_states=self.every_layer)
        self.layers = output.hidden_states if self.every_layer else (output.last_hidden_state,)
        return output.last_hidden_state


# Inputs from which models with images and videos compute positions of tokens. second_per_grid_ts: the seconds between
# two rows of a video's grid, in models that count seconds.
POSITION_INPUTS = (
    "input_ids",
    "mm_token_type_ids",
    "image_grid_thw",
    "video_grid_thw",
    "second_per_grid_ts",
    "attention_mask",
)


def positions(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    """Returns the position of each token, [row, length]; with images or videos [3, row, length] (time, row, column)."""
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
    prefixes: Sequence[Tensor],
    rows: Tensor,
    sampling: Sampling,
    seeds: list[int],
    eos: tuple[int, ...],
    limits: Sequence[int],
) -> list[Tensor]:
    """Samples responses as `generate` does, but processes each prompt, and each prefix that several responses share,
    only once. Returns the new tokens of each response.

    inputs: the model's inputs, one row for each prompt. prefixes: given beginnings of responses, int64 [token] each,
    possibly empty. prompts: [prefix] int64, the index in `inputs` of each prefix's prompt. rows: [response] int64, the
    index in `prefixes` of the prefix that each response continues. seeds, limits: a seed and a maximum number of new
    tokens for each response.
    """
    device, count, max_limit = inputs["input_ids"].device, len(rows), max(limits)
    ends, config = torch.tensor(eos, device=device), model.config.get_text_config()
    generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
    cache = growing_cache(config, inputs["input_ids"].shape[1] + max(map(len, prefixes)) + max_limit)
    tokens = torch.full((count, max_limit), eos[0], device=device)
    active = torch.arange(count, device=device)  # responses that the model continues
    ended = torch.zeros_like(active, dtype=torch.bool)  # of these, those that have ended
    token_limits = torch.tensor(limits, device=device)
    with decoding(config):
        prefix = Prefix(model, inputs, cache=cache).select(prompts.to(device)).begin(prefixes).select(rows.to(device))
        hidden = prefix.last
        for step in range(max_limit):
            logits = shape_logits(model.get_output_embeddings()(hidden), sampling)
            if sampling.temperature != 0:
                logits = add_gumbel_noise(logits, [generators[response] for response in active.tolist()])
            token = logits.argmax(-1)
            tokens[active, step] = token
            ended |= torch.isin(token, ends) | (token_limits[active] == step + 1)
            if ended.all():
                break
            # Ended responses leave the batch together, once they are 1/LEAVING of it: each removal copies the cache.
            if ended.sum() * LEAVING >= len(ended):
                stay = (~ended).nonzero().flatten()
                prefix.select(stay)
                active, token, ended = active[stay], token[stay], ended[stay]
            hidden = prefix.extend(token[:, None], torch.ones_like(token[:, None]))[:, -1]
    return [_until_end(row[:limit], eos) for row, limit in zip(tokens.cpu(), limits, strict=True)]


def _until_end(tokens: Tensor, eos: tuple[int, ...]) -> Tensor:
    """Returns the tokens up to and including the first end token; all tokens if there is none."""
    ends = torch.isin(tokens, torch.tensor(eos)).nonzero()
    return tokens if len(ends) == 0 else tokens[: int(ends[0]) + 1]
