"""Attacks by simulators that return wrong shapes or numbers, raise, hang, die, or never end an episode.

    python scripts/attack/simulators.py [--part]

It takes three minutes on two cores, with --part one. It needs no network.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings

import numpy as np
from hostile_simulator import DEATHS, KINDS, NUMBERS, OBSERVATIONS, RAISES, SHAPES, STEPS
from table import Table

import mmrl.sims.vector.workers
from mmrl.errors import UserError
from mmrl.sims import build, play

ROWS, LOOKS, ROUNDS = 4, 10, 4
DEADLINE_S, SILENT_S = 2.0, 3.0
SECONDS = 60.0
HOSTILE = "hostile_simulator:Hostile"
LOST = ("all episodes dropped from then on", "some episodes dropped")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", action="store_true", help="try fewer cases of each kind")
    part = parser.parse_args().part
    warnings.simplefilter("ignore")  # a line for each lost episode
    logging.getLogger("mmrl").addHandler(logging.NullHandler())
    logging.getLogger("mmrl").propagate = False
    mmrl.sims.vector.workers.SILENT_S = SILENT_S
    table = Table("simulators")
    for workers in (0, 2):
        shapes(table, workers, 4 if part and workers else 1)
        numbers_and_ends(table, workers, 4 if part and workers else 1)
    for kind in list(DEATHS)[:: 4 if part else 1]:
        table.case("hangs or dies, in 2 workers", kind, lambda k=kind: tried(k, "step", 2, 2), *LOST, "nothing lost")
    return table.finish()


def shapes(table: Table, workers: int, each: int) -> None:
    """each: every so many-th kind is tried."""
    where = f"in {workers} workers" if workers else "in this process"
    kinds = [(kind, "step") for kind in (*SHAPES, *OBSERVATIONS)] + [(kind, "reset") for kind in OBSERVATIONS]
    for kind, at in kinds[::each]:
        row = f"wrong shapes from the first {at} on, {where}"
        table.case(row, kind, lambda k=kind, a=at: tried(k, a, 0, workers), "named")
    for kind, at in () if workers else kinds:
        row = f"wrong shapes later, {where}"
        table.case(row, f"{kind} {at}", lambda k=kind, a=at: tried(k, a, 2, workers), LOST[0])


def numbers_and_ends(table: Table, workers: int, each: int) -> None:
    """A worker that was replaced counts its calls anew, so that some episodes go well."""
    where, wanted = (f"in {workers} workers", LOST) if workers else ("in this process", LOST[:1])
    kinds = [(kind, at) for kind in (*NUMBERS, *RAISES) for at in ("reset", "step")] + [
        (kind, "step") for kind in STEPS
    ]
    for kind, at in kinds[::each]:
        row = f"raises, NaN, never moves or ends, {where}"
        table.case(row, f"{kind} {at}", lambda k=kind, a=at: tried(k, a, 2, workers), *wanted)


def tried(kind: str, at: str, after: int, workers: int) -> str:
    """What becomes of ROUNDS times ROWS episodes."""
    assert kind in KINDS
    start, kept = time.monotonic(), []
    try:
        with build(
            HOSTILE, ROWS, {"kind": kind, "at": at, "after": after}, workers=workers, deadline_s=DEADLINE_S
        ) as sim:
            for number in range(ROUNDS):
                sim.reset(range(ROWS * number, ROWS * (number + 1)), ["go"] * ROWS)
                lost = ~sim.running

                def tell(rows: np.ndarray, steps: list, _: object, lost: np.ndarray = lost) -> None:
                    for step in steps:
                        lost |= step.dropped

                play(sim, lambda seen, rows: ([np.zeros((ROWS, 2, 1))], None), tell, max_chunks=LOOKS)
                kept.append(int((~lost).sum()))
            counted = sim.counters["dropped_episodes"] == ROWS * ROUNDS - sum(kept)
    except UserError as error:
        return "named" if HOSTILE in str(error) and "must give" in str(error) else str(error)
    if time.monotonic() - start > SECONDS:
        return f"{time.monotonic() - start:.0f} s"
    if not counted:
        return "lost and not counted"
    if kept == [ROWS] * ROUNDS:
        return "nothing lost"
    return LOST[0] if kept[-1] == 0 else LOST[1]


if __name__ == "__main__":
    sys.exit(main())
