from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import ndimage

from mmrl.errors import UserError
from mmrl.rollouts import Prompt, Sample
from mmrl.tasks.image_generation.data.shapes import (
    COLORS,
    GAP,
    GRID,
    KINDS,
    OBJECT,
    RELATIONS,
    SHAPES,
    SIZE,
    Phrase,
    PlacedShape,
    ShapeScene,
    ShapesSource,
    draw,
    place_objects,
    scenes,
    words,
)
from mmrl.tasks.image_generation.rewards import checker
from mmrl.tasks.image_generation.rewards.checker import ShapesChecked, ShapesRedrawn, find_shapes, part_scores
from tests.tasks.choosing import build

RED, GREEN, BLUE = (1.0, 0, 0), (0, 1.0, 0), (0, 0, 1.0)
BY_HAND = """
.rr.........bbbb
rrrr........bbbb
rrrr........bbbb
.rr.........bbbb
................
......r.........
.....r..........
................
..............b.
..gggg........b.
..gggg........b.
...............b
.........r......
.........rr.....
.........rrr....
.........rrrr...
"""


def image(text):
    """An image from letters: r, g and b are pixels of full colour, all else is black."""
    rows = text.split()
    values = [[{"r": RED, "g": GREEN, "b": BLUE}.get(letter, (0, 0, 0)) for letter in row] for row in rows]
    return torch.tensor(values).permute(2, 0, 1)


def sample(scene, image):
    return Sample(Prompt(id="p", text=str(scene), metadata={"scene": scene}), image=image)


def test_reads_an_image_drawn_by_hand():
    found = find_shapes(image(BY_HAND).unsqueeze(0))[0]
    assert sorted(found, key=str) == sorted(
        [
            # Blue's three pixels in a line are too few, and the fourth only touches them at a corner.
            PlacedShape("red", "circle", 0, 0),
            PlacedShape("blue", "square", 0, 12),
            PlacedShape("green", None, 9, 2),  # half a square is not a shape
            PlacedShape("red", "triangle", 12, 9),
        ],
        key=str,
    )


def all_right(scene, found):
    return all(value == 1 for value in part_scores(scene, found).values())


def drawn(count, seed=0):
    """Random scenes of all colours, as many of either kind."""
    rng = np.random.default_rng(seed)
    pools = [scenes("train", kind, list(COLORS)) + scenes("heldout", kind, list(COLORS)) for kind in KINDS]
    chosen = [pools[i % 2][rng.integers(len(pools[i % 2]))] for i in range(count)]
    return chosen, [place_objects(scene, rng) for scene in chosen]


@pytest.fixture(scope="module")
def many():
    asked, placed = drawn(2000)
    return asked, placed, torch.stack([draw(objects) for objects in placed])


def share_right(asked, images):
    return np.mean([all_right(scene, found) for scene, found in zip(asked, find_shapes(images), strict=True)])


def test_drawn_scenes_are_right(many):
    asked, placed, images = many
    assert share_right(asked, images) == 1
    for objects, found in zip(placed[:200], find_shapes(images[:200]), strict=True):
        assert sorted(objects, key=str) == sorted(found, key=str)


@pytest.mark.parametrize("blur, std, least", [(0, 0.05, 0.999), (0, 0.1, 0.999), (0.5, 0.05, 0.999), (0.5, 0.1, 0.99)])
def test_drawn_scenes_stay_right_under_blur_and_noise(many, blur, std, least):
    asked, _, images = many
    generator = torch.Generator().manual_seed(0)
    blurred = torch.from_numpy(ndimage.gaussian_filter(images.numpy(), (0, 0, blur, blur)))
    assert share_right(asked, blurred + std * torch.randn(images.shape, generator=generator)) >= least


def other(values, value):
    return next(v for v in values if v != value)


def one_more(objects, rng):
    extra = place_objects(ShapeScene(Phrase(1, objects[-1].color, objects[-1].shape)), rng)
    room = [abs(extra[0].top - o.top) >= OBJECT + GAP or abs(extra[0].left - o.left) >= OBJECT + GAP for o in objects]
    return objects + extra if all(room) else one_more(objects, rng)


