"""A point on a line whose `reset` or `step` misbehaves: `kind` says how, `after` from which call on."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import sys
import threading
import time

import numpy as np

from mmrl.sims import Transition


def changed(moved, **arrays):
    return dataclasses.replace(moved, **arrays)


SHAPES = {
    "reward of one row": lambda m: changed(m, reward=m.reward[:1]),
    "reward of one action": lambda m: changed(m, reward=m.reward[:, :1]),
    "flat reward": lambda m: changed(m, reward=m.reward[:, 0]),
    "reward of text": lambda m: changed(m, reward=m.reward.astype(str)),
    "flags that are numbers": lambda m: changed(m, terminated=m.terminated.astype(float)),
    "flags of one row": lambda m: changed(m, truncated=m.truncated[:1]),
    "success that is None": lambda m: changed(m, success=None),
    "a list of flags": lambda m: changed(m, valid=m.valid.tolist()),
    "valid with holes": lambda m: changed(m, valid=m.valid & (np.arange(m.valid.shape[1]) > 0)),
}
OBSERVATIONS = {
    "float images": lambda m: changed(m, images=m.images / 255.0),
    "signed images": lambda m: changed(m, images=m.images.astype(np.int8)),
    "images of one row": lambda m: changed(m, images=m.images[:, :1]),
    "one image for all": lambda m: changed(m, images=m.images[:1]),
    "grey images": lambda m: changed(m, images=m.images[..., :1]),
    "channels first": lambda m: changed(m, images=m.images.transpose(0, 3, 1, 2)),
    "state of one row": lambda m: changed(m, state=m.state[:1]),
    "flat state": lambda m: changed(m, state=m.state[:, 0]),
    "complex state": lambda m: changed(m, state=m.state.astype(complex)),
    "objects": lambda m: changed(m, state=m.state.astype(object)),
    "errors of nobody": lambda m: changed(m, errors=[]),
    "nothing": lambda m: None,
    "a tuple": lambda m: (m.images, m.state),
    "a dict": lambda m: vars(m),
}


def nan_state(moved):
    moved.state[:] = np.nan
    return moved


def infinite_state(moved):
    moved.state[:] = np.inf
    return moved


def nan_reward(moved):
    moved.reward[:] = np.nan
    return moved


def idle(moved):
    moved.valid[:] = moved.terminated[:] = moved.truncated[:] = moved.success[:] = False
    return moved


def endless(moved):
    moved.valid[:] = True
    moved.terminated[:] = moved.truncated[:] = False
    return moved


def throw(error):
    raise error


NUMBERS = {"NaN in the state": nan_state, "infinite state": infinite_state}
STEPS = {"NaN in the reward": nan_reward, "never moves": idle, "never ends": endless}
RAISES = {
    "raises": lambda m: throw(ArithmeticError("broken")),
    "raises without words": lambda m: throw(AssertionError()),
    "leaves": lambda m: sys.exit(3),
    "memory": lambda m: throw(MemoryError()),
}
DEATHS = {
    "hangs": lambda m: time.sleep(600),
    "hangs with all locks": lambda m: ctypes.PyDLL(None).sleep(600),
    "os._exit": lambda m: os._exit(3),
    "segfault": lambda m: ctypes.string_at(0),
    "abort": lambda m: os.abort(),
    "stops itself": lambda m: os.kill(os.getpid(), signal.SIGSTOP),
    "closes descriptors": lambda m: os.closerange(3, 256) or m,
    "threads": lambda m: [threading.Thread(target=time.sleep, args=(1,)).start() for _ in range(50)] and m,
}
KINDS = SHAPES | OBSERVATIONS | NUMBERS | STEPS | RAISES | DEATHS


class Hostile:
    action_dim, state_dim, image_shape, tasks = 1, 2, (4, 6, 3), ("go",)

    def __init__(self, count, *, kind="", at="step", after=0):
        self.count, self.kind, self.at, self.after, self.calls = count, kind, at, after, 0
        self.steps = np.zeros(count, int)

    def reset(self, rows, seeds, tasks):
        self.steps[rows] = 0
        return self.spoilt("reset", Transition.empty(len(rows), 0, self.image_shape, self.state_dim))

    def step(self, rows, actions):
        out = Transition.empty(len(rows), actions.shape[1], self.image_shape, self.state_dim)
        for i, row in enumerate(rows):
            for c in range(actions.shape[1]):
                self.steps[row] += 1
                out.valid[i, c] = True
                out.truncated[i, c] = self.steps[row] >= 5
                if out.truncated[i, c]:
                    break
        return self.spoilt("step", out)

    def spoilt(self, at, moved):
        self.calls += at == self.at
        return KINDS[self.kind](moved) if at == self.at and self.calls > self.after and self.kind else moved

    def instruction(self, row):
        return "go"

    def expert(self, rows, length):
        return np.zeros((len(rows), length, 1), np.float32)

    def close(self):
        return None
