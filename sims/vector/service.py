"""The simulator of a worker: a process that makes it for its share of the rows and keeps it until nobody listens."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmrl.children.main import Service
from mmrl.errors import UserError, told
from mmrl.sims.registry import make
from mmrl.sims.vector.checks import SimulatorFault, checked_actions, misfit
from mmrl.sims.vector.transitions import ARRAYS, cameras_of


class SimulatorService(Service):
    """What it answers are mappings of plain values and the arrays of a `Transition`."""

    def __init__(self, recipe: dict[str, Any]) -> None:
        self.name = recipe["name"]
        self.simulator = simulator = make(self.name, recipe["count"], recipe["options"])
        self._fitted: set[str] = set()  # what has given what it should, as in `VectorSim`
        self.facts = {
            "action_dim": simulator.action_dim,
            "state_dim": simulator.state_dim,
            "image_shape": simulator.image_shape,
            "tasks": simulator.tasks,
            "cameras": cameras_of(simulator),
        }

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Arrays that do not fit could not be told from others on the way."""
        kind, rows, simulator = request["kind"], request["rows"], self.simulator
        if kind == "expert":
            wanted = (len(rows), request["length"], simulator.action_dim)
            return {"actions": checked_actions(self.name, simulator.expert(rows, request["length"]), wanted)}
        if kind == "reset":
            moved, length = simulator.reset(rows, request["seeds"], request["tasks"]), None
        else:
            moved, length = simulator.step(rows, request["actions"]), request["actions"].shape[1]
        if wrong := misfit(moved, len(rows), length, simulator):
            raise (SimulatorFault if kind in self._fitted else UserError)(f"simulator {self.name!r}: {kind} {wrong}")
        self._fitted.add(kind)
        found: dict[str, Any] = {name: _plain(vars(moved)[name]) for name in ARRAYS}
        found["errors"] = [None if error is None else told(error) for error in moved.errors]
        if kind == "reset":
            begun = zip(rows, moved.errors, strict=True)
            found["instructions"] = [simulator.instruction(row) if error is None else "" for row, error in begun]
        return found

    def close(self) -> None:
        self.simulator.close()


def _plain(array: NDArray) -> NDArray:
    """Other integers and floats are as good, but nobody expects them."""
    return array if array.dtype.kind in "b" or array.dtype == np.uint8 else array.astype(np.float32)
