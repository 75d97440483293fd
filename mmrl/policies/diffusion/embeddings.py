"""Prompt embeddings on disk: `mmrl embed` writes them once, and jobs read them without loading the text encoders."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mmrl.errors import UserError
from mmrl.policies.diffusion.family import Condition, ConditionInputs, Shape
from mmrl.policies.diffusion.settings import Denoising, DenoisingDemonstrations
from mmrl.runtime.files import use_default_permissions
from mmrl.runtime.progress import display

if TYPE_CHECKING:
    from mmrl.protocols.parts import Task

INDEX = "embeddings.json"
PER_FILE = 64  # prompts per file, which are encoded in one call


class Encoders(Protocol):
    """A pipeline family that encodes prompts."""

    text_tokens: int | None

    @property
    def pipe(self) -> object: ...

    def encode(self, inputs: Sequence[ConditionInputs], shape: Shape) -> list[Condition]: ...


class PromptedPolicy(Protocol):
    """A policy that knows which prompts are encoded, and for which sizes."""

    denoising: Denoising | DenoisingDemonstrations
    shape: Shape
    evaluation_shape: Shape


def condition_key(inputs: ConditionInputs, shape: Shape) -> str:
    """Returns the key of a condition: a hash of its text and, if it has images, of these and the latents' shape."""
    content = json.dumps([inputs.text, inputs.digest, list(shape) if inputs.images else []])
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def job_inputs(task: Task, policy: PromptedPolicy) -> Iterator[tuple[ConditionInputs, Shape]]:
    """Yields the inputs of all conditions of a job, with the latents' shape: each training and evaluation prompt, and
    after each the negative prompt with its images."""
    negative = policy.denoising.negative_prompt
    for source, shape in ((task.train, policy.shape), (task.evaluation, policy.evaluation_shape)):
        for prompt in () if source is None else (source[index] for index in range(len(source))):
            inputs = ConditionInputs.from_prompt(prompt)
            yield inputs, shape
            yield inputs.with_text(negative), shape


def write(family: Encoders, inputs: Iterable[tuple[ConditionInputs, Shape]], folder: Path) -> int:
    """Encodes each distinct prompt once and writes the conditions into `folder`. Returns the number of distinct
    prompts."""
    folder.mkdir(parents=True, exist_ok=True)
    distinct = {condition_key(item, shape): (item, shape) for item, shape in inputs}
    files: dict[str, str] = {}
    with display.work("encoding prompts", len(distinct)) as work:
        for start in range(0, len(distinct), PER_FILE):
            keys, file = list(distinct)[start : start + PER_FILE], f"embeddings-{start // PER_FILE:05}.safetensors"
            tensors: dict[str, Tensor] = {}
            for shape, shape_keys in by_shape({key: distinct[key] for key in keys}).items():
                conditions = family.encode([distinct[key][0] for key in shape_keys], shape)
                for key, condition in zip(shape_keys, conditions, strict=True):
                    tensors |= {f"{key}.{name}": value.cpu().contiguous() for name, value in condition.items()}
                    work.advance()
            files |= dict.fromkeys(keys, file)
            save_file(tensors, folder / file)
    index = {"pipeline": type(family.pipe).__name__, "text_tokens": family.text_tokens, "files": files}
    (folder / INDEX).write_text(json.dumps(index))
    use_default_permissions(folder)
    return len(distinct)


def by_shape(inputs: Mapping[str, tuple[ConditionInputs, Shape]]) -> dict[Shape, list[str]]:
    """Groups keys by the shape of latents for which they are encoded. Conditions of prompts without images do not
    depend on the shape, and are listed under the first shape."""
    first_shape = next(iter(inputs.values()))[1]
    keys: dict[Shape, list[str]] = {}
    for key, (item, shape) in inputs.items():
        keys.setdefault(shape if item.images else first_shape, []).append(key)
    return keys


class Embeddings:
    """The conditions (prompt embeddings) in a folder that `mmrl embed` wrote, read from disk at each use."""

    def __init__(self, folder: str, pipeline: str, text_tokens: int | None) -> None:
        """pipeline: the class name of the pipeline. text_tokens: its token limit. Raises UserError if the folder was
        written for other values."""
        self.folder = Path(folder)
        if not (self.folder / INDEX).is_file():
            raise UserError(f"model.embeddings={folder} has no {INDEX}; write the folder with mmrl embed")
        index = json.loads((self.folder / INDEX).read_text())
        for name, value in (("pipeline", pipeline), ("text_tokens", text_tokens)):
            if index[name] != value:
                raise UserError(
                    f"model.embeddings={folder} was written with {name}={index[name]}, but this job has {value}; write "
                    "it again with mmrl embed"
                )
        self._files: dict[str, str] = index["files"]

    def find(self, inputs: Sequence[ConditionInputs], shape: Shape) -> list[Condition]:
        """Returns one condition per input, on the CPU. Raises UserError for a prompt that was not embedded, or a
        damaged file."""
        return [self._read(item, condition_key(item, shape)) for item in inputs]

    def _read(self, inputs: ConditionInputs, key: str) -> Condition:
        """Reads one condition from its file. key: see `condition_key`. Raises UserError as `find` does."""
        if key not in self._files:
            raise UserError(
                f"prompt {inputs.text!r} is not in model.embeddings={self.folder}; write it again with mmrl embed and "
                "this job's task, denoising.negative_prompt and resolution"
            )
        try:
            with safe_open(self.folder / self._files[key], "pt") as file:
                names = [name for name in file.keys() if name.startswith(f"{key}.")]  # noqa: SIM118
                return {name.partition(".")[2]: file.get_tensor(name) for name in names}
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"model.embeddings: {self.folder / self._files[key]} cannot be read: {error}; write it again with "
                "mmrl embed"
            ) from None
