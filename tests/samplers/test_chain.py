"""Whole chains: which grid points are visited, what is kept of them, and how near they come to the exact solution."""

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler

from mmrl.samplers.chain import Sampler, gaussian_noise, run
from mmrl.samplers.settings import DDIM, DPM, DenoisingTransition, Tail
from mmrl.samplers.sigmas import Grid, ddim_grid, shifted
from mmrl.samplers.transitions import Coefficients
from mmrl.settings import choose

SHAPE = (2, 4, 4)


def sampler(steps=10, kind="flow_sde", noise=0.7, shift=1.0, tail="ode"):
    sigmas = shifted(steps, shift)
    return Sampler(
        Grid(sigmas, sigmas[:-1]), choose(DenoisingTransition, {"type": kind, "noise": noise}), choose(Tail, tail)
    )


def exact(sampler, mean=0.5, std=0.3):
    """The velocity E[noise - data | x] of Gaussian data, elementwise."""

    def predict(x, point, rows):
        s = sampler.grid.sigmas[point].view(-1, 1, 1, 1)
        variance = (1 - s) ** 2 * std**2 + s**2
        centred = x - (1 - s) * mean
        return s / variance * centred - (mean + (1 - s) * std**2 / variance * centred)

    return predict


def start(rows):
    return gaussian_noise(list(range(rows)), -1, SHAPE)


def noise_of(seeds):
    return lambda step, rows: gaussian_noise([seeds[i] for i in rows.tolist()], step, SHAPE)


def no_noise(step, rows):
    raise AssertionError("a deterministic chain asked for noise")


def final(sampler, rows=3):
    return run(exact(sampler), start(rows), sampler, [[]] * rows, no_noise).final


