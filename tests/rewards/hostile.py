"""Rewards of somebody who does not mean well, or does not test."""

import sys
import time
from pathlib import Path

from mmrl.errors import UserError


class HangsWhenBuilt:
    """Never there."""

    scope = "sample"

    def __init__(self, mark):
        Path(mark).touch()
        time.sleep(1000)

    def score(self, samples):
        return [0.0] * len(samples)


def by_word(sample):
    """Does what the response says; runs in the trainer's process."""
    word = sample.response
    if word == "raise":
        raise KeyError("nothing there")
    if word == "exit":
        sys.exit(3)
    if word == "interrupt":
        raise KeyboardInterrupt
    if word == "spin":
        while True:
            pass
    if word == "sleep":
        time.sleep(1000)
    if word == "stubborn":
        while True:
            try:
                time.sleep(1000)
            except BaseException:
                continue
    if word == "user error":
        raise UserError("the server is down")
    return {"seven": "seven", "huge": 10**400, "list": [1, 2]}.get(word, 1.0)


class Batch:
    """A batched reward that does what the worst of its samples says."""

    def __init__(self, scope="sample"):
        self.scope = scope
        self.calls = []

    def score(self, samples):
        self.calls.append(len(samples))
        values = [by_word(sample) for sample in samples]
        return values[:-1] if any(sample.response == "too few" for sample in samples) else values


def lazy(samples):
    for sample in samples:
        yield by_word(sample)


class Lazy(Batch):
    """Raises when its values are asked for."""

    def score(self, samples):
        return lazy(samples)


def raises_on_odd_prompts(sample):
    if int(sample.prompt.id.split("-")[-1]) % 2:
        raise KeyError("odd")
    return float(len(sample.response) % 2)


def leaves(sample):
    sys.exit(3)
