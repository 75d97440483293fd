"""A frozen head, and a mixture of small experts that adds to its actions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from einops import repeat
from torch import Tensor, nn

from mmrl.policies.vla.heads.gaussian import NormalHead
from mmrl.policies.vla.heads.head import BASE, EXTRA, ActionSampling, Chosen, Head, Reading
from mmrl.policies.vla.heads.mixture_settings import ResidualActions
from mmrl.policies.vla.heads.perceptron import perceptron
from mmrl.policies.vla.settings import Actions
from mmrl.samplers.chain import gaussian_noise

CODE = 1 << 20  # counter of the code's noise, beyond those of a base's chain


class ResidualHead(NormalHead):
    """A Gaussian head with mean base + reach x sum_m g_m tanh(r_m) (after DyGRO-VLA).

    The base proposes without gradient, and its proposal is stored: a proposal's likelihood does not depend on what is
    trained, so ratios and gradients of p(action | proposal) are those of the whole. The same holds for the noise of the
    code z, from which the gate g is read: its distribution is fixed, and it is stored with the action. A code of k
    numbers within (-1, 1) and noise s passes at most k / 2 x log(1 + 1 / s^2) nats, as any channel with that power.

    Experts read the prompt's last token, the robot's state and the proposal; their last layers start at zero, so that
    they add nothing at first. The code reads the prompt's last token, or the state where nothing else is read.
    """

    def __init__(
        self, settings: ResidualActions, base: Head, action: Actions, action_dim: int, state_dim: int, width: int
    ) -> None:
        """width: of the backbone, 0 where it reads nothing."""
        super().__init__(settings, action, action_dim, state_dim)
        self.base = base.requires_grad_(False)
        self.every_layer, self.context_only = base.every_layer, base.context_only
        self.new_parts = tuple(f"{BASE}{part}" for part in base.new_parts)
        self.reach, self.noise = settings.reach, settings.noise
        self.encode = nn.Linear(width or self.state_dim, settings.code)
        self.gate = nn.Linear(settings.code, settings.experts)
        size = math.prod(self.shape)
        sizes = [width + self.state_dim + size, *[settings.width] * settings.layers]
        self.experts = nn.ModuleList(perceptron(sizes, size, last_gain=0.0) for _ in range(settings.experts))

    def act(self, reading: Reading, state: Tensor, sampling: ActionSampling) -> Chosen:
        proposal = self.propose(reading, state, sampling.seeds)
        disturbance = sampling.temperature * self._noises(sampling.seeds).to(state.device)
        mean = self.around(proposal, self.code(reading, state) + disturbance, reading, state)
        return {**self.drawn(mean, sampling), "proposal": proposal, "disturbance": disturbance}

    def score(
        self,
        reading: Reading,
        state: Tensor,
        chosen: Chosen,
        valid: Tensor,
        old: Tensor | None,
        reference: Tensor | None,
    ) -> dict[str, Tensor]:
        code = self.code(reading, state)
        proposal = chosen.get("proposal")
        if proposal is None:  # demonstrations have none yet
            proposal = self.propose(reading, state, chosen["seed"].tolist())
        mean = self.around(proposal, code + chosen["disturbance"], reading, state)
        fields = self.scored(mean, chosen, valid, old, reference)
        if self.noise:
            fields[EXTRA + "information"] = repeat(self.information(code), "n -> n d", d=self.decisions)
        return fields

    def teach(self, actions: Tensor, seeds: Sequence[int]) -> Chosen:
        return {**super().teach(actions, seeds), "disturbance": self._noises(seeds), "seed": torch.tensor(list(seeds))}

    @torch.no_grad()
    def propose(self, reading: Reading, state: Tensor, seeds: Sequence[int]) -> Tensor:
        """Returns the base's actions at temperature 0, [n, chunk, action]."""
        assert self.base is not None
        likeliest = ActionSampling(seeds, temperature=0.0, training=False)
        return self.base.act(reading, state, likeliest)["actions"].float()

    def code(self, reading: Reading, state: Tensor) -> Tensor:
        """Returns the code that the gate reads, without its noise [n, code]."""
        features = reading.last if reading.last.shape[1] else state
        return self.encode(features.to(self.encode.weight)).float().tanh()

    def gates(self, code: Tensor) -> Tensor:
        """Returns the weights of the experts [n, expert], whose sum is 1."""
        return self.gate(code.to(self.gate.weight)).float().softmax(1)

    def around(self, proposal: Tensor, code: Tensor, reading: Reading, state: Tensor) -> Tensor:
        """Returns the mean of the actions [n, chunk, action]. code: with its noise."""
        parts = [reading.last, *([state] if self.state_dim else []), proposal.flatten(1)]
        inputs = torch.cat([part.to(self.gate.weight) for part in parts], 1)
        added = torch.stack([expert(inputs).float().tanh() for expert in self.experts], 1)
        return proposal + self.reach * torch.einsum("nm,nms->ns", self.gates(code), added).view_as(proposal)

    def information(self, code: Tensor) -> Tensor:
        """Returns KL(N(code, noise^2) || N(0, 1)), summed over the code's numbers [n]: an upper bound of the
        information about the prompt."""
        return (0.5 * (code.square() + self.noise**2 - 1) - math.log(self.noise)).sum(1)

    def _noises(self, seeds: Sequence[int]) -> Tensor:
        """Draws the noise of the code at a temperature of 1, [n, code]."""
        return self.noise * gaussian_noise(list(seeds), CODE, (self.encode.out_features,))
