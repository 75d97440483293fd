"""Prompt embeddings on disk: a pipeline's encoders write them once, and jobs read them without the encoders."""

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
from mmrl.runtime.files import use_default_mode
from mmrl.runtime.progress import display

if TYPE_CHECKING:
    from mmrl.protocols.parts import Task

INDEX = "embeddings.json"
PER_FILE = 64  # prompts in a file, which are encoded as one batch


class Encoders(Protocol):
    """The part of a pipeline family that encodes prompts."""

    text_tokens: int | None

    @property
    def pipe(self) -> object: ...

    def encode(self, inputs: Sequence[ConditionInputs], shape: Shape) -> list[Condition]: ...


class PromptedPolicy(Protocol):
    """The part of a policy that decides what is encoded."""

    denoising: Denoising | DenoisingDemonstrations
    shape: Shape
    evaluation_shape: Shape


def key_of(inputs: ConditionInputs, shape: Shape) -> str:
    """Returns the key of a condition: a hash of the text, the images' content, and with images the latents' shape."""
    content = json.dumps([inputs.text, inputs.digest, list(shape) if inputs.images else []])
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def condition_inputs_of(task: Task, policy: PromptedPolicy) -> Iterator[tuple[ConditionInputs, Shape]]:
    """Yields all inputs that a job encodes, with the latents' shape: training and evaluation prompts, and the negative
    prompt of each."""
    negative = policy.denoising.negative_prompt
    for source, shape in ((task.train, policy.shape), (task.evaluation, policy.evaluation_shape)):
        for prompt in () if source is None else (source[index] for index in range(len(source))):
            inputs = ConditionInputs.of(prompt)
            yield inputs, shape
            yield inputs.with_text(negative), shape


def write(family: Encoders, inputs: Iterable[tuple[ConditionInputs, Shape]], folder: Path) -> int:
    """Encodes each prompt once and writes the conditions into `folder`. Returns the number of distinct prompts."""
    folder.mkdir(parents=True, exist_ok=True)
    distinct = {key_of(one, shape): (one, shape) for one, shape in inputs}
    files: dict[str, str] = {}
    with display.work("encoding prompts", len(distinct)) as work:
        for start in range(0, len(distinct), PER_FILE):
            keys, file = list(distinct)[start : start + PER_FILE], f"embeddings-{start // PER_FILE:05}.safetensors"
            tensors: dict[str, Tensor] = {}
            for shape, some in by_shape({key: distinct[key] for key in keys}).items():
                for key, condition in zip(some, family.encode([distinct[key][0] for key in some], shape), strict=True):
                    tensors |= {f"{key}.{name}": value.cpu().contiguous() for name, value in condition.items()}
                    work.advance()
            files |= dict.fromkeys(keys, file)
            save_file(tensors, folder / file)
    index = {"pipeline": type(family.pipe).__name__, "text_tokens": family.text_tokens, "files": files}
    (folder / INDEX).write_text(json.dumps(index))
    use_default_mode(folder)
    return len(distinct)


def by_shape(inputs: Mapping[str, tuple[ConditionInputs, Shape]]) -> dict[Shape, list[str]]:
    """Groups keys by the shape of latents that they are encoded for. Conditions of prompts without images do not depend
    on it; they join the first shape."""
    first = next(iter(inputs.values()))[1]
    keys: dict[Shape, list[str]] = {}
    for key, (one, shape) in inputs.items():
        keys.setdefault(shape if one.images else first, []).append(key)
    return keys


class Embeddings:
    """The conditions in a folder that `write` filled, read from disk at each use."""

    def __init__(self, folder: str, pipeline: str, text_tokens: int | None) -> None:
        """Raises UserError unless the folder was written for such a pipeline and token limit."""
        self.folder = Path(folder)
        if not (self.folder / INDEX).is_file():
            raise UserError(f"model.embeddings={folder}: no {INDEX} there; write it with mmrl embed")
        index = json.loads((self.folder / INDEX).read_text())
        for name, value in (("pipeline", pipeline), ("text_tokens", text_tokens)):
            if index[name] != value:
                raise UserError(
                    f"model.embeddings={folder} was written with {name}={index[name]}, this job has {value}; write it "
                    "anew with mmrl embed"
                )
        self._files: dict[str, str] = index["files"]

    def find(self, inputs: Sequence[ConditionInputs], shape: Shape) -> list[Condition]:
        """Returns one condition per input, on the CPU. Raises UserError for a prompt that was not embedded, or a
        damaged file."""
        return [self._read(one, key_of(one, shape)) for one in inputs]

    def _read(self, inputs: ConditionInputs, key: str) -> Condition:
        if key not in self._files:
            raise UserError(
                f"prompt {inputs.text!r} is not in model.embeddings={self.folder}; write it anew with mmrl embed and "
                "this job's task, denoising.negative_prompt and resolution"
            )
        try:
            with safe_open(self.folder / self._files[key], "pt") as file:
                names = [name for name in file.keys() if name.startswith(f"{key}.")]  # noqa: SIM118
                return {name.partition(".")[2]: file.get_tensor(name) for name in names}
        except (OSError, SafetensorError) as error:
            raise UserError(f"model.embeddings: {self.folder / self._files[key]} can not be read: {error}") from None
