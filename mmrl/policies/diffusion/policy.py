"""Diffusion and flow models as policies: prompts to pictures, pictures to likelihoods."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

from mmrl.core.credit import first_of_each_node
from mmrl.errors import UserError
from mmrl.policies.diffusion.family import Condition, Family
from mmrl.rollouts import Prompt, Replay, Rollouts, Sample
from mmrl.samplers import transitions
from mmrl.samplers.chain import Chain, Sampler, gaussian, mixed, run
from mmrl.samplers.guidance import guided, scale_at
from mmrl.samplers.settings import Denoising
from mmrl.samplers.transitions import compare_steps, reduce_elements, step_kl

INITIAL, DRAWS = -1, -2  # counters of a rollout's noise that are not steps of its chain


@dataclass(frozen=True)
class Drawn:
    """One picture: what it was asked for, and the steps of its chain or the picture itself. fp32, on the CPU."""

    text: str
    seed: int
    data: Tensor  # [channel, height, width] the final latent
    points: Tensor  # [window] int64, grid points of the steps that were drawn
    x: Tensor  # [window, channel, height, width] before each of them
    x_next: Tensor  # [window, channel, height, width] after


class DiffusionPolicy:
    """Draws pictures with a family's network and says how likely they were.

    With `likelihood` "chain" a decision is a step of the sampler inside the window; with "matching" and "contrast" it
    is one noise level at which the final picture is compared with what the network makes of it.
    """

    def __init__(self, family: Family, settings: Denoising, *, kl: str = "exact", supervised: bool = False) -> None:
        self.family, self.settings, self.kl = family, settings, kl
        self.module: nn.Module = family.module
        self.likelihood = "matching" if supervised else settings.likelihood
        self.matching_weight = settings.matching_weight
        self.shape = family.latent_shape(settings.resolution)
        self.evaluation_shape = family.latent_shape(settings.evaluation_resolution or settings.resolution)
        self.sampler = self._sampler(settings.steps, self.shape)
        self._conditions: OrderedDict[str, Condition] = OrderedDict()
        self._check()

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def max_decisions(self) -> int:
        return len(self._window(0, 0)) if self.likelihood == "chain" else self.settings.draws

    # --- prompts to pictures ---

    def rollout(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], *, step: int = 0) -> Rollouts:
        """Draw `group_size` pictures a prompt. seeds: one a rollout, prompt by prompt; `step` moves sliding windows."""
        texts = [p.text for p in prompts for _ in range(group_size)]
        with torch.no_grad():
            if self.likelihood != "chain":
                windows: list[list[int]] = [[]] * len(texts)
                chain = self._draw(self.sampler, texts, seeds, windows, self.settings.guidance)
            elif self.settings.branching:
                return self._branch(prompts, group_size, seeds, step)
            else:
                of_group = [self._window(step, seed) for seed in seeds[::group_size]]
                windows = [window for window in of_group for _ in range(group_size)]
                chain = self._draw(self.sampler, texts, seeds, windows, self.settings.guidance)
        return self._rollouts(prompts, group_size, seeds, chain, windows)

    def respond(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Sample]:
        """One picture a prompt without noise in its chain, with the steps, size and guidance of evaluation."""
        settings = self.settings
        guidance = settings.guidance if settings.evaluation_guidance is None else settings.evaluation_guidance
        sampler = self._sampler(settings.evaluation_steps, self.evaluation_shape)
        with torch.no_grad():
            chain = self._draw(
                sampler, [p.text for p in prompts], seeds, [[]] * len(prompts), guidance, self.evaluation_shape
            )
            images = self.family.decode(chain.final).float().cpu()
        return [Sample(prompt, image=image) for prompt, image in zip(prompts, images, strict=True)]

    def demonstrate(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> Rollouts:
        """The pictures that prompts carry in metadata["target"] ([channel, height, width], 0 to 1)."""
        missing = next((p.id for p in prompts if "target" not in p.metadata), None)
        if missing is not None:
            raise UserError(
                f"prompt {missing} has no picture to learn from: algorithm.method=supervised needs a target"
            )
        with torch.no_grad():
            data = self.family.to_latents(torch.stack([p.metadata["target"] for p in prompts]).to(self.device))
        empty = data.new_zeros(len(data), 0, *data.shape[1:])
        made = self._rollouts(prompts, 1, seeds, Chain(data, empty, empty), [[]] * len(prompts), decode=False)
        dropped = [self._uniform(seed, 1)[0] < self.settings.prompt_dropout for seed in seeds]
        made.inputs = [
            Drawn(self.settings.negative_prompt if drop else d.text, d.seed, d.data, d.points, d.x, d.x_next)
            for d, drop in zip(made.inputs, dropped, strict=True)
        ]
        return made

    # --- pictures to likelihoods ---

    def replay(self, rollouts: Rollouts, model: Any) -> Replay:
        """What `model` (`self.module` or the engine around it) says of every decision; one forward for all of them."""
        return self._replay_chain(rollouts, model) if self.likelihood == "chain" else self._replay_data(rollouts, model)

    def reference(self, rollouts: Rollouts) -> Replay:
        """The same under the model that training started from."""
        with torch.no_grad(), self.family.reference():
            return self.replay(rollouts, self.module)

    def counts(self) -> dict[str, float]:
        return {}

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        self.family.save(folder, state)

    # --- chains ---

    def _sampler(self, steps: int, shape: tuple[int, int, int]) -> Sampler:
        s = self.settings
        kind = "ddim" if self.family.space == "noise" else s.transition
        return Sampler(self.family.grid(steps, shape), kind, s.noise, s.tail, s.tail_steps)

    def _check(self) -> None:
        """Raises UserError for a transition or weight that is not the model's, and a window that can not be."""
        s, noise = self.settings, self.family.space == "noise"
        kinds = ("ddim",) if noise else ("flow_sde", "dance_sde", "cps")
        drawn = self.likelihood == "chain"
        if s.transition not in kinds and (drawn or not noise):  # without a chain of its own a noise model ignores it
            raise UserError(
                f"denoising.transition={s.transition} is not for a model that predicts "
                f"{'noise' if noise else 'velocity'}; use {' or '.join(kinds)}"
            )
        if noise and self.likelihood == "matching" and self.matching_weight == "elbo":
            raise UserError("denoising.matching_weight=elbo is for models that predict velocity; use one or sigma")
        if not drawn:
            return
        try:
            width = len(self._window(0, 0))
        except ValueError as error:
            raise UserError(f"denoising: {error}") from None
        if s.chunks and sum(s.chunks) != width:
            raise UserError(f"denoising.chunks={list(s.chunks)} cover {sum(s.chunks)} steps, the window has {width}")

    def _window(self, step: int, seed: int) -> list[int]:
        return self.settings.window.steps(self.sampler.std, step, seed)

    def _draw(
        self,
        sampler: Sampler,
        texts: Sequence[str],
        seeds: Sequence[int],
        windows: list[list[int]],
        guidance: float,
        shape: tuple[int, int, int] | None = None,
    ) -> Chain:
        shape = shape or self.shape
        x = gaussian(list(seeds), INITIAL, shape).to(self.device)
        noise = _noise([int(s) for s in seeds], shape)
        return run(self._predictor(sampler, texts, guidance), x, sampler, windows, noise)

    def _branch(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], step: int) -> Rollouts:
        """A tree a prompt: one noise, one deterministic prefix, then children at each step of the window."""
        roots = [int(s) for s in seeds[::group_size]]
        windows = [self._window(step, root) for root in roots]
        factors = [*self.settings.branching, *[1] * (len(windows[0]) - len(self.settings.branching))]
        if len(factors) != len(windows[0]) or math.prod(factors) != group_size:
            raise UserError(
                f"denoising.branching={list(self.settings.branching)} makes {math.prod(factors)} leaves over "
                f"{len(factors)} steps; the window has {len(windows[0])} steps and rollout.group_size is {group_size}"
            )
        texts = [p.text for p in prompts]
        x = gaussian(roots, INITIAL, self.shape).to(self.device)
        stops = [[window[0] for window in windows]]
        stops += [[window[j] for window in windows] for j in range(1, len(factors))]
        stops += [[len(self.sampler.grid)] * len(roots)]
        seen: list[Chain] = []
        chain = self._segment(x, texts, roots, [[]] * len(roots), [0] * len(roots), stops[0])
        leaves = 1
        for j, factor in enumerate(factors):
            leaves *= factor
            x = repeat(chain.final, "b ... -> (b k) ...", k=factor)
            owner = [g for g in range(len(roots)) for _ in range(leaves)]
            child = [mixed(roots[g], n) for g in range(len(roots)) for n in range(leaves)]
            chain = self._segment(
                x,
                [texts[g] for g in owner],
                child,
                [[windows[g][j]] for g in owner],
                [windows[g][j] for g in owner],
                [stops[j + 1][g] for g in owner],
            )
            seen.append(chain)
        later = [math.prod(factors[j + 1 :]) for j in range(len(factors))]
        spread = [
            repeat(torch.stack([c.x, c.x_next]), "two b ... -> two (b k) ...", k=k)
            for c, k in zip(seen, later, strict=True)
        ]
        x, x_next = torch.cat(spread, 2)
        whole = Chain(chain.final, x, x_next)
        made = self._rollouts(prompts, group_size, seeds, whole, [w for w in windows for _ in range(group_size)])
        leaf = torch.arange(group_size).repeat(len(roots))
        made.nodes = torch.stack([leaf // k for k in later], 1)
        made.mask = made.mask & first_of_each_node(made.group, made.nodes)
        return made

    def _segment(
        self,
        x: Tensor,
        texts: Sequence[str],
        seeds: Sequence[int],
        windows: list[list[int]],
        start: list[int],
        stop: list[int],
    ) -> Chain:
        predict = self._predictor(self.sampler, texts, self.settings.guidance)
        return run(predict, x, self.sampler, windows, _noise(seeds, self.shape), start=start, stop=stop)

    def _predictor(self, sampler: Sampler, texts: Sequence[str], guidance: float) -> Any:
        def predict(x: Tensor, point: Tensor, rows: Tensor) -> Tensor:
            grid = sampler.grid
            asked = [texts[i] for i in rows.tolist()]
            return self._predict(self.module, x, grid.sigmas[point], grid.times[point], asked, guidance)

        return predict

    def _predict(
        self, model: Any, x: Tensor, sigma: Tensor, time: Tensor, texts: Sequence[str], guidance: float
    ) -> Tensor:
        """[row, ...] what the network says, guided. A text's embedding is made once and kept."""
        embedded, time = self.settings.embedded_guidance, time.to(x.device)
        conditional = self.family.predict(model, x, time, self.conditions(texts), embedded)

        def unconditional() -> Tensor:
            empty = self.conditions([self.settings.negative_prompt] * len(texts))
            return self.family.predict(model, x, time, empty, embedded)

        return guided(conditional, unconditional, scale_at(sigma, guidance, self.settings.guidance_interval))

    def conditions(self, texts: Sequence[str]) -> list[Condition]:
        """Embeddings of `texts`, from the cache where they are in it; each text is encoded once."""
        unknown = [t for t in dict.fromkeys(texts) if t not in self._conditions]
        found = dict(zip(unknown, self.family.encode(unknown), strict=True)) if unknown else {}
        found |= {t: self._conditions[t] for t in dict.fromkeys(texts) if t in self._conditions}
        for text, condition in found.items():
            self._conditions[text] = condition
            self._conditions.move_to_end(text)
        while len(self._conditions) > self.settings.prompt_cache:
            self._conditions.popitem(last=False)
        return [found[t] for t in texts]

    def _rollouts(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        seeds: Sequence[int],
        chain: Chain,
        windows: list[list[int]],
        decode: bool = True,
    ) -> Rollouts:
        asked = [p for p in prompts for _ in range(group_size)]
        images = self.family.decode(chain.final).float().cpu() if decode else [None] * len(asked)
        data, x, x_next = chain.final.cpu(), chain.x.cpu(), chain.x_next.cpu()
        inputs = [
            Drawn(p.text, int(seed), data[i], torch.tensor(windows[i], dtype=torch.long), x[i], x_next[i])
            for i, (p, seed) in enumerate(zip(asked, seeds, strict=True))
        ]
        width = len(windows[0]) if self.likelihood == "chain" else self.settings.draws
        return Rollouts(
            samples=[Sample(p, image=image) for p, image in zip(asked, images, strict=True)],
            inputs=inputs,
            group=torch.arange(len(prompts)).repeat_interleave(group_size),
            mask=torch.ones(len(asked), width, dtype=torch.bool),
        )

    def _replay_chain(self, rollouts: Rollouts, model: Any) -> Replay:
        drawn: list[Drawn] = rollouts.inputs
        size = (len(drawn), len(drawn[0].points))
        points = torch.stack([d.points for d in drawn]).flatten()
        x = rearrange(torch.stack([d.x for d in drawn]), "b t ... -> (b t) ...").to(self.device)
        x_next = rearrange(torch.stack([d.x_next for d in drawn]), "b t ... -> (b t) ...").to(self.device)
        texts = [d.text for d in drawn for _ in range(size[1])]
        grid, s = self.sampler.grid, self.settings
        step = self.sampler.at(points, points + 1, torch.ones_like(points, dtype=torch.bool))
        v = self._predict(model, x, grid.sigmas[points], grid.times[points], texts, s.guidance).float()
        old = self._stored(rollouts.old_prediction, v)
        compared = compare_steps(x, v, old, step, x_next, reduction=s.reduction)
        replay = Replay(
            logp=compared.logp.view(size),
            log_ratio=compared.log_ratio.view(size),
            divergence=compared.kl.detach().view(size),
            prediction=v.detach().view(*size, *v.shape[1:]),
            std=step.std.view(size).to(self.device),
            weight=None if s.step_weight == "none" else self._step_weight(points).view(size),
            segments=self._segments(size),
        )
        if rollouts.ref_prediction is not None:
            ref = rollouts.ref_prediction.view_as(v).to(v.device)
            replay.reference_kl = self._kl(v, ref, step).view(size)
        return replay

    def _kl(self, v: Tensor, ref: Tensor, step: transitions.Coefficients | None) -> Tensor:
        if self.kl == "velocity" or step is None:
            return reduce_elements((v - ref).square(), self.settings.reduction)
        return step_kl(v, ref, step, reduction=self.settings.reduction)

    def _step_weight(self, points: Tensor) -> Tensor:
        """Weights of steps, of mean 1 over the steps a window may hold, whatever this batch holds."""
        steps = list(self.settings.window.usable(self.sampler.std))
        dt = -self.sampler.grid.sigmas.diff()
        table = self.sampler.std if self.settings.step_weight == "std" else (1 / dt).float()
        return (table[points] / table[steps].mean()).to(self.device)

    def _segments(self, size: tuple[int, int]) -> Tensor | None:
        chunks = self.settings.chunks
        if not chunks:
            return None
        ids = torch.arange(len(chunks)).repeat_interleave(torch.tensor(chunks))
        return repeat(ids, "t -> b t", b=size[0]).to(self.device)

    # --- final pictures ---

    def _replay_data(self, rollouts: Rollouts, model: Any) -> Replay:
        drawn: list[Drawn] = rollouts.inputs
        m = self.settings.draws
        size = (len(drawn), m)
        data = repeat(torch.stack([d.data for d in drawn]), "b ... -> (b m) ...", m=m).to(self.device)
        noise = torch.stack([gaussian([d.seed], DRAWS - j, d.data.shape)[0] for d in drawn for j in range(m)])
        noise = noise.to(self.device)
        uniform = torch.stack([self._uniform(d.seed, m, 1) for d in drawn]).flatten()
        sigma, time = self.family.levels(uniform)
        signal = (1 - sigma.double().square()).sqrt() if self.family.space == "noise" else 1 - sigma
        s, signal = (c.float().to(self.device).view(-1, *[1] * (data.dim() - 1)) for c in (sigma, signal))
        x = signal * data + s * noise
        target = noise if self.family.space == "noise" else noise - data
        texts = [d.text for d in drawn for _ in range(m)]
        guidance = 1.0 if self.likelihood == "matching" else self.settings.guidance
        v = self._predict(model, x, sigma, time, texts, guidance).float()
        old = self._stored(rollouts.old_prediction, v)
        weight = self._matching_weight(uniform, sigma).to(self.device)

        def logp(prediction: Tensor) -> Tensor:
            return -weight * reduce_elements((prediction - target).square(), self.settings.reduction)

        # With both predictions at hand the difference of squares has a form that is exactly 0 on-policy.
        moved = reduce_elements((v - old) * (v + old - 2 * target), self.settings.reduction)
        replay = Replay(
            logp=logp(v).view(size),
            log_ratio=(-weight * moved).view(size),
            prediction=v.detach().view(*size, *v.shape[1:]),
        )
        if rollouts.ref_prediction is not None:
            ref = rollouts.ref_prediction.view_as(v).to(v.device)
            replay.reference_kl = self._kl(v, ref, None).view(size)
        if self.likelihood == "contrast":
            away = self.settings.strength * (v - old)  # exactly 0 on-policy: both implicit policies are `old` there
            pair = [
                _contrast_error((x - s * p) / signal if self.family.space == "noise" else x - s * p, data).view(size)
                for p in (old + away, old - away)
            ]
            replay.errors = (pair[0], pair[1])
        return replay

    def _matching_weight(self, uniform: Tensor, sigma: Tensor) -> Tensor:
        """w(s) [n]. The ELBO of a flow integrates (1 - s) / s |v - target|^2 over s; levels are drawn with the density
        du / ds, which the derivative of `levels` undoes."""
        s = sigma.float()
        if self.matching_weight == "elbo":
            e = 1e-3
            slope = (self.family.levels(uniform + e)[0] - self.family.levels(uniform - e)[0]) / (2 * e)
            return (1 - s) / s * slope.float()
        return {"one": torch.ones_like(s), "sigma": s, "sigma_squared": s.square()}[self.matching_weight]

    def _uniform(self, seed: int, count: int, counter: int = 0) -> Tensor:
        """Stratified uniform draws [count] inside draw_range, from a rollout's seed alone."""
        generator = torch.Generator().manual_seed(mixed(seed, 1000 + counter))
        low, high = self.settings.draw_range if counter else (0.0, 1.0)
        u = (torch.arange(count) + torch.rand(count, generator=generator)) / count
        return low + (high - low) * u

    @staticmethod
    def _stored(prediction: Tensor | None, now: Tensor) -> Tensor:
        return now.detach() if prediction is None else prediction.reshape(now.shape).to(now.device)


def _contrast_error(estimate: Tensor, data: Tensor) -> Tensor:
    """[row]: squared error over its own detached mean absolute size, which keeps levels comparable."""
    error = estimate - data
    size = reduce_elements(error.detach().abs(), "mean").clamp(min=1e-5)
    return reduce_elements(error.square(), "mean") / size


def _noise(seeds: Sequence[int], shape: tuple[int, ...]) -> Any:
    def noise(step: int, rows: Tensor) -> Tensor:
        return gaussian([int(seeds[i]) for i in rows.tolist()], step, shape)

    return noise
