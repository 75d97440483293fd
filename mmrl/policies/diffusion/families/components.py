"""The parts of a diffusers pipeline: where they are, what is kept of the encoders, and how they are written."""

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

KEPT_INSTRUCTIONS = 64  # embeddings of instructions that are kept for other images
BASE_FILE = "mmrl_base.json"  # beside saved LoRA weights: the pipeline that they belong to


class DiffusersPipeline(Protocol):
    """Any pipeline of diffusers; which components and options it has depends on its class."""

    def __getattr__(self, name: str, /) -> Any: ...


class PipelineParts:
    """A pipeline's components. All but the one that is trained wait on the CPU and visit its device."""

    def __init__(self, pipe: DiffusersPipeline, trained: str) -> None:
        self.pipe, self.trained = pipe, trained
        self.module: Any = pipe.components[trained]
        self._visitors: set[str] = set()  # components that are on the device for a while

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @contextmanager
    def visiting(self, *names: str, stay: bool = False) -> Iterator[None]:
        """The named components on the network's device, and unless they stay back on the CPU afterwards, also after an
        error."""
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
        """What `pipe.load_lora_weights(folder)` takes, and the name of the base beside it."""
        from peft import get_peft_model_state_dict  # it is loaded already

        layers = get_peft_model_state_dict(self.module, state_dict=state)
        settings = self.module.peft_config["default"].to_dict()
        self.pipe.save_lora_weights(
            folder,
            **{f"{self.trained}_lora_layers": layers, f"{self.trained}_lora_adapter_metadata": settings},
        )
        (folder / BASE_FILE).write_text(json.dumps({"base": base}))

    def save_whole(self, folder: Path, state: dict[str, Tensor]) -> None:
        """The whole pipeline, as `DiffusionPipeline.from_pretrained(folder)` takes it."""
        with torch.device("meta"):  # `module` itself may hold only a shard
            whole = type(self.module).from_config(self.module.config)
        whole.load_state_dict(state, assign=True)
        self.pipe.register_modules(**{self.trained: whole})
        try:
            with quiet():
                self.pipe.save_pretrained(folder)
        finally:
            self.pipe.register_modules(**{self.trained: self.module})


class KeptTexts:
    """What an encoder says of texts, kept for the images that share their instruction."""

    def __init__(self, encode: Callable[[str], dict[str, Tensor]]) -> None:
        self.encode = encode
        self._said: OrderedDict[str, dict[str, Tensor]] = OrderedDict()

    def of(self, text: str) -> dict[str, Tensor]:
        if text not in self._said:
            self._said[text] = self.encode(text)
        self._said.move_to_end(text)
        while len(self._said) > KEPT_INSTRUCTIONS:
            self._said.popitem(last=False)
        return self._said[text]


@contextmanager
def quiet() -> Iterator[None]:
    """Without diffusers' word on every component that is None, which belongs to a pipeline that lacks an encoder."""
    log = logging.getLogger("diffusers.pipelines.pipeline_utils")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)
