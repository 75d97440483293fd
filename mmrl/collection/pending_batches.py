"""Batches that a generator makes ahead of time, while earlier ones are trained on."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from mmrl.collection.draws import PromptDraws
from mmrl.collection.rounds import Rounds, one_thread
from mmrl.protocols.parts import SyncedGenerator
from mmrl.rollouts import Rollouts
from mmrl.training.metrics import Metrics

State = tuple[dict[str, Any], dict[str, Any]]  # equal on all ranks, and this rank's own


class GeneratorWeights:
    """Which weights a generator has that is given them now and then."""

    def __init__(self, generator: SyncedGenerator | None) -> None:
        self.generator = generator
        self.version = 0  # finished steps behind them
        self.lent = False  # whether the generator may have weights that are not those of `version`

    def give(self, version: int, metrics: Metrics) -> None:
        """Gives the generator the weights of now, which are those after `version` steps. A collective."""
        if self.generator is None:
            raise ValueError("there is no generator that could have weights of its own")
        metrics.set(self.generator.synchronise())
        self.version, self.lent = version, False


@dataclass(frozen=True)
class PendingBatch:
    """Rollouts in the making, in a thread. before: where drawing was: nothing is lost if they are made again."""

    before: State
    rollouts: Future[Rollouts]


class PendingBatches:
    """What the generator makes ahead of time, the next batch first."""

    def __init__(self, rounds: Rounds, draws: PromptDraws, weights: GeneratorWeights) -> None:
        self.rounds, self.draws, self.weights = rounds, draws, weights
        self.batches: deque[PendingBatch] = deque()

    def __len__(self) -> int:
        return len(self.batches)

    def begin(self, steps: Sequence[int], version: int, metrics: Metrics) -> None:
        """Batches for these steps, one after the other, by the weights of now. Their prompts are drawn now, so that
        they do not depend on when a batch is begun; only those of a pool follow from what it has in the making then."""
        if not steps:
            return
        self.weights.give(version, metrics)
        thread = one_thread("rollouts")
        drawn = [((self.draws.state(), self.rounds.state()), self.rounds.ahead()) for _ in steps]
        self.draws.foresee(*(draw for _, draw in drawn if draw is not None))
        for step, (before, draw) in zip(steps, drawn, strict=True):
            made = thread.submit(self.rounds.make, step, version, draw)
            self.batches.append(PendingBatch(before, made))
        thread.shutdown(wait=False)

    def take(self) -> Rollouts:
        """The next batch, as soon as it is made."""
        return self.batches.popleft().rollouts.result()

    def wait(self) -> None:
        wait([pending.rollouts for pending in self.batches])

    def state(self) -> State:
        """Where drawing was before the next batch; a round that has begun is made again."""
        return self.batches[0].before if self.batches else (self.draws.state(), self.rounds.state())

    def give_up(self) -> State | None:
        """Batches that have not begun do not begin any more; from where their prompts are drawn again, should training
        go on. A pool has one batch at most in the making, which has begun: then None."""
        if not self.batches or self.rounds.one_at_once:
            return None
        before = self.state()
        for pending in self.batches:
            pending.rollouts.cancel()
        self.batches.clear()
        return before
