"""What the encoders say of prompts, kept for the next time."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence

from mmrl.policies.diffusion.family import Condition, ConditionInputs, Family, Shape

log = logging.getLogger(__name__)


class PromptConditions:
    """Conditions of prompts: each is encoded once and kept while there is room."""

    def __init__(self, family: Family, most: int) -> None:
        """most: conditions that are kept."""
        self.family, self.most = family, most
        self._kept: OrderedDict[tuple[ConditionInputs, Shape], Condition] = OrderedDict()
        self._cut = 0  # prompts of which the encoders left something out

    def of(self, said: Sequence[ConditionInputs], shape: Shape) -> list[Condition]:
        """One each, for latents of `shape`. Equal prompts get the same object."""
        objects = {id(one): one for one in said}  # rollouts of a group share theirs: comparing all by value is slow
        distinct = list(dict.fromkeys(objects.values()))
        keys = {one: (one, shape if one.images else ()) for one in distinct}
        unknown = [one for one in distinct if keys[one] not in self._kept]
        found = dict(zip(unknown, self.family.encode(unknown, shape), strict=True)) if unknown else {}
        for one in unknown:
            self._report_cut(one.text)
        found |= {one: self._kept[keys[one]] for one in distinct if keys[one] in self._kept}
        for one, condition in found.items():
            self._kept[keys[one]] = condition
            self._kept.move_to_end(keys[one])
        while len(self._kept) > self.most:
            self._kept.popitem(last=False)
        of = {key: found[one] for key, one in objects.items()}
        return [of[id(one)] for one in said]

    def _report_cut(self, text: str) -> None:
        lost = self.family.cut(text)
        if lost and not self._cut:
            log.warning("prompt %r is %d tokens longer than model.text_tokens allows; its end is not read", text, lost)
        self._cut += lost > 0

    def counts(self) -> dict[str, float]:
        """Prompts, since it was last asked, of which the encoders left something out because of their token limit."""
        found, self._cut = self._cut, 0
        return {"prompts_cut": float(found)} if found else {}
