"""Simulators behind one vector interface, and environments of turns behind another, each imported when it is built."""

from typing import TYPE_CHECKING

from mmrl.runtime import lazy_attributes

if TYPE_CHECKING:
    from mmrl.sims.registry import SIMULATORS, build, renderers
    from mmrl.sims.vector.episodes import play, run_episodes
    from mmrl.sims.vector.simulator import Observation, Simulator, Step, Transition, VectorSim

__all__ = [
    "SIMULATORS",
    "Observation",
    "Simulator",
    "Step",
    "Transition",
    "VectorSim",
    "build",
    "play",
    "renderers",
    "run_episodes",
]
WHERE = {
    "registry": ("SIMULATORS", "build", "renderers"),
    "vector.episodes": ("play", "run_episodes"),
    "vector.simulator": ("Observation", "Simulator", "Step", "Transition", "VectorSim"),
}
__getattr__ = lazy_attributes.attributes(
    __name__, {name: f"mmrl.sims.{module}" for module, names in WHERE.items() for name in names}
)
