"""Decisions that are steps of a chain: those of the sampler inside the window."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from einops import repeat
from torch import Tensor

from mmrl.errors import UserError
from mmrl.policies.diffusion import candidates, trees
from mmrl.policies.diffusion.decisions.denoiser import Denoiser
from mmrl.policies.diffusion.decisions.records import ImageRecord, made_samples, move, predictions_of
from mmrl.policies.diffusion.family import ConditionInputs
from mmrl.policies.diffusion.settings import ImageChain
from mmrl.policies.models import NetworkCall
from mmrl.rollouts import SEGMENTS, Prompt, Replay, Rollouts, Sample
from mmrl.samplers import score
from mmrl.samplers.chain import Chain
from mmrl.samplers.settings import DenoisingTransition
from mmrl.samplers.windows import window_steps
from mmrl.settings import locate

POOLED = 8  # a side, of latents that a value is learned of


class ChainDecisions:
    """Draws chains, and says how likely their steps were."""

    def __init__(self, denoiser: Denoiser, likelihood: ImageChain) -> None:
        """Raises UserError for a transition that is not the model's, and a window that can not be."""
        self.denoiser, self.likelihood = denoiser, likelihood
        self._check()

    @property
    def count(self) -> int:
        """Decisions of a rollout."""
        return len(self._window(0, 0))

    def _check(self) -> None:
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
        """The window of a group is that of its first seed and of training step `step`."""
        denoiser, likelihood = self.denoiser, self.likelihood
        of_group = [self._window(step, seed) for seed in seeds[::group_size]]
        windows = [window for window in of_group for _ in range(group_size)]
        if likelihood.shared_states or likelihood.branching:
            said = [ConditionInputs.of(p) for p in prompts]
            of_rows = [one for one in said for _ in range(group_size)]
            grow = self._candidates if likelihood.shared_states else self._branch
            chain = grow(said, group_size, seeds, of_group)
        else:
            of_rows = [ConditionInputs.of(p) for p in prompts for _ in range(group_size)]
            chain = denoiser.draw(denoiser.sampler, of_rows, seeds, windows, denoiser.denoising.guidance)
        asked = [p for p in prompts for _ in range(group_size)]
        made = denoiser.rollouts(asked, of_rows, group_size, seeds, chain, windows, self.count)
        if likelihood.branching:
            made.nodes = trees.nodes_of(likelihood.branching, len(windows[0]), group_size, len(prompts))
        return made

    def _branch(
        self, said: list[ConditionInputs], group_size: int, seeds: Sequence[int], windows: list[list[int]]
    ) -> Chain:
        """A tree a prompt, of which every leaf is a rollout."""
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
            own_seeds: list[int],
            drawn: list[int] | None,
            start: list[int],
            stop: list[int],
        ) -> Chain:
            steps: list[list[int]] = [[]] * len(owner) if drawn is None else [[point] for point in drawn]
            return denoiser.go_on(x, [said[g] for g in owner], steps, own_seeds, start=start, stop=stop)

        return trees.grow(segment, denoiser.start(roots), roots, windows, branching, len(denoiser.sampler.grid))

    def _candidates(
        self, said: list[ConditionInputs], group_size: int, seeds: Sequence[int], windows: list[list[int]]
    ) -> Chain:
        """Groups that step from the same states."""
        denoiser = self.denoiser

        def segment(
            x: Tensor, owner: list[int], own: list[int], drawn: list[list[int]], start: list[int], stop: list[int]
        ) -> Chain:
            return denoiser.go_on(x, [said[g] for g in owner], drawn, own, start=start, stop=stop)

        noise, last = denoiser.start(seeds[::group_size]), len(denoiser.sampler.grid)
        return candidates.grow(segment, noise, seeds, windows, group_size, last, self.likelihood.trunk)

    # --- likelihoods ---

    def recorded(self, rollouts: Rollouts) -> Replay | None:
        """What the network said of every decision when the rollouts were made; None where that was not kept."""
        v = predictions_of(rollouts.inputs) if self.denoiser.keep_predictions else None
        if v is None:
            return None
        points, x, x_next = self._steps(rollouts.inputs)
        found: dict[str, Any] = score.chain_likelihood(
            v.to(x.device), x, x_next, self.denoiser.sampler.drawn(points), reduction=self.likelihood.reduction
        ).known
        return Replay.of(found)

    def replay(self, rollouts: Rollouts, model: NetworkCall) -> Replay:
        """What `model` says of every step; one forward for all of them."""
        denoiser, likelihood = self.denoiser, self.likelihood
        records: list[ImageRecord] = rollouts.inputs
        points, x, x_next = self._steps(records)
        said = [r.asked for r in records for _ in range(points.shape[1])]
        grid, flat, known = denoiser.sampler.grid, points.flatten(), None
        if denoiser.keep_predictions and rollouts.old_prediction is None and torch.is_grad_enabled():
            # No update was made since they were sampled, so that the values are known and half of guidance is saved;
            # but for views of other prompts, which have none.
            kept = predictions_of(records)
            known = None if kept is None else kept.to(denoiser.device).flatten(0, 1)
        rows, guidance = x.flatten(0, 1), denoiser.denoising.guidance

        def predict(part: slice) -> Tensor:
            sigma, time, own = grid.sigmas[flat[part]], grid.times[flat[part]], None if known is None else known[part]
            return denoiser.network.predict(model, rows[part], sigma, time, said[part], guidance, own)

        v = denoiser.in_parts(predict, len(rows)).float()
        found: dict[str, Any] = score.chain_likelihood(
            v.view_as(x),
            x,
            x_next,
            denoiser.sampler.drawn(points),
            old=rollouts.old_prediction,
            reference=rollouts.ref_prediction,
            reduction=likelihood.reduction,
        ).known
        weight, segments = self._weight(points), segment_ids(likelihood.chunks, len(records))
        added = {"weight": move(weight, denoiser.device), SEGMENTS.name: move(segments, denoiser.device)}
        return Replay.of({**found, **added})

    def _steps(self, records: Sequence[ImageRecord]) -> tuple[Tensor, Tensor, Tensor]:
        """Where the drawn steps are on the grid [rollout, decision], and latents before and after them, on the
        device."""
        points, device = torch.stack([record.points for record in records]), self.denoiser.device
        before, after = torch.stack([r.x for r in records]), torch.stack([r.x_next for r in records])
        return points, before.to(device), after.to(device)

    def _weight(self, points: Tensor) -> Tensor | None:
        """[rollout, decision], None where all decisions weigh alike."""
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
    """Images that the state before each step of the window, with `ends` that behind it, leads to by deterministic
    steps, under the guidance of rollouts: those of the first rollout, then of the next."""
    records: list[ImageRecord] = rollouts.inputs
    start = [point + ends for record in records for point in record.points.tolist()]
    each = [sample.prompt for sample, r in zip(rollouts.samples, records, strict=True) for _ in r.points]
    said = [record.asked for record in records for _ in record.points]
    x = torch.cat([record.x_next if ends else record.x for record in records]).to(denoiser.device)
    none: list[list[int]] = [[]] * len(start)
    return made_samples(each, denoiser.decode(denoiser.go_on(x, said, none, start=start).final))


