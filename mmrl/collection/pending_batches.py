"""Batches that are sampled in a thread while earlier ones are trained on."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import astuple, dataclass
from typing import Any

from mmrl.collection.draws import PromptDraws
from mmrl.collection.rounds import Rounds, one_thread
from mmrl.prompts.sampler import Outcome
from mmrl.protocols.parts import SyncedGenerator
from mmrl.rollouts import Rollouts
from mmrl.training.metrics import Metrics

State = tuple[dict[str, Any], dict[str, Any]]  # equal on all ranks; of this rank alone


class GeneratorWeights:
    """The version of the weights that a generator has."""

    def __init__(self, generator: SyncedGenerator | None) -> None:
        self.generator = generator
        self.version = 0  # finished steps of these weights
        self.stale = False  # whether the generator may have other weights than those of `version`

    def give(self, version: int, metrics: Metrics) -> None:
        """Sends the generator the present weights, those after `version` steps. A collective."""
        if self.generator is None:
            raise ValueError("there is no generator that could have weights of its own")
        metrics.set(self.generator.sync_weights())
        self.version, self.stale = version, False


@dataclass(frozen=True)
class PendingBatch:
    """A batch that is sampled in a thread. before: the state of the draws before it, from which it can be sampled
    again."""

    before: State
    rollouts: Future[Rollouts]


class PendingBatches:
    """The queue of batches that are sampled ahead, the next one first."""

    def __init__(self, rounds: Rounds, draws: PromptDraws, weights: GeneratorWeights) -> None:
        self.rounds, self.draws, self.weights = rounds, draws, weights
        self.batches: deque[PendingBatch] = deque()
        self.observed: list[Outcome] = []  # since the prompts of these batches were drawn

    def __len__(self) -> int:
        return len(self.batches)

    def begin(self, steps: Sequence[int], version: int, metrics: Metrics) -> None:
        """Starts batches for these steps, one after the other, with the present weights. Their prompts are drawn now,
        so that they do not depend on when a batch begins; a pool draws when it begins, by the number of its unfinished
        groups."""
        if not steps:
            return
        self.weights.give(version, metrics)
        thread = one_thread("rollouts")
        self.observed = []
        drawn = [((self.draws.state(), self.rounds.state()), self.rounds.ahead()) for _ in steps]
        self.draws.prefetch(*(draw for _, draw in drawn if draw is not None))
        for step, (before, draw) in zip(steps, drawn, strict=True):
            future = thread.submit(self.rounds.make, step, version, draw)
            self.batches.append(PendingBatch(before, future))
        thread.shutdown(wait=False)

    def take(self) -> Rollouts:
        """Waits for the next batch and returns it."""
        return self.batches.popleft().rollouts.result()

    def observe(self, outcomes: list[Outcome]) -> None:
        """Passes outcomes to the prompt sampler."""
        if self.batches:
            self.observed += outcomes
        self.draws.observe(outcomes)

    def wait(self) -> None:
        wait([pending.rollouts for pending in self.batches])

    def state(self) -> State:
        """Returns the state of the draws before the next batch, with what was observed since; a batch that has begun is
        sampled again."""
        if not self.batches:
            return self.draws.state(), self.rounds.state()
        shared, of_rank = self.batches[0].before
        return shared | {"observed": [list(astuple(outcome)) for outcome in self.observed]}, of_rank

    def cancel(self) -> State | None:
        """Cancels the batches. Returns the state from which their prompts can be drawn again; None where nothing is
        cancelled: a pool has one batch at most, which has begun."""
        if not self.batches or self.rounds.one_at_once:
            return None
        before = self.state()
        for pending in self.batches:
            pending.rollouts.cancel()
        self.batches.clear()
        return before
