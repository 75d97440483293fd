"""Reads the prompts of the next step in other processes, and encodes them for the policy, during the current step."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from mmrl.errors import UserError, describe_error
from mmrl.protocols.parts import ReadableSource
from mmrl.rollouts import Prompt
from mmrl.runtime.jsonl import RowError

log = logging.getLogger(__name__)
reader_inputs: list[Any] = []  # in a reading process: the source, and the encoder or None


class ReadAhead:
    """A source of prompts that reads some of them ahead of time in other processes.

    If a process fails to read a prompt, this process reads it when it is needed. So prompts and warnings about unusable
    rows depend on `source` alone, not on the processes, and checkpoints hold no state of them.
    """

    def __init__(self, source: ReadableSource, encoder: Callable[[Prompt], Any] | None) -> None:
        """encoder: encodes a prompt for the policy; see `Encoding`."""
        self.source, self.encoder = source, encoder
        self._pool: ProcessPoolExecutor | None = None
        self._futures: dict[int, Future[bytes | str]] = {}
        self._encoded: dict[int, tuple[Prompt, Any]] = {}  # by `id` of the prompt
        self._warned = False  # whether a warning was logged

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Prompt:
        """Returns the prompt of an index: the one that a process has read ahead, else read here. Its encoding stays for
        `encoded`."""
        future = self._futures.pop(index, None)
        if future is None:
            return self.source[index]
        outcome = self._result(future)
        if isinstance(outcome, str):  # the reason why the process could not read it
            prompt = self.source[index]
            self._warn(index, prompt, outcome)
            return prompt
        prompt, encoded = pickle.loads(outcome)
        if encoded is not None:
            self._encoded[id(prompt)] = (prompt, encoded)
        return prompt

    def prefetch(self, indices: Sequence[int]) -> None:
        """Starts reading the prompts of these indices, in this order, and cancels all others that are being read."""
        self._encoded.clear()
        for index in self._futures.keys() - set(indices):
            self._futures.pop(index).cancel()
        if self._pool is None:
            self._pool = self._start_pool()
        for index in dict.fromkeys(indices):
            if index not in self._futures:
                self._futures[index] = self._pool.submit(_read, index)

    def encoded(self, prompt: Prompt) -> Any | None:
        """Returns the encoder's output for this prompt object, once; None where it was not read ahead."""
        _, output = self._encoded.pop(id(prompt), (None, None))
        return output

    def close(self) -> None:
        """Ends the processes. Later prompts are read in this process."""
        self._futures.clear()
        self._encoded.clear()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def _warn(self, index: int, prompt: Prompt, reason: str) -> None:
        """Logs once why a reading process could not read a prompt that this process can read. Bad rows are not logged
        here: the source reports them itself."""
        if not (self._warned or reason.startswith(RowError.__name__)):
            self._warned = True
            log.warning(
                "prompt %s (index %d) could not be read ahead by a process of task.data.readers: %s; the training "
                "process reads such prompts itself, while training waits (this is logged once)",
                prompt.id,
                index,
                reason,
            )

    def _start_pool(self) -> ProcessPoolExecutor:
        """Starts the reading processes."""
        # Forking is not safe, since this process may use a GPU and threads.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, type(self.source).__module__, type(self.encoder).__module__])
        return ProcessPoolExecutor(self.source.readers, context, _begin, (self.source, self.encoder))

    def _result(self, future: Future[bytes | str]) -> bytes | str:
        """Waits for a result of `_read`. Raises UserError if a reading process was killed."""
        try:
            return future.result()
        except BrokenProcessPool as error:
            raise UserError(
                f"a process that reads prompts ahead did not start or was killed ({error}), perhaps for lack of "
                "memory; lower task.data.readers, or set it to 0"
            ) from None


def _begin(source: ReadableSource, encoder: Callable[[Prompt], Any] | None) -> None:
    """Initializes a reading process. It ignores signals, since the trainer handles them and ends this process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_trainer, daemon=True).start()
    torch.set_num_threads(1)  # several reading processes share the CPU
    reader_inputs[:] = [source, encoder]


def _end_with_trainer() -> None:
    """Ends this process when the trainer's process ends."""
    trainer = multiprocessing.parent_process()
    assert trainer is not None
    trainer.join()
    os._exit(0)


def _read(index: int) -> bytes | str:
    """Returns the pickled prompt and its encoding, or a message where it cannot be read, encoded or pickled."""
    source, encoder = reader_inputs
    try:
        prompt = source.read(index)
        return pickle.dumps((prompt, None if encoder is None else encoder(prompt)), pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # the trainer's process reads it again, and raises or logs this message
        return describe_error(error)
