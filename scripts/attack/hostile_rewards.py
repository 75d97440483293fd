"""Rewards that misbehave as the response says: `in_process` in the trainer, `isolated` in a worker process."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import resource
import signal
import struct
import sys
import threading
import time
from pathlib import Path


class Awkward(Exception):
    def __str__(self):
        raise RuntimeError("not even this")


class Command:
    """Its pickle creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)

    def __float__(self):
        return 1.0


def recurse(depth=0):
    return recurse(depth + 1)


def forever():
    while True:
        pass


def children(count, own_session):
    for _ in range(count):
        if os.fork() == 0:
            if own_session:
                os.setsid()
            time.sleep(600)
            os._exit(0)


def daemon():
    """Forks twice, so that its parent is not the verifier."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)


def generations(left):
    """Doubles itself `left` times."""
    for _ in range(left):
        os.fork()
    time.sleep(600)


def forge(data):
    """Sends its own answer on every socket that it can find."""
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, data)
        except OSError:
            continue
    time.sleep(600)


def frame(text):
    return struct.pack("!Q", len(text)) + text


def throw(error):
    raise error


IN_PROCESS = {
    "raise": lambda: throw(KeyError("x")),
    "awkward": lambda: throw(Awkward()),
    "assert": lambda: throw(AssertionError()),
    "memory": lambda: throw(MemoryError()),
    "recurse": recurse,
    "stop": lambda: throw(StopIteration()),
    "generator exit": lambda: throw(GeneratorExit()),
    "cancelled": lambda: throw(asyncio.CancelledError()),
    "exit": lambda: sys.exit(3),
    "exit 0": lambda: sys.exit(),
    "interrupt": lambda: throw(KeyboardInterrupt()),
    "timeout": lambda: throw(TimeoutError()),
    "spin": forever,
    "sleep": lambda: time.sleep(600),
    "none": lambda: None,
    "nan": lambda: float("nan"),
    "infinite": lambda: -float("inf"),
    "huge float": lambda: 1e300,
    "huge integer": lambda: 10**400,
}
ISOLATED = {
    **IN_PROCESS,
    "os._exit": lambda: os._exit(3),
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "stop itself": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "deaf": lambda: [signal.signal(s, signal.SIG_IGN) for s in (1, 2, 3, 13, 14, 15)] and forever(),
    "close descriptors": lambda: os.closerange(0, 256),
    "memory hog": lambda: len(bytearray(64 << 30)),
    "20 children": lambda: children(20, False),
    "20 children with sessions": lambda: children(20, True),
    "20 children and a hang": lambda: children(20, True) or forever(),
    "daemon": daemon,
    "daemon and a hang": lambda: daemon() or forever(),
    "64 by doubling": lambda: generations(6),
    "64 by doubling, own sessions": lambda: os.fork() and time.sleep(600) or os.setsid() or generations(5),
    "kill the fork server": lambda: os.kill(os.getppid(), signal.SIGKILL) or forever(),
    "stop the fork server": lambda: os.kill(os.getppid(), signal.SIGSTOP) or forever(),
    "raise limits": lambda: resource.setrlimit(resource.RLIMIT_AS, (-1, -1)) or len(bytearray(64 << 30)),
    "garbage": lambda: forge(b"\xff" * 64),
    "long answer": lambda: forge(struct.pack("!Q", 1 << 62)),
    "deep answer": lambda: forge(frame(b"[" * 60_000)),
    "no object": lambda: forge(frame(b"7")),
    "other number": lambda: forge(frame(json.dumps({"number": 99, "value": 1.0}).encode())),
    "pickle as an answer": lambda: forge(frame(b"\x80\x04cposix\nsystem\n(S'true'\ntR.")),
    "drip": lambda: [forge_once(b"\0") or time.sleep(0.2) for _ in range(999)],
}
VALUES = {  # of a verifier that is left alone
    "threads": lambda: [threading.Thread(target=time.sleep, args=(600,), daemon=True).start() for _ in range(50)] and 1,
    "prints": lambda: print(" " * 216_000) or 1.0,
    "change folder": lambda: os.chdir("/") or os.environ.clear() or 1.0,
    "close standard streams": lambda: [os.close(d) for d in (0, 1, 2)] and 1.0,
}
NO_NUMBERS = {"text": lambda: "seven", "list": lambda: [1.0], "complex": lambda: 1j}


def forge_once(data):
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, data)
        except OSError:
            continue


def do(sample, known):
    word, _, rest = sample.response.partition(":")
    if word == "secrets":
        return float(sum(value == "not to be seen" for value in os.environ.values()))
    if word == "command":
        return Command(rest)
    return known[word]() if word in known else 1.0


def in_process(sample):
    return do(sample, IN_PROCESS | NO_NUMBERS)


def isolated(sample):
    return do(sample, ISOLATED | VALUES | NO_NUMBERS)


class Batch:
    scope = "sample"

    def score(self, samples):
        return [in_process(sample) for sample in samples]
