"""Chains of denoising steps: the grid points of each row, its stochastic steps, and the latents that are recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmrl.samplers.settings import DPM, DenoisingTransition, Euler, Space, Tail
from mmrl.samplers.sigmas import Grid
from mmrl.samplers.transitions import Coefficients, coefficients, gaussian_step

INITIAL, DRAWS = -1, -2  # noise counters besides the steps of a chain: its start; DRAWS - j for draw j


@dataclass(frozen=True)
class Sampler:
    """A noise grid with its two kinds of step: `transition` inside a window, deterministic outside; without a
    transition every step is deterministic.

    Where `tail` is `DPM`, deterministic steps are of the second order (arXiv 2211.01095). Behind a window the chain
    takes tail.steps steps of what is left of the grid (None: all); without a window it takes all. `space` is what the
    network predicts.
    """

    grid: Grid
    transition: DenoisingTransition | None = None
    tail: Tail = field(default_factory=Euler)
    space: Space = "velocity"

    @property
    def deterministic(self) -> str:
        """Returns the kind of deterministic step for `space`: a kind of `transitions.coefficients`."""
        return "ddim" if self.space == "noise" else "ode"

    @property
    def std(self) -> Tensor:
        """Returns the standard deviations [steps] of the stochastic transition at every step of the grid."""
        return self.drawn(torch.arange(len(self.grid))).std

    def at(self, step: Tensor, after: Tensor, drawn: Tensor) -> Coefficients:
        """Returns coefficients [row] from grid points `step` to grid points `after`, stochastic where `drawn`."""
        sigmas = self.grid.sigmas
        ends = sigmas[step], sigmas[after]
        fixed = coefficients(self.deterministic, *ends)
        if not bool(drawn.any()) or self.transition is None:
            return fixed
        moving = self.transition.step(*ends, sigmas[1])
        return Coefficients(*(m.where(drawn, f) for m, f in zip(moving, fixed, strict=True)))

    def drawn(self, step: Tensor) -> Coefficients:
        """Returns coefficients [...] of the stochastic steps from grid points `step` [...] to the next ones."""
        return self.at(step, step + 1, torch.ones_like(step, dtype=torch.bool))

    def schedule(self, windows: list[list[int]], start: list[int], stop: list[int]) -> tuple[Tensor, Tensor]:
        """Returns the grid points [row, visit + 1] that rows with these windows visit from `start` to `stop`, and
        whether the step from each is stochastic [row, visit]. Rows that arrive early repeat their last point."""
        rows = [self._visits(*row) for row in zip(windows, start, stop, strict=True)]
        width = max(len(row) for row in rows)
        points = torch.tensor([row + [row[-1]] * (width - len(row)) for row in rows])
        drawn = torch.zeros(len(rows), width - 1, dtype=torch.bool)
        for i, window in enumerate(windows):
            drawn[i] = torch.isin(points[i, :-1], torch.tensor(window, dtype=torch.long))
        return points, drawn & (points[:, :-1] < torch.tensor(stop)[:, None])

    def _visits(self, window: list[int], start: int, stop: int) -> list[int]:
        """Returns the points of the noise grid between `start` and `stop` that a chain visits: all up to the window's
        end, then `tail.steps` evenly spaced ones."""
        last = len(self.grid)
        free = max(window) + 1 if window else start  # the first point behind the window
        if stop < last:
            return list(range(start, stop + 1))
        left = last - free
        steps = left if self.tail.steps is None or not window else min(left, self.tail.steps)
        behind = [free + round(i * left / steps) for i in range(steps + 1)] if steps else [last]
        return [*range(start, free), *behind]


@dataclass
class Chain:
    """The latents of a chain, fp32: `final` [row, ...], and `x`, `x_next` before and after the window's steps in order
    [row, window, ...]; `v` holds the network's predictions at `x` if they are kept."""

    final: Tensor
    x: Tensor
    x_next: Tensor
    v: Tensor | None = None


