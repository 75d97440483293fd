"""A simulator small enough to check by hand: a point on a line, solved at 1."""

import numpy as np

from mmrl.sims import Transition


class Line:
    """Starts at the seed / 100 (of large seeds the lower 32 bits) and moves by its action; `go` ends at 1 or after 6
    actions. It raises when told to move by exactly `poison`, and cannot start from a seed in `unstartable`."""

    action_dim, state_dim, image_shape, tasks = 1, 1, (2, 2, 3), ("go", "stay")

    def __init__(self, count, *, poison=9.0, unstartable=()):
        self.count, self.poison, self.unstartable = count, poison, unstartable
        self.position, self.steps = np.zeros(count), np.zeros(count, int)
        self.received = []
        self.closed = False

    def reset(self, rows, seeds, tasks):
        out = Transition.empty(len(rows), 0, self.image_shape, 1)
        for i, (row, seed) in enumerate(zip(rows, seeds, strict=True)):
            if seed in self.unstartable:
                out.errors[i] = RuntimeError("cannot start")
            self.position[row], self.steps[row] = seed % (1 << 32) / 100, 0
            out.images[i], out.state[i] = seed % 256, self.position[row]
        return out

    def step(self, rows, actions):
        out = Transition.empty(len(rows), actions.shape[1], self.image_shape, 1)
        for i, row in enumerate(rows):
            for c, (action,) in enumerate(actions[i]):
                self.received.append((row, action))
                if action == self.poison:
                    out.errors[i] = RuntimeError("poisoned")
                    break
                self.position[row] += action
                self.steps[row] += 1
                out.valid[i, c] = True
                out.success[i, c] = out.terminated[i, c] = self.position[row] >= 1
                out.truncated[i, c] = not out.terminated[i, c] and self.steps[row] >= 6
                out.reward[i, c] = self.position[row]
                if out.terminated[i, c] or out.truncated[i, c]:
                    break
            out.state[i] = self.position[row]
        return out

    def instruction(self, row):
        return f"go from {self.position[row]:.2f}"

    def expert(self, rows, length):
        return np.full((len(rows), length, 1), 0.25, np.float32)

    def close(self):
        self.closed = True
