"""Simulators behind one vector interface; none is imported before it is built."""

from sims.registry import SIMULATORS, build, renderers
from sims.vector import Observation, Simulator, Step, Transition, VectorSim, run_episodes, run_episodes_in_turns

__all__ = [
    "SIMULATORS",
    "Observation",
    "Simulator",
    "Step",
    "Transition",
    "VectorSim",
    "build",
    "renderers",
    "run_episodes",
    "run_episodes_in_turns",
]
