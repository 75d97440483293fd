"""Token generation with transformers' own `generate`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from mmrl.generation.sampling import Sampling, draw, shape_logits


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
    """Sample one response a row. inputs: left-padded, `input_ids` [row, length] among them.

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


def _until_end(tokens: Tensor, eos: tuple[int, ...]) -> Tensor:
    ends = torch.isin(tokens, torch.tensor(eos)).nonzero()
    return tokens if len(ends) == 0 else tokens[: int(ends[0]) + 1]
