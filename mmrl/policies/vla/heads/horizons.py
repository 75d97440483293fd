"""A head that predicts a chunk at several horizons and fuses them action by action."""

from __future__ import annotations

import torch
from einops import rearrange, repeat
from torch import Tensor

from mmrl.policies.vla.heads.gaussian import NormalHead
from mmrl.policies.vla.heads.head import EXTRA, Chosen, Reading
from mmrl.policies.vla.heads.mixture_settings import HorizonActions
from mmrl.policies.vla.heads.perceptron import perceptron
from mmrl.policies.vla.settings import Actions


class HorizonHead(NormalHead):
    """A Gaussian head whose mean is a mixture over horizons (after MoH, arXiv 2511.19433). One perceptron, with the
    horizon h as an input, predicts that horizon's actions k < h and a score of each; the mean of action k is their sum
    over all h > k, weighted by a softmax of the scores:

        mean_k = sum_{h > k} g_kh a_kh        g_k = softmax_{h > k}(s_kh)

    It reads the prompt's last token and the robot's state.
    """

    context_only = True
    reached: Tensor  # [horizon, action] bool

    def __init__(self, settings: HorizonActions, action: Actions, action_dim: int, state_dim: int, width: int) -> None:
        """width: of the backbone, 0 where it reads nothing."""
        super().__init__(settings, action, action_dim, state_dim)
        chunk, size = self.shape
        horizons = torch.tensor(settings.lengths(chunk))
        reached = torch.arange(chunk) < horizons[:, None]
        self.register_buffer("reached", reached, persistent=False)
        sizes = [width + self.state_dim + len(horizons), *[settings.width] * settings.layers]
        self.layers = perceptron(sizes, chunk * (size + 1), last_gain=settings.last_gain)

    def mean(self, reading: Reading, state: Tensor) -> Tensor:
        actions, gates = self.proposed(reading, state)
        return torch.einsum("nhc,nhca->nca", gates, actions)

    def score(
        self,
        reading: Reading,
        state: Tensor,
        chosen: Chosen,
        valid: Tensor,
        old: Tensor | None,
        reference: Tensor | None,
    ) -> dict[str, Tensor]:
        actions, gates = self.proposed(reading, state)
        fields = self.scored(torch.einsum("nhc,nhca->nca", gates, actions), chosen, valid, old, reference)
        return {**fields, EXTRA + "imbalance": repeat(self.imbalance(gates), "n -> n d", d=self.decisions)}

    def proposed(self, reading: Reading, state: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the actions of each horizon [n, horizon, chunk, action], and their gates [n, horizon, chunk]: 0
        beyond the horizon, 1 in sum over horizons."""
        one_hot = torch.eye(len(self.reached), device=state.device)
        features = reading.last if self.state_dim == 0 else torch.cat([reading.last, state.to(reading.last)], 1)
        inputs = torch.cat(
            [repeat(features, "n w -> n h w", h=len(one_hot)), repeat(one_hot, "h o -> n h o", n=len(features))], 2
        )
        outputs = rearrange(self.layers(inputs.to(features)).float(), "n h (c a) -> n h c a", c=self.shape[0])
        scores = outputs[..., -1].masked_fill(~self.reached, -torch.inf)
        return outputs[..., :-1], scores.softmax(1)

    def imbalance(self, gates: Tensor) -> Tensor:
        """Returns the mean over horizons of (load - 1)^2 [n], where the load of a horizon is the mean over its actions
        of its gate times the number of horizons that reach the action: 1 for each where all gates are equal."""
        shares = gates * self.reached.sum(0)
        load = (shares * self.reached).sum(2) / self.reached.sum(1)
        return (load - 1).square().mean(1)
