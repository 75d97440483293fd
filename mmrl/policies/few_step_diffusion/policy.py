"""A diffusion policy whose rollouts are drawn by a few-step copy, and the copy's distillation error."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmrl.engine.flops import PolicyWork
from mmrl.policies.diffusion import loading
from mmrl.policies.diffusion.decisions.records import ImageRecord
from mmrl.policies.diffusion.family import ConditionInputs
from mmrl.policies.diffusion.policy import DiffusionPolicy
from mmrl.policies.few_step_diffusion.settings import POLICY, SAMPLER, FewStepModel, FewStepSampler
from mmrl.policies.models import Scorer, TrainingEngine
from mmrl.policies.networks import Networks, Part, state_of
from mmrl.rollouts import Prompt, Replay, Rollouts, Sample
from mmrl.samplers import score
from mmrl.samplers.chain import Sampler
from mmrl.samplers.sigmas import Grid

if TYPE_CHECKING:
    from mmrl.protocols.job import JobConfig

LEVELS = 9101  # offset of the seeds that noise levels and noises of `errors` are drawn from


def load(path: str, settings: FewStepModel, config: JobConfig) -> FewStepPolicy:
    """Builds the policy of a job: the model at `path`, and the sampler that a run saved in its folder or else a copy.
    Raises UserError where `policies.diffusion.loading.load` does."""
    folder = Path(path) / SAMPLER
    policy = DiffusionPolicy(loading.load(path, settings), config.section("denoising"))
    network = loading.load(str(folder), settings).module if folder.is_dir() else copy.deepcopy(policy.module)
    return FewStepPolicy(policy, network, settings.sampler)


class FewStepPolicy:
    """A diffusion policy whose rollouts a copy of the model draws in `settings.steps` steps; likelihoods are the
    model's.

    The copy's grid is every `self.every`-th point of the model's. `Replay.extras["sampler_error"]` holds for each
    decision how far one jump of the copy is from the end of the model's own steps from the same state; see `errors`.
    """

    def __init__(self, policy: DiffusionPolicy, network: torch.nn.Module, settings: FewStepSampler) -> None:
        self.policy, self.settings = policy, settings
        denoising = policy.denoising.model_copy(
            update={"guidance": 1.0, "evaluation_guidance": 1.0, "evaluation_steps": settings.steps}
        )
        self.student = DiffusionPolicy(policy.family, denoising, module=network)
        fine = policy.sampler
        self.every = len(fine.grid) // settings.steps
        grid = Grid(fine.grid.sigmas[:: self.every], fine.grid.times[:: self.every])
        self.student.denoiser.sampler = Sampler(grid, None, fine.tail, fine.space)
        self.module = Networks(**{POLICY: policy.module, SAMPLER: network})
        self.work = PolicyWork([*policy.work.tallies, *self.student.work.tallies], policy.work.units)

    @property
    def max_decisions(self) -> int:
        return self.policy.max_decisions

    # --- prompts to images ---

    def rollout(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], *, step: int = 0) -> Rollouts:
        """Draws `group_size` images of each prompt. seeds: one a rollout, prompt by prompt. The copy draws the first of
        each group, `settings.share` of it."""
        position = torch.arange(len(prompts) * group_size) % group_size
        few = position < round(self.settings.share * group_size)
        if bool(few.all()):
            return self.student.rollout(prompts, group_size, seeds, step=step)
        row_prompts = [prompt for prompt in prompts for _ in range(group_size)]
        parts = []
        for policy, chosen in ((self.student, few), (self.policy, ~few)):
            rows = chosen.nonzero().flatten().tolist()
            parts.append(policy.rollout([row_prompts[i] for i in rows], 1, [int(seeds[i]) for i in rows], step=step))
        order = torch.cat([few.nonzero().flatten(), (~few).nonzero().flatten()]).argsort()
        rollouts = Rollouts.concat(parts).select(order)
        rollouts.group = torch.arange(len(row_prompts)) // group_size
        return rollouts

    def respond(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Sample]:
        """Draws one image of each prompt by the model with the steps and guidance of evaluation, or by the copy."""
        if not self.settings.evaluates:
            return self.policy.respond(prompts, seeds)
        return self.student.rollout(prompts, 1, seeds).samples

    def demonstrate(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> Rollouts:
        raise NotImplementedError("the model learns from demonstrations as model.type=diffusion")

    def view(self, rollouts: Rollouts, change: Callable[[Prompt], Prompt]) -> Rollouts:
        raise NotImplementedError("model.type=few_step_diffusion has no views of prompts")

    # --- images to likelihoods ---

    def replay(self, rollouts: Rollouts, model: Scorer, *, reference: bool = False) -> Replay:
        """Computes all decisions' log-likelihoods under the model, and with a gradient also the copy's errors."""
        replay = self.policy.replay(rollouts, Part(model, POLICY), reference=reference)
        if torch.is_grad_enabled():
            replay.extras["sampler_error"] = self.errors(rollouts, Part(model, SAMPLER))
        return replay

    def errors(self, rollouts: Rollouts, network: Scorer) -> Tensor:
        """Returns [rollout, decision]: the mean square of v - (x' - a x) / b over the elements of a latent. x is a
        final image noised to a point of the copy's grid, x' the latent at its next point by the model's own guided
        steps, v the prediction of `network`, the copy, at x, and a x + b v its jump."""
        records: list[ImageRecord] = rollouts.inputs
        policy, student, count = self.policy, self.student, self.policy.max_decisions
        space, device, grid = policy.family.space, policy.device, student.sampler.grid
        seeds = [record.seed + LEVELS for record in records]
        point = torch.stack([score.stratified(seed, count) for seed in seeds]).mul(len(grid)).long().flatten()
        data = torch.stack([record.data for record in records])[:, None].to(device)
        noise = score.draw_noises(seeds, count, data.shape[2:]).to(device)
        sigma = grid.sigmas[point].float().view(len(records), count)
        x = score.noisy_samples(data, noise, sigma, space)[0].flatten(0, 1)
        inputs = [record.condition_inputs for record in records for _ in range(count)]
        target = self._secant(x, point, inputs)
        v = student.network.predict(network, x, grid.sigmas[point], grid.times[point], inputs, 1.0).float()
        return (v - target).square().flatten(1).mean(1).view(len(records), count)

    @torch.no_grad()
    def _secant(self, x: Tensor, point: Tensor, inputs: Sequence[ConditionInputs]) -> Tensor:
        """Returns the target [n, ...] of the copy at x [n, ...] and points [n] of its grid: the prediction by which its
        jump ends where the model's own steps do."""
        none: list[list[int]] = [[]] * len(x)
        start = (point * self.every).tolist()
        stop = [first + self.every for first in start]
        reached = self.policy.denoiser.denoise(x, inputs, none, start=start, stop=stop).final
        step = self.student.sampler.coefficients_between(point, point + 1, torch.zeros_like(point, dtype=torch.bool))
        a_x, a_v = (part.to(x).view(-1, *[1] * (x.dim() - 1)) for part in (step.a_x, step.a_v))
        return (reached - a_x * x) / a_v

    # --- the rest of a policy ---

    def trained_by(self, engine: TrainingEngine) -> None:
        self.policy.trained_by(engine)

    def counts(self) -> dict[str, float]:
        return self.policy.counts()

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Writes the model as a model without sampler is written, and the sampler into the folder `sampler` inside."""
        self.policy.save(folder, state_of(POLICY, state))
        self.student.save(folder / SAMPLER, state_of(SAMPLER, state))
