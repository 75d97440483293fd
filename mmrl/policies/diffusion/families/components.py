"""The components of a diffusers pipeline: moves them between devices and saves them; and a cache of text embeddings."""

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
BASE_FILE = "mmrl_base.json"  # the file beside LoRA weights that names their base pipeline


class DiffusersPipeline(Protocol):
    """Any pipeline of diffusers; its attributes depend on its class."""

    def __getattr__(self, name: str, /) -> Any: ...


class PipelineParts:
    """The components of a pipeline. The trained one stays on its device; the others are moved there only while they
    run."""

    def __init__(self, pipe: DiffusersPipeline, trained: str) -> None:
        """trained: name of the component that is trained, such as "transformer"."""
        self.pipe, self.trained = pipe, trained
        self.module: Any = pipe.components[trained]
        self._visitors: set[str] = set()  # components that are on the device now

    @property
    def device(self) -> torch.device:
        """The device of the trained network."""
        return next(self.module.parameters()).device

    @contextmanager
    def visiting(self, *names: str, stay: bool = False) -> Iterator[None]:
        """Moves components to the network's device for the duration of the context, and then, unless `stay`, back to
        the CPU. In nested contexts a component stays until the outermost one that moved it ends."""
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
        """Saves LoRA weights for `pipe.load_lora_weights(folder)`, and the name of the base pipeline in BASE_FILE.
        state: the state dict of the network."""
        from peft import get_peft_model_state_dict  # takes a second to import

        layers = get_peft_model_state_dict(self.module, state_dict=state)
        settings = self.module.peft_config["default"].to_dict()
        self.pipe.save_lora_weights(
            folder,
            **{f"{self.trained}_lora_layers": layers, f"{self.trained}_lora_adapter_metadata": settings},
        )
        (folder / BASE_FILE).write_text(json.dumps({"base": base}))

    def save_whole(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Saves the full pipeline, which `DiffusionPipeline.from_pretrained(folder)` loads. state: the gathered state
        dict of the network."""
        with torch.device("meta"):  # `module` itself may hold only a shard
            network = type(self.module).from_config(self.module.config)
        network.load_state_dict(state, assign=True)
        self.pipe.register_modules(**{self.trained: network})
        try:
            with quiet():
                self.pipe.save_pretrained(folder)
        finally:
            self.pipe.register_modules(**{self.trained: self.module})


class TextEmbeddingCache:
    """A cache of text embeddings, for prompts with the same text and different images."""

    def __init__(self, encode: Callable[[str], dict[str, Tensor]]) -> None:
        self.encode = encode
        self._cache: OrderedDict[str, dict[str, Tensor]] = OrderedDict()

    def embed(self, text: str) -> dict[str, Tensor]:
        """Returns the embeddings of a text by name, encoded or cached."""
        if text not in self._cache:
            self._cache[text] = self.encode(text)
        self._cache.move_to_end(text)
        while len(self._cache) > CACHED_TEXTS:
            self._cache.popitem(last=False)
        return self._cache[text]


@contextmanager
def quiet() -> Iterator[None]:
    """Silences the warnings of diffusers about components that are None, as in a pipeline without text encoders."""
    log = logging.getLogger("diffusers.pipelines.pipeline_utils")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)