class TestVisits:
    @pytest.mark.parametrize(
        ("window", "tail_steps", "expected"),
        [
            ([], None, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
            ([], 2, [0, 1, 2, 3, 4, 5, 6, 7, 8]),  # no window, so nothing lies behind one: evaluation takes all steps
            ([2, 3], None, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
            ([2, 3], 2, [0, 1, 2, 3, 4, 6, 8]),
            ([2, 3], 1, [0, 1, 2, 3, 4, 8]),
            ([2, 3], 9, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
            ([6, 7], 2, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
            ([0, 1], 4, [0, 1, 2, 4, 5, 6, 8]),  # behind step 2 come 6 i / 4, rounded: 1.5 to 2, 3, 4.5 to 4, 6
        ],
    )
    def test_tail_steps_thin_out_what_lies_behind_the_window_and_end_at_data(self, window, tail_steps, expected):
        points, drawn = sampler(8, tail={"type": "ode", "steps": tail_steps}).schedule([window], [0], [8])
        assert points[0].tolist() == expected
        assert points[0, :-1][drawn[0]].tolist() == window

    def test_rows_that_have_arrived_stay(self):
        points, drawn = sampler(6).schedule([[1], [4]], [1, 0], [3, 6])
        assert points.tolist() == [[1, 2, 3, 3, 3, 3, 3], [0, 1, 2, 3, 4, 5, 6]]
        assert drawn.tolist() == [[True] + [False] * 5, [False] * 4 + [True, False]]

    def test_a_row_that_stops_where_its_window_begins_does_not_draw_there(self):
        points, drawn = sampler(6).schedule([[2], [2]], [0, 0], [2, 3])
        assert points.tolist() == [[0, 1, 2, 2], [0, 1, 2, 3]]
        assert drawn.tolist() == [[False] * 3, [False, False, True]]


@pytest.mark.parametrize("tail", ["ode", "dpm++", {"type": "dpm++", "steps": 2}])
@pytest.mark.parametrize("kind", ["flow_sde", "dance_sde", "cps"])
def test_rows_with_starts_stops_and_windows_of_their_own_equal_each_row_alone(kind, tail):
    made = sampler(kind=kind, tail=tail)
    windows, begins, ends = [[2, 3], [5, 6], [0, 1], [2, 3]], [0, 0, 0, 1], [10, 10, 2, 7]
    x, predict = start(4), exact(made)
    together = run(predict, x, made, windows, noise_of([7, 8, 9, 10]), start=begins, stop=ends)
    for i in range(4):
        alone = run(
            predict,
            x[i : i + 1],
            made,
            windows[i : i + 1],
            noise_of([7 + i]),
            start=begins[i : i + 1],
            stop=ends[i:][:1],
        )
        for name in ("final", "x", "x_next"):
            assert torch.equal(vars(together)[name][i], vars(alone)[name][0]), name


def test_what_is_kept_are_the_latents_around_the_windows_steps():
    """A window over steps 3 and 4: x_next of the first is x of the second, and the prefix is Euler's."""
    made = sampler()
    chain = run(exact(made), start(2), made, [[3, 4]] * 2, noise_of([1, 2]))
    assert torch.equal(chain.x_next[:, 0], chain.x[:, 1])
    prefix = run(exact(made), start(2), made, [[]] * 2, no_noise, stop=[3, 3])
    assert torch.equal(prefix.final, chain.x[:, 0]) and prefix.x.shape[1] == 0
    tail = run(exact(made), chain.x_next[:, 1], made, [[]] * 2, no_noise, start=[5, 5])
    assert torch.equal(tail.final, chain.final)


def test_a_chain_without_steps_is_its_start():
    made = sampler()
    assert torch.equal(run(exact(made), start(2), made, [[]] * 2, no_noise, start=[4, 4], stop=[4, 4]).final, start(2))


class TestSecondOrder:
    def test_equals_euler_with_many_steps(self):
        torch.testing.assert_close(final(sampler(200, tail="dpm++")), final(sampler(200)), atol=1e-2, rtol=0)

    @pytest.mark.parametrize(("shift", "share"), [(1.0, 0.5), (3.0, 0.95)])
    def test_is_nearer_to_the_exact_solution_than_euler(self, shift, share):
        """Measured shares of Euler's error: 0.31, and 0.91 where the grid has few steps near the data."""
        reference = final(sampler(400, shift=shift))
        rough, better = (final(sampler(10, shift=shift, tail=tail)) for tail in ("ode", "dpm++"))
        assert (better - reference).norm() < share * (rough - reference).norm()

    def test_noise_predicting_models_gain_too(self):
        """The exact noise of Gaussian data at x = sqrt(1 - s^2) data + s noise."""
        alphas = torch.linspace(0.9999, 0.98, 1000, dtype=torch.float64).cumprod(0)

        def predict_with(made):
            def predict(x, point, rows):
                s = made.grid.sigmas[point].view(-1, 1, 1, 1)
                signal = (1 - s**2).sqrt()
                return (s * (x - signal * 0.5) / (signal**2 * 0.09 + s**2)).float()

            return predict

        found = {}
        for steps, tail in ((10, "ode"), (10, "dpm++"), (500, "ode")):
            grid = ddim_grid(alphas, torch.linspace(999, 0, steps).round())
            made = Sampler(grid, DDIM(noise=0.0), choose(Tail, tail), "noise")
            found[steps, tail] = run(predict_with(made), start(3), made, [[]] * 3, no_noise).final
        error = {k: float((v - found[500, "ode"]).norm()) for k, v in found.items()}
        assert error[10, "dpm++"] < 0.75 * error[10, "ode"]  # measured: 0.62

    @pytest.mark.parametrize("space", ["velocity", "noise"])
    def test_equals_diffusers(self, space):
        """All steps of DPM-Solver++(2M) on the scheduler's own sigmas, with a prediction that is not linear in time."""
        settings = {"algorithm_type": "dpmsolver++", "solver_order": 2, "final_sigmas_type": "zero"}
        if space == "velocity":
            settings |= {"use_flow_sigmas": True, "flow_shift": 3.0, "prediction_type": "flow_prediction"}
        scheduler = DPMSolverMultistepScheduler(**settings)
        scheduler.set_timesteps(7)
        sigmas = scheduler.sigmas.double()
        if space == "noise":  # the scheduler's are noise / signal
            sigmas = sigmas / (1 + sigmas**2).sqrt()
        made = Sampler(Grid(sigmas, scheduler.timesteps), None, DPM(), space)
        asked = []

        def predict(x, point, rows):
            v = torch.tanh(x * (1 + point.view(-1, 1, 1, 1)) / 3) + 0.1 * x
            asked.append((x.clone(), v))
            return v

        found = run(predict, start(2), made, [[]] * 2, no_noise).final
        x = start(2)
        for i, time in enumerate(scheduler.timesteps):
            torch.testing.assert_close(asked[i][0], x, atol=2e-5 * float(x.abs().max()), rtol=0)
            x = scheduler.step(predict(x, torch.tensor([i]), None), time, x, return_dict=False)[0]
        torch.testing.assert_close(found, x, atol=2e-5 * float(x.abs().max()), rtol=0)

    def test_a_drawn_step_gives_no_slope_to_its_neighbours(self):
        """Behind a window of one the second order begins one step later, as if the tail were a chain of its own."""
        made = sampler(tail="dpm++")
        whole = run(exact(made), start(2), made, [[4]] * 2, noise_of([1, 2]))
        tail = run(exact(made), whole.x_next[:, 0], made, [[]] * 2, no_noise, start=[5, 5])
        assert torch.equal(whole.final, tail.final)


def test_noise_depends_on_seed_and_counter_alone():
    draws = gaussian_noise([3, 4], 0, (1000,))
    assert torch.equal(draws[1], gaussian_noise([4], 0, (1000,))[0])
    others = torch.cat(
        [draws, gaussian_noise([3, 4], 1, (1000,)), gaussian_noise([3], -1, (1000,)), gaussian_noise([3], -2, (1000,))]
    )
    assert (torch.corrcoef(others) - torch.eye(6)).abs().max() < 0.15
    assert abs(float(others.mean())) < 0.05 and float(others.std()) == pytest.approx(1, abs=0.05)


class Reversed(DenoisingTransition):
    """A transition of one's own: the mean of Euler's step, and a noise that grows towards the data."""

    type: str = "tests.samplers.test_chain:Reversed"
    most: float = 0.5

    def coefficients(self, sigma, sigma_next, sigma_second):
        dt = sigma_next - sigma
        return Coefficients(torch.ones_like(dt), dt, self.most * (1 - sigma_next) * sigma_second)


def test_a_transition_of_ones_own_by_hand():
    """Named as package.module:Class. Four steps of the grid 1, 0.75, 0.5, 0.25, 0, of which the second is drawn."""
    own = choose(DenoisingTransition, {"type": "tests.samplers.test_chain:Reversed", "most": 0.4})
    sigmas = shifted(4, 1.0)
    made = Sampler(Grid(sigmas, sigmas[:-1]), own)
    torch.testing.assert_close(made.std, 0.4 * 0.75 * torch.tensor([0.25, 0.5, 0.75, 1.0]))
    chain = run(lambda x, point, rows: x * (1 + point.view(-1, 1, 1, 1)), start(1), made, [[1]], noise_of([5]))
    x = start(1) * (1 - 0.25)
    torch.testing.assert_close(chain.x[:, 0], x)
    x = x - 0.25 * 2 * x + 0.4 * 0.75 * 0.5 * gaussian_noise([5], 1, SHAPE)
    torch.testing.assert_close(chain.x_next[:, 0], x)
    torch.testing.assert_close(chain.final, x * (1 - 0.25 * 3) * (1 - 0.25 * 4))


def test_predictions_are_kept_of_the_drawn_steps_of_each_row():
    made, windows = sampler(6), [[1, 3], [2, 4], [0, 4]]
    predict = exact(made)
    chain = run(predict, start(3), made, windows, noise_of([7, 8, 9]), keep_predictions=True)
    for row, window in enumerate(windows):
        for place, point in enumerate(window):
            x = chain.x[row, place][None]
            assert torch.equal(chain.v[row, place][None], predict(x, torch.tensor([point]), None))
            step = made.stochastic_coefficients(torch.tensor([point]))
            mean = step.a_x * x + step.a_v * chain.v[row, place]
            noise = (chain.x_next[row, place] - mean) / step.std
            torch.testing.assert_close(noise, gaussian_noise([[7, 8, 9][row]], point, SHAPE), atol=1e-5, rtol=0)
    without = run(predict, start(3), made, windows, noise_of([7, 8, 9]))
    assert without.v is None and torch.equal(without.x, chain.x) and torch.equal(without.final, chain.final)
