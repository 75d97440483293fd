"""Diffusion and flow models as policies: they sample images or videos for prompts, and compute their likelihoods."""

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
from mmrl.runtime.files import use_default_permissions
from mmrl.samplers.chain import Sampler


class Decisions(Protocol):
    """One way to see an image as decisions: samples rollouts, and computes log-likelihoods of their decisions.

    Implemented by `ChainDecisions`, `LevelDecisions` and `LastStepDecisions`; see `DiffusionPolicy` for the methods.
    """

    @property
    def count(self) -> int:
        """The number of decisions of a rollout."""

    def rollout(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], step: int) -> Rollouts: ...

    def recorded_replay(self, rollouts: Rollouts) -> Replay | None: ...

    def replay(self, rollouts: Rollouts, model: NetworkCall) -> Replay: ...


class DiffusionPolicy:
    """Samples images with the network of a model family, and computes their log-likelihoods.

    The setting `denoising.likelihood` says what a decision is: a denoising step inside the window (`ImageChain`), a
    noise level at which the prediction is compared with its target (`ImageMatching`, `ImageContrast`), or the image
    itself (`ImageLastSteps`). Demonstrations are learned by matching, without guidance. Parts: `network` predicts under
    guidance, `denoiser` runs denoising chains with it, `decisions` computes likelihoods.
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
        """keep_predictions: rollouts keep the predictions of sampling, for `recorded_replay`. Before the first update,
        replay with a gradient takes them as the values of its own predictions. steps_at_once: rows per forward pass of
        a replay; None: all. module: the network; None: the network of `family`.

        Raises UserError for settings that do not fit the family, and for a window that does not fit the steps.
        """
        self.family, self.denoising = family, denoising
        self.module = family.module if module is None else module
        self.network = GuidedNetwork(family, denoising, self.module)
        tally = Tally()  # FLOPs of the network; those of encoders and decoder are not counted
        CallMeter(self.module, tally)  # hooks itself into the network
        unit = "videos" if denoising.frames else "images"
        self.work = PolicyWork([tally], lambda rollouts: {unit: len(rollouts)})
        shape = family.latent_shape(denoising.resolution, denoising.frames)
        self.evaluation_shape: Shape = family.latent_shape(
            denoising.evaluation_resolution or denoising.resolution, denoising.frames
        )
        self.denoiser = Denoiser(self.network, shape, keep_predictions=keep_predictions, steps_at_once=steps_at_once)
        self.decisions = build_decisions(self.denoiser)
        self.teachers = Teachers(self.module)

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        return self.network.device

    @property
    def shape(self) -> Shape:
        """The shape of latents in rollouts."""
        return self.denoiser.shape

    @property
    def max_decisions(self) -> int:
        """The number of decisions of a rollout."""
        return self.decisions.count

    @property
    def sampler(self) -> Sampler:
        """The sampler of rollouts."""
        return self.denoiser.sampler

    # --- prompts to images ---

    @torch.no_grad()
    def rollout(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], *, step: int = 0) -> Rollouts:
        """Samples `group_size` images per prompt. seeds: one per rollout, prompt by prompt. step: the training step;
        the window of a group depends on it and on the group's first seed."""
        return self.decisions.rollout(prompts, group_size, seeds, step)

    @torch.no_grad()
    def respond(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Sample]:
        """Samples one image per prompt by deterministic steps, with the steps, size and guidance of evaluation."""
        settings, inputs = self.denoising, [ConditionInputs.from_prompt(p) for p in prompts]
        guidance = settings.guidance if settings.evaluation_guidance is None else settings.evaluation_guidance
        sampler = self.denoiser.build_sampler(settings.evaluation_steps, self.evaluation_shape)
        windows: list[list[int]] = [[]] * len(inputs)
        chains = self.denoiser.sample(sampler, inputs, seeds, windows, guidance, self.evaluation_shape)
        return decoded_samples(prompts, self.denoiser.decode(chains.final))

    @torch.no_grad()
    def demonstrate(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> Rollouts:
        """Returns rollouts of the images or videos in metadata["target"] of prompts, for supervised fine-tuning.

        A target is [channel, height, width] or [frame, channel, height, width], from 0 to 1. With probability
        `prompt_dropout` a prompt is replaced by the negative prompt. Raises UserError if decisions are not noise
        levels, and for a prompt without a target.
        """
        if not isinstance(self.decisions, LevelDecisions):
            raise UserError(
                f"denoising.likelihood.type={self.denoising.likelihood.type} cannot score given images "
                "(demonstrations); set it to matching"
            )
        dropout = self.denoising.prompt_dropout if isinstance(self.denoising, DenoisingDemonstrations) else 0.0
        return self.decisions.demonstrate(prompts, seeds, dropout, self.denoising.negative_prompt)

    def view(self, rollouts: Rollouts, change: Callable[[Prompt], Prompt]) -> Rollouts:
        """Returns the same images with changed prompts. Log-likelihoods and predictions under the old prompts are
        removed."""
        prompts = [change(sample.prompt) for sample in rollouts.samples]
        return replace(
            rollouts,
            samples=[replace(s, prompt=p) for s, p in zip(rollouts.samples, prompts, strict=True)],
            inputs=[
                replace(record, condition_inputs=ConditionInputs.from_prompt(p), prediction=None)
                for record, p in zip(rollouts.inputs, prompts, strict=True)
            ],
            old_logp=None,
            old_prediction=None,
            ref_logp=None,
            ref_prediction=None,
        )

    # --- images to likelihoods ---

    def recorded_replay(self, rollouts: Rollouts) -> Replay | None:
        """Returns the replay from the predictions that sampling kept, without a forward pass; None if it kept none."""
        return self.decisions.recorded_replay(rollouts)

    def replay(self, rollouts: Rollouts, model: NetworkCall, *, reference: bool = False) -> Replay:
        """Returns the log-likelihoods of all decisions under `model`: `self.module`, or the engine that wraps it."""
        return self.decisions.replay(rollouts, model)

    @torch.no_grad()
    def complete_steps(self, rollouts: Rollouts, *, ends: bool = False) -> list[Sample]:
        """Denoises the state before each step of the window (after it, if `ends`) to an image by deterministic steps,
        with the guidance of rollouts. Returns one image per rollout and step, rollout by rollout."""
        return chain.complete_steps(self.denoiser, rollouts, ends=ends)

    def latents(self, rollouts: Rollouts) -> Tensor:
        """Returns the inputs of a value function, [rollout, decision, feature]: the latents before each step, pooled to
        at most 8 x 8 and flattened, and their noise level."""
        return chain.latents(self.denoiser, rollouts.inputs)

    def segments(self, rollouts: Rollouts) -> Tensor:
        """Returns the index of the chunk to which each step belongs, [rollout, decision] int64. Raises ValueError if
        there are no chunks."""
        likelihood = self.denoising.likelihood
        chunks = likelihood.chunks if isinstance(likelihood, ImageChain) else ()
        return require(chain.segment_ids(chunks, len(rollouts)), "denoising.likelihood.chunks")

    def set_engine(self, engine: TrainingEngine) -> None:
        """Does nothing: no part of this policy depends on the engine."""

    def counts(self) -> dict[str, float]:
        """Returns the number of prompts since the last call that were longer than the encoders' token limit, if any."""
        return self.network.conditions.counts()

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Saves the trained weights in the format of diffusers. state: the gathered state dict of `self.module`."""
        self.family.save(folder, state)
        use_default_permissions(folder)


def build_decisions(denoiser: Denoiser) -> Decisions:
    """Builds the decisions that `denoising.likelihood` names. Raises UserError for a transition or weight that does not
    fit the model, a window that does not fit the steps, and a likelihood that is none of the known classes."""
    likelihood, denoising = denoiser.denoising.likelihood, denoiser.denoising
    key = "denoising.likelihood" if isinstance(denoising, Denoising) else "denoising"
    if isinstance(likelihood, ImageChain):
        return ChainDecisions(denoiser, likelihood)
    if isinstance(likelihood, ImageLastSteps):
        return LastStepDecisions(denoiser, likelihood)
    if not isinstance(likelihood, ImageMatching | ImageContrast):
        raise UserError(
            f"{key}.type={likelihood.type} is not a subclass of ImageChain, ImageMatching, ImageContrast or "
            "ImageLastSteps; derive it from one of these"
        )
    if denoiser.family.space == "noise" and isinstance(likelihood, ImageMatching) and likelihood.weight == "elbo":
        raise UserError(
            f"{key}.weight=elbo is for models that predict velocity, but the model at model.path predicts noise; set "
            "it to one or sigma"
        )
    return LevelDecisions(denoiser, likelihood)
