"""Runs denoising chains with a guided network, and builds rollouts from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from mmrl.policies.diffusion.decisions.records import ImageRecord, decoded_samples, noise_function
from mmrl.policies.diffusion.family import ConditionInputs, Shape
from mmrl.policies.diffusion.prediction import GuidedNetwork
from mmrl.policies.diffusion.settings import Denoising, ImageChain
from mmrl.policies.parts import map_with_checkpointing
from mmrl.rollouts import Prompt, Rollouts
from mmrl.samplers.chain import INITIAL, Chain, Sampler, gaussian_noise, run
from mmrl.samplers.settings import Euler


class Denoiser:
    """Samples latents with a guided network, and decodes them."""

    def __init__(
        self, network: GuidedNetwork, shape: Shape, *, keep_predictions: bool, steps_at_once: int | None
    ) -> None:
        """shape: the shape of latents in rollouts. keep_predictions, steps_at_once: see `DiffusionPolicy`."""
        self.network, self.family, self.denoising, self.shape = network, network.family, network.denoising, shape
        self.keep_predictions, self.steps_at_once = keep_predictions, steps_at_once

    @cached_property
    def sampler(self) -> Sampler:
        """The sampler of rollouts. A policy that learns from demonstrations samples in evaluation only."""
        settings = self.denoising
        steps = settings.steps if isinstance(settings, Denoising) else settings.evaluation_steps
        return self.build_sampler(steps, self.shape)

    def build_sampler(self, steps: int, shape: Shape) -> Sampler:
        """Builds a sampler with `steps` steps for latents of `shape`, with the transition and tail solver of an
        `ImageChain`; with other likelihoods all steps are deterministic."""
        likelihood, grid = self.denoising.likelihood, self.family.grid(steps, shape)
        if isinstance(likelihood, ImageChain):
            return Sampler(grid, likelihood.transition, likelihood.tail, self.family.space)
        return Sampler(grid, None, Euler(), self.family.space)

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        return self.network.device

    def initial_noise(self, seeds: Sequence[int], shape: Shape | None = None) -> Tensor:
        """Returns pure noise, [row, ...]; each row depends only on its seed. shape: the shape of one row; None: as in
        rollouts."""
        return gaussian_noise([int(seed) for seed in seeds], INITIAL, shape or self.shape).to(self.device)

    def sample(
        self,
        sampler: Sampler,
        inputs: Sequence[ConditionInputs],
        seeds: Sequence[int],
        windows: list[list[int]],
        guidance: float,
        shape: Shape | None = None,
    ) -> Chain:
        """Runs full chains from pure noise.

        inputs, seeds: one per row. windows: the stochastic steps of each row; the others are deterministic. guidance:
        the scale. shape: the shape of one row of latents; None: as in rollouts.
        """
        noise, keep = noise_function(seeds, shape or self.shape), self.keep_predictions
        predict = self.network.predictor(sampler, inputs, guidance)
        return run(predict, self.initial_noise(seeds, shape), sampler, windows, noise, keep_predictions=keep)

    def denoise(
        self,
        x: Tensor,
        inputs: Sequence[ConditionInputs],
        windows: list[list[int]],
        seeds: Sequence[int] = (),
        *,
        start: list[int] | None = None,
        stop: list[int] | None = None,
    ) -> Chain:
        """Runs parts of chains with the sampler and guidance of rollouts, from latents x [row, ...] at grid points
        `start` to `stop`, [row] each; None: the first and the last point. inputs, windows, seeds: see `sample`."""
        predict = self.network.predictor(self.sampler, inputs, self.denoising.guidance)
        return run(predict, x, self.sampler, windows, noise_function(seeds, self.shape), start=start, stop=stop)

    def decode(self, latents: Tensor) -> Tensor:
        """Decodes latents to pixels, fp32 on the CPU; see `Family.decode`."""
        return self.family.decode(latents).float().cpu()

    def in_parts(self, compute: Callable[[slice], Tensor], rows: int) -> Tensor:
        """Calls `compute(slice of rows)` for `steps_at_once` of the `rows` rows at a time, and concatenates the
        results. The parts are the same with and without a gradient, so that the ratio of new to old probability is
        exactly 1 before the first update."""
        size = self.steps_at_once or rows
        return torch.cat(
            map_with_checkpointing(compute, [slice(first, first + size) for first in range(0, rows, size)])
        )

    def rollouts(
        self,
        prompts: Sequence[Prompt],
        condition_inputs: Sequence[ConditionInputs],
        group_size: int,
        seeds: Sequence[int],
        chain: Chain,
        windows: list[list[int]],
        decisions: int,
        *,
        decode: bool = True,
    ) -> Rollouts:
        """Builds rollouts from finished chains.

        prompts, condition_inputs, windows: one per row. group_size: adjacent rows of a group. seeds: one per row, of
        the noises with which latents are scored. decisions: number of decisions of a rollout. decode: whether images
        are added to the samples.
        """
        data, x, x_next = chain.final.cpu(), chain.x.cpu(), chain.x_next.cpu()
        predictions = [None] * len(condition_inputs) if chain.v is None else list(chain.v.cpu())
        records = [
            ImageRecord(
                condition_inputs[i],
                int(seed),
                data[i],
                torch.tensor(windows[i], dtype=torch.long),
                x[i],
                x_next[i],
                predictions[i],
            )
            for i, seed in enumerate(seeds)
        ]
        return Rollouts(
            samples=decoded_samples(prompts, self.decode(chain.final) if decode else None),
            inputs=records,
            group=torch.arange(len(prompts)) // group_size,
            mask=torch.ones(len(prompts), decisions, dtype=torch.bool),
        )
