"""Parses observations that robots send, and checks them against those that the policy was trained on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mmrl.policies.vla.settings import Actions
from mmrl.sims import Observation, VectorSim

LIBERO_CAMERA_KEYS = ("image", "wrist_image")  # openpi's keys for LIBERO's first and second camera


class ActingPolicy(Protocol):
    """A robot policy that maps observations to chunks of actions."""

    action: Actions
    sim: VectorSim
    evaluation_temperature: float

    def act(self, observation: Observation, seeds: list[int], temperature: float) -> NDArray[np.float64]:
        """Returns chunks of actions [row, step, action] in the robot's units, one for each row of the observation."""
        ...


class BadObservation(ValueError):
    """An observation that the policy cannot use. The text names the key."""


class RobotReader:
    """Reads observations of one robot for a policy: each camera of `cameras`, the state, and the instruction.

    A camera's image stands under `observation/NAME` or `NAME` in `images`, as [height, width, 3] or [3, height, width]
    bytes of the size that the policy was trained on; the first two cameras may be called `observation/image` and
    `observation/wrist_image`. The state is `observation/state` or `state`, in the simulator's units; the instruction is
    `prompt`.
    """

    def __init__(self, policy: ActingPolicy) -> None:
        sim = policy.sim
        self.all_cameras = sim.cameras
        self.cameras = tuple(policy.action.cameras or sim.cameras)
        height, width, _ = sim.simulator.image_shape
        self.size = (height, width // len(sim.cameras))
        self.privileged_dim = policy.action.privileged
        self.state_dim = sim.simulator.state_dim - self.privileged_dim
        self.action_dim, self.chunk = sim.simulator.action_dim, policy.action.chunk

    def describe(self) -> dict[str, Any]:
        """Returns the cameras and sizes of the observations and actions, which clients get first."""
        return {
            "cameras": list(self.cameras),
            "image_size": list(self.size),
            "state_dim": self.state_dim,
            "action_dim": self.action_dim,
            "action_horizon": self.chunk,
        }

    def read(self, tree: object) -> Observation:
        """Parses an observation into one row. Cameras that the policy does not use are black; the privileged part of
        the state, which only critics use, is 0. Raises BadObservation if a part is missing or invalid."""
        if not isinstance(tree, Mapping):
            raise BadObservation("an observation must be a map with the keys observation/..., state and prompt")
        prompt = tree.get("prompt")
        if not isinstance(prompt, str) or not prompt.strip():
            raise BadObservation("prompt: the instruction is missing or not a string")
        images = [
            self._image(camera, tree) if camera in self.cameras else np.zeros((*self.size, 3), np.uint8)
            for camera in self.all_cameras
        ]
        return Observation(np.concatenate(images, 1)[None], self._state(tree)[None], [prompt], self.all_cameras)

    def _image(self, camera: str, tree: Mapping[Any, Any]) -> NDArray[np.uint8]:
        """Returns the image [height, width, 3] of a camera. Raises BadObservation if it is missing, or has another type
        or size than in training."""
        if not self.size[0]:
            return np.zeros((*self.size, 3), np.uint8)
        key, image = next(self._candidates(camera, tree), (None, None))
        if key is None:
            keys = ", ".join(str(name) for name in tree)
            raise BadObservation(f"observation/{camera}: the image of this camera is missing; there are {keys:.200}")
        if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3:
            raise BadObservation(
                f"{key}: an image is an array [height, width, 3] of uint8, not {type_and_shape(image)}"
            )
        if image.shape[0] == 3 and image.shape[2] != 3:
            image = image.transpose(1, 2, 0)
        if image.shape != (*self.size, 3):
            height, width = self.size
            raise BadObservation(
                f"{key}: the policy was trained on images of {height} x {width} x 3, not of "
                f"{' x '.join(map(str, image.shape))}; send image_tools.resize_with_pad(image, {height}, {width})"
            )
        return image

    def _candidates(self, camera: str, tree: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
        """Yields the key and the value of everything in an observation that may be the camera's image."""
        names = [camera]
        if (camera_index := self.cameras.index(camera)) < len(LIBERO_CAMERA_KEYS):
            names.append(LIBERO_CAMERA_KEYS[camera_index])
        nested = tree.get("images")
        for name in names:
            for key in (f"observation/{name}", f"observation/images/{name}", name):
                if key in tree:
                    yield key, tree[key]
            if isinstance(nested, Mapping) and name in nested:
                yield f"images.{name}", nested[name]

    def _state(self, tree: Mapping[Any, Any]) -> NDArray[np.float32]:
        """Returns the state of the robot, followed by zeros for its privileged part. Raises BadObservation if it is
        missing, has another size, or is not finite."""
        key = "state" if "state" in tree else "observation/state"
        if not self.state_dim:
            return np.zeros(self.privileged_dim, np.float32)
        state = tree.get(key)
        if not isinstance(state, np.ndarray) or state.dtype.kind not in "iuf" or state.shape != (self.state_dim,):
            raise BadObservation(f"{key}: the robot's state is {self.state_dim} numbers, not {type_and_shape(state)}")
        if not np.isfinite(state).all():
            raise BadObservation(f"{key}: number {int(np.isfinite(state).argmin())} is {state[~np.isfinite(state)][0]}")
        return np.concatenate([state.astype(np.float32), np.zeros(self.privileged_dim, np.float32)])


def type_and_shape(value: object) -> str:
    """Returns the type of a value, and for an array its shape, for messages."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return "missing" if value is None else type(value).__name__
