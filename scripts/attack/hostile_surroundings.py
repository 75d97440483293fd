"""Runs `mmrl ...` in this process while its surroundings fail: a disk that fills up, a clock that jumps, files of
another user, or a kill at a chosen moment. Each function is the target of a process of its own. At the end: a reward
that changes or ends the process in which it runs."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import random
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from mmrl.collection import partial_rollouts
from mmrl.evaluation import evaluate
from mmrl.rollouts import Sample
from tests.collection import test_partial_rollouts
from tests.whole_runs.parts import command, spread

BALLAST = "ballast"  # the file that fills a disk
WRITES = ("open", "os.mkdir", "os.rename")  # events of the audit hooks of Python
CAPABILITIES_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3 of linux/capability.h
IGNORE_MODES = (1, 2, 3)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER


def on_full_disk(disk: str, pattern: str, *arguments: str) -> None:
    """The disk is full from the moment on when a path that holds the pattern is first written, made or renamed to."""
    fired: list[str] = []

    def look(event: str, values: tuple[object, ...]) -> None:
        if event not in WRITES or fired:
            return
        named = values[1] if event == "os.rename" else values[0]
        path = os.fsdecode(named) if isinstance(named, str | bytes | Path) else ""
        writes = event != "open" or (isinstance(values[2], int) and bool(values[2] & (os.O_WRONLY | os.O_RDWR)))
        if writes and path.startswith(disk) and re.search(pattern, path):
            fired.append(path)
            fill(Path(disk) / BALLAST)

    sys.addaudithook(look)
    command(*arguments)


def fill(path: Path) -> None:
    """Writes to a file until the disk holds not one more byte of it."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    for size in (1 << 20, 1 << 12, 1):
        with suppress(OSError):
            while os.write(file, bytes(size)) == size:
                pass
    os.close(file)


def with_jumping_clock(seconds: float, *arguments: str) -> None:
    """The time of day jumps by so many seconds after each second reading; the monotonic clock does not."""
    usual, jumps = time.time, [0]

    def jumping() -> float:
        jumps[0] += 1
        return usual() + (seconds if jumps[0] // 2 % 2 else 0.0)

    time.time = jumping
    command(*arguments)


def as_usual_user(*arguments: str) -> None:
    """Root, too, may read and write only what modes of files allow."""
    if os.geteuid() == 0:
        give_up_capabilities()
    command(*arguments)


def give_up_capabilities() -> None:
    """Raises OSError where the system does not allow it."""
    library = ctypes.CDLL(None, use_errno=True)
    header, sets = (ctypes.c_uint32 * 2)(CAPABILITIES_VERSION, 0), (ctypes.c_uint32 * 6)()
    if library.capget(header, sets):
        raise OSError(ctypes.get_errno(), "capget")
    for index in range(3):  # effective, permitted and inheritable of the capabilities below 32
        sets[index] &= ~sum(1 << number for number in IGNORE_MODES)
    if library.capset(header, sets):
        raise OSError(ctypes.get_errno(), "capset")


def killed_in_evaluation(count: int, marker: str, *arguments: str) -> None:
    """Killed by its micro-batch number `count` of held-out prompts, unless the marker is there."""
    evaluate.rollout_seeds = dies_at(count, marker, evaluate.rollout_seeds)
    command(*arguments)


def partial_rollouts_killed(count: int, marker: str, folder: str) -> None:
    """A run with partial rollouts, whose engine is a copy of the model; killed when a pool has given out the responses
    of its round number `count`, with others unfinished, unless the marker is there."""
    partial_rollouts.Pool.take = dies_at(count, marker, partial_rollouts.Pool.take)
    run = test_partial_rollouts.start(Path(folder), "checkpoint.every=1", "optim.ema=0.5")
    run.trainer.resume()
    run.trainer.train()
    run.trainer.run.close()


def dies_at(count: int, marker: str, usual: Callable) -> Callable:  # type: ignore[type-arg]
    """Returns a function that does the usual, and at its call number `count` kills the process behind it."""
    calls = [0]

    def call(*arguments: object, **options: object) -> object:
        result = usual(*arguments, **options)
        calls[0] += 1
        if calls[0] == count and not Path(marker).exists():
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return call


# --- a reward that changes or ends its process ---

ENDS_AT = 40  # number of the sample at which the process ends; a step has 16
scored = [0]


def _fork() -> None:
    """Leaves a copy of this process behind."""
    if os.fork() == 0:
        time.sleep(600)
        os._exit(0)


CHANGES: dict[str, Callable[[], object]] = {
    "seeds": lambda: (random.seed(0), np.random.seed(0), torch.manual_seed(0)),
    "grad mode": lambda: torch.set_grad_enabled(False),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "recursion limit": lambda: sys.setrecursionlimit(5000),
    "directory": lambda: os.chdir("/"),
    "environment": os.environ.clear,
    "warnings are errors": lambda: warnings.simplefilter("error"),
    "no garbage collection": gc.disable,
    "no messages": logging.disable,
    "threads": lambda: threading.Thread(target=time.sleep, args=(600,), daemon=True).start(),
    "a fork": lambda: scored[0] % 16 or _fork(),
    "a flood of text": lambda: print("x" * 10_000),
    "open files": lambda: os.open(os.devnull, os.O_RDONLY),
}
ENDS: dict[str, Callable[[], object]] = {
    "a segmentation fault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "an alarm": lambda: (signal.alarm(1), time.sleep(600)),
    "exit(0) of C": lambda: ctypes.CDLL(None).exit(0),
    "_exit(0) of C": lambda: ctypes.CDLL(None)._exit(0),
}


def changing(sample: Sample, what: list[str]) -> float:
    """A reward that makes some of the CHANGES at every sample."""
    scored[0] += 1
    for name in what:
        CHANGES[name]()
    return spread(sample)


def ending(sample: Sample, what: str, marker: str) -> float:
    """A reward that makes one of the ENDS at its sample number ENDS_AT, unless the marker is there."""
    scored[0] += 1
    if what and scored[0] == ENDS_AT and not Path(marker).exists():
        Path(marker).touch()
        ENDS[what]()
    return spread(sample)