def run(
    predict: Callable[[Tensor, Tensor, Tensor], Tensor],
    x: Tensor,
    sampler: Sampler,
    windows: list[list[int]],
    noise: Callable[[int, Tensor], Tensor],
    *,
    start: list[int] | None = None,
    stop: list[int] | None = None,
    keep_predictions: bool = False,
) -> Chain:
    """Denoises x [row, ...] from grid points `start` (default: pure noise) to `stop` (default: data), one each a row.

    predict(x, point, rows): the network's prediction for latents at grid points `point` [n] of the rows [n].
    windows: one a row, all of the same length. noise(step, rows): standard normal noise [n, ...] for the rows that draw
    at `step`. Rows may be at different grid points; a row that has arrived is not evaluated any more. keep_predictions:
    whether the chain holds the network's predictions at the window's steps.
    """
    last = len(sampler.grid)
    ends = [last] * len(x) if stop is None else stop
    points, drawn = sampler.schedule(windows, [0] * len(x) if start is None else start, ends)
    x = x.float().clone()
    width = int(drawn[0].sum())  # the same for all rows
    names = ("x", "x_next", "v") if keep_predictions else ("x", "x_next")
    recorded = {name: x.new_empty(len(x), width, *x.shape[1:]) for name in names}
    index = drawn.cumsum(1) - 1  # [row, visit] index of a drawn step among those of its row
    previous: Tensor | None = None  # data predicted one step earlier, for the second order
    for visit in range(drawn.shape[1]):
        rows = (points[:, visit] < torch.tensor(ends)).nonzero().flatten()
        at, after, random = points[rows, visit], points[rows, visit + 1], drawn[rows, visit]
        v = predict(x[rows], at, rows).float()
        step = sampler.at(at, after, random)
        z = torch.zeros_like(x[rows])
        for s in at[random].unique().tolist():
            at_step = random & (at == s)
            z[at_step] = noise(s, rows[at_step]).to(z)
        moved, _, _ = gaussian_step(x[rows], v, step, noise=z, keep_mean=False)
        if isinstance(sampler.tail, DPM):
            data = data_of(x[rows], v, sampler.grid.sigmas[at], sampler.deterministic)
            if previous is not None and visit > 0:
                before = points[rows, visit - 1]
                second = ~random & ~drawn[rows, visit - 1]
                moved = moved + _second_order(data, previous[rows], sampler, before, at, after, second)
            previous = torch.zeros_like(x) if previous is None else previous
            previous[rows] = data
        if bool(random.any()):
            drawn_rows = rows[random]
            current = {"x": x[drawn_rows], "x_next": moved[random], "v": v[random]}
            for name, values in recorded.items():
                values[drawn_rows, index[drawn_rows, visit]] = current[name]
        x[rows] = moved
    return Chain(x, **recorded)


def data_of(x: Tensor, v: Tensor, sigma: Tensor, kind: str) -> Tensor:
    """Converts a prediction to data: x - s v, or (x - s e) / sqrt(1 - s^2) where the noise is predicted."""
    signal = (1 - sigma.double().square()).sqrt() if kind == "ddim" else torch.ones_like(sigma)
    s, signal = (c.to(x).view(-1, *[1] * (x.dim() - 1)) for c in (sigma, signal))
    return (x - s * v) / signal


def _second_order(
    data: Tensor, before: Tensor, sampler: Sampler, start: Tensor, at: Tensor, after: Tensor, where: Tensor
) -> Tensor:
    """Returns the second-order term of DPM-Solver++(2M), which is added to a first-order step: a' (1 - exp(-h)) (data -
    before) / (2 r), r = h_before / h.

    With a the signal and s the noise of a level, lambda = log(a / s) and h its increase. 0 where the next level is data
    (h is infinite there, and the first order is what diffusers takes too) or the earlier level is pure noise.
    """
    sigmas = sampler.grid.sigmas.double()
    signal = (1 - sigmas.square()).sqrt() if sampler.deterministic == "ddim" else 1 - sigmas
    rate = signal.log() - sigmas.log()
    h, h_before = rate[after] - rate[at], rate[at] - rate[start]
    gain = signal[after] * -torch.expm1(-h) * h / (2 * h_before)
    usable = where & h.isfinite() & h_before.isfinite()
    gain = gain.where(usable, 0).to(data).view(-1, *[1] * (data.dim() - 1))
    return gain * (data - before)


def mixed(seed: int, number: int) -> int:
    """Returns a seed that depends on `seed` and `number`."""
    return (seed * 0x9E3779B97F4A7C15 + (number + 1) * 0x94D049BB133111EB) % 2**63


def gaussian(seeds: list[int], counter: int, shape: tuple[int, ...]) -> Tensor:
    """Draws standard normal noise [row, *shape] fp32, each row from its seed and `counter` alone: on the CPU, so that
    neither the batch, the number of ranks nor the device changes it."""
    rows = []
    for seed in seeds:
        generator = torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + counter * 0xBF58476D1CE4E5B9) % 2**63)
        rows.append(torch.randn(shape, generator=generator))
    return torch.stack(rows)
