"""The line with what own simulators get wrong, after so many good steps or resets and for `times` of them."""

import dataclasses
import sys
import time

import numpy as np

from tests.sims.line_simulator import Line


def changed(moved, **arrays):
    return dataclasses.replace(moved, **arrays)


SHAPES = {
    "short reward": lambda m: changed(m, reward=m.reward[:1]),
    "flat reward": lambda m: changed(m, reward=m.reward[:, 0]),
    "float images": lambda m: changed(m, images=m.images / 255.0),
    "image of one row": lambda m: changed(m, images=m.images[:, :1]),
    "channels first": lambda m: changed(m, images=m.images.transpose(0, 3, 1, 2)),
    "state of one": lambda m: changed(m, state=m.state[:1]),
    "objects": lambda m: changed(m, state=m.state.astype(object)),
    "flags that are numbers": lambda m: changed(m, terminated=m.terminated.astype(float)),
    "list of flags": lambda m: changed(m, valid=m.valid.tolist()),
    "holes": lambda m: changed(m, valid=m.valid & (np.arange(m.valid.shape[1]) > 0)),
    "no errors": lambda m: changed(m, errors=[]),
    "nothing": lambda m: None,
    "tuple": lambda m: (m.images, m.state),
}


class Hostile(Line):
    """kind: a key of SHAPES, or what `step` does below; only_row: None, or the only row that it happens to."""

    def __init__(self, count, *, kind="", after=0, times=10**9, at="step", only_row=None, facts=None):
        super().__init__(count)
        self.kind, self.after, self.at, self.only_row, self.calls = kind, after, at, only_row, 0
        self.times = times
        for name, value in (facts or {}).items():
            setattr(self, name, value)

    def reset(self, rows, seeds, tasks):
        return self._spoilt("reset", rows, super().reset(rows, seeds, tasks))

    def step(self, rows, actions):
        return self._spoilt("step", rows, super().step(rows, actions))

    def _spoilt(self, at, rows, moved):
        self.calls += at == self.at
        if at != self.at or not self.after < self.calls <= self.after + self.times:
            return moved
        if self.kind in SHAPES:
            return SHAPES[self.kind](moved)
        if self.kind == "slow":
            time.sleep(0.5)
        if self.kind == "raise":
            raise ArithmeticError("all of it is broken")
        if self.kind == "exit":
            sys.exit(3)
        mine = [i for i, row in enumerate(rows) if self.only_row in (None, row)]
        if self.kind == "nan state":
            moved.state[mine] = np.nan
        if self.kind == "infinite reward":
            moved.reward[mine] = np.inf
        if self.kind == "stands still":
            for flags in (moved.valid, moved.terminated, moved.truncated, moved.success):
                flags[mine] = False
        if self.kind == "never ends":
            for row in mine:
                moved.valid[row] = True
                moved.terminated[row] = moved.truncated[row] = moved.success[row] = False
        return moved

    def expert(self, rows, length):
        if self.kind == "expert":
            raise ArithmeticError("no plan")
        return super().expert(rows, length)[: 1 if self.kind == "short expert" else None]

    def instruction(self, row):
        return None if self.kind == "no words" else super().instruction(row)
