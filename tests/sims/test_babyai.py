"""BabyAI and discrete actions by value: which part of [-1, 1] is which action, whose words are said, what bots do."""

from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
import yaml
from gymnasium import spaces

from mmrl.errors import UserError
from mmrl.policies.vla.backbones import small
from mmrl.policies.vla.heads.codec import ActionCodec
from mmrl.sims import build
from mmrl.sims.spaces import Choices
from mmrl.tasks.manipulation.tiny_babyai import BINS, WORDS
from mmrl.tasks.manipulation.tiny_babyai import build as build_model

pytest.importorskip("minigrid")

from minigrid.core.constants import COLOR_TO_IDX, OBJECT_TO_IDX, STATE_TO_IDX  # noqa: E402
from minigrid.utils.baby_ai_bot import BabyAIBot  # noqa: E402

from mmrl.sims.babyai import LEVELS, UNSEEN, Levels, image, is_unseen, view_around  # noqa: E402

CONFIGS = Path(__file__).parents[2] / "configs"


class Counter(gymnasium.Env):
    """Adds 1, 2 or 3 to a sum, as actions 5, 6 and 7 say; it asks for another sum in each episode."""

    metadata = {"render_modes": ["rgb_array"]}
    action_space = spaces.Discrete(3, start=5)
    observation_space = spaces.Dict(total=spaces.Box(-99, 99, (1,), np.float32), wish=spaces.Text(20))

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.total, self.wanted = 0, int(self.np_random.integers(3, 99))
        return self.seen(), {}

    def step(self, action):
        self.total += int(action) - 4
        return self.seen(), 0.0, self.total >= self.wanted, False, {"right": self.total == self.wanted}

    def seen(self):
        return {"total": np.array([self.total], np.float32), "wish": f"make {self.wanted}"}

    def render(self):
        return np.full((2, 2, 3), self.total, np.uint8)


if "mmrl/Counter-v0" not in gymnasium.registry:
    gymnasium.register("mmrl/Counter-v0", entry_point=Counter, disable_env_checker=True)


def counter(count, **more):
    options = {"env": "mmrl/Counter-v0", "state": "total", "mission": "wish", "success": "right"} | more
    return build("gymnasium", count, options)


def test_equal_parts_of_the_range_are_the_actions_in_order():
    choices = Choices(spaces.Discrete(3, start=5))
    given = np.array([[-1.0], [-0.34], [-0.33], [0.33], [0.34], [1.0]])
    assert choices.to_env(given).tolist() == [5, 5, 6, 6, 7, 7]
    assert [choices.from_env(action).item() for action in (5, 6, 7)] == pytest.approx([-2 / 3, 0, 2 / 3])


def test_tokens_of_one_more_bin_are_the_actions():
    codec, choices = ActionCodec(100, BINS), Choices(spaces.Discrete(BINS - 1))
    decoded = codec.decode(torch.arange(BINS))  # the highest id is the lowest action; the lowest two are the same
    assert choices.to_env(decoded.numpy()[:, None]).tolist() == [6, 6, 5, 4, 3, 2, 1, 0]
    shown = torch.tensor(np.array([choices.from_env(action).item() for action in range(7)]))
    assert codec.encode(shown).tolist() == [7, 6, 5, 4, 3, 2, 1]


def test_every_episode_says_its_own_words():
    with counter(3) as sim:
        first = sim.reset([3, 3, 4], ["default"] * 3).instructions
        wanted = []
        for seed in (3, 3, 4):
            env = Counter()
            wanted.append(env.reset(seed=seed)[0]["wish"])
        assert first == wanted and first[0] == first[1] != first[2]
        step = sim.step(np.array([[[-0.9]], [[0.0]], [[0.9]]]))
        assert step.observation.state[:, 0].tolist() == [1, 2, 3]
    with pytest.raises(UserError, match="no 'words'; it has total, wish"), counter(1, mission="words") as sim:
        sim.reset([0], ["default"])


def test_an_expert_is_told_what_was_executed():
    heard, made = [], []

    def expert(env):
        made.append(env)

        def act(last):
            heard.append(None if last is None else int(last))
            return 5

        return act

    with counter(1, expert=expert) as sim:
        sim.reset([3], ["default"])
        assert sim.expert()[0, 0, 0] == pytest.approx(-2 / 3)
        sim.step(np.array([[[0.0]]]))
        sim.expert()
        sim.reset([3], ["default"])
        sim.expert()
        with pytest.raises(UserError, match=r"length \(action.chunk\) must be 1, not 2"):
            sim.expert(length=2)
    assert heard == [None, 6, None]
    assert len(made) == 2  # an expert serves one episode


