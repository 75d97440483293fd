"""Diffusion and flow models as policies: prompts to images and clips, and these to likelihoods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from mmrl.errors import UserError
from mmrl.policies.diffusion.decisions import chain
from mmrl.policies.diffusion.decisions.chain import ChainDecisions
from mmrl.policies.diffusion.decisions.denoiser import Denoiser
from mmrl.policies.diffusion.decisions.last_steps import LastStepDecisions
from mmrl.policies.diffusion.decisions.levels import LevelDecisions
from mmrl.policies.diffusion.decisions.records import made_samples
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
from mmrl.rollouts import Prompt, Replay, Rollouts, Sample
from mmrl.runtime.files import share
from mmrl.samplers.chain import Sampler


class Decisions(Protocol):
    """What decisions are: how rollouts are made of them, and how likely they were."""

    @property
    def count(self) -> int:
        """Decisions of a rollout."""

    def rollout(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], step: int) -> Rollouts: ...

    def recorded(self, rollouts: Rollouts) -> Replay | None: ...

    def replay(self, rollouts: Rollouts, model: NetworkCall) -> Replay: ...


class DiffusionPolicy:
    """Draws images with a family's network and says how likely they were.

    With a `ImageChain` a decision is a step of the sampler inside the window; otherwise it is one noise level at
    which the final image is compared with what the network makes of it. A policy that learns from demonstrations
    matches them, without guidance. Its parts: `network` predicts under guidance, `denoiser` draws with it, `decisions`
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
        """keep_predictions: whether rollouts hold what the network said when they were made, for `recorded`. A gradient
        of rollouts without an old policy's predictions is then one by the weights that made them. steps_at_once: rows
        that the network is given at once when rollouts are replayed; None: all. module: where it is not the family's.

        Raises UserError for settings that the family does not fit, and for a window that can not be."""
        self.family, self.denoising = family, denoising
        self.module = family.module if module is None else module
        self.network = GuidedNetwork(family, denoising, self.module)
        shape = family.latent_shape(denoising.resolution, denoising.frames)
        self.evaluation_shape: Shape = family.latent_shape(
            denoising.evaluation_resolution or denoising.resolution, denoising.frames
        )
        self.denoiser = Denoiser(self.network, shape, keep_predictions=keep_predictions, steps_at_once=steps_at_once)
        self.decisions = decisions_of(self.denoiser)

    @property
    def device(self) -> torch.device:
        return self.network.device

    @property
    def shape(self) -> Shape:
        """Of the latents of rollouts."""
        return self.denoiser.shape

    @property
    def max_decisions(self) -> int:
        return self.decisions.count

    @property
    def sampler(self) -> Sampler:
        """Of rollouts."""
        return self.denoiser.sampler

    # --- prompts to images ---

    @torch.no_grad()
    def rollout(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], *, step: int = 0) -> Rollouts:
        """Draw `group_size` images a prompt. seeds: one a rollout, prompt by prompt; the window of a group is that of
        its first seed and of training step `step`."""
        return self.decisions.rollout(prompts, group_size, seeds, step)

    @torch.no_grad()
    def respond(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Sample]:
        """One image a prompt without noise in its chain, with the steps, size and guidance of evaluation."""
        settings, said = self.denoising, [ConditionInputs.of(p) for p in prompts]
        guidance = settings.guidance if settings.evaluation_guidance is None else settings.evaluation_guidance
        sampler = self.denoiser.sampler_of(settings.evaluation_steps, self.evaluation_shape)
        drawn = self.denoiser.draw(sampler, said, seeds, [[]] * len(said), guidance, self.evaluation_shape)
        return made_samples(prompts, self.denoiser.decode(drawn.final))

    @torch.no_grad()
    def demonstrate(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> Rollouts:
        """The images or clips that prompts carry in metadata["target"] ([channel, height, width] or [frame, channel,
        height, width], 0 to 1), some of them without the words of their prompt."""
        if not isinstance(self.decisions, LevelDecisions):
            raise UserError(f"denoising.likelihood.type={self.denoising.likelihood.type} scores no given images")
        dropout = self.denoising.prompt_dropout if isinstance(self.denoising, DenoisingDemonstrations) else 0.0
        return self.decisions.demonstrate(prompts, seeds, dropout, self.denoising.negative_prompt)

    def view(self, rollouts: Rollouts, change: Callable[[Prompt], Prompt]) -> Rollouts:
        """The same images under changed prompts. What is known of them under their own prompts is left out."""
        prompts = [change(sample.prompt) for sample in rollouts.samples]
        return replace(
            rollouts,
            samples=[replace(s, prompt=p) for s, p in zip(rollouts.samples, prompts, strict=True)],
            inputs=[
                replace(record, asked=ConditionInputs.of(p), prediction=None)
                for record, p in zip(rollouts.inputs, prompts, strict=True)
            ],
            old_logp=None,
            old_prediction=None,
            ref_logp=None,
            ref_prediction=None,
        )

    # --- images to likelihoods ---

    def recorded(self, rollouts: Rollouts) -> Replay | None:
        """What the network said of every decision when the rollouts were made; None where that was not kept."""
        return self.decisions.recorded(rollouts)

    def replay(self, rollouts: Rollouts, model: NetworkCall, *, reference: bool = False) -> Replay:
        """What `model` (`self.module` or the engine around it) says of every decision; one forward for all of them."""
        return self.decisions.replay(rollouts, model)

    @torch.no_grad()
    def complete_steps(self, rollouts: Rollouts, *, ends: bool = False) -> list[Sample]:
        """Images that the state before each step of the window, with `ends` that behind it, leads to by deterministic
        steps, under the guidance of rollouts: those of the first rollout, then of the next."""
        return chain.complete_steps(self.denoiser, rollouts, ends=ends)

    def latents(self, rollouts: Rollouts) -> Tensor:
        """[rollout, decision, number] latents before each step, pooled to at most 8 a side, and their noise level."""
        return chain.latents(self.denoiser, rollouts.inputs)

    def trained_by(self, engine: TrainingEngine) -> None:
        """It has nothing to keep step with."""

    def counts(self) -> dict[str, float]:
        """Prompts, since it was last asked, of which the encoders left something out because of their token limit."""
        return self.network.conditions.counts()

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        self.family.save(folder, state)
        share(folder)


def decisions_of(denoiser: Denoiser) -> Decisions:
    """The decisions of the likelihood that the settings name. Raises UserError for a transition or weight that is not
    the model's, a window that can not be, and a likelihood of no known kind."""
    likelihood, denoising = denoiser.denoising.likelihood, denoiser.denoising
    own = "denoising.likelihood" if isinstance(denoising, Denoising) else "denoising"
    if isinstance(likelihood, ImageChain):
        return ChainDecisions(denoiser, likelihood)
    if isinstance(likelihood, ImageLastSteps):
        return LastStepDecisions(denoiser, likelihood)
    if not isinstance(likelihood, ImageMatching | ImageContrast):
        raise UserError(
            f"{own}.type={likelihood.type} inherits from none of ImageChain, ImageMatching, ImageContrast "
            "and ImageLastSteps"
        )
    if denoiser.family.space == "noise" and isinstance(likelihood, ImageMatching) and likelihood.weight == "elbo":
        raise UserError(f"{own}.weight=elbo is for models that predict velocity; use one or sigma")
    return LevelDecisions(denoiser, likelihood)
