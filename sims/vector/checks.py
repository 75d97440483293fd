"""Checks of a simulator's output before it is used: an array of a wrong shape that happens to broadcast, or a NaN,
would train a policy on wrong data."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mmrl.errors import UserError
from mmrl.sims.vector.transitions import Simulator, Transition, cameras_of

FLAGS = ("terminated", "truncated", "success", "valid")


class SimulatorFault(RuntimeError):
    """Raised if a simulator breaks its interface, so that an episode is lost."""


def check_facts(name: str, simulator: Simulator) -> None:
    """Raises UserError if attributes of a simulator (count, dimensions, image shape, tasks, cameras) are missing or
    invalid. name: the simulator's name, for messages."""
    try:
        sizes = {"count": simulator.count, "action_dim": simulator.action_dim, "state_dim": simulator.state_dim}
        shape, tasks = tuple(simulator.image_shape), tuple(simulator.tasks)
    except (AttributeError, TypeError) as error:
        raise UserError(f"simulator {name!r}: {error}; see mmrl.sims.Simulator for what it must offer") from None
    for fact, size in sizes.items():
        least = 0 if fact == "state_dim" else 1
        if not isinstance(size, int | np.integer) or size < least:
            raise UserError(f"simulator {name!r}: {fact} must be an integer of at least {least}, not {size!r}")
    if len(shape) != 3 or shape[2] != 3 or not all(isinstance(side, int | np.integer) and side >= 0 for side in shape):
        expected = "(height, width, 3), where height and width are 0 if there are no images"
        raise UserError(f"simulator {name!r}: image_shape must be {expected}, not {shape}")
    cameras = cameras_of(simulator)
    if not cameras or len(set(cameras)) < len(cameras):
        raise UserError(f"simulator {name!r}: cameras must be one or more different names, not {cameras}")
    if shape[1] % len(cameras):
        raise UserError(
            f"simulator {name!r}: the images of its {len(cameras)} cameras {cameras} must be equally wide, but the "
            f"width of image_shape, {shape[1]}, is not divisible by {len(cameras)}"
        )
    if not tasks or not all(isinstance(task, str) for task in tasks):
        raise UserError(f"simulator {name!r}: tasks must be one or more names, not {tasks}")


def misfit(transition: object, rows: int, length: int | None, simulator: Simulator) -> str | None:
    """Returns what is wrong with a transition, as the end of a message, or None if it is valid. rows: its number of
    rows; length: its number of actions, None for a reset."""
    if not isinstance(transition, Transition):
        return f"must give a Transition, not {type(transition).__name__}"
    # shape, NumPy kinds of dtype ("B": exactly uint8), and the name of the type in messages
    expected_arrays: dict[str, tuple[tuple[int, ...], str, str]] = {
        "images": ((rows, *simulator.image_shape), "B", "uint8"),
        "state": ((rows, simulator.state_dim), "iuf", "numbers"),
    }
    if length is not None:
        expected_arrays["reward"] = (rows, length), "biuf", "numbers"
        expected_arrays |= {flag: ((rows, length), "b", "bool") for flag in FLAGS}
    for name, (shape, kinds, dtype) in expected_arrays.items():
        array = vars(transition)[name]
        fits = isinstance(array, np.ndarray) and array.shape == tuple(shape)
        if not fits or (array.dtype != np.uint8 if kinds == "B" else array.dtype.kind not in kinds):
            return f"must give {name} as an array of {dtype} {list(map(int, shape))}, not {_described(array)}"
    if not isinstance(transition.errors, list) or len(transition.errors) != rows:
        return f"must give errors as a list of {rows}, not {_described(transition.errors)}"
    if length is not None and (transition.valid[:, 1:] & ~transition.valid[:, :-1]).any():
        return "must give valid as a prefix of the chunk: no action is executed after one that was not"
    return None


def mark_nonfinite(transition: Transition) -> None:
    """Sets an error for rows whose state or reward is NaN or infinite, unless they have one."""
    bad_state = ~np.isfinite(transition.state).all(1)
    bad_reward = (~np.isfinite(transition.reward) & transition.valid).any(1)
    for field, bad in (("state", bad_state), ("reward", bad_reward)):
        for i in np.flatnonzero(bad):
            transition.errors[i] = transition.errors[i] or SimulatorFault(f"its {field} is not finite")


def _described(value: object) -> str:
    """Returns type and shape or length of a value, for messages."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, list | tuple) else type(value).__name__


def lost_transition(rows: int, length: int, simulator: Simulator, error: Exception) -> Transition:
    """Returns the transition of rows whose simulator failed as a whole: `error` in each row."""
    out = Transition.empty(rows, length, simulator.image_shape, simulator.state_dim)
    out.errors = [error] * rows
    return out


def checked_actions(name: str, actions: object, shape: tuple[int, int, int]) -> NDArray[np.float32]:
    """Returns an expert's actions as an array. Raises UserError for another shape than `shape`."""
    planned = np.asarray(actions)
    if planned.shape != shape or planned.dtype.kind not in "iuf":
        raise UserError(f"simulator {name!r}: expert must give numbers {list(shape)}, not {_described(planned)}")
    return planned
