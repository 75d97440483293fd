"""Observations that robots send, in the shape in which the run's policy was trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mmrl.policies.vla.settings import Actions
from mmrl.sims import Observation, VectorSim

NUMBERED = ("image", "wrist_image")  # LIBERO's keys in openpi, for a first and a second camera


class ActingPolicy(Protocol):
    """A policy that acts on observations of single robots."""

    action: Actions
    sim: VectorSim
    evaluation_temperature: float

    def act(self, observation: Observation, seeds: list[int], temperature: float) -> NDArray[np.float64]: ...


class BadObservation(ValueError):
    """An observation that the policy cannot act on; the text names the key."""


class RobotReader:
    """Reads observations of one robot for a policy: each camera of `cameras`, the state, and the instruction.

    A camera's image stands under `observation/NAME` or `NAME` in `images`, as [height, width, 3] or [3, height, width]
    bytes of the size that the policy was trained on; the first two cameras may be called `observation/image` and
    `observation/wrist_image`. The state is `observation/state` or `state`, in the simulator's units; the instruction is
    `prompt`.
    """

    def __init__(self, policy: ActingPolicy) -> None:
        sim = policy.sim
        self.every_camera = sim.cameras
        self.cameras = tuple(policy.action.cameras or sim.cameras)
        height, width, _ = sim.simulator.image_shape
        self.size = (height, width // len(sim.cameras))
        self.hidden = policy.action.privileged
        self.state_dim = sim.simulator.state_dim - self.hidden
        self.action_dim, self.chunk = sim.simulator.action_dim, policy.action.chunk

    def describe(self) -> dict[str, Any]:
        """Returns what a client has to send and what it gets."""
        return {
            "cameras": list(self.cameras),
            "image_size": list(self.size),
            "state_dim": self.state_dim,
            "action_dim": self.action_dim,
            "action_horizon": self.chunk,
        }

    def read(self, tree: object) -> Observation:
        """Returns the observation of one row; cameras that the policy does not see are black, numbers for a critic
        alone are 0. Raises BadObservation."""
        if not isinstance(tree, Mapping):
            raise BadObservation("an observation is a map of observation/..., state and prompt")
        prompt = tree.get("prompt")
        if not isinstance(prompt, str) or not prompt.strip():
            raise BadObservation("prompt: the instruction is missing or not a string")
        images = [
            self._image(camera, tree) if camera in self.cameras else np.zeros((*self.size, 3), np.uint8)
            for camera in self.every_camera
        ]
        return Observation(np.concatenate(images, 1)[None], self._state(tree)[None], [prompt], self.every_camera)

    def _image(self, camera: str, tree: Mapping[Any, Any]) -> NDArray[np.uint8]:
        """Returns a camera's image [height, width, 3] uint8 from an observation, also from [3, height, width]. Raises
        BadObservation."""
        if not self.size[0]:
            return np.zeros((*self.size, 3), np.uint8)
        key, image = next(self._candidates(camera, tree), (None, None))
        if key is None:
            keys = ", ".join(str(name) for name in tree)
            raise BadObservation(f"observation/{camera}: the image of this camera is missing; there are {keys:.200}")
        if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3:
            raise BadObservation(f"{key}: an image is an array [height, width, 3] of uint8, not {described(image)}")
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
        names = [camera]
        if (number := self.cameras.index(camera)) < len(NUMBERED):
            names.append(NUMBERED[number])
        nested = tree.get("images")
        for name in names:
            for key in (f"observation/{name}", f"observation/images/{name}", name):
                if key in tree:
                    yield key, tree[key]
            if isinstance(nested, Mapping) and name in nested:
                yield f"images.{name}", nested[name]

    def _state(self, tree: Mapping[Any, Any]) -> NDArray[np.float32]:
        key = "state" if "state" in tree else "observation/state"
        if not self.state_dim:
            return np.zeros(self.hidden, np.float32)
        state = tree.get(key)
        if not isinstance(state, np.ndarray) or state.dtype.kind not in "iuf" or state.shape != (self.state_dim,):
            raise BadObservation(f"{key}: the robot's state is {self.state_dim} numbers, not {described(state)}")
        if not np.isfinite(state).all():
            raise BadObservation(f"{key}: number {int(np.isfinite(state).argmin())} is {state[~np.isfinite(state)][0]}")
        return np.concatenate([state.astype(np.float32), np.zeros(self.hidden, np.float32)])


def described(value: object) -> str:
    """Returns the type of a value, and the shape of an array, for messages."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return "missing" if value is None else type(value).__name__
