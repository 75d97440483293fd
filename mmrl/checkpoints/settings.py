"""Settings of checkpoints."""

from __future__ import annotations

from typing import Literal

from mmrl.settings import Section, option


class Checkpoint(Section):
    """Saving and resuming."""

    every: int = option(
        50,
        "steps between two checkpoints; 0: none but on a signal. 50 balances the steps that a kill costs against "
        "the time for writing",
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
        "algorithm.surrogate.high or algorithm.terms; an item of a list is named by the list. The run continues with "
        "the new values and prints them",
    )
    changed_data: Literal["refuse", "accept"] = option(
        "refuse",
        "what to do if a run resumes and a file of task.data or task.demonstrations has changed since it began; "
        "accept: it continues, with the rows of the current file",
    )
