"""Settings of checkpoints."""

from __future__ import annotations

from typing import Literal

from mmrl.settings import Section, option


class Checkpoint(Section):
    """Saving and going on."""

    every: int = option(
        50,
        "steps between two checkpoints; 0: none but on a signal. 50, as often as evaluation: what a kill costs stays "
        "small, and so does the time for writing",
        unit="steps",
        ge=0,
    )
    keep: int = option(2, "finished checkpoints that are kept; the best weights are kept besides", ge=1)
    background: Literal["auto", True, False] = option(
        "auto",
        "write a checkpoint while training goes on, from a copy in the host's memory; auto: where twice the copy fits "
        "into the memory that is free. A kill meanwhile costs the steps since the checkpoint before",
    )
    best: bool = option(True, "write the weights of the best evaluation as RUN/best")
    best_by: str = option("evaluation/accuracy", "metric of the evaluations by which weights are the best")
    best_is: Literal["highest", "lowest"] = option("highest", "which value of it is the best")
    resume: Literal["auto", True, False] = option(
        "auto",
        "auto: go on from the newest intact checkpoint of run_dir, start where there is none, and do nothing where the "
        "run has reached its end, so that one command line serves a requeue; true: there has to be one; false: run_dir "
        "has to be new",
    )
