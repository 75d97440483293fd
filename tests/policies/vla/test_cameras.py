"""Cameras by name: which images a policy sees, and in which order."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from mmrl.errors import UserError
from mmrl.sims import Observation, build
from mmrl.sims.vector.transitions import cameras_of
from mmrl.tasks.manipulation.episodes import Disturbance, EpisodeDemonstrations, record_expert
from mmrl.tasks.manipulation.task import ShuffledInstructions
from tests.policies.vla.test_policy import SEEDS, STARTS, stir
from tests.sims.line_simulator import Line


class TwoCameras(Line):
    """The left one shows 10, the right one 200."""

    image_shape, cameras = (8, 16, 3), ("front", "wrist")

    def _shown(self, moved):
        moved.images[:, :, :8], moved.images[:, :, 8:] = 10, 200
        return moved

    def reset(self, rows, seeds, tasks):
        return self._shown(super().reset(rows, seeds, tasks))

    def step(self, rows, actions):
        return self._shown(super().step(rows, actions))


class UnevenCost(TwoCameras):
    cameras = ("a", "b", "c")


class Twice(TwoCameras):
    cameras = ("a", "a")


def two(**options):
    return build("tests.policies.vla.test_cameras:TwoCameras", 2, **options)


@pytest.mark.parametrize("workers", [0, 1])
def test_observations_name_their_cameras(workers):
    with two(workers=workers) as sim:
        sim.reset([0, 1], ["go", "go"])
        shown = [sim.observation(), sim.observation().select([1]), sim.step(np.zeros((2, 1, 1))).observation]
        for observation in shown:
            assert observation.cameras == ("front", "wrist")
            for name, colour in (("front", 10), ("wrist", 200)):
                image = observation.image(name)
                assert image.shape == (len(observation), 8, 8, 3) and (image == colour).all()
    with pytest.raises(UserError, match="no camera 'wrst' .did you mean 'wrist'..; there are front, wrist"):
        shown[0].image("wrst")


def test_a_simulator_without_names_has_one_camera():
    assert cameras_of(Line(1)) == ("camera",) and cameras_of(ShuffledInstructions(TwoCameras(1))) == ("front", "wrist")
    seen = Observation(np.full((1, 2, 2, 3), 7, np.uint8), np.zeros((1, 1), np.float32), ["go"])
    assert (seen.image("camera") == 7).all()


@pytest.mark.parametrize(
    ("simulator", "message"),
    [
        ("UnevenCost", "must be equally wide, but the width of image_shape, 16, is not divisible by 3"),
        ("Twice", "cameras must be one or more different names"),
    ],
)
def test_names_must_fit_the_image(simulator, message):
    with pytest.raises(UserError, match=message):
        build(f"tests.policies.vla.test_cameras:{simulator}", 1)


class TestPolicies:
    def seen(self, make, backbone, cameras):
        policy = make("regression", backbone, sim=two(), cameras=cameras)
        return policy, policy.prepare(policy.sim.reset([0], ["go"]))[0]

    @pytest.mark.parametrize(
        ("cameras", "colours"),
        [(None, [10, 200]), (["front"], [10]), (["wrist"], [200]), (["wrist", "front"], [200, 10])],
    )
    def test_the_small_one_sees_them_side_by_side_in_the_order_of_the_names(self, make, cameras, colours):
        _, glance = self.seen(make, "small", cameras)
        assert glance.image.shape == (3, 8, 8 * len(colours))
        assert [int(glance.image[0, 0, 8 * i]) for i in range(len(colours))] == colours

    def test_a_vision_language_model_sees_one_image_a_camera(self, make):
        images = {}
        for cameras in (["front"], ["wrist", "front"]):
            policy, tokens = self.seen(make, "qwen", cameras)
            given = policy.module.backbone.collate([tokens], policy.device)
            images[len(cameras)] = len(given["image_grid_thw"])
        assert images == {1: 1, 2: 2}

    @pytest.mark.parametrize("backbone", ["small", "qwen"])
    def test_two_cameras_play_replay_and_learn(self, make, backbone):
        policy = stir(make("regression", backbone, sim=two(), cameras=["wrist", "front"]))
        rollouts = policy.rollout(STARTS, 1, SEEDS[:3])
        with torch.no_grad():
            first, second = (policy.replay(rollouts, policy.module) for _ in range(2))
        assert torch.equal(first.logp, second.logp) and first.logp[rollouts.mask].isfinite().all()

    def test_one_that_is_not_there_is_refused_before_anything_is_played(self, make):
        with pytest.raises(UserError, match="action.cameras: no camera 'wist' .did you mean 'wrist'.*has front, wrist"):
            make("regression", sim=two(), cameras=["wist"])

    @pytest.mark.parametrize("backbone", ["small", "qwen"])
    def test_features_are_for_lerobot(self, make, backbone):
        with pytest.raises(
            UserError, match="action.camera_features is for LeRobot's policies, which model.path=.* is not"
        ):
            make("regression", backbone, sim=two(), cameras=["wrist"], camera_features=["observation.images.top"])

    def test_demonstrations_keep_the_names(self, make):
        with two() as sim:
            recorded = record_expert(sim, [("go", 90)], disturbance=Disturbance(0.0), successful_only=True, seed=0)
        prompt = EpisodeDemonstrations(recorded)[0]
        policy = make("regression", sim=two(), supervised=True, cameras=["wrist"])
        prompt = replace(prompt, metadata={**prompt.metadata, "actions": prompt.metadata["actions"][:1]})
        look = policy.demonstrate([prompt], [0]).inputs[0][0]
        assert look.observation.image.shape == (3, 8, 8) and (look.observation.image == 200).all()
