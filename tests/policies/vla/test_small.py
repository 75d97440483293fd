"""The small backbone: channels that are normalised, and boards of codes."""

import numpy as np
import pytest
import torch

from mmrl.errors import UserError
from mmrl.policies.vla.backbones import small
from mmrl.policies.vla.backbones.small import SmallActionConfig


@pytest.fixture
def seen():
    """Three images with a bright square at another place each."""
    images = np.full((3, 32, 32, 3), 90, np.uint8)
    for place, image in enumerate(images):
        image[4 + 8 * place : 12 + 8 * place, 20 - 8 * place : 26 - 8 * place, place] = 250
    return images


def made(normalise):
    torch.manual_seed(0)
    return small.SmallBackbone(
        SmallActionConfig(("go", "from"), width=32, channels=(4, 8, 8), normalise=normalise)
    ).double()


@torch.no_grad()
def read(backbone, images):
    rows = backbone.prepare([images], ["go", "from go", "from"], np.zeros((3, 0), np.float32))
    return backbone.encode(backbone.collate(rows, torch.device("cpu")), every_layer=False).last


def test_words_that_the_model_does_not_know_are_named_once(seen, caplog):
    backbone = made(False)
    for prompts in (["go", "go from"], ["go home", "walk home"], ["go home"]):
        backbone.prepare([seen[: len(prompts)]], prompts, np.zeros((len(prompts), 0), np.float32))
    told = [record.getMessage() for record in caplog.records]
    assert [line.split(" of the prompt")[0] for line in told] == [
        "the small model does not know the words home",
        "the small model does not know the words walk",
    ]
    assert "it knows: go from" in told[0]


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
    small.create(tmp_path, SmallActionConfig(("go", "from"), width=32, channels=(4, 8, 8), normalise=normalise), seed=3)
    backbone = small.load(tmp_path)
    assert backbone.config.normalise == normalise
    backbone.save(tmp_path / "again", backbone.state_dict())
    assert torch.equal(read(small.load(tmp_path / "again"), seen), read(backbone, seen))


def test_a_description_from_before_there_was_a_choice_is_not_normalised(tmp_path):
    small.create(tmp_path, SmallActionConfig(("go", "from"), width=32, channels=(4, 8, 8)), seed=0)
    description = tmp_path / small.CONFIG
    description.write_text(description.read_text().replace('"normalise": false', '"width": 32'))
    assert not small.load(tmp_path).config.normalise


@torch.no_grad()
@pytest.mark.parametrize("every_layer", [False, True])
def test_what_a_reading_holds(seen, every_layer):
    """The image comes before the words; padding changes nothing; tokens one by one are as all of them."""
    backbone = made(True)
    rows = backbone.prepare([seen], ["go", "go from", "from"], np.zeros((3, 0), np.float32))
    inputs = backbone.collate(rows, torch.device("cpu"))
    reading, again = (backbone.encode(inputs, every_layer=every_layer) for _ in range(2))
    assert reading.mask.sum(1).tolist() == [2, 3, 2] and len(reading.layers) == (3 if every_layer else 1)
    torch.testing.assert_close(reading.last, torch.stack([reading.hidden[i, n] for i, n in enumerate([1, 2, 1])]))
    alone = backbone.encode(backbone.collate(rows[:1], torch.device("cpu")), every_layer=every_layer)
    torch.testing.assert_close(alone.last[0], reading.last[0])
    more, ones = torch.randn(3, 2, 32, dtype=torch.float64), torch.ones(3, 2)
    together = reading.extend(more, ones)
    apart = [again.extend(more[:, i : i + 1], ones[:, :1]) for i in range(2)]
    torch.testing.assert_close(torch.cat(apart, 1), together)


@torch.no_grad()
def test_the_order_of_words_is_seen(seen):
    backbone = made(True)
    rows = backbone.prepare([seen[[0, 0]]], ["go from from", "from go from"], np.zeros((2, 0), np.float32))
    one, other = backbone.encode(backbone.collate(rows, torch.device("cpu")), every_layer=False).last
    assert not torch.allclose(one, other, atol=1e-4)


def test_what_earlier_versions_wrote_is_read_or_named(tmp_path, seen):
    small.create(tmp_path, SmallActionConfig(("go", "from"), width=32, channels=(4, 8, 8)), seed=0)
    description, before = tmp_path / small.CONFIG, read(small.load(tmp_path), seen)
    text = description.read_text()
    description.write_text(text.replace('"squares": 0', '"squares": 0, "pixels": 8'))
    assert torch.equal(read(small.load(tmp_path), seen), before)
    description.write_text(text.replace('"squares": 0', '"squares": 3, "pixels": 8'))
    with pytest.raises(UserError, match="squares of rendered images were removed; create the model again"):
        small.load(tmp_path)


