"""Calls a diffusion network with classifier-free guidance."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from mmrl.policies.diffusion.conditions import PromptConditions
from mmrl.policies.diffusion.family import ConditionInputs, Family
from mmrl.policies.diffusion.settings import Denoising, DenoisingDemonstrations
from mmrl.policies.models import NetworkCall
from mmrl.samplers.chain import Sampler
from mmrl.samplers.guidance import guided, scale_at, with_grad


class GuidedNetwork:
    """The network of a family under classifier-free guidance, with a cache of the conditions of prompts."""

    def __init__(self, family: Family, denoising: Denoising | DenoisingDemonstrations, module: nn.Module) -> None:
        """module: the network that samples."""
        self.family, self.denoising, self.module = family, denoising, module
        self.conditions = PromptConditions(family, denoising.prompt_cache)

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        return next(self.module.parameters()).device

    def predictor(
        self, sampler: Sampler, inputs: Sequence[ConditionInputs], guidance: float
    ) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Returns the function `predict` that `samplers.chain.run` calls: guided predictions of `self.module`. inputs:
        one per row."""

        def predict(x: Tensor, point: Tensor, rows: Tensor) -> Tensor:
            """Returns guided predictions for latents x [m, ...] of `rows` [m] at grid points `point` [m]."""
            grid = sampler.grid
            row_inputs = [inputs[i] for i in rows.tolist()]
            return self.predict(self.module, x, grid.sigmas[point], grid.times[point], row_inputs, guidance)

        return predict

    def predict(
        self,
        model: NetworkCall,
        x: Tensor,
        sigma: Tensor,
        time: Tensor,
        inputs: Sequence[ConditionInputs],
        guidance: float,
        cached: Tensor | None = None,
    ) -> Tensor:
        """Returns the guided prediction for latents x [row, ...].

        model: `self.module`, or the engine that wraps it. sigma: noise levels, [row]; time: the same in the network's
        units, [row]. inputs: one per row. guidance: the scale; 1: no guidance. cached: the value of the guided
        prediction [row, ...] from an earlier pass; then only the conditional pass runs, for the gradient. It is not
        used with norm-preserving guidance, whose gradient needs the unconditional pass too.
        """
        if self.family.norm_patch is not None and guidance != 1:
            cached = None
        embedded, time, shape = self.denoising.embedded_guidance, time.to(x.device), tuple(x.shape[1:])
        negative = self._negative(inputs) if guidance != 1 and cached is None else []
        # In one call, so that the encoders are moved to the device once
        conditions = self.conditions.encode([*inputs, *negative], shape)

        def unconditional() -> Tensor:
            """Predicts with the negative prompts; it is called only if guidance needs it."""
            return self.family.predict(model, x, time, conditions[len(inputs) :], embedded)

        conditional = self.family.predict(model, x, time, conditions[: len(inputs)], embedded)
        scale = scale_at(sigma, guidance, self.denoising.guidance_interval)
        if cached is not None:
            return with_grad(cached, conditional, scale)
        return guided(conditional, unconditional, scale, self.family.norm_patch)

    def _negative(self, inputs: Sequence[ConditionInputs]) -> list[ConditionInputs]:
        """Returns the inputs of the unconditional pass: the same images with the negative prompt. Rows that share an
        object share the result."""
        negative = {id(row_inputs): row_inputs.with_text(self.denoising.negative_prompt) for row_inputs in inputs}
        return [negative[id(row_inputs)] for row_inputs in inputs]
