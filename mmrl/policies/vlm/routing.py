"""Routing replay: the experts that a sampling engine routed tokens to are used again where these tokens are replayed.

In a mixture of experts a difference in rounding can send a token to other experts than in the engine that sampled it,
and then likelihoods differ by far more than rounding. Rollout routing replay (R3, arXiv 2510.11370) repeats the choice
of experts alone: their weights are computed anew, so the router learns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mmrl.errors import UserError
from mmrl.policies.vlm.prompts import RolloutTokens

NONE = -1  # instead of an expert where there is no record
Inputs = tuple[object, ...]  # of a module, by position
ROUTES = "recorded_experts"  # argument of a decoder layer


def renormalised_softmax(logits: Tensor, experts: Tensor) -> Tensor:
    """Returns the weights of chosen experts, [token, k], in the dtype of `logits` [token, expert]: their probabilities,
    scaled to sum to 1."""
    chosen = logits.softmax(-1, dtype=torch.float32).gather(-1, experts)
    return (chosen / chosen.sum(-1, keepdim=True)).to(logits.dtype)


# Families (model_type) for which replay was tested: the part of a layer that chooses experts, which returns logits
# [token, expert], weights and experts [token, k]; and how it gets weights from logits and experts.
ROUTERS = {"qwen3_vl_moe": ("mlp.gate", renormalised_softmax)}


class Routing:
    """Makes a model's routers repeat recorded choices inside `replayed`; outside it they choose by themselves."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises UserError for a model without experts, or of a family for which this was not tested."""
        family, text = model.config.model_type, model.config.get_text_config()
        if family not in ROUTERS:
            raise UserError(
                f"rollout.generator.routing_replay is for mixtures of experts of {', '.join(ROUTERS)}, and model.path "
                f"is a {family} model; set it to false"
            )
        router, self.weigh = ROUTERS[family]
        decoder = model.get_decoder()
        self.shape = (len(decoder.layers), text.num_experts_per_tok)
        self.experts = text.num_experts
        self.routes: Tensor | None = None
        self.current: Tensor | None = None  # [token, k] of the layer that is running
        self.differing: dict[int, Tensor] = {}  # [token] by layer, of the last pass
        decoder.register_forward_pre_hook(self._enter, with_kwargs=True)
        for number, layer in enumerate(decoder.layers):
            layer.register_forward_pre_hook(partial(self._enter_layer, number), with_kwargs=True)
            for name, module in layer.named_modules():
                if name == router:
                    module.register_forward_hook(partial(self._choose, number))

    def check(self, prompt: str, tokens: int, experts: Tensor | None) -> Tensor:
        """Returns the record [token, layer, k] of so many tokens. Raises UserError where an engine gave none, or one of
        another shape."""
        if experts is None:
            raise UserError(
                "rollout.generator.routing_replay is set and vLLM returned no experts; start servers of "
                "rollout.generator.addresses with --enable-return-routed-experts"
            )
        if experts.shape != (tokens, *self.shape) or not 0 <= int(experts.min()) <= int(experts.max()) < self.experts:
            raise UserError(
                f"vLLM returned experts {list(experts.shape)} for prompt {prompt}, where the model has "
                f"{[tokens, *self.shape]} of 0 to {self.experts - 1}; set rollout.generator.routing_replay=false"
            )
        return experts

    @contextmanager
    def replayed(self, routes: Tensor | None) -> Iterator[None]:
        """Replays routes inside the context. routes: [row, length, layer, k] of the input, NONE where a token is to be
        routed anew; or None.

        Layers keep their routes for the recomputation of their activations, whenever that comes.
        """
        self.routes = routes
        yield
        self.routes = None

    def differences(self) -> Tensor:
        """Returns the share of recorded experts, over all layers, that routers would not have chosen, [token] of the
        last pass; NaN where there is no record."""
        return torch.stack(list(self.differing.values())).mean(0)

    def _enter(self, decoder: nn.Module, args: Inputs, kwargs: dict[str, Any]) -> tuple[Inputs, dict[str, Any]]:
        return args, kwargs if self.routes is None else kwargs | {ROUTES: self.routes}

    def _enter_layer(self, number: int, layer: nn.Module, args: Inputs, kwargs: dict[str, Any]) -> tuple[Inputs, Any]:
        """Takes routes from a layer's arguments, which are there again when the layer is recomputed; an attribute would
        hold those of a later pass."""
        routes = kwargs.get(ROUTES)
        self.current = None if routes is None else routes[:, :, number].flatten(0, 1)
        return args, {name: value for name, value in kwargs.items() if name != ROUTES}

    def _choose(self, number: int, router: nn.Module, args: Inputs, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Hooks a router's output: replaces its experts [token, k] by recorded ones, and counts where they differ."""
        logits, weights, chosen = output
        if self.current is None:
            return output
        recorded = self.current != NONE
        experts = torch.where(recorded, self.current.long(), chosen)
        missed = (experts[:, :, None] != chosen[:, None]).all(-1).float()
        self.differing[number] = missed.where(recorded, torch.nan).mean(-1)
        return logits, self.weigh(logits, experts), experts


def collate_routes(rows: Sequence[RolloutTokens], padding_side: str, device: torch.device) -> Tensor | None:
    """Returns routes [row, length, layer, k] int16 of rows laid out as by `collate`, or None if none of them has a
    record."""
    shape = next((row.experts.shape[1:] for row in rows if row.experts is not None), None)
    if shape is None:
        return None
    records = [torch.full((len(t.prompt) + len(t.response), *shape), NONE, dtype=torch.int16) for t in rows]
    for tokens, record in zip(rows, records, strict=True):
        if tokens.experts is not None:
            record[: len(tokens.experts)] = tokens.experts
    padded = nn.utils.rnn.pad_sequence(records, batch_first=True, padding_value=NONE, padding_side=padding_side)
    return padded.to(device)
