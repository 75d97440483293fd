"""Every action and observation space of Gymnasium is used rightly or refused by name; seeds fit every generator."""

import logging

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from mmrl.errors import UserError
from mmrl.policies.vla.heads.codec import statistics_from_bounds
from mmrl.sims import build
from mmrl.sims.spaces import ObservationReader, as_rgb, bounds_of, converter_of, folded, leaves

IMAGE = spaces.Box(0, 255, (2, 4, 3), np.uint8)
STATE = spaces.Box(-9, 9, (2,), np.float32)


@pytest.mark.parametrize(
    ("space", "numbers", "actions"),
    [
        (spaces.Box(-1, 1, (2,)), [[0.25, -3]], [[0.25, -1]]),
        (spaces.Box(0, 512, (2, 2)), [[1, 2, 3, 600]], [[[1, 2], [3, 512]]]),
        (spaces.Discrete(4, start=1), [[-1], [-0.4], [0.1], [1]], [1, 2, 3, 4]),
        (spaces.MultiDiscrete([2, 4]), [[-0.1, 0.6], [0.1, -1]], [[0, 3], [1, 0]]),
        (spaces.MultiDiscrete([[3], [2]], start=[[5], [0]]), [[1, -1]], [[[7], [0]]]),
        (spaces.MultiBinary(3), [[-0.5, 0.5, 1]], [[0, 1, 1]]),
    ],
)
def test_numbers_become_actions(space, numbers, actions):
    moves = converter_of("mine", space)
    assert moves.dim == len(numbers[0])
    made = moves.to_env(np.array(numbers, float))
    assert np.asarray(made).tolist() == actions
    for one, row in zip(made, numbers, strict=True):
        assert space.contains(np.asarray(one, space.dtype) if not isinstance(space, spaces.Discrete) else int(one))
        again = moves.to_env(moves.from_env(one)[None].astype(float))
        assert np.asarray(again[0]).tolist() == np.asarray(one).tolist(), row


@pytest.mark.parametrize(
    "space",
    [
        spaces.Dict(a=spaces.Box(-1, 1, (1,))),
        spaces.Tuple([spaces.Discrete(2)]),
        spaces.Text(4),
        spaces.Graph(STATE, None),
        spaces.Sequence(STATE),
        spaces.OneOf([spaces.Discrete(2)]),
        spaces.Box(0, 255, (2,), np.uint8),
        spaces.Box(0, 1, ()),
    ],
)
def test_other_actions_are_refused_by_name(space):
    with pytest.raises(UserError, match=f"environment 'mine': actions must be .* not {type(space).__name__}"):
        converter_of("mine", space)


NESTED = spaces.Dict(
    pixels=spaces.Dict(top=IMAGE, front=IMAGE),
    agent_pos=STATE,
    gripper=spaces.Discrete(3),
    pair=spaces.Tuple([STATE, spaces.MultiBinary(2)]),
    word=spaces.Text(3),
)


def observed(number):
    """Of two environments."""
    picture = np.full((2, 2, 4, 3), number, np.uint8)
    return {
        "pixels": {"top": picture, "front": picture + 1},
        "agent_pos": np.array([[1, 2], [3, 4]], np.float32),
        "gripper": np.array([2, 0]),
        "pair": (np.array([[5, 6], [7, 8]], np.float32), np.array([[1, 0], [0, 1]], np.int8)),
        "word": ("a", "b"),
    }


def test_parts_of_nested_observations():
    assert [name for name, _ in leaves(NESTED)] == [
        *("pixels.top", "pixels.front", "agent_pos", "gripper", "pair.0", "pair.1", "word"),
    ]
    reader = ObservationReader(NESTED, ["pixels.top"], ["agent_pos", "gripper", "pair"])
    assert reader.read_images(observed(7)).shape == (2, 2, 4, 3) and (reader.read_images(observed(7)) == 7).all()
    state = [[1, 2, 0, 0, 1, 5, 6, 1, 0], [3, 4, 1, 0, 0, 7, 8, 0, 1]]
    assert reader.read_state(observed(7), 2).tolist() == state
    both = ObservationReader(NESTED, ["pixels"], None)
    shown = both.read_images(observed(7))
    assert both.cameras == ("pixels.top", "pixels.front") and shown.shape == (2, 2, 8, 3)
    assert (shown[:, :, :4] == 7).all() and (shown[:, :, 4:] == 8).all()
    assert both.read_state(observed(7), 2).shape == (2, 0)


@pytest.mark.parametrize(
    ("images", "states", "message"),
    [
        (["pixels.side"], None, "observation has no key 'pixels.side'; its keys: pixels.top, pixels.front, agent_pos"),
        (["agent_pos"], None, "'agent_pos' is Box.*, not an image.*task.options.image to another name, or to null"),
        (None, ["speed"], "observation has no key 'speed'; its keys: pixels.top"),
        (None, ["word"], None),
    ],
)
def test_names_that_do_not_fit_are_refused(images, states, message):
    if message is None:
        assert ObservationReader(NESTED, images, states).states == ["word"]  # Gymnasium flattens texts
        return
    with pytest.raises(UserError, match=message):
        ObservationReader(NESTED, images, states)


def test_states_of_no_fixed_size_are_refused():
    space = spaces.Dict(many=spaces.Sequence(STATE), drawing=spaces.Graph(STATE, None))
    for name, kind in (("many", "Sequence"), ("drawing", "Graph")):
        with pytest.raises(UserError, match=f"'{name}' is a {kind}, which has no fixed number of values"):
            ObservationReader(space, None, [name])


