"""What a network says of latents, under classifier-free guidance."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from mmrl.policies.diffusion.conditions import PromptConditions
from mmrl.policies.diffusion.family import ConditionInputs, Family
from mmrl.policies.diffusion.settings import Denoising, DenoisingDemonstrations
from mmrl.policies.models import NetworkCall
from mmrl.samplers.chain import Sampler
from mmrl.samplers.guidance import guided, moved, scale_at


class GuidedNetwork:
    """A family's network, told of prompts by their conditions. module: what is asked where no other is named."""

    def __init__(self, family: Family, denoising: Denoising | DenoisingDemonstrations, module: nn.Module) -> None:
        self.family, self.denoising, self.module = family, denoising, module
        self.conditions = PromptConditions(family, denoising.prompt_cache)

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def predictor(
        self, sampler: Sampler, said: Sequence[ConditionInputs], guidance: float
    ) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """What `run` asks of the module, for rows that were asked for by `said`."""

        def predict(x: Tensor, point: Tensor, rows: Tensor) -> Tensor:
            grid = sampler.grid
            asked = [said[i] for i in rows.tolist()]
            return self.predict(self.module, x, grid.sigmas[point], grid.times[point], asked, guidance)

        return predict

    def predict(
        self,
        model: NetworkCall,
        x: Tensor,
        sigma: Tensor,
        time: Tensor,
        said: Sequence[ConditionInputs],
        guidance: float,
        known: Tensor | None = None,
    ) -> Tensor:
        """[row, ...] what `model` says, guided. A prompt's condition is made once and kept. known: what it is, if only
        its gradient is wanted, which the conditional half alone has."""
        embedded, time, shape = self.denoising.embedded_guidance, time.to(x.device), tuple(x.shape[1:])
        negative = self._negative(said) if guidance != 1 and known is None else []
        found = self.conditions.of([*said, *negative], shape)  # all at once: the encoders visit the device once

        def unconditional() -> Tensor:
            return self.family.predict(model, x, time, found[len(said) :], embedded)

        conditional = self.family.predict(model, x, time, found[: len(said)], embedded)
        scale = scale_at(sigma, guidance, self.denoising.guidance_interval)
        return guided(conditional, unconditional, scale) if known is None else moved(known, conditional, scale)

    def _negative(self, said: Sequence[ConditionInputs]) -> list[ConditionInputs]:
        """What is asked for in place of `said` where guidance leads away from it."""
        made = {id(one): one.saying(self.denoising.negative_prompt) for one in said}
        return [made[id(one)] for one in said]
