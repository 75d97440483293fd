"""Episodes of a data set that are learned from: those of a split or a list, without those that cannot be read."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mmrl.errors import UserError

SPLIT = re.compile(r"(\d*):(\d*)")
TRAIN, ALL = "train", "all"
SHOWN = 5
Read = TypeVar("Read")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EpisodeSelection:
    """Options of `task.demonstrations`. episodes: how many of the first, or numbers; split: one of the data set's, or
    all of it; None: train where the data set has it and no numbers are listed."""

    episodes: int | Sequence[int] | None = None
    split: str | None = None
    max_bad_share: float = 0.0

    def of(self, name: str, numbers: Sequence[int], splits: Mapping[str, Any]) -> list[int]:
        """Returns the chosen ones of the data set's episode numbers, which ascend. Raises UserError naming numbers and
        splits that it does not have."""
        inside = self._inside(name, numbers, splits)
        if self.episodes is None or isinstance(self.episodes, int):
            return inside[: self.episodes]
        absent = [number for number in self.episodes if number not in inside]
        if absent:
            split = "" if self.split is None else f" in its split {self.split}"
            raise UserError(
                f"task.demonstrations.episodes: {name} has no episode {', '.join(map(str, absent[:SHOWN]))}{split}; it "
                f"has {len(inside)}, from {min(inside, default='none')} to {max(inside, default='none')}"
            )
        return list(self.episodes)

    def _inside(self, name: str, numbers: Sequence[int], splits: Mapping[str, Any]) -> list[int]:
        """Returns the numbers in the split."""
        listed = self.episodes is not None and not isinstance(self.episodes, int)
        split = (ALL if listed or TRAIN not in splits else TRAIN) if self.split is None else self.split
        if split == ALL and ALL not in splits:
            return list(numbers)
        if split not in splits:
            raise UserError(
                f"task.demonstrations.split={split}: {name} has the splits {', '.join(splits) or 'none'}, and all"
            )
        bounds = SPLIT.fullmatch(str(splits[split]).replace(" ", ""))
        if bounds is None:
            raise UserError(
                f"{name}/meta/info.json: the split {split} is {splits[split]!r}, not FIRST:END; set "
                "task.demonstrations.split=all or list task.demonstrations.episodes"
            )
        first, end = (None if bound == "" else int(bound) for bound in bounds.groups())
        inside = list(numbers)[first:end]  # by position, as numbers may have gaps
        if len(inside) < len(numbers):
            log.info("%s: %d of %d episodes are its split %s", name, len(inside), len(numbers), split)
        return inside

    def usable(self, name: str, episodes: Sequence[int], read: Callable[[int], Read]) -> list[Read]:
        """Reads episodes; those that raise UserError are left out and named. Raises UserError where they are more than
        the share that may be unusable, or all."""
        usable, bad = list[Read](), list[str]()
        for number in episodes:
            try:
                usable.append(read(number))
            except UserError as error:
                bad.append(str(error))
        if len(bad) > self.max_bad_share * len(episodes):
            listed = "; ".join(bad[:SHOWN]) + ("; ..." if len(bad) > SHOWN else "")
            raise UserError(
                f"{name}: {len(bad)} of {len(episodes)} episodes cannot be used, more than "
                f"task.demonstrations.max_bad_share={self.max_bad_share:g} allows; mend them, leave them out with "
                f"task.demonstrations.episodes, or raise max_bad_share: {listed}"
            )
        for reason in bad:
            log.warning("left out: %s", reason)
        if not usable:
            raise UserError(f"{name}: no episode to learn from is left: {'; '.join(bad[:SHOWN]) or 'none was chosen'}")
        return usable
