"""The last steps of a chain with their gradient, up to the pixels: for rewards that have one."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from mmrl.rollouts import Replay, Rollouts


class ChainPolicy(Protocol):
    """What is asked of a policy whose chains end with a gradient."""

    @property
    def sampler(self) -> Any: ...

    @property
    def family(self) -> Any: ...

    @property
    def denoising(self) -> Any: ...

    @property
    def device(self) -> torch.device: ...

    def guided_prediction(
        self, model: Any, x: Tensor, sigma: Tensor, time: Tensor, said: Any, guidance: float
    ) -> Tensor: ...


def replay_last(policy: ChainPolicy, steps: int, rollouts: Rollouts, model: Any) -> Replay:
    """Pictures [rollout, ...] that the latents before the last `steps` deterministic steps lead to under `model`. With
    guidance the unconditional half of a step has no gradient, as in every replay."""
    records, sampler = rollouts.inputs, policy.sampler
    x: Tensor = torch.stack([record.x[0] for record in records]).to(policy.device)
    said, last = [record.asked for record in records], len(sampler.grid)
    none = torch.zeros(len(records), dtype=torch.bool)
    for point in range(last - steps, last):
        at = torch.full((len(records),), point)
        sigma, time = sampler.grid.sigmas[at], sampler.grid.times[at]
        v = policy.guided_prediction(model, x, sigma, time, said, policy.denoising.guidance).float()
        step = sampler.at(at, at + 1, none)
        a_x, a_v = (part.to(x).view(-1, *[1] * (x.dim() - 1)) for part in (step.a_x, step.a_v))
        x = a_x * x + a_v * v
    pictures = policy.family.decode_with_gradient(x).float()
    return Replay(torch.zeros(len(records), 1, device=policy.device), pictures=pictures)
