"""A cache of the conditions that encoders compute from prompts."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence

from mmrl.policies.diffusion.family import Condition, ConditionInputs, Family, Shape

log = logging.getLogger(__name__)


class PromptConditions:
    """Encodes prompts, and caches the conditions of those that were used last."""

    def __init__(self, family: Family, capacity: int) -> None:
        """capacity: the largest number of cached conditions."""
        self.family, self.capacity = family, capacity
        self._cache: OrderedDict[tuple[ConditionInputs, Shape], Condition] = OrderedDict()
        self._truncated = 0  # prompts that were longer than the encoders' token limit

    def of(self, inputs: Sequence[ConditionInputs], shape: Shape) -> list[Condition]:
        """Returns one condition per input, for latents of `shape`, encoded or cached. Equal inputs share one object."""
        objects = {id(one): one for one in inputs}  # a group shares its inputs: comparing all by value is slow
        distinct = list(dict.fromkeys(objects.values()))
        keys = {one: (one, shape if one.images else ()) for one in distinct}
        unknown = [one for one in distinct if keys[one] not in self._cache]
        conditions = dict(zip(unknown, self.family.encode(unknown, shape), strict=True)) if unknown else {}
        for one in unknown:
            self._report_truncation(one.text)
        conditions |= {one: self._cache[keys[one]] for one in distinct if keys[one] in self._cache}
        for one, condition in conditions.items():
            self._cache[keys[one]] = condition
            self._cache.move_to_end(keys[one])
        while len(self._cache) > self.capacity:
            self._cache.popitem(last=False)
        by_object = {key: conditions[one] for key, one in objects.items()}
        return [by_object[id(one)] for one in inputs]

    def _report_truncation(self, text: str) -> None:
        count = self.family.truncated_tokens(text)
        if count and not self._truncated:
            log.warning("prompt %r is %d tokens longer than model.text_tokens allows; its end is not read", text, count)
        self._truncated += count > 0

    def counts(self) -> dict[str, float]:
        """Returns the number of prompts longer than the encoders' token limit since the last call, if there were
        any."""
        truncated, self._truncated = self._truncated, 0
        return {"prompts_cut": float(truncated)} if truncated else {}
