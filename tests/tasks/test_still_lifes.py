"""Still lifes by value: where cards are in an image, what is asked, what demonstrations do, and what a zoom shows."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from mmrl.config import load
from mmrl.errors import UserError
from mmrl.rollouts import Message
from mmrl.tasks.visual_qa.data.kinds import STILL_LIFE_COLOURS

mujoco = pytest.importorskip("mujoco")

from mmrl.sims.mujoco.gl import choose_backend  # noqa: E402
from mmrl.tasks.visual_qa.data import still_life_scene, still_lifes  # noqa: E402
from mmrl.tasks.visual_qa.data.still_life_scene import COLOURS, GRID, STRAY, Photographer, develop  # noqa: E402
from mmrl.tasks.visual_qa.data.still_lifes import StillLifesSource  # noqa: E402

try:
    choose_backend()
except UserError as error:
    pytest.skip(str(error), allow_module_level=True)

RECIPE = "configs/vlm/visual_qa_zoom_still_life.yaml"


@pytest.fixture(scope="module")
def photographer():
    return Photographer(4)


def layout(photographer, seed):
    rng = np.random.default_rng(seed)
    camera, rotation = photographer._place_camera(rng)
    return photographer._layout(rng, camera, rotation)


def test_a_card_is_where_the_picture_says(photographer):
    """The middles that are returned are those of the cards' geometries, projected by MuJoCo's own camera; each object
    stands behind its card, which has its digit."""
    model, data = photographer.model, photographer.data
    for seed in range(3):
        still_life = photographer.render(["red", "green", "blue", "yellow"], [1, 2, 3, 4], np.random.default_rng(seed))
        camera, rotation = model.cam_pos[0], data.cam_xmat[0].reshape(3, 3)
        for i, card in enumerate(still_life.cards):
            right, up, back = rotation.T @ (data.geom_xpos[model.geom(f"card{i}").id] - camera)
            scale = 1 / (2 * np.tan(np.radians(model.cam_fovy[0]) / 2) * -back)
            assert card == pytest.approx([0.5 + right * scale, 0.5 - up * scale], abs=1e-6)
            assert model.geom(f"card{i}").matid == model.material(f"card{i + 1}").id
            assert data.geom_xpos[model.geom(f"object{i}").id][1] > data.geom_xpos[model.geom(f"card{i}").id][1]


def test_cards_are_in_cells_of_their_own_and_not_hidden(photographer):
    cells_seen = set()
    for seed in range(60):
        positions, cards = layout(photographer, seed)
        assert positions.shape == (6, 2) and cards.shape == (4, 2)
        cells = np.floor(cards * GRID).astype(int)
        assert np.abs(cards * GRID - cells - 0.5).max() <= STRAY
        assert cells[:, 1].min() >= 1
        cells_seen |= {tuple(cell) for cell in cells.tolist()}
        for a in range(4):
            for b in range(a):
                across, down = np.abs(cells[a] - cells[b])
                assert across >= 1 or down >= 2  # an object stands above its card, in the cell above
    assert len(cells_seen) == 12


def test_objects_have_the_named_colours(photographer):
    """The middle of an object is its colour under whatever light: its strongest channels are the colour's."""
    named = ["red", "green", "blue", "yellow"]
    still_life = photographer.render(named, [0, 1, 2, 3], np.random.default_rng(5))
    pixels = np.asarray(still_life.image).astype(float)
    model, data = photographer.model, photographer.data
    for i, colour in enumerate(named):
        position = data.geom_xpos[model.geom(f"object{i}").id] + [0, 0, model.geom(f"object{i}").size[1] * 0.7]
        right, up, back = data.cam_xmat[0].reshape(3, 3).T @ (position - model.cam_pos[0])
        scale = 256 / (2 * np.tan(np.radians(model.cam_fovy[0]) / 2) * -back)
        x, y = round(128 + right * scale), round(128 - up * scale)
        shown = pixels[y - 2 : y + 3, x - 2 : x + 3].mean((0, 1))
        assert np.argsort(shown)[-1] in np.flatnonzero(np.array(COLOURS[colour]) > 0.45), (colour, shown)


def test_the_darkroom_changes_light_and_adds_noise():
    grey = np.full((64, 64, 3), 128, np.uint8)
    first, second = (np.asarray(develop(grey, np.random.default_rng(seed))).astype(float) for seed in (0, 1))
    assert first.std() > 1 and abs(first.mean() - second.mean()) > 1
    assert first[24:40, 24:40].mean() > first[:8, :8].mean() + 5  # corners are darker


