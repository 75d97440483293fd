"""Simulators behind one vector interface; none is imported before it is built."""

from sims.episodes import play, run_episodes
from sims.registry import SIMULATORS, build, renderers
from sims.vector import Observation, Simulator, Step, Transition, VectorSim

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
