"""How pictures are drawn and their likelihood measured: the `denoising` section of a configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from mmrl.samplers.windows import Window


@dataclass(frozen=True)
class Denoising:
    """Options of a diffusion policy; raises ValueError naming the one that can not be.

    likelihood
      chain      the steps of the sampler inside the window, each a Gaussian (Flow-GRPO, DDPO)
      matching   -w(s) |v - (noise - data)|^2 of the final picture at `draws` levels and noises that are the same for
                 every policy that is compared (AWM, arXiv 2509.25050; with weight "elbo" arXiv 2602.04663)
      contrast   the errors of DiffusionNFT's implicit policies (arXiv 2509.16117), for algorithm.surrogate=contrast
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    steps: int = 10  # of a chain in training
    evaluation_steps: int = 40
    resolution: int | None = None  # pixels; None: the model's own
    evaluation_resolution: int | None = None  # None: as in training
    # --- chain ---
    transition: Literal["flow_sde", "dance_sde", "cps", "ddim"] = "flow_sde"
    noise: float = 0.7  # the transition's own measure: Flow-SDE's a, Dance-SDE's and DDIM's eta, CPS's eta
    window: Window = field(default_factory=Window)
    branching: tuple[int, ...] = ()  # children at each step of the window; their product is the group size. (): no tree
    tail: Literal["ode", "dpm++"] = "ode"  # solver of the deterministic steps
    tail_steps: int | None = None  # after the window; None: all that are left
    reduction: Literal["mean", "sum"] = "mean"  # over the elements of a latent
    step_weight: Literal["none", "std", "inverse_dt"] = "none"  # std: TempFlow-GRPO; inverse_dt: GRPO-Guard
    chunks: tuple[int, ...] = ()  # lengths of the chunks that algorithm.level=segment averages over (GCPO)
    # --- matching and contrast ---
    likelihood: Literal["chain", "matching", "contrast"] = "chain"
    draws: int = 4  # levels and noises a picture
    draw_range: tuple[float, float] = (0.02, 0.98)  # of the uniform draw that a level is made from
    matching_weight: Literal["one", "sigma", "sigma_squared", "elbo"] = "one"
    strength: float = 1.0  # DiffusionNFT's b
    # --- guidance ---
    guidance: float = 1.0  # classifier-free; 1: none
    guidance_interval: tuple[float, float] = (0.0, 1.0)  # sigmas at which it acts
    evaluation_guidance: float | None = None  # None: as in training
    embedded_guidance: float = 3.5  # told to guidance-distilled networks (FLUX)
    negative_prompt: str = ""
    prompt_dropout: float = 0.0  # share of demonstrations shown without their prompt, which guidance needs
    prompt_cache: int = 256  # prompts whose embeddings are kept

    def __post_init__(self) -> None:
        for name in ("steps", "evaluation_steps", "draws", "strength", "prompt_cache"):
            if self.__dict__[name] <= 0:
                raise ValueError(f"{name} must be positive, got {self.__dict__[name]}")
        if self.tail_steps is not None and self.tail_steps < 1:
            raise ValueError(f"tail_steps must be at least 1, got {self.tail_steps}")
        low, high = self.draw_range
        if not 0 < low < high < 1:
            raise ValueError(f"draw_range must lie inside (0, 1) and rise, got {self.draw_range}")
        if not 0 <= self.prompt_dropout < 1:
            raise ValueError(f"prompt_dropout must be in [0, 1), got {self.prompt_dropout}")
        if any(n < 1 for n in (*self.branching, *self.chunks)):
            raise ValueError("branching and chunks hold positive numbers")
        if self.branching and self.likelihood != "chain":
            raise ValueError("branching needs likelihood=chain: only a chain has steps to branch at")
