"""Sources that replay rollouts of earlier steps: correct ones, or those with large advantages."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import PrivateAttr

from mmrl.collection.extra_sources import ExtraSource, SourceContext, failed_groups, pad_to_all_ranks
from mmrl.protocols.abilities import Storing
from mmrl.protocols.requirements import Needs
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch
    from mmrl.protocols.parts import RolloutKind
    from mmrl.rollouts import Rollouts

FIRST_GROUP = -(1 << 40)  # group ids of imitated rollouts fall from here, below those of demonstrations
FIRST_LARGE = -(1 << 44)  # likewise of rollouts with large advantages
Stored = dict[str, Any]  # what the policy needs to restore a rollout, with its rewards and log-probabilities


class ReplaySource(ExtraSource):
    """A buffer of the last correct rollouts of every prompt, equal on all ranks."""

    test: ClassVar[str] = "tests/joints/test_replays.py"
    keep: int = option(4, "rollouts per prompt that are kept; the oldest are removed first", ge=1)
    prompts: int = option(1000, "prompts whose rollouts are kept; the prompts that were most recently right stay", ge=1)
    accuracy: float = option(1.0, "smallest accuracy of a rollout that is kept", unit="accuracy")
    likelihoods: Literal["recorded", "present"] = option(
        "recorded",
        "denominator of a replayed decision's ratio. recorded: its likelihood when it was sampled; present: its "
        "likelihood under the current policy before the step, as if this policy had sampled it",
    )
    _stored: dict[int, list[Stored]] = PrivateAttr(default_factory=dict)  # by prompt, oldest first

    @property
    def needs(self) -> Needs:
        statistics = frozenset({"logp"}) if self.likelihoods == "recorded" else frozenset[str]()
        return Needs(offers=frozenset({Storing}), statistics=statistics)

    def start(self, context: SourceContext) -> None:
        self._context, self._stored = context, {}

    def observe(self, batch: Batch) -> None:
        """Stores the correct ones among the new rollouts of all ranks."""
        self.store(batch.gather_list(self._correct_rollouts(batch)))

    def store(self, rows: Iterable[tuple[int, int, Stored]]) -> None:
        """Stores rollouts, ordered by group so that the buffer does not depend on the number of ranks. rows: group id,
        prompt index and stored form of a rollout."""
        for _, prompt, stored in sorted(rows, key=itemgetter(0)):
            earlier = self._stored.pop(prompt, [])  # the prompt moves to the end: it was correct most recently
            self._stored[prompt] = [*earlier, stored][-self.keep :]
        for prompt in list(self._stored)[: -self.prompts]:
            del self._stored[prompt]

    def _correct_rollouts(self, batch: Batch) -> list[tuple[int, int, Stored]]:
        """Returns group id, prompt index and stored form of this rank's correct rollouts."""
        from mmrl.rollouts import EXTRA, FRESH

        rollouts = batch.rollouts
        assert rollouts.accuracy is not None and rollouts.origin is not None and rollouts.rewards is not None
        scored = ~rollouts.rewards.isnan().any(1)
        new = (rollouts.origin == FRESH) | (rollouts.origin == EXTRA)
        correct = (rollouts.accuracy >= self.accuracy) & new & batch.rollout_mask & scored
        return stored_rows(rollouts.select(correct), self._context.policy, logp=self.likelihoods == "recorded")

    def state(self) -> dict[str, Any]:
        return {"prompts": list(self._stored), "stored": [list(stored) for stored in self._stored.values()]}

    def load(self, state: dict[str, Any]) -> None:
        self._stored = dict(zip(state["prompts"], state["stored"], strict=True))


class SuccessReplay(ReplaySource):
    """Right rollouts of earlier steps join the group of their prompt, so that a group whose new rollouts are all
    wrong has a right one. A prompt without a stored right rollout gets nothing."""

    equation: ClassVar[str] = (
        "A_i of the group G with min(count, stored) rollouts of earlier steps, r = pi / pi_then (recorded) or pi / "
        "pi_old (present)"
    )
    source: ClassVar[str] = "RLEP, arXiv 2507.07451; only where all are wrong: ARPO, arXiv 2505.16282"

    makes: ClassVar[RolloutKind | None] = "replayed"
    type: str = "success_replay"
    count: int = option(1, "replayed rollouts that join a group", ge=1)
    groups: Literal["all", "failed"] = option("all", "failed: only groups none of whose fresh rollouts is right")

    @property
    def in_group(self) -> int:
        return self.count

    def make(self, fresh: Rollouts) -> Rollouts:
        """Returns for each selected group of `fresh` up to `count` stored rollouts of its prompt, with the group's
        id."""
        import torch

        context = self._context
        selected: list[tuple[int, int, Stored]] = []
        failed, _ = failed_groups(fresh, self.accuracy)
        assert fresh.prompt is not None
        for group, prompt in sorted(set(zip(fresh.group.tolist(), fresh.prompt.tolist(), strict=True))):
            stored = self._stored.get(prompt, [])
            if self.groups == "all" or group in failed:
                rng = random.Random(f"{context.seed} {group}")  # independent of the rank that has the group
                sampled = rng.sample(stored, min(self.count, len(stored)))
                selected += [(group, prompt, rollout) for rollout in sampled]
        if not selected:
            return pad_to_all_ranks([], fresh, context)
        groups, prompts, stored = (list(column) for column in zip(*selected, strict=True))
        return pad_to_all_ranks([restored(context, prompts, stored, torch.tensor(groups))], fresh, context)


