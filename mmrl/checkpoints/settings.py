"""Settings of checkpoints."""

from __future__ import annotations

from typing import Literal

from mmrl.settings import Section, option


class Checkpoint(Section):
    """Saving and resuming."""

    every: int = option(
        50,
        "steps between two checkpoints; 0: none but on a signal. 50 keeps small what a kill costs, and the time for "
        "writing",
        unit="steps",
        ge=0,
    )
    keep: int = option(2, "number of checkpoints to keep; the best weights are kept besides", ge=1)
    background: Literal["auto", True, False] = option(
        "auto",
        "write a checkpoint while training continues, from a copy in the host's memory; auto: if twice the copy fits "
        "into free memory. A kill meanwhile costs the steps since the previous checkpoint",
    )
    best: bool = option(True, "write the weights of the best evaluation as RUN/best")
    best_by: str = option("evaluation/accuracy", "metric of the evaluations that selects the best weights")
    best_is: Literal["highest", "lowest"] = option(
        "highest", "whether the highest or the lowest value of it is the best"
    )
    resume: Literal["auto", True, False] = option(
        "auto",
        "auto: resume from the newest intact checkpoint of run_dir, start where there is none, and do nothing where "
        "the run is complete, so that one command line serves a requeue; true: a checkpoint is required; false: "
        "run_dir has to be new",
    )
    may_change: list[str] = option(
        [],
        "keys of numbers that may differ from those of the checkpoint when a run resumes, such as "
        "algorithm.surrogate.high or algorithm.terms; what stands in a list is named by the list. The run uses "
        "the new ones and says so",
    )
    changed_data: Literal["refuse", "accept"] = option(
        "refuse",
        "what becomes of a run that resumes where a file of task.data or task.demonstrations is not what it was when "
        "the run began; accept: it continues, and its rows are those of the current file",
    )
