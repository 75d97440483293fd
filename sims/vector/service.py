"""The service in a simulator worker's process: it makes the simulator for its rows, and answers requests."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmrl.children.main import Service
from mmrl.errors import UserError, describe_error
from mmrl.sims.registry import make
from mmrl.sims.vector.checks import SimulatorFault, checked_actions, misfit
from mmrl.sims.vector.transitions import ARRAYS, action_bounds_of, cameras_of


class SimulatorService(Service):
    """A simulator as a service. recipe: its name, count and options. Answers are mappings of plain values and of the
    arrays of a `Transition`."""

    def __init__(self, recipe: dict[str, Any]) -> None:
        self.name = recipe["name"]
        self.simulator = simulator = make(self.name, recipe["count"], recipe["options"])
        self._validated: set[str] = set()  # calls (reset, step) that have given a valid transition, as in `VectorSim`
        bounds = action_bounds_of(simulator)
        self.facts = {
            "action_dim": simulator.action_dim,
            "state_dim": simulator.state_dim,
            "image_shape": simulator.image_shape,
            "tasks": simulator.tasks,
            "cameras": cameras_of(simulator),
            "action_bounds": None if bounds is None else [edge.tolist() for edge in bounds],
        }

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Executes a request (reset, step or expert). Returns the transition's arrays, errors and instructions, or the
        expert's actions. Raises UserError or SimulatorFault if these are invalid."""
        kind, rows, simulator = request["kind"], request["rows"], self.simulator
        if kind == "expert":
            shape = (len(rows), request["length"], simulator.action_dim)
            return {"actions": checked_actions(self.name, simulator.expert(rows, request["length"]), shape)}
        if kind == "reset":
            transition, length = simulator.reset(rows, request["seeds"], request["tasks"]), None
        else:
            transition, length = simulator.step(rows, request["actions"]), request["actions"].shape[1]
        if problem := misfit(transition, len(rows), length, simulator):
            error_type = SimulatorFault if kind in self._validated else UserError
            raise error_type(f"simulator {self.name!r}: {kind} {problem}")
        self._validated.add(kind)
        reply: dict[str, Any] = {name: _plain(vars(transition)[name]) for name in ARRAYS}
        reply["errors"] = [None if error is None else describe_error(error) for error in transition.errors]
        if kind == "reset":
            started = zip(rows, transition.errors, strict=True)
            reply["instructions"] = [simulator.instruction(row) if error is None else "" for row, error in started]
        return reply

    def close(self) -> None:
        self.simulator.close()


def _plain(array: NDArray) -> NDArray:
    """Converts an array to float32, unless it is bool or uint8: the types of a `Transition`."""
    return array if array.dtype.kind in "b" or array.dtype == np.uint8 else array.astype(np.float32)
