"""Settings of the log of a run."""

from __future__ import annotations

from mmrl.settings import Section, option


class Log(Section):
    """Output about a run, besides metrics.jsonl."""

    lines_every: float = option(
        5.0,
        "seconds between two printed lines of steps; 0: a line for each step. The first and the last step have one",
        ge=0,
        unit="seconds",
    )
    samples_every: int = option(50, "steps between two tables of samples; 0: none", unit="steps", ge=0)
    samples: int = option(8, "samples of a table; training tables hold whole groups, so there may be more", ge=1)
    tensorboard: bool = option(False, "write TensorBoard events to run_dir/tensorboard; needs the extra tensorboard")
    wandb: str | None = option(None, "log to this Weights & Biases project; needs the extra wandb")
    trackio: str | None = option(None, "log to this Trackio project; needs the extra trackio")
    mlflow: str | None = option(
        None, "log to this MLflow experiment, at the address in MLFLOW_TRACKING_URI; needs the extra mlflow"
    )
