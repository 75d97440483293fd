"""Masks of whole rollouts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import model_validator

from mmrl.protocols.requirements import Needs, needs_column
from mmrl.settings import option
from mmrl.terms.term import Mask

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class Truncated(Mask):
    """Rollouts that reached the longest length without an end leave the loss and their group's statistics."""

    equation: ClassVar[str] = "keep where the response ended by itself"
    source: ClassVar[str] = "overlong filtering, DAPO, arXiv 2503.14476"
    of: ClassVar[Literal["rollouts", "decisions"]] = "rollouts"
    type: str = "truncated"

    def keep(self, batch: Batch) -> Tensor:
        import torch

        return ~torch.tensor([sample.truncated for sample in batch.rollouts.samples])


class OverTurn(Mask):
    """Conversations that reached the limit of turns or of tokens leave the loss and their group's statistics, so that
    the policy is not taught to stop early and may use more turns later."""

    equation: ClassVar[str] = "keep where the response ended before the largest number of turns"
    source: ClassVar[str] = "over-turn masking, Mini-o3, arXiv 2509.07969"
    test: ClassVar[str] = "tests/joints/test_turn_credit.py"
    of: ClassVar[Literal["rollouts", "decisions"]] = "rollouts"
    type: str = "over_turn"

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"turns"}))

    def keep(self, batch: Batch) -> Tensor:
        import torch

        talks = [sample.conversation for sample in batch.rollouts.samples]
        return torch.tensor([talk is None or talk.end not in ("turns", "length") for talk in talks])


class BandMask(Mask):
    """Rollouts of which a fact is outside low..high leave the loss and their group's statistics: a guard that drops
    what hacks the reward. A fact that could not be measured keeps its rollout."""

    equation: ClassVar[str] = "low <= fact <= high"
    source: ClassVar[str] = "reward guards as a mask, mmrl's own"
    of: ClassVar[Literal["rollouts", "decisions"]] = "rollouts"
    test: ClassVar[str] = "tests/monitors/test_guards.py"
    type: str = "band"
    fact: str = option(description="such as reward/sharpness, of a reward with weight 0")
    low: float = option(-math.inf, "least value that is kept")
    high: float = option(math.inf, "largest value that is kept")

    @property
    def needs(self) -> Needs:
        return needs_column(self.fact)

    @model_validator(mode="after")
    def _rises(self) -> BandMask:
        if self.low > self.high or (self.low, self.high) == (-math.inf, math.inf):
            raise ValueError(f"low={self.low:g} and high={self.high:g} are not a band")
        return self

    def keep(self, batch: Batch) -> Tensor:
        values = batch.column(self.fact)
        inside = values.isnan() | ((values >= self.low) & (values <= self.high))
        batch.report({f"band/{self.fact}": float(inside.float().mean())})
        return batch.local(inside)


class BestOfGroup(Mask):
    """Keeps the first rollouts of every group by some measure, in the loss and in the group's statistics: the shortest
    ones, for example, or those with the highest reward a token."""

    equation: ClassVar[str] = "keep the `count` first of the group by the measure; of equal ones the earlier"
    source: ClassVar[str] = "GFPO, arXiv 2508.09726"
    test: ClassVar[str] = "tests/joints/test_masks.py"
    of: ClassVar[Literal["rollouts", "decisions"]] = "rollouts"
    type: str = "best_of_group"
    count: int = option(description="rollouts of a group that are kept", ge=1)
    by: str = option("length", "the fact that is measured; reward_per_length: the combined reward over the length")
    highest: bool = option(False, "keep the highest; false: the lowest")

    @property
    def needs(self) -> Needs:
        return Needs() if self.by == "reward_per_length" else needs_column(self.by, varies=True)

    def keep(self, batch: Batch) -> Tensor:
        import torch

        group = batch.column("group")
        if self.by == "reward_per_length":
            measure = batch.combined_rewards() / batch.column("length")
        else:
            measure = batch.column(self.by)
        order = measure.double().nan_to_num(-torch.inf if self.highest else torch.inf)
        order = -order if self.highest else order
        best = torch.zeros(len(group), dtype=torch.bool)
        for g in group.unique():
            rows = (group == g).nonzero().flatten()
            best[rows[order[rows].argsort(stable=True)[: self.count]]] = True
        return batch.local(best)


class ProcessAgreement(Mask):
    """Rollouts whose outcome and process disagree leave the loss and their group's statistics: right ones whose process
    reward is low, a right answer by a wrong way, and with `both` also wrong ones whose process reward is not. The
    shares are reported, for guards; with drop=none nothing else is done."""

    equation: ClassVar[str] = (
        "drop where accuracy >= 1/2 and process < low (both: or accuracy < 1/2 and process >= low); "
        "agreement/right_by_low_process is the share of the former in right rollouts, agreement/wrong_by_high_process "
        "that of the latter in wrong ones; what has no accuracy or no process reward stays"
    )
    source: ClassVar[str] = "reconstructed from PROF's abstract, arXiv 2509.03403: consistency of process and outcome"
    of: ClassVar[Literal["rollouts", "decisions"]] = "rollouts"
    test: ClassVar[str] = "tests/joints/test_span_credit.py"
    type: str = "process_agreement"
    reward: str = option("process", "column of the process reward, such as process with total=min")
    low: float = option(0.0, "process rewards below it are low")
    drop: Literal["right", "both", "none"] = option("right", "which of the rollouts that disagree leave")

    @property
    def needs(self) -> Needs:
        return needs_column(f"reward/{self.reward}") | needs_column("accuracy")

    def keep(self, batch: Batch) -> Tensor:
        process, accuracy = batch.column(f"reward/{self.reward}"), batch.column("accuracy")
        known = ~(process.isnan() | accuracy.isnan())
        right, low = known & (accuracy >= 0.5), process < self.low
        wrong = known & ~right
        counts = {"right_by_low_process": (right & low, right), "wrong_by_high_process": (wrong & ~low, wrong)}
        batch.report(
            {f"agreement/{name}": float(a.sum() / b.sum()) for name, (a, b) in counts.items() if bool(b.any())}
        )
        dropped = {"right": right & low, "both": (right & low) | (wrong & ~low), "none": known & False}[self.drop]
        return batch.local(~dropped)
