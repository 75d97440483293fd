"""A head that predicts a chunk at several horizons and averages the predictions with learned weights."""

from __future__ import annotations

import torch
from einops import rearrange, repeat
from torch import Tensor

from mmrl.policies.vla.heads.gaussian import NormalHead
from mmrl.policies.vla.heads.head import EXTRA, EncodedPrefix, SampledChunks
from mmrl.policies.vla.heads.mixture_settings import HorizonActions
from mmrl.policies.vla.heads.perceptron import perceptron
from mmrl.policies.vla.settings import Actions


class HorizonHead(NormalHead):
    """A Gaussian head whose mean is a weighted average over horizons (after MoH, arXiv 2511.19433).

    An MLP, given the horizon h, predicts the actions a_kh with index k < h and a score s_kh of each. The mean of action
    k averages the predictions of all horizons h > k, weighted by a softmax of the scores (the gates):

        mean_k = sum_{h > k} g_kh a_kh        g_k = softmax_{h > k}(s_kh)

    The MLP reads the last hidden state of the prefix's last token and the robot's state.
    """

    last_layer_only = True
    reached: Tensor  # [horizon, chunk] bool, whether a horizon is longer than the action's index in the chunk

    def __init__(self, settings: HorizonActions, action: Actions, action_dim: int, state_dim: int, width: int) -> None:
        """width: size of the backbone's hidden states; 0 for a policy without a backbone."""
        super().__init__(settings, action, action_dim, state_dim)
        chunk, size = self.shape
        horizons = torch.tensor(settings.lengths(chunk))
        # [horizon, chunk] bool: the actions inside each horizon
        reached = torch.arange(chunk) < horizons[:, None]
        self.register_buffer("reached", reached, persistent=False)
        sizes = [width + self.state_dim + len(horizons), *[settings.width] * settings.layers]
        # outputs for each action of the chunk: the action, and the score of the horizon's gate
        self.layers = perceptron(sizes, chunk * (size + 1), last_gain=settings.last_gain)

    def mean(self, prefix: EncodedPrefix, state: Tensor) -> Tensor:
        actions, gates = self.predict_horizons(prefix, state)
        return torch.einsum("nhc,nhca->nca", gates, actions)

    def score(
        self,
        prefix: EncodedPrefix,
        state: Tensor,
        sampled: SampledChunks,
        valid: Tensor,
        old: Tensor | None,
        reference: Tensor | None,
    ) -> dict[str, Tensor]:
        """Scores actions under the Gaussian around the averaged mean; see `Head.score`. Adds the extra "imbalance" [n,
        decisions], which is the same for all decisions of a chunk."""
        actions, gates = self.predict_horizons(prefix, state)
        fields = self.score_around(torch.einsum("nhc,nhca->nca", gates, actions), sampled, valid, old, reference)
        return {**fields, EXTRA + "imbalance": repeat(self.imbalance(gates), "n -> n d", d=self.decisions)}

    def predict_horizons(self, prefix: EncodedPrefix, state: Tensor) -> tuple[Tensor, Tensor]:
        """Predicts the actions of each horizon, [n, horizon, chunk, action], and their gates, [n, horizon, chunk].
        Gates are 0 beyond a horizon and sum to 1 over horizons."""
        one_hot = torch.eye(len(self.reached), device=state.device)
        features = prefix.last if self.state_dim == 0 else torch.cat([prefix.last, state.to(prefix.last)], 1)
        inputs = torch.cat(
            [repeat(features, "n w -> n h w", h=len(one_hot)), repeat(one_hot, "h o -> n h o", n=len(features))], 2
        )
        outputs = rearrange(self.layers(inputs.to(features)).float(), "n h (c a) -> n h c a", c=self.shape[0])
        scores = outputs[..., -1].masked_fill(~self.reached, -torch.inf)
        return outputs[..., :-1], scores.softmax(1)

    def imbalance(self, gates: Tensor) -> Tensor:
        """Returns how unevenly the gates [n, horizon, chunk] use the horizons: the mean of (load - 1)^2 over horizons,
        [n].

        The load of a horizon is its gate, multiplied by the number of horizons that reach the action, averaged over its
        actions. It is 1 for all horizons if all gates are equal."""
        relative_gates = gates * self.reached.sum(0)
        load = (relative_gates * self.reached).sum(2) / self.reached.sum(1)
        return (load - 1).square().mean(1)
