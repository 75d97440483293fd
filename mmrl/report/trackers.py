"""Optional trackers of a run's metrics: TensorBoard, Weights & Biases, Trackio and MLflow. Each needs its extra."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import yaml
from PIL import Image

from mmrl.errors import UserError
from mmrl.report.records import flatten
from mmrl.report.settings import Log
from mmrl.runtime.installation import extra_command


class Tracker(Protocol):
    """Receives metrics and samples of a run while it trains."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def samples(self, kind: str, step: int, sheet: Image.Image | None, table: str) -> None:
        """Logs images side by side, if there are any, and a Markdown table."""

    def drop_after(self, step: int) -> None:
        """Removes the metrics of steps after `step`, which a resumed run repeats."""

    def close(self) -> None: ...


class TensorBoard:
    """Writes event files in FOLDER/tensorboard: metrics, images, texts, and the configuration as a string and as
    hyperparameters beside held-out accuracy."""

    def __init__(self, folder: Path, config_yaml: str) -> None:
        """Opens the log in the run directory `folder`, and writes the configuration as hyperparameters and as text."""
        from torch.utils.tensorboard.summary import hparams

        self._folder = str(folder / "tensorboard")
        # An OSError of TensorBoard's writer thread is not printed there, see `_failed`.
        self._hook = threading.excepthook
        threading.excepthook = self._failed
        self._board = self._opened()
        keys = flatten(yaml.safe_load(config_yaml) or {})
        hyperparameters = {key: v if isinstance(v, bool | int | float | str) else str(v) for key, v in keys.items()}
        for part in hparams(hyperparameters, {"evaluation/accuracy": 0.0}):
            self._board.file_writer.add_summary(part)
        self._board.add_text("configuration", "\n".join(f"    {line}" for line in config_yaml.splitlines()))

    def _opened(self, **options: Any) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(self._folder, **options)

    def _failed(self, failed: threading.ExceptHookArgs) -> None:
        """Handles uncaught exceptions of threads as before, except for an OSError in TensorBoard's writer thread, such
        as of a full disk: its next call raises it again in the thread that logs."""
        writes = type(failed.thread).__module__.startswith("tensorboard.")
        if not (writes and isinstance(failed.exc_value, OSError)):
            self._hook(failed)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._board.add_scalar(name, value, step)

    def samples(self, kind: str, step: int, sheet: Image.Image | None, table: str) -> None:
        if sheet is not None:
            self._board.add_image(f"samples/{kind}", np.asarray(sheet), step, dataformats="HWC")
        self._board.add_text(f"samples/{kind}", table, step)

    def drop_after(self, step: int) -> None:
        self._board.close()
        self._board = self._opened(purge_step=step + 1)

    def close(self) -> None:
        threading.excepthook = self._hook
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

    def drop_after(self, step: int) -> None:
        """Does nothing: Weights & Biases keeps the first values of a step."""

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """Logs metrics to a project of Trackio, which keeps them on this machine unless its own settings say otherwise."""

    def __init__(self, folder: Path, project: str, config_yaml: str) -> None:
        import trackio

        keys = flatten(yaml.safe_load(config_yaml) or {})
        self._run: Any = trackio.init(project=project, name=folder.name, config=keys, resume="allow", embed=False)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def samples(self, kind: str, step: int, sheet: Image.Image | None, table: str) -> None:
        """Logs nothing: tables stay in the run directory."""

    def drop_after(self, step: int) -> None:
        """Does nothing: Trackio keeps all values."""

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """Logs metrics and the configuration to an experiment of MLflow, at the address in MLFLOW_TRACKING_URI.

    FOLDER/mlflow_run.txt keeps the identity of the run, with which a resumed run continues.
    """

    LONGEST = 500  # characters of a parameter, by MLflow's own limit
    MOST = 100  # parameters of a request

    def __init__(self, folder: Path, experiment: str, config_yaml: str) -> None:
        """Continues the run whose identity is in `folder`, or creates one with the configuration as parameters."""
        from mlflow import MlflowClient

        self._client: Any = MlflowClient()
        identity = folder / "mlflow_run.txt"
        if identity.is_file():
            self._run = identity.read_text().strip()
            return
        known = self._client.get_experiment_by_name(experiment)
        number = known.experiment_id if known else self._client.create_experiment(experiment)
        self._run = str(self._client.create_run(number, run_name=folder.name).info.run_id)
        identity.write_text(self._run)
        self._log_parameters(flatten(yaml.safe_load(config_yaml) or {}))

    def _log_parameters(self, keys: Mapping[str, Any]) -> None:
        """Logs the configuration, within MLflow's limits: LONGEST characters of a value, MOST values in a call."""
        from mlflow.entities import Param

        parameters = [Param(key, str(value)[: self.LONGEST]) for key, value in keys.items()]
        for first in range(0, len(parameters), self.MOST):
            self._client.log_batch(self._run, params=parameters[first : first + self.MOST])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        moment = int(time.time() * 1000)
        self._client.log_batch(self._run, metrics=[Metric(name, v, moment, step) for name, v in metrics.items()])

    def samples(self, kind: str, step: int, sheet: Image.Image | None, table: str) -> None:
        self._client.log_text(self._run, table, f"samples/{kind}-{step:06d}.md")

    def drop_after(self, step: int) -> None:
        """Does nothing: MLflow keeps the values of a repeated step beside the earlier ones."""

    def close(self) -> None:
        self._client.set_terminated(self._run)


def trackers(log: Log, folder: Path, config_yaml: str) -> list[Tracker]:
    """Starts the trackers that the section `log` names. Their packages must be installed, see `check_trackers`."""
    active: list[Tracker] = [TensorBoard(folder, config_yaml)] if log.tensorboard else []
    active += [] if log.wandb is None else [WeightsAndBiases(folder, log.wandb)]
    active += [] if log.trackio is None else [Trackio(folder, log.trackio, config_yaml)]
    return active if log.mlflow is None else [*active, MLflow(folder, log.mlflow, config_yaml)]


def check_trackers(log: Log) -> None:
    """Raises UserError if the package of a tracker in the section `log` is not installed."""
    requested = {
        "tensorboard": ("true" if log.tensorboard else None, "false"),
        **{
            name: (value, "null")
            for name, value in (("wandb", log.wandb), ("trackio", log.trackio), ("mlflow", log.mlflow))
        },
    }
    for name, (value, off) in requested.items():
        if value is not None and importlib.util.find_spec(name) is None:
            raise UserError(
                f"log.{name}={value}: {name} is not installed; {extra_command(name)}, or set log.{name}={off}"
            )
