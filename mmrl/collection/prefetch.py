"""Prompts of the next step are read, and encoded for the policy, by processes while this step is trained on."""

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
held: list[Any] = []  # of a process that reads: the source, and the encoder or None


class ReadAhead:
    """A source whose prompts are ready when they are asked for, if they were expected.

    Which prompt is where, and what is said of rows that can not be used, follows from `source` alone: a process reads
    the prompt of a place or none at all, which this process then reads for itself. So a run depends neither on how many
    processes there are nor on what they were told to expect, and there is nothing to save.
    """

    def __init__(self, source: ReadableSource, encoder: Callable[[Prompt], Any] | None) -> None:
        """encoder: what else is made of a prompt; see `Encoding`."""
        self.source, self.encoder = source, encoder
        self._pool: ProcessPoolExecutor | None = None
        self._coming: dict[int, Future[bytes | str]] = {}
        self._encoded: dict[int, tuple[Prompt, Any]] = {}  # by the prompt's identity
        self._told = False  # that something could not be read ahead

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Prompt:
        future = self._coming.pop(index, None)
        if future is None:
            return self.source[index]
        found = self._result(future)
        if isinstance(found, str):
            prompt = self.source[index]
            self._tell(index, prompt, found)
            return prompt
        prompt, made = pickle.loads(found)
        if made is not None:
            self._encoded[id(prompt)] = (prompt, made)
        return prompt

    def expect(self, indices: Sequence[int]) -> None:
        """These will be asked for next, in this order; all else that was expected is given up."""
        self._encoded.clear()
        for index in self._coming.keys() - set(indices):
            self._coming.pop(index).cancel()
        if self._pool is None:
            self._pool = self._started()
        for index in dict.fromkeys(indices):
            if index not in self._coming:
                self._coming[index] = self._pool.submit(_read, index)

    def encoded(self, prompt: Prompt) -> Any | None:
        """What the encoder made of this very prompt, which is given away; None where it was not read ahead."""
        _, made = self._encoded.pop(id(prompt), (None, None))
        return made

    def close(self) -> None:
        """Ends the processes. What is asked for later is read here."""
        self._coming.clear()
        self._encoded.clear()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def _tell(self, index: int, prompt: Prompt, reason: str) -> None:
        """Says once why processes are of no use, where this one can read what they could not. A row that is not used is
        told by the source, and a prompt that can not be encoded by the policy."""
        if not (self._told or reason.startswith(RowError.__name__)):
            self._told = True
            log.warning("prompt %s (place %d) was not read ahead, but in time: %s", prompt.id, index, reason)

    def _started(self) -> ProcessPoolExecutor:
        # Not by fork: this process may have a GPU, and threads.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, type(self.source).__module__, type(self.encoder).__module__])
        return ProcessPoolExecutor(self.source.readers, context, _begin, (self.source, self.encoder))

    def _result(self, future: Future[bytes | str]) -> bytes | str:
        try:
            return future.result()
        except BrokenProcessPool as error:
            raise UserError(
                f"a process that reads prompts ahead did not start, or was killed ({error}); are there so many cores, "
                "and memory for each? Lower task.data.readers, or set it to 0"
            ) from None


def _begin(source: ReadableSource, encoder: Callable[[Prompt], Any] | None) -> None:
    """What a process does first. Signals are for the trainer, which ends this process when it has seen to them."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_trainer, daemon=True).start()
    torch.set_num_threads(1)  # there are several of these
    held[:] = [source, encoder]


def _end_with_trainer() -> None:
    trainer = multiprocessing.parent_process()
    assert trainer is not None
    trainer.join()
    os._exit(0)


def _read(index: int) -> bytes | str:
    """The prompt of a place and what the encoder makes of it; for one that can not be read, encoded or sent, why."""
    source, encoder = held
    try:
        prompt = source.read(index)
        return pickle.dumps((prompt, None if encoder is None else encoder(prompt)), pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # the trainer's process reads it for itself, and meets the same or says that
        return describe_error(error)
