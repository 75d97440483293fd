"""Settings of what is written about a run."""

from __future__ import annotations

from mmrl.settings import Section, option


class Log(Section):
    """What is written about a run, beside metrics.jsonl."""

    lines_every: float = option(
        5.0,
        "seconds between two lines of steps; 0: a line for each step. The first and the last step have one",
        ge=0,
        unit="seconds",
    )
    samples_every: int = option(50, "steps between two tables of samples; 0: none", unit="steps", ge=0)
    samples: int = option(8, "samples of a table; of training prompts whole groups, so that there may be more", ge=1)
    tensorboard: bool = option(False, "TensorBoard events in run_dir/tensorboard too; needs the extra tensorboard")
    wandb: str | None = option(None, "a Weights & Biases project; needs the extra wandb")
