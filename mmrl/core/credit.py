"""Which decision gets which share of the credit."""

from __future__ import annotations

import torch
from torch import Tensor


def per_decision(advantages: Tensor, mask: Tensor) -> Tensor:
    """[B], [B, T] -> [B, T]: every counted decision gets the advantage of its rollout, the others 0."""
    return advantages[:, None].where(mask.bool(), 0)


def from_step_rewards(rewards: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """Discounted return to go [B, T] of step `rewards` [B, T]: G_t = r_t + gamma G_{t+1}.

    Steps outside `mask` have reward 0, whatever they hold, and get 0; time passes in them, so returns from beyond a
    masked stretch reach the steps before it, discounted.
    """
    counted = mask.bool()
    rewards = rewards.where(counted, 0)
    returns = torch.zeros_like(rewards)
    carried = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        carried = rewards[:, t] + gamma * carried
        returns[:, t] = carried
    return returns.where(counted, 0)
