import numpy as np
import pytest

from mmrl.errors import UserError
from mmrl.sims import build

gymnasium = pytest.importorskip("gymnasium")

from gymnasium import spaces  # noqa: E402
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv  # noqa: E402


class Walk(gymnasium.Env):
    """A point that starts at a random place of [0, 0.2] and is done at 1; it raises when it is told to move by 0.5."""

    metadata = {"render_modes": ["rgb_array"]}
    action_space = spaces.Box(-0.5, 0.5, (1,), np.float32)
    observation_space = spaces.Dict(
        camera=spaces.Box(0, 255, (4, 6, 3), np.uint8), place=spaces.Box(-9, 9, (1,), np.float32)
    )

    def __init__(self, render_mode="rgb_array"):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.uniform(0, 0.2)
        self.bonus = (options or {}).get("task") == "hurry"
        return self.seen(), {}

    def step(self, action):
        if action[0] == 0.5:
            raise RuntimeError("broken")
        self.place += float(action[0])
        done = self.place >= 1
        return self.seen(), -1.0 - self.bonus, done, False, {"won": done}

    def seen(self):
        return {"camera": self.render(), "place": np.array([self.place], np.float32)}

    def render(self):
        return np.full((4, 6, 3), int(self.place * 100), np.uint8)


if "mmrl/Walk-v0" not in gymnasium.registry:
    gymnasium.register("mmrl/Walk-v0", entry_point=Walk, disable_env_checker=True)


def sync(mode):
    return lambda count: SyncVectorEnv([Walk] * count, autoreset_mode=mode)


def by_hand(seed, actions):
    env = Walk()
    env.reset(seed=seed)
    places = [env.place]
    for action in actions:
        env.step([action])
        places.append(env.place)
    return places


@pytest.fixture
def walk():
    opened = []

    def make(count, **options):
        chosen = {
            "env": "mmrl/Walk-v0",
            "image": "camera",
            "state": "place",
            "instruction": "walk",
            "success": "terminated",
        } | options
        opened.append(build("gymnasium", count, chosen))
        return opened[-1]

    yield make
    for sim in opened:
        sim.close()


def asynchronous(count):
    return AsyncVectorEnv([Walk] * count, autoreset_mode=AutoresetMode.DISABLED, context="forkserver")


@pytest.mark.parametrize(
    "env", ["mmrl/Walk-v0", sync(AutoresetMode.NEXT_STEP), pytest.param(asynchronous, id="asynchronous")]
)
def test_a_frozen_row_keeps_its_last_image_while_others_go_on(walk, env):
    sim = walk(3, env=env)
    first = sim.reset([3, 3, 4], ["default"] * 3)
    assert first.instructions == ["walk"] * 3 and first.images.shape == (3, 4, 6, 3)
    assert first.state[0] == first.state[1] != first.state[2]
    step = sim.step(np.tile([[[0.45], [0.45], [0.4]], [[0.1], [0.1], [0.1]], [[0.2], [0.0], [0.1]]], 1))
    assert step.valid.tolist() == [[1, 1, 1 if by_hand(3, [0.45, 0.45])[-1] < 1 else 0], [1, 1, 1], [1, 1, 1]]
    assert step.terminated.any(1).tolist() == [True, False, False] and step.success.any(1)[0]
    np.testing.assert_allclose(step.observation.state[1], by_hand(3, [0.1] * 3)[-1], atol=1e-6)
    np.testing.assert_allclose(step.observation.state[2], by_hand(4, [0.2, 0.0, 0.1])[-1], atol=1e-6)
    later = sim.step(np.full((3, 2, 1), 0.1), sim.running)
    assert np.array_equal(later.observation.images[0], step.observation.images[0]) and not later.valid[0].any()
    np.testing.assert_allclose(later.observation.state[1], by_hand(3, [0.1] * 5)[-1], atol=1e-6)


def test_a_row_restarts_while_the_other_goes_on(walk):
    sim = walk(2, success="won")
    sim.reset([3, 4], ["default"] * 2)
    step = sim.step([[[0.45]] * 3, [[0.1]] * 3])
    assert step.success[0].any()
    begun = sim.restart([0], [13], ["default"])
    np.testing.assert_allclose(begun.state[0], by_hand(13, [])[0], atol=1e-6)
    np.testing.assert_allclose(begun.state[1], by_hand(4, [0.1] * 3)[-1], atol=1e-6)
    np.testing.assert_allclose(
        sim.step(np.full((2, 1, 1), 0.1)).observation.state[0], by_hand(13, [0.1])[-1], atol=1e-6
    )


