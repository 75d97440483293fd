"""LeRobot policies of several cameras: which image stands for which of the checkpoint's, as LeRobot sees them."""

import numpy as np
import pytest
import torch

from mmrl.errors import UserError
from mmrl.samplers.chain import INITIAL, derive_seed, gaussian_noise
from tests.policies.vla.test_lerobot_policy import CHUNK, KINDS, SEEDS, STARTS, lerobot, lerobots_error, load, starts
from tests.tasks import test_lerobot as data
from tests.tasks.choosing import build

SIM = "tests.policies.vla.test_cameras:TwoCameras"
TOP, SIDE = "observation.images.top", "observation.images.side"
FRONT, WRIST = 10, 200  # what the simulator's two cameras show


@pytest.fixture(scope="module", params=KINDS)
def checkpoints(request, tmp_path_factory):
    """Of one kind: with the cameras top and side, and with a place beside them that LeRobot fills."""
    from tests.policies.vla import tiny_lerobot

    beside = tmp_path_factory.mktemp("cameras")
    with pytest.MonkeyPatch.context() as changed:
        if request.param != "smolvla":
            tiny_lerobot.shrink(changed, beside)
        for name, empty in (("two", 0), ("more", 1)):
            tiny_lerobot.write(beside / name, request.param, ("top", "side"), empty=empty)
        yield request.param, beside


def played(policy):
    """The first plans [3, action] of three starts, in the robot's units."""
    policy.sim.simulator.received.clear()
    policy.respond(starts(0, 10, 30), [5, 6, 7])
    received = policy.sim.simulator.received
    return [torch.tensor([action for r, action in received if r == row][:CHUNK]).float() for row in range(3)]


def expected(kind, folder, latent, shown):
    """What LeRobot plans from the same noise. shown: by feature, the grey of its image."""
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    policy = get_policy_class(kind).from_pretrained(folder)
    before, after = make_pre_post_processors(policy.config, str(folder))
    batch = {name: torch.full((3, 3, 8, 8), grey / 255) for name, grey in shown.items()}
    batch["observation.state"] = torch.tensor([[0.0], [0.1], [0.3]])
    batch["task"] = [f"go from {x:.2f}" for x in (0.0, 0.1, 0.3)]
    noise = gaussian_noise([derive_seed(seed, 0) for seed in (5, 6, 7)], INITIAL, latent)
    return after(policy.predict_action_chunk(before(batch), noise=noise))[..., 0]


@lerobot
@pytest.mark.parametrize("name", ["two", "more"])
@pytest.mark.parametrize(
    ("action", "shown"),
    [
        ({"cameras": ["front", "wrist"]}, {TOP: FRONT, SIDE: WRIST}),
        ({"cameras": ["wrist", "front"]}, {TOP: WRIST, SIDE: FRONT}),
        ({"cameras": ["wrist", "front"], "camera_features": [SIDE, TOP]}, {TOP: FRONT, SIDE: WRIST}),
        ({"cameras": ["wrist"], "camera_features": [SIDE]}, {SIDE: WRIST}),
    ],
)
def test_it_acts_as_lerobot_does_on_these_images(checkpoints, name, action, shown):
    kind, beside = checkpoints
    ours = load(beside / name, simulator=SIM, action=action)
    found, theirs = played(ours), expected(kind, beside / name, ours.module.head.latent, shown)
    for one, other in zip(found, theirs, strict=True):
        assert len(one) > 1
        torch.testing.assert_close(one, other[: len(one)], rtol=1e-5, atol=1e-6)