class SelfImitation(ReplaySource):
    """Correct rollouts of earlier steps, of any prompts, for the loss term `likelihood` with of=replayed."""

    equation: ClassVar[str] = "rollouts of origin 2 (replayed), without rewards, drawn at random from all in the buffer"
    source: ClassVar[str] = "after self-imitation learning, arXiv 1806.05635, without its critic"

    makes: ClassVar[RolloutKind | None] = "replayed"
    type: str = "self_imitation"
    count: int = option(description="replayed rollouts per step, over all ranks", ge=1)
    _drawn: int = PrivateAttr(default=0)  # steps so far

    @property
    def rollouts(self) -> int:
        return self.count

    def make(self, fresh: Rollouts) -> Rollouts:
        """Returns this rank's share of `count` rollouts, drawn with replacement from all stored ones, without rewards;
        masked rollouts if none is stored."""
        import torch

        context = self._context
        candidates = [(prompt, rollout) for prompt, stored in self._stored.items() for rollout in stored]
        self._drawn += 1
        if not candidates:
            return pad_to_all_ranks([], fresh, context)
        sampled = random.Random(f"{context.seed} {self._drawn}").choices(candidates, k=self.count)
        rank, world = context.rank_and_world
        local = slice(rank * self.count // world, (rank + 1) * self.count // world)
        prompts, stored = (list(column) for column in zip(*sampled[local], strict=True))
        groups = FIRST_GROUP - torch.arange(self.count)[local]  # each is a group of its own
        imitated = restored(context, prompts, stored, groups)
        imitated.rewards = torch.full_like(imitated.rewards, torch.nan)  # type: ignore[arg-type]
        return imitated

    def state(self) -> dict[str, Any]:
        return super().state() | {"drawn": self._drawn}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self._drawn = state["drawn"]


class AdvantageReplay(ExtraSource):
    """Rollouts of earlier steps whose advantages were large, right and wrong ones, for the loss term
    `replay_policy_gradient`.

    The last `keep` of all prompts are stored, with their advantages and log-probabilities, equal on all ranks. Every
    `every` steps some of them are replayed.
    """

    equation: ClassVar[str] = (
        "rollouts of origin 2 (replayed), without rewards, drawn from the last `keep` with |mean_t A_t| >= least"
    )
    source: ClassVar[str] = (
        "EFRame, arXiv 2506.22200, and 597358816/EFRame at 173b698, which replays |A| > 1; draw=size: after PPER, "
        "arXiv 2410.12236"
    )
    test: ClassVar[str] = "tests/joints/test_large_advantages.py"

    makes: ClassVar[RolloutKind | None] = "large_advantages"
    type: str = "advantage_replay"
    count: int = option(64, "replayed rollouts, over all ranks; fewer if fewer are stored", ge=1)
    every: int = option(5, "steps from one replay to the next", unit="steps", ge=1)
    keep: int = option(512, "rollouts that are kept; the oldest are removed first", ge=1)
    least: float = option(1.0, "smallest size of the mean advantage of a rollout that is kept", gt=0)
    draw: Literal["alike", "size"] = option(
        "alike", "chances of stored rollouts. alike: equal; size: proportional to the sizes of their mean advantages"
    )
    _stored: list[tuple[int, Stored]] = PrivateAttr(default_factory=list)  # prompt and rollout, oldest first
    _steps: int = PrivateAttr(default=0)  # steps so far

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({Storing}), statistics=frozenset({"logp"}))

    def start(self, context: SourceContext) -> None:
        self._context, self._stored, self._steps = context, [], 0

    def observe(self, batch: Batch) -> None:
        """Stores the new rollouts of all ranks with a large advantage, in the order of their groups."""
        from mmrl.rollouts import EXTRA, FRESH, require

        rollouts = batch.rollouts
        origin, advantages = require(rollouts.origin, "origins"), batch.local(batch.column("advantage"))
        large = (advantages.abs() >= self.least) & ((origin == FRESH) | (origin == EXTRA))
        rows = stored_rows(rollouts.select(large), self._context.policy, logp=True)
        for (_, _, entry), advantage in zip(rows, advantages[large].tolist(), strict=True):
            entry["advantage"] = advantage
        gathered = sorted(batch.gather_list(rows), key=itemgetter(0))
        self._stored = [*self._stored, *((prompt, entry) for _, prompt, entry in gathered)][-self.keep :]

    def make(self, fresh: Rollouts) -> Rollouts:
        """Returns this rank's share of the replayed rollouts, each in a group of its own, with the column
        REPLAYED_ADVANTAGES; NaN where a rollout only makes ranks equal."""
        import torch

        from mmrl.rollouts import Column
        from mmrl.terms.losses.replay_policy_gradient import REPLAYED_ADVANTAGES

        context, parts = self._context, []
        self._steps += 1
        if self._steps % self.every == 0 and self._stored:
            rng = random.Random(f"{context.seed} {self._steps}")
            weights = [abs(entry["advantage"]) if self.draw == "size" else 1.0 for _, entry in self._stored]
            sampled = weighted_sample(weights, self.count, rng)
            rank, world = context.rank_and_world
            positions = range(rank, len(sampled), world)
            local = [self._stored[sampled[position]] for position in positions]
            if local:
                prompts, stored = (list(column) for column in zip(*local, strict=True))
                groups = FIRST_LARGE - self._steps * self.keep - torch.tensor(positions)
                parts.append(restored(context, prompts, stored, groups))
                parts[0].rewards = torch.full_like(parts[0].rewards, torch.nan)  # type: ignore[arg-type]
        replayed = pad_to_all_ranks(parts, fresh, context)
        advantages = torch.full((len(replayed),), torch.nan)
        for part in parts:
            advantages[: len(part)] = torch.tensor([entry["advantage"] for entry in stored])
        replayed.extras[REPLAYED_ADVANTAGES] = Column(advantages)
        return replayed

    def state(self) -> dict[str, Any]:
        return {"steps": self._steps, "stored": [list(pair) for pair in self._stored]}

    def load(self, state: dict[str, Any]) -> None:
        self._steps, self._stored = state["steps"], [(prompt, stored) for prompt, stored in state["stored"]]