def latents(denoiser: Denoiser, records: Sequence[ImageRecord]) -> Tensor:
    """[rollout, decision, number] latents before each step, pooled to at most 8 a side, and their noise level."""
    sigmas = denoiser.sampler.grid.sigmas[torch.stack([record.points for record in records])]
    return pooled(torch.stack([record.x for record in records]), sigmas)


def pooled(x: Tensor, sigmas: Tensor) -> Tensor:
    """[rollout, decision, number] of latents x [rollout, decision, ...] and their noise levels [rollout, decision]."""
    flat = x.flatten(0, 1)
    images = flat.flatten(0, -4) if flat.dim() > 4 else flat  # frames of a clip as further images
    if images.dim() == 4 and max(images.shape[-2:]) > POOLED:
        images = torch.nn.functional.adaptive_avg_pool2d(images, POOLED)
    return torch.cat([images.reshape(*sigmas.shape, -1), sigmas[..., None].to(x)], -1)


def segment_ids(chunks: Sequence[int], rollouts: int) -> Tensor | None:
    """[rollout, decision]: which of the chunks, whose lengths these are, a decision belongs to; None without chunks."""
    if not chunks:
        return None
    ids = torch.arange(len(chunks)).repeat_interleave(torch.tensor(chunks))
    return repeat(ids, "t -> b t", b=rollouts)
