"""Networks that a policy plays with, saved beside its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmrl.errors import UserError

# In a folder of its own, since loaders of published models read every *.safetensors beside the weights.
FILE = Path("played_with") / "model.safetensors"


def write_networks(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes the tensors of these networks into a folder of weights. Without tensors it writes nothing."""
    if not tensors:
        return
    file = folder / FILE
    file.parent.mkdir()
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, file)


def read_networks(folder: Path) -> dict[str, Tensor]:
    """Returns the tensors that `write_networks` wrote; {} where there are none. Raises UserError for a damaged file."""
    file = folder / FILE
    if not file.is_file():
        return {}
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} cannot be read ({error}); restore it, or remove it to play without it") from None
