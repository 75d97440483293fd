"""What a simulator gives is looked at before it is used: an array of another shape that fits by chance, or a number
that is none, would train a policy on something that never happened."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmrl.errors import UserError
from mmrl.sims.vector.transitions import Simulator, Transition, cameras_of

FLAGS = ("terminated", "truncated", "success", "valid")


class SimulatorFault(RuntimeError):
    """What a simulator did that costs the episode."""


def check_facts(name: str, simulator: Simulator) -> None:
    """Raises UserError for a simulator that does not say, or wrongly says, how large what it gives is."""
    try:
        sizes = {"count": simulator.count, "action_dim": simulator.action_dim, "state_dim": simulator.state_dim}
        shape, tasks = tuple(simulator.image_shape), tuple(simulator.tasks)
    except (AttributeError, TypeError) as error:
        raise UserError(f"simulator {name!r}: {error}; see mmrl.sims.Simulator for what it must offer") from None
    for fact, size in sizes.items():
        if not isinstance(size, int | np.integer) or size < (fact != "state_dim"):
            raise UserError(f"simulator {name!r}: {fact} must be a positive integer, not {size!r}")
    if len(shape) != 3 or shape[2] != 3 or not all(isinstance(side, int | np.integer) and side >= 0 for side in shape):
        wanted = "(height, width, 3), 0 where there are no images"
        raise UserError(f"simulator {name!r}: image_shape must be {wanted}, not {shape}")
    cameras = cameras_of(simulator)
    if not cameras or len(set(cameras)) < len(cameras) or shape[1] % len(cameras):
        raise UserError(
            f"simulator {name!r}: cameras must be different names, whose images share a width of {shape[1]} pixels "
            f"equally, not {cameras}"
        )
    if not tasks or not all(isinstance(task, str) for task in tasks):
        raise UserError(f"simulator {name!r}: tasks must be some names, not {tasks}")


def misfit(moved: Any, rows: int, length: int | None, simulator: Simulator) -> str | None:
    """What is wrong with the transition of so many rows and `length` actions (None: of a reset), in words."""
    if not isinstance(moved, Transition):
        return f"must give a Transition, not {type(moved).__name__}"
    wanted: dict[str, tuple[tuple[int, ...], str, str]] = {
        "images": ((rows, *simulator.image_shape), "B", "uint8"),
        "state": ((rows, simulator.state_dim), "iuf", "numbers"),
    }
    if length is not None:
        wanted["reward"] = (rows, length), "biuf", "numbers"
        wanted |= {flag: ((rows, length), "b", "bool") for flag in FLAGS}
    for name, (shape, kinds, words) in wanted.items():
        array = vars(moved)[name]
        fits = isinstance(array, np.ndarray) and array.shape == tuple(shape)
        if not fits or (array.dtype != np.uint8 if kinds == "B" else array.dtype.kind not in kinds):
            return f"must give {name} as an array of {words} {list(map(int, shape))}, not {_described(array)}"
    if not isinstance(moved.errors, list) or len(moved.errors) != rows:
        return f"must give errors as a list of {rows}, not {_described(moved.errors)}"
    if length is not None and (moved.valid[:, 1:] & ~moved.valid[:, :-1]).any():
        return "must give valid as a prefix of the chunk: nothing is executed after an action that was not"
    return None


def mark_what_is_not_finite(moved: Transition) -> None:
    """Rows whose state or reward is NaN or infinite get an error, unless they have one."""
    bad_state = ~np.isfinite(moved.state).all(1)
    bad_reward = (~np.isfinite(moved.reward) & moved.valid).any(1)
    for what, bad in (("state", bad_state), ("reward", bad_reward)):
        for i in np.flatnonzero(bad):
            moved.errors[i] = moved.errors[i] or SimulatorFault(f"its {what} is not finite")


def _described(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, list | tuple) else type(value).__name__


def all_lost(rows: int, length: int, simulator: Simulator, error: Exception) -> Transition:
    """What became of rows whose simulator failed as a whole."""
    out = Transition.empty(rows, length, simulator.image_shape, simulator.state_dim)
    out.errors = [error] * rows
    return out


def checked_actions(name: str, actions: Any, wanted: tuple[int, int, int]) -> NDArray[np.float32]:
    """What an expert plans. Raises UserError for another shape."""
    planned = np.asarray(actions)
    if planned.shape != wanted or planned.dtype.kind not in "iuf":
        raise UserError(f"simulator {name!r}: expert must give numbers {list(wanted)}, not {_described(planned)}")
    return planned
