"""Rewards, environments, simulators, builders and algorithms with mistakes that a beginner makes."""

from __future__ import annotations

import time

import gymnasium
import numpy as np
import torch

from mmrl.algorithms.algorithm import Algorithm
from mmrl.sims.vector.simulator import Transition

NUMBER = 3


def one(sample):
    return float(len(sample.response or "") % 2)


def tensor(sample):
    return torch.tensor(one(sample))


def truth(sample):
    return bool(one(sample))


def zero(sample):
    return 0.0


def none(sample):
    return None


def nan(sample):
    return float("nan")


def infinite(sample):
    return float("inf")


def word(sample):
    return "good"


def two(sample):
    return 1.0, 2.0


def raises(sample):
    raise RuntimeError("my reward is broken")


def needs_more(sample, b):
    return 0.0


def brightness(sample):
    return float(sample.image.float().mean())


class _Batched:
    scope = "sample"

    def score(self, samples):
        return [one(sample) for sample in samples]


class TooFew(_Batched):
    def score(self, samples):
        return super().score(samples)[1:]


class Words(_Batched):
    def score(self, samples):
        return ["x"] * len(samples)


class InitRaises(_Batched):
    def __init__(self):
        raise FileNotFoundError("weights.pt")


class NoScope:
    def score(self, samples):
        return [0.0] * len(samples)


class Channel(_Batched):
    def __init__(self, channel=0):
        self.channel = channel

    def score(self, samples):
        return [float(sample.image[self.channel].mean()) for sample in samples]


class Ranks(_Batched):
    scope = "group"

    def score(self, samples):
        return [float(place) for place in range(len(samples))]


class Half(Algorithm):
    """Without its loss."""

    def advantages(self, batch):
        return torch.zeros(len(batch.rollouts))


def build_raises(path, seed=0):
    raise RuntimeError("no weights today")


def build_nothing(path, seed=0):
    return None


class Dot(gymnasium.Env):
    """A dot that goes where the action says, and what can be wrong with it."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def __init__(self, render_mode=None, fail=None, size=64, channels=3, dtype="uint8"):
        self.render_mode, self.fail, self.steps, self.resets = render_mode, fail, 0, 0
        self.shape, self.dtype = (size, size, channels), np.dtype(dtype)
        high = 255 if self.dtype == np.uint8 else 1.0
        self.observation_space = gymnasium.spaces.Dict(
            {
                "pixels": gymnasium.spaces.Box(0, high, self.shape, self.dtype),
                "agent_pos": gymnasium.spaces.Box(-9, 9, (2,), np.float32),
            }
        )
        self.action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
        if fail == "pairs":
            self.action_space = gymnasium.spaces.MultiDiscrete([4, 2])

    def _seen(self):
        shape = (32, 32, 3) if self.fail == "shape" and self.resets > 1 else self.shape
        value = np.nan if self.fail == "nanstate" else 0.5
        return {"pixels": np.zeros(shape, self.dtype), "agent_pos": np.full(2, value, np.float32)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.resets = 0, self.resets + 1
        if self.fail == "reset":
            raise RuntimeError("camera not found")
        return self._seen(), {}

    def step(self, action):
        self.steps += 1
        if self.fail == "step":
            raise RuntimeError("arm lost")
        if self.fail == "hang":
            time.sleep(600)
        reward = float("nan") if self.fail == "nanreward" else 0.0
        return self._seen(), reward, self.steps >= 4 and float(action[0]) > 0, self.steps >= 6, {}

    def render(self):
        return np.zeros(self.shape, np.uint8)


gymnasium.register("Dot-v0", entry_point=Dot)


class Bare:
    """A simulator without methods."""

    def __init__(self, count):
        self.count = count


class OwnSim:
    """A simulator, and what can be wrong with it."""

    action_dim, state_dim, image_shape, tasks = 2, 2, (64, 64, 3), ("default",)

    def __init__(self, count, *, fail=""):
        self.count, self.fail = count, fail
        self.steps = np.zeros(count, int)

    def reset(self, rows, seeds, tasks):
        if self.fail == "reset":
            raise RuntimeError("boom at reset")
        self.steps[rows] = 0
        return Transition.empty(len(rows), 0, self.image_shape, self.state_dim)

    def step(self, rows, actions):
        if self.fail == "step":
            raise RuntimeError("boom at step")
        if self.fail == "none":
            return None
        out = Transition.empty(len(rows), actions.shape[1], self.image_shape, self.state_dim)
        for i, row in enumerate(rows):
            for c in range(actions.shape[1]):
                self.steps[row] += 1
                out.valid[i, c] = True
                out.truncated[i, c] = self.steps[row] >= 6 and self.fail != "endless"
                if out.truncated[i, c]:
                    break
        return out

    def instruction(self, row):
        return "reach for the red cube"

    def expert(self, rows, length):
        return np.zeros((len(rows), length, 2), np.float32)

    def close(self):
        return None
