"""Routing replay: the trainer routes each token to the experts to which vLLM routed it during sampling.

In a mixture of experts, rounding differences between trainer and vLLM can route a token to different experts. Its
log-probabilities then differ far more than by rounding. Rollout routing replay (R3, arXiv 2510.11370) reuses the
selected experts only; their weights are computed by the trained router, which therefore still gets a gradient.
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

NONE = -1  # index of an expert that was not recorded
Inputs = tuple[object, ...]  # positional arguments of a module
ROUTES = "recorded_experts"  # keyword argument by which decoder layers get the recorded experts


def renormalised_softmax(logits: Tensor, experts: Tensor) -> Tensor:
    """Returns the weights of selected experts [token, k]: their probabilities, scaled to sum to 1.

    logits: [token, expert]; experts: indices, [token, k].
    """
    probabilities = logits.softmax(-1, dtype=torch.float32).gather(-1, experts)
    return (probabilities / probabilities.sum(-1, keepdim=True)).to(logits.dtype)


# Families for which replay was tested, by `model_type`: the name of the router module in a layer, which returns logits
# [token, expert], weights [token, k] and experts [token, k]; and the function that computes weights from logits and
# experts.
ROUTERS = {"qwen3_vl_moe": ("mlp.gate", renormalised_softmax)}


class Routing:
    """Makes the routers of a model select recorded experts inside `replayed`; outside it they select as usual."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Adds hooks to the model. Raises UserError for a model without experts, or of a family for which replay was
        not tested."""
        family, text = model.config.model_type, model.config.get_text_config()
        if family not in ROUTERS:
            raise UserError(
                f"rollout.generator.routing_replay supports models of type {', '.join(ROUTERS)}, but model.path is of "
                f"type {family}; set rollout.generator.routing_replay=false"
            )
        router, self.expert_weights = ROUTERS[family]
        decoder = model.get_decoder()
        self.shape = (len(decoder.layers), text.num_experts_per_tok)
        self.num_experts = text.num_experts
        self.routes: Tensor | None = None  # [row, length, layer, k], inside `replayed`
        self.layer_routes: Tensor | None = None  # [token, k] of the layer that is running
        # Of the last pass, by layer: the share of recorded experts that the router itself did not select, [token]
        self.layer_differences: dict[int, Tensor] = {}
        decoder.register_forward_pre_hook(self._add_routes, with_kwargs=True)
        for number, layer in enumerate(decoder.layers):
            layer.register_forward_pre_hook(partial(self._set_layer_routes, number), with_kwargs=True)
            for name, module in layer.named_modules():
                if name == router:
                    module.register_forward_hook(partial(self._replace_experts, number))

    def check(self, prompt: str, num_tokens: int, experts: Tensor | None) -> Tensor:
        """Returns `experts`, [token, layer, k], as vLLM recorded them for a prompt and its response. Raises UserError
        if vLLM returned none, or if their shape or range does not fit the model.

        prompt: its id, for messages. num_tokens: expected length.
        """
        if experts is None:
            raise UserError(
                "rollout.generator.routing_replay is set, but vLLM returned no experts; start the servers of "
                "rollout.generator.addresses with --enable-return-routed-experts"
            )
        bounds = (int(experts.min()), int(experts.max())) if experts.numel() else (0, 0)
        in_range = 0 <= bounds[0] <= bounds[1] < self.num_experts
        if experts.shape != (num_tokens, *self.shape) or not in_range:
            raise UserError(
                f"vLLM returned experts of shape {list(experts.shape)}, numbered {bounds[0]} to {bounds[1]}, for "
                f"prompt {prompt}, but the trained model needs shape {[num_tokens, *self.shape]}, numbered 0 to "
                f"{self.num_experts - 1}; set rollout.generator.routing_replay=false"
            )
        return experts

    @contextmanager
    def replayed(self, routes: Tensor | None) -> Iterator[None]:
        """Makes routers select the experts in `routes` inside the context; None leaves routers as they are.

        routes: [row, length, layer, k], NONE where the router itself selects. Gradient checkpointing uses the same
        routes when it recomputes a layer, also outside the context.
        """
        self.routes = routes
        try:
            yield
        finally:
            self.routes = None

    def differences(self) -> Tensor:
        """Returns the share of recorded experts, over all layers, that the routers themselves would not have selected,
        [token] of the last pass; NaN for tokens without recorded experts."""
        return torch.stack(list(self.layer_differences.values())).mean(0)

    def _add_routes(self, decoder: nn.Module, args: Inputs, kwargs: dict[str, Any]) -> tuple[Inputs, dict[str, Any]]:
        """Pre-hook of the decoder: adds the routes to its arguments, which it passes to its layers."""
        return args, kwargs if self.routes is None else kwargs | {ROUTES: self.routes}

    def _set_layer_routes(
        self, number: int, layer: nn.Module, args: Inputs, kwargs: dict[str, Any]
    ) -> tuple[Inputs, Any]:
        """Takes the experts that were recorded for each token, [row, token, layer, k], out of the layer's arguments and
        stores those of this layer, [row x token, k], for its router. A pre-hook of layer `number`.

        They come as arguments, because gradient checkpointing recomputes a layer with the arguments that it had; the
        attributes of this object may then belong to a later pass.
        """
        routes = kwargs.get(ROUTES)
        self.layer_routes = None if routes is None else routes[:, :, number].flatten(0, 1)
        return args, {name: value for name, value in kwargs.items() if name != ROUTES}

    def _replace_experts(
        self, number: int, router: nn.Module, args: Inputs, output: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Hook of the router of layer `number`: replaces the experts in its output by the recorded ones, and notes the
        share of recorded experts that it did not select itself."""
        logits, weights, selected = output
        if self.layer_routes is None:
            return output
        recorded = self.layer_routes != NONE
        experts = torch.where(recorded, self.layer_routes.long(), selected)
        not_selected = (experts[:, :, None] != selected[:, None]).all(-1).float()
        self.layer_differences[number] = not_selected.where(recorded, torch.nan).mean(-1)
        return logits, self.expert_weights(logits, experts), experts


def collate_routes(rows: Sequence[RolloutTokens], padding_side: str, device: torch.device) -> Tensor | None:
    """Returns the recorded experts of rows, padded as by `prompts.collate`, [row, length, layer, k] int16; None if no
    row has any."""
    shape = next((row.experts.shape[1:] for row in rows if row.experts is not None), None)
    if shape is None:
        return None
    records = [torch.full((len(t.prompt) + len(t.response), *shape), NONE, dtype=torch.int16) for t in rows]
    for tokens, record in zip(rows, records, strict=True):
        if tokens.experts is not None:
            record[: len(tokens.experts)] = tokens.experts
    padded = nn.utils.rnn.pad_sequence(records, batch_first=True, padding_value=NONE, padding_side=padding_side)
    return padded.to(device)
