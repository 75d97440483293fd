"""A diffusion policy whose rollouts are sampled by a few-step student, and the student's distillation error."""

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
from mmrl.policies.networks import NamedNetwork, Networks, select_state
from mmrl.rollouts import Prompt, Replay, Rollouts, Sample
from mmrl.samplers import score
from mmrl.samplers.chain import Sampler
from mmrl.samplers.sigmas import Grid

if TYPE_CHECKING:
    from mmrl.protocols.job import JobConfig

# Added to a rollout's seed for the noise levels and noises of `distillation_errors`, so that they differ from those of
# the likelihood
SEED_OFFSET = 9101


def load(path: str, settings: FewStepModel, config: JobConfig) -> FewStepPolicy:
    """Loads the model at `path`, and its student from the folder `sampler` inside, where a run saved it; without that
    folder the student starts as a copy of the model. Raises UserError as `policies.diffusion.loading.load` does."""
    folder = Path(path) / SAMPLER
    policy = DiffusionPolicy(loading.load(path, settings), config.section("denoising"))
    network = loading.load(str(folder), settings).module if folder.is_dir() else copy.deepcopy(policy.module)
    return FewStepPolicy(policy, network, settings.sampler)


class FewStepPolicy:
    """A diffusion policy whose rollouts a student, a copy of the model, samples in `settings.steps` denoising steps.
    Likelihoods are those of the model (the teacher).

    The student's noise levels are every `self.stride`-th of the model's, so one student step replaces `stride` steps of
    the model. `Replay.extras["sampler_error"]` holds the student's error; see `distillation_errors`.
    """

    def __init__(self, policy: DiffusionPolicy, network: torch.nn.Module, settings: FewStepSampler) -> None:
        """policy: the model. network: the student's network. settings: the section `model.sampler`, whose `steps` must
        divide the model's denoising steps."""
        self.policy, self.settings = policy, settings
        denoising = policy.denoising.model_copy(
            update={"guidance": 1.0, "evaluation_guidance": 1.0, "evaluation_steps": settings.steps}
        )
        self.student = DiffusionPolicy(policy.family, denoising, module=network)
        sampler = policy.sampler
        # The student's noise levels are every `stride`-th one of the model; this replaces the sampler from `denoising`
        self.stride = len(sampler.grid) // settings.steps
        student_grid = Grid(sampler.grid.sigmas[:: self.stride], sampler.grid.times[:: self.stride])
        self.student.denoiser.sampler = Sampler(student_grid, None, sampler.tail, sampler.space)
        self.module = Networks(**{POLICY: policy.module, SAMPLER: network})
        self.work = PolicyWork([*policy.work.tallies, *self.student.work.tallies], policy.work.units)

    @property
    def max_decisions(self) -> int:
        return self.policy.max_decisions

    # --- prompts to images ---

    def rollout(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], *, step: int = 0) -> Rollouts:
        """Samples `group_size` images for each prompt: in each group the first `settings.share` x group_size images by
        the student, the others by the model. seeds: one for each rollout, prompt by prompt."""
        index_in_group = torch.arange(len(prompts) * group_size) % group_size
        by_student = index_in_group < round(self.settings.share * group_size)
        if bool(by_student.all()):
            return self.student.rollout(prompts, group_size, seeds, step=step)
        row_prompts = [prompt for prompt in prompts for _ in range(group_size)]
        parts = []
        for policy, mask in ((self.student, by_student), (self.policy, ~by_student)):
            rows = mask.nonzero().flatten().tolist()
            parts.append(policy.rollout([row_prompts[i] for i in rows], 1, [int(seeds[i]) for i in rows], step=step))
        # restores the order of rollouts: those of the student come first in the concatenation
        order = torch.cat([by_student.nonzero().flatten(), (~by_student).nonzero().flatten()]).argsort()
        rollouts = Rollouts.concat(parts).select(order)
        rollouts.group = torch.arange(len(row_prompts)) // group_size
        return rollouts

    def respond(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Sample]:
        """Samples one image for each prompt: by the model, with the steps and guidance of evaluation, or by the student
        if `settings.evaluates`."""
        if not self.settings.evaluates:
            return self.policy.respond(prompts, seeds)
        return self.student.rollout(prompts, 1, seeds).samples

    def demonstrate(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> Rollouts:
        raise NotImplementedError("model.type=few_step_diffusion learns from rewards only; use model.type=diffusion")

    def view(self, rollouts: Rollouts, change: Callable[[Prompt], Prompt]) -> Rollouts:
        raise NotImplementedError("model.type=few_step_diffusion has no views of prompts")

    # --- images to likelihoods ---

    def replay(self, rollouts: Rollouts, model: Scorer, *, reference: bool = False) -> Replay:
        """Computes the log-likelihoods of all decisions under `model` (`self.module` or the engine around it), and, if
        gradients are enabled, the student's distillation errors."""
        replay = self.policy.replay(rollouts, NamedNetwork(model, POLICY), reference=reference)
        if torch.is_grad_enabled():
            replay.extras["sampler_error"] = self.distillation_errors(rollouts, NamedNetwork(model, SAMPLER))
        return replay

    def distillation_errors(self, rollouts: Rollouts, network: Scorer) -> Tensor:
        """Returns the student's errors [rollout, decision], each at a noise level sampled from the student's grid.

        An error is the mean of (v - (x' - a x) / b)^2 over the elements of a latent. x is the final image of a rollout,
        noised to the noise level; v is the prediction of `network`, the student, at x; a x + b v is the student's next
        latent; and x' is the next latent by the model's own guided steps."""
        records: list[ImageRecord] = rollouts.inputs
        policy, student, num_decisions = self.policy, self.student, self.policy.max_decisions
        space, device, grid = policy.family.space, policy.device, student.sampler.grid
        seeds = [record.seed + SEED_OFFSET for record in records]
        uniform = torch.stack([score.stratified(seed, num_decisions) for seed in seeds])
        point = uniform.mul(len(grid)).long().flatten()  # indices of noise levels in the student's grid
        data = torch.stack([record.data for record in records])[:, None].to(device)
        noise = score.draw_noises(seeds, num_decisions, data.shape[2:]).to(device)
        sigma = grid.sigmas[point].float().view(len(records), num_decisions)
        x = score.noisy_samples(data, noise, sigma, space)[0].flatten(0, 1)
        inputs = [record.condition_inputs for record in records for _ in range(num_decisions)]
        target = self._target(x, point, inputs)
        v = student.network.predict(network, x, grid.sigmas[point], grid.times[point], inputs, 1.0).float()
        return (v - target).square().flatten(1).mean(1).view(len(records), num_decisions)

    @torch.no_grad()
    def _target(self, x: Tensor, point: Tensor, inputs: Sequence[ConditionInputs]) -> Tensor:
        """Returns the prediction [n, ...] with which one step of the student from latents x [n, ...] ends at the same
        latents as `stride` steps of the model. point: indices [n] of noise levels in the student's grid; inputs: one
        per row."""
        no_windows: list[list[int]] = [[]] * len(x)
        start = (point * self.stride).tolist()
        stop = [first + self.stride for first in start]
        next_x = self.policy.denoiser.denoise(x, inputs, no_windows, start=start, stop=stop).final
        step = self.student.sampler.coefficients_between(point, point + 1, torch.zeros_like(point, dtype=torch.bool))
        a_x, a_v = (part.to(x).view(-1, *[1] * (x.dim() - 1)) for part in (step.a_x, step.a_v))
        return (next_x - a_x * x) / a_v

    # --- the rest of a policy ---

    def set_engine(self, engine: TrainingEngine) -> None:
        self.policy.set_engine(engine)

    def counts(self) -> dict[str, float]:
        return self.policy.counts()

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Saves the model as model.type=diffusion does, and the student in the folder `sampler` inside."""
        self.policy.save(folder, select_state(POLICY, state))
        self.student.save(folder / SAMPLER, select_state(SAMPLER, state))
