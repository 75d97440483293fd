"""A cache of conditions, the embeddings of prompts."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence

from mmrl.policies.diffusion.family import Condition, ConditionInputs, Family, Shape

log = logging.getLogger(__name__)


class PromptConditions:
    """Encodes prompts, and caches the conditions of the most recently used ones."""

    def __init__(self, family: Family, capacity: int) -> None:
        """capacity: the maximum number of cached conditions."""
        self.family, self.capacity = family, capacity
        self._cache: OrderedDict[tuple[ConditionInputs, Shape], Condition] = OrderedDict()
        self._truncated = 0  # prompts that were longer than the encoders' token limit

    def encode(self, inputs: Sequence[ConditionInputs], shape: Shape) -> list[Condition]:
        """Returns one condition per input, for latents of `shape`. Cached conditions are not computed again. Equal
        inputs share one object."""
        objects = {id(item): item for item in inputs}  # rows of a group share one object; comparing contents is slow
        distinct = list(dict.fromkeys(objects.values()))
        # the condition of a text alone does not depend on the shape of latents
        keys = {item: (item, shape if item.images else ()) for item in distinct}
        missing = [item for item in distinct if keys[item] not in self._cache]
        conditions = dict(zip(missing, self.family.encode(missing, shape), strict=True)) if missing else {}
        for item in missing:
            self._report_truncation(item.text)
        conditions |= {item: self._cache[keys[item]] for item in distinct if keys[item] in self._cache}
        for item, condition in conditions.items():
            self._cache[keys[item]] = condition
            self._cache.move_to_end(keys[item])
        while len(self._cache) > self.capacity:
            self._cache.popitem(last=False)
        by_object = {key: conditions[item] for key, item in objects.items()}
        return [by_object[id(item)] for item in inputs]

    def _report_truncation(self, text: str) -> None:
        """Counts a prompt that is too long for the encoders, and logs a warning for the first one."""
        num_cut = self.family.truncated_tokens(text)
        if num_cut and not self._truncated:
            log.warning(
                "prompt %r is %d tokens longer than model.text_tokens allows, so its end is cut off (this is logged "
                "once); shorten such prompts, or raise that key",
                text,
                num_cut,
            )
        self._truncated += num_cut > 0

    def counts(self) -> dict[str, float]:
        """Returns the number of prompts since the last call that were longer than the encoders' token limit, if any."""
        truncated, self._truncated = self._truncated, 0
        return {"prompts_cut": float(truncated)} if truncated else {}
