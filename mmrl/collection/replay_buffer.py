"""Sources that replay correct rollouts of earlier steps."""

from __future__ import annotations

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
        rows = rollouts.select(correct)
        assert rows.prompt is not None and rows.rewards is not None and rows.accuracy is not None
        stored = []
        for i, state in enumerate(self._context.policy.serialize(rows)):
            entry: Stored = {"state": state, "rewards": rows.rewards[i].tolist(), "accuracy": float(rows.accuracy[i])}
            if self.likelihoods == "recorded":
                assert rows.old_logp is not None
                entry["logp"] = rows.old_logp[i].tolist()
            stored.append((int(rows.group[i]), int(rows.prompt[i]), entry))
        return stored

    def _restore(self, prompts: list[int], stored: list[Stored], group: Tensor) -> Rollouts:
        """Restores stored rollouts, with rewards, accuracy and log-probabilities. prompts: their indices. group: their
        new group ids, [rollout]."""
        import torch

        from mmrl.rollouts import REPLAYED

        context = self._context
        questions = [context.prompts[prompt] for prompt in prompts]
        restored: Rollouts = context.policy.deserialize(questions, [rollout["state"] for rollout in stored])
        restored.group, restored.prompt = group, torch.tensor(prompts)
        restored.origin = torch.full((len(stored),), REPLAYED)
        restored.rewards = torch.tensor([rollout["rewards"] for rollout in stored])
        restored.accuracy = torch.tensor([rollout["accuracy"] for rollout in stored])
        if self.likelihoods == "recorded":
            restored.old_logp = torch.zeros(restored.mask.shape)
            for row, rollout in enumerate(stored):
                count = min(restored.mask.shape[1], len(rollout["logp"]))  # beyond it there is only padding
                restored.old_logp[row, :count] = torch.tensor(rollout["logp"][:count])
        return restored

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
        return pad_to_all_ranks([self._restore(prompts, stored, torch.tensor(groups))], fresh, context)


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
        positions = torch.arange((self._drawn - 1) * self.count, self._drawn * self.count)[local]
        imitated = self._restore(prompts, stored, FIRST_GROUP - positions)  # each is a group of its own
        imitated.rewards = torch.full_like(imitated.rewards, torch.nan)  # type: ignore[arg-type]
        return imitated

    def state(self) -> dict[str, Any]:
        return super().state() | {"drawn": self._drawn}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self._drawn = state["drawn"]
