"""The module that the engine wraps of a vision-language model: likelihoods of chosen tokens, without the logits of a
batch."""

from __future__ import annotations

from contextlib import nullcontext
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
from mmrl.policies.vlm.responses.packing import packed_rows


@dataclass(frozen=True)
class PrefixContinuations:
    """Continuations of prompts that are read once: `prompt` [response] is the index of each one's prompt, `ids` and
    `mask` [response, token] are the responses without their last token, padded on the right."""

    prompt: Tensor
    ids: Tensor
    mask: Tensor


class FusedHead(nn.Module):
    """Computes likelihoods of chosen tokens by the output matrix of another module, whose logits exist a chunk at a
    time.

    A module of its own: ZeRO-3 notices whose matrix it reads and gathers it once for its forward and once for its
    backward pass, however many chunks there are. The matrix keeps its one parameter name.
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
        others: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Returns logp, entropy and sum of squared probabilities, [decision] fp32; with others [decision, k], or
        [k] for all decisions, the logp of these tokens too. hidden: [decision, hidden], targets: [decision]."""
        if len(targets) == 0:  # the gradient is 0, but other ranks wait for this one to take part
            nothing = (hidden @ self.weight.t()).float().sum(1)
            empty = () if others is None else (nothing[:, None].expand(-1, others.shape[-1]),)
            return nothing, nothing.clone(), nothing.clone(), *empty
        if isinstance(temperature, Tensor):  # (h / t) W = (h W) / t
            hidden, temperature = (hidden / temperature[:, None]).to(hidden.dtype), 1.0
        scores = hidden_logprob(hidden, self.weight, targets, temperature=temperature, excluded=excluded, chunk=chunk)
        scored = scores.logp, scores.entropy, scores.square_sum
        if others is None:
            return scored
        # log softmax = logit - normaliser, and the normaliser is the target's logit less its logp
        equation = "dh,kh->dk" if others.dim() == 1 else "dh,dkh->dk"
        logits = torch.einsum(equation, hidden.float(), self.weight[others].float()) / temperature
        target = (hidden.float() * self.weight[targets].float()).sum(1) / temperature
        return *scored, logits - (target - scores.logp)[:, None]


class TokenScorer(nn.Module):
    """Computes log-probability and entropy of chosen tokens; this is the module the engine wraps.

    Logits over the vocabulary exist only in chunks of `chunk` decisions, recomputed in the backward pass; the logits of
    a whole batch never exist.
    """

    suppressed: Tensor

    def __init__(self, model: nn.Module, sampling: Sampling, chunk: int) -> None:
        super().__init__()
        self.model = model
        self.sampling = sampling
        self.chunk = chunk
        self.critic: TokenCritic | None = None  # to be set before the engine wraps this module
        self.packs = False  # whether the decoder can compute without padding; see `pack_rows`
        self.register_buffer("suppressed", torch.tensor(sampling.suppressed, dtype=torch.int64), persistent=False)
        layer, truncated = transformers_model(model).get_output_embeddings(), sampling.top_k > 0 or sampling.top_p < 1
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
        others: Tensor | None = None,
        count: int = 0,
        *,
        packs: bool = False,
    ) -> tuple[Tensor, ...]:
        """Returns logp, entropy and the sum of squared probabilities, and where there is a critic the value of what
        came before the decision: [decision] fp32. inputs: the model's own, with input_ids [row, length]. row, column,
        targets: [decision], the token targets[i] is predicted at position column[i] of row row[i]. temperature: of the
        distribution, or [decision]. With others [decision, k], alternative tokens, or [k] for all decisions, their logp
        comes last. With a count above 0 it returns only the ids of so many likeliest tokens [decision, count].

        With `continuations` the inputs are prompts; rows are then responses, and columns count from a prompt's end.
        packs: the decoder computes no padding. `chunks` is the number of passes through an output layer that can not be
        fused, which under ZeRO-3 must be the same on every rank; None: as many as this rank needs.
        """
        core = transformers_model(self.model)
        if continuations is None:
            with packed_rows(inputs["attention_mask"]) if packs else nullcontext():
                states = core.base_model(**inputs, use_cache=False).last_hidden_state
        else:
            states = self._continued(core, inputs, continuations)
        hidden = states[row, column]
        if count:
            return (self._likeliest(core.get_output_embeddings(), hidden, targets, temperature, count),)
        scored = self._scored(core, hidden, targets, chunks, temperature, others)
        if self.critic is None:
            return scored
        return *scored[:3], self.critic(hidden), *scored[3:]

    @torch.no_grad()
    def _likeliest(
        self, head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float | Tensor, count: int
    ) -> Tensor:
        temperatures = torch.as_tensor(temperature, device=hidden.device).expand(len(targets))
        pieces = zip(*(values.split(self.chunk) for values in (hidden, targets, temperatures)), strict=True)
        logits = (shape_logits(head(h).float() / t[:, None], self.sampling, keep=chosen) for h, chosen, t in pieces)
        return torch.cat([part.topk(count).indices for part in logits])

    def _scored(
        self,
        core: PreTrainedModel,
        hidden: Tensor,
        targets: Tensor,
        chunks: int | None,
        temperature: float | Tensor,
        others: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Returns scores as `forward` does. hidden: [decision, hidden], of the tokens before."""
        if self.fused is not None:
            excluded = self.suppressed if len(self.suppressed) else None
            scored: tuple[Tensor, ...] = self.fused(hidden, targets, temperature, excluded, self.chunk, others)
            return scored
        head = core.get_output_embeddings()
        chunks = max(1, -(-len(targets) // self.chunk)) if chunks is None else chunks
        temperatures = torch.as_tensor(temperature, device=hidden.device).expand(len(targets))
        columns = (hidden, targets, temperatures, *(() if others is None else (others.expand(len(targets), -1),)))
        pieces = (values.tensor_split(chunks) for values in columns)
        parts = [checkpoint(self._score, head, *piece, use_reentrant=False) for piece in zip(*pieces, strict=True)]
        return tuple(torch.cat(values) for values in zip(*parts, strict=True))

    def _continued(self, core: PreTrainedModel, inputs: dict[str, Tensor], after: PrefixContinuations) -> Tensor:
        """Returns hidden states [response, 1 + token, hidden]: of the prompt's last token, and of the response's."""
        prefix = Prefix(core, inputs).select(after.prompt)
        last = rearrange(prefix.last, "b h -> b 1 h")
        return last if after.ids.shape[1] == 0 else torch.cat([last, prefix.extend(after.ids, after.mask)], 1)

    def _score(
        self, head: nn.Module, hidden: Tensor, targets: Tensor, temperature: Tensor, others: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Returns logprob, entropy and summed squared probabilities of each token, and the logprobs of `others`."""
        logits = shape_logits(head(hidden).float() / temperature[:, None], self.sampling, keep=targets)
        logp_of_others = () if others is None else (logits.log_softmax(-1).gather(1, others),)
        if len(targets) == 0:
            return logits.sum(-1), logits.sum(-1), logits.sum(-1), *logp_of_others
        scores = token_logprob(logits, targets)
        return scores.logp, scores.entropy, scores.square_sum, *logp_of_others


def recompute(module: nn.Module, on: bool) -> None:
    """Switches recomputation of activations on or off: layers do it only in training mode, and then ignore the
    key-value cache."""
    for layer in module.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = on


def transformers_model(model: nn.Module) -> PreTrainedModel:
    """Returns the transformers model itself, out of its LoRA wrapper if it has one."""
    if isinstance(model, PreTrainedModel):
        return model
    core: Any = model
    return core.get_base_model()
