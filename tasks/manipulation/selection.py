"""Selection of the episodes of a dataset to train on: by a split or a list, without those that cannot be read."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mmrl.errors import UserError

SPLIT = re.compile(r"(\d*):(\d*)")
TRAIN, ALL = "train", "all"
MAX_LISTED = 5  # episodes that an error lists
Episode = TypeVar("Episode")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EpisodeSelection:
    """Options of `task.demonstrations` that select episodes.

    episodes: the number of first episodes, or a list of episode numbers; None: all. split: a split of the dataset, or
    "all"; None: "train" if the dataset has it and `episodes` is not a list, else "all". max_bad_share: the share of
    episodes that may be unreadable.
    """

    episodes: int | Sequence[int] | None = None
    split: str | None = None
    max_bad_share: float = 0.0

    def select(self, name: str, numbers: Sequence[int], splits: Mapping[str, Any]) -> list[int]:
        """Returns the selected episode numbers.

        name: the dataset's name, for messages. numbers: all of its episode numbers, ascending. splits: by name,
        "FIRST:END", a range of positions in `numbers`. Raises UserError for numbers and splits that do not exist.
        """
        in_split = self._in_split(name, numbers, splits)
        if self.episodes is None or isinstance(self.episodes, int):
            return in_split[: self.episodes]  # the first ones, or all if None
        absent = [number for number in self.episodes if number not in in_split]
        if absent:
            split = "" if self.split is None else f" in its split {self.split}"
            span = f", from {min(in_split)} to {max(in_split)}" if in_split else ""
            raise UserError(
                f"task.demonstrations.episodes: {name} has no episode {', '.join(map(str, absent[:MAX_LISTED]))}"
                f"{split}; it has {len(in_split)} episodes{span}"
            )
        return list(self.episodes)

    def _in_split(self, name: str, numbers: Sequence[int], splits: Mapping[str, Any]) -> list[int]:
        """Returns the episode numbers of the split, by default TRAIN if the dataset has it and no list of
        episodes is set, else ALL. Arguments: see `select`. Raises UserError for a split that does not exist."""
        split = self.split
        if split is None:
            is_list = self.episodes is not None and not isinstance(self.episodes, int)
            split = ALL if is_list or TRAIN not in splits else TRAIN
        if split == ALL and ALL not in splits:
            return list(numbers)
        if split not in splits:
            raise UserError(
                f"task.demonstrations.split={split}: {name} has no such split, only {', '.join([*splits, ALL])}"
            )
        bounds = SPLIT.fullmatch(str(splits[split]).replace(" ", ""))
        if bounds is None:
            raise UserError(
                f"{name}/meta/info.json: the split {split} is {splits[split]!r}, not FIRST:END; set "
                "task.demonstrations.split=all, or list episode numbers in task.demonstrations.episodes"
            )
        first, end = (None if bound == "" else int(bound) for bound in bounds.groups())
        in_split = list(numbers)[first:end]  # by position, as numbers may have gaps
        if len(in_split) < len(numbers):
            log.info("%s: %d of %d episodes are in its split %s", name, len(in_split), len(numbers), split)
        return in_split

    def read_usable(self, name: str, episodes: Sequence[int], read: Callable[[int], Episode]) -> list[Episode]:
        """Reads episodes. Those for which `read` raises UserError are logged and left out.

        name: the dataset's name, for messages. episodes: the numbers of the episodes. Raises UserError if more than the
        share `max_bad_share` is left out, or all are.
        """
        usable, bad = list[Episode](), list[str]()
        for number in episodes:
            try:
                usable.append(read(number))
            except UserError as error:
                bad.append(str(error))
        if len(bad) > self.max_bad_share * len(episodes):
            listed = "; ".join(bad[:MAX_LISTED]) + ("; ..." if len(bad) > MAX_LISTED else "")
            raise UserError(
                f"{name}: {len(bad)} of {len(episodes)} episodes cannot be used, more than "
                f"task.demonstrations.max_bad_share={self.max_bad_share:g} allows; repair them, leave them out with "
                f"task.demonstrations.episodes, or raise max_bad_share: {listed}"
            )
        for reason in bad:
            log.warning("left out: %s", reason)
        if not usable:
            reasons = "; ".join(bad[:MAX_LISTED]) or "none was selected"
            raise UserError(f"{name}: no episode to train on is left: {reasons}")
        return usable
