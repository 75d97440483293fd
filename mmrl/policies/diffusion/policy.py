"""Diffusion and flow models as policies: prompts to pictures and clips, and these to likelihoods."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from einops import repeat
from torch import Tensor, nn

from mmrl.errors import UserError
from mmrl.policies.diffusion import candidates, trees
from mmrl.policies.diffusion.family import Condition, ConditionInputs, Family, Shape
from mmrl.policies.diffusion.last_steps import replay_last
from mmrl.policies.diffusion.settings import (
    Denoising,
    DenoisingDemonstrations,
    PictureChain,
    PictureContrast,
    PictureLastSteps,
    PictureLikelihood,
    PictureMatching,
)
from mmrl.policies.parts import by_parts
from mmrl.rollouts import MatchingTargets, Prompt, Replay, Rollouts, Sample
from mmrl.runtime.files import share
from mmrl.samplers import score
from mmrl.samplers.chain import INITIAL, Chain, Sampler, gaussian, run
from mmrl.samplers.guidance import guided, moved, scale_at
from mmrl.samplers.settings import DenoisingTransition, Euler
from mmrl.samplers.windows import window_steps
from mmrl.settings import locate

log = logging.getLogger(__name__)
POOLED = 8  # a side, of latents that a value is learned of


@dataclass(frozen=True)
class PictureRecord:
    """One picture or clip: what it was asked for, and the steps of its chain or the latent itself. fp32, on the CPU."""

    asked: ConditionInputs
    seed: int  # of the noises that the latent is scored with
    data: Tensor  # [...] the final latent
    points: Tensor  # [window] int64, grid points of the steps that were drawn
    x: Tensor  # [window, ...] before each of them
    x_next: Tensor  # [window, ...] after
    prediction: Tensor | None = None  # [window, ...] what the network said before each of them, where it was kept

    @property
    def text(self) -> str:
        return self.asked.text


class DiffusionPolicy:
    """Draws pictures with a family's network and says how likely they were.

    With a `PictureChain` a decision is a step of the sampler inside the window; otherwise it is one noise level at
    which the final picture is compared with what the network makes of it. A policy that learns from demonstrations
    matches them, without guidance.
    """

    def __init__(
        self,
        family: Family,
        denoising: Denoising | DenoisingDemonstrations,
        *,
        keep_predictions: bool = False,
        steps_at_once: int | None = None,
    ) -> None:
        """keep_predictions: whether rollouts hold what the network said when they were made, for `recorded`. A gradient
        of rollouts without an old policy's predictions is then one by the weights that made them. steps_at_once: rows
        that the network is given at once when rollouts are replayed; None: all.

        Raises UserError for settings that the family does not fit, and for a window that can not be."""
        self.family, self.denoising, self.steps_at_once = family, denoising, steps_at_once
        self.keep_predictions = keep_predictions
        self.module: nn.Module = family.module
        self.likelihood: PictureLikelihood = denoising.likelihood
        self.shape: Shape = family.latent_shape(denoising.resolution, denoising.frames)
        self.evaluation_shape: Shape = family.latent_shape(
            denoising.evaluation_resolution or denoising.resolution, denoising.frames
        )
        self._conditions: OrderedDict[tuple[ConditionInputs, Shape], Condition] = OrderedDict()
        self._cut = 0  # prompts of which the encoders left something out
        self._check()

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def max_decisions(self) -> int:
        likelihood = self.likelihood
        if isinstance(likelihood, PictureLastSteps):
            return 1
        return len(self._window(0, 0)) if isinstance(likelihood, PictureChain) else self._draws.draws

    @cached_property
    def sampler(self) -> Sampler:
        """Of rollouts."""
        assert isinstance(self.denoising, Denoising)
        return self._sampler(self.denoising.steps, self.shape)

    # --- prompts to pictures ---

    @torch.no_grad()
    def rollout(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], *, step: int = 0) -> Rollouts:
        """Draw `group_size` pictures a prompt. seeds: one a rollout, prompt by prompt; the window of a group is that of
        its first seed and of training step `step`."""
        likelihood, asked = self.likelihood, [p for p in prompts for _ in range(group_size)]
        if not isinstance(likelihood, PictureChain):
            windows: list[list[int]] = [[]] * len(asked)
        else:
            of_group = [self._window(step, seed) for seed in seeds[::group_size]]
            windows = [window for window in of_group for _ in range(group_size)]
            if likelihood.shared_states:
                return self._candidates(likelihood, prompts, group_size, seeds, windows)
            if likelihood.branching:
                return self._branch(likelihood, prompts, group_size, seeds, windows)
        said = [ConditionInputs.of(p) for p in prompts for _ in range(group_size)]
        if isinstance(likelihood, PictureLastSteps):
            chain = self._in_two(said, seeds, len(self.sampler.grid) - likelihood.steps)
        else:
            chain = self._draw(self.sampler, said, seeds, windows, self.denoising.guidance)
        return self._rollouts(asked, said, group_size, seeds, chain, windows)

    @torch.no_grad()
    def respond(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Sample]:
        """One picture a prompt without noise in its chain, with the steps, size and guidance of evaluation."""
        settings, said = self.denoising, [ConditionInputs.of(p) for p in prompts]
        guidance = settings.guidance if settings.evaluation_guidance is None else settings.evaluation_guidance
        sampler = self._sampler(settings.evaluation_steps, self.evaluation_shape)
        chain = self._draw(sampler, said, seeds, [[]] * len(said), guidance, self.evaluation_shape)
        return made_samples(prompts, self.family.decode(chain.final).float().cpu())

    @torch.no_grad()
    def demonstrate(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> Rollouts:
        """The pictures or clips that prompts carry in metadata["target"] ([channel, height, width] or [frame, channel,
        height, width], 0 to 1), some of them without the words of their prompt."""
        assert isinstance(self.denoising, DenoisingDemonstrations)
        missing = next((p.id for p in prompts if "target" not in p.metadata), None)
        if missing is not None:
            raise UserError(f"prompt {missing} has no picture to learn from: algorithm.type=supervised needs a target")
        data = self.family.to_latents(torch.stack([p.metadata["target"] for p in prompts]).to(self.device))
        empty = data.new_zeros(len(data), 0, *data.shape[1:])
        said = [ConditionInputs.of(p) for p in prompts]
        chain = Chain(data, empty, empty)
        made = self._rollouts(prompts, said, 1, seeds, chain, [[]] * len(prompts), decode=False)
        for i, record in enumerate(made.inputs):
            if score.stratified(record.seed, 1)[0] < self.denoising.prompt_dropout:
                made.inputs[i] = replace(record, asked=record.asked.saying(self.denoising.negative_prompt))
        return made

    def view(self, rollouts: Rollouts, change: Callable[[Prompt], Prompt]) -> Rollouts:
        """The same pictures under changed prompts. What is known of them under their own prompts is left out."""
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

    # --- pictures to likelihoods ---

    def recorded(self, rollouts: Rollouts) -> Replay | None:
        """What the network said of every decision when the rollouts were made; None where that was not kept."""
        records: list[PictureRecord] = rollouts.inputs
        likelihood = self.likelihood
        if not self.keep_predictions or not isinstance(likelihood, PictureChain):
            return None
        points, (x, x_next, v) = self._steps(records, "x", "x_next", "prediction")
        found: dict[str, Any] = score.chain_likelihood(
            v, x, x_next, self.sampler.drawn(points), reduction=likelihood.reduction
        ).known
        return Replay(**found)

    def replay(self, rollouts: Rollouts, model: Any, *, reference: bool = False) -> Replay:
        """What `model` (`self.module` or the engine around it) says of every decision; one forward for all of them."""
        if isinstance(self.likelihood, PictureChain):
            return self._replay_chain(self.likelihood, rollouts, model)
        if isinstance(self.likelihood, PictureLastSteps):
            return replay_last(self, self.likelihood.steps, rollouts, model)
        return self._replay_data(rollouts, model)

    @torch.no_grad()
    def complete_steps(self, rollouts: Rollouts, *, ends: bool = False) -> list[Sample]:
        """Pictures that the state before each step of the window, with `ends` that behind it, leads to by deterministic
        steps, under the guidance of rollouts: those of the first rollout, then of the next."""
        records: list[PictureRecord] = rollouts.inputs
        start = [point + ends for record in records for point in record.points.tolist()]
        each = [sample.prompt for sample, r in zip(rollouts.samples, records, strict=True) for _ in r.points]
        said = [record.asked for record in records for _ in record.points]
        predict = self.predictor(self.sampler, said, self.denoising.guidance)
        x = torch.cat([record.x_next if ends else record.x for record in records]).to(self.device)
        none: list[list[int]] = [[]] * len(start)
        chain = run(predict, x, self.sampler, none, noise_of([], self.shape), start=start)
        return made_samples(each, self.family.decode(chain.final).float().cpu())

    def latents(self, rollouts: Rollouts) -> Tensor:
        """[rollout, decision, number] latents before each step, pooled to at most 8 a side, and their noise level."""
        records: list[PictureRecord] = rollouts.inputs
        sigmas = self.sampler.grid.sigmas[torch.stack([record.points for record in records])]
        return pooled(torch.stack([record.x for record in records]), sigmas)

    def trained_by(self, engine: Any) -> None:
        """It has nothing to keep step with."""

    def counts(self) -> dict[str, float]:
        """Prompts, since it was last asked, of which the encoders left something out because of their token limit."""
        found, self._cut = self._cut, 0
        return {"prompts_cut": float(found)} if found else {}

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        self.family.save(folder, state)
        share(folder)

    # --- what is checked at the start ---

    def _check(self) -> None:
        """Raises UserError for a transition or weight that is not the model's, and a window that can not be."""
        likelihood, space = self.likelihood, self.family.space
        own = "denoising.likelihood" if isinstance(self.denoising, Denoising) else "denoising"
        if isinstance(likelihood, PictureChain):
            self._check_chain(likelihood)
        elif not isinstance(likelihood, PictureMatching | PictureContrast | PictureLastSteps):
            raise UserError(
                f"{own}.type={likelihood.type} inherits from none of PictureChain, PictureMatching, PictureContrast "
                "and PictureLastSteps"
            )
        elif space == "noise" and isinstance(likelihood, PictureMatching) and likelihood.weight == "elbo":
            raise UserError(f"{own}.weight=elbo is for models that predict velocity; use one or sigma")

    def _check_chain(self, likelihood: PictureChain) -> None:
        space, transition = self.family.space, likelihood.transition
        if transition.space != space:
            fit = [k for k, target in DenoisingTransition.kinds.items() if locate(target, "transition").space == space]
            raise UserError(
                f"denoising.likelihood.transition.type={transition.type} is not for a model that predicts {space}; use "
                f"{' or '.join(fit)}"
            )
        try:
            width = len(self._window(0, 0))
        except ValueError as error:
            raise UserError(f"denoising.likelihood: {error}") from None
        for name, steps in (("chunks", sum(likelihood.chunks)), ("branching", len(likelihood.branching))):
            listed = list(vars(likelihood)[name])
            if listed and (steps > width if name == "branching" else steps != width):
                raise UserError(f"denoising.likelihood.{name}={listed} cover {steps} steps, the window has {width}")

    # --- chains ---

    @property
    def _draws(self) -> PictureMatching | PictureContrast:
        assert isinstance(self.likelihood, PictureMatching | PictureContrast)
        return self.likelihood

    def _sampler(self, steps: int, shape: Shape) -> Sampler:
        likelihood, grid = self.likelihood, self.family.grid(steps, shape)
        if isinstance(likelihood, PictureChain):
            return Sampler(grid, likelihood.transition, likelihood.tail, self.family.space)
        return Sampler(grid, None, Euler(), self.family.space)

    def _window(self, step: int, seed: int) -> list[int]:
        assert isinstance(self.likelihood, PictureChain)
        return window_steps(self.likelihood.window, self.sampler.std, step, seed)

    def _draw(
        self,
        sampler: Sampler,
        said: Sequence[ConditionInputs],
        seeds: Sequence[int],
        windows: list[list[int]],
        guidance: float,
        shape: Shape | None = None,
    ) -> Chain:
        shape = shape or self.shape
        x = gaussian(list(seeds), INITIAL, shape).to(self.device)
        noise, keep = noise_of(seeds, shape), self.keep_predictions
        return run(self.predictor(sampler, said, guidance), x, sampler, windows, noise, keep_predictions=keep)

    def _in_two(self, said: Sequence[ConditionInputs], seeds: Sequence[int], point: int) -> Chain:
        """Deterministic chains of which the latents at a grid point are kept, as `x`."""
        predict, shape = self.predictor(self.sampler, said, self.denoising.guidance), self.shape
        none: list[list[int]] = [[]] * len(said)
        ends, noise = [point] * len(said), noise_of(seeds, shape)
        x = gaussian(list(seeds), INITIAL, shape).to(self.device)
        kept = run(predict, x, self.sampler, none, noise, stop=ends).final
        final = run(predict, kept, self.sampler, none, noise, start=ends).final
        return Chain(final, kept[:, None], final[:, None])

    def _branch(
        self,
        likelihood: PictureChain,
        prompts: Sequence[Prompt],
        group_size: int,
        seeds: Sequence[int],
        windows: list[list[int]],
    ) -> Rollouts:
        """A tree a prompt, of which every leaf is a rollout."""
        if (leaves := math.prod(likelihood.branching)) != group_size:
            raise UserError(
                f"denoising.likelihood.branching={list(likelihood.branching)} makes {leaves} leaves a tree; "
                f"rollout.group_size is {group_size}"
            )
        roots, said = [int(s) for s in seeds[::group_size]], [ConditionInputs.of(p) for p in prompts]

        def segment(
            x: Tensor,
            owner: list[int],
            own_seeds: list[int],
            drawn: list[int] | None,
            start: list[int],
            stop: list[int],
        ) -> Chain:
            predict = self.predictor(self.sampler, [said[g] for g in owner], self.denoising.guidance)
            steps: list[list[int]] = [[]] * len(owner) if drawn is None else [[point] for point in drawn]
            return run(predict, x, self.sampler, steps, noise_of(own_seeds, self.shape), start=start, stop=stop)

        noise = gaussian(roots, INITIAL, self.shape).to(self.device)
        last = len(self.sampler.grid)
        chain = trees.grow(segment, noise, roots, windows[::group_size], likelihood.branching, last)
        asked = [p for p in prompts for _ in range(group_size)]
        of_rows = [one for one in said for _ in range(group_size)]
        made = self._rollouts(asked, of_rows, group_size, seeds, chain, windows)
        made.nodes = trees.nodes_of(likelihood.branching, len(windows[0]), group_size, len(prompts))
        return made

    def _candidates(
        self,
        likelihood: PictureChain,
        prompts: Sequence[Prompt],
        group_size: int,
        seeds: Sequence[int],
        windows: list[list[int]],
    ) -> Rollouts:
        """Groups that step from the same states."""
        said = [ConditionInputs.of(p) for p in prompts]

        def segment(
            x: Tensor, owner: list[int], own: list[int], drawn: list[list[int]], start: list[int], stop: list[int]
        ) -> Chain:
            predict = self.predictor(self.sampler, [said[g] for g in owner], self.denoising.guidance)
            return run(predict, x, self.sampler, drawn, noise_of(own, self.shape), start=start, stop=stop)

        noise = gaussian([int(seed) for seed in seeds[::group_size]], INITIAL, self.shape).to(self.device)
        last = len(self.sampler.grid)
        chain = candidates.grow(segment, noise, seeds, windows[::group_size], group_size, last, likelihood.trunk)
        asked = [p for p in prompts for _ in range(group_size)]
        of_rows = [one for one in said for _ in range(group_size)]
        return self._rollouts(asked, of_rows, group_size, seeds, chain, windows)

    def predictor(
        self, sampler: Sampler, said: Sequence[ConditionInputs], guidance: float
    ) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        def predict(x: Tensor, point: Tensor, rows: Tensor) -> Tensor:
            grid = sampler.grid
            asked = [said[i] for i in rows.tolist()]
            return self.guided_prediction(self.module, x, grid.sigmas[point], grid.times[point], asked, guidance)

        return predict

    def guided_prediction(
        self,
        model: Any,
        x: Tensor,
        sigma: Tensor,
        time: Tensor,
        said: Sequence[ConditionInputs],
        guidance: float,
        known: Tensor | None = None,
    ) -> Tensor:
        """[row, ...] what the network says, guided. A prompt's condition is made once and kept. known: what it is, if
        only its gradient is wanted, which the conditional half alone has."""
        embedded, time, shape = self.denoising.embedded_guidance, time.to(x.device), tuple(x.shape[1:])
        negative = self._negative(said) if guidance != 1 and known is None else []
        found = self.conditions([*said, *negative], shape)  # all at once: the encoders visit the device once

        def unconditional() -> Tensor:
            return self.family.predict(model, x, time, found[len(said) :], embedded)

        conditional = self.family.predict(model, x, time, found[: len(said)], embedded)
        scale = scale_at(sigma, guidance, self.denoising.guidance_interval)
        return guided(conditional, unconditional, scale) if known is None else moved(known, conditional, scale)

    def _joined(self, compute: Callable[[slice], Tensor], rows: int) -> Tensor:
        """`compute` of all rows, `steps_at_once` at a time, with a gradient and without: so the first ratio is 1."""
        size = self.steps_at_once or rows
        return torch.cat(by_parts(compute, [slice(first, first + size) for first in range(0, rows, size)]))

    def _negative(self, said: Sequence[ConditionInputs]) -> list[ConditionInputs]:
        """What is asked for in place of `said` where guidance leads away from it."""
        made = {id(one): one.saying(self.denoising.negative_prompt) for one in said}
        return [made[id(one)] for one in said]

    def conditions(self, said: Sequence[ConditionInputs], shape: Shape | None = None) -> list[Condition]:
        """What the encoders say of prompts, for latents of `shape`; each is encoded once and kept while there is room.
        Equal prompts get the same object."""
        shape = self.shape if shape is None else shape
        objects = {id(one): one for one in said}  # rollouts of a group share theirs: comparing all by value is slow
        distinct = list(dict.fromkeys(objects.values()))
        keys = {one: (one, shape if one.images else ()) for one in distinct}
        unknown = [one for one in distinct if keys[one] not in self._conditions]
        found = dict(zip(unknown, self.family.encode(unknown, shape), strict=True)) if unknown else {}
        for one in unknown:
            self._report_cut(one.text)
        found |= {one: self._conditions[keys[one]] for one in distinct if keys[one] in self._conditions}
        for one, condition in found.items():
            self._conditions[keys[one]] = condition
            self._conditions.move_to_end(keys[one])
        while len(self._conditions) > self.denoising.prompt_cache:
            self._conditions.popitem(last=False)
        of = {key: found[one] for key, one in objects.items()}
        return [of[id(one)] for one in said]

    def _report_cut(self, text: str) -> None:
        lost = self.family.cut(text)
        if lost and not self._cut:
            log.warning("prompt %r is %d tokens longer than model.text_tokens allows; its end is not read", text, lost)
        self._cut += lost > 0

    def _rollouts(
        self,
        asked: Sequence[Prompt],
        said: Sequence[ConditionInputs],
        group_size: int,
        seeds: Sequence[int],
        chain: Chain,
        windows: list[list[int]],
        decode: bool = True,
    ) -> Rollouts:
        data, x, x_next = chain.final.cpu(), chain.x.cpu(), chain.x_next.cpu()
        kept = [None] * len(said) if chain.v is None else list(chain.v.cpu())
        shared = isinstance(self.likelihood, PictureMatching) and self.likelihood.shared
        draws = [seeds[i - i % group_size] if shared else seed for i, seed in enumerate(seeds)]
        inputs = [
            PictureRecord(
                said[i], int(seed), data[i], torch.tensor(windows[i], dtype=torch.long), x[i], x_next[i], kept[i]
            )
            for i, seed in enumerate(draws)
        ]
        return Rollouts(
            samples=made_samples(asked, self.family.decode(chain.final).float().cpu() if decode else None),
            inputs=inputs,
            group=torch.arange(len(asked)) // group_size,
            mask=torch.ones(len(asked), self.max_decisions, dtype=torch.bool),
        )

    def _replay_chain(self, likelihood: PictureChain, rollouts: Rollouts, model: Any) -> Replay:
        records: list[PictureRecord] = rollouts.inputs
        points, (x, x_next) = self._steps(records, "x", "x_next")
        said = [r.asked for r in records for _ in range(points.shape[1])]
        grid, flat, known = self.sampler.grid, points.flatten(), None
        first = self.keep_predictions and rollouts.old_prediction is None and torch.is_grad_enabled()
        if first and records[0].prediction is not None:  # which views of other prompts have not
            # No update was made since they were sampled, so that the values are known and half of guidance is saved.
            known = self._steps(records, "prediction")[1][0].flatten(0, 1)
        rows, guidance = x.flatten(0, 1), self.denoising.guidance

        def predict(part: slice) -> Tensor:
            sigma, time, own = grid.sigmas[flat[part]], grid.times[flat[part]], None if known is None else known[part]
            return self.guided_prediction(model, rows[part], sigma, time, said[part], guidance, own)

        v = self._joined(predict, len(rows)).float()
        found: dict[str, Any] = score.chain_likelihood(
            v.view_as(x),
            x,
            x_next,
            self.sampler.drawn(points),
            old=rollouts.old_prediction,
            reference=rollouts.ref_prediction,
            reduction=likelihood.reduction,
        ).known
        weight, segments = self._weight(likelihood, points), segment_ids(likelihood.chunks, len(records))
        return Replay(**found, weight=move(weight, self.device), segments=move(segments, self.device))

    def _steps(self, records: Sequence[PictureRecord], *names: str) -> tuple[Tensor, list[Tensor]]:
        """Where the drawn steps are on the grid [rollout, decision], and tensors of the records on the device."""
        points = torch.stack([record.points for record in records])
        return points, [torch.stack([vars(r)[name] for r in records]).to(self.device) for name in names]

    def _weight(self, likelihood: PictureChain, points: Tensor) -> Tensor | None:
        """[rollout, decision], None where all decisions weigh alike."""
        table = score.step_weights(likelihood.step_weight, self.sampler, likelihood.window)
        weight = None if table is None else table[points]
        if not likelihood.branching:
            return weight
        share = trees.decision_weights(likelihood.branching, points.shape[1]).expand(points.shape)
        return share if weight is None else weight * share

    # --- final pictures ---

    def _replay_data(self, rollouts: Rollouts, model: Any) -> Replay:
        records: list[PictureRecord] = rollouts.inputs
        likelihood, space = self._draws, self.family.space
        data = torch.stack([r.data for r in records])[:, None].to(self.device)
        noise = score.draw_noises([r.seed for r in records], likelihood.draws, data.shape[2:]).to(self.device)
        uniform = torch.stack([self._uniform(r.seed) for r in records])
        sigma, time = (part.view(uniform.shape) for part in self.family.levels(uniform.flatten()))
        x, target = score.noisy_samples(data, noise, sigma, space)
        said = [r.asked for r in records for _ in range(likelihood.draws)]
        guidance = 1.0 if isinstance(likelihood, PictureMatching) else self.denoising.guidance
        rows, levels, times = x.flatten(0, 1), sigma.flatten(), time.flatten()

        def predict(part: slice) -> Tensor:
            return self.guided_prediction(model, rows[part], levels[part], times[part], said[part], guidance)

        v = self._joined(predict, len(rows)).float().view_as(x)
        weight = None
        if isinstance(likelihood, PictureMatching):
            weight = self._matching_weight(likelihood, uniform, sigma).to(self.device)
        old, ref = rollouts.old_prediction, rollouts.ref_prediction
        found: dict[str, Any] = score.matching_likelihood(
            v, target, weight, old=old, reference=ref, reduction=likelihood.reduction
        ).known
        matching = MatchingTargets(
            noisy=x,
            prediction=v,
            old=v.detach() if old is None else old.to(v),
            data=data.expand_as(x),
            sigma=sigma.float().to(self.device),
            signal=score.signal_at(sigma, space).float().to(self.device),
            noise_space=space == "noise",
            source=self._sources(records),
        )
        return Replay(**found, matching=matching)

    def _sources(self, records: Sequence[PictureRecord]) -> Tensor | None:
        """[rollout, 1, ...] the latents of the pictures that were edited; None where there is none."""
        told = self.conditions([record.asked for record in records])
        if any("source" not in condition for condition in told):
            return None
        return torch.stack([condition["source"] for condition in told]).float().to(self.device)[:, None]

    def _matching_weight(self, likelihood: PictureMatching, uniform: Tensor, sigma: Tensor) -> Tensor:
        """w(s), like sigma. The ELBO of a flow integrates (1 - s) / s |v - target|^2 over s; levels are drawn with the
        density du / ds, which the derivative of `levels` undoes."""
        s = sigma.float()
        if likelihood.weight == "elbo":
            e = 1e-3
            slope = (self.family.levels(uniform + e)[0] - self.family.levels(uniform - e)[0]) / (2 * e)
            return (1 - s) / s * slope.float()
        return {"one": torch.ones_like(s), "sigma": s, "sigma_squared": s.square()}[likelihood.weight]

    def _uniform(self, seed: int) -> Tensor:
        """Stratified uniform draws [draw] inside draw_range, from a rollout's seed alone."""
        low, high = self._draws.draw_range
        return low + (high - low) * score.stratified(seed, self._draws.draws, 1)


