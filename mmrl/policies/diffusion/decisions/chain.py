"""Decisions that are steps of a chain: those of the sampler inside the window."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from einops import repeat
from torch import Tensor

from mmrl.errors import UserError
from mmrl.policies.diffusion import candidates, trees
from mmrl.policies.diffusion.decisions.denoiser import Denoiser
from mmrl.policies.diffusion.decisions.records import ImageRecord, decoded_samples, move, predictions_of
from mmrl.policies.diffusion.family import ConditionInputs
from mmrl.policies.diffusion.settings import ImageChain
from mmrl.policies.models import NetworkCall
from mmrl.rollouts import SEGMENTS, Prompt, Replay, Rollouts, Sample
from mmrl.samplers import score
from mmrl.samplers.chain import Chain
from mmrl.samplers.settings import DenoisingTransition
from mmrl.samplers.windows import window_steps
from mmrl.settings import locate

POOLED = 8  # the longest side of the pooled latents that a value function reads


class ChainDecisions:
    """Draws chains, and computes the log-likelihoods of their steps inside the window."""

    def __init__(self, denoiser: Denoiser, likelihood: ImageChain) -> None:
        """Raises UserError for a transition that does not fit the model, and for an impossible window."""
        self.denoiser, self.likelihood = denoiser, likelihood
        self._check()

    @property
    def count(self) -> int:
        """Returns the number of decisions of a rollout."""
        return len(self._window(0, 0))

    def _check(self) -> None:
        """Raises UserError where the transition does not fit what the model predicts, and where chunks or branching do
        not fit the number of steps."""
        likelihood, space = self.likelihood, self.denoiser.family.space
        transition = likelihood.transition
        if transition.space != space:
            fit = [k for k, target in DenoisingTransition.kinds.items() if locate(target, "transition").space == space]
            raise UserError(
                f"denoising.likelihood.transition.type={transition.type} is not for a model that predicts {space}; use "
                f"{' or '.join(fit)}"
            )
        try:
            width = self.count
        except ValueError as error:
            raise UserError(f"denoising.likelihood: {error}") from None
        if likelihood.chunks and sum(likelihood.chunks) != width:
            raise UserError(_too_many("chunks", likelihood.chunks, sum(likelihood.chunks), width))
        if len(likelihood.branching) > width:
            raise UserError(_too_many("branching", likelihood.branching, len(likelihood.branching), width))

    def _window(self, step: int, seed: int) -> list[int]:
        return window_steps(self.likelihood.window, self.denoiser.sampler.std, step, seed)

    # --- chains ---

    def rollout(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], step: int) -> Rollouts:
        """Draws `group_size` rollouts of each prompt. A group's window follows from its first seed and the training
        step."""
        denoiser, likelihood = self.denoiser, self.likelihood
        of_group = [self._window(step, seed) for seed in seeds[::group_size]]
        windows = [window for window in of_group for _ in range(group_size)]
        if likelihood.shared_states or likelihood.branching:
            prompt_inputs = [ConditionInputs.of(p) for p in prompts]
            row_inputs = [one for one in prompt_inputs for _ in range(group_size)]
            grow = self._candidates if likelihood.shared_states else self._branch
            chain = grow(prompt_inputs, group_size, seeds, of_group)
        else:
            row_inputs = [ConditionInputs.of(p) for p in prompts for _ in range(group_size)]
            chain = denoiser.draw(denoiser.sampler, row_inputs, seeds, windows, denoiser.denoising.guidance)
        row_prompts = [p for p in prompts for _ in range(group_size)]
        rollouts = denoiser.rollouts(row_prompts, row_inputs, group_size, seeds, chain, windows, self.count)
        if likelihood.branching:
            rollouts.nodes = trees.nodes_of(likelihood.branching, len(windows[0]), group_size, len(prompts))
        return rollouts

    def _branch(
        self, inputs: list[ConditionInputs], group_size: int, seeds: Sequence[int], windows: list[list[int]]
    ) -> Chain:
        """Draws a tree of chains for each prompt; every leaf is a rollout."""
        denoiser, branching = self.denoiser, self.likelihood.branching
        if (leaves := math.prod(branching)) != group_size:
            raise UserError(
                f"denoising.likelihood.branching={list(branching)} makes {leaves} leaves a tree; "
                f"rollout.group_size is {group_size}"
            )
        roots = [int(s) for s in seeds[::group_size]]

        def segment(
            x: Tensor,
            owner: list[int],
            row_seeds: list[int],
            drawn: list[int] | None,
            start: list[int],
            stop: list[int],
        ) -> Chain:
            steps: list[list[int]] = [[]] * len(owner) if drawn is None else [[point] for point in drawn]
            return denoiser.denoise(x, [inputs[g] for g in owner], steps, row_seeds, start=start, stop=stop)

        return trees.grow(segment, denoiser.start(roots), roots, windows, branching, len(denoiser.sampler.grid))

    def _candidates(
        self, inputs: list[ConditionInputs], group_size: int, seeds: Sequence[int], windows: list[list[int]]
    ) -> Chain:
        """Draws groups whose rollouts step from the same states; see `candidates.grow`."""
        denoiser = self.denoiser

        def segment(
            x: Tensor, owner: list[int], row_seeds: list[int], drawn: list[list[int]], start: list[int], stop: list[int]
        ) -> Chain:
            return denoiser.denoise(x, [inputs[g] for g in owner], drawn, row_seeds, start=start, stop=stop)

        noise, last = denoiser.start(seeds[::group_size]), len(denoiser.sampler.grid)
        return candidates.grow(segment, noise, seeds, windows, group_size, last, self.likelihood.trunk)

    # --- likelihoods ---

    def recorded_replay(self, rollouts: Rollouts) -> Replay | None:
        """Returns the replay by the predictions that were kept while sampling; None where none were kept."""
        v = predictions_of(rollouts.inputs) if self.denoiser.keep_predictions else None
        if v is None:
            return None
        points, x, x_next = self._steps(rollouts.inputs)
        columns = score.chain_likelihood(
            v.to(x.device),
            x,
            x_next,
            self.denoiser.sampler.stochastic_coefficients(points),
            reduction=self.likelihood.reduction,
            unscaled=self.likelihood.transition.unscaled,
        ).columns
        return Replay.from_columns(columns)

    def replay(self, rollouts: Rollouts, model: NetworkCall) -> Replay:
        """Computes every drawn step's log-likelihood under `model`, in one forward of [rollout * decision] rows."""
        denoiser, likelihood = self.denoiser, self.likelihood
        records: list[ImageRecord] = rollouts.inputs
        points, x, x_next = self._steps(records)
        inputs = [r.condition_inputs for r in records for _ in range(points.shape[1])]
        grid, flat, cached = denoiser.sampler.grid, points.flatten(), None
        if denoiser.keep_predictions and rollouts.old_prediction is None and torch.is_grad_enabled():
            # No update was made since sampling: the values are known, and the unconditional half of guidance is saved.
            # Views of other prompts have no recorded values.
            recorded = predictions_of(records)
            cached = None if recorded is None else recorded.to(denoiser.device).flatten(0, 1)
        rows, guidance = x.flatten(0, 1), denoiser.denoising.guidance

        def predict(part: slice) -> Tensor:
            sigma, time, v = grid.sigmas[flat[part]], grid.times[flat[part]], None if cached is None else cached[part]
            return denoiser.network.predict(model, rows[part], sigma, time, inputs[part], guidance, v)

        v = denoiser.in_parts(predict, len(rows)).float()
        columns = score.chain_likelihood(
            v.view_as(x),
            x,
            x_next,
            denoiser.sampler.stochastic_coefficients(points),
            old=rollouts.old_prediction,
            reference=rollouts.ref_prediction,
            reduction=likelihood.reduction,
            unscaled=likelihood.transition.unscaled,
        ).columns
        weight, segments = self._weight(points), segment_ids(likelihood.chunks, len(records))
        added = {"weight": move(weight, denoiser.device), SEGMENTS.name: move(segments, denoiser.device)}
        return Replay.from_columns({**columns, **added})

    def _steps(self, records: Sequence[ImageRecord]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the grid points of the drawn steps [rollout, decision], and the latents before and after them
        [rollout, decision, ...] on the device."""
        points, device = torch.stack([record.points for record in records]), self.denoiser.device
        before, after = torch.stack([r.x for r in records]), torch.stack([r.x_next for r in records])
        return points, before.to(device), after.to(device)

    def _weight(self, points: Tensor) -> Tensor | None:
        """Returns the weights of decisions [rollout, decision]; None where all are 1."""
        likelihood = self.likelihood
        table = score.step_weights(likelihood.step_weight, self.denoiser.sampler, likelihood.window)
        weight = None if table is None else table[points]
        if not likelihood.branching:
            return weight
        share = trees.decision_weights(likelihood.branching, points.shape[1]).expand(points.shape)
        return share if weight is None else weight * share


def _too_many(name: str, listed: Sequence[int], steps: int, width: int) -> str:
    return f"denoising.likelihood.{name}={list(listed)} cover {steps} steps, the window has {width}"


def complete_steps(denoiser: Denoiser, rollouts: Rollouts, *, ends: bool) -> list[Sample]:
    """Completes every step of the window by deterministic steps, under the guidance of rollouts, from the state before
    it, or with `ends` from the state after it. Returns one image a step: those of the first rollout, then of the
    next."""
    records: list[ImageRecord] = rollouts.inputs
    start = [point + ends for record in records for point in record.points.tolist()]
    prompts = [sample.prompt for sample, r in zip(rollouts.samples, records, strict=True) for _ in r.points]
    inputs = [record.condition_inputs for record in records for _ in record.points]
    x = torch.cat([record.x_next if ends else record.x for record in records]).to(denoiser.device)
    none: list[list[int]] = [[]] * len(start)
    return decoded_samples(prompts, denoiser.decode(denoiser.denoise(x, inputs, none, start=start).final))


def latents(denoiser: Denoiser, records: Sequence[ImageRecord]) -> Tensor:
    """Returns [rollout, decision, number]: latents before each step, pooled to at most 8 a side, and their noise
    level."""
    sigmas = denoiser.sampler.grid.sigmas[torch.stack([record.points for record in records])]
    return pooled(torch.stack([record.x for record in records]), sigmas)


def pooled(x: Tensor, sigmas: Tensor) -> Tensor:
    """Pools and flattens latents x [rollout, decision, ...] and appends their noise levels [rollout, decision]; returns
    [rollout, decision, number]."""
    flat = x.flatten(0, 1)
    images = flat.flatten(0, -4) if flat.dim() > 4 else flat  # frames of a video as further images
    if images.dim() == 4 and max(images.shape[-2:]) > POOLED:
        images = torch.nn.functional.adaptive_avg_pool2d(images, POOLED)
    return torch.cat([images.reshape(*sigmas.shape, -1), sigmas[..., None].to(x)], -1)


def segment_ids(chunks: Sequence[int], rollouts: int) -> Tensor | None:
    """Returns the index of each decision's chunk [rollout, decision], by the chunks' lengths; None without chunks."""
    if not chunks:
        return None
    ids = torch.arange(len(chunks)).repeat_interleave(torch.tensor(chunks))
    return repeat(ids, "t -> b t", b=rollouts)
