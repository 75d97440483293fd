"""How actions are made: the `action` section of a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

PROMPT = "What action should the robot take to {}?"


@dataclass(frozen=True)
class Actions:
    """Options of a vision-language-action policy; raises ValueError naming the one that can not be.

    head
      token       bins of every action as tokens: one after the other (decoding=autoregressive, as OpenVLA, arXiv
                  2406.09246), or all at once, from learned queries (parallel) or from empty places in a sequence that
                  sees itself whole (bidirectional, for checkpoints of OpenVLA-OFT, arXiv 2502.19645)
      flow        an expert denoises the chunk (pi0, arXiv 2410.24164), with the `denoising` section's sampler;
                  LeRobot's SmolVLA and pi0 bring their own
      regression  the chunk's median and a learned scale, a Laplace distribution
      bridge      the same read from every layer of the backbone (VLA-Adapter, arXiv 2509.09372)
    level: what one decision is: a token (one number of one action), an action, or the chunk. Flow decides by chunk.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    head: Literal["token", "flow", "regression", "bridge"] = "token"
    chunk: int = 5  # actions executed before the policy looks again
    level: Literal["token", "action", "chunk"] = "token"
    proprioception: bool = True  # the robot's state is an input
    standardise: bool = False  # it, by mean and deviation under random actions; measured once, kept with the model
    prompt: str | None = None  # with {instruction}; None: the backbone's own
    center_crop: float = 1.0  # area of OpenVLA's pictures that is kept; 0.9 for checkpoints trained on random crops
    statistics: str | None = None  # a dataset_statistics.json, or a folder with one; None: actions are within [-1, 1]
    statistics_key: str | None = None  # None: the only one in it
    horizon: int = 100  # actions; the length that algorithm.reduce=constant divides by
    film: bool = False  # keep a picture of every action in evaluation
    # --- token ---
    decoding: Literal["parallel", "autoregressive", "bidirectional"] = "parallel"
    bins: int = 256  # the last ids of the vocabulary
    # --- flow and bridge ---
    width: int = 128  # of the expert, or of the bridge
    depth: int = 3  # blocks of the flow's expert; a bridge has one for each of the backbone's last `depth` layers
    queries: int = 16  # of the bridge
    spread: Literal["sampler", "learned"] = "sampler"  # std of a flow's steps: the sampler's, or a network's on all
    spread_range: tuple[float, float] = (0.08, 0.16)  # of a learned std
    # --- regression and bridge ---
    scale: float = 0.1  # of the Laplace distribution, before training

    def __post_init__(self) -> None:
        for name in ("chunk", "horizon", "width", "depth", "queries", "scale"):
            if self.__dict__[name] <= 0:
                raise ValueError(f"{name} must be positive, got {self.__dict__[name]}")
        if not 0 < self.center_crop <= 1:
            raise ValueError(f"center_crop must be above 0 and at most 1, got {self.center_crop}")
        if self.bins < 3:
            raise ValueError(f"bins must be at least 3, got {self.bins}")
        if self.prompt is not None and "{instruction}" not in self.prompt:
            raise ValueError(f"prompt must hold {{instruction}}, got {self.prompt!r}")
        if not 0 < self.spread_range[0] <= self.spread_range[1]:
            raise ValueError(f"spread_range must be positive and rise, got {self.spread_range}")
        if self.spread == "learned" and self.head != "flow":
            raise ValueError("spread=learned is for head=flow")