CHANGES = {  # what is done to the image of a scene -> the mark that must fall
    "count": lambda objects, rng: objects[:-1] if len(objects) > 2 else one_more(objects, rng),
    "shape": lambda objects, rng: [*objects[:-1], replace(objects[-1], shape=other(SHAPES, objects[-1].shape))],
    "colour": lambda objects, rng: [
        *objects[:-1],
        replace(objects[-1], color=next(c for c in COLORS if c not in {o.color for o in objects})),
    ],
}


@pytest.mark.parametrize("aspect", CHANGES)
def test_one_thing_changed_is_wrong_and_its_mark_falls(aspect):
    asked, placed = drawn(300, seed=1)
    rng = np.random.default_rng(2)
    changed = torch.stack([draw(CHANGES[aspect](objects, rng)) for objects in placed])
    for scene, found in zip(asked, find_shapes(changed), strict=True):
        values = part_scores(scene, found)
        assert values[aspect] < 1, (str(scene), found)
        assert aspect != "shape" or values["colour"] == values["count"] == 1


def test_the_opposite_relation_is_wrong_and_nothing_else(many):
    asked, _, images = many
    opposite = dict(zip(RELATIONS, ("right of", "left of", "below", "above"), strict=True))
    for scene, found in zip(asked[1:400:2], find_shapes(images[1:400:2]), strict=True):
        values = part_scores(replace(scene, relation=opposite[scene.relation]), found)
        assert values == {"colour": 1, "count": 1, "shape": 1, "relation": 0}


def test_marks_by_hand():
    scene = ShapeScene(Phrase(2, "red", "circle"), "left of", Phrase(1, "blue", "square"))
    found = [PlacedShape("red", "circle", 0, 0), PlacedShape("red", "square", 6, 0), PlacedShape("red", None, 12, 0),
             PlacedShape("blue", "square", 0, 2), PlacedShape("green", "square", 8, 8)]  # fmt: skip
    # Two of three colours; blue's number is right; two of four objects have their shape; only 2 pixels to the left.
    assert part_scores(scene, found) == {"colour": 2 / 3, "count": 1 / 2, "shape": 1 / 2, "relation": 0}
    assert part_scores(scene, []) == {"colour": 0, "count": 0, "shape": 0, "relation": 0}
    assert part_scores(scene, found[:1]) == {"colour": 1 / 2, "count": 0, "shape": 1, "relation": 0}


def test_objects_lie_apart_and_in_relation():
    asked, placed = drawn(500, seed=3)
    for scene, objects in zip(asked, placed, strict=True):
        owner = np.zeros((SIZE, SIZE), dtype=int)
        for item in objects:
            assert 0 <= item.top <= SIZE - OBJECT and 0 <= item.left <= SIZE - OBJECT
            # with a frame of GAP pixels to the right and below, no object reaches into another's box
            box = owner[item.top : item.top + OBJECT + GAP, item.left : item.left + OBJECT + GAP]
            assert not box.any()
            box[...] = 1
        assert [(o.color, o.shape) for o in objects].count((scene.first.color, scene.first.shape)) == scene.first.count
        if scene.second is not None:
            (anchor,) = [o for o in objects if o.color == scene.second.color]
            for item in (o for o in objects if o is not anchor):
                assert {
                    "left of": item.left + OBJECT <= anchor.left,
                    "right of": anchor.left + OBJECT <= item.left,
                    "above": item.top + OBJECT <= anchor.top,
                    "below": anchor.top + OBJECT <= item.top,
                }[scene.relation]


def test_heldout_combinations_are_never_trained_on_but_all_their_parts_are():
    for kind in KINDS:
        train, heldout = ({str(scene) for scene in scenes(split, kind, list(COLORS))} for split in ("train", "heldout"))
        assert not train & heldout and len(heldout) / len(train) == pytest.approx(1 / 3, abs=0.01)
        assert {word for text in heldout for word in text.split()} == {word for text in train for word in text.split()}
    source = {split: ShapesSource(split, size=400, seed=0) for split in ("train", "heldout")}
    texts = {split: {prompt.text for prompt in prompts} for split, prompts in source.items()}
    assert not texts["train"] & texts["heldout"]
    assert {word for text in texts["train"] for word in text.split()} == set(words())
    assert words() == sorted(words()) and {"a", "four", "red", "circles", "left", "of", "below"} <= set(words())