def test_the_last_row_restarts_with_its_own_observation(walk):
    sim = walk(2)
    sim.reset([3, 4], ["default"] * 2)
    sim.step([[[0.1]] * 3, [[0.45]] * 3])
    begun = sim.restart([1], [13], ["default"])
    np.testing.assert_allclose(begun.state[1], by_hand(13, [])[0], atol=1e-6)
    np.testing.assert_allclose(begun.state[0], by_hand(3, [0.1] * 3)[-1], atol=1e-6)


def test_tasks_reach_the_environment_and_time_runs_out(walk):
    sim = walk(2, instruction={"stroll": "walk slowly", "hurry": "run"}, max_steps=2)
    assert sim.reset([0, 0], ["stroll", "hurry"]).instructions == ["walk slowly", "run"]
    step = sim.step(np.full((2, 3, 1), 0.1))
    assert step.reward.tolist() == [[-1, -1, 0], [-2, -2, 0]]
    assert step.truncated.tolist() == [[0, 1, 0]] * 2 and not step.success.any()
    with pytest.raises(UserError, match="unknown task 'huri' .did you mean 'hurry'"):
        sim.reset([0, 0], ["stroll", "huri"])


def test_images_can_come_from_render(walk):
    sim = walk(1, image="render", state=None)
    seen = sim.reset([3], ["default"])
    assert (seen.images == int(by_hand(3, [])[0] * 100)).all() and seen.state.shape == (1, 0)


def test_one_that_raises_loses_the_episodes_of_all(walk):
    sim = walk(2)
    sim.reset([0, 1], ["default"] * 2)
    with pytest.warns(RuntimeWarning, match="broken"):
        step = sim.step([[[0.1]], [[0.5]]])
    assert step.dropped.all() and not step.valid.any() and sim.counters["dropped_episodes"] == 2
    assert sim.reset([0, 1], ["default"] * 2).state[0] == np.float32(by_hand(0, [])[0])


def test_others_go_on_where_one_is_dropped(walk):
    sim = walk(2)
    sim.reset([0, 1], ["default"] * 2)
    with pytest.warns(RuntimeWarning, match="enough"):
        sim.drop(np.array([1]), "enough")
    step = sim.step(np.full((2, 1, 1), 0.1))
    assert step.valid.tolist() == [[True], [False]] and sim.running.tolist() == [True, False]
    np.testing.assert_allclose(step.observation.state[0], by_hand(0, [0.1])[-1], atol=1e-6)
    assert sim.reset([0, 1], ["default"] * 2).state[1] == np.float32(by_hand(1, [])[0])


def test_what_gymnasium_cannot_do_is_refused(walk):
    sim = walk(2)
    sim.reset([0, 1], ["default"] * 2)
    sim.step(np.zeros((2, 1, 1)), np.array([True, False]))
    with pytest.raises(UserError, match=r"but \[1\] were inactive in an earlier step"):
        sim.step(np.zeros((2, 1, 1)))
    with pytest.raises(UserError, match="has no expert; set task.options.expert"):
        sim.expert()
    with pytest.raises(UserError, match="DISABLED or NEXT_STEP"):
        walk(2, env=sync(AutoresetMode.SAME_STEP))
    with pytest.raises(UserError, match="must have 2 environments, not 3"):
        walk(2, env=lambda count: sync(AutoresetMode.DISABLED)(3))
    with pytest.raises(UserError, match="no key 'wrist'; its keys: camera, place"):
        walk(2, image="wrist")
    with pytest.raises(UserError, match="both mission=place and an instruction; set one of them to null"):
        walk(2, mission="place", instruction="go")
    with pytest.raises(UserError, match="gymnasium environment 'mmrl/Wolk-v0': .*Walk"):
        walk(2, env="mmrl/Wolk-v0")


class Floats(Walk):
    """Its images are not what its space declares."""

    def seen(self):
        return super().seen() | {"camera": self.render().astype(np.float32) / 255}


class Channels(Walk):
    def seen(self):
        return super().seen() | {"camera": self.render().transpose(2, 0, 1)}


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (Floats, r"'camera' of shape \(4, 6, 3\) and type float32, but observation_space declares .* and uint8"),
        (Channels, r"'camera' of shape \(3, 4, 6\) and type uint8, but observation_space declares \(4, 6, 3\)"),
    ],
)
def test_an_observation_that_is_not_what_its_space_declares_is_named(walk, kind, match):
    with pytest.raises(UserError, match=match):
        walk(2, env=lambda count: SyncVectorEnv([kind] * count, autoreset_mode=AutoresetMode.DISABLED))
