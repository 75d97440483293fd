"""Conversion of OpenVLA-OFT's published pickles to safetensors: only tensors are read, and no code of a pickle runs."""

from __future__ import annotations

import re
import struct
import warnings
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor

from mmrl.errors import UserError
from mmrl.policies.vla.backbones import oft

# Numbers of an action and of a state, and the actions of a chunk: constants of OpenVLA-OFT's code, in no file of it.
CHUNKS = {(7, 8): ("LIBERO", 8), (7, 7): ("BridgeData", 5)}
ALOHA = 14  # numbers of its actions

# Exceptions of torch.load for anything but tensors, and for damaged files.
DAMAGED = (UnpicklingError, RuntimeError, EOFError, ValueError, LookupError, AssertionError, struct.error, OSError)


@dataclass(frozen=True)
class Written:
    """The result of a conversion. robot: the robot whose chunk length was taken, None where it was given."""

    files: list[Path]
    chunk: int | None
    robot: str | None


def convert(folder: Path, chunk: int | None) -> Written:
    """Writes `oft.FILES` beside the pickles in `folder`. chunk: length of the head's chunk; None: derived from the
    sizes of action and state. Raises UserError for a folder without such pickles, and for one that holds more than
    tensors, or unknown ones."""
    names = [file.name for file in folder.iterdir()]
    for pattern, why in oft.UNKNOWN.items():
        for file in folder.glob(pattern):
            raise UserError(f"{file}: {why}, which is not supported")
    paths = {kind: published(folder, kind) for kind in oft.FILES}
    parts = {kind: tensors(file) for kind, file in paths.items() if file is not None}
    if not parts:
        kinds = " or ".join(f"{kind}--STEP_checkpoint.pt" for kind in oft.FILES)
        raise UserError(f"{folder} has no {kinds}, but {len(names)} other files; give a checkpoint of OpenVLA-OFT")
    metadata: dict[str, dict[str, str]] = {kind: {} for kind in parts}
    robot = None
    if (head := parts.get("action_head")) is not None:
        chunk, robot = chunk_of(folder, size_of_action(paths["action_head"], head), parts, chunk)
        metadata["action_head"]["chunk"] = str(chunk)
    if (projector := parts.get("proprio_projector")) is not None:
        check_projector(paths["proprio_projector"], projector)
    files = []
    for kind, loaded in parts.items():
        files.append(folder / oft.FILES[kind])
        oft.write_tensors(files[-1], loaded, metadata[kind])
    return Written(files, chunk, robot)


def published(folder: Path, kind: oft.Kind) -> Path | None:
    paths = sorted(folder.glob(oft.PUBLISHED[kind]))
    if len(paths) > 1:
        raise UserError(f"{folder} holds {paths[0].name} and {paths[1].name}; remove the one that is not meant")
    return paths[0] if paths else None


def tensors(file: Path) -> dict[str, Tensor]:
    """Loads tensors by name, without the prefix of distributed training. Raises UserError for a file that holds
    anything else, before any code of it runs."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of the pickle's protocol
            loaded: object = torch.load(file, map_location="cpu", weights_only=True)
    except DAMAGED as error:
        raise UserError(f"{file} is not a pickle of tensors alone and was not opened: {error_summary(error)}") from None
    if not isinstance(loaded, dict) or not all(isinstance(k, str) and type(v) is Tensor for k, v in loaded.items()):
        raise UserError(f"{file} holds more than named tensors")
    return {name.removeprefix(oft.DISTRIBUTED): value.contiguous() for name, value in loaded.items()}


def error_summary(error: BaseException) -> str:
    """Extracts the cause from torch's error; the rest of it is advice to open the file nevertheless."""
    if match := re.search(r"GLOBAL (\S+)", str(error)):
        return f"it asks for {match[1]}"
    message = re.search(r"WeightsUnpickler error:\s*(.+)", str(error)) or re.search(r"(.+)", str(error))
    return message[1][:120] if message else type(error).__name__


def size_of_action(file: Path | None, head: dict[str, Tensor]) -> int:
    """Returns the size of an action. Raises UserError for another head than the L1 regression's."""
    assert file is not None
    last = head.get("model.fc2.weight", torch.empty(0, 0))
    if last.dim() != 2 or any(name.startswith("noise_predictor.") for name in head):
        raise UserError(f"{file} is not a head of OpenVLA-OFT's L1 regression")
    oft.check_shapes(file, oft.shapes_of(head), oft.head_shapes(last.shape[1], last.shape[0]))
    return last.shape[0]


def check_projector(file: Path | None, projector: dict[str, Tensor]) -> None:
    assert file is not None
    first = projector.get("fc1.weight", torch.empty(0, 0))
    if first.dim() != 2:
        raise UserError(f"{file} is not a projector of a robot's state")
    oft.check_shapes(file, oft.shapes_of(projector), oft.projector_shapes(*first.shape))


def chunk_of(
    folder: Path, action_dim: int, parts: dict[oft.Kind, dict[str, Tensor]], requested: int | None
) -> tuple[int, str | None]:
    """Returns the length of a chunk, and the robot from which it is known. Raises UserError where it is not known."""
    if action_dim == ALOHA:
        raise UserError(f"{folder}: actions of {ALOHA} numbers are ALOHA's, whose min/max scaling is not supported")
    if requested is not None:
        return requested, None
    projector = parts.get("proprio_projector", {}).get("fc1.weight")
    state_dim = 0 if projector is None else projector.shape[-1]
    if (entry := CHUNKS.get((action_dim, state_dim))) is None:
        raise UserError(
            f"{folder}: no file says how many actions a chunk has; give it, such as --chunk 8, as OpenVLA-OFT's "
            "NUM_ACTIONS_CHUNK was in training"
        )
    return entry[1], entry[0]
