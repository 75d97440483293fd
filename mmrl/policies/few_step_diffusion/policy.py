"""A diffusion policy that has its rollouts drawn by a few-step copy, and says how far the copy is from it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

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

LEVELS = 9101  # of the seeds that jumps and their noises are drawn with


def load(path: str, settings: FewStepModel, config: JobConfig) -> FewStepPolicy:
    """The policy of a job: the model at `path` and a copy of it, or the copy that a run left beside it. Raises
    UserError as `policies.diffusion.loading.load`."""
    own = Path(path) / SAMPLER
    policy = DiffusionPolicy(loading.load(path, settings), config.section("denoising"))
    network = loading.load(str(own), settings).module if own.is_dir() else copy.deepcopy(policy.module)
    return FewStepPolicy(policy, network, settings.sampler)


class FewStepPolicy:
    """Rollouts are drawn by a copy of the model in `settings.steps` steps, likelihoods are the model's own.

    The copy's grid is every so-many-th point of the model's. Of each decision `Replay.extras["sampler_error"]` is how
    far one jump of the copy is from where the model's own steps lead from the same state.
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

    @property
    def max_decisions(self) -> int:
        return self.policy.max_decisions

    # --- prompts to images ---

    def rollout(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], *, step: int = 0) -> Rollouts:
        """`group_size` images a prompt. seeds: one a rollout, prompt by prompt. The first of each group, by the share
        that the copy has, are the copy's."""
        place = torch.arange(len(prompts) * group_size) % group_size
        few = place < round(self.settings.share * group_size)
        if bool(few.all()):
            return self.student.rollout(prompts, group_size, seeds, step=step)
        each = [prompt for prompt in prompts for _ in range(group_size)]
        parts = []
        for policy, mine in ((self.student, few), (self.policy, ~few)):
            rows = mine.nonzero().flatten().tolist()
            parts.append(policy.rollout([each[i] for i in rows], 1, [int(seeds[i]) for i in rows], step=step))
        order = torch.cat([few.nonzero().flatten(), (~few).nonzero().flatten()]).argsort()
        made = Rollouts.concat(parts).select(order)
        made.group = torch.arange(len(each)) // group_size
        return made

    def respond(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Sample]:
        """One image a prompt by the model with the steps and guidance of evaluation, or by the copy with its own."""
        if not self.settings.evaluates:
            return self.policy.respond(prompts, seeds)
        return self.student.rollout(prompts, 1, seeds).samples

    def demonstrate(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> Rollouts:
        raise NotImplementedError("the model learns from demonstrations as model.type=diffusion")

    def view(self, rollouts: Rollouts, change: Callable[[Prompt], Prompt]) -> Rollouts:
        raise NotImplementedError("no view of a prompt is asked of a model that has a sampler beside it")

    # --- images to likelihoods ---

    def replay(self, rollouts: Rollouts, model: Scorer, *, reference: bool = False) -> Replay:
        """What the model says of every decision, and where a gradient is wanted how far the copy is from the model."""
        found = self.policy.replay(rollouts, Part(model, POLICY), reference=reference)
        if torch.is_grad_enabled():
            found.extras["sampler_error"] = self.errors(rollouts, Part(model, SAMPLER))
        return found

    def errors(self, rollouts: Rollouts, network: Scorer) -> Tensor:
        """[rollout, decision] the mean square of v - (x' - a x) / b over the elements of a latent: x is a final image
        with the noise of a point of the copy's grid, x' where the model's own steps under its guidance lead from there
        to the copy's next point, v what `network`, the copy, predicts at x, and a x + b v its jump."""
        records: list[ImageRecord] = rollouts.inputs
        policy, student, count = self.policy, self.student, self.policy.max_decisions
        space, device, grid = policy.family.space, policy.device, student.sampler.grid
        seeds = [record.seed + LEVELS for record in records]
        point = torch.stack([score.stratified(seed, count) for seed in seeds]).mul(len(grid)).long().flatten()
        data = torch.stack([record.data for record in records])[:, None].to(device)
        noise = score.draw_noises(seeds, count, data.shape[2:]).to(device)
        sigma = grid.sigmas[point].float().view(len(records), count)
        x = score.noisy_samples(data, noise, sigma, space)[0].flatten(0, 1)
        said = [record.asked for record in records for _ in range(count)]
        target = self._secant(x, point, said)
        v = student.network.predict(network, x, grid.sigmas[point], grid.times[point], said, 1.0).float()
        return (v - target).square().flatten(1).mean(1).view(len(records), count)

    @torch.no_grad()
    def _secant(self, x: Tensor, point: Tensor, said: Sequence[ConditionInputs]) -> Tensor:
        """What the copy has to predict at x [n, ...], at points [n] of its grid, to jump where the model goes."""
        none: list[list[int]] = [[]] * len(x)
        start = (point * self.every).tolist()
        stop = [place + self.every for place in start]
        reached = self.policy.denoiser.go_on(x, said, none, start=start, stop=stop).final
        step = self.student.sampler.at(point, point + 1, torch.zeros_like(point, dtype=torch.bool))
        a_x, a_v = (part.to(x).view(-1, *[1] * (x.dim() - 1)) for part in (step.a_x, step.a_v))
        return (reached - a_x * x) / a_v

    # --- the rest of a policy ---

    def trained_by(self, engine: TrainingEngine) -> None:
        self.policy.trained_by(engine)

    def counts(self) -> dict[str, float]:
        return self.policy.counts()

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        """The model as it is saved without a sampler, and the sampler in a folder beside it."""
        self.policy.save(folder, state_of(POLICY, state))
        self.student.save(folder / SAMPLER, state_of(SAMPLER, state))
