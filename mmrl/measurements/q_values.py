"""Q and value functions that learn from recorded policy steps, beside the policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mmrl.protocols.abilities import StateActionEncoding
from mmrl.protocols.measurement import PreparedContext, PreparedMeasurement

if TYPE_CHECKING:
    from mmrl.rollouts import Column, Rollouts


@dataclass(frozen=True)
class QValues(PreparedMeasurement["Column"]):
    """Implicit Q-learning (IQL, arXiv 2110.06169) on the recorded policy steps among a step's rollouts: V learns the
    expectile of the target networks' least Q, the Q networks learn r + gamma^k V(s') of a chunk of k actions, and the
    targets follow. The estimates are those of V after its update, and of the targets before theirs.

    gamma: discount of an action; simulator_reward: weight of the simulator's rewards; expectile: of V; members, width:
    of the Q networks; lr: of Adam; tau: share by which targets follow; updates: of both functions a step.
    """

    gamma: float
    simulator_reward: float
    expectile: float
    members: int
    width: int
    lr: float
    tau: float
    updates: int
    requires: ClassVar[type] = StateActionEncoding
    cost: ClassVar[str] = "a forward pass of two observations a recorded step, and updates of small networks on the CPU"

    @property
    def name(self) -> str:
        return "q_values " + " ".join(f"{value:g}" for value in vars(self).values())

    def measure(self, rollouts: Rollouts, context: PreparedContext) -> Column:
        from mmrl.measurements.q_updates import QLearner

        return QLearner(self, context).estimates(rollouts)
