"""Simulators behind one vector interface; none is imported before it is built."""

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