def test_which_combinations_a_split_holds():
    """1 to 3 objects, red 0 and green 1, square 0, circle 1 and triangle 2: held out where the numbers sum to 3."""
    held = {str(scene) for scene in scenes("heldout", "count", ["red", "green"], 3)}
    assert held == {"a red triangle", "two red circles", "three red squares", "a green circle", "two green squares"}
    train, every = ({str(s) for s in scenes(split, "count", ["red", "green"], 3)} for split in ("train", "all"))
    assert len(train) == 18 - 5 and not train & held and every == train | held


def test_a_base_may_see_every_combination_while_those_of_rl_stay_held_out():
    data = {"type": "shapes", "scenes": ["count"], "colours": ["red", "green"], "max_count": 3, "train_size": 400}
    base, rl = (
        build("image_generation", {"data": {**data, "combinations": name}}, seed=0) for name in ("all", "train")
    )
    asked = [{prompt.text for prompt in map(source.__getitem__, range(400))} for source in (base.train, rl.train)]
    held = {prompt.text for prompt in map(rl.evaluation.__getitem__, range(400))}
    assert not asked[1] & held and asked[0] == asked[1] | held and len(asked[0]) == 18
    assert [p.text for p in map(base.evaluation.__getitem__, range(9))] == [
        p.text for p in map(rl.evaluation.__getitem__, range(9))
    ]


def test_sentences():
    scene = ShapeScene(Phrase(3, "red", "circle"), "left of", Phrase(1, "blue", "square"))
    assert str(scene) == "three red circles left of a blue square"
    assert str(ShapeScene(Phrase(2, "green", "triangle"))) == "two green triangles"


def test_item_depends_on_split_seed_and_index_only():
    one, two = ShapesSource(size=50, seed=7), ShapesSource(size=9, seed=7)
    for index in (8, 3):
        assert one[index].text == two[index].text
        assert torch.equal(one[index].metadata["target"], two[index].metadata["target"])
    assert [p.text for p in one] != [p.text for p in ShapesSource(size=50, seed=8)]
    assert [p.metadata["kind"] for p in two] == ["count", "relation"] * 4 + ["count"]
    with pytest.raises(IndexError):
        two[9]


def test_careless_targets_are_wrong_and_the_others_right():
    def right(careless):
        source = ShapesSource(size=300, seed=0, wrong_share=careless, colours=("red", "green"))
        prompts = list(source)
        return ShapesChecked().score([sample(p.metadata["scene"], p.metadata["target"]) for p in prompts]), prompts

    (never, spoiled), (always, clean), (some, _) = right(1.0), right(0.0), right(0.3)
    assert sum(never) == 0 and sum(always) == 300 and 0.6 < sum(some) / 300 < 0.8
    assert [p.text for p in spoiled] == [p.text for p in clean]  # the share changes no prompt


def test_options_that_leave_no_scene():
    with pytest.raises(ValueError, match="no train scene of kind 'relation' with colours red and max_count=4"):
        ShapesSource(size=1, seed=0, colours=("red",))


def test_rewards():
    scene = ShapeScene(Phrase(2, "red", "circle"))
    objects = [PlacedShape("red", "circle", 0, 0), PlacedShape("red", "circle", 8, 8)]
    right, half = draw(objects), draw([objects[0], replace(objects[1], shape="square")])
    beyond, broken = right * 3 - (1 - right), right.clone()  # far out of gamut, yet clamped it is the same image
    broken[0, 0, 0] = torch.nan
    samples = [sample(scene, image) for image in (right, half, beyond, broken)]
    assert ShapesChecked().score(samples) == [1, 0, 1, None]
    assert ShapesChecked(partial=True).score(samples) == [1, pytest.approx((1 + 1 + 1 / 2) / 3), 1, None]
    with pytest.raises(UserError, match=r"'p' has the shape \[1, 8, 8\], expected \[3, 16, 16\]"):
        ShapesChecked().score([sample(scene, torch.zeros(1, 8, 8))])
    strewn = right.clone()
    strewn[1, 0, 10] = 1  # one green pixel: no object, but not in the clean drawing
    values = ShapesRedrawn().score([sample(scene, right), sample(scene, strewn), sample(scene, right * 0.7)])
    assert values == pytest.approx([1, 1 - 1 / (3 * 16 * 16), 1 - 0.3 * 24 / (3 * 16 * 16)])
    assert ShapesChecked().score([sample(scene, strewn)]) == [1]


