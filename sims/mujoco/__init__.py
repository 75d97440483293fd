"""Our own tabletop in MuJoCo. Importing it needs the package mujoco (the extra of the same name)."""

from mmrl.sims.mujoco.tabletop import Tabletop
from mmrl.sims.mujoco.tasks import TASKS

__all__ = ["TASKS", "Tabletop"]
