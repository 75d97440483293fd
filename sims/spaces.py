"""Conversions between Gymnasium's action and observation spaces and a policy's actions, images and states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import iterate
from numpy.typing import NDArray

from mmrl.errors import UserError

# --- actions ---


class ActionConverter(Protocol):
    """Converts a policy's actions, `dim` numbers each, to actions of an environment and back."""

    dim: int

    def to_env(self, actions: NDArray) -> NDArray:
        """Converts a policy's actions [n, dim] to n actions of the environment."""
        ...

    def from_env(self, action: Any) -> NDArray[np.float32]:
        """Converts one action of the environment to a policy's action [dim]."""
        ...


class Continuous:
    """Actions of a `Box` of any shape, flattened; they are clipped at its bounds."""

    def __init__(self, box: spaces.Box) -> None:
        self.box, self.dim = box, int(np.prod(box.shape))

    def to_env(self, actions: NDArray) -> NDArray:
        shaped = np.asarray(actions).reshape(len(actions), *self.box.shape)
        return np.clip(shaped, self.box.low, self.box.high).astype(self.box.dtype)

    def from_env(self, action: Any) -> NDArray[np.float32]:
        return np.asarray(action, np.float32).ravel()


class Choices:
    """The n actions of a `Discrete` space. A policy's action is one number; action i is the i-th of n equal intervals
    of [-1, 1].

    An action head with tokens has these intervals if it has n + 1 bins (`action.head={type: token, bins: n + 1}`).
    """

    dim = 1

    def __init__(self, space: spaces.Discrete) -> None:
        self.count, self.start = int(space.n), int(space.start)

    def to_env(self, actions: NDArray) -> NDArray:
        return self.start + _interval(actions[:, 0], self.count)

    def from_env(self, action: Any) -> NDArray[np.float32]:
        return np.array([(2 * (int(action) - self.start) + 1) / self.count - 1], np.float32)


class SeveralChoices:
    """The actions of a `MultiDiscrete` or `MultiBinary` space: one number for each entry, as in `Choices`."""

    def __init__(self, counts: NDArray[np.int64], start: NDArray[np.int64], dtype: Any) -> None:
        self.counts, self.start, self.dtype = counts, start, dtype
        self.dim = int(counts.size)

    def to_env(self, actions: NDArray) -> NDArray:
        parts = _interval(np.asarray(actions), self.counts.ravel())
        return (parts.reshape(len(actions), *self.counts.shape) + self.start).astype(self.dtype)

    def from_env(self, action: Any) -> NDArray[np.float32]:
        return ((2 * (np.asarray(action) - self.start) + 1) / self.counts - 1).ravel().astype(np.float32)


def _interval(numbers: NDArray, num_intervals: Any) -> NDArray[np.int64]:
    """Returns the index of the interval that each number is in, where [-1, 1] is divided into `num_intervals` equal
    ones."""
    return np.clip(np.floor((numbers + 1) / 2 * num_intervals).astype(np.int64), 0, np.asarray(num_intervals) - 1)


def converter_of(env: Any, space: gymnasium.Space) -> ActionConverter:
    """Returns the converter for an action space. env: for messages. Raises UserError if the space is not supported."""
    if isinstance(space, spaces.Discrete):
        return Choices(space)
    if isinstance(space, spaces.MultiDiscrete):
        return SeveralChoices(np.asarray(space.nvec), np.asarray(space.start), space.dtype)
    if isinstance(space, spaces.MultiBinary):
        counts = np.full(space.shape, 2)
        return SeveralChoices(counts, np.zeros_like(counts), space.dtype)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating) and space.shape:
        return Continuous(space)
    raise UserError(
        f"gymnasium environment {env!r}: actions must be a Box of floats, Discrete, MultiDiscrete or MultiBinary, not "
        f"{space}; convert it with gymnasium.wrappers.TransformAction"
    )


