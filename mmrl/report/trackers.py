"""Optional trackers of a run's metrics: TensorBoard and Weights & Biases. Each needs its extra."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import yaml
from PIL import Image

from mmrl.errors import UserError
from mmrl.report.records import flattened
from mmrl.report.settings import Log


class Tracker(Protocol):
    """Receives metrics and samples of a run while it trains."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def samples(self, kind: str, step: int, sheet: Image.Image | None, table: str) -> None:
        """Logs images side by side, if there are any, and a Markdown table."""

    def forget_after(self, step: int) -> None:
        """Drops steps beyond `step`, which a resumed run repeats."""

    def close(self) -> None: ...


class TensorBoard:
    """Writes event files in FOLDER/tensorboard: metrics, images, texts, and the configuration as a text and as
    hyperparameters beside held-out accuracy."""

    def __init__(self, folder: Path, config_yaml: str) -> None:
        from torch.utils.tensorboard.summary import hparams

        self._folder = str(folder / "tensorboard")
        self._board = self._opened()
        keys = flattened(yaml.safe_load(config_yaml) or {})
        hyperparameters = {key: v if isinstance(v, bool | int | float | str) else str(v) for key, v in keys.items()}
        for part in hparams(hyperparameters, {"evaluation/accuracy": 0.0}):
            self._board.file_writer.add_summary(part)
        self._board.add_text("configuration", "\n".join(f"    {line}" for line in config_yaml.splitlines()))

    def _opened(self, **options: Any) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(self._folder, **options)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._board.add_scalar(name, value, step)

    def samples(self, kind: str, step: int, sheet: Image.Image | None, table: str) -> None:
        if sheet is not None:
            self._board.add_image(f"samples/{kind}", np.asarray(sheet), step, dataformats="HWC")
        self._board.add_text(f"samples/{kind}", table, step)

    def forget_after(self, step: int) -> None:
        self._board.close()
        self._board = self._opened(purge_step=step + 1)

    def close(self) -> None:
        self._board.close()


class WeightsAndBiases:
    """Logs metrics to a project of Weights & Biases."""

    def __init__(self, folder: Path, project: str) -> None:
        import wandb

        self._run: Any = wandb.init(project=project, dir=folder, name=folder.name)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def samples(self, kind: str, step: int, sheet: Image.Image | None, table: str) -> None:
        """Logs nothing: tables stay in the run directory."""

    def forget_after(self, step: int) -> None:
        """Drops nothing: Weights & Biases keeps the first log of a step."""

    def close(self) -> None:
        self._run.finish()


def trackers(log: Log, folder: Path, config_yaml: str) -> list[Tracker]:
    """Returns the trackers of the section `log`. `check_trackers` comes first."""
    active: list[Tracker] = [TensorBoard(folder, config_yaml)] if log.tensorboard else []
    return active if log.wandb is None else [*active, WeightsAndBiases(folder, log.wandb)]


def check_trackers(log: Log) -> None:
    """Raises UserError where a tracker of the section is not installed."""
    wanted = {"tensorboard": ("true" if log.tensorboard else None, "false"), "wandb": (log.wandb, "null")}
    for name, (value, without) in wanted.items():
        if value is not None and importlib.util.find_spec(name) is None:
            raise UserError(
                f"log.{name}={value}: {name} is not installed; pip install -e '.[{name}]', or set log.{name}={without}"
            )
