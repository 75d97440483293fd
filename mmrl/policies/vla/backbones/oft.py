"""The parts of OpenVLA-OFT (arXiv 2502.19645) with files of their own: L1 regression head and state projector.

They are published as pickles of tensors, `action_head--STEP_checkpoint.pt` and `proprio_projector--STEP_checkpoint.pt`.
The same tensors are read here as safetensors, to which `mmrl.policies.vla.backbones.checkpoint_conversion` converts
them. Names of parameters are those of the published files.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import torch
from einops import rearrange
from safetensors import SafetensorError, safe_open
from safetensors import torch as safetensors
from torch import Tensor, nn

from mmrl.errors import UserError
from mmrl.policies.vla.heads.gaussian import NormalHead
from mmrl.policies.vla.heads.gaussian_settings import L1Actions
from mmrl.policies.vla.heads.head import BidirectionalEncodedPrefix, EncodedPrefix
from mmrl.policies.vla.settings import Actions, NormalActions

PartName = Literal["action_head", "proprio_projector"]
# Files that mmrl reads and writes. Their names lack the word "checkpoint", since OpenVLA-OFT loads any file whose name
# has this word and the part's name.
FILES: dict[PartName, str] = {part: f"{part}.safetensors" for part in ("action_head", "proprio_projector")}
# Pickles: patterns of published ones, and names of those that mmrl saves for OpenVLA-OFT's own code.
PUBLISHED: dict[PartName, str] = {part: f"{part}--*.pt" for part in FILES}
SAVED: dict[PartName, str] = {part: f"{part}--latest_checkpoint.pt" for part in FILES}
DISTRIBUTED = "module."  # prefix of every tensor's name in the pickles, from distributed training
UNSUPPORTED = {  # patterns of files, and why mmrl does not support them
    "noisy_action_projector--*.pt": "its actions are denoised (OpenVLA-OFT's use_diffusion)",
    "vision_backbone--*.pt": "its image features are conditioned on the words (FiLM)",
}
Shapes = Mapping[str, torch.Size]


class ResidualBlock(nn.Module):
    """A residual MLP block of `ActionNetwork`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(x)


