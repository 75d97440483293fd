"""Meta-World. Importing it needs the package metaworld (the extra of the same name, in an environment of its own)."""

from mmrl.sims.metaworld.simulator import MetaWorld
from mmrl.sims.metaworld.tasks import INSTRUCTIONS

__all__ = ["INSTRUCTIONS", "MetaWorld"]
