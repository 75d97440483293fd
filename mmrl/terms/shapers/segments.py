"""Credit of the segments and parts of a response."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.measurements.responses import DecisionNumbers, SegmentGains
from mmrl.protocols.requirements import Needs, Reference
from mmrl.settings import option
from mmrl.terms.term import Shaper

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class SegmentValues(Shaper):
    """The gain in expected reward of each segment of a response, from the mean rewards of responses that are resampled
    from its beginning and its end; it replaces the advantage. No critic is trained."""

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
    def gains(self) -> SegmentGains:
        return SegmentGains(self.every, self.count)

    @property
    def needs(self) -> Needs:
        return Needs(measurements=(self.gains,))

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        from mmrl.rollouts import FRESH

        origin = batch.rollouts.origin
        gains = batch.measured(self.gains).values.to(advantages)
        return gains if origin is None else gains.where((origin == FRESH)[:, None], advantages)


class PartCredit(Shaper):
    """Separate credit for the text and the image of a response: each part has a weight, and may be compared within its
    group by separate rewards."""

    equation: ClassVar[str] = (
        "A_part = weight x A, or weight x (r - mean) / scale by group, r the weighted sum of the part's own rewards"
    )
    source: ClassVar[str] = "reconstructed from T2I-R1, arXiv 2505.00703: credit of the two levels of its reasoning"
    test: ClassVar[str] = "tests/joints/test_parts.py"
    type: str = "part_credit"
    text: float = option(1.0, "weight of the text's advantages", ge=0)
    image: float = option(1.0, "weight of the image's advantages", ge=0)
    text_rewards: list[str] = option([], "rewards that text is compared by; none: the advantage that there is")
    image_rewards: list[str] = option([], "rewards that the image is compared by; none: the advantage that there is")
    scale: Literal["group_std", "none"] = option("group_std", "what differences of its own rewards are divided by")

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"parts"}))

    def check_rewards(self, names: list[str]) -> None:
        for key in ("text_rewards", "image_rewards"):
            for name in vars(self)[key]:
                if name not in names:
                    raise ValueError(f"algorithm.shaping: {key}: {name} is not one of the rewards, {', '.join(names)}")

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        from mmrl.rollouts import IMAGE, TEXT, part_mask

        text = self.text * self._part_advantages(self.text_rewards, advantages, batch)
        image = self.image * self._part_advantages(self.image_rewards, advantages, batch)
        shaped = text.where(part_mask(batch.rollouts, TEXT), advantages)
        return image.where(part_mask(batch.rollouts, IMAGE), shaped)

    def _part_advantages(self, names: list[str], advantages: Tensor, batch: Batch) -> Tensor:
        """Computes advantages from these rewards alone, [rollout, decision]."""
        from mmrl.core.advantages import group_advantages

        if not names:
            return advantages
        columns = [batch.reward_names.index(name) for name in names]
        part, _ = group_advantages(
            batch.column("rewards")[:, columns],
            batch.column("group"),
            weights=batch.reward_weights[columns],
            scale=self.scale,
        )
        return batch.local(part)[:, None].expand(advantages.shape).to(advantages)


class SharedPrefix(Shaper):
    """The advantage of a decision is divided by the rollouts of its group that begin with the same decisions up to and
    with it, for a step that many rollouts share would otherwise count as often."""

    equation: ClassVar[str] = "A_t <- A_t / #{j in the group: the first t decisions of j are those of i}"
    source: ClassVar[str] = "lambda-GRPO, arXiv 2509.21154"
    test: ClassVar[str] = "tests/joints/test_shapers.py"
    type: str = "shared_prefix"

    @property
    def needs(self) -> Needs:
        return Needs(measurements=(DecisionNumbers(),))

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        rollouts, shaped = batch.rollouts, advantages.clone()
        numbers, mask = batch.measured(DecisionNumbers()).values, rollouts.mask
        for group in rollouts.group.unique():  # a group lies on one rank
            rows = rollouts.group == group
            members, counted = numbers[rows], mask[rows]
            same = (members[:, None] == members[None]) & counted[:, None] & counted[None]  # [rollout, other, decision]
            sharing = same.long().cumprod(2).sum(1)
            shaped[rows] = advantages[rows] / sharing.clamp(min=1)
        return shaped


class SelfProcess(Shaper):
    """Adds to the advantage of each decision the rollout's cumulative log-ratio to the reference, less its mean over
    the group's rollouts that reach that position."""

    equation: ClassVar[str] = (
        "A_t <- A + R_t - mean of R_t over the group's rollouts that reach t, "
        "R_t = beta sum_{s <= t} (logp - ref_logp)_s"
    )
    source: ClassVar[str] = "SPRO's masked step advantage, arXiv 2507.01551"
    test: ClassVar[str] = "tests/joints/test_shapers.py"
    type: str = "self_process"
    beta: float = option(0.05, "weight of the log-ratio to the reference", gt=0)

    @property
    def needs(self) -> Needs:
        offers = frozenset({"single_sample_kl"})
        return Needs(offers=offers, reference=Reference(), statistics=frozenset({"logp"}))

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        rollouts, shaped = batch.rollouts, advantages.clone()
        assert rollouts.old_logp is not None and rollouts.ref_logp is not None
        gained = self.beta * (rollouts.old_logp - rollouts.ref_logp).where(rollouts.mask, 0).cumsum(1)
        for group in rollouts.group.unique():  # a group lies on one rank
            rows = rollouts.group == group
            alive = rollouts.mask[rows]
            mean = gained[rows].where(alive, 0).sum(0) / alive.sum(0).clamp(min=1)
            shaped[rows] = advantages[rows] + (gained[rows] - mean).where(alive, 0)
        return shaped