def weighted_sample(weights: list[float], count: int, rng: random.Random) -> list[int]:
    """Samples at most `count` positions without replacement, one after the other in proportion to their weights, which
    are above 0: those with the largest log(u) / w, u uniform in 0 .. 1 (Efraimidis and Spirakis 2006)."""
    keys = [math.log(1 - rng.random()) / weight for weight in weights]
    return sorted(range(len(weights)), key=keys.__getitem__, reverse=True)[:count]


def stored_rows(rows: Rollouts, policy: Any, *, logp: bool) -> list[tuple[int, int, Stored]]:
    """Returns group id, prompt index and stored form of rollouts. logp: whether their log-probabilities are stored
    too."""
    assert rows.prompt is not None and rows.rewards is not None and rows.accuracy is not None
    stored = []
    for i, state in enumerate(policy.serialize(rows)):
        entry: Stored = {"state": state, "rewards": rows.rewards[i].tolist(), "accuracy": float(rows.accuracy[i])}
        if logp:
            assert rows.old_logp is not None
            entry["logp"] = rows.old_logp[i].tolist()
        stored.append((int(rows.group[i]), int(rows.prompt[i]), entry))
    return stored


def restored(context: SourceContext, prompts: list[int], stored: list[Stored], group: Tensor) -> Rollouts:
    """Restores stored rollouts, with rewards, accuracy and the log-probabilities that were stored. prompts: their
    indices. group: their new group ids, [rollout]."""
    import torch

    from mmrl.rollouts import REPLAYED

    questions = [context.prompts[prompt] for prompt in prompts]
    rollouts: Rollouts = context.policy.deserialize(questions, [rollout["state"] for rollout in stored])
    rollouts.group, rollouts.prompt = group, torch.tensor(prompts)
    rollouts.origin = torch.full((len(stored),), REPLAYED)
    rollouts.rewards = torch.tensor([rollout["rewards"] for rollout in stored])
    rollouts.accuracy = torch.tensor([rollout["accuracy"] for rollout in stored])
    if all("logp" in rollout for rollout in stored):
        rollouts.old_logp = torch.zeros(rollouts.mask.shape)
        for row, rollout in enumerate(stored):
            count = min(rollouts.mask.shape[1], len(rollout["logp"]))  # beyond it there is only padding
            rollouts.old_logp[row, :count] = torch.tensor(rollout["logp"][:count])
    return rollouts
