"""Faults of servers of robots' policies."""

from __future__ import annotations

READ, ROBOT, ARRAYS = "mmrl/serving/observations.py", "mmrl/serving/robot.py", "mmrl/serving/arrays.py"
POLICY, TEST = "mmrl/policies/vla/policy.py", ("serving/test_robot.py",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("robots: cameras are exchanged", READ, "for camera in self.all_cameras\n", "for camera in self.all_cameras[::-1]\n",
     TEST),
    ("robots: images in another order of places", READ, "self.cameras.index(camera)", "self.every_camera.index(camera)",
     TEST),
    ("robots: channels first are taken for rows", READ, "image.transpose(1, 2, 0)", "image.transpose(2, 1, 0)", TEST),
    ("robots: any size of image", READ, "if image.shape != (*self.size, 3):", "if False:", TEST),
    ("robots: hidden numbers are needed", READ, "sim.simulator.state_dim - self.privileged_dim", "sim.simulator.state_dim", TEST),
    ("robots: states that are not finite", READ, "if not np.isfinite(state).all():", "if False:", TEST),
    ("robots: every chunk has the noise of the first", ROBOT, "derive_seed(0, message_index)", "derive_seed(0, 0)", TEST),
    ("robots: at temperature 0", ROBOT, "self.policy.evaluation_temperature)[0]", "0.0)[0]", TEST),
    ("robots: actions that are not finite are sent", ROBOT, "if not np.isfinite(actions).all():", "if False:", TEST),
    ("robots: any key", ROBOT, "if self.key is not None and", "if self.key is None and", TEST),
    ("robots: pages of browsers", ROBOT, 'if request.headers.get("Origin") is not None:', "if False:", TEST),
    ("robots: a failure ends the connection", ROBOT, "            return repr(error)", "            raise", TEST),
    ("robots: objects in arrays", ARRAYS, "or dtype.kind not in NUMERIC_KINDS or", "or", TEST),
    ("robots: arrays turned", ARRAYS, ".reshape(shape)", ".reshape(shape[::-1])", TEST),
    ("robots: statistics are left out", POLICY, "        return to_robot_units(actions, self.normalizer)\n",
     "        return actions.numpy()\n", TEST),
    ("robots: states are not standardised", POLICY, "state = self.robot_state(observation).to(self.device)\n        prefix",
     "state = torch.from_numpy(observation.state)\n        reading", TEST),
    ("robots: training chunks are served", POLICY, "ActionSampling(list(seeds), temperature, training=False)",
     "ActionSampling(list(seeds), 1.0, training=True)", TEST),
]
# fmt: on
