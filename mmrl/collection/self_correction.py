"""A source of examples of self-correction: a wrong response, a text such as "Wait", and another response, joined."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pydantic import PrivateAttr

from mmrl.collection.extra_sources import ExtraSource, pad_to_all_ranks
from mmrl.protocols.abilities import JoiningResponses
from mmrl.protocols.requirements import Needs
from mmrl.settings import option

if TYPE_CHECKING:
    from mmrl.protocols.parts import RolloutKind
    from mmrl.rollouts import Rollouts


_log = logging.getLogger(__name__)


class SelfCorrections(ExtraSource):
    """A response of a group, a string such as "Wait, I will look again.", and another response of the same group become
    one response that joins it. Only what follows the text is scored and learned from: after a wrong first try a right
    one earns what it would alone, and a second wrong one as little as that."""

    equation: ClassVar[str] = (
        "A of o1 + text + o2 in the group G with them, by the reward of o2, on the decisions of o2; o1 is wrong; o2 is "
        "right in half of them, rounded up, and another wrong one in the rest, or right in all where only one is wrong"
    )
    source: ClassVar[str] = "reconstructed from Octopus: recombined rollouts whose loss is on the second response only"
    test: ClassVar[str] = "tests/joints/test_corrections.py"

    makes: ClassVar[RolloutKind | None] = "other"
    type: str = "self_corrections"
    text: str = option("\nWait, I will look again.\n", "text between the two responses")
    count: int = option(2, "joined responses per group that has right and wrong rollouts", ge=1)
    accuracy: float = option(1.0, "smallest accuracy of a right rollout", unit="accuracy")
    _warned: bool = PrivateAttr(False)  # whether a warning was logged that all joined responses are too long

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({JoiningResponses}))

    @property
    def in_group(self) -> int:
        return self.count

    def make(self, fresh: Rollouts) -> Rollouts:
        """Returns joined responses of pairs of fresh rollouts, scored by the second response of each, with the id of
        their group. Those that are too long are left out."""
        import torch

        from mmrl.rollouts import EXTRA

        context = self._context
        pairs = self._pairs(fresh)
        if not pairs:
            return pad_to_all_ranks([], fresh, context)
        first, second = (torch.tensor(column) for column in zip(*pairs, strict=True))
        joined: Rollouts = context.policy.join_responses(fresh.select(first), fresh.select(second), self.text)
        assert fresh.prompt is not None
        joined.group, joined.prompt = fresh.group[first], fresh.prompt[first]
        joined.origin = torch.full((len(pairs),), EXTRA)
        answers = [
            replace(sample, response=fresh.samples[row].response)
            for sample, row in zip(joined.samples, second.tolist(), strict=True)
        ]
        joined.rewards = context.task.score(answers, joined.group)
        joined.accuracy = context.task.accuracy(answers)
        fits = torch.tensor([s.response_length <= s.max_response_length for s in joined.samples])
        if not fits.any() and not self._warned:
            self._warned = True
            shortest = min(sample.response_length for sample in joined.samples)
            _log.warning(
                "rollout.extras (self_corrections): none of %d joined responses (a response, the text between, and the "
                "next response) is short enough; the shortest has %d tokens, but rollout.max_response_length=%d: raise "
                "it, or shorten the text between",
                *(len(pairs), shortest, joined.samples[0].max_response_length),
            )
        return pad_to_all_ranks([joined.select(fits)], fresh, context)

    def _pairs(self, fresh: Rollouts) -> list[tuple[int, int]]:
        """Returns pairs of rows (first response, second response) of the same group. The first one is wrong; the second
        is correct in half of a group's pairs, rounded up, and wrong in the others if the group has two wrong ones."""
        assert fresh.accuracy is not None
        pairs = []
        for group in fresh.group.unique().tolist():
            rows = (fresh.group == group).nonzero().flatten()
            accuracy = fresh.accuracy[rows]
            correct, wrong = (rows[accuracy >= self.accuracy].tolist(), rows[accuracy < self.accuracy].tolist())
            if not correct or not wrong:
                continue
            rng = random.Random(f"{self._context.seed} {group}")  # independent of the rank that has the group
            # half, rounded up; all where two different wrong ones do not exist
            num_corrected = -(-self.count // 2) if len(wrong) > 1 else self.count
            pairs += [(rng.choice(wrong), rng.choice(correct)) for _ in range(num_corrected)]
            pairs += [tuple(rng.sample(wrong, 2)) for _ in range(self.count - num_corrected)]
        return pairs  # type: ignore[return-value]
