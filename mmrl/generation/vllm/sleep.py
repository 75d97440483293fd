"""vLLM's sleep mode, by which generation and training take turns with the memory of a GPU."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm import LLM

WEIGHTS, CACHE = "weights", "kv_cache"  # vLLM's names of what it can wake one by one


class SleepMode:
    """Puts a colocated vLLM engine to sleep and wakes it in two stages: weights first, which are then replaced, and
    when what that took is free again the cache of keys and values, which is most of the engine's share.

    Before each stage torch's unused memory is given back to the GPU: vLLM maps its own outside of torch's allocator,
    which otherwise keeps what the update needed at most.
    """

    def __init__(self, llm: LLM, *, keep_weights: bool) -> None:
        """llm: a `vllm.LLM`. keep_weights: asleep they lie in host memory (vLLM's level 1), for they do not come again
        with every synchronisation; else they are dropped (level 2; buffers are kept)."""
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
