"""Credit of segments of a response, and of its text and image parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.measurements.responses import DecisionNumbers, SegmentGains
from mmrl.protocols.requirements import Needs, Reference
from mmrl.settings import option
from mmrl.terms.term import Shaper

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from mmrl.protocols.batch import Batch


class SegmentValues(Shaper):
    """Replaces the advantage by the gain in expected reward over the decision's segment (VinePPO).

    Expected rewards are mean rewards of responses that are resampled from the segment's beginning and end, so no critic
    is trained.
    """

    equation: ClassVar[str] = (
        "A_t = V(end of t's segment) - V(its beginning), V the mean reward of `count` continuations; V(0) the group's "
        "mean, V(end of the response) its reward"
    )
    source: ClassVar[str] = "VinePPO, arXiv 2410.01679; segments in place of steps: SPO, arXiv 2505.23564"
    test: ClassVar[str] = "tests/joints/test_segments.py"
    type: str = "segment_values"
    every: int = option(16, "decisions per segment", unit="tokens", ge=1)
    count: int = option(4, "resampled responses per boundary between segments", ge=1)

    @property
    def gains(self) -> SegmentGains:
        return SegmentGains(self.every, self.count)

    @property
    def needs(self) -> Needs:
        return Needs(measurements=(self.gains,))

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        """Returns the gain in expected reward over each decision's segment, [rollout, decision]; rollouts from other
        sources (such as demonstrations) keep their advantages."""
        from mmrl.rollouts import FRESH

        origin = batch.rollouts.origin
        gains = batch.measured(self.gains).values.to(advantages)
        return gains if origin is None else gains.where((origin == FRESH)[:, None], advantages)


class PartCredit(Shaper):
    """Gives the text and the image of a response separate weights, and optionally advantages from separate rewards."""

    equation: ClassVar[str] = (
        "A_part = weight x A, or weight x (r - mean) / scale by group, r the weighted sum of the part's own rewards"
    )
    source: ClassVar[str] = "reconstructed from T2I-R1, arXiv 2505.00703: credit of the two levels of its reasoning"
    test: ClassVar[str] = "tests/joints/test_parts.py"
    type: str = "part_credit"
    text: float = option(1.0, "weight of the text's advantages", ge=0)
    image: float = option(1.0, "weight of the image's advantages", ge=0)
    text_rewards: list[str] = option([], "names of the text's own rewards; []: the algorithm's advantage")
    image_rewards: list[str] = option([], "names of the image's own rewards; []: the algorithm's advantage")
    scale: Literal["group_std", "none"] = option("group_std", "normalization of advantages from a part's own rewards")

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"parts"}))

    def check_rewards(self, names: list[str]) -> None:
        for key in ("text_rewards", "image_rewards"):
            for name in vars(self)[key]:
                if name not in names:
                    raise ValueError(
                        f"algorithm.shaping: {key}: {name} is not a reward; choose from {', '.join(names)}"
                    )

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        """Returns the weighted advantages of text decisions and of image decisions, each from the part's own rewards if
        it has any; [rollout, decision]."""
        from mmrl.rollouts import IMAGE, TEXT, part_mask

        text = self.text * self._part_advantages(self.text_rewards, advantages, batch)
        image = self.image * self._part_advantages(self.image_rewards, advantages, batch)
        shaped = text.where(part_mask(batch.rollouts, TEXT), advantages)
        return image.where(part_mask(batch.rollouts, IMAGE), shaped)

    def _part_advantages(self, names: list[str], advantages: Tensor, batch: Batch) -> Tensor:
        """Computes advantages from only the rewards `names`, [rollout, decision]; with none, returns `advantages`."""
        if not names:
            return advantages
        weights = {name: float(batch.reward_weights[batch.reward_names.index(name)]) for name in names}
        return advantages_of_rewards(weights, batch, self.scale).expand(advantages.shape).to(advantages)


def advantages_of_rewards(weights: Mapping[str, float], batch: Batch, scale: Literal["group_std", "none"]) -> Tensor:
    """Computes group advantages from the weighted sum of some rewards only, of this rank's rollouts, [rollout, 1].
    weights: by reward name."""
    import torch

    from mmrl.core.advantages import group_advantages

    columns = [batch.reward_names.index(name) for name in weights]
    part, _ = group_advantages(
        batch.column("rewards")[:, columns],
        batch.column("group"),
        weights=torch.tensor(list(weights.values())),
        scale=scale,
    )
    return batch.local(part)[:, None]


class SharedPrefix(Shaper):
    """Divides the advantage of a decision by the number of the group's rollouts that have the same decisions up to it,
    so that a shared prefix is not counted several times."""

    equation: ClassVar[str] = "A_t <- A_t / #{j in the group: the first t decisions of j are those of i}"
    source: ClassVar[str] = "lambda-GRPO, arXiv 2509.21154"
    test: ClassVar[str] = "tests/joints/test_shapers.py"
    type: str = "shared_prefix"

    @property
    def needs(self) -> Needs:
        return Needs(measurements=(DecisionNumbers(),))

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        """Returns the advantage of each decision divided by the number of the group's rollouts that have the same
        decisions up to it, itself included; [rollout, decision]."""
        rollouts, shaped = batch.rollouts, advantages.clone()
        numbers, mask = batch.measured(DecisionNumbers()).values, rollouts.mask
        for group in rollouts.group.unique():  # a group lies on one rank
            rows = rollouts.group == group
            ids, group_mask = numbers[rows], mask[rows]
            same = (ids[:, None] == ids[None]) & group_mask[:, None] & group_mask[None]  # [rollout, other, decision]
            num_sharing = same.long().cumprod(2).sum(1)
            shaped[rows] = advantages[rows] / num_sharing.clamp(min=1)
        return shaped


class SelfProcess(Shaper):
    """Adds to each decision's advantage the cumulative log-ratio to the reference policy up to it, minus its mean over
    the group's rollouts that reach that position (SPRO)."""

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
        """Returns the advantages plus beta x the sum of log-ratios to the reference up to the decision, minus its mean
        over the group's rollouts that reach this position; [rollout, decision]."""
        rollouts, shaped = batch.rollouts, advantages.clone()
        assert rollouts.old_logp is not None and rollouts.ref_logp is not None
        cumulative = self.beta * (rollouts.old_logp - rollouts.ref_logp).where(rollouts.mask, 0).cumsum(1)
        for group in rollouts.group.unique():  # a group lies on one rank
            rows = rollouts.group == group
            mask = rollouts.mask[rows]
            mean = cumulative[rows].where(mask, 0).sum(0) / mask.sum(0).clamp(min=1)
            shaped[rows] = advantages[rows] + (cumulative[rows] - mean).where(mask, 0)
        return shaped
