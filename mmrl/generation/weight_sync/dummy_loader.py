"""A load format of vLLM for engines that get their weights after their start. Importing this module registers it."""

from __future__ import annotations

import torch
from vllm.config import ModelConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from mmrl.generation.weight_sync import receiver


@register_model_loader(receiver.UNLOADED)
class Unloaded(BaseModelLoader):
    """A loader that fills parameters with a pattern. vLLM's own "dummy" format also overwrites buffers, which are never
    synchronised."""

    def download_model(self, model_config: ModelConfig) -> None:
        pass

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(receiver.ramp(parameter))


class UnloadedArrival(receiver.Arrival):
    """`Arrival` for workers that start without weights."""
