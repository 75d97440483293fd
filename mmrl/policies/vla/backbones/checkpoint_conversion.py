"""OpenVLA-OFT's published pickles as safetensors, once: nothing but tensors is opened, and no code of a pickle runs."""

from __future__ import annotations

import re
import struct
import warnings
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from mmrl.errors import UserError
from mmrl.policies.vla.backbones import oft

# Numbers of an action and of a state, and the actions of a chunk: constants of OpenVLA-OFT's code, in no file of it.
CHUNKS = {(7, 8): ("LIBERO", 8), (7, 7): ("BridgeData", 5)}
ALOHA = 14  # numbers of its actions

# What torch.load raises for what is not tensors, and for files that were cut or changed at random places.
DAMAGED = (UnpicklingError, RuntimeError, EOFError, ValueError, LookupError, AssertionError, struct.error, OSError)


@dataclass(frozen=True)
class Written:
    """What was made of a checkpoint. robot: whose chunk was taken, None where it was told."""

    files: list[Path]
    chunk: int | None
    robot: str | None


def convert(folder: Path, chunk: int | None) -> Written:
    """Writes `oft.FILES` beside the pickles in `folder`. chunk: actions that the head makes at once; None: as the sizes
    of action and state say. Raises UserError for a folder without such pickles, and for one that holds more than
    tensors, or others than are known."""
    names = [file.name for file in folder.iterdir()]
    for pattern, why in oft.UNKNOWN.items():
        for file in folder.glob(pattern):
            raise UserError(f"{file}: {why}, which is not known here")
    given = {kind: published(folder, kind) for kind in oft.FILES}
    parts = {kind: tensors(file) for kind, file in given.items() if file is not None}
    if not parts:
        kinds = " or ".join(f"{kind}--STEP_checkpoint.pt" for kind in oft.FILES)
        raise UserError(f"{folder} holds no {kinds}, but {len(names)} other files; give a checkpoint of OpenVLA-OFT")
    beside: dict[str, dict[str, str]] = {kind: {} for kind in parts}
    robot = None
    if (head := parts.get("action_head")) is not None:
        chunk, robot = chunk_of(folder, size_of_action(given["action_head"], head), parts, chunk)
        beside["action_head"]["chunk"] = str(chunk)
    if (projector := parts.get("proprio_projector")) is not None:
        check_projector(given["proprio_projector"], projector)
    files = []
    for kind, found in parts.items():
        files.append(folder / oft.FILES[kind])
        oft.write_tensors(files[-1], found, beside[kind])
    return Written(files, chunk, robot)


def published(folder: Path, kind: oft.Kind) -> Path | None:
    found = sorted(folder.glob(oft.PUBLISHED[kind]))
    if len(found) > 1:
        raise UserError(f"{folder} holds {found[0].name} and {found[1].name}; leave the one that is meant")
    return found[0] if found else None


def tensors(file: Path) -> dict[str, Tensor]:
    """By name, without the beginning that distributed training gave them. Raises UserError for a file that holds more,
    before a line of it runs."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of a pickle's protocol, which says nothing to who converts
            found: Any = torch.load(file, map_location="cpu", weights_only=True)
    except DAMAGED as error:
        raise UserError(f"{file} is no pickle of tensors alone and was not opened: {told(error)}") from None
    if not isinstance(found, dict) or not all(isinstance(k, str) and type(v) is Tensor for k, v in found.items()):
        raise UserError(f"{file} holds other things than tensors by name")
    return {name.removeprefix(oft.DISTRIBUTED): value.contiguous() for name, value in found.items()}


def told(error: BaseException) -> str:
    """The one thing that torch's error says of the file; the rest is advice to open it nevertheless."""
    if asked := re.search(r"GLOBAL (\S+)", str(error)):
        return f"it asks for {asked[1]}"
    said = re.search(r"WeightsUnpickler error:\s*(.+)", str(error)) or re.search(r"(.+)", str(error))
    return said[1][:120] if said else type(error).__name__


def size_of_action(file: Path | None, head: dict[str, Tensor]) -> int:
    """Raises UserError for another head than the L1 regression's."""
    assert file is not None
    last = head.get("model.fc2.weight", torch.empty(0, 0))
    if last.dim() != 2 or any(name.startswith("noise_predictor.") for name in head):
        raise UserError(f"{file} is no head of OpenVLA-OFT's L1 regression")
    oft.check_shapes(file, oft.shapes_of(head), oft.head_shapes(last.shape[1], last.shape[0]))
    return last.shape[0]


def check_projector(file: Path | None, projector: dict[str, Tensor]) -> None:
    assert file is not None
    first = projector.get("fc1.weight", torch.empty(0, 0))
    if first.dim() != 2:
        raise UserError(f"{file} is no projector of a robot's state")
    oft.check_shapes(file, oft.shapes_of(projector), oft.projector_shapes(*first.shape))


def chunk_of(
    folder: Path, action_dim: int, parts: dict[oft.Kind, dict[str, Tensor]], given: int | None
) -> tuple[int, str | None]:
    """How many actions a chunk has, and whose robot says so. Raises UserError where nothing says it."""
    if action_dim == ALOHA:
        raise UserError(
            f"{folder}: actions of {ALOHA} numbers are ALOHA's, whose scaling by extremes is not known here"
        )
    if given is not None:
        return given, None
    projector = parts.get("proprio_projector", {}).get("fc1.weight")
    state_dim = 0 if projector is None else projector.shape[-1]
    if (known := CHUNKS.get((action_dim, state_dim))) is None:
        raise UserError(
            f"{folder}: no file says how many actions a chunk has; give it, such as --chunk 8, as OpenVLA-OFT's "
            "NUM_ACTIONS_CHUNK was in training"
        )
    return known[1], known[0]
