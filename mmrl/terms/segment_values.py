"""Credit for segments of a response, by what comes of going on from their ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.needs import Continuations, Needs
from mmrl.settings import option
from mmrl.terms.base import Shaper

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.facts import Batch


class SegmentValues(Shaper):
    """What each segment of a response added to the reward that can be expected, by the mean of responses that go on
    anew from its beginning and its end; it takes the place of the advantage. No critic is learned."""

    equation: ClassVar[str] = (
        "A_t = V(end of t's segment) - V(its beginning), V the mean reward of `count` continuations; V(0) the group's "
        "mean, V(end of the response) its reward"
    )
    source: ClassVar[str] = "VinePPO, arXiv 2410.01679; segments in place of steps: SPO, arXiv 2505.23564"
    test: ClassVar[str] = "tests/joints/test_segments.py"
    type: str = "segment_values"
    every: int = option(16, "decisions of a segment", unit="tokens", ge=1)
    count: int = option(4, "continuations from each edge of a segment", ge=1)

    @property
    def continuations(self) -> Continuations:
        return Continuations(self.every, self.count)

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"continuations"}), continuations=(self.continuations,))

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        from mmrl.rollouts import FRESH

        origin = batch.rollouts.origin
        gains = batch.column(self.continuations.name).to(advantages)
        return gains if origin is None else gains.where((origin == FRESH)[:, None], advantages)
