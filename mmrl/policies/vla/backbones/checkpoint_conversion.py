"""Conversion of OpenVLA-OFT's published pickles to safetensors. Only tensors are read; no code of a pickle runs."""

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

# (action size, state size) -> (robot, chunk length); constants of OpenVLA-OFT's code, which no checkpoint holds.
CHUNKS = {(7, 8): ("LIBERO", 8), (7, 7): ("BridgeData", 5)}
ALOHA_ACTION_DIM = 14

# Exceptions that torch.load raises for pickles of other objects than tensors, and for damaged files.
LOAD_ERRORS = (UnpicklingError, RuntimeError, EOFError, ValueError, LookupError, AssertionError, struct.error, OSError)


@dataclass(frozen=True)
class OpenVLAConversion:
    """The result of a conversion."""

    files: list[Path]  # written files
    chunk: int | None  # number of actions of a chunk; None if there is no action head
    robot: str | None  # the robot whose chunk length was taken; None if the user gave the length


def convert(folder: Path, chunk: int | None) -> OpenVLAConversion:
    """Converts the pickles in `folder` to safetensors, `oft.FILES`, in the same folder. chunk: number of actions of a
    chunk; None: derived from the sizes of action and state. Returns the new files, that number, and the robot's name.

    Raises UserError if the folder has no such pickles, or if one holds anything but the expected tensors."""
    num_files = len(list(folder.iterdir()))
    for pattern, reason in oft.UNSUPPORTED.items():
        for file in folder.glob(pattern):
            raise UserError(f"{file}: {reason}, which is not supported")
    paths = {part: find_pickle(folder, part) for part in oft.FILES}
    parts = {part: load_tensors(file) for part, file in paths.items() if file is not None}
    if not parts:
        expected = " or ".join(f"{part}--STEP_checkpoint.pt" for part in oft.FILES)
        raise UserError(
            f"{folder} has no {expected}, but {num_files} other files; give the folder of an OpenVLA-OFT checkpoint"
        )
    metadata: dict[str, dict[str, str]] = {part: {} for part in parts}
    robot = None
    if (head := parts.get("action_head")) is not None:
        chunk, robot = chunk_length(folder, read_action_dim(paths["action_head"], head), parts, chunk)
        metadata["action_head"]["chunk"] = str(chunk)
    if (projector := parts.get("proprio_projector")) is not None:
        check_projector(paths["proprio_projector"], projector)
    files = []
    for part, tensors in parts.items():
        files.append(folder / oft.FILES[part])
        oft.write_tensors(files[-1], tensors, metadata[part])
    return OpenVLAConversion(files, chunk, robot)


def find_pickle(folder: Path, part: oft.PartName) -> Path | None:
    """Returns the published pickle of a part in `folder`, None if there is none. Raises UserError for several."""
    paths = sorted(folder.glob(oft.PUBLISHED[part]))
    if len(paths) > 1:
        raise UserError(
            f"{folder} holds {paths[0].name} and {paths[1].name}, but only one can be converted; remove the other"
        )
    return paths[0] if paths else None


def load_tensors(file: Path) -> dict[str, Tensor]:
    """Loads a pickle of named tensors, and removes the prefix of distributed training from the names. Raises UserError
    if the file holds anything else, before any code of it runs."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of the pickle's protocol
            loaded: object = torch.load(file, map_location="cpu", weights_only=True)
    except LOAD_ERRORS as error:
        raise UserError(
            f"{file} cannot be opened safely, since pickles of more than tensors can run code: {error_summary(error)}"
        ) from None
    if not isinstance(loaded, dict) or not all(isinstance(k, str) and type(v) is Tensor for k, v in loaded.items()):
        raise UserError(
            f"{file} holds something else than a mapping from names to tensors; take the published file of OpenVLA-OFT"
        )
    for name, value in loaded.items():
        # A stride of 0 repeats a number: a file of 1 KB could demand terabytes of memory.
        if value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise UserError(
                f"{file} holds a tensor {name} of shape {list(value.shape)}, which is larger than its data; take the "
                "published file of OpenVLA-OFT"
            )
    return {name.removeprefix(oft.DISTRIBUTED): value.contiguous() for name, value in loaded.items()}


def error_summary(error: BaseException) -> str:
    """Extracts the cause from an error of torch.load, whose further text advises to open the file nevertheless."""
    if match := re.search(r"GLOBAL (\S+)", str(error)):
        return f"it would import {match[1]}"
    message = re.search(r"WeightsUnpickler error:\s*(.+)", str(error)) or re.search(r"(.+)", str(error))
    return message[1][:120] if message else type(error).__name__


def read_action_dim(file: Path | None, head: dict[str, Tensor]) -> int:
    """Returns the action size of a head. head: the weights of the head by name. Raises UserError if they are not the
    weights of an L1 regression head."""
    assert file is not None
    last = head.get("model.fc2.weight", torch.empty(0, 0))
    if last.dim() != 2 or any(name.startswith("noise_predictor.") for name in head):
        raise UserError(f"{file} is not a head of OpenVLA-OFT's L1 regression; no other heads can be converted")
    oft.check_shapes(file, oft.shapes_of(head), oft.head_shapes(last.shape[1], last.shape[0]))
    return last.shape[0]


def check_projector(file: Path | None, projector: dict[str, Tensor]) -> None:
    """Raises UserError if `projector` does not hold the weights of a projector of the robot's state."""
    assert file is not None
    first = projector.get("fc1.weight", torch.empty(0, 0))
    if first.dim() != 2:
        raise UserError(f"{file} is not a projector of a robot's state, since it has no matrix fc1.weight")
    oft.check_shapes(file, oft.shapes_of(projector), oft.projector_shapes(*first.shape))


def chunk_length(
    folder: Path, action_dim: int, parts: dict[oft.PartName, dict[str, Tensor]], requested: int | None
) -> tuple[int, str | None]:
    """Returns the number of actions of a chunk and the name of the robot that has these sizes of action and state;
    (requested, None) if `requested` is not None. parts: the weights of each part by name. Raises UserError if no known
    robot has these sizes."""
    if action_dim == ALOHA_ACTION_DIM:
        raise UserError(
            f"{folder}: actions of {ALOHA_ACTION_DIM} numbers are ALOHA's, whose min/max scaling is not supported"
        )
    if requested is not None:
        return requested, None
    projector = parts.get("proprio_projector", {}).get("fc1.weight")
    state_dim = 0 if projector is None else projector.shape[-1]
    if (entry := CHUNKS.get((action_dim, state_dim))) is None:
        raise UserError(
            f"{folder}: no file says how many actions a chunk has; give it, such as --chunk 8, as OpenVLA-OFT's "
            "NUM_ACTIONS_CHUNK was in training"
        )
    return entry[1], entry[0]  # an entry is (robot, number of actions)
