"""Diffusion and flow models as policies: they draw images or videos for prompts, and compute their likelihoods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from mmrl.engine.flops import CallMeter, PolicyWork, Tally
from mmrl.errors import UserError
from mmrl.policies.diffusion.decisions import chain
from mmrl.policies.diffusion.decisions.chain import ChainDecisions
from mmrl.policies.diffusion.decisions.denoiser import Denoiser
from mmrl.policies.diffusion.decisions.last_steps import LastStepDecisions
from mmrl.policies.diffusion.decisions.levels import LevelDecisions
from mmrl.policies.diffusion.decisions.records import decoded_samples
from mmrl.policies.diffusion.family import ConditionInputs, Family, Shape
from mmrl.policies.diffusion.prediction import GuidedNetwork
from mmrl.policies.diffusion.settings import (
    Denoising,
    DenoisingDemonstrations,
    ImageChain,
    ImageContrast,
    ImageLastSteps,
    ImageMatching,
)
from mmrl.policies.models import NetworkCall, TrainingEngine
from mmrl.protocols.teachers import Teachers
from mmrl.rollouts import Prompt, Replay, Rollouts, Sample, require
from mmrl.runtime.files import use_default_mode
from mmrl.samplers.chain import Sampler


class Decisions(Protocol):
    """A kind of decision: draws rollouts of such decisions, and computes their log-likelihoods."""

    @property
    def count(self) -> int:
        """Returns the number of decisions of a rollout."""

    def rollout(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], step: int) -> Rollouts: ...

    def recorded_replay(self, rollouts: Rollouts) -> Replay | None: ...

    def replay(self, rollouts: Rollouts, model: NetworkCall) -> Replay: ...


class DiffusionPolicy:
    """Draws images with a family's network and computes their log-likelihoods.

    With an `ImageChain` a decision is a step of the sampler inside the window; otherwise it is one noise level at
    which the network's prediction is compared with its target. A policy that learns from demonstrations matches them,
    without guidance. Its parts: `network` predicts under guidance, `denoiser` draws with it, `decisions`
    replays.
    """

    def __init__(
        self,
        family: Family,
        denoising: Denoising | DenoisingDemonstrations,
        *,
        keep_predictions: bool = False,
        steps_at_once: int | None = None,
        module: nn.Module | None = None,
    ) -> None:
        """keep_predictions: whether rollouts hold the network's predictions while sampling, for `recorded`. Replay with
        a gradient then takes them for the present weights' values where no old policy's predictions are set.
        steps_at_once: rows per forward of a replay; None: all. module: the network, where it is not the family's.

        Raises UserError for settings that do not fit the family, and for an impossible window."""
        self.family, self.denoising = family, denoising
        self.module = family.module if module is None else module
        self.network = GuidedNetwork(family, denoising, self.module)
        tally = Tally()  # of the network; encoders and decoder are not counted
        CallMeter(self.module, tally)
        unit = "videos" if denoising.frames else "images"
        self.work = PolicyWork([tally], lambda rollouts: {unit: len(rollouts)})
        shape = family.latent_shape(denoising.resolution, denoising.frames)
        self.evaluation_shape: Shape = family.latent_shape(
            denoising.evaluation_resolution or denoising.resolution, denoising.frames
        )
        self.denoiser = Denoiser(self.network, shape, keep_predictions=keep_predictions, steps_at_once=steps_at_once)
        self.decisions = decisions_of(self.denoiser)
        self.teachers = Teachers(self.module)

    @property
    def device(self) -> torch.device:
        return self.network.device

    @property
    def shape(self) -> Shape:
        """The shape of latents in rollouts."""
        return self.denoiser.shape

    @property
    def max_decisions(self) -> int:
        return self.decisions.count

    @property
    def sampler(self) -> Sampler:
        """The sampler of rollouts."""
        return self.denoiser.sampler

    # --- prompts to images ---

    @torch.no_grad()
    def rollout(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], *, step: int = 0) -> Rollouts:
        """Draws `group_size` images of each prompt. seeds: one a rollout, prompt by prompt; a group's window follows
        from its first seed and training step `step`."""
        return self.decisions.rollout(prompts, group_size, seeds, step)

    @torch.no_grad()
    def respond(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Sample]:
        """Draws one image of each prompt by deterministic steps, with the steps, size and guidance of evaluation."""
        settings, inputs = self.denoising, [ConditionInputs.of(p) for p in prompts]
        guidance = settings.guidance if settings.evaluation_guidance is None else settings.evaluation_guidance
        sampler = self.denoiser.sampler_of(settings.evaluation_steps, self.evaluation_shape)
        drawn = self.denoiser.draw(sampler, inputs, seeds, [[]] * len(inputs), guidance, self.evaluation_shape)
        return decoded_samples(prompts, self.denoiser.decode(drawn.final))

    @torch.no_grad()
    def demonstrate(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> Rollouts:
        """Builds rollouts of the images or videos in metadata["target"] ([channel, height, width] or [frame, channel,
        height, width], 0 to 1) of prompts. A share prompt_dropout of them gets the negative prompt instead.

        Raises UserError where decisions are not noise levels, and for a prompt without a target."""
        if not isinstance(self.decisions, LevelDecisions):
            raise UserError(f"denoising.likelihood.type={self.denoising.likelihood.type} scores no given images")
        dropout = self.denoising.prompt_dropout if isinstance(self.denoising, DenoisingDemonstrations) else 0.0
        return self.decisions.demonstrate(prompts, seeds, dropout, self.denoising.negative_prompt)

    def view(self, rollouts: Rollouts, change: Callable[[Prompt], Prompt]) -> Rollouts:
        """Returns the same images under changed prompts, without the log-likelihoods and predictions under their own
        ones."""
        prompts = [change(sample.prompt) for sample in rollouts.samples]
        return replace(
            rollouts,
            samples=[replace(s, prompt=p) for s, p in zip(rollouts.samples, prompts, strict=True)],
            inputs=[
                replace(record, condition_inputs=ConditionInputs.of(p), prediction=None)
                for record, p in zip(rollouts.inputs, prompts, strict=True)
            ],
            old_logp=None,
            old_prediction=None,
            ref_logp=None,
            ref_prediction=None,
        )

    # --- images to likelihoods ---

    def recorded_replay(self, rollouts: Rollouts) -> Replay | None:
        """Returns the replay by the predictions that were kept while sampling; None where none were kept."""
        return self.decisions.recorded_replay(rollouts)

    def replay(self, rollouts: Rollouts, model: NetworkCall, *, reference: bool = False) -> Replay:
        """Computes the log-likelihoods of all decisions under `model` (`self.module` or the engine around it), in one
        forward."""
        return self.decisions.replay(rollouts, model)

    @torch.no_grad()
    def complete_steps(self, rollouts: Rollouts, *, ends: bool = False) -> list[Sample]:
        """Completes every step of the window by deterministic steps, under the guidance of rollouts, from the state
        before it, or with `ends` from the state after it. Returns one image a step, those of the first rollout
        first."""
        return chain.complete_steps(self.denoiser, rollouts, ends=ends)

    def latents(self, rollouts: Rollouts) -> Tensor:
        """Returns [rollout, decision, number]: latents before each step, pooled to at most 8 a side, and their noise
        level."""
        return chain.latents(self.denoiser, rollouts.inputs)

    def segments(self, rollouts: Rollouts) -> Tensor:
        """Returns the chunk of each step, [rollout, decision] int64. Raises ValueError where the chain has none."""
        likelihood = self.denoising.likelihood
        chunks = likelihood.chunks if isinstance(likelihood, ImageChain) else ()
        return require(chain.segment_ids(chunks, len(rollouts)), "denoising.likelihood.chunks")

    def set_engine(self, engine: TrainingEngine) -> None:
        """Does nothing: no part of this policy depends on the engine."""

    def counts(self) -> dict[str, float]:
        """Returns the number of prompts longer than the encoders' token limit since the last call, if there were
        any."""
        return self.network.conditions.counts()

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        self.family.save(folder, state)
        use_default_mode(folder)


def decisions_of(denoiser: Denoiser) -> Decisions:
    """Builds the decisions of the settings' likelihood. Raises UserError for a transition or weight that does not fit
    the model, an impossible window, and a likelihood of an unknown kind."""
    likelihood, denoising = denoiser.denoising.likelihood, denoiser.denoising
    key = "denoising.likelihood" if isinstance(denoising, Denoising) else "denoising"
    if isinstance(likelihood, ImageChain):
        return ChainDecisions(denoiser, likelihood)
    if isinstance(likelihood, ImageLastSteps):
        return LastStepDecisions(denoiser, likelihood)
    if not isinstance(likelihood, ImageMatching | ImageContrast):
        raise UserError(
            f"{key}.type={likelihood.type} inherits from none of ImageChain, ImageMatching, ImageContrast "
            "and ImageLastSteps"
        )
    if denoiser.family.space == "noise" and isinstance(likelihood, ImageMatching) and likelihood.weight == "elbo":
        raise UserError(f"{key}.weight=elbo is for models that predict velocity; use one or sigma")
    return LevelDecisions(denoiser, likelihood)
