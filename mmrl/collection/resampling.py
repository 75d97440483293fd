"""A source of further responses to prompts whose rollouts are all wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.collection.extra_sources import ExtraSource, failed_groups, pad_to_all_ranks
from mmrl.protocols.requirements import Needs
from mmrl.settings import option

if TYPE_CHECKING:
    from mmrl.protocols.parts import RolloutKind
    from mmrl.rollouts import Rollouts


SEED_OFFSET = 1 << 31  # added to the run's seed, so that no response is sampled twice; seeds have 32 bits


class ExtraRollouts(ExtraSource):
    """Prompts whose rollouts are all wrong are sampled again, at another temperature, and the right responses join
    their group; wrong ones are dropped.

    EFRame also filters rollouts (algorithm.masks=[small_advantages]) and replays some (the source advantage_replay with
    the term replay_policy_gradient).
    """

    equation: ClassVar[str] = (
        "A_i of the group G with those of `count` responses at temperature `temperature` that are right; each replayed "
        "at its own temperature"
    )
    source: ClassVar[str] = (
        "EFRame, arXiv 2506.22200, which judges extra rollouts by their advantages, not by being right"
    )
    test: ClassVar[str] = "tests/joints/test_retries.py"

    makes: ClassVar[RolloutKind | None] = "other"
    type: str = "extra_rollouts"
    count: int = option(8, "further responses to a prompt", ge=1)
    temperature: float = option(1.2, "temperature of these responses", gt=0)
    most: int = option(2, "largest number of right responses that join a group; the first ones are taken", ge=1)
    accuracy: float = option(1.0, "smallest accuracy of a right response", unit="accuracy")

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"temperatures"}))

    @property
    def in_group(self) -> int:
        return self.most

    def make(self, fresh: Rollouts) -> Rollouts:
        """Samples `count` responses to the prompt of each group without a right rollout. Returns the first `most` right
        ones of each, scored, with the group's id."""
        import torch

        from mmrl.rollouts import EXTRA
        from mmrl.runtime.seeds import rollout_seeds

        context = self._context
        failed = list(zip(*failed_groups(fresh, self.accuracy), strict=True))
        # Under ZeRO-3 ranks generate together, so a rank without failed groups samples for any of its groups
        if context.max_over_ranks(len(failed)) == 0:
            return pad_to_all_ranks([], fresh, context)
        assert fresh.prompt is not None
        targets = failed or [(int(fresh.group[0]), int(fresh.prompt[0]))]
        seeds = rollout_seeds(context.seed + SEED_OFFSET, [group for group, _ in targets], self.count)
        prompts = [context.prompts[prompt] for _, prompt in targets]
        responses: Rollouts = context.policy.rollout(prompts, self.count, seeds, step=0, temperature=self.temperature)
        responses.group = torch.tensor([group for group, _ in targets]).repeat_interleave(self.count)
        responses.prompt = torch.tensor([prompt for _, prompt in targets]).repeat_interleave(self.count)
        responses.rewards = context.task.score(responses.samples, responses.group)
        responses.accuracy = context.task.accuracy(responses.samples)
        responses.origin = torch.full((len(responses),), EXTRA)
        correct = (responses.accuracy >= self.accuracy) & bool(failed)  # none, if this rank has no failed group
        number = correct.view(-1, self.count).cumsum(1).flatten()  # among the correct responses to a prompt, from 1
        return pad_to_all_ranks([responses.select(correct & (number <= self.most))], fresh, context)
