"""A Gymnasium environment of states: a point has to be moved to the middle of a line."""

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict


class Middle(gymnasium.Env):
    """The point starts anywhere in -1 .. 1 and moves by 0.4 times the action. Within 0.1 of 0 the episode succeeds."""

    observation_space = Dict(state=Box(-1, 1, (1,), np.float32))
    action_space = Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x = self.np_random.uniform(-1, 1)
        return self.seen(), {}

    def step(self, action):
        self.x = float(np.clip(self.x + 0.4 * action[0], -1, 1))
        solved = abs(self.x) < 0.1
        return self.seen(), float(solved), solved, False, {"is_success": solved}

    def seen(self):
        return {"state": np.array([self.x], np.float32)}


gymnasium.register("mmrl/Middle-v0", entry_point=Middle, disable_env_checker=True)