def test_the_bot_solves_every_level_in_both_parts():
    tasks = [level + part for level in LEVELS for part in ("", "/unseen")]
    with build("babyai", len(tasks), {"max_steps": 40}) as sim:
        seen = sim.reset([7] * len(tasks), tasks)
        assert seen.images.shape == (8, 56, 56, 3) and sim.simulator.state_dim == 0 and sim.simulator.action_dim == 1
        assert [is_unseen(words) for words in seen.instructions] == [False, True] * 4
        solved = np.zeros(len(tasks), bool)
        while (active := sim.running).any():
            solved |= sim.step(sim.expert(active)).success.any(1)
        assert solved.all()
        again = sim.reset([7] * len(tasks), tasks)
        assert np.array_equal(again.images, seen.images) and again.instructions == seen.instructions


def test_the_parts_share_no_instruction_and_every_word_is_known():
    with build("babyai", 40, {}) as sim:
        said = {}
        for part in ("", "/unseen"):
            tasks = [LEVELS[number % 4] + part for number in range(40)]
            said[part] = set(sim.reset(range(40), tasks).instructions)
    assert not said[""] & said["/unseen"] and len(said[""]) > 20
    assert {word for words in said.values() for sentence in words for word in sentence.split()} <= set(WORDS)
    assert is_unseen("put the grey key next to the red ball") and not is_unseen("put the grey ball next to the red key")
    assert len(UNSEEN) == 5


def test_the_tiny_model_reads_what_the_recipe_shows(tmp_path):
    """Every code of minigrid has an embedding, and the instruction's words are known."""
    build_model(tmp_path)
    backbone = small.load(tmp_path)
    recipe = yaml.safe_load((CONFIGS / "vla" / "manipulation_babyai.yaml").read_text())["task"]
    assert (backbone.config.squares, recipe["options"]["tile"]) == (recipe["options"]["around"], 0)
    codes = OBJECT_TO_IDX, COLOR_TO_IDX, STATE_TO_IDX
    assert backbone.config.codes == tuple(max(each.values()) + 1 for each in codes)
    tasks = [*recipe["tasks"], *recipe["eval_tasks"]]
    with build("babyai", len(tasks), recipe["options"]) as sim:
        seen = sim.reset([3] * len(tasks), tasks)
        looks = backbone.prepare([seen.images], [f"{words} ?" for words in seen.instructions], seen.state)
        assert all(look.words.min() > 0 for look in looks)
        assert backbone.encode(backbone.collate(looks, torch.device("cpu")), every_layer=False).last.isfinite().all()


