"""The components of a diffusers pipeline: their devices, a cache of text embeddings, and how weights are saved."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

CACHED_TEXTS = 64  # texts whose embeddings are cached
BASE_FILE = "mmrl_base.json"  # names the base pipeline of the LoRA weights in its folder


class DiffusersPipeline(Protocol):
    """Any pipeline of diffusers; which components and options it has depends on its class."""

    def __getattr__(self, name: str, /) -> Any: ...


class PipelineParts:
    """A pipeline's components. The trained one stays on its device; the others are on the CPU except while they run."""

    def __init__(self, pipe: DiffusersPipeline, trained: str) -> None:
        self.pipe, self.trained = pipe, trained
        self.module: Any = pipe.components[trained]
        self._visitors: set[str] = set()  # components that are on the device now

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @contextmanager
    def visiting(self, *names: str, stay: bool = False) -> Iterator[None]:
        """Moves the named components to the network's device and, unless `stay`, back to the CPU afterwards, also after
        an error."""
        new = [name for name in names if self.pipe.components[name] is not None and name not in self._visitors]
        self._visitors.update(new)
        try:
            for name in new:
                self.pipe.components[name].to(self.device)
            yield
        finally:
            self._visitors.difference_update(new)
            for name in new if not stay else []:
                self.pipe.components[name].to("cpu")

    def save_adapter(self, folder: Path, state: dict[str, Tensor], base: str) -> None:
        """Writes LoRA weights that `pipe.load_lora_weights(folder)` loads, and the base pipeline's name in
        `BASE_FILE`."""
        from peft import get_peft_model_state_dict  # it is loaded already

        layers = get_peft_model_state_dict(self.module, state_dict=state)
        settings = self.module.peft_config["default"].to_dict()
        self.pipe.save_lora_weights(
            folder,
            **{f"{self.trained}_lora_layers": layers, f"{self.trained}_lora_adapter_metadata": settings},
        )
        (folder / BASE_FILE).write_text(json.dumps({"base": base}))

    def save_whole(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Writes the whole pipeline, for `DiffusionPipeline.from_pretrained(folder)`."""
        with torch.device("meta"):  # `module` itself may hold only a shard
            whole = type(self.module).from_config(self.module.config)
        whole.load_state_dict(state, assign=True)
        self.pipe.register_modules(**{self.trained: whole})
        try:
            with quiet():
                self.pipe.save_pretrained(folder)
        finally:
            self.pipe.register_modules(**{self.trained: self.module})


class TextEmbeddingCache:
    """A cache of text embeddings, for prompts that share a text but not their image."""

    def __init__(self, encode: Callable[[str], dict[str, Tensor]]) -> None:
        self.encode = encode
        self._cache: OrderedDict[str, dict[str, Tensor]] = OrderedDict()

    def of(self, text: str) -> dict[str, Tensor]:
        if text not in self._cache:
            self._cache[text] = self.encode(text)
        self._cache.move_to_end(text)
        while len(self._cache) > CACHED_TEXTS:
            self._cache.popitem(last=False)
        return self._cache[text]


@contextmanager
def quiet() -> Iterator[None]:
    """Silences diffusers' warning about every component that is None, as in a pipeline without its encoders."""
    log = logging.getLogger("diffusers.pipelines.pipeline_utils")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)
