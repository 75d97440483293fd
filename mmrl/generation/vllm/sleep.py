"""vLLM's sleep mode, by which generation and training use the memory of a GPU in turn."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm import LLM

WEIGHTS, CACHE = "weights", "kv_cache"  # vLLM's names of the parts that can be woken separately


class SleepMode:
    """Puts a colocated vLLM engine to sleep, and wakes it in two stages. First the weights, which are then replaced;
    then the key-value cache, which takes most of the engine's memory.

    Before each stage torch returns its unused memory to the GPU: vLLM allocates outside of torch's allocator, which
    would otherwise keep the peak memory of the update.
    """

    def __init__(self, llm: LLM, *, keep_weights: bool) -> None:
        """keep_weights: whether the sleeping engine keeps its weights in host memory (vLLM's level 1), because not
        every synchronisation sends them; otherwise it drops them (level 2, which keeps buffers)."""
        self.llm, self.level = llm, 1 if keep_weights else 2

    def sleep(self) -> None:
        self.llm.sleep(level=self.level)

    def wake_weights(self) -> None:
        self._wake(WEIGHTS)

    def wake_cache(self) -> None:
        self._wake(CACHE)

    def _wake(self, part: str) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        self.llm.wake_up(tags=[part])
