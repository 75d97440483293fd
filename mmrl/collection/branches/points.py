"""Points at which the responses of a group branch: uncertain tokens, ends of segments or of thoughts, answers of
tools."""

from __future__ import annotations

import math
from abc import abstractmethod
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import PrivateAttr

from mmrl.protocols.abilities import DecisionTexts
from mmrl.protocols.requirements import Needs
from mmrl.settings import Choice, option

if TYPE_CHECKING:
    import random

    from torch import Tensor

    from mmrl.rollouts import Rollouts

Point = tuple[int, int]  # (row of a rollout, number of decisions at its beginning that a branch keeps)


class BranchPoints(Choice):
    """A rule that ranks the points at which the responses of a group may branch."""

    title: ClassVar[str] = "branch points"
    kinds: ClassVar[dict[str, str]] = {
        "uncertain_tokens": "mmrl.collection.branches.points:UncertainTokens",
        "segment_ends": "mmrl.collection.branches.points:SegmentEnds",
        "text_ends": "mmrl.collection.branches.points:TextEnds",
        "tool_answers": "mmrl.collection.branches.points:ToolAnswers",
    }
    test: ClassVar[str] = "tests/joints/test_branches.py"

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"entropy"}))

    @property
    def reads_entropy(self) -> bool:
        """Returns whether `rank_points` needs entropies, which cost a forward pass over the responses."""
        return "entropy" in self.needs.offers

    def start(self, policy: Any) -> None:  # noqa: B027  (most need no policy)
        """Receives the policy, before the first step of a run."""

    @abstractmethod
    def rank_points(self, members: Rollouts, entropy: Tensor, rng: random.Random) -> list[Point]:
        """Returns the points at which the rollouts of one group may branch, in the order in which they are used.

        members: the rollouts of the group. entropy: [rollout, decision]; 0 unless `reads_entropy`. rng: a generator
        that is seeded by the run's seed and the group."""


class UncertainTokens(BranchPoints):
    """Responses branch before the decisions with the largest entropy, which are sampled again."""

    equation: ClassVar[str] = "the decisions t >= 1 of the group's responses with the largest H_t"
    source: ClassVar[str] = "branches at tokens of high entropy, as in FR3E (arXiv 2507.04632) and TreePO's heuristics"

    type: str = "uncertain_tokens"
    apart: int = option(1, "smallest distance of two branch points of a response", unit="tokens", ge=1)

    def rank_points(self, members: Rollouts, entropy: Tensor, rng: random.Random) -> list[Point]:
        """Returns the points before all decisions but the first of each rollout, in falling order of the decision's
        entropy. A point less than `apart` decisions from a former one of its rollout is left out."""
        selected: list[Point] = []
        by_rollout = masked_values(members, entropy)
        candidates = [  # sorted by -entropy, the largest entropy comes first
            (-float(h), row, t) for row, values in enumerate(by_rollout) for t, h in enumerate(values) if t > 0
        ]
        for _, row, t in sorted(candidates):
            if all(row != other or abs(t - cut) >= self.apart for other, cut in selected):
                selected.append((row, t))
        return selected


class SegmentEnds(BranchPoints):
    """Responses branch at the ends of segments of fixed length, in random order, or in falling order of the mean
    entropy of the segment that follows."""

    equation: ClassVar[str] = (
        "the first k * every decisions are kept, k >= 1; k by chance, or by the mean entropy of the next segment"
    )
    source: ClassVar[str] = "TreePO, arXiv 2508.17445: its fallback from finished paths to an end of a segment"

    type: str = "segment_ends"
    every: int = option(64, "decisions per segment", unit="tokens", ge=1)
    by: Literal["chance", "entropy"] = option(
        "chance", "order in which ends are used: random, or the most uncertain next segment first"
    )

    @property
    def needs(self) -> Needs:
        return Needs() if self.by == "chance" else super().needs

    def rank_points(self, members: Rollouts, entropy: Tensor, rng: random.Random) -> list[Point]:
        """Returns the ends of all segments but the last of each rollout, in random order, or in falling order of the
        mean entropy of the next segment."""
        by_rollout = masked_values(members, entropy)
        points = [
            (row, cut) for row, values in enumerate(by_rollout) for cut in range(self.every, len(values), self.every)
        ]
        if self.by == "chance":
            return rng.sample(points, len(points))

        def next_segment_entropy(point: Point) -> float:
            row, cut = point
            return float(by_rollout[row][cut : cut + self.every].mean())

        return sorted(points, key=next_segment_entropy, reverse=True)


