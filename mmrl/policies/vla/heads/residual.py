"""A head that adds the output of trained experts to the actions of a frozen head (a residual policy)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from einops import repeat
from torch import Tensor, nn

from mmrl.policies.vla.heads.gaussian import NormalHead
from mmrl.policies.vla.heads.head import BASE, EXTRA, ActionSampling, EncodedPrefix, Head, SampledChunks
from mmrl.policies.vla.heads.mixture_settings import ResidualActions
from mmrl.policies.vla.heads.perceptron import perceptron
from mmrl.policies.vla.settings import Actions
from mmrl.samplers.chain import gaussian_noise

CODE_STREAM = 1 << 20  # index of the random stream of the code's noise; a base head's denoising steps have lower ones


class ResidualHead(NormalHead):
    """A Gaussian head whose mean is proposal + reach x sum_m g_m tanh(r_m) (after DyGRO-VLA).

    - The proposal is the action of the frozen base head. It is stored with the rollout. Its likelihood does not depend
      on trained weights, so ratios and gradients of p(action | proposal) are those of the whole policy.
    - r_m is the output of expert m, an MLP of the prefix's last token, the robot's state and the proposal. Its last
      layer starts at zero, so that before training nothing is added.
    - g, the gate, weights the experts. It reads the code z, a few numbers in (-1, 1) computed from the prefix's last
      token, or from the state where there is no backbone.
    - Noise of a fixed distribution, s times a standard normal, is added to the code and stored with the action. So a
      code of k numbers passes at most k / 2 x log(1 + 1 / s^2) nats, the capacity of a Gaussian channel.
    """

    def __init__(
        self, settings: ResidualActions, base: Head, action: Actions, action_dim: int, state_dim: int, width: int
    ) -> None:
        """base: the trained head that proposes actions; it is frozen. width: size of the backbone's hidden states; 0
        for a policy without a backbone, whose code is computed from the robot's state."""
        super().__init__(settings, action, action_dim, state_dim)
        self.base = base.requires_grad_(False)
        self.every_layer, self.last_layer_only = base.every_layer, base.last_layer_only
        self.optional_parameters = tuple(f"{BASE}{part}" for part in base.optional_parameters)
        self.reach, self.noise = settings.reach, settings.noise
        self.encode = nn.Linear(width or self.state_dim, settings.code)
        self.gate = nn.Linear(settings.code, settings.experts)
        size = math.prod(self.shape)
        sizes = [width + self.state_dim + size, *[settings.width] * settings.layers]
        # last_gain=0: new experts add nothing to the proposal
        self.experts = nn.ModuleList(perceptron(sizes, size, last_gain=0.0) for _ in range(settings.experts))

    def act(self, prefix: EncodedPrefix, state: Tensor, sampling: ActionSampling) -> SampledChunks:
        """Samples actions around the proposal plus what the experts add; see `Head.act`. Returns also "proposal" and
        "code_noise", which `score` reads."""
        proposal = self.propose(prefix, state, sampling.seeds)
        code_noise = sampling.temperature * self._sample_code_noise(sampling.seeds).to(state.device)
        mean = self.residual_mean(proposal, self.code(prefix, state) + code_noise, prefix, state)
        return {**self.sample_around(mean, sampling), "proposal": proposal, "code_noise": code_noise}

    def score(
        self,
        prefix: EncodedPrefix,
        state: Tensor,
        sampled: SampledChunks,
        valid: Tensor,
        old: Tensor | None,
        reference: Tensor | None,
    ) -> dict[str, Tensor]:
        """Scores actions given the stored proposal and noise of the code; see `Head.score`. Adds the extra
        "information" [n, decisions], which is the same for all decisions of a chunk."""
        code = self.code(prefix, state)
        proposal = sampled.get("proposal")
        if proposal is None:  # a demonstration
            proposal = self.propose(prefix, state, sampled["seed"].tolist())
        mean = self.residual_mean(proposal, code + sampled["code_noise"], prefix, state)
        fields = self.score_around(mean, sampled, valid, old, reference)
        if self.noise:
            fields[EXTRA + "information"] = repeat(self.information(code), "n -> n d", d=self.decisions)
        return fields

    def encode_demonstrations(self, actions: Tensor, seeds: Sequence[int]) -> SampledChunks:
        """Returns the actions, noise of the code, and the seed with which `score` computes the proposal."""
        return {
            **super().encode_demonstrations(actions, seeds),
            "code_noise": self._sample_code_noise(seeds),
            "seed": torch.tensor(list(seeds)),
        }

    @torch.no_grad()
    def propose(self, prefix: EncodedPrefix, state: Tensor, seeds: Sequence[int]) -> Tensor:
        """Returns the base head's actions at temperature 0, [n, chunk, action]. seeds: [n], for the noise that a flow
        denoises."""
        assert self.base is not None
        likeliest = ActionSampling(seeds, temperature=0.0, training=False)
        return self.base.act(prefix, state, likeliest)["actions"].float()

    def code(self, prefix: EncodedPrefix, state: Tensor) -> Tensor:
        """Returns the code that the gate reads, without noise: [n, code] in (-1, 1)."""
        features = prefix.last if prefix.last.shape[1] else state
        return self.encode(features.to(self.encode.weight)).float().tanh()

    def gates(self, code: Tensor) -> Tensor:
        """Returns the weights of the experts, [n, expert]; they sum to 1."""
        return self.gate(code.to(self.gate.weight)).float().softmax(1)

    def residual_mean(self, proposal: Tensor, code: Tensor, prefix: EncodedPrefix, state: Tensor) -> Tensor:
        """Returns the mean of the actions, [n, chunk, action]: the proposal [n, chunk, action] and the weighted sum of
        the experts' outputs. code: with noise, [n, code]."""
        parts = [prefix.last, *([state] if self.state_dim else []), proposal.flatten(1)]
        inputs = torch.cat([part.to(self.gate.weight) for part in parts], 1)
        added = torch.stack([expert(inputs).float().tanh() for expert in self.experts], 1)
        return proposal + self.reach * torch.einsum("nm,nms->ns", self.gates(code), added).view_as(proposal)

    def information(self, code: Tensor) -> Tensor:
        """Returns KL(N(code, noise^2) || N(0, 1)) in nats, summed over the code's numbers: [n]. It is an upper bound of
        the information that the noisy code has about the prompt."""
        return (0.5 * (code.square() + self.noise**2 - 1) - math.log(self.noise)).sum(1)

    def _sample_code_noise(self, seeds: Sequence[int]) -> Tensor:
        """Samples the noise of the code at temperature 1, [n, code]."""
        return self.noise * gaussian_noise(list(seeds), CODE_STREAM, (self.encode.out_features,))
