"""Grids, windows and guidance: known values and what they refuse."""

import math

import pytest
import torch

from mmrl.policies.diffusion.settings import Denoising, DenoisingDemonstrations
from mmrl.samplers import sigmas
from mmrl.samplers.guidance import guided, scale_at
from mmrl.samplers.settings import AllSteps, RandomStart, Sliding, Window
from mmrl.samplers.windows import window_steps
from mmrl.settings import SettingsError, choose, make

STD = torch.tensor([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05])


def test_grids_by_hand():
    torch.testing.assert_close(sigmas.linear(4), torch.tensor([1, 0.75, 0.5, 0.25, 0]))
    # s -> 3 s / (1 + 2 s)
    torch.testing.assert_close(sigmas.shifted(4, 3.0), torch.tensor([1, 0.9, 0.75, 0.5, 0]))
    assert torch.equal(sigmas.shifted(7, 1.0), sigmas.linear(7))
    for grid in (sigmas.linear(10), sigmas.shifted(50, 3.0), sigmas.shifted(3, 0.5)):
        assert grid.dtype == torch.float32 and grid[0] == 1 and grid[-1] == 0 and (grid.diff() < 0).all()


def test_dynamic_shift_at_its_two_anchors():
    assert sigmas.dynamic_shift(256) == pytest.approx(math.exp(0.5))
    assert sigmas.dynamic_shift(4096) == pytest.approx(math.exp(1.15))


def test_ddim_grid_by_hand():
    grid = sigmas.ddim_grid(torch.tensor([0.99, 0.75, 0.36, 0.19]), torch.tensor([3, 2, 0]))
    torch.testing.assert_close(grid.sigmas, torch.tensor([0.9, 0.8, 0.1, 0.0], dtype=torch.float64), atol=1e-6, rtol=0)
    assert grid.times.tolist() == [3, 2, 0] and len(grid) == 3
    assert float(
        sigmas.ddim_grid(torch.tensor([0.9]), torch.tensor([0]), final_alpha=0.91).sigmas[-1]
    ) == pytest.approx(0.3)


@pytest.mark.parametrize(
    "call",
    [
        lambda: sigmas.linear(0),
        lambda: sigmas.shifted(4, 0.0),
        lambda: sigmas.ddim_grid(torch.ones(10), torch.tensor([3, 3])),
        lambda: sigmas.ddim_grid(torch.ones(10), torch.tensor([10, 3])),
    ],
)
def test_bad_grids(call):
    with pytest.raises(ValueError):
        call()


def test_all_leaves_out_the_last_step():
    assert window_steps(AllSteps(), STD, 0, 0) == list(range(9))
    assert window_steps(AllSteps(last=10), STD, 0, 0) == list(range(10))


def test_a_window_is_the_same_for_the_same_seed_and_covers_its_range():
    for kind, starts in (("random", range(8)), ("first_half", range(5))):
        window = choose(Window, {"type": kind, "size": 2})
        seen = {tuple(window_steps(window, STD, 0, seed)) for seed in range(200)}
        assert seen == {(i, i + 1) for i in starts}
        assert window_steps(window, STD, 0, 7) == window_steps(window, STD, 99, 7)


def test_a_sliding_window_moves_on_and_begins_again():
    window = Sliding(size=3, every=2, stride=2)  # 7 starts, of which 0, 2, 4, 6
    starts = [window_steps(window, STD, i, 0)[0] for i in range(10)]
    assert starts == [0, 0, 2, 2, 4, 4, 6, 6, 0, 0]
    assert window_steps(window, STD, 3, 0) == window_steps(window, STD, 3, 12345) == [2, 3, 4]


def test_a_decaying_stay():
    """8 exp(-0.5 max(0, t - 1)) = 8, 8, 4.9, 2.9, 1.8 iterations at the five starts, then from the beginning."""
    window = Sliding(size=5, every=8, decay=0.5, threshold=1)
    starts = [window_steps(window, STD, i, 0)[0] for i in range(30)]
    assert [starts.count(s) for s in range(5)] == [8 + 4, 8, 5, 3, 2]


