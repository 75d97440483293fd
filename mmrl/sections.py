"""Sections that every job has, of rooms that are too heavy to be asked for their settings."""

from __future__ import annotations

from typing import Literal

from mmrl.settings import Section, option


class Evaluation(Section):
    """Measuring on held-out prompts while training."""

    every: int = option(50, "steps between two evaluations; 0: only before and after training", unit="steps", ge=0)
    prompts: int = option(256, "the first N held-out prompts", ge=1)
    before: bool = option(True, "evaluate before training too")
    max_unscored: float = option(0.5, "share of unscored rollouts above which the run stops", ge=0, le=1)
    micro_batch: int = option(256, "prompts answered at once on a rank", ge=1)


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


class Kernels(Section):
    """Who computes the fused operators (mmrl.kernels). The choices agree to rounding."""

    backend: Literal["auto", "cuda", "cpu", "torch"] = option(
        "auto", "auto: the compiled kernels of each tensor's device, where they can be built; torch: plain PyTorch"
    )


class Log(Section):
    """What is written about a run, beside metrics.jsonl and TensorBoard."""

    lines_every: float = option(
        5.0,
        "seconds between two lines of steps; 0: a line for each step. The first and the last step have one",
        ge=0,
        unit="seconds",
    )
    samples_every: int = option(50, "steps between two tables of samples; 0: none", unit="steps", ge=0)
    samples: int = option(8, "samples of a table; of training prompts whole groups, so that there may be more", ge=1)
    wandb: str | None = option(None, "a Weights & Biases project")
