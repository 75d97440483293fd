"""The module of a vision-language model that DeepSpeed wraps: log-probabilities of given tokens, computed without the
logits of a full batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from mmrl.generation.sampling import Sampling, shape_logits
from mmrl.generation.transformers import Prefix
from mmrl.kernels import hidden_logprob, token_logprob
from mmrl.policies.vlm.critic import TokenCritic
from mmrl.policies.vlm.responses.features import ImageFeatures, ImageInputs
from mmrl.policies.vlm.responses.packing import packed_rows


@dataclass(frozen=True)
class PrefixContinuations:
    """Responses whose prompts are computed once and shared through the key-value cache. The last token of a response is
    left out, since no token is predicted from it."""

    prompt: Tensor  # [response] int64, the index of its prompt
    ids: Tensor  # [response, token] int64, padded on the right
    mask: Tensor  # [response, token], 0 at padding


class FusedHead(nn.Module):
    """Computes log-probabilities of given tokens with the output matrix of another layer, one chunk of logits at a
    time.

    It is a module so that ZeRO-3 gathers the matrix once per forward and once per backward pass, not once per chunk.
    The matrix stays a parameter of its own layer, under one name.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self._layer = (layer,)  # in a tuple, so that it is not a submodule

    @property
    def weight(self) -> Tensor:
        """The output matrix, [token, hidden]."""
        return self._layer[0].weight

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: float | Tensor,
        excluded: Tensor | None,
        chunk: int,
        alternatives: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Returns logp of the targets, entropy and sum of squared probabilities, [decision] fp32 each.

        hidden: [decision, hidden]; targets: token ids, [decision]; temperature: one number, or [decision]; excluded:
        ids of tokens that get probability 0; chunk: decisions per chunk of logits. alternatives: ids of further tokens,
        [decision, k], or [k] for all decisions; their logp [decision, k] is then returned last.
        """
        if len(targets) == 0:  # the product has no rows, but under ZeRO-3 all ranks must use the weight
            empty = (hidden @ self.weight.t()).float().sum(1)
            empty_alternatives = () if alternatives is None else (empty[:, None].expand(-1, alternatives.shape[-1]),)
            return empty, empty.clone(), empty.clone(), *empty_alternatives
        if isinstance(temperature, Tensor):  # (h / t) W = (h W) / t
            hidden, temperature = (hidden / temperature[:, None]).to(hidden.dtype), 1.0
        scores = hidden_logprob(hidden, self.weight, targets, temperature=temperature, excluded=excluded, chunk=chunk)
        scored = scores.logp, scores.entropy, scores.square_sum
        if alternatives is None:
            return scored
        # logp = logit - normaliser; the normaliser is the target's logit minus the target's logp
        equation = "dh,kh->dk" if alternatives.dim() == 1 else "dh,dkh->dk"
        logits = torch.einsum(equation, hidden.float(), self.weight[alternatives].float()) / temperature
        target = (hidden.float() * self.weight[targets].float()).sum(1) / temperature
        return *scored, logits - (target - scores.logp)[:, None]


class TokenScorer(nn.Module):
    """Computes log-probability and entropy of given tokens; the module that DeepSpeed wraps.

    Logits over the vocabulary are computed for `chunk` decisions at a time and again in the backward pass, so that the
    logits of a full batch are never in memory.
    """

    suppressed: Tensor

    def __init__(self, model: nn.Module, sampling: Sampling, chunk: int) -> None:
        """model: a transformers model, or the peft model that wraps it. chunk: decisions whose logits are computed at a
        time."""
        super().__init__()
        self.model = model
        self.sampling = sampling
        self.chunk = chunk
        self.critic: TokenCritic | None = None  # to be set before the engine wraps this module
        self.features = ImageFeatures()
        self.reuses_features = False  # whether features are kept, since the vision tower is frozen
        self.can_pack = False  # whether the decoder can skip padding, because `pack_rows` added its hooks
        self.register_buffer("suppressed", torch.tensor(sampling.suppressed, dtype=torch.int64), persistent=False)
        layer, truncated = transformers_model(model).get_output_embeddings(), sampling.top_k > 0 or sampling.top_p < 1
        # the fused kernel supports no bias, no LoRA on the output layer, and no top-k or top-p
        fuses = type(layer) is nn.Linear and layer.bias is None and not truncated
        self.fused = FusedHead(layer) if fuses else None

    def forward(
        self,
        inputs: dict[str, Tensor],
        continuations: PrefixContinuations | None,
        row: Tensor,
        column: Tensor,
        targets: Tensor,
        chunks: int | None,
        temperature: float | Tensor,
        alternatives: Tensor | None = None,
        num_likeliest: int = 0,
        *,
        packs: bool = False,
        images: Sequence[ImageInputs] | None = None,
    ) -> tuple[Tensor, ...]:
        """Returns logp, entropy and sum of squared probabilities, then the critic's value of the tokens before each
        decision if there is a critic, then the logp of `alternatives` if given. All are fp32, [decision], the last one
        [decision, k].

        inputs: the inputs of the model, with input_ids [row, length]. continuations: if given, `inputs` holds only the
        prompts, rows are responses, and column 0 is the last token of the prompt. row, column, targets: [decision];
        token targets[i] is predicted at position column[i] of row row[i]. chunks: number of parts in which logits are
        computed if the output layer and the log-softmax cannot run as one fused kernel; under ZeRO-3 it must be equal
        on all ranks; None: as many as this rank needs. temperature: one number, or [decision]. alternatives: ids of
        further tokens, [decision, k], or [k] for all decisions. num_likeliest: if above 0, only the ids of so many
        likeliest tokens are returned, [decision, rank]. packs: whether the decoder skips padding. images: the images of
        the rows, if `inputs` has no pixels; their features are computed once and kept.
        """
        core = transformers_model(self.model)
        model_inputs: dict[str, Any] = {**inputs}
        if images is not None:
            model_inputs |= self.features.inputs(core, images)
        if continuations is None:
            with packed_rows(inputs["attention_mask"]) if packs else nullcontext():
                states = core.base_model(**model_inputs, use_cache=False).last_hidden_state
        else:
            states = self._continued(core, model_inputs, continuations)
        hidden = states[row, column]
        if num_likeliest:
            likeliest = self._likeliest(core.get_output_embeddings(), hidden, targets, temperature, num_likeliest)
            return (likeliest,)
        scored = self._scored(core, hidden, targets, chunks, temperature, alternatives)
        if self.critic is None:
            return scored
        return *scored[:3], self.critic(hidden), *scored[3:]

    @torch.no_grad()
    def _likeliest(
        self, head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float | Tensor, count: int
    ) -> Tensor:
        """Returns the ids of the `count` likeliest tokens, [decision, count]; see `forward`."""
        temperatures = torch.as_tensor(temperature, device=hidden.device).expand(len(targets))
        chunks = zip(*(values.split(self.chunk) for values in (hidden, targets, temperatures)), strict=True)
        likeliest = []
        for chunk_hidden, chunk_targets, chunk_temperatures in chunks:
            logits = head(chunk_hidden).float() / chunk_temperatures[:, None]
            likeliest.append(shape_logits(logits, self.sampling, keep=chunk_targets).topk(count).indices)
        return torch.cat(likeliest)

    def _scored(
        self,
        core: PreTrainedModel,
        hidden: Tensor,
        targets: Tensor,
        chunks: int | None,
        temperature: float | Tensor,
        alternatives: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Returns logp, entropy, sum of squared probabilities and, if given, logp of `alternatives`; see `forward`.

        hidden: [decision, hidden], hidden states at the positions that predict the targets.
        """
        if self.fused is not None:
            excluded = self.suppressed if len(self.suppressed) else None
            scored: tuple[Tensor, ...] = self.fused(hidden, targets, temperature, excluded, self.chunk, alternatives)
            return scored
        head = core.get_output_embeddings()
        chunks = max(1, math.ceil(len(targets) / self.chunk)) if chunks is None else chunks
        temperatures = torch.as_tensor(temperature, device=hidden.device).expand(len(targets))
        columns = (
            hidden,
            targets,
            temperatures,
            *(() if alternatives is None else (alternatives.expand(len(targets), -1),)),
        )
        pieces = (values.tensor_split(chunks) for values in columns)
        parts = [checkpoint(self._score, head, *piece, use_reentrant=False) for piece in zip(*pieces, strict=True)]
        return tuple(torch.cat(values) for values in zip(*parts, strict=True))

    def _continued(self, core: PreTrainedModel, inputs: dict[str, Any], continuations: PrefixContinuations) -> Tensor:
        """Returns hidden states [response, 1 + token, hidden] of the last token of the prompt and of the response
        tokens. inputs: the model inputs of the prompts."""
        prefix = Prefix(core, inputs).select(continuations.prompt)
        last = rearrange(prefix.last, "b h -> b 1 h")
        if continuations.ids.shape[1] == 0:
            return last
        return torch.cat([last, prefix.extend(continuations.ids, continuations.mask)], 1)

    def _score(
        self, head: nn.Module, hidden: Tensor, targets: Tensor, temperature: Tensor, alternatives: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Returns logp, entropy and sum of squared probabilities of one chunk, [decision] each, and, if given, logp of
        `alternatives`, [decision, k]."""
        logits = shape_logits(head(hidden).float() / temperature[:, None], self.sampling, keep=targets)
        alternative_logp = () if alternatives is None else (logits.log_softmax(-1).gather(1, alternatives),)
        if len(targets) == 0:  # empty results, but computed from the weight, which all ranks must use under ZeRO-3
            return logits.sum(-1), logits.sum(-1), logits.sum(-1), *alternative_logp
        scores = token_logprob(logits, targets)
        return scores.logp, scores.entropy, scores.square_sum, *alternative_logp


def set_checkpointing(module: nn.Module, on: bool) -> None:
    """Switches gradient checkpointing on or off by the training mode of the layers that support it: in training mode
    they recompute activations and ignore the key-value cache."""
    for layer in module.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = on


@contextmanager
def without_checkpointing(module: nn.Module) -> Iterator[None]:
    """Switches gradient checkpointing off inside the context, so that layers use the key-value cache, and on again
    afterwards, also after an error."""
    set_checkpointing(module, False)
    try:
        yield
    finally:
        set_checkpointing(module, True)


def transformers_model(model: nn.Module) -> PreTrainedModel:
    """Returns the transformers model, without the PEFT wrapper if there is one."""
    if isinstance(model, PreTrainedModel):
        return model
    core: Any = model
    return core.get_base_model()
