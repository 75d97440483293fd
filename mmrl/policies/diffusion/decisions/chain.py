"""Decisions that are denoising steps: the stochastic steps of a chain inside the window."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from einops import repeat
from torch import Tensor

from mmrl.errors import UserError
from mmrl.policies.diffusion import candidates, trees
from mmrl.policies.diffusion.decisions.denoiser import Denoiser
from mmrl.policies.diffusion.decisions.records import ImageRecord, decoded_samples, move, stacked_predictions
from mmrl.policies.diffusion.family import ConditionInputs
from mmrl.policies.diffusion.settings import ImageChain
from mmrl.policies.models import NetworkCall
from mmrl.rollouts import SEGMENTS, Prompt, Replay, Rollouts, Sample
from mmrl.samplers import score
from mmrl.samplers.chain import Chain
from mmrl.samplers.settings import transitions_for
from mmrl.samplers.windows import window_steps

POOLED = 8  # largest side of the pooled latents that a value function gets


class ChainDecisions:
    """Samples denoising chains, and computes the log-likelihoods of their steps inside the window."""

    def __init__(self, denoiser: Denoiser, likelihood: ImageChain) -> None:
        """Raises UserError if the transition does not fit the model, or the window, chunks or branching do not fit the
        number of steps."""
        self.denoiser, self.likelihood = denoiser, likelihood
        self._check()

    @property
    def count(self) -> int:
        """The number of decisions of a rollout, the steps of the window."""
        return len(self._window(0, 0))  # it is the same in every training step and group

    def _check(self) -> None:
        """Raises UserError if the transition does not fit the model, the window does not fit the number of steps, or
        chunks or branching do not fit the window."""
        likelihood, space = self.likelihood, self.denoiser.family.space
        transition = likelihood.transition
        if transition.space != space:
            raise UserError(
                f"denoising.likelihood.transition.type={transition.type} does not fit a model that predicts {space}; "
                f"set it to {' or '.join(transitions_for(space))}"
            )
        try:
            width = self.count  # the number of steps in the window
        except ValueError as error:
            raise UserError(f"denoising.likelihood: {error}") from None
        if likelihood.chunks and sum(likelihood.chunks) != width:
            raise UserError(_wrong_length("chunks", likelihood.chunks, sum(likelihood.chunks), width))
        if len(likelihood.branching) > width:
            raise UserError(_wrong_length("branching", likelihood.branching, len(likelihood.branching), width))

    def _window(self, step: int, seed: int) -> list[int]:
        """Returns the denoising steps of the window of a group. step: the training step; seed: the group's first
        seed."""
        return window_steps(self.likelihood.window, self.denoiser.sampler.std, step, seed)

    # --- chains ---

    def rollout(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], step: int) -> Rollouts:
        """Samples `group_size` rollouts per prompt. seeds: one per rollout. step: the training step; the window of
        a group depends on it and on the group's first seed. With branching, `nodes` says which steps rollouts share."""
        denoiser, likelihood = self.denoiser, self.likelihood
        group_windows = [self._window(step, seed) for seed in seeds[::group_size]]
        windows = [window for window in group_windows for _ in range(group_size)]
        if likelihood.shared_states or likelihood.branching:
            prompt_inputs = [ConditionInputs.from_prompt(p) for p in prompts]
            row_inputs = [inputs for inputs in prompt_inputs for _ in range(group_size)]
            sample = self._sample_candidates if likelihood.shared_states else self._sample_trees
            chain = sample(prompt_inputs, group_size, seeds, group_windows)
        else:
            row_inputs = [ConditionInputs.from_prompt(p) for p in prompts for _ in range(group_size)]
            chain = denoiser.sample(denoiser.sampler, row_inputs, seeds, windows, denoiser.denoising.guidance)
        row_prompts = [p for p in prompts for _ in range(group_size)]
        rollouts = denoiser.rollouts(row_prompts, row_inputs, group_size, seeds, chain, windows, self.count)
        if likelihood.branching:
            rollouts.nodes = trees.node_ids(likelihood.branching, len(windows[0]), group_size, len(prompts))
        return rollouts

    def _sample_trees(
        self, inputs: list[ConditionInputs], group_size: int, seeds: Sequence[int], windows: list[list[int]]
    ) -> Chain:
        """Samples a tree of chains per prompt, whose leaves are the rollouts; see `trees.grow`.

        inputs, windows: one per prompt. seeds: one per rollout. Raises UserError unless the tree has group_size leaves.
        """
        denoiser, branching = self.denoiser, self.likelihood.branching
        if (leaves := math.prod(branching)) != group_size:
            raise UserError(
                f"denoising.likelihood.branching={list(branching)} makes trees of {leaves} leaves, but "
                f"rollout.group_size={group_size}; set rollout.group_size={leaves}"
            )
        group_seeds = [int(seed) for seed in seeds[::group_size]]

        def segment(
            x: Tensor,
            group: list[int],
            row_seeds: list[int],
            stochastic: list[int] | None,
            start: list[int],
            stop: list[int],
        ) -> Chain:
            """Runs parts of chains, one per row; see `trees.Segment`."""
            steps: list[list[int]] = [[]] * len(group) if stochastic is None else [[step] for step in stochastic]
            return denoiser.denoise(x, [inputs[g] for g in group], steps, row_seeds, start=start, stop=stop)

        return trees.grow(
            segment, denoiser.initial_noise(group_seeds), group_seeds, windows, branching, len(denoiser.sampler.grid)
        )

    def _sample_candidates(
        self, inputs: list[ConditionInputs], group_size: int, seeds: Sequence[int], windows: list[list[int]]
    ) -> Chain:
        """Samples groups whose rollouts share the state before each step; see `candidates.grow`. Arguments:
        see `_sample_trees`."""
        denoiser = self.denoiser

        def segment(
            x: Tensor, group: list[int], row_seeds: list[int], steps: list[list[int]], start: list[int], stop: list[int]
        ) -> Chain:
            """Runs parts of chains, one per row; see the argument `segment` of `candidates.grow`."""
            return denoiser.denoise(x, [inputs[g] for g in group], steps, row_seeds, start=start, stop=stop)

        noise, last = denoiser.initial_noise(seeds[::group_size]), len(denoiser.sampler.grid)
        return candidates.grow(segment, noise, seeds, windows, group_size, last, self.likelihood.trunk)

    # --- likelihoods ---

    def recorded_replay(self, rollouts: Rollouts) -> Replay | None:
        """Returns the replay from the predictions that sampling kept, without a forward pass; None if it kept none."""
        v = stacked_predictions(rollouts.inputs) if self.denoiser.keep_predictions else None
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
        """Returns the log-likelihoods of the stochastic steps under `model`, in one forward pass of rollout x decision
        rows."""
        denoiser, likelihood = self.denoiser, self.likelihood
        records: list[ImageRecord] = rollouts.inputs
        points, x, x_next = self._steps(records)
        inputs = [r.condition_inputs for r in records for _ in range(points.shape[1])]
        grid, flat, cached = denoiser.sampler.grid, points.flatten(), None
        if denoiser.keep_predictions and rollouts.old_prediction is None and torch.is_grad_enabled():
            # The weights are those of sampling, so the values of the predictions are known, and the unconditional pass
            # of guidance is not needed. Views, with changed prompts, have no recorded predictions.
            recorded = stacked_predictions(records)
            cached = None if recorded is None else recorded.to(denoiser.device).flatten(0, 1)
        rows, guidance = x.flatten(0, 1), denoiser.denoising.guidance

        def predict(part: slice) -> Tensor:
            """Predicts the velocity or noise of some of the rows."""
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
        on_device = {"weight": move(weight, denoiser.device), SEGMENTS.name: move(segments, denoiser.device)}
        return Replay.from_columns({**columns, **on_device})

    def _steps(self, records: Sequence[ImageRecord]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the stochastic steps as grid points [rollout, decision], and the latents before and after them
        [rollout, decision, ...], on the device."""
        points, device = torch.stack([record.points for record in records]), self.denoiser.device
        before, after = torch.stack([r.x for r in records]), torch.stack([r.x_next for r in records])
        return points, before.to(device), after.to(device)

    def _weight(self, points: Tensor) -> Tensor | None:
        """Returns the weights of decisions in the loss, [rollout, decision]; None if all are 1."""
        likelihood = self.likelihood
        table = score.step_weights(likelihood.step_weight, self.denoiser.sampler, likelihood.window)
        weight = None if table is None else table[points]
        if not likelihood.branching:
            return weight
        share = trees.decision_weights(likelihood.branching, points.shape[1]).expand(points.shape)
        return share if weight is None else weight * share


def _wrong_length(name: str, values: Sequence[int], steps: int, width: int) -> str:
    """Returns the message for chunks or branching that do not fit a window of `width` steps."""
    return f"denoising.likelihood.{name}={list(values)} covers {steps} steps, but the window has {width}; change one"


def complete_steps(denoiser: Denoiser, rollouts: Rollouts, *, ends: bool) -> list[Sample]:
    """Denoises the state before each step of the window (after it, if `ends`) to an image by deterministic steps, with
    the guidance of rollouts. Returns one image per rollout and step, rollout by rollout."""
    records: list[ImageRecord] = rollouts.inputs
    # the grid point of the state; `ends` adds 1: the point after the step
    start = [point + ends for record in records for point in record.points.tolist()]
    prompts = [sample.prompt for sample, r in zip(rollouts.samples, records, strict=True) for _ in r.points]
    inputs = [record.condition_inputs for record in records for _ in record.points]
    x = torch.cat([record.x_next if ends else record.x for record in records]).to(denoiser.device)
    no_steps: list[list[int]] = [[]] * len(start)
    return decoded_samples(prompts, denoiser.decode(denoiser.denoise(x, inputs, no_steps, start=start).final))


def latents(denoiser: Denoiser, records: Sequence[ImageRecord]) -> Tensor:
    """Returns the inputs of a value function, [rollout, decision, feature]: the latents before each step, pooled to at
    most 8 x 8 and flattened, and their noise level."""
    sigmas = denoiser.sampler.grid.sigmas[torch.stack([record.points for record in records])]
    return pooled(torch.stack([record.x for record in records]), sigmas)


def pooled(x: Tensor, sigmas: Tensor) -> Tensor:
    """Pools and flattens latents x [rollout, decision, ...] and appends their noise levels `sigmas` [rollout,
    decision]. Returns [rollout, decision, feature]."""
    flat = x.flatten(0, 1)
    images = flat.flatten(0, -4) if flat.dim() > 4 else flat  # a video is pooled frame by frame
    if images.dim() == 4 and max(images.shape[-2:]) > POOLED:
        images = torch.nn.functional.adaptive_avg_pool2d(images, POOLED)
    return torch.cat([images.reshape(*sigmas.shape, -1), sigmas[..., None].to(x)], -1)


def segment_ids(chunks: Sequence[int], rollouts: int) -> Tensor | None:
    """Returns the index of the chunk to which each decision belongs, [rollout, decision] int64; None without chunks.

    chunks: the length of each chunk, in decisions. rollouts: number of rollouts.
    """
    if not chunks:
        return None
    ids = torch.arange(len(chunks)).repeat_interleave(torch.tensor(chunks))
    return repeat(ids, "t -> b t", b=rollouts)
