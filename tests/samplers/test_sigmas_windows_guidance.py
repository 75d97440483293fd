"""Grids, windows and guidance: known values and what they refuse."""

import math

import pytest
import torch

from mmrl.samplers import sigmas
from mmrl.samplers.guidance import guided, scale_at
from mmrl.samplers.settings import Denoising
from mmrl.samplers.windows import Window

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
    assert Window().steps(STD, 0, 0) == list(range(9))
    assert Window(last=10).steps(STD, 0, 0) == list(range(10))


def test_a_window_is_the_same_for_the_same_seed_and_covers_its_range():
    for kind, starts in (("random", range(8)), ("first_half", range(5))):
        window = Window(kind, size=2)
        seen = {tuple(window.steps(STD, 0, seed)) for seed in range(200)}
        assert seen == {(i, i + 1) for i in starts}
        assert window.steps(STD, 0, 7) == window.steps(STD, 99, 7)


def test_a_sliding_window_moves_on_and_begins_again():
    window = Window("sliding", size=3, every=2, stride=2)  # 7 starts, of which 0, 2, 4, 6
    starts = [window.steps(STD, i, 0)[0] for i in range(10)]
    assert starts == [0, 0, 2, 2, 4, 4, 6, 6, 0, 0]
    assert window.steps(STD, 3, 0) == window.steps(STD, 3, 12345) == [2, 3, 4]


def test_a_decaying_stay():
    """8 exp(-0.5 max(0, t - 1)) = 8, 8, 4.9, 2.9, 1.8 iterations at the five starts, then from the beginning."""
    window = Window("sliding", size=5, every=8, decay=0.5, threshold=1)
    starts = [window.steps(STD, i, 0)[0] for i in range(30)]
    assert [starts.count(s) for s in range(5)] == [8 + 4, 8, 5, 3, 2]


@pytest.mark.parametrize(
    ("window", "std", "message"),
    [
        (Window(last=10), torch.cat([STD[:-1], torch.zeros(1)]), "reaches step 9, which has std 0"),
        (Window(first=0, last=3), torch.cat([torch.zeros(2), STD[:4]]), "step 0, which has std 0"),
        (Window(), torch.zeros(4), "no step of this chain has noise"),
        (Window("random", size=4, first=7), STD, "a window of 4 steps does not fit into steps 7 to 9"),
        (Window(last=12), STD, "only 10 steps"),
    ],
)
def test_a_window_never_holds_a_step_without_noise(window, std, message):
    with pytest.raises(ValueError, match=message):
        window.steps(std, 0, 0)


@pytest.mark.parametrize("options", [{"size": 0}, {"every": 0}, {"stride": 0}, {"decay": -1.0}, {"first": -1}])
def test_bad_windows(options):
    with pytest.raises(ValueError):
        Window("sliding", **options)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"steps": 0}, "steps"),
        ({"draws": 0}, "draws"),
        ({"draw_range": (0.5, 0.5)}, "draw_range"),
        ({"prompt_dropout": 1.0}, "prompt_dropout"),
        ({"branching": (2, 0)}, "branching"),
        ({"branching": (2,), "likelihood": "matching"}, "branching"),
    ],
)
def test_bad_settings_name_the_option(options, name):
    with pytest.raises(ValueError, match=name):
        Denoising(**options)


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
