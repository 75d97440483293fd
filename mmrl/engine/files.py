"""DeepSpeed's checkpoint files: written through a function that can report failures, and read without running pickled
code."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch import nn

from mmrl.errors import UserError

TAG = "engine"  # DeepSpeed's name of the folder in which its files lie
PLAIN = [LossScaler, ZeroStageEnum, fragment_address]  # records of numbers, the only classes in DeepSpeed's files
Write = Callable[[Any, Path], None]  # writes a file: the object for torch.save, and the path
FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # torch.load's own switch; DeepSpeed asks for weights_only=False


@contextmanager
def weights_only(folder: Path) -> Iterator[None]:
    """A context in which torch.load, whoever calls it, loads tensors and plain values only. Raises UserError with the
    checkpoint `folder` for a file that holds anything else; none of its code is run."""
    previous = os.environ.get(FORCE)
    os.environ[FORCE] = "1"
    try:
        with torch.serialization.safe_globals(PLAIN):
            yield
    except UnpicklingError as error:
        raise UserError(
            f"checkpoint {folder} holds more than tensors and is not opened "
            f"({str(error).strip().splitlines()[-1]}); it was not written by mmrl: remove it"
        ) from None
    finally:
        del os.environ[FORCE]
        if previous is not None:
            os.environ[FORCE] = previous


def save(engine: DeepSpeedEngine, folder: Path, state: dict[str, Any], write: Write) -> None:
    """Writes a checkpoint of DeepSpeed's `engine`; see `Engine.save`. state: stored with it, and returned by `load`."""
    writer = engine.checkpoint_engine
    writer.save = lambda state_dict, path: write(state_dict, Path(path))
    engine._copy_recovery_script = lambda folder: None  # a checkpoint is data; DeepSpeed would put programs beside it
    try:
        engine.save_checkpoint(folder, tag=TAG, client_state=state, save_latest=False, exclude_frozen_parameters=True)
    finally:
        del writer.save


def load(engine: DeepSpeedEngine, folder: Path) -> dict[str, Any]:
    """Loads weights and optimizer into DeepSpeed's `engine`. Returns the state that was given to `save`.

    Raises UserError if a file holds more than tensors and plain values.
    """
    frozen = {name for name, p in engine.module.named_parameters() if not p.requires_grad}

    def load_module(src: dict[str, Any], dst: nn.Module) -> None:
        """Loads the weights `src` into the module. Raises UserError if its trained weights have other names."""
        unmatched = dst.load_state_dict(src, strict=False)
        different = [*unmatched.unexpected_keys, *(name for name in unmatched.missing_keys if name not in frozen)]
        if different:
            raise UserError(
                f"checkpoint {folder} is of another model than this job's: only one of the two has the weight "
                f"{different[0]}; set the section model as in the run's config.yaml"
            )

    with weights_only(folder):
        _, state = engine.load_checkpoint(folder, tag=TAG, load_lr_scheduler_states=False, custom_load_fn=load_module)
    return state
