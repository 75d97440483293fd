"""Predictions of a network under classifier-free guidance."""

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
    """A family's network under classifier-free guidance, with a cache of prompts' conditions. module: predicts in
    sampling."""

    def __init__(self, family: Family, denoising: Denoising | DenoisingDemonstrations, module: nn.Module) -> None:
        self.family, self.denoising, self.module = family, denoising, module
        self.conditions = PromptConditions(family, denoising.prompt_cache)

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def predictor(
        self, sampler: Sampler, inputs: Sequence[ConditionInputs], guidance: float
    ) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Returns the function `predict` of `samplers.chain.run`: the module's guided predictions for one input a
        row."""

        def predict(x: Tensor, point: Tensor, rows: Tensor) -> Tensor:
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
        """Predicts [row, ...] with `model` under classifier-free guidance. cached: the guided prediction's value of an
        earlier pass; the gradient then comes from the conditional pass alone, and the unconditional one is saved. With
        norm-preserving guidance the gradient needs both, and `cached` is not used."""
        if self.family.norm_patch is not None and guidance != 1:
            cached = None
        embedded, time, shape = self.denoising.embedded_guidance, time.to(x.device), tuple(x.shape[1:])
        negative = self._negative(inputs) if guidance != 1 and cached is None else []
        conditions = self.conditions.of([*inputs, *negative], shape)  # all at once: the encoders visit the device once

        def unconditional() -> Tensor:
            return self.family.predict(model, x, time, conditions[len(inputs) :], embedded)

        conditional = self.family.predict(model, x, time, conditions[: len(inputs)], embedded)
        scale = scale_at(sigma, guidance, self.denoising.guidance_interval)
        if cached is not None:
            return with_grad(cached, conditional, scale)
        return guided(conditional, unconditional, scale, self.family.norm_patch)

    def _negative(self, inputs: Sequence[ConditionInputs]) -> list[ConditionInputs]:
        """Returns the inputs of the unconditional half: the same images with the negative prompt."""
        negative = {id(one): one.with_text(self.denoising.negative_prompt) for one in inputs}
        return [negative[id(one)] for one in inputs]