def fake(monkeypatch):
    """Replaces the renderer: object i of an image has its card in the middle of cell (i, 3 - i)."""

    class Camera:
        def __init__(self, objects):
            self.taken = 0

        def render(self, colours, digits, rng):
            self.taken += 1
            cards = np.array([[(i + 0.5) / 4, (3.5 - i) / 4] for i in range(len(colours))])
            pixels = np.zeros((256, 256, 3), np.uint8)
            for i, digit in enumerate(digits):
                pixels[64 * (3 - i) : 64 * (4 - i), 64 * i : 64 * (i + 1)] = 20 * digit + 10
            return still_life_scene.StillLife(Image.fromarray(pixels), cards)

    monkeypatch.setattr(still_life_scene, "Photographer", Camera)


def source(split="train", size=40, seed=3, **more):
    return StillLifesSource(split, size=size, seed=seed, **more)


def test_the_first_object_is_asked_about(monkeypatch):
    """Its card is in cell (0, 3); colours are asked in turns, and repeated questions share their image."""
    fake(monkeypatch)
    asked = source(size=12, repeats=2, requested=("blue", "red", "purple"))
    kinds = []
    for index in range(12):
        prompt = asked[index]
        kinds.append(prompt.metadata["kind"])
        assert prompt.text == f"Which digit belongs to the {kinds[-1]} object?"
        assert prompt.metadata["target"] == [0, 0.75, 0.25, 1]
        assert prompt.answer == str(prompt.metadata["digits"][0]) and len(set(prompt.metadata["digits"])) == 4
        assert prompt.metadata["demonstration"] == ["zoom(0,3,1,4)", prompt.answer]
        assert prompt.images[0].getpixel((32, 224))[0] == pytest.approx(20 * int(prompt.answer) + 10, abs=3)  # JPEG
        colours = asked._taken[index // 2].colours
        assert colours[0] == kinds[-1] and len(set(colours)) == 4 and set(colours) <= set(STILL_LIFE_COLOURS)
    assert kinds == ["blue", "blue", "red", "red", "purple", "purple"] * 2
    assert asked._photographer.taken == 6 and asked[0].images[0].tobytes() == asked[1].images[0].tobytes()
    assert {colour for still_life in asked._taken.values() for colour in still_life.colours} == set(STILL_LIFE_COLOURS)


def test_demonstrations_wander_and_answer_directly(monkeypatch):
    """Half zoom to one of four objects at random, each time that a question is repeated to another."""
    fake(monkeypatch)
    asked = source(size=400, wrong_share=0.5, repeats=4)
    prompts = [asked[i] for i in range(400)]
    columns = []
    for prompt in prompts:
        call, said = prompt.metadata["demonstration"]
        columns.append(int(call[5]))
        assert said == str(prompt.metadata["digits"][columns[-1]])  # the digit that the zoom shows
    assert np.mean([column == 0 for column in columns]) == pytest.approx(0.5 + 0.5 / 4, abs=0.07)
    assert set(columns) == {0, 1, 2, 3}
    assert sum(len(set(columns[i : i + 4])) > 1 for i in range(0, 400, 4)) > 50
    direct = [source(direct=1.0)[i] for i in range(4)]
    assert [prompt.metadata["demonstration"] for prompt in direct] == [[source()[i].answer] for i in range(4)]


def test_splits_and_seeds_have_other_pictures(photographer):
    """Real images; the same question is the same bytes."""
    first = source()[5]
    assert first.images[0].size == (256, 256) and first.images[0].tobytes() == source()[5].images[0].tobytes()
    for other in (source(seed=4), source("heldout"), source(wrong_share=1.0)):
        same = other.wrong_share > 0
        assert (first.images[0].tobytes() == other[5].images[0].tobytes()) == same


def test_the_recipe_shows_a_cell_when_it_is_zoomed_into(monkeypatch):
    fake(monkeypatch)
    from mmrl.build import build_task

    config = load(RECIPE, ["run_dir=unset"])
    prompt = build_task(config).train[6]
    environment = config.task.environment.make()
    (shown,) = environment.start(replace(prompt, messages=(Message("user", (prompt.images[0], prompt.text)),)))[
        0
    ].images
    assert shown.size == (32, 32)
    reply = environment.step(prompt.metadata["demonstration"][0])
    (crop,) = reply.messages[0].images
    assert reply.facts["box"] == prompt.metadata["target"] and crop.size == (24, 24)
    assert np.asarray(crop)[4:20, 4:20, 0].mean() == pytest.approx(20 * int(prompt.answer) + 10, abs=3)


def test_what_cannot_be_drawn_is_named(monkeypatch):
    for wrong, named in (
        ({"objects": 6}, "objects must be 1 to 5"),
        ({"size": 0}, "size"),
        ({"split": "test"}, "split"),
    ):
        with pytest.raises(ValueError, match=named):
            source(**wrong)
    with pytest.raises(IndexError, match="40 prompts"):
        source()[40]
    monkeypatch.setattr(still_lifes, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"still lifes need mujoco.*\[mujoco\]"):
        source()
