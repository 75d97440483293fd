"""ManiSkill's objects in a scene of their own: quicker than ManiSkill's, and the same to the bit."""

import gc
import weakref

import numpy as np
import pytest
import torch

from mmrl.errors import UserError
from mmrl.sims import build

pytest.importorskip("mani_skill", reason="needs ManiSkill: pip install -e '.[maniskill]'")

import sapien  # noqa: E402
from mani_skill.utils.structs import Actor, Link  # noqa: E402

from mmrl.sims.maniskill.alone import LoneActor, LoneArticulation, LoneLink, use_lone_classes  # noqa: E402
from mmrl.sims.maniskill.driver import choose_device  # noqa: E402
from mmrl.sims.maniskill.simulator import REGISTERED_ENVS, objects_kept_from_collection  # noqa: E402

try:
    choose_device()
except UserError as error:
    pytest.skip(str(error), allow_module_level=True)

PICK, PUSH = "PickCube-v1", "PushCube-v1"


@pytest.mark.parametrize(
    ("task", "control_mode"),
    [(PUSH, "pd_joint_delta_pos"), (PICK, "pd_ee_delta_pose"), (PICK, "pd_joint_target_delta_pos")],
)
@pytest.mark.quick("PickCube-v1-pd_ee_delta_pose")
def test_rows_move_bit_for_bit_as_maniskill_moves_them(task, control_mode):
    own = REGISTERED_ENVS[task].make(
        num_envs=1,
        obs_mode="state",
        reward_mode="normalized_dense",
        control_mode=control_mode,
        sim_backend="physx_cpu",
        render_backend="none",
    )
    options = {"tasks": [task], "control_mode": control_mode, "reward": "dense"}
    with build("maniskill", 1, options) as sim:
        for seed in (4, 5):
            shown, _ = own.reset(seed=[seed])
            assert np.array_equal(sim.reset([seed], [task]).state, shown.numpy())
            actions = np.random.default_rng(seed).uniform(-1, 1, (25, 1, 1, sim.simulator.action_dim))
            for action in actions.astype(np.float32):
                shown, reward, _, _, info = own.step(torch.from_numpy(action[0]))
                step = sim.step(action)
                assert np.array_equal(step.observation.state, shown.numpy())
                assert step.reward[0, 0] == reward.item() and step.success[0, 0] == info["success"].item()
    own.close()


def test_what_is_read_is_what_maniskill_reads():
    with build("maniskill", 1, {"tasks": [PUSH], "control_mode": "pd_joint_delta_pos"}) as sim:
        sim.reset([3], [PUSH])
        sim.step(np.random.default_rng(0).uniform(-1, 1, (1, 7, 8)))
        env = sim.simulator._blocks[0]._env(PUSH)
        robot, cube = env.agent.robot, env.obj
        assert type(cube) is LoneActor and type(robot) is LoneArticulation and type(env.agent.tcp) is LoneLink
        for thing, general in ((cube, Actor), (env.agent.tcp, Link), (robot.links[4], Link)):
            assert torch.equal(thing.pose.raw_pose, general.pose.fget(thing).raw_pose)
            assert thing.pose.raw_pose.dtype == torch.float32 and thing.pose.raw_pose[0, :3].norm() > 0.01
        cube.set_pose(sapien.Pose([0.1, 0.2, 0.3], [0, 1, 0, 0]))
        assert cube.pose.raw_pose[0].tolist() == pytest.approx([0.1, 0.2, 0.3, 0, 1, 0, 0])
        robot.set_joint_drive_targets(torch.arange(9.0)[None] / 10, robot.active_joints)
        assert [joint.drive_target.item() for joint in robot.active_joints] == pytest.approx([i / 10 for i in range(9)])


def test_nothing_that_a_row_gives_remembers_how_it_was_made():
    """Tensors made in inference mode would stop whoever wants a gradient of them; here nothing else comes out."""
    with build("maniskill", 1, {"tasks": [PUSH]}) as sim:
        shown = sim.reset([3], [PUSH])
        weight = torch.ones(sim.simulator.state_dim, requires_grad=True)
        (torch.from_numpy(shown.state[0]) * weight).sum().backward()
        assert np.array_equal(weight.grad.numpy(), shown.state[0]) and not torch.is_inference_mode_enabled()
        sim.step(np.zeros((1, 2, 8)))
        env = sim.simulator._blocks[0]._env(PUSH)
        assert env.agent.controller.controllers["arm"]._target_qpos.is_inference()  # and all that is inside was


def test_objects_of_tasks_of_their_own_stay_as_they_are():
    class Own(LoneActor):
        pass

    with build("maniskill", 1, {"tasks": [PUSH]}) as sim:
        env = sim.simulator._blocks[0]._env(PUSH)
        env.obj.__class__ = Own
        use_lone_classes(env)
        assert type(env.obj) is Own and type(env.goal_region) is LoneActor


def test_garbage_of_before_is_left_alone_while_a_scene_is_made():
    class Loop:
        pass

    gc.collect()
    old = Loop()
    old.itself, ends = old, weakref.ref(old)
    del old
    with objects_kept_from_collection():
        new = Loop()
        new.itself, soon = new, weakref.ref(new)
        del new
        gc.collect()
        assert soon() is None and ends() is not None
    gc.collect()
    assert ends() is None
