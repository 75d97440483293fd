"""The load format of engines whose weights come after their start. It is registered where this module is imported; a
worker of a server imports it for the class below."""

from __future__ import annotations

import torch
from vllm.config import ModelConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from mmrl.generation.weight_sync import receiver


@register_model_loader(receiver.UNLOADED)
class Unloaded(BaseModelLoader):
    """vLLM's own "dummy" writes random numbers into buffers too, which no synchronisation brings back."""

    def download_model(self, model_config: ModelConfig) -> None:
        pass

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(receiver.ramp(parameter))


class UnloadedArrival(receiver.Arrival):
    """The extension of workers that start without weights."""
