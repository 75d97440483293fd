"""The segment of each decision, as the policy defines it (such as a robot's chunk of actions)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mmrl.protocols.abilities import Segmented
from mmrl.protocols.measurement import PreparedContext, PreparedMeasurement

if TYPE_CHECKING:
    from mmrl.rollouts import DecisionColumn, Rollouts


@dataclass(frozen=True)
class SegmentIds(PreparedMeasurement["DecisionColumn"]):
    """The id of the segment of its rollout that each decision belongs to, [rollout, decision] int64."""

    requires: ClassVar[type] = Segmented
    cost: ClassVar[str] = "nothing"
    name: ClassVar[str] = "segment_ids"

    def measure(self, rollouts: Rollouts, context: PreparedContext) -> DecisionColumn:
        from mmrl.rollouts import DecisionColumn

        return DecisionColumn(context.policy.segments(rollouts).cpu())
