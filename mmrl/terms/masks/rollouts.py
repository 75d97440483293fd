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
    """Drops rollouts that were truncated at the maximum length, also from their group's statistics."""

    equation: ClassVar[str] = "keep where the response ended by itself"
    source: ClassVar[str] = "overlong filtering, DAPO, arXiv 2503.14476"
    of: ClassVar[Literal["rollouts", "decisions"]] = "rollouts"
    type: str = "truncated"

    def keep(self, batch: Batch) -> Tensor:
        import torch

        return ~torch.tensor([sample.truncated for sample in batch.rollouts.samples])


class OverTurn(Mask):
    """Drops conversations that reached the limit of turns or tokens, also from their group's statistics, so that the
    policy is not trained to stop early."""

    equation: ClassVar[str] = "keep where the response ended before the largest number of turns"
    source: ClassVar[str] = "over-turn masking, Mini-o3, arXiv 2509.07969"
    test: ClassVar[str] = "tests/joints/test_turn_credit.py"
    of: ClassVar[Literal["rollouts", "decisions"]] = "rollouts"
    type: str = "over_turn"

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"turns"}))

    def keep(self, batch: Batch) -> Tensor:
        """Returns which rollouts did not end at the limit of turns or tokens, [rollout] bool."""
        import torch

        conversations = [sample.conversation for sample in batch.rollouts.samples]
        return torch.tensor([c is None or c.end not in ("turns", "length") for c in conversations])


class BandMask(Mask):
    """Drops rollouts with a quantity (`fact`) outside low..high, also from their group's statistics: a guard against
    reward hacking. A rollout whose quantity is unknown is kept."""

    equation: ClassVar[str] = "low <= fact <= high"
    source: ClassVar[str] = "reward guards as a mask, mmrl's own"
    of: ClassVar[Literal["rollouts", "decisions"]] = "rollouts"
    test: ClassVar[str] = "tests/monitors/test_guards.py"
    type: str = "band"
    fact: str = option(description="quantity of a rollout, such as reward/sharpness (a reward may have weight 0)")
    low: float = option(-math.inf, "smallest value that is kept")
    high: float = option(math.inf, "largest value that is kept")

    @property
    def needs(self) -> Needs:
        return needs_column(self.fact)

    @model_validator(mode="after")
    def _check_band(self) -> BandMask:
        if self.low > self.high:
            raise ValueError(f"low={self.low:g} is above high={self.high:g}; lower low, or raise high")
        if (self.low, self.high) == (-math.inf, math.inf):
            raise ValueError("neither low nor high is set; set one or both")
        return self

    def keep(self, batch: Batch) -> Tensor:
        """Returns which rollouts have the quantity `fact` within low..high or unknown, [rollout] bool, and logs their
        share."""
        values = batch.column(self.fact)
        selected = values.isnan() | ((values >= self.low) & (values <= self.high))
        batch.report({f"band/{self.fact}": float(selected.float().mean())})
        return batch.local(selected)


class BestOfGroup(Mask):
    """Keeps the `count` best rollouts of each group by some quantity, also in the group's statistics: the shortest, or
    those with the highest reward per token, for example."""

    equation: ClassVar[str] = "keep the `count` first rollouts of the group by the quantity; of equal ones the earlier"
    source: ClassVar[str] = "GFPO, arXiv 2508.09726"
    test: ClassVar[str] = "tests/joints/test_masks.py"
    of: ClassVar[Literal["rollouts", "decisions"]] = "rollouts"
    type: str = "best_of_group"
    count: int = option(description="rollouts per group that are kept", ge=1)
    by: str = option("length", "quantity to sort by; reward_per_length: the combined reward over the length")
    highest: bool = option(False, "true: keep the highest; false: keep the lowest")

    @property
    def needs(self) -> Needs:
        return Needs() if self.by == "reward_per_length" else needs_column(self.by, varies=True)

    def keep(self, batch: Batch) -> Tensor:
        """Returns which rollouts are among the first `count` of their group by the quantity `by`, [rollout] bool;
        rollouts whose quantity is unknown come last."""
        import torch

        group = batch.column("group")
        quantity = (
            batch.combined_rewards() / batch.column("length")
            if self.by == "reward_per_length"
            else batch.column(self.by)
        )
        sort_key = quantity.double().nan_to_num(-torch.inf if self.highest else torch.inf)  # unknown ones come last
        sort_key = -sort_key if self.highest else sort_key
        selected = torch.zeros(len(group), dtype=torch.bool)
        for g in group.unique():
            rows = (group == g).nonzero().flatten()
            selected[rows[sort_key[rows].argsort(stable=True)[: self.count]]] = True
        return batch.local(selected)


class ProcessAgreement(Mask):
    """Drops rollouts whose outcome and process reward disagree, also from their group's statistics.

    These are correct rollouts with a low process reward (a right answer by wrong reasoning), and with drop=both also
    wrong ones with a high process reward. The fractions are logged, so that guards can use them; with drop=none nothing
    is dropped.
    """

    equation: ClassVar[str] = (
        "drop where accuracy >= 1/2 and process < low (both: or accuracy < 1/2 and process >= low); "
        "agreement/right_by_low_process is the share of the former in right rollouts, agreement/wrong_by_high_process "
        "that of the latter in wrong ones; what has no accuracy or no process reward stays"
    )
    source: ClassVar[str] = "reconstructed from PROF's abstract, arXiv 2509.03403: consistency of process and outcome"
    of: ClassVar[Literal["rollouts", "decisions"]] = "rollouts"
    test: ClassVar[str] = "tests/joints/test_span_credit.py"
    type: str = "process_agreement"
    reward: str = option("process", "name of the process reward, such as process with total=min")
    low: float = option(0.0, "a process reward below it is low")
    drop: Literal["right", "both", "none"] = option(
        "right",
        "rollouts that are dropped. right: correct ones with a low process reward; both: also wrong ones with a high "
        "process reward; none: no rollout, only metrics are logged",
    )

    @property
    def needs(self) -> Needs:
        return needs_column(f"reward/{self.reward}") | needs_column("accuracy")

    def keep(self, batch: Batch) -> Tensor:
        """Returns which rollouts are kept, [rollout] bool, and logs the shares of right rollouts with a low process
        reward and of wrong ones with a high one."""
        process, accuracy = batch.column(f"reward/{self.reward}"), batch.column("accuracy")
        known = ~(process.isnan() | accuracy.isnan())
        right, low_process = known & (accuracy >= 0.5), process < self.low
        wrong = known & ~right
        right_low, wrong_high = right & low_process, wrong & ~low_process
        if bool(right.any()):
            batch.report({"agreement/right_by_low_process": float(right_low.sum() / right.sum())})
        if bool(wrong.any()):
            batch.report({"agreement/wrong_by_high_process": float(wrong_high.sum() / wrong.sum())})
        dropped = {"right": right_low, "both": right_low | wrong_high, "none": known & False}[self.drop]
        return batch.local(~dropped)
