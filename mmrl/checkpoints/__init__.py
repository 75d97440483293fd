"""Checkpoints: written atomically, verified before they are loaded, with the configuration they belong to."""

from typing import TYPE_CHECKING

from mmrl.runtime import lazy_attributes

if TYPE_CHECKING:
    from mmrl.checkpoints.files import finished
    from mmrl.checkpoints.saver import Saver
    from mmrl.checkpoints.starting import check_run_dir, check_warm_start
    from mmrl.checkpoints.store import go_back, load, newest_intact, origin_of, resume, save_weights

__all__ = [
    "Saver",
    "check_run_dir",
    "check_warm_start",
    "finished",
    "go_back",
    "load",
    "newest_intact",
    "origin_of",
    "resume",
    "save_weights",
]

__getattr__ = lazy_attributes.attributes(
    __name__,
    {"finished": "mmrl.checkpoints.files", "Saver": "mmrl.checkpoints.saver"}
    | {name: "mmrl.checkpoints.starting" for name in ("check_run_dir", "check_warm_start")}
    | {
        name: "mmrl.checkpoints.store"
        for name in ("go_back", "load", "newest_intact", "origin_of", "resume", "save_weights")
    },
)
