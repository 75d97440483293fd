"""Chains of denoising steps: which levels of the noise grid each row visits, which of its steps are stochastic, and the
latents that are recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmrl.samplers.settings import DPM, DenoisingTransition, Euler, Space, Tail
from mmrl.samplers.sigmas import Grid
from mmrl.samplers.transitions import Coefficients, coefficients, gaussian_step

# Counters of `gaussian_noise` for noises that belong to no step of a chain: its initial noise, and (DRAWS - j) draw j
# of `score.draw_noises`
INITIAL, DRAWS = -1, -2


@dataclass(frozen=True)
class Sampler:
    """A noise grid and the kinds of step on it: `transition` inside the window, a deterministic solver elsewhere.

    transition: None makes every step deterministic. tail: the deterministic solver; `DPM` is of second order (arXiv
    2211.01095). After the window the chain takes tail.steps steps over the rest of the grid (None: one
    per grid point); without a window it takes them all. space: what the network predicts.
    """

    grid: Grid
    transition: DenoisingTransition | None = None
    tail: Tail = field(default_factory=Euler)
    space: Space = "velocity"

    @property
    def deterministic(self) -> str:
        """Returns the kind of deterministic step, a kind of `transitions.coefficients`."""
        return "ddim" if self.space == "noise" else "ode"

    @property
    def std(self) -> Tensor:
        """Returns the standard deviations [steps] of the stochastic transition at every step of the grid."""
        return self.stochastic_coefficients(torch.arange(len(self.grid))).std

    def coefficients_between(self, point: Tensor, next_point: Tensor, stochastic: Tensor) -> Coefficients:
        """Returns the coefficients of the steps from grid points `point` [row] to `next_point` [row], stochastic where
        the bool `stochastic` [row] is true."""
        sigmas = self.grid.sigmas
        sigma, sigma_next = sigmas[point], sigmas[next_point]
        without_noise = coefficients(self.deterministic, sigma, sigma_next)
        if not bool(stochastic.any()) or self.transition is None:
            return without_noise
        with_noise = self.transition.step(sigma, sigma_next, sigmas[1])
        return Coefficients(*(s.where(stochastic, d) for s, d in zip(with_noise, without_noise, strict=True)))

    def stochastic_coefficients(self, point: Tensor) -> Coefficients:
        """Returns the coefficients of the stochastic steps from grid points `point` [...] to the next ones."""
        return self.coefficients_between(point, point + 1, torch.ones_like(point, dtype=torch.bool))

    def schedule(self, windows: list[list[int]], start: list[int], stop: list[int]) -> tuple[Tensor, Tensor]:
        """Returns the grid points [row, visit + 1] that each row visits from `start` to `stop`, and whether the step
        from each is stochastic, bool [row, visit].

        windows: the stochastic steps of each row. Rows that arrive early repeat their last point.
        """
        rows = [self._visits(*row) for row in zip(windows, start, stop, strict=True)]
        width = max(len(row) for row in rows)
        points = torch.tensor([row + [row[-1]] * (width - len(row)) for row in rows])
        stochastic = torch.zeros(len(rows), width - 1, dtype=torch.bool)
        for i, window in enumerate(windows):
            stochastic[i] = torch.isin(points[i, :-1], torch.tensor(window, dtype=torch.long))
        return points, stochastic & (points[:, :-1] < torch.tensor(stop)[:, None])

    def _visits(self, window: list[int], start: int, stop: int) -> list[int]:
        """Returns the grid points that a row visits from `start` to `stop`: all up to the end of the window, then
        `tail.steps` evenly spaced ones to the end of the grid; all, if `stop` is before the end of the grid."""
        last = len(self.grid)
        window_end = max(window) + 1 if window else start
        if stop < last:
            return list(range(start, stop + 1))
        remaining = last - window_end
        steps = remaining if self.tail.steps is None or not window else min(remaining, self.tail.steps)
        tail = [window_end + round(i * remaining / steps) for i in range(steps + 1)] if steps else [last]
        return [*range(start, window_end), *tail]


@dataclass
class Chain:
    """The latents of a denoising chain, fp32.

    final: [row, ...], the sample. x, x_next: [row, window step, ...], the latents before and after each step of the
    window. v: like x, the network's predictions at `x`, if they were kept.
    """

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
    """Denoises x [row, ...] from grid point start[row] (default: pure noise) to stop[row] (default: data).

    predict(x, point, rows): returns the network's prediction for the latents x [n, ...] of `rows` [n], at grid points
    `point` [n]. windows: the stochastic steps of each row, as many for every row. noise(step, rows): returns standard
    normal noise [n, ...] for the rows whose step `step` is stochastic. Rows may be at different grid points; a row that
    has arrived is not evaluated again. keep_predictions: record the network's predictions at the window's steps.
    """
    last = len(sampler.grid)
    ends = [last] * len(x) if stop is None else stop
    points, stochastic = sampler.schedule(windows, [0] * len(x) if start is None else start, ends)
    x = x.float().clone()
    width = int(stochastic[0].sum())  # the same for all rows
    names = ("x", "x_next", "v") if keep_predictions else ("x", "x_next")
    recorded = {name: x.new_empty(len(x), width, *x.shape[1:]) for name in names}
    window_index = stochastic.cumsum(1) - 1  # [row, visit] index of a stochastic step among those of its row
    previous_data: Tensor | None = None  # data predicted one step earlier, for second-order steps
    for visit in range(stochastic.shape[1]):
        rows = (points[:, visit] < torch.tensor(ends)).nonzero().flatten()
        point, next_point, is_stochastic = points[rows, visit], points[rows, visit + 1], stochastic[rows, visit]
        v = predict(x[rows], point, rows).float()
        step = sampler.coefficients_between(point, next_point, is_stochastic)
        z = torch.zeros_like(x[rows])
        for s in point[is_stochastic].unique().tolist():
            at_step = is_stochastic & (point == s)
            z[at_step] = noise(s, rows[at_step]).to(z)
        x_next, _, _ = gaussian_step(x[rows], v, step, noise=z, keep_mean=False)
        if isinstance(sampler.tail, DPM):
            data = predicted_data(x[rows], v, sampler.grid.sigmas[point], sampler.deterministic)
            if previous_data is not None and visit > 0:
                previous_point = points[rows, visit - 1]
                # second order needs two deterministic steps in a row
                second = ~is_stochastic & ~stochastic[rows, visit - 1]
                x_next = x_next + _second_order_term(
                    data, previous_data[rows], sampler, previous_point, point, next_point, second
                )
            previous_data = torch.zeros_like(x) if previous_data is None else previous_data
            previous_data[rows] = data
        if bool(is_stochastic.any()):
            window_rows = rows[is_stochastic]
            current = {"x": x[window_rows], "x_next": x_next[is_stochastic], "v": v[is_stochastic]}
            for name, values in recorded.items():
                values[window_rows, window_index[window_rows, visit]] = current[name]
        x[rows] = x_next
    return Chain(x, **recorded)


def predicted_data(x: Tensor, v: Tensor, sigma: Tensor, kind: str) -> Tensor:
    """Converts a prediction v at latents x, both [row, ...], to data (diffusers' pred_original_sample).

    x - s v for a velocity, (x - s v) / sqrt(1 - s^2) if the network predicts the noise (kind "ddim"); s = sigma [row].
    """
    signal = (1 - sigma.double().square()).sqrt() if kind == "ddim" else torch.ones_like(sigma)
    s, signal = (c.to(x).view(-1, *[1] * (x.dim() - 1)) for c in (sigma, signal))
    return (x - s * v) / signal


def _second_order_term(
    data: Tensor,
    previous_data: Tensor,
    sampler: Sampler,
    previous_point: Tensor,
    point: Tensor,
    next_point: Tensor,
    mask: Tensor,
) -> Tensor:
    """Returns the term [row, ...] that DPM-Solver++(2M) adds to a first-order step (arXiv 2211.01095).

    a' (1 - exp(-h)) (data - previous_data) / (2 r), r = h_previous / h, with a the signal and s the noise of a level,
    and h the increase of lambda = log(a / s). data, previous_data: predicted at grid points `point` and
    `previous_point` [row]. It is 0 outside `mask` [row], where the next level is data (h is infinite; diffusers takes
    the first order there too), and where the previous level is pure noise.
    """
    sigmas = sampler.grid.sigmas.double()
    signal = (1 - sigmas.square()).sqrt() if sampler.deterministic == "ddim" else 1 - sigmas
    log_snr = signal.log() - sigmas.log()  # lambda
    h, h_previous = log_snr[next_point] - log_snr[point], log_snr[point] - log_snr[previous_point]
    factor = signal[next_point] * -torch.expm1(-h) * h / (2 * h_previous)
    usable = mask & h.isfinite() & h_previous.isfinite()
    factor = factor.where(usable, 0).to(data).view(-1, *[1] * (data.dim() - 1))
    return factor * (data - previous_data)


def derive_seed(seed: int, number: int) -> int:
    """Returns a new seed, a function of `seed` and `number` alone."""
    # The multipliers of splitmix64, which spread consecutive numbers over all seeds
    return (seed * 0x9E3779B97F4A7C15 + (number + 1) * 0x94D049BB133111EB) % 2**63


def gaussian_noise(seeds: list[int], counter: int, shape: tuple[int, ...]) -> Tensor:
    """Returns standard normal noise [row, *shape] fp32. Each row depends on its seed and `counter` alone. It is sampled
    on the CPU, so that batch, ranks and device do not change it."""
    rows = []
    for seed in seeds:  # multipliers of splitmix64, as in `derive_seed`
        generator = torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + counter * 0xBF58476D1CE4E5B9) % 2**63)
        rows.append(torch.randn(shape, generator=generator))
    return torch.stack(rows)
