"""Action and observation spaces of Gymnasium, as numbers, images and states of a policy."""

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


class Moves(Protocol):
    """Converts a policy's numbers to actions of an environment and back."""

    dim: int

    def execute(self, actions: NDArray) -> NDArray:
        """Converts numbers [n, dim] to n actions of the environment."""
        ...

    def show(self, action: Any) -> NDArray[np.float32]:
        """Returns the numbers [dim] of one action of the environment."""
        ...


class Continuous:
    """Numbers of a `Box` of any shape, cut off at its bounds."""

    def __init__(self, box: spaces.Box) -> None:
        self.box, self.dim = box, int(np.prod(box.shape))

    def execute(self, actions: NDArray) -> NDArray:
        shaped = np.asarray(actions).reshape(len(actions), *self.box.shape)
        return np.clip(shaped, self.box.low, self.box.high).astype(self.box.dtype)

    def show(self, action: Any) -> NDArray[np.float32]:
        return np.asarray(action, np.float32).ravel()


class Choices:
    """The n actions of a `Discrete` space as the n equal parts of [-1, 1], in order; one number a step.

    Tokens of n + 1 bins (`action.head={type: token, bins: n + 1}`) have those parts as their intervals.
    """

    dim = 1

    def __init__(self, space: spaces.Discrete) -> None:
        self.count, self.start = int(space.n), int(space.start)

    def execute(self, actions: NDArray) -> NDArray:
        return self.start + _part(actions[:, 0], self.count)

    def show(self, action: Any) -> NDArray[np.float32]:
        return np.array([(2 * (int(action) - self.start) + 1) / self.count - 1], np.float32)


class SeveralChoices:
    """A choice for each entry of a `MultiDiscrete` or `MultiBinary` space, as `Choices` of so many parts."""

    def __init__(self, counts: NDArray[np.int64], start: NDArray[np.int64], dtype: Any) -> None:
        self.counts, self.start, self.dtype = counts, start, dtype
        self.dim = int(counts.size)

    def execute(self, actions: NDArray) -> NDArray:
        parts = _part(np.asarray(actions), self.counts.ravel())
        return (parts.reshape(len(actions), *self.counts.shape) + self.start).astype(self.dtype)

    def show(self, action: Any) -> NDArray[np.float32]:
        return ((2 * (np.asarray(action) - self.start) + 1) / self.counts - 1).ravel().astype(np.float32)


def _part(numbers: NDArray, count: Any) -> NDArray[np.int64]:
    """Returns which of `count` equal parts of [-1, 1] numbers lie in."""
    return np.clip(np.floor((numbers + 1) / 2 * count).astype(np.int64), 0, np.asarray(count) - 1)


def moves_of(env: Any, space: gymnasium.Space) -> Moves:
    """Returns the conversion for an action space. Raises UserError naming a space that there is none for."""
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
        f"{space}; wrap it in one of these (gymnasium.wrappers.TransformAction)"
    )