@pytest.mark.parametrize(
    ("window", "std", "message"),
    [
        (AllSteps(last=10), torch.cat([STD[:-1], torch.zeros(1)]), "reaches step 9, which has std 0"),
        (AllSteps(first=0, last=3), torch.cat([torch.zeros(2), STD[:4]]), "step 0, which has std 0"),
        (AllSteps(), torch.zeros(4), "no step of this chain has noise"),
        (RandomStart(size=4, first=7), STD, "a window of 4 steps does not fit into steps 7 to 9"),
        (AllSteps(last=12), STD, "only 10 steps"),
    ],
)
def test_a_window_never_holds_a_step_without_noise(window, std, message):
    with pytest.raises(ValueError, match=message):
        window_steps(window, std, 0, 0)


class Ahead(Window):
    """A window of one's own, which begins where it should not."""

    type: str = "tests.samplers.test_sigmas_windows_guidance:Ahead"

    def width(self, usable):
        return 3

    def start(self, usable, steps, iteration, seed):
        return iteration


def test_a_window_of_ones_own_is_taken_and_held_to_its_place():
    own = choose(Window, "tests.samplers.test_sigmas_windows_guidance:Ahead")
    assert window_steps(own, STD, 6, 0) == [6, 7, 8]
    with pytest.raises(ValueError, match="would begin at step 7 of the 9 steps .* 3 steps fit only from 0 to 6"):
        window_steps(own, STD, 7, 0)


@pytest.mark.parametrize("options", [{"size": 0}, {"every": 0}, {"stride": 0}, {"decay": -1.0}, {"first": -1}])
def test_bad_windows(options):
    with pytest.raises(SettingsError, match=next(iter(options))):
        choose(Window, {"type": "sliding", **options})


@pytest.mark.parametrize(
    ("section", "options", "name"),
    [
        (Denoising, {"steps": 0}, "steps"),
        (Denoising, {"likelihood": {"type": "matching", "draws": 0}}, "likelihood.draws"),
        (Denoising, {"likelihood": {"type": "matching", "draw_range": (0.5, 0.5)}}, "draw_range"),
        (Denoising, {"likelihood": {"branching": (2, 0)}}, "branching"),
        (Denoising, {"likelihood": {"branching": (2,), "type": "matching"}}, "unknown key likelihood.branching"),
        (Denoising, {"likelihood": {"tail": {"type": "dpm++", "steps": 0}}}, "likelihood.tail.steps"),
        (Denoising, {"likelihood": {"transition": {"type": "cps", "noise": 1.5}}}, "likelihood.transition.noise"),
        (DenoisingDemonstrations, {"prompt_dropout": 1.0}, "prompt_dropout"),
        (DenoisingDemonstrations, {"draw_range": (0.0, 1.0)}, "draw_range"),
    ],
)
def test_bad_settings_name_the_option(section, options, name):
    with pytest.raises(SettingsError, match=name):
        make(section, options)


def test_guidance_by_hand():
    c, u = torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0], [4.0]])
    found = guided(c, lambda: u, torch.tensor([3.0, 1.0]))
    assert found.tolist() == [[3.0], [2.0]]


def test_the_unconditional_half_has_no_gradient_and_is_not_asked_in_vain():
    weight = torch.tensor([2.0], requires_grad=True)
    x = torch.ones(2, 1)
    guided(weight * x, lambda: 5 * weight * x, torch.tensor([4.0, 4.0])).sum().backward()
    assert float(weight.grad) == 2 * 4  # only scale times the conditional half

    def never():
        raise AssertionError("asked without need")

    assert torch.equal(guided(x, never, torch.ones(2)), x)


def test_guidance_acts_inside_its_interval():
    sigma = torch.tensor([1.0, 0.8, 0.5, 0.2, 0.1])
    assert scale_at(sigma, 4.5, (0.2, 0.8)).tolist() == [1.0, 4.5, 4.5, 4.5, 1.0]