def bounds_of(space: gymnasium.Space) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Returns the bounds of a `Box`, low and high [dim] each, which may be infinite; None for other spaces."""
    if not isinstance(space, spaces.Box):
        return None
    return space.low.astype(np.float64).ravel(), space.high.astype(np.float64).ravel()


# --- observations ---


def leaves(space: gymnasium.Space, path: str = "") -> Iterator[tuple[str, gymnasium.Space]]:
    """Yields dotted name and space of each leaf of nested `Dict` and `Tuple` spaces: pixels.top, or 0 in a tuple."""
    if isinstance(space, spaces.Dict):
        inner: Any = space.spaces.items()
    elif isinstance(space, spaces.Tuple):
        inner = ((str(i), part) for i, part in enumerate(space.spaces))
    else:
        yield path, space
        return
    for name, part in inner:
        yield from leaves(part, f"{path}.{name}" if path else name)


def part_of(observation: Any, path: str) -> Any:
    """Returns the part of a nested observation with a dotted name of `leaves`; "" is the full observation."""
    for name in path.split(".") if path else ():
        observation = observation[int(name)] if isinstance(observation, tuple) else observation[name]
    return observation


def misfit(space: gymnasium.Space, env: gymnasium.Env) -> str | None:
    """Returns a sentence on the first array of an observation of `env` whose shape or type is not that of its space;
    None if there is none."""
    observation, _ = env.reset(seed=0)
    for name, part in leaves(space):
        value = np.asarray(part_of(observation, name))
        if isinstance(part, spaces.Box) and not (
            value.shape == part.shape and np.can_cast(value.dtype, part.dtype, "same_kind")
        ):
            return (
                f"reset() gives {f'observation {name!r}' if name else 'an observation'} of shape {value.shape} and "
                f"type {value.dtype}, but observation_space declares {part.shape} and {part.dtype}; change one of them"
            )
    return None


def is_image(space: gymnasium.Space) -> bool:
    """Returns whether a space holds 8-bit images: gray or RGB, with channels last or first."""
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) in (2, 3)


class ObservationReader:
    """Reads images and states from the observations of a vector environment.

    space: of one environment's observation. images: dotted names of images, or of mappings that hold only images; None:
    there are none. states: dotted names of states, which are concatenated; None: the full observation if it is a `Box`
    and not an image, else nothing. Raises UserError for unknown names, images that are not 8-bit images, and states
    without a fixed size.
    """

    def __init__(self, space: gymnasium.Space, images: Sequence[str] | None, states: Sequence[str] | None) -> None:
        """images, states: names of parts of the observation, see `leaves`. Without `images` it reads none; without
        `states` the state is the observation itself, if that is one array and no image. Raises UserError for a part
        that does not fit."""
        self.parts = dict(leaves(space))
        self.images = [] if images is None else [leaf for name in images for leaf in self._below(name, "image")]
        for name in self.images:
            if not is_image(self.parts[name]):
                raise UserError(
                    f"gymnasium: the observation's {name or 'Box'!r} is {self.parts[name]}, not an image (uint8, "
                    "[H, W, 3], [3, H, W] or [H, W]); set task.options.image to another name, or to null"
                )
        if states is None:
            # the whole observation, named "", if it is one array and no image; else no state
            self.states = ["" for part in (space,) if isinstance(part, spaces.Box) and not is_image(part)]
        else:
            self.states = [leaf for name in states for leaf in self._below(name, "state")]
        for name in self.states:
            if not self.parts[name].is_np_flattenable:
                raise UserError(
                    f"gymnasium: the observation's {name!r} is a {type(self.parts[name]).__name__}, which has no fixed "
                    "number of values; name others in task.options.state"
                )

    def _below(self, name: str, option: str) -> list[str]:
        """Returns the names of the leaves that have this name or are below it. option: "image" or "state", for the
        message. Raises UserError if there are none."""
        below = [leaf for leaf in self.parts if leaf == name or leaf.startswith(f"{name}.")]
        if not below:
            raise UserError(
                f"gymnasium observation has no key {name!r}; its keys: {', '.join(self.parts) or 'none'}; correct "
                f"task.options.{option}"
            )
        return below

    @property
    def cameras(self) -> tuple[str, ...]:
        return tuple(self.images)

    def read_images(self, observation: Any) -> NDArray[np.uint8]:
        """Returns the images [n, height, width, 3] of an observation, with several cameras side by side. Raises
        UserError if their heights differ."""
        cameras = [
            as_rgb(np.asarray(part_of(observation, name)), f"the observation's {name!r}") for name in self.images
        ]
        if len({images.shape[1] for images in cameras}) > 1:
            sizes = ", ".join(
                f"{name} {list(images.shape[1:3])}" for name, images in zip(self.images, cameras, strict=True)
            )
            raise UserError(
                f"gymnasium: the images of all cameras must have one height, not {sizes}; name "
                "others in task.options.image"
            )
        return np.concatenate(cameras, 2)

    def read_state(self, observation: Any, num_envs: int) -> NDArray[np.float32]:
        """Returns the states [environment, number] of an observation, flattened and concatenated."""
        states = [_flatten(self.parts[name], part_of(observation, name), num_envs) for name in self.states]
        return np.concatenate(states, 1) if states else np.zeros((num_envs, 0), np.float32)


def _flatten(space: gymnasium.Space, values: Any, num_envs: int) -> NDArray[np.float32]:
    """Flattens values of a space, one for each environment, to [environment, number] float32."""
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        return np.asarray(values, np.float32).reshape(num_envs, -1)
    batched = gymnasium.vector.utils.batch_space(space, num_envs)
    rows: list[Any] = [spaces.flatten(space, row) for row in iterate(batched, values)]
    return np.stack(rows).astype(np.float32)


def as_rgb(images: Any, name: str) -> NDArray[np.uint8]:
    """Converts images that are gray, RGB, or have channels first to [n, height, width, 3]. name: for messages. Raises
    UserError if they are not 8-bit images."""
    images = np.asarray(images)
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise UserError(f"gymnasium: {name} gives {images.dtype} {list(images.shape)}, not images uint8 [n, H, W, 3]")
    if images.ndim == 3:
        images = images[..., None]
    if images.shape[-1] not in (1, 3) and images.shape[1] in (1, 3):
        images = images.transpose(0, 2, 3, 1)
    if images.shape[-1] == 1:
        images = images.repeat(3, -1)
    if images.shape[-1] != 3:
        raise UserError(f"gymnasium: {name} gives images {list(images.shape[1:])}; they must have three channels, RGB")
    return images


def names(value: str | Sequence[str] | None) -> list[str] | None:
    """Returns one name or several as a list."""
    return [value] if isinstance(value, str) else None if value is None else list(value)


def folded(seed: int) -> int:
    """Maps a seed to one below 2^31, since some environments accept no larger ones. Seeds below 2^30 stay as they are,
    and larger ones map to 2^30 and above, so that training and held-out seeds remain different."""
    return seed if seed < 1 << 30 else (1 << 30) + seed % (1 << 30)


def info_flags(info: Mapping[str, Any], key: str, num_envs: int) -> NDArray[np.bool_]:
    """Returns a flag of a vector environment's info, [environment] bool; False if info does not have the key."""
    return np.asarray(info.get(key, np.zeros(num_envs)), dtype=bool).reshape(num_envs)
