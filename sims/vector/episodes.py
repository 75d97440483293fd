"""Full episodes of a policy in a simulator, whose rows step all together or in shares."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mmrl.sims.vector.simulator import Observation, Step, VectorSim

Start = tuple[int, str]  # seed and task of an episode


def play(
    sim: VectorSim,
    act: Callable[[Observation, NDArray[np.int64]], tuple[Sequence[ArrayLike], Any]],
    tell: Callable[[NDArray[np.int64], list[Step], Any], None],
    *,
    max_chunks: int | None = None,
    following: Callable[[int], Start | None] = lambda row: None,
) -> None:
    """Plays the episodes that `sim.reset` has started to their ends.

    act(observation, rows): returns a list of chunks of actions [B, C, A], which are executed one after another in
        `rows` (indices of the running rows of a share), and a context of any type.
    tell(rows, steps, context): gets the results of the chunks and that context.
    max_chunks: an episode that has not ended after so many chunks is dropped.
    following(row): returns the next start (seed and task) of a row whose episode has ended, or None.

    With several shares (`mmrl.sims.build(turns=...)`) a share steps in another thread while `act` is called for the
    next one. `act` and `tell` are always called in the thread that calls `play`.
    """
    chunk_counts = np.zeros(len(sim), np.int64)
    in_flight: deque[tuple[NDArray[np.int64], NDArray[np.int64], Any, Callable[[], list[Step]]]] = deque()
    with ThreadPoolExecutor(len(sim.shares), thread_name_prefix="turns") as pool:

        def begin(share: NDArray[np.int64], observation: Observation) -> None:
            """Gets actions for the running rows of a share, and starts to execute them."""
            rows = share[sim.running[share]]
            if not len(rows):
                return
            chunks, context = act(observation, rows)
            chunk_counts[rows] += 1
            active = np.zeros(len(sim), bool)
            active[rows] = True

            def move() -> list[Step]:
                """Executes the chunks one after another. Returns the result of each."""
                return [sim.step(chunk, active) for chunk in chunks]

            # A single share steps in this thread, to which a simulator's graphics context may belong.
            result = pool.submit(move).result if len(sim.shares) > 1 else move
            in_flight.append((share, rows, context, result))

        def refilled(rows: NDArray[np.int64], observation: Observation) -> Observation:
            """Starts the next episode in rows without one. Returns the observation afterwards."""
            while starts := {row: start for row in ended(sim, rows) if (start := following(row)) is not None}:
                seeds, tasks = zip(*starts.values(), strict=True)
                observation = sim.restart(list(starts), seeds, tasks)
                chunk_counts[list(starts)] = 0
            return observation

        for share in sim.shares:
            begin(share, refilled(share[share < len(sim.seeds)], sim.observation()))  # later rows had no start
        while in_flight:
            share, rows, context, result = in_flight.popleft()
            steps = result()
            endless = rows[sim.running[rows] & (chunk_counts[rows] >= (max_chunks or np.inf))]
            if len(endless):
                sim.drop(
                    endless,
                    f"its episode has not ended after {max_chunks} chunks of actions; raise action.horizon, or lower "
                    "the simulator's max_steps",
                )
                steps[-1].dropped[endless] = True
            tell(rows, steps, context)
            begin(share, refilled(rows, steps[-1].observation))


def ended(sim: VectorSim, rows: NDArray[np.int64]) -> list[int]:
    """Returns those of `rows` that have no running episode."""
    return [int(row) for row in rows if not sim.running[row]]


def run_episodes(
    sim: VectorSim,
    seeds: Sequence[int],
    tasks: Sequence[str],
    act: Callable[[Observation, NDArray[np.bool_]], ArrayLike],
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Plays one episode in each row. act(observation, active rows [B] bool) returns actions [B, C, A]. Returns whether
    each row succeeded at any time [B], and the number of executed actions [B]."""
    success, length = np.zeros(len(sim), bool), np.zeros(len(sim), np.int64)

    def choose(observation: Observation, rows: NDArray[np.int64]) -> tuple[list[ArrayLike], None]:
        """Returns one chunk of actions, without a context."""
        return [act(observation, np.isin(np.arange(len(sim)), rows))], None

    def tell(rows: NDArray[np.int64], steps: list[Step], _: None) -> None:
        """Records success and the number of executed actions of the chunk."""
        success[rows] |= steps[0].success[rows].any(1)
        length[rows] += steps[0].valid[rows].sum(1)

    sim.reset(seeds, tasks)
    play(sim, choose, tell)
    return success, length