SIDE = 3  # squares along each side
CODES = (4, 3)  # kinds and colours, in the first two channels of an image


@pytest.fixture
def codes():
    """Three boards of random codes; the third channel is not read."""
    rng = np.random.default_rng(0)
    return np.stack([rng.integers(0, n, (3, SIDE, SIDE)) for n in (*CODES, 9)], -1).astype(np.uint8)


def coded(**more):
    torch.manual_seed(0)
    config = SmallActionConfig(("go", "from"), bins=8, width=32, layers=1, squares=SIDE, codes=CODES, **more)
    return small.SmallBackbone(config).double()


@torch.no_grad()
def test_what_the_words_look_for_by_hand(codes):
    """Before the last layers: map m is a softmax over squares of q_m . (e_kind + e_colour) / sqrt(32), q linear in sums
    of the words that weigh by their place; the maps behind them do not ask for the words, of which numbers follow."""
    backbone = coded()
    net, heard = backbone.board, {}
    net.layers.register_forward_pre_hook(lambda _, given: heard.update(flat=given[0]))
    read(backbone, codes)
    words = backbone.embeddings.weight[[2, 1]]  # "from go", the second board's words
    told = torch.cat([weights[0] * words[0] + weights[1] * words[1] for weights in net.weights])
    sought = net.sought(told).view(small.MAPS, small.SQUARE_WIDTH)
    things = [net.things[0].weight[kind] + net.things[1].weight[colour] for kind, colour, _ in codes[1].reshape(-1, 3)]
    fits = torch.stack([(sought @ thing / small.SQUARE_WIDTH**0.5).exp() for thing in things])  # row by row
    for square, thing in enumerate(things):
        maps = torch.cat([fits[square] / fits.sum(0), net.there(thing).relu()])
        start = 2 * small.MAPS * square
        torch.testing.assert_close(heard["flat"][1, start : start + 2 * small.MAPS], maps)
    torch.testing.assert_close(heard["flat"][1, 2 * small.MAPS * SIDE**2 :], net.heard(told))


def test_every_square_every_code_and_the_words_are_seen(codes):
    backbone = coded()
    before = read(backbone, codes)
    for row in range(SIDE):
        for column in range(SIDE):
            for channel, count in enumerate(CODES):
                other = codes.copy()
                other[:, row, column, channel] = (other[:, row, column, channel] + 1) % count
                assert (read(backbone, other) - before).abs().amax(1).min() > 1e-6
    assert torch.equal(read(backbone, codes ^ np.array([0, 0, 1], np.uint8)), before)  # no embedding, not read
    assert (read(backbone, codes[[0, 0, 0]]).std(0)).max() > 1e-3  # three prompts


@torch.no_grad()
def test_a_reading_of_a_board_is_one_token_and_padding_changes_nothing(codes):
    backbone = coded()
    rows = backbone.prepare([codes], ["go from", "from go from", "from go"], np.zeros((3, 0), np.float32))
    reading = backbone.encode(backbone.collate(rows, torch.device("cpu")), every_layer=False)
    same_words = backbone.prepare([codes[:1]], ["from go"], np.zeros((1, 0), np.float32))
    turned = backbone.encode(backbone.collate(same_words, torch.device("cpu")), every_layer=False)
    assert not torch.allclose(turned.last[0], reading.last[0], atol=1e-4)
    assert reading.hidden.shape == (3, 1, 32) and torch.equal(reading.hidden[:, 0], reading.last)
    alone = backbone.encode(backbone.collate(rows[:1], torch.device("cpu")), every_layer=False)
    torch.testing.assert_close(alone.last[0], reading.last[0])


def test_boards_are_loaded_as_they_were_saved_and_have_one_size(tmp_path, codes, seen):
    small.create(tmp_path, SmallActionConfig(("go", "from"), width=32, squares=SIDE, codes=CODES), seed=3)
    backbone = small.load(tmp_path)
    backbone.save(tmp_path / "again", backbone.state_dict())
    assert torch.equal(read(small.load(tmp_path / "again"), codes), read(backbone, codes))
    with pytest.raises(UserError, match="boards of 3 x 3 squares, but the simulator shows 32 x 32"):
        read(backbone, seen)
    codes[2, 1, 0, 1] = 3
    with pytest.raises(UserError, match="codes below 3 in channel 1 of an image, but the simulator's images hold 3"):
        read(backbone, codes)