class TextEnds(BranchPoints):
    """Responses branch after the first occurrence of a text, such as </think>: several answers to each thought. Set
    `width` to the number of further answers to a thought, and `count` to that times rollout.group_size."""

    equation: ClassVar[str] = "the decisions up to the first occurrence of `text` are kept; rollouts in their order"
    source: ClassVar[str] = "reconstructed from an abstract on thought-level branching: M answers to each of K thoughts"

    type: str = "text_ends"
    text: str = option("</think>", "text after which a response branches", min_length=1)
    _policy: Any = PrivateAttr(None)

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({DecisionTexts}))

    def start(self, policy: Any) -> None:
        self._policy = policy

    def rank_points(self, members: Rollouts, entropy: Tensor, rng: random.Random) -> list[Point]:
        """Returns for each rollout that has the text, and goes on after it, the point after the decision with which the
        text is complete."""
        points = []
        for row, pieces in enumerate(self._policy.decision_texts(members)):
            lengths = list(accumulate(map(len, pieces)))
            begin = "".join(pieces).find(self.text)
            if begin >= 0:
                cut = 1 + next(i for i, length in enumerate(lengths) if length >= begin + len(self.text))
                if cut < int(members.mask[row].sum()):
                    points.append((row, cut))
        return points


class ToolAnswers(BranchPoints):
    """Conversations branch after a tool's answer, with a probability that grows with the entropy of the policy's next
    turn, relative to the entropy of its first turn."""

    equation: ClassVar[str] = (
        "a turn after a tool's answer branches if U - weight (H_turn - H_0) / ln(vocabulary) <= threshold, H the mean "
        "entropy of a turn's first decisions, U uniform in 0 .. 1"
    )
    source: ClassVar[str] = (
        "ARPO, arXiv 2507.19849, as its code at e257337 decides, with entropies of whole distributions in place of "
        "those of ten tokens"
    )

    type: str = "tool_answers"
    first: int = option(20, "decisions at the beginning of a turn whose entropy counts", unit="tokens", ge=1)
    weight: float = option(0.2, "weight of the rise in entropy", ge=0)
    threshold: float = option(0.5, "threshold of a uniform random number minus the weighted rise", ge=0, le=1)
    vocabulary: int = option(151936, "entropies are divided by its logarithm", unit="tokens", ge=2)

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(offers=frozenset({"turns"}))

    def rank_points(self, members: Rollouts, entropy: Tensor, rng: random.Random) -> list[Point]:
        """Returns the beginnings of turns after a tool's answer, earlier turns first. A turn is used if a random number
        minus the weighted rise in entropy since the first turn is at most `threshold`."""
        from mmrl.rollouts import Turns

        number, points = members.extra("turns", Turns).number, []
        entropies, turns = masked_values(members, entropy), masked_values(members, number)
        for row, (values, turn) in enumerate(zip(entropies, turns, strict=True)):
            conversation = members.samples[row].conversation
            assert conversation is not None
            first_turn_entropy = values[turn == 0][: self.first].mean()
            for k in turn.unique().tolist():
                if k == 0 or conversation.turns[k - 1].tool is None:
                    continue
                rise = float(values[turn == k][: self.first].mean() - first_turn_entropy) / math.log(self.vocabulary)
                if rng.random() - self.weight * rise <= self.threshold:
                    points.append((k, row, int((turn < k).sum())))
        return [(row, cut) for _, row, cut in sorted(points)]


def masked_values(members: Rollouts, values: Tensor) -> list[Tensor]:
    """Returns, for each rollout, the values [n] of the decisions under its mask. values: [rollout, decision]."""
    return [row[mask] for row, mask in zip(values, members.mask, strict=True)]
