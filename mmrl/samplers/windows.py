"""Which denoising steps of a chain are stochastic and trained. Chosen once a group and iteration, never a rollout."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Window:
    """A schedule of windows over the usable steps [first, last) of a chain.

    kind
      all         every usable step (Flow-GRPO)
      first_half  `size` steps, beginning at random in the first half of the chain (Flow-GRPO-Fast)
      sliding     `size` steps that move on by `stride` after `every` iterations and begin again after the end; the
                  stay at start t shrinks to every exp(-decay max(0, t - threshold)) iterations (MixGRPO,
                  arXiv 2507.21802)
      random      `size` steps, beginning anywhere
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    kind: Literal["all", "first_half", "sliding", "random"] = "all"
    size: int = 2
    every: int = 25
    stride: int = 1
    decay: float = 0.0
    threshold: int = 0
    first: int = 0
    last: int | None = None  # None: as many as the transition allows

    def __post_init__(self) -> None:
        for name, value in {"size": self.size, "every": self.every, "stride": self.stride}.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.decay < 0 or self.threshold < 0 or self.first < 0:
            raise ValueError("decay, threshold and first can not be negative")

    def usable(self, std: Tensor) -> range:
        """The steps a window may hold, for the stds [steps] of the chosen transition.

        By default all but the last one: its noise would stay in the picture. Raises ValueError where first and last
        ask for a step without noise, or leave fewer steps than `size`.
        """
        random = [int(i) for i in (std > 0).nonzero()]
        last = min(random[-1] + 1, len(std) - 1) if self.last is None and random else self.last
        if last is None or not random:
            raise ValueError("no step of this chain has noise: raise denoising.noise or choose another transition")
        if last > len(std):
            raise ValueError(f"window.last={last}, but the chain has only {len(std)} steps")
        still = [i for i in range(self.first, last) if i not in random]
        if still:
            raise ValueError(
                f"the window reaches step {still[0]}, which has std 0; set window.first and window.last inside "
                f"{random[0]} to {random[-1] + 1}"
            )
        need = 1 if self.kind == "all" else self.size
        if last - self.first < need:
            raise ValueError(f"a window of {need} steps does not fit into steps {self.first} to {last}")
        return range(self.first, last)

    def steps(self, std: Tensor, iteration: int, seed: int) -> list[int]:
        """The window of iteration `iteration` for the group whose seed is `seed`, rising."""
        usable = self.usable(std)
        if self.kind == "all":
            return list(usable)
        starts = len(usable) - self.size + 1
        if self.kind == "sliding":
            start = self._slide(iteration, starts)
        else:
            reach = min(starts, max(1, len(std) // 2)) if self.kind == "first_half" else starts
            start = int(torch.randint(reach, (), generator=torch.Generator().manual_seed(seed)))
        return [usable[start + i] for i in range(self.size)]

    def _slide(self, iteration: int, starts: int) -> int:
        stays = [max(1, round(self.every * math.exp(-self.decay * max(0, t - self.threshold)))) for t in range(starts)]
        rest = iteration % sum(stays[:: self.stride])
        for start in range(0, starts, self.stride):
            if rest < stays[start]:
                return start
            rest -= stays[start]
        raise AssertionError("unreachable: rest is below the sum of the stays")