def made_samples(prompts: Sequence[Prompt], pixels: Tensor | None) -> list[Sample]:
    """Samples with what was decoded: pictures [n, channel, height, width] or clips [n, frame, channel, ...]."""
    if pixels is None:
        return [Sample(prompt) for prompt in prompts]
    clips = pixels.dim() == 5
    return [Sample(p, frames=one) if clips else Sample(p, image=one) for p, one in zip(prompts, pixels, strict=True)]


def pooled(x: Tensor, sigmas: Tensor) -> Tensor:
    """[rollout, decision, number] of latents x [rollout, decision, ...] and their noise levels [rollout, decision]."""
    flat = x.flatten(0, 1)
    pictures = flat.flatten(0, -4) if flat.dim() > 4 else flat  # frames of a clip as further pictures
    if pictures.dim() == 4 and max(pictures.shape[-2:]) > POOLED:
        pictures = torch.nn.functional.adaptive_avg_pool2d(pictures, POOLED)
    return torch.cat([pictures.reshape(*sigmas.shape, -1), sigmas[..., None].to(x)], -1)


def segment_ids(chunks: Sequence[int], rollouts: int) -> Tensor | None:
    """[rollout, decision]: which of the chunks, whose lengths these are, a decision belongs to; None without chunks."""
    if not chunks:
        return None
    ids = torch.arange(len(chunks)).repeat_interleave(torch.tensor(chunks))
    return repeat(ids, "t -> b t", b=rollouts)


def noise_of(seeds: Sequence[int], shape: Shape) -> Callable[[int, Tensor], Tensor]:
    """What `run` asks for: the noise of rows at a step, from each row's seed."""

    def noise(step: int, rows: Tensor) -> Tensor:
        return gaussian([int(seeds[i]) for i in rows.tolist()], step, shape)

    return noise


def move(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)
