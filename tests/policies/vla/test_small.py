"""The small backbone whose channels are normalised."""

import numpy as np
import pytest
import torch

from mmrl.policies.vla import small
from mmrl.policies.vla.small import SmallConfig


@pytest.fixture
def seen():
    """Three pictures with a bright square at another place each."""
    pictures = np.full((3, 32, 32, 3), 90, np.uint8)
    for place, picture in enumerate(pictures):
        picture[4 + 8 * place : 12 + 8 * place, 20 - 8 * place : 26 - 8 * place, place] = 250
    return pictures


def made(normalise):
    torch.manual_seed(0)
    return small.SmallBackbone(SmallConfig(("go", "from"), width=32, channels=(4, 8, 8), normalise=normalise)).double()


@torch.no_grad()
def read(backbone, pictures):
    rows = backbone.prepare([pictures], ["go", "from go", "from"], np.zeros((3, 0), np.float32))
    return backbone.read(backbone.collate(rows, torch.device("cpu")), every_layer=False).last


@pytest.mark.parametrize("layer", range(3))
@pytest.mark.parametrize("normalise", [False, True])
def test_how_strong_a_convolution_is_does_not_matter_once_channels_are_normalised(seen, normalise, layer):
    backbone = made(normalise)
    before = read(backbone, seen)
    with torch.no_grad():
        for parameter in backbone.convolutions[layer].parameters():
            parameter *= 30
    assert torch.allclose(read(backbone, seen), before, atol=0.02) == normalise


@pytest.mark.parametrize("layer", range(3))
def test_the_prompt_modulates_what_was_normalised(seen, layer):
    backbone = made(True)
    before = read(backbone, seen)
    channels = len(backbone.films[layer].bias) // 2
    with torch.no_grad():
        backbone.films[layer].bias[:channels:2] += 2  # every other channel three times as strong
    assert not torch.allclose(read(backbone, seen), before, atol=0.02)


def test_places_stand_out_from_the_first_batch_on(seen):
    spread = {normalise: read(made(normalise), seen[[0, 1, 2]]).std(0).mean() for normalise in (False, True)}
    same = {normalise: read(made(normalise), seen[[0, 0, 0]]).std(0).mean() for normalise in (False, True)}
    assert (spread[True] - same[True]).abs() > 4 * (spread[False] - same[False]).abs()


@pytest.mark.parametrize("normalise", [False, True])
def test_it_is_loaded_as_it_was_saved(tmp_path, seen, normalise):
    small.create(tmp_path, SmallConfig(("go", "from"), width=32, channels=(4, 8, 8), normalise=normalise), seed=3)
    backbone = small.load(tmp_path)
    assert backbone.config.normalise == normalise
    backbone.save(tmp_path / "again", backbone.state_dict())
    assert torch.equal(read(small.load(tmp_path / "again"), seen), read(backbone, seen))


def test_a_description_from_before_there_was_a_choice_is_not_normalised(tmp_path):
    small.create(tmp_path, SmallConfig(("go", "from"), width=32, channels=(4, 8, 8)), seed=0)
    description = tmp_path / small.CONFIG
    description.write_text(description.read_text().replace('"normalise": false', '"width": 32'))
    assert not small.load(tmp_path).config.normalise
