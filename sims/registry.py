"""Simulators by name: the ones that come with mmrl, and the user's own as 'package.module:Class'."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from mmrl.errors import UserError
from sims.vector import EndOfEpisode, Simulator, VectorSim, nearest

SIMULATORS = {"tabletop": "sims.mujoco:Tabletop", "gymnasium": "sims.gymnasium:GymnasiumSimulator"}


def build(
    name: str,
    count: int,
    options: Mapping[str, Any] | None = None,
    *,
    end_of_episode: EndOfEpisode = "freeze",
    seed_stride: int = 1 << 20,
) -> VectorSim:
    """`count` environments of the simulator `name`, made with `options`, behind the vector interface.

    name: a key of SIMULATORS, or 'package.module:Class' for one's own; see `Simulator` for what the class must offer
    and `VectorSim` for the other arguments. Raises UserError in one line for an unknown name or option, for a package
    that is not installed, and where no picture can be rendered.
    """
    if count < 1:
        raise UserError(f"simulator {name!r}: the number of environments must be at least 1, not {count}")
    simulator = _load(name)
    options = dict(options or {})
    known = list(inspect.signature(simulator).parameters)[1:]
    for key in options:
        if key not in known:
            valid = ", ".join(known) or "none"
            raise UserError(f"simulator {name!r} has no option {key!r}{nearest(key, known)}; known: {valid}")
    return VectorSim(simulator(count, **options), end_of_episode=end_of_episode, seed_stride=seed_stride)


def _load(name: str) -> Callable[..., Simulator]:
    if ":" not in name and name not in SIMULATORS:
        known = f"{', '.join(SIMULATORS)}, or 'package.module:Class'"
        raise UserError(f"unknown simulator {name!r}{nearest(name, SIMULATORS)}; known: {known}")
    module_name, _, attribute = SIMULATORS.get(name, name).partition(":")
    try:
        members = vars(importlib.import_module(module_name))
    except ModuleNotFoundError as error:
        if name in SIMULATORS:
            raise UserError(f"simulator {name!r}: {error}; install it with: pip install 'mmrl[mujoco]'") from error
        raise UserError(f"simulator {name!r}: {error}; is its folder on PYTHONPATH?") from error
    if attribute not in members:
        raise UserError(f"simulator {name!r}: module {module_name} has no {attribute!r}{nearest(attribute, members)}")
    return members[attribute]