def test_images_of_every_layout():
    first = np.arange(2 * 4 * 3, dtype=np.uint8).reshape(1, 2, 4, 3)
    assert np.array_equal(as_rgb(first, "x"), first)
    assert np.array_equal(as_rgb(first.transpose(0, 3, 1, 2), "x"), first)
    assert np.array_equal(as_rgb(first[..., 0], "x"), first[..., :1].repeat(3, -1))
    assert np.array_equal(as_rgb(first[..., :1], "x"), first[..., :1].repeat(3, -1))
    for wrong, text in (
        (first.astype(np.float32), "float32"),
        (first[..., :2], r"\[2, 4, 2\]; they must have three channels"),
        (first[0, 0], "not images"),
    ):
        with pytest.raises(UserError, match=f"x gives.*{text}"):
            as_rgb(wrong, "x")


def test_a_state_alone_is_the_observation_and_an_image_is_none():
    assert ObservationReader(STATE, None, None).read_state(np.array([[1, 2]], np.float32), 1).tolist() == [[1, 2]]
    assert ObservationReader(IMAGE, [""], None).states == []


def test_seeds_lie_below_two_to_the_31_and_stay_apart():
    held_out, training = range(0, 1 << 30, 1 << 26), range(1 << 32, (1 << 32) + (1 << 30), 1 << 26)
    found = [folded(seed) for seed in (*held_out, *training)]
    assert found[: len(held_out)] == list(held_out) and len(set(found)) == len(found)
    assert max(found) < 1 << 31 and folded((1 << 32) + 5) == (1 << 30) + 5


def test_bounds_stretch_the_policys_numbers():
    low, high = np.array([0.0, -1, -np.inf, 2]), np.array([512.0, 1, np.inf, np.inf])
    scale = statistics_from_bounds((low, high), True)
    assert scale.to_robot(np.array([-1.0, 0.5, 0.5, 0.5])).tolist() == [0, 0.5, 0.5, 0.5]
    assert scale.to_robot(np.array([0.0, 0, 0, 0])).tolist() == [256, 0, 0, 0]
    assert (
        scale.to_robot(np.array([3.0, 0, 0, 0]))[0] == 512 and scale.from_robot(np.array([128.0, 0, 0, 0]))[0] == -0.5
    )
    assert statistics_from_bounds((np.array([-1.0]), np.array([1.0])), True) is None
    assert statistics_from_bounds((np.array([-np.inf]), np.array([np.inf])), True) is None
    assert bounds_of(spaces.Discrete(3)) is None and bounds_of(spaces.Box(0, 2, (1, 2)))[1].tolist() == [2, 2]


# --- in the simulator ---


class Reach(gymnasium.Env):
    """A number that has to come near 400; what is done is 0 .. 512, seeds are those of NumPy's old generator."""

    observation_space = spaces.Dict(agent_pos=spaces.Box(0, 512, (1,), np.float32))
    action_space = spaces.Box(0, 512, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        self.position = np.random.RandomState(seed).uniform(0, 9)
        return self.seen(), {}

    def step(self, action):
        self.position = float(action[0])
        return self.seen(), 0.0, False, False, {"is_success": self.position > 400}

    def seen(self):
        return {"agent_pos": np.array([self.position], np.float32)}


class FourValues(Reach):
    def step(self, action):
        return super().step(action)[:4]


for name, kind in (("Reach", Reach), ("FourValues", FourValues)):
    if f"mmrl/{name}-v0" not in gymnasium.registry:
        gymnasium.register(f"mmrl/{name}-v0", entry_point=kind, disable_env_checker=True)
OPTIONS = {"env": "mmrl/Reach-v0", "image": None, "state": "agent_pos", "success": "is_success", "max_steps": 3}


def test_an_environment_without_images_and_with_old_seeds():
    with build("gymnasium", 2, OPTIONS) as sim:
        assert sim.simulator.image_shape == (0, 0, 3) and sim.simulator.action_bounds[1].tolist() == [512]
        first = sim.reset([1 << 32, 7], ["default"] * 2).state
        assert first[1, 0] == np.float32(np.random.RandomState(7).uniform(0, 9)) and first[0, 0] != first[1, 0]
        step = sim.step(np.array([[[401.0]], [[399.0]]]))
        assert step.success.tolist() == [[True], [False]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"success": None}, "task.options.success is missing.*'mmrl/Reach-v0' is solved, or to terminated"),
        ({"image": "render"}, "does not accept render_mode"),
        ({"image": "pixels"}, "observation has no key 'pixels'; its keys: agent_pos"),
    ],
)
def test_what_a_user_has_to_name(options, message):
    with pytest.raises(UserError, match=message):
        build("gymnasium", 1, OPTIONS | options)


def test_a_step_of_four_values_is_named():
    with build("gymnasium", 1, OPTIONS | {"env": "mmrl/FourValues-v0"}) as sim:
        sim.reset([0], ["default"])
        with pytest.raises(UserError, match="step.. returns 4 values, as before Gymnasium 0.26; it must return 5"):
            sim.step(np.zeros((1, 1, 1)))


def test_a_key_of_success_that_never_comes_is_told(caplog):
    with build("gymnasium", 1, OPTIONS | {"success": "solved"}) as sim, caplog.at_level(logging.WARNING):
        sim.reset([0], ["default"])
        for _ in range(3):
            sim.step(np.zeros((1, 1, 1)))
    assert "never had the key 'solved' of task.options.success" in caplog.text and "is_success" in caplog.text
