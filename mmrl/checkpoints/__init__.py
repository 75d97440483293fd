"""Checkpoints: written atomically, verified before they are loaded, with the configuration they belong to."""

from typing import TYPE_CHECKING

from mmrl.runtime import lazy_attributes

if TYPE_CHECKING:
    from mmrl.checkpoints.files import list_finished
    from mmrl.checkpoints.saver import Saver
    from mmrl.checkpoints.starting import check_run_dir, check_warm_start
    from mmrl.checkpoints.store import go_back, load, make_origin, newest_intact, resume, save_weights

__all__ = [
    "Saver",
    "check_run_dir",
    "check_warm_start",
    "list_finished",
    "go_back",
    "load",
    "newest_intact",
    "make_origin",
    "resume",
    "save_weights",
]

__getattr__ = lazy_attributes.attributes(
    __name__,
    {"list_finished": "mmrl.checkpoints.files", "Saver": "mmrl.checkpoints.saver"}
    | {name: "mmrl.checkpoints.starting" for name in ("check_run_dir", "check_warm_start")}
    | {
        name: "mmrl.checkpoints.store"
        for name in ("go_back", "load", "newest_intact", "make_origin", "resume", "save_weights")
    },
)
