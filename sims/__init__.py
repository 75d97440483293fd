"""Simulators behind one vector interface, and environments of turns behind another; none is imported before it is
built."""

from typing import TYPE_CHECKING

from mmrl import lazy

if TYPE_CHECKING:
    from mmrl.sims.episodes import play, run_episodes
    from mmrl.sims.registry import SIMULATORS, build, renderers
    from mmrl.sims.vector import Observation, Simulator, Step, Transition, VectorSim

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
    "episodes": ("play", "run_episodes"),
    "registry": ("SIMULATORS", "build", "renderers"),
    "vector": ("Observation", "Simulator", "Step", "Transition", "VectorSim"),
}
__getattr__ = lazy.attributes(
    __name__, {name: f"mmrl.sims.{module}" for module, names in WHERE.items() for name in names}
)
