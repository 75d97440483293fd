import math

import pytest
import torch

from mmrl.rewards.guards import brightness, diversity, out_of_gamut, saturation, sharpness


def test_out_of_gamut_counts_values():
    image = torch.tensor([[-0.1, 0.0, 0.5, 1.0, 1.04, 2.0, math.nan, 0.3]]).reshape(1, 1, 2, 4)
    torch.testing.assert_close(out_of_gamut(image), torch.tensor([4 / 8]))
    torch.testing.assert_close(out_of_gamut(image, tolerance=0.05), torch.tensor([3 / 8]))
    assert out_of_gamut(torch.cat([image, torch.rand(1, 1, 2, 4)])).tolist() == [0.5, 0.0]


def test_sharpness_of_known_images():
    flat = torch.full((1, 3, 5, 5), 0.4)
    ramp = torch.arange(5.0).expand(5, 5)[None, None] / 5  # its second difference is 0
    board = ((torch.arange(5)[:, None] + torch.arange(5)) % 2).float()[None, None]  # L is 4 at 0 and -4 at 1
    dot = torch.zeros(1, 1, 5, 5)
    dot[0, 0, 2, 2] = 1  # L: -4 once, 1 four times, 0 four times: mean 0, mean of squares 20 / 9
    assert sharpness(flat).item() == pytest.approx(0, abs=1e-12)
    assert sharpness(ramp).item() == pytest.approx(0, abs=1e-12)
    assert sharpness(board).item() == pytest.approx(16 * (1 - 1 / 81), rel=1e-5)  # 5 of 9 inner pixels are 0
    assert sharpness(dot).item() == pytest.approx(20 / 9, rel=1e-5)
    assert sharpness(dot.expand(1, 3, 5, 5)).item() == pytest.approx(20 / 9, rel=1e-3)
    green = torch.zeros(1, 3, 5, 5)
    green[0, 1, 2, 2] = 1
    assert sharpness(green).item() == pytest.approx(20 / 9 * 0.587**2, rel=1e-5)
    assert sharpness(2 * dot).item() == sharpness(dot).item()  # nobody sees the 2
    with pytest.raises(ValueError, match="3 x 3"):
        sharpness(torch.zeros(1, 1, 2, 5))


def test_diversity_within_groups():
    levels = torch.tensor([0.0, 0.3, 0.9, 0.2, 0.2, 0.7])
    images = levels[:, None, None, None].expand(6, 3, 4, 4)  # the distance of two is the difference of their levels
    group = torch.tensor([4, 4, 4, 0, 0, 9])
    found = diversity(images, group)
    torch.testing.assert_close(found[:3], torch.tensor([(0.3 + 0.9) / 2, (0.3 + 0.6) / 2, (0.9 + 0.6) / 2]))
    assert found[3:5].tolist() == [0, 0] and found[5].isnan()
    order = torch.randperm(6)
    torch.testing.assert_close(diversity(images[order], group[order]), found[order], equal_nan=True)
    one = torch.zeros(2, 1, 2, 2)
    one[1, 0, 0, 0] = 1  # one value of four differs: sqrt(1 / 4)
    assert diversity(one, torch.tensor([1, 1])).tolist() == [0.5, 0.5]


def test_brightness_and_saturation():
    red, grey, black = (
        torch.tensor(c).reshape(1, 3, 1, 1).expand(1, 3, 4, 2) for c in ([1.0, 0, 0], [0.5] * 3, [0.0] * 3)
    )
    pink = torch.tensor([1.0, 0.75, 0.5]).reshape(1, 3, 1, 1).expand(1, 3, 4, 2)
    batch = torch.cat([red, grey, black, pink])
    torch.testing.assert_close(brightness(batch), torch.tensor([0.299, 0.5, 0.0, 0.299 + 0.75 * 0.587 + 0.5 * 0.114]))
    torch.testing.assert_close(saturation(batch), torch.tensor([1.0, 0.0, 0.0, 0.5]))
    assert brightness(batch[:, :1]).tolist() == [1, 0.5, 0, 1] and saturation(batch[:, :1]).tolist() == [0] * 4
    assert brightness(batch * 3)[0].item() == pytest.approx(0.299)
