"""Group-relative policy optimization."""

from __future__ import annotations

from typing import ClassVar

from mmrl.algorithms.grouped import GroupedAlgorithm
from mmrl.algorithms.ratio import RatioAlgorithm


class GRPO(GroupedAlgorithm, RatioAlgorithm):
    """Group-relative policy optimization. All decisions of a rollout have the same advantage, from its group's rewards.

    With other options it is also Dr.GRPO, RLOO, OPO, DAPO, GSPO, CISPO, Flow-GRPO and others.
    """

    equation: ClassVar[str] = "A = (r - baseline) / scale; surrogate(r, A)"
    source: ClassVar[str] = "DeepSeekMath, arXiv 2402.03300"
    type: str = "grpo"