@pytest.mark.parametrize("level", ["PickupDist", "ActionObjDoor", "OpenDoorColor", "PutNextLocalS5N3"])
def test_codes_all_round_follow_the_world_while_things_are_moved(level):
    """After every step they are what minigrid's own cutting and turning of the whole grid gives."""
    env, around, moved = Levels([level], 0, 9), 9, set()
    rng = np.random.default_rng(0)
    for seed in range(6):
        shown, _ = env.reset(seed=seed, options={"task": level})
        bot, last = BabyAIBot(env.unwrapped), None
        for _ in range(40):
            world = env.unwrapped
            x, y = world.agent_pos
            cut = world.grid.slice(x - around // 2, y - around // 2, around, around)
            for _ in range(world.agent_dir + 1):
                cut = cut.rotate_left()
            cut.set(around // 2, around // 2, world.carrying)
            assert np.array_equal(shown["image"], cut.encode().transpose(1, 0, 2))
            before = world.grid.encode()
            last = bot.replan(last) if seed % 2 else rng.choice(6, p=[0.1, 0.1, 0.3, 0.2, 0.1, 0.2])
            shown, _, done, _, _ = env.step(last)
            if not np.array_equal(before, world.grid.encode()):
                moved.add(int(last))
            if done:
                break
    assert moved >= {"PickupDist": {3}, "PutNextLocalS5N3": {3, 4}}.get(level, {5})


@pytest.mark.parametrize(("direction", "ahead", "right"), [(0, 1, 2), (1, 2, 3), (2, 3, 0), (3, 0, 1)])
def test_the_world_is_turned_about_the_agent_until_it_faces_up(direction, ahead, right):
    """Balls of minigrid's colours 0, 1, 2 and 3 stand north, east, south and west of the agent, a key further east."""
    from types import SimpleNamespace

    from minigrid.core.grid import Grid
    from minigrid.core.world_object import Ball, Key

    grid = Grid(9, 9)
    for (x, y), colour in zip([(4, 3), (5, 4), (4, 5), (3, 4)], ("red", "green", "blue", "purple"), strict=True):
        grid.set(x, y, Ball(colour))
    grid.set(7, 4, Key("yellow"))  # three squares to the east
    world = SimpleNamespace(agent_pos=(4, 4), agent_dir=direction, grid=grid, carrying=Key("grey"))
    seen = view_around(world, grid.encode(), 7)
    assert seen.shape == (7, 7, 3)
    assert seen[3, 3, :2].tolist() == [5, 5]  # a grey key, which is carried
    assert seen[3, 2, :2].tolist() == [6, ahead] and seen[4, 3, :2].tolist() == [6, right]
    far = {0: (3, 0), 1: (0, 3), 2: (3, 6), 3: (6, 3)}[direction]
    assert seen[far][:2].tolist() == [5, 4]
    assert (
        grid.get(4, 4) is None and (view_around(world, grid.encode(), 11)[:, [0, 10], 0] == 2).all()
    )  # walls beyond the world


def test_a_view_all_round_shows_what_stands_behind_and_keeps_it_in_place():
    options = {"levels": ["PickupDist"], "around": 11, "tile": 4, "max_steps": 8}
    with build("babyai", 1, options) as sim:
        first = sim.reset([3], ["PickupDist"]).images[0]
        assert first.shape == (44, 44, 3)
        turn = Choices(spaces.Discrete(7)).from_env(
            0
        )  # to the left: what was at the left is ahead, a quarter clockwise
        squares = lambda image: image.reshape(11, 4, 11, 4, 3).any((1, 3, 4))  # noqa: E731
        after = sim.step(np.full((1, 1, 1), turn)).observation.images[0]
        assert np.array_equal(squares(after), np.rot90(squares(first), -1))
        assert not np.array_equal(squares(after), squares(first))
    for wrong in (1, 8, -3):
        with pytest.raises(UserError, match="around must be 0, or odd"):
            build("babyai", 1, {"around": wrong})


def test_unknown_levels_are_named():
    with pytest.raises(UserError, match="unknown level 'GoToMoon'; known: .*GoToLocalS6N3"):
        build("babyai", 1, {"levels": ["GoToMoon"]})


def test_rows_that_ended_make_no_worlds(monkeypatch):
    """While others go on, an ended row costs nothing, shows its last image, and starts anew from its seed."""
    from mmrl.sims import babyai

    with build("babyai", 2, {"levels": ["GoToLocalS6N3"], "max_steps": 3}) as sim:
        first = sim.reset([1, 2], ["GoToLocalS6N3"] * 2)
        turns = np.zeros((2, 1, 1))
        turns[:] = Choices(spaces.Discrete(7)).from_env(0)
        made = []
        kept = babyai.is_unseen
        monkeypatch.setattr(babyai, "is_unseen", lambda words: made.append(words) or kept(words))
        for _ in range(3):
            last = sim.step(turns)
        assert last.truncated.all() and not made
        assert not np.array_equal(last.observation.images[0], first.images[0])
        again = sim.reset([1, 2], ["GoToLocalS6N3"] * 2)
        assert len(made) >= 2 and np.array_equal(again.images, first.images)


def test_images_are_those_that_minigrid_draws_but_for_its_highlight():
    from minigrid.utils.rendering import highlight_img

    env = gymnasium.make("BabyAI-OpenDoorColor-v0")
    for seed in range(4):
        seen, _ = env.reset(seed=seed)
        ours, theirs = image(seen["image"], 8), env.unwrapped.get_pov_render(tile_size=8)
        assert ours.shape == theirs.shape == (56, 56, 3) and len(np.unique(ours.reshape(-1, 3), axis=0)) > 3
        for x in range(7):
            for y in range(7):
                place = slice(8 * y, 8 * y + 8), slice(8 * x, 8 * x + 8)
                if (x, y) == (3, 6):
                    continue  # the agent, which looks the same always
                if seen["image"][x, y, 0] == 0:
                    assert not ours[place].any()
                else:
                    lit = ours[place].copy()
                    highlight_img(lit)
                    gap = np.abs(lit.astype(int) - theirs[place].astype(int))
                    assert gap.max() <= 2  # theirs is lit before it is made smaller