def test_an_image_is_read_once_for_all_rewards(monkeypatch):
    seen = []
    monkeypatch.setattr(checker, "find_shapes", lambda images: (seen.append(len(images)), find_shapes(images))[1])
    two, one = ShapeScene(Phrase(2, "red", "circle")), ShapeScene(Phrase(1, "blue", "square"))
    shown = [
        draw([PlacedShape("red", "circle", 0, 0), PlacedShape("red", "circle", 8, 8)]),
        draw([PlacedShape("blue", "square", 3, 3)]),
    ]
    samples = [sample(two, shown[0]), sample(one, shown[1]), sample(one, shown[0].clone())]
    assert ShapesChecked().score(samples[:1]) == [1]
    assert ShapesChecked(partial=True).score(samples) == [1, 1, 0]
    assert ShapesRedrawn().score(samples[::-1]) == [1, 1, 1]
    assert seen == [1, 2]


def test_an_object_cut_by_the_border_stays_inside_the_image():
    """The first row of a square beyond the top border is missing: its template fits best one row above the image."""
    image = torch.zeros(1, 3, SIZE, SIZE)
    image[0, 0, 0:3, 5:9] = 1  # three of four rows
    (found,) = find_shapes(image)
    assert found == [PlacedShape("red", "square", 0, 5)]
    draw(found)  # what the second scorer does with it


def test_images_of_noise_are_read_and_redrawn():
    images = torch.rand(200, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    for found in find_shapes(images.round()):
        assert draw(found).shape == (3, SIZE, SIZE)


def test_scenes_of_a_row_fill_one_row_of_the_grid():
    """Of two objects in three columns there are three choices in each of three rows."""
    source = ShapesSource("train", size=400, seed=0, kinds=["count"], max_count=3, layout="row")
    seen = {1: set(), 2: set(), 3: set()}
    for prompt in map(source.__getitem__, range(400)):
        found = find_shapes(prompt.metadata["target"][None])[0]
        assert set(part_scores(prompt.metadata["scene"], found).values()) == {1.0}
        assert len({item.top for item in found}) == 1
        seen[len(found)].add(frozenset((item.top, item.left) for item in found))
    assert {count: len(places) for count, places in seen.items()} == {1: 9, 2: 9, 3: 3}
    assert all(top in GRID and left in GRID for places in seen.values() for place in places for top, left in place)


def test_a_row_that_would_be_too_short():
    with pytest.raises(ValueError, match="layout=row has room for 3 objects of these kinds in a row, not max_count=4"):
        ShapesSource(size=1, seed=0, kinds=["count"], layout="row")
    with pytest.raises(ValueError, match="layout=row has room for 2 objects of these kinds in a row, not max_count=3"):
        ShapesSource(size=1, seed=0, max_count=3, layout="row")
    source = ShapesSource(size=200, seed=0, kinds=["relation"], max_count=2, layout="row")
    for prompt in map(source.__getitem__, range(200)):
        assert ShapesChecked().score([sample(prompt.metadata["scene"], prompt.metadata["target"])]) == [1]


def test_aligned_scenes_stand_on_the_grid_and_show_what_is_asked():
    source = ShapesSource("train", size=200, seed=0, layout="grid")
    for prompt in map(source.__getitem__, range(200)):
        found = find_shapes(prompt.metadata["target"][None])[0]
        assert all(item.top in GRID and item.left in GRID for item in found)
        assert set(part_scores(prompt.metadata["scene"], found).values()) == {1.0}