@lerobot
@pytest.mark.parametrize(
    ("cameras", "features", "top"),
    [
        (["front", "wrist"], [TOP, SIDE], data.SIDE),
        (["wrist", "front"], [TOP, SIDE], data.FRONT),
        (["wrist", "front"], [SIDE, TOP], data.SIDE),
        (["wrist", "front"], None, data.FRONT),
    ],
)
def test_demonstrations_of_two_cameras_have_lerobots_loss(checkpoints, tmp_path, cameras, features, top):
    """A data set whose side stands for the simulator's front, its front for the wrist: from Parquet to the loss of
    a look, whose images are LeRobot's by `top`, the feature that the policy's first image must show."""
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    kind, beside = checkpoints
    told = {"type": "lerobot", "path": str(data.write(tmp_path / "data", "v2.1", "image", (data.FRONT, data.SIDE)))}
    demonstrations = {**told, "camera": [data.SIDE, data.FRONT]}
    task = build("manipulation", {"simulator": SIM, "tasks": ["go"], "demonstrations": demonstrations}, seed=0)
    ours = load(
        beside / "two", simulator=SIM, supervised=True, action={"cameras": cameras, "camera_features": features}
    )
    shows = ours.demonstrate([task.demonstrations[1]], [1])  # of five frames the second: all four actions of a chunk
    with torch.no_grad():
        found = -ours.replay(shows, ours.module).logp.item()
    policy = get_policy_class(kind).from_pretrained(beside / "two")
    before, _ = make_pre_post_processors(policy.config, str(beside / "two"))
    grey = data.grey(0, 1)
    shades = {TOP: grey, SIDE: 255 - grey} if top == data.FRONT else {TOP: 255 - grey, SIDE: grey}
    batch = {name: torch.full((1, 3, 8, 8), shade / 255) for name, shade in shades.items()}
    batch |= {"observation.state": torch.tensor([[0.1]]), "task": [data.SHOWN[0]]}
    batch["action"] = torch.tensor([[[-0.1], [0.1], [-0.1], [0.1], [0.1], [0.1]]])
    expected = lerobots_error(policy, before, batch, shows.inputs[0][0].sampled)
    assert found == pytest.approx(expected, rel=1e-4)
    exchanged = lerobots_error(
        policy, before, {**batch, TOP: batch[SIDE], SIDE: batch[TOP]}, shows.inputs[0][0].sampled
    )
    assert abs(exchanged - expected) > 1e-3 * expected


@lerobot
def test_exchanged_cameras_act_otherwise(checkpoints):
    _, beside = checkpoints
    pair = [
        load(beside / "two", simulator=SIM, action={"cameras": c}) for c in (["front", "wrist"], ["wrist", "front"])
    ]
    one, other = map(played, pair)
    assert abs(one[0][0] - other[0][0]) > 1e-3


@lerobot
def test_two_cameras_have_a_ratio_of_exactly_one(checkpoints):
    policy = load(checkpoints[1] / "two", simulator=SIM, action={"cameras": ["front", "wrist"]})
    rollouts = policy.rollout(STARTS, 2, SEEDS)
    assert np.unique(rollouts.inputs[0][0].observation.images).tolist() == [FRONT, WRIST]
    with torch.no_grad():
        old = policy.replay(rollouts, policy.module)
    rollouts.old_logp, rollouts.old_prediction = old.logp, old.prediction
    now = policy.replay(rollouts, policy.module)
    assert now.log_ratio.requires_grad and torch.equal(now.log_ratio, torch.zeros_like(now.log_ratio))
    assert rollouts.mask.any() and old.logp[rollouts.mask].std() > 0


@lerobot
@pytest.mark.parametrize(
    ("action", "message"),
    [
        ({}, "trained on 2 cameras .observation.images.top, observation.images.side., but action.cameras gives it 1"),
        ({"cameras": ["front"]}, "gives it 1; name as many there, or set action.camera_features"),
        ({"cameras": ["front", "wrist", "front"]}, "trained on 2 cameras .*gives it 3"),
        ({"cameras": ["front", "wrist"], "camera_features": [TOP]}, "must be 2 different names"),
        ({"cameras": ["front", "wrist"], "camera_features": [TOP, TOP]}, "must be 2 different names"),
        ({"cameras": ["front"], "camera_features": [TOP + "p"]}, "has no 'observation.images.topp' .did you mean"),
        ({"cameras": ["frond", "wrist"]}, "action.cameras: no camera 'frond'"),
    ],
)
def test_cameras_that_do_not_fit_are_refused_before_weights_are_read(checkpoints, action, message, monkeypatch):
    from mmrl.policies.vla.backbones import lerobot as module

    monkeypatch.setattr(module, "load_file", None)
    monkeypatch.setattr(module, "get_policy_class", None)
    with pytest.raises(UserError, match=message):
        load(checkpoints[1] / "more", simulator=SIM, action=action)
