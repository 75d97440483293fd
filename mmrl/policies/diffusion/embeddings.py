"""What the encoders of a pipeline say of prompts, written to a folder once, so that jobs do without the encoders."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mmrl.errors import UserError
from mmrl.policies.diffusion.family import Condition, ConditionInputs, Shape
from mmrl.runtime.files import share
from mmrl.runtime.progress import display

if TYPE_CHECKING:
    from mmrl.protocols.parts import Task

INDEX = "embeddings.json"
IN_A_FILE = 64  # prompts, which are encoded at once where they have no images


class Encoders(Protocol):
    """A family of pipelines, for what its encoders say."""

    pipe: Any
    text_tokens: int | None

    def encode(self, asked: Sequence[ConditionInputs], shape: Shape) -> list[Condition]: ...


class Asking(Protocol):
    """A policy, for what it asks the encoders."""

    denoising: Any
    shape: Shape
    evaluation_shape: Shape


def key_of(asked: ConditionInputs, shape: Shape) -> str:
    """By what a condition is found: words, images by their content, and with images the shape of latents."""
    told = json.dumps([asked.text, asked.digest, list(shape) if asked.images else []])
    return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()


def asked_in(task: Task, policy: Asking) -> Iterator[tuple[ConditionInputs, Shape]]:
    """All that a job asks its encoders: prompts to train on, those that are held out, and what guidance leads away
    from."""
    negative = policy.denoising.negative_prompt
    for source, shape in ((task.train, policy.shape), (task.evaluation, policy.evaluation_shape)):
        for prompt in () if source is None else (source[index] for index in range(len(source))):
            asked = ConditionInputs.of(prompt)
            yield asked, shape
            yield asked.saying(negative), shape


def write(family: Encoders, asked: Iterable[tuple[ConditionInputs, Shape]], folder: Path) -> int:
    """Encodes each prompt once and writes what is said of it into the folder; how many there were."""
    folder.mkdir(parents=True, exist_ok=True)
    distinct = {key_of(one, shape): (one, shape) for one, shape in asked}
    where: dict[str, str] = {}
    with display.work("encoding prompts", len(distinct)) as work:
        for start in range(0, len(distinct), IN_A_FILE):
            keys, file = list(distinct)[start : start + IN_A_FILE], f"embeddings-{start // IN_A_FILE:05}.safetensors"
            tensors: dict[str, Tensor] = {}
            for shape, some in by_shape({key: distinct[key] for key in keys}).items():
                for key, condition in zip(some, family.encode([distinct[key][0] for key in some], shape), strict=True):
                    tensors |= {f"{key}.{name}": value.cpu().contiguous() for name, value in condition.items()}
                    work.advance()
            where |= dict.fromkeys(keys, file)
            save_file(tensors, folder / file)
    told = {"pipeline": type(family.pipe).__name__, "text_tokens": family.text_tokens, "files": where}
    (folder / INDEX).write_text(json.dumps(told))
    share(folder)
    return len(distinct)


def by_shape(asked: Mapping[str, tuple[ConditionInputs, Shape]]) -> dict[Shape, list[str]]:
    """Keys of prompts that encoders can be asked about together: those of one shape of latents. What is said of prompts
    without images does not depend on it, and they go with the first."""
    first = next(iter(asked.values()))[1]
    found: dict[Shape, list[str]] = {}
    for key, (one, shape) in asked.items():
        found.setdefault(shape if one.images else first, []).append(key)
    return found


class Embeddings:
    """Conditions by prompt, read when they are asked for."""

    def __init__(self, folder: str, pipeline: str, text_tokens: int | None) -> None:
        """Raises UserError unless the folder was written for such a pipeline and token limit."""
        self.folder = Path(folder)
        if not (self.folder / INDEX).is_file():
            raise UserError(f"model.embeddings={folder}: no {INDEX} there; write it with mmrl embed")
        told = json.loads((self.folder / INDEX).read_text())
        for name, own in (("pipeline", pipeline), ("text_tokens", text_tokens)):
            if told[name] != own:
                raise UserError(
                    f"model.embeddings={folder} was written with {name}={told[name]}, this job has {own}; write it "
                    "anew with mmrl embed"
                )
        self._files: dict[str, str] = told["files"]

    def find(self, asked: Sequence[ConditionInputs], shape: Shape) -> list[Condition]:
        """One condition each, on the CPU. Raises UserError for a prompt that was not embedded, or a damaged file."""
        return [self._read(one, key_of(one, shape)) for one in asked]

    def _read(self, asked: ConditionInputs, key: str) -> Condition:
        if key not in self._files:
            raise UserError(
                f"prompt {asked.text!r} is not in model.embeddings={self.folder}; write it anew with mmrl embed and "
                "this job's task, denoising.negative_prompt and resolution"
            )
        try:
            with safe_open(self.folder / self._files[key], "pt") as file:
                names = [name for name in file.keys() if name.startswith(f"{key}.")]  # noqa: SIM118
                return {name.partition(".")[2]: file.get_tensor(name) for name in names}
        except (OSError, SafetensorError) as error:
            raise UserError(f"model.embeddings: {self.folder / self._files[key]} can not be read: {error}") from None
