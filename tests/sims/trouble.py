"""The line with three ways of going wrong, to be run behind workers."""

import os
import time

from tests.sims.line_simulator import Line

RAISE, HANG, DIE = 6.0, 7.0, 8.0


class Trouble(Line):
    """Raises, hangs or ends its process when any row is told to move by RAISE, HANG or DIE; does not start at all with
    refuse_start."""

    def __init__(self, count, *, refuse_start=False):
        super().__init__(count)
        if refuse_start:
            raise OSError("out of arms")

    def step(self, rows, actions):
        if (actions == RAISE).any():
            raise ArithmeticError("all of it is broken")
        if (actions == HANG).any():
            time.sleep(1000)
        if (actions == DIE).any():
            os._exit(3)
        return super().step(rows, actions)