def bounds_of(space: gymnasium.Space) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Returns lowest and highest numbers [dim] of a `Box`, infinite ones included; None for other spaces."""
    if not isinstance(space, spaces.Box):
        return None
    return space.low.astype(np.float64).ravel(), space.high.astype(np.float64).ravel()


# --- observations ---


def leaves(space: gymnasium.Space, path: str = "") -> Iterator[tuple[str, gymnasium.Space]]:
    """Yields the parts of nested `Dict` and `Tuple` spaces by dotted names: pixels.top, or 0 in a tuple."""
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
    """Returns the part of a nested observation that a dotted name of `leaves` means; the whole for ""."""
    for name in path.split(".") if path else ():
        observation = observation[int(name)] if isinstance(observation, tuple) else observation[name]
    return observation


def is_image(space: gymnasium.Space) -> bool:
    """Tells whether a space holds images of 8 bits: grey, RGB, channels last or first."""
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) in (2, 3)


class ObservationReader:
    """Reads images and states from the observations of a vector environment.

    images: dotted names of images, or of a mapping that holds nothing else; None: there is none. states: dotted names
    of states, which stand one behind the other; None: a `Box` observation that is not an image. Raises UserError for
    names that are not there, images that are none, and states of no fixed size.
    """

    def __init__(self, space: gymnasium.Space, images: Sequence[str] | None, states: Sequence[str] | None) -> None:
        self.parts = dict(leaves(space))
        self.images = [] if images is None else [leaf for name in images for leaf in self._below(name)]
        for name in self.images:
            if not is_image(self.parts[name]):
                raise UserError(
                    f"gymnasium: the observation's {name or 'Box'!r} is {self.parts[name]}, no image: uint8, "
                    "[H, W, 3], [3, H, W] or [H, W]; name another in task.options.image, or null where there is none"
                )
        if states is None:
            self.states = ["" for part in (space,) if isinstance(part, spaces.Box) and not is_image(part)]
        else:
            self.states = [leaf for name in states for leaf in self._below(name)]
        for name in self.states:
            if not self.parts[name].is_np_flattenable:
                raise UserError(
                    f"gymnasium: the observation's {name!r} is a {type(self.parts[name]).__name__}, which has no fixed "
                    "number of values; name others in task.options.state"
                )

    def _below(self, name: str) -> list[str]:
        """Returns the leaves that a name means: itself, or all below it."""
        below = [leaf for leaf in self.parts if leaf == name or leaf.startswith(f"{name}.")]
        if not below:
            raise UserError(f"gymnasium observation has no {name!r}; it has {', '.join(self.parts) or 'no keys'}")
        return below

    @property
    def cameras(self) -> tuple[str, ...]:
        return tuple(self.images)

    def read_images(self, observation: Any) -> NDArray[np.uint8]:
        """Returns images [n, height, width, 3], those of several cameras side by side."""
        read = [as_rgb(np.asarray(part_of(observation, name)), f"the observation's {name!r}") for name in self.images]
        if len({one.shape[1] for one in read}) > 1:
            sizes = ", ".join(f"{name} {list(one.shape[1:3])}" for name, one in zip(self.images, read, strict=True))
            raise UserError(f"gymnasium: cameras of different heights cannot stand side by side: {sizes}")
        return np.concatenate(read, 2)

    def read_state(self, observation: Any, count: int) -> NDArray[np.float32]:
        """Returns states [n, number], flattened as Gymnasium does."""
        read = [_flat(self.parts[name], part_of(observation, name), count) for name in self.states]
        return np.concatenate(read, 1) if read else np.zeros((count, 0), np.float32)


def _flat(space: gymnasium.Space, values: Any, count: int) -> NDArray[np.float32]:
    """Flattens `count` values of a space to [count, number] float32."""
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        return np.asarray(values, np.float32).reshape(count, -1)
    batched = gymnasium.vector.utils.batch_space(space, count)
    rows: list[Any] = [spaces.flatten(space, row) for row in iterate(batched, values)]
    return np.stack(rows).astype(np.float32)


def as_rgb(images: Any, name: str) -> NDArray[np.uint8]:
    """Returns images [n, height, width, 3] of grey ones, of channels first, and of RGB. Raises UserError naming what is
    no image of 8 bits."""
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
        raise UserError(f"gymnasium: {name} gives images {list(images.shape[1:])}; three channels are wanted, RGB")
    return images


def names(value: str | Sequence[str] | None) -> list[str] | None:
    """Returns one name or several as a list."""
    return [value] if isinstance(value, str) else None if value is None else list(value)


def folded(seed: int) -> int:
    """Returns a seed below 2^31, which every generator takes: those below 2^30 stay, others map to the upper half, so
    that starts to train on and held-out ones stay apart."""
    return seed if seed < 1 << 30 else (1 << 30) + seed % (1 << 30)


def by_row(mapping: Mapping[str, Any], key: str, count: int) -> NDArray[np.bool_]:
    """Returns a column of a vector environment's info, False for rows that do not have it."""
    return np.asarray(mapping.get(key, np.zeros(count)), dtype=bool).reshape(count)
