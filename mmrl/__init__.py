"""Reinforcement-learning post-training for vision-language, diffusion and vision-language-action models.

    from mmrl import Job, load, read_run

Importing the package is cheap: a name is imported when it is first used. mmrl/library.md shows all of them.
"""

from typing import TYPE_CHECKING

from mmrl.moved import tell_former_names
from mmrl.runtime.lazy_attributes import attributes
from mmrl.version import VERSION

if TYPE_CHECKING:
    from mmrl.config import Config, configure, load
    from mmrl.errors import UserError
    from mmrl.job import Job
    from mmrl.report.records import RunRecord, read_run

__version__ = VERSION

__all__ = ["Config", "Job", "RunRecord", "UserError", "configure", "load", "read_run"]

__getattr__ = attributes(
    __name__,
    {name: "mmrl.config" for name in ("Config", "configure", "load")}
    | {name: "mmrl.report.records" for name in ("RunRecord", "read_run")}
    | {"Job": "mmrl.job", "UserError": "mmrl.errors"},
)

tell_former_names()