class ActionNetwork(nn.Module):
    """The L1 regression head: maps the hidden states of an action's positions, concatenated, to the action."""

    def __init__(self, width: int, action_dim: int) -> None:
        """Builds layers with the names in OpenVLA-OFT's files. width: size of the backbone's hidden states."""
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(width * action_dim)
        self.fc1 = nn.Linear(width * action_dim, width)
        self.mlp_resnet_blocks = nn.ModuleList(ResidualBlock(width) for _ in range(2))
        self.layer_norm2 = nn.LayerNorm(width)
        self.fc2 = nn.Linear(width, action_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Returns actions [..., action]. x: [..., action x width]."""
        h = self.fc1(self.layer_norm1(x)).relu()
        for block in self.mlp_resnet_blocks:
            h = block(h)
        return self.fc2(self.layer_norm2(h))


class ProprioProjector(nn.Module):
    """Projects the robot's state to one token, which follows the image patches."""

    def __init__(self, width: int, state_dim: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(state_dim, width), nn.Linear(width, width)
        self.act = nn.GELU()

    def forward(self, state: Tensor) -> Tensor:
        """Projects states [n, state] to one token each, [n, 1, width]."""
        return rearrange(self.fc2(self.act(self.fc1(state.to(self.fc1.weight.dtype)))), "n w -> n 1 w")


class L1Head(NormalHead):
    """A Gaussian head whose mean is the prediction of the published L1 regression head."""

    optional_parameters = ("model.",)  # they have a file of their own, action_head.safetensors

    def __init__(self, settings: NormalActions, action: Actions, action_dim: int, width: int) -> None:
        """width: size of the backbone's hidden states. The weights are random until `read_into` loads the published
        ones."""
        super().__init__(settings, action, action_dim, 0)
        self.model, self.width = ActionNetwork(width, action_dim), width

    def mean(self, prefix: EncodedPrefix, state: Tensor) -> Tensor:
        """Predicts the mean of the actions, [n, chunk, action] fp32, from the hidden states of one empty token per
        number."""
        chunk, size = self.shape
        empty = torch.zeros(len(state), chunk * size, self.width, device=state.device)
        # each number of an action is predicted at the position before its own
        hidden = cast(BidirectionalEncodedPrefix, prefix).encode_with(empty)[:, :-1]
        return self.model(rearrange(hidden, "n (c a) w -> n c (a w)", c=chunk)).float()

    def save(self, folder: Path, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Saves the network as action_head.safetensors, and returns the other weights; see `Head.save`."""
        network = {name: value for name, value in state.items() if name.startswith("model.")}
        write("action_head", folder, network, {"chunk": str(self.shape[0])})
        return {name: value for name, value in state.items() if name not in network}


def head_shapes(width: int, action_dim: int) -> Shapes:
    """Returns the shapes of an L1 regression head's tensors by name."""
    with torch.device("meta"):
        return shapes_of({f"model.{n}": t for n, t in ActionNetwork(width, action_dim).state_dict().items()})


def projector_shapes(width: int, state_dim: int) -> Shapes:
    """Returns the shapes of a state projector's tensors by name."""
    with torch.device("meta"):
        return shapes_of(ProprioProjector(width, state_dim).state_dict())


def shapes_of(tensors: Mapping[str, Tensor]) -> Shapes:
    """Returns the shapes of tensors by name."""
    return {name: tensor.shape for name, tensor in tensors.items()}


def check_shapes(file: Path, actual: Shapes, expected: Shapes) -> None:
    """Raises UserError for the first tensor that is missing, unknown or of another shape."""
    for problem, names in (
        ("lacks the tensor", expected.keys() - actual.keys()),
        ("has an unknown tensor", actual.keys() - expected.keys()),
    ):
        if names:
            raise UserError(f"{file} {problem} {min(names)}; only files of OpenVLA-OFT are supported")
    for name in sorted(expected):
        if actual[name] != expected[name]:
            raise UserError(f"{file}: {name} must have shape {list(expected[name])}, but it has {list(actual[name])}")


@dataclass(frozen=True)
class PartFiles:
    """The files of a model's L1 regression head and state projector; None if the model has none."""

    head: Path | None
    projector: Path | None

    def check(self, path: str, action: Actions, sizes: tuple[int, int, int]) -> None:
        """Raises UserError if a file that `action` needs is missing or does not fit, or a file is present that `action`
        does not use. Reads no weights. path: model.path; sizes: the model's width, the action size, and the size of the
        state that the policy may read."""
        width, action_dim, state_dim = sizes
        l1_head = isinstance(action.head.checkpoint_head, L1Actions)
        if l1_head and self.head is None:
            raise UserError(
                f"action.head.type=l1, but model.path={path} has no {FILES['action_head']}, which mmrl convert makes "
                "of a published action_head--STEP_checkpoint.pt; for actions as tokens use action.head.type=token"
            )
        if not l1_head and self.head is not None:
            raise UserError(
                f"model.path={path} holds an L1 regression head, {self.head.name}, but "
                f"action.head.type={action.head.type}; use action.head.type=l1, or remove the file to train a new head"
            )
        if self.head is not None:
            self._check_head(self.head, action.chunk, width, action_dim)
        if action.statistics is None and (self.head or self.projector) is not None:
            raise UserError(
                f"action.statistics is not set, but model.path={path} was trained on scaled actions and "
                "states; set it to the folder with dataset_statistics.json"
            )
        if self.projector is None:
            if l1_head and action.proprioception:
                raise UserError(
                    f"action.proprioception=true, but model.path={path} has no {FILES['proprio_projector']}, through "
                    "which it would read the robot's state; copy it there, or set action.proprioception=false"
                )
            return
        self._check_projector(self.projector, path, action, width, state_dim)

    def _check_head(self, file: Path, chunk: int, width: int, action_dim: int) -> None:
        """Raises UserError if the L1 head's file has another action size, chunk length or width than the job."""
        shapes, metadata = read_header(file)
        # a missing tensor passes here, and is reported by `check_shapes` below
        size = shapes.get("model.fc2.bias", torch.Size([action_dim]))[0]
        if size != action_dim:
            raise UserError(
                f"{file} makes actions of {size} numbers, but the simulator takes {action_dim}; use the simulator of "
                "the robot that it was trained on"
            )
        check_shapes(file, shapes, head_shapes(width, action_dim))
        if "chunk" not in metadata:
            raise UserError(f"{file} does not say how many actions a chunk has; write it again with mmrl convert")
        if int(metadata["chunk"]) != chunk:
            raise UserError(
                f"action.chunk={chunk}, but {file} was trained on chunks of {metadata['chunk']}; set that number"
            )

    def _check_projector(self, file: Path, path: str, action: Actions, width: int, state_dim: int) -> None:
        """Raises UserError if the state projector is switched off, has another state size than the robot, or would get
        a state that is already standardised."""
        if not action.proprioception:
            raise UserError(
                f"action.proprioception=false, but model.path={path} reads the robot's state through {file.name}; set "
                "action.proprioception=true, or remove the file"
            )
        shapes, _ = read_header(file)
        # a missing tensor passes here, and is reported by `check_shapes` below
        size = shapes.get("fc1.weight", torch.Size([width, state_dim]))[-1]
        if size != state_dim:
            raise UserError(
                f"{file} takes a state of {size} numbers, but the simulator's has {state_dim}; use the simulator of "
                "the robot that it was trained on"
            )
        check_shapes(file, shapes, projector_shapes(width, state_dim))
        if action.standardise:
            raise UserError(
                "action.standardise=true, but OpenVLA-OFT scales the state by its own statistics; remove that key"
            )


def find_files(folders: Sequence[Path]) -> PartFiles:
    """Finds the file of each part in the first of `folders` that has it. folders: the model's, then its base model's if
    the model is a LoRA."""
    paths: dict[PartName, Path | None] = {}
    for part, name in FILES.items():
        paths[part] = next((folder / name for folder in folders if (folder / name).is_file()), None)
    return PartFiles(paths["action_head"], paths["proprio_projector"])


def check_readable(path: str, names: Sequence[str]) -> None:
    """Raises UserError if the model has parts that are not supported, or parts that exist only as pickles. names: the
    names of the files at `path`."""
    for pattern, reason in UNSUPPORTED.items():
        for name in fnmatch.filter(names, pattern):
            raise UserError(f"model.path={path} holds {name}: {reason}, which is not supported")
    for part, pattern in PUBLISHED.items():
        for name in fnmatch.filter(names, pattern):
            if FILES[part] not in names:
                raise UserError(
                    f"model.path={path} holds {name}, a pickle, which mmrl train never opens; convert it once to "
                    f"{FILES[part]}, in a local folder with the checkpoint, with: mmrl convert FOLDER"
                )


def read_header(file: Path) -> tuple[Shapes, dict[str, str]]:
    """Returns the shapes by name and the metadata of a safetensors file, without reading its weights. Raises UserError
    if it is not a safetensors file."""
    try:
        with safe_open(file, "pt") as opened:
            shapes = {name: torch.Size(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
            return shapes, opened.metadata() or {}
    except SafetensorError as error:
        raise UserError(f"{file}: {error}") from None


def read_into(module: nn.Module, file: Path) -> None:
    """Loads the weights of a file whose shapes were checked. Parameters that are not in the file keep their values."""
    module.load_state_dict(safetensors.load_file(file), strict=False)


def write(part: PartName, folder: Path, state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Writes a part as safetensors, and as the pickle that OpenVLA-OFT reads."""
    tensors = {name: value.contiguous() for name, value in state.items()}
    write_tensors(folder / FILES[part], tensors, metadata)
    torch.save({DISTRIBUTED + name: value for name, value in tensors.items()}, folder / SAVED[part])


def write_tensors(file: Path, tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file atomically."""
    temporary = file.with_suffix(".new")
    temporary.write_bytes(safetensors.save(tensors, {"format": "pt", **metadata}))
    os.replace(temporary, file)
