"""Heads that denoise a chunk of actions: velocities of a flow from noise (sigma 1) to actions (sigma 0)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor

from mmrl.errors import UserError
from mmrl.policies.vla.heads.head import ActionSampling, Chosen, Head, Reading
from mmrl.policies.vla.heads.layers import Expert
from mmrl.policies.vla.settings import (
    ActionChain,
    ActionContrast,
    ActionLikelihood,
    ActionMatching,
    Actions,
    FlowActions,
    FrozenFlow,
    LearnedNoise,
    TaughtFlow,
)
from mmrl.samplers import score
from mmrl.samplers.chain import INITIAL, Sampler, gaussian_noise, run
from mmrl.samplers.settings import Draws
from mmrl.samplers.sigmas import Grid, linear
from mmrl.samplers.transitions import reduce_elements
from mmrl.samplers.windows import window_steps


class FlowHead(Head):
    """A head that denoises. `latent`: shape that is denoised, [chunk, action] or larger in either dimension.

    With an `ActionChain` a decision is a step of the sampler inside the window, one Gaussian of the whole chunk. With
    an `ActionMatching` the chunk is one decision whose log-ratio is the fall of the flow-matching error (FPO, arXiv
    2507.21053). With an `ActionContrast` every noise level is a decision, for errors of implicit policies
    (DiffusionNFT, arXiv 2509.16117). Only the chunk's own actions are executed, and only they count. Where an episode
    ended inside a chunk, the executed actions are scored as if they did not depend on the others, which is exact for a
    window of one step and an approximation for more.
    """

    context_only = True

    def __init__(
        self,
        settings: FlowActions | TaughtFlow | FrozenFlow,
        action: Actions,
        action_dim: int,
        state_dim: int,
        latent: tuple[int, int] | None = None,
    ) -> None:
        """Raises UserError for an impossible window, and a likelihood or transition that this head does not support."""
        super().__init__(action, action_dim, state_dim)
        self.likelihood: ActionLikelihood = settings.likelihood
        self.latent = latent or self.shape
        chain = self.likelihood if isinstance(self.likelihood, ActionChain) else None
        if not isinstance(self.likelihood, self.supported_likelihoods()):
            raise UserError(
                f"action.head.likelihood.type={self.likelihood.type} is not for this policy; use chain, matching or "
                "contrast"
            )
        if chain is not None and chain.transition.space != "velocity":
            raise UserError(
                f"action.head.likelihood.transition.type={chain.transition.type} is for models that predict noise; use "
                "flow_sde, dance_sde or cps"
            )
        steps = settings.steps if isinstance(settings, FlowActions) else settings.evaluation_steps
        self.sampler = Sampler(grid(steps), None if chain is None else chain.transition)
        self.evaluation_sampler = Sampler(grid(settings.evaluation_steps))
        try:
            self._decisions = 1 if chain is None else len(window_steps(chain.window, self.sampler.std, 0, 0))
            if isinstance(self.likelihood, ActionContrast):
                self._decisions = self.likelihood.draws
        except ValueError as error:
            raise UserError(f"action.head.likelihood: {error}") from None

    @classmethod
    def supported_likelihoods(cls) -> tuple[type[ActionLikelihood], ...]:
        return ActionChain, ActionMatching, ActionContrast

    def velocity(self, reading: Reading, state: Tensor, x: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        """Returns the velocity of noisy chunks x [m, *latent] at noise levels sigma [m], each for the observation in
        `rows` [m]; like x."""
        raise NotImplementedError

    @property
    def decisions(self) -> int:
        return self._decisions

    def act(self, reading: Reading, state: Tensor, sampling: ActionSampling) -> Chosen:
        likelihood = self.likelihood
        drawn = isinstance(likelihood, ActionChain) and sampling.training  # else the steps have no noise
        windows = self._windows(sampling) if drawn else [[]] * len(sampling.seeds)
        x = gaussian_noise(list(sampling.seeds), INITIAL, self.latent).to(state.device)
        sampler = self.sampler if sampling.training else self.evaluation_sampler

        def predict(x: Tensor, point: Tensor, rows: Tensor) -> Tensor:
            return self.velocity(reading, state, x, sampler.grid.sigmas[point].to(x.device), rows.to(x.device))

        def noise(step: int, rows: Tensor) -> Tensor:
            return gaussian_noise([sampling.seeds[i] for i in rows.tolist()], step, self.latent)

        chain = run(predict, x, sampler, windows, noise)
        chosen = {"actions": self._executed(chain.final)}
        if isinstance(likelihood, Draws):  # a flow-matching loss on the chunk, at noise levels drawn now
            return {**chosen, "data": chain.final, **self._draw_levels(likelihood, sampling.seeds)}
        if drawn:
            chosen |= {"points": torch.tensor(windows), "x": chain.x, "x_next": chain.x_next}
        return chosen

    def score(
        self,
        reading: Reading,
        state: Tensor,
        chosen: Chosen,
        valid: Tensor,
        old: Tensor | None,
        reference: Tensor | None,
    ) -> dict[str, Tensor]:
        if isinstance(self.likelihood, ActionChain):
            return self._score_chain(self.likelihood, reading, state, chosen, valid, old, reference)
        if isinstance(self.likelihood, ActionContrast):
            return self._score_contrast(self.likelihood, reading, state, chosen, valid, old, reference)
        assert isinstance(self.likelihood, ActionMatching)
        return self._score_matching(self.likelihood, reading, state, chosen, valid, old, reference)

    def denoised(self, reading: Reading, state: Tensor, x: Tensor) -> Tensor:
        """Returns the chunks [n, chunk, action] that the steps of evaluation, which draw nothing, make of noise x [n,
        *latent], with its gradient."""
        rows = torch.arange(len(x), device=x.device)
        for now, after in pairwise(self.evaluation_sampler.grid.sigmas.to(x.device)):
            x = x + (after - now) * self.velocity(reading, state, x, now.expand(len(x)), rows)
        return self._executed(x)

    def _windows(self, sampling: ActionSampling) -> list[list[int]]:
        """Returns the scored steps of each chunk, the same for all policy steps of a group in a training step."""
        assert isinstance(self.likelihood, ActionChain)
        return [window_steps(self.likelihood.window, self.sampler.std, sampling.step, seed) for seed in sampling.groups]

    def _score_chain(
        self,
        likelihood: ActionChain,
        reading: Reading,
        state: Tensor,
        chosen: Chosen,
        valid: Tensor,
        old: Tensor | None,
        reference: Tensor | None,
    ) -> dict[str, Tensor]:
        """Scores all steps of the window in one pass of the expert."""
        points = chosen["points"].cpu()
        v = self._velocity(reading, state, chosen["x"], self.sampler.grid.sigmas[points])
        scores = score.chain_likelihood(
            self._executed(v),
            self._executed(chosen["x"]),
            self._executed(chosen["x_next"]),
            self.sampler.stochastic_coefficients(points),
            old=old,
            reference=reference,
            element_mask=valid[:, None, :, None],
            reduction=likelihood.reduction,
            unscaled=likelihood.transition.unscaled,
        )
        weights = score.step_weights(likelihood.step_weight, self.sampler, likelihood.window)
        return scores.columns | ({} if weights is None else {"weight": weights[points].to(v.device)})

    def _score_matching(
        self,
        likelihood: ActionMatching,
        reading: Reading,
        state: Tensor,
        chosen: Chosen,
        valid: Tensor,
        old: Tensor | None,
        reference: Tensor | None,
    ) -> dict[str, Tensor]:
        """Scores the chunk as one decision, the mean over all draws; "prediction" is [n, 1, draw, chunk, action]."""
        sigma = chosen["sigma"]
        x, target = score.noisy_samples(chosen["data"][:, None], chosen["noise"], sigma, "velocity")
        scores = score.matching_likelihood(
            self._executed(self._velocity(reading, state, x, sigma)),
            self._executed(target),
            old=None if old is None else old[:, 0],
            reference=None if reference is None else reference[:, 0],
            element_mask=valid[:, None, :, None],
            reduction=likelihood.reduction,
        ).columns
        prediction = scores.pop("prediction")[:, None]
        return {"prediction": prediction, **{name: value.mean(1, keepdim=True) for name, value in scores.items()}}

    def _score_contrast(
        self,
        likelihood: ActionContrast,
        reading: Reading,
        state: Tensor,
        chosen: Chosen,
        valid: Tensor,
        old: Tensor | None,
        reference: Tensor | None,
    ) -> dict[str, Tensor]:
        """Adds the fields of `rollouts.MatchingTargets`, 0 where an action was not executed, so that its error is 0
        too."""
        sigma, counted = chosen["sigma"], valid[:, None, :, None]
        x, target = score.noisy_samples(chosen["data"][:, None], chosen["noise"], sigma, "velocity")
        v = self._executed(self._velocity(reading, state, x, sigma))
        scores = score.matching_likelihood(
            v,
            self._executed(target),
            old=old,
            reference=reference,
            element_mask=counted,
            reduction=likelihood.reduction,
        ).columns
        matched = {
            "noisy": self._executed(x),
            "velocity": v,
            "old_velocity": v.detach() if old is None else old.to(v),
            "data": self._executed(chosen["data"])[:, None].expand_as(v),
        }
        return {**scores, "sigma": sigma.float(), **{name: part.where(counted, 0) for name, part in matched.items()}}

    def _velocity(self, reading: Reading, state: Tensor, x: Tensor, sigma: Tensor) -> Tensor:
        """Returns the velocity of noisy chunks x [n, k, *latent] of n observations, at noise levels sigma [n, k], in
        one pass."""
        n, k = sigma.shape
        rows = torch.arange(n, device=x.device).repeat_interleave(k)
        return self.velocity(reading, state, x.flatten(0, 1), sigma.flatten().to(x.device), rows).view_as(x)

    def _executed(self, latent: Tensor) -> Tensor:
        """Returns the executed part [..., chunk, action] of latents [..., *latent]."""
        return latent[..., : self.shape[0], : self.shape[1]].contiguous()

    def teach(self, actions: Tensor, seeds: Sequence[int]) -> Chosen:
        """Pads demonstrated chunks to latents: further actions repeat the last one, further numbers are 0."""
        assert isinstance(self.likelihood, ActionMatching)
        longer, wider = (inner - outer for inner, outer in zip(self.latent, self.shape, strict=True))
        data = torch.cat([actions, actions[:, -1:].expand(-1, longer, -1)], 1)
        return {"actions": actions, "data": F.pad(data, (0, wider)), **self._draw_levels(self.likelihood, seeds)}

    def _draw_levels(self, likelihood: Draws, seeds: Sequence[int]) -> Chosen:
        """Draws noise levels and noises, the same whenever a chunk is scored. Levels are Beta(1.5, 1) as in pi0, with
        more of them at high noise."""
        uniform = torch.stack([score.stratified(seed, likelihood.draws) for seed in seeds])
        noise = score.draw_noises(seeds, likelihood.draws, self.latent)
        return {"sigma": 0.001 + 0.999 * uniform ** (2 / 3), "noise": noise}


class ExpertHead(FlowHead):
    """A flow head with an expert of its own, which attends to the prompt's last layer (as pi0, arXiv 2410.24164). With
    `LearnedNoise` a network predicts the standard deviation of each step, and the whole chain is one decision
    (ReinFlow, arXiv 2505.22094)."""

    new_parts = ("expert.spread.",)  # absent in flows that learned from demonstrations

    def __init__(
        self,
        settings: FlowActions | TaughtFlow | FrozenFlow,
        action: Actions,
        action_dim: int,
        state_dim: int,
        width: int,
    ) -> None:
        """width: of the backbone."""
        super().__init__(settings, action, action_dim, state_dim)
        learned = isinstance(self.likelihood, LearnedNoise)
        self.expert = Expert(*self.shape, self.state_dim, width, settings.width, settings.depth, learned)

    @classmethod
    def supported_likelihoods(cls) -> tuple[type[ActionLikelihood], ...]:
        return *super().supported_likelihoods(), LearnedNoise

    def velocity(self, reading: Reading, state: Tensor, x: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        return self._run_expert(reading, state, x, sigma, rows)[0].float()

    def act(self, reading: Reading, state: Tensor, sampling: ActionSampling) -> Chosen:
        if isinstance(self.likelihood, LearnedNoise) and sampling.training:
            return self._act_learned(self.likelihood, reading, state, sampling.seeds)
        return super().act(reading, state, sampling)

    def score(
        self,
        reading: Reading,
        state: Tensor,
        chosen: Chosen,
        valid: Tensor,
        old: Tensor | None,
        reference: Tensor | None,
    ) -> dict[str, Tensor]:
        if isinstance(self.likelihood, LearnedNoise):
            return self._score_learned(self.likelihood, reading, state, chosen, valid)
        return super().score(reading, state, chosen, valid, old, reference)

    def _run_expert(
        self, reading: Reading, state: Tensor, x: Tensor, sigma: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        return self.expert(x, sigma, state[rows], reading.hidden[rows], reading.mask[rows].bool())

    def _act_learned(self, likelihood: LearnedNoise, reading: Reading, state: Tensor, seeds: Sequence[int]) -> Chosen:
        """Samples denoising chains with learned noise: actions [n, chunk, action] and chain [n, step + 1, chunk,
        action]."""
        x = gaussian_noise(list(seeds), INITIAL, self.shape).to(state.device)
        rows = torch.arange(len(x), device=x.device)
        chain = [x]
        for k in range(len(self.sampler.grid)):
            point = torch.full((len(x),), k)
            mean, std = self._learned_step(likelihood, reading, state, chain[-1], point, rows)
            chain.append(mean + std * gaussian_noise(list(seeds), k, self.shape).to(x.device))
        return {"actions": chain[-1], "chain": torch.stack(chain, 1)}

    def _learned_step(
        self, likelihood: LearnedNoise, reading: Reading, state: Tensor, x: Tensor, point: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns mean and std, like x, of the steps from grid points `point` [n]: Euler's mean, the network's std."""
        sigmas = self.sampler.grid.sigmas
        v, wide = self._run_expert(reading, state, x, sigmas[point].to(x.device), rows)
        assert wide is not None
        dt = (sigmas[point + 1] - sigmas[point]).to(x.device)[:, None, None]
        low, high = (math.log(bound) for bound in likelihood.range)
        return x + dt * v.float(), torch.exp(low + (wide.float() + 1) / 2 * (high - low))

    def _score_learned(
        self, likelihood: LearnedNoise, reading: Reading, state: Tensor, chosen: Chosen, valid: Tensor
    ) -> dict[str, Tensor]:
        """Scores denoising chains under a Gaussian with learned noise: log-probability and entropy, both [n, 1],
        reduced over executed actions and denoising steps. valid: [n, chunk]."""
        chain = chosen["chain"]
        n, k = len(chain), chain.shape[1] - 1
        x, x_next = (rearrange(part, "n k c a -> (n k) c a") for part in (chain[:, :-1], chain[:, 1:]))
        point = torch.arange(k).repeat(n)
        rows = torch.arange(n, device=x.device).repeat_interleave(k)
        mean, std = self._learned_step(likelihood, reading, state, x, point, rows)
        executed = repeat(valid, "n c -> (n k) c 1", k=k)
        logp = -((x_next - mean) / std).square() / 2 - std.log() - 0.5 * math.log(2 * math.pi)
        entropy = std.log() + 0.5 * math.log(2 * math.pi * math.e)

        def reduce_chain(values: Tensor) -> Tensor:
            rows = reduce_elements(values.where(executed, 0), likelihood.reduction).view(n, k)
            return (rows.mean(1) if likelihood.reduction == "mean" else rows.sum(1))[:, None]

        return {"logp": reduce_chain(logp), "entropy": reduce_chain(entropy)}


def grid(steps: int) -> Grid:
    sigmas = linear(steps)
    return Grid(sigmas, sigmas[:-1])
