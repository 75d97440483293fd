"""A point on a line that shall reach 0, as a Gymnasium environment. From some places it gives
rewards that are not numbers."""

import gymnasium
import numpy as np


class Walk(gymnasium.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    observation_space = gymnasium.spaces.Box(-2, 2, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.uniform(-1, 1)
        self.broken = 0.5 < abs(self.place) < 0.66
        return self._seen(), {}

    def step(self, action):
        self.place += 0.5 * float(action[0])
        solved = abs(self.place) < 0.1
        return self._seen(), float("nan") if self.broken else -abs(self.place), solved, False, {"solved": solved}

    def render(self):
        return np.full((8, 8, 3), int(np.clip(100 * abs(self.place), 0, 255)), np.uint8)

    def _seen(self):
        return np.array([self.place], np.float32)


gymnasium.register("MMRLWalk-v0", entry_point=Walk)
