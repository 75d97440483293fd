"""ManiSkill 3. Importing it needs the package mani-skill (the extra maniskill)."""

import logging
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SAPIEN warns that it takes the Vulkan loader of its own wheel
    import mani_skill.envs  # noqa: F401
logging.getLogger("mani_skill").setLevel(logging.ERROR)  # it warns of how its own tasks are written

from mmrl.sims.maniskill.simulator import ManiSkill  # noqa: E402
from mmrl.sims.maniskill.tasks import INSTRUCTIONS  # noqa: E402

__all__ = ["INSTRUCTIONS", "ManiSkill"]
