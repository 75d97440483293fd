"""Flow-matching action heads: they denoise a chunk of actions from noise (sigma 1) to actions (sigma 0)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor

from mmrl.errors import UserError
from mmrl.policies.vla.heads.head import ActionSampling, EncodedPrefix, Head, SampledChunks
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
    """Samples chunks by denoising, and scores them in one of three ways.

    - `ActionChain`: a decision is a denoising step inside the window, one Gaussian over the whole chunk.
    - `ActionMatching`: the chunk is one decision, whose log-ratio is the decrease of the flow-matching error (FPO,
      arXiv 2507.21053).
    - `ActionContrast`: each noise level is a decision, for the errors of implicit policies (DiffusionNFT, arXiv
      2509.16117).

    `latent` is the shape that is denoised: `shape` [chunk, action], or larger in either dimension where a pretrained
    expert plans more actions or more numbers. Only the part inside `shape` is executed and scored. If an episode ends
    inside a chunk, the executed actions are scored as if they did not depend on the others. That is exact for a window
    of one step and an approximation for longer ones.
    """

    last_layer_only = True

    def __init__(
        self,
        settings: FlowActions | TaughtFlow | FrozenFlow,
        action: Actions,
        action_dim: int,
        state_dim: int,
        latent: tuple[int, int] | None = None,
    ) -> None:
        """latent: the shape that is denoised, see the class; None: `shape`.

        Raises UserError if the window of steps does not fit the sampler, and for a likelihood or a transition that this
        head does not support."""
        super().__init__(action, action_dim, state_dim)
        self.likelihood: ActionLikelihood = settings.likelihood
        self.latent = latent or self.shape
        chain = self.likelihood if isinstance(self.likelihood, ActionChain) else None
        if not isinstance(self.likelihood, self.supported_likelihoods()):
            raise UserError(
                f"action.head.likelihood.type={self.likelihood.type} is not supported by this model's flow head; set "
                "it to chain, matching or contrast"
            )
        if chain is not None and chain.transition.space != "velocity":
            raise UserError(
                f"action.head.likelihood.transition.type={chain.transition.type} is for models that predict noise, but "
                "this head predicts velocity; set it to flow_sde, dance_sde or cps"
            )
        steps = settings.steps if isinstance(settings, FlowActions) else settings.evaluation_steps
        self.sampler = Sampler(grid(steps), None if chain is None else chain.transition)
        self.evaluation_sampler = Sampler(grid(settings.evaluation_steps))
        try:
            # the window has as many steps in every training step and group, so any numbers do
            self._decisions = 1 if chain is None else len(window_steps(chain.window, self.sampler.std, 0, 0))
            if isinstance(self.likelihood, ActionContrast):
                self._decisions = self.likelihood.draws
        except ValueError as error:
            raise UserError(f"action.head.likelihood: {error}") from None

    @classmethod
    def supported_likelihoods(cls) -> tuple[type[ActionLikelihood], ...]:
        """Returns the types of action.head.likelihood that this head supports."""
        return ActionChain, ActionMatching, ActionContrast

    def velocity(self, prefix: EncodedPrefix, state: Tensor, x: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        """Predicts the velocity, shaped like x. x: m noisy chunks [m, *latent]; sigma: their noise levels [m]; rows:
        [m], the row of `prefix` and `state` that each chunk belongs to."""
        raise NotImplementedError

    @property
    def decisions(self) -> int:
        return self._decisions

    def act(self, prefix: EncodedPrefix, state: Tensor, sampling: ActionSampling) -> SampledChunks:
        """Samples chunks by denoising; see `Head.act`. Returns "actions" and the inputs of `score`: the latents before
        and after each step of the window, or the final latents with noise levels at which they are scored."""
        likelihood = self.likelihood
        stochastic = isinstance(likelihood, ActionChain) and sampling.training  # steps inside the window add noise
        windows = self._windows(sampling) if stochastic else [[]] * len(sampling.seeds)
        x = gaussian_noise(list(sampling.seeds), INITIAL, self.latent).to(state.device)
        sampler = self.sampler if sampling.training else self.evaluation_sampler

        def predict(x: Tensor, point: Tensor, rows: Tensor) -> Tensor:
            """Predicts the velocity of latents x [m, *latent] of the chunks `rows` [m] at grid points `point` [m]."""
            return self.velocity(prefix, state, x, sampler.grid.sigmas[point].to(x.device), rows.to(x.device))

        def noise(step: int, rows: Tensor) -> Tensor:
            """Samples the noise of a denoising step for the chunks `rows` [m]: [m, *latent]."""
            return gaussian_noise([sampling.seeds[i] for i in rows.tolist()], step, self.latent)

        chain = run(predict, x, sampler, windows, noise)
        sampled = {"actions": self._executed(chain.final)}
        if isinstance(likelihood, Draws):  # scored later by flow-matching errors at the noise levels sampled here
            return {**sampled, "data": chain.final, **self._sample_noise_levels(likelihood, sampling.seeds)}
        if stochastic:
            sampled |= {"points": torch.tensor(windows), "x": chain.x, "x_next": chain.x_next}
        return sampled

    def score(
        self,
        prefix: EncodedPrefix,
        state: Tensor,
        sampled: SampledChunks,
        valid: Tensor,
        old: Tensor | None,
        reference: Tensor | None,
    ) -> dict[str, Tensor]:
        """Scores chunks as `likelihood` says; see `Head.score`."""
        if isinstance(self.likelihood, ActionChain):
            return self._score_chain(self.likelihood, prefix, state, sampled, valid, old, reference)
        if isinstance(self.likelihood, ActionContrast):
            return self._score_contrast(self.likelihood, prefix, state, sampled, valid, old, reference)
        assert isinstance(self.likelihood, ActionMatching)
        return self._score_matching(self.likelihood, prefix, state, sampled, valid, old, reference)

    def denoise(self, prefix: EncodedPrefix, state: Tensor, x: Tensor) -> Tensor:
        """Denoises noise x [n, *latent] by the deterministic steps of evaluation, and keeps the gradient. Returns
        chunks [n, chunk, action]."""
        rows = torch.arange(len(x), device=x.device)
        for sigma, next_sigma in pairwise(self.evaluation_sampler.grid.sigmas.to(x.device)):
            x = x + (next_sigma - sigma) * self.velocity(prefix, state, x, sigma.expand(len(x)), rows)
        return self._executed(x)

    def _windows(self, sampling: ActionSampling) -> list[list[int]]:
        """Returns the indices of the denoising steps that are scored, for each chunk. They are the same for all chunks
        of a group in a training step."""
        assert isinstance(self.likelihood, ActionChain)
        return [window_steps(self.likelihood.window, self.sampler.std, sampling.step, seed) for seed in sampling.groups]

    def _score_chain(
        self,
        likelihood: ActionChain,
        prefix: EncodedPrefix,
        state: Tensor,
        sampled: SampledChunks,
        valid: Tensor,
        old: Tensor | None,
        reference: Tensor | None,
    ) -> dict[str, Tensor]:
        """Scores the denoising steps of the window in one forward pass. Each step is one decision, so fields are
        [n, step, ...]. Returns fields of `Replay`, and "weight" if steps are weighted.

        old, reference: velocities that the policy predicted when it sampled, and that the reference policy predicts, or
        None. `_executed` cuts latents to the chunk that the robot executes.
        """
        points = sampled["points"].cpu()
        v = self._velocity(prefix, state, sampled["x"], self.sampler.grid.sigmas[points])
        scores = score.chain_likelihood(
            self._executed(v),
            self._executed(sampled["x"]),
            self._executed(sampled["x_next"]),
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
        prefix: EncodedPrefix,
        state: Tensor,
        sampled: SampledChunks,
        valid: Tensor,
        old: Tensor | None,
        reference: Tensor | None,
    ) -> dict[str, Tensor]:
        """Scores the chunk as one decision, by flow-matching errors averaged over the sampled noise levels (draws).
        "prediction" is [n, 1, draw, chunk, action]."""
        sigma = sampled["sigma"]
        x, target = score.noisy_samples(sampled["data"][:, None], sampled["noise"], sigma, "velocity")
        scores = score.matching_likelihood(
            self._executed(self._velocity(prefix, state, x, sigma)),
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
        prefix: EncodedPrefix,
        state: Tensor,
        sampled: SampledChunks,
        valid: Tensor,
        old: Tensor | None,
        reference: Tensor | None,
    ) -> dict[str, Tensor]:
        """Scores flow-matching errors with a decision for each noise level, and adds the fields of
        `rollouts.MatchingTargets`, which are 0 at actions that were not executed."""
        sigma, executed = sampled["sigma"], valid[:, None, :, None]
        x, target = score.noisy_samples(sampled["data"][:, None], sampled["noise"], sigma, "velocity")
        v = self._executed(self._velocity(prefix, state, x, sigma))
        scores = score.matching_likelihood(
            v,
            self._executed(target),
            old=old,
            reference=reference,
            element_mask=executed,
            reduction=likelihood.reduction,
        ).columns
        targets = {
            "noisy": self._executed(x),
            "velocity": v,
            "old_velocity": v.detach() if old is None else old.to(v),
            "data": self._executed(sampled["data"])[:, None].expand_as(v),
        }
        return {**scores, "sigma": sigma.float(), **{name: value.where(executed, 0) for name, value in targets.items()}}

    def _velocity(self, prefix: EncodedPrefix, state: Tensor, x: Tensor, sigma: Tensor) -> Tensor:
        """Predicts the velocity of k noisy chunks of each observation in one forward pass. x: [n, k, *latent]; sigma:
        [n, k]. Returns a tensor like x."""
        n, k = sigma.shape
        rows = torch.arange(n, device=x.device).repeat_interleave(k)
        return self.velocity(prefix, state, x.flatten(0, 1), sigma.flatten().to(x.device), rows).view_as(x)

    def _executed(self, latent: Tensor) -> Tensor:
        """Cuts latents [..., *latent] to the part that the robot executes, [..., chunk, action]."""
        return latent[..., : self.shape[0], : self.shape[1]].contiguous()

    def encode_demonstrations(self, actions: Tensor, seeds: Sequence[int]) -> SampledChunks:
        """Pads demonstrated chunks to the shape `latent`, by repeating the last action and appending zeros to each
        action, and samples the noise levels of the flow-matching error."""
        assert isinstance(self.likelihood, ActionMatching)
        extra_actions, extra_numbers = (latent - shape for latent, shape in zip(self.latent, self.shape, strict=True))
        data = F.pad(torch.cat([actions, actions[:, -1:].expand(-1, extra_actions, -1)], 1), (0, extra_numbers))
        return {"actions": actions, "data": data, **self._sample_noise_levels(self.likelihood, seeds)}

    def _sample_noise_levels(self, likelihood: Draws, seeds: Sequence[int]) -> SampledChunks:
        """Samples "sigma" [n, draw] and "noise" [n, draw, *latent], which are stored, so that every pass scores a chunk
        at the same noise levels. These are 0.001 + 0.999 b, b of Beta(1.5, 1), as in pi0, so that most are high."""
        uniform = torch.stack([score.stratified(seed, likelihood.draws) for seed in seeds])
        noise = score.draw_noises(seeds, likelihood.draws, self.latent)
        beta = uniform ** (2 / 3)  # the inverse of the cumulative function of Beta(1.5, 1), u = b^1.5
        return {"sigma": 0.001 + 0.999 * beta, "noise": noise}


class ExpertHead(FlowHead):
    """A flow head whose action expert, a transformer, attends to the prefix's last layer (as pi0, arXiv 2410.24164).

    With `LearnedNoise` the expert also predicts the standard deviation of each denoising step, and the whole chain of
    steps is one decision (ReinFlow, arXiv 2505.22094)."""

    optional_parameters = ("expert.spread.",)  # absent in flows that learned from demonstrations

    def __init__(
        self,
        settings: FlowActions | TaughtFlow | FrozenFlow,
        action: Actions,
        action_dim: int,
        state_dim: int,
        width: int,
    ) -> None:
        """width: size of the backbone's hidden states."""
        super().__init__(settings, action, action_dim, state_dim)
        learned = isinstance(self.likelihood, LearnedNoise)
        self.expert = Expert(*self.shape, self.state_dim, width, settings.width, settings.depth, learned)

    @classmethod
    def supported_likelihoods(cls) -> tuple[type[ActionLikelihood], ...]:
        return *super().supported_likelihoods(), LearnedNoise

    def velocity(self, prefix: EncodedPrefix, state: Tensor, x: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        return self._run_expert(prefix, state, x, sigma, rows)[0].float()

    def act(self, prefix: EncodedPrefix, state: Tensor, sampling: ActionSampling) -> SampledChunks:
        if isinstance(self.likelihood, LearnedNoise) and sampling.training:
            return self._act_learned(self.likelihood, prefix, state, sampling.seeds)
        return super().act(prefix, state, sampling)

    def score(
        self,
        prefix: EncodedPrefix,
        state: Tensor,
        sampled: SampledChunks,
        valid: Tensor,
        old: Tensor | None,
        reference: Tensor | None,
    ) -> dict[str, Tensor]:
        """Scores chunks as `likelihood` says; see `Head.score`. `LearnedNoise` needs neither `old` nor `reference`."""
        if isinstance(self.likelihood, LearnedNoise):
            return self._score_learned(self.likelihood, prefix, state, sampled, valid)
        return super().score(prefix, state, sampled, valid, old, reference)

    def _run_expert(
        self, prefix: EncodedPrefix, state: Tensor, x: Tensor, sigma: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the velocity, and the learned log standard deviation scaled to (-1, 1) or None, both shaped like x;
        see `velocity` and `Expert`."""
        return self.expert(x, sigma, state[rows], prefix.hidden[rows], prefix.mask[rows].bool())

    def _act_learned(
        self, likelihood: LearnedNoise, prefix: EncodedPrefix, state: Tensor, seeds: Sequence[int]
    ) -> SampledChunks:
        """Samples denoising chains with learned noise. Returns "actions" [n, chunk, action] and "chain", the latents of
        all steps, [n, step + 1, chunk, action]."""
        x = gaussian_noise(list(seeds), INITIAL, self.shape).to(state.device)
        rows = torch.arange(len(x), device=x.device)
        chain = [x]
        for k in range(len(self.sampler.grid)):
            point = torch.full((len(x),), k)
            mean, std = self._learned_step(likelihood, prefix, state, chain[-1], point, rows)
            chain.append(mean + std * gaussian_noise(list(seeds), k, self.shape).to(x.device))
        return {"actions": chain[-1], "chain": torch.stack(chain, 1)}

    def _learned_step(
        self, likelihood: LearnedNoise, prefix: EncodedPrefix, state: Tensor, x: Tensor, point: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns mean and standard deviation of the next latent, shaped like x. The mean is an Euler step, the
        standard deviation is learned. x: latents [m, chunk, action]; point: their grid points [m]; rows: as for
        `velocity`."""
        sigmas = self.sampler.grid.sigmas
        v, scaled_log_std = self._run_expert(prefix, state, x, sigmas[point].to(x.device), rows)
        assert scaled_log_std is not None
        dt = (sigmas[point + 1] - sigmas[point]).to(x.device)[:, None, None]
        low, high = (math.log(bound) for bound in likelihood.range)
        return x + dt * v.float(), torch.exp(low + (scaled_log_std.float() + 1) / 2 * (high - low))

    def _score_learned(
        self, likelihood: LearnedNoise, prefix: EncodedPrefix, state: Tensor, sampled: SampledChunks, valid: Tensor
    ) -> dict[str, Tensor]:
        """Returns log-probability and entropy of the sampled chains under Gaussian steps with learned noise, [n, 1]
        each, reduced over executed actions and denoising steps."""
        chain = sampled["chain"]
        n, k = len(chain), chain.shape[1] - 1
        x, x_next = (rearrange(part, "n k c a -> (n k) c a") for part in (chain[:, :-1], chain[:, 1:]))
        point = torch.arange(k).repeat(n)
        rows = torch.arange(n, device=x.device).repeat_interleave(k)
        mean, std = self._learned_step(likelihood, prefix, state, x, point, rows)
        executed = repeat(valid, "n c -> (n k) c 1", k=k)
        logp = -((x_next - mean) / std).square() / 2 - std.log() - 0.5 * math.log(2 * math.pi)
        entropy = std.log() + 0.5 * math.log(2 * math.pi * math.e)

        def reduce_chain(values: Tensor) -> Tensor:
            """Reduces values [n x step, chunk, action] to [n, 1]."""
            by_step = reduce_elements(values.where(executed, 0), likelihood.reduction).view(n, k)
            return (by_step.mean(1) if likelihood.reduction == "mean" else by_step.sum(1))[:, None]

        return {"logp": reduce_chain(logp), "entropy": reduce_chain(entropy)}


def grid(steps: int) -> Grid:
    """Returns the noise levels of `steps` denoising steps, evenly spaced from 1 to 0."""
    sigmas = linear(steps)
    return Grid(sigmas, sigmas[:-1])
