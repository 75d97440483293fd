"""Our own tabletop in MuJoCo. Importing it needs the package mujoco (the extra of the same name)."""

from sims.mujoco.tabletop import Tabletop
from sims.mujoco.tasks import TASKS

__all__ = ["TASKS", "Tabletop"]
