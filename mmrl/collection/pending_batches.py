"""Batches that are sampled ahead, in a thread, while earlier ones are trained on (asynchronous RL)."""

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

State = tuple[dict[str, Any], dict[str, Any]]  # a part that is equal on all ranks, and a part of this rank


class GeneratorWeights:
    """Keeps track of which weights the generator has."""

    def __init__(self, generator: SyncedGenerator | None) -> None:
        self.generator = generator
        self.version = 0  # the training step of the weights that the generator has
        self.stale = False  # whether the generator may have other weights than those of `version`

    def send(self, version: int, metrics: Metrics) -> None:
        """Sends the current weights, those after `version` training steps, to the generator. A collective."""
        if self.generator is None:
            raise ValueError("this policy has no generator (rollout.generator), to which weights could be sent")
        metrics.set(self.generator.sync_weights())
        self.version, self.stale = version, False


@dataclass(frozen=True)
class PendingBatch:
    """A batch that is being sampled in a thread. state_before: the state of the collection before it, from which it can
    be sampled again."""

    state_before: State
    rollouts: Future[Rollouts]


class PendingBatches:
    """The queue of batches that are sampled ahead; the next one is first."""

    def __init__(self, rounds: Rounds, draws: PromptDraws, weights: GeneratorWeights) -> None:
        self.rounds, self.draws, self.weights = rounds, draws, weights
        self.batches: deque[PendingBatch] = deque()
        self.observed: list[Outcome] = []  # rewards of groups since the prompts of these batches were drawn

    def __len__(self) -> int:
        return len(self.batches)

    def begin(self, steps: Sequence[int], version: int, metrics: Metrics) -> None:
        """Starts sampling the batches of these steps in a thread, one after another, with the current weights.

        Their prompts are drawn now, so that they do not depend on timing. (A pool of partial rollouts instead draws
        when its batch begins, as many prompts as it has room for.) version: number of finished steps."""
        if not steps:
            return
        self.weights.send(version, metrics)
        thread = one_thread("rollouts")
        self.observed = []
        drawn = [((self.draws.state(), self.rounds.state()), self.rounds.draw_ahead()) for _ in steps]
        self.draws.prefetch(*(draw for _, draw in drawn if draw is not None))
        for step, (state_before, draw) in zip(steps, drawn, strict=True):
            future = thread.submit(self.rounds.make, step, version, draw)
            self.batches.append(PendingBatch(state_before, future))
        thread.shutdown(wait=False)

    def take(self) -> Rollouts:
        """Waits for the next batch and returns it."""
        return self.batches.popleft().rollouts.result()

    def observe(self, outcomes: list[Outcome]) -> None:
        """Passes the rewards of groups to the prompt sampler, and keeps them while batches are pending."""
        if self.batches:
            self.observed += outcomes
        self.draws.observe(outcomes)

    def wait(self) -> None:
        wait([pending.rollouts for pending in self.batches])

    def state(self) -> State:
        """Returns the state of the collection before the first pending batch, with the rewards that the prompt sampler
        has observed since. A resumed run samples pending batches again."""
        if not self.batches:
            return self.draws.state(), self.rounds.state()
        shared, rank_state = self.batches[0].state_before
        return shared | {"observed": [list(astuple(outcome)) for outcome in self.observed]}, rank_state

    def cancel(self) -> State | None:
        """Cancels the pending batches. Returns the state from which their prompts can be drawn again; None if
        nothing is cancelled, as with partial rollouts, whose only pending batch has already begun."""
        if not self.batches or self.rounds.single_pending:
            return None
        state = self.state()
        for pending in self.batches:
            pending.rollouts.cancel()
        self.batches.clear()
        return state
