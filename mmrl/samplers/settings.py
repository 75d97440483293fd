"""Settings of denoising: transitions, windows, solvers and likelihoods.

These sections hold no tensors; `transitions`, `chain` and `score` compute with them.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.errors import UserError
from mmrl.settings import Choice, locate, option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.samplers.transitions import Coefficients

Space = Literal["velocity", "noise"]  # what the network predicts
StepWeight = Literal["none", "std", "inverse_dt"]


class DenoisingTransition(Choice):
    """The Gaussian step of a denoising chain from one noise level to the next."""

    title: ClassVar[str] = "transition"
    kinds: ClassVar[dict[str, str]] = {
        "flow_sde": "mmrl.samplers.settings:FlowSDE",
        "dance_sde": "mmrl.samplers.settings:DanceSDE",
        "cps": "mmrl.samplers.settings:CPS",
        "ddim": "mmrl.samplers.settings:DDIM",
    }
    test: ClassVar[str] = "tests/samplers/test_transitions.py"
    space: ClassVar[Space] = "velocity"  # what the network has to predict

    @property
    def unscaled(self) -> bool:
        """Returns whether steps are scored by their squared error, without the scale and constants of the Gaussian
        density."""
        return False

    @abstractmethod
    def coefficients(self, sigma: Tensor, sigma_next: Tensor, sigma_second: Tensor) -> Coefficients:
        """Returns the coefficients of the steps from `sigma` to `sigma_next`, both [row]. sigma_second: the second
        noise level of the grid."""

    def step(self, sigma: Tensor, sigma_next: Tensor, sigma_second: Tensor) -> Coefficients:
        """Returns `coefficients` of the same arguments. Raises UserError unless each coefficient is finite, and 0-d or
        [row], and std is at least 0."""
        step = self.coefficients(sigma, sigma_next, sigma_second)
        for name, values in step._asdict().items():
            if values.shape not in (sigma.shape, ()) or not bool(values.isfinite().all()):
                is_finite = "finite" if bool(values.isfinite().all()) else "not all finite"
                raise UserError(
                    f"the transition {self.type} gave {name} of shape {list(values.shape)}, {is_finite}; "
                    f"coefficients() must return finite numbers of shape {list(sigma.shape)}"
                )
        if bool((step.std < 0).any()):
            raise UserError(
                f"the transition {self.type} gave a std of {float(step.std.min()):.3g}; coefficients() must return "
                "0 for a step without noise, and more than 0 for others"
            )
        return step


class FlowSDE(DenoisingTransition):
    """Flow-GRPO's stochastic step. Its noise grows with the noise level."""

    equation: ClassVar[str] = "g = noise sqrt(s / (1 - s)); mean = x + (v + g^2 (x + (1 - s) v) / (2 s)) dt"
    source: ClassVar[str] = "Flow-GRPO, arXiv 2505.05470"
    type: str = "flow_sde"
    noise: float = option(0.7, "the paper's a", ge=0)

    def coefficients(self, sigma: Tensor, sigma_next: Tensor, sigma_second: Tensor) -> Coefficients:
        from mmrl.samplers.transitions import coefficients

        return coefficients("flow_sde", sigma, sigma_next, noise=self.noise, sigma_second=sigma_second)


class DanceSDE(DenoisingTransition):
    """DanceGRPO's stochastic step. Its noise is the same at every level."""

    equation: ClassVar[str] = "g = noise; mean = x + (v + g^2 (x + (1 - s) v) / (2 s)) dt"
    source: ClassVar[str] = "DanceGRPO, arXiv 2505.07818"
    type: str = "dance_sde"
    noise: float = option(0.7, "the paper's eta", ge=0)

    def coefficients(self, sigma: Tensor, sigma_next: Tensor, sigma_second: Tensor) -> Coefficients:
        from mmrl.samplers.transitions import coefficients

        return coefficients("dance_sde", sigma, sigma_next, noise=self.noise)


class CPS(DenoisingTransition):
    """Coefficient-preserving sampling: after a step, the latent has exactly the noise level of the grid."""

    equation: ClassVar[str] = (
        "std = s' sin(noise pi / 2); mean = (1 - s') (x - s v) + sqrt(s'^2 - std^2) (x + (1 - s) v); "
        "logp = -|x' - mean|^2, or with logp=density log Normal(x'; mean, std)"
    )
    source: ClassVar[str] = "Flow-CPS, arXiv 2509.05952"
    type: str = "cps"
    noise: float = option(0.8, "the paper's eta", ge=0, le=1)
    logp: Literal["squared_error", "density"] = option(
        "squared_error",
        "score of a step. squared_error: published, -|x' - mean|^2, whose log-ratios are 2 std^2 times those of the "
        "density and shrink with the noise level: clip by 1e-5 (`algorithm.surrogate={low: 1e-5, high: 1e-5}`), as "
        "flow_grpo does; density: that of the Gaussian, with the clip of other transitions",
    )

    @property
    def unscaled(self) -> bool:
        return self.logp == "squared_error"

    def coefficients(self, sigma: Tensor, sigma_next: Tensor, sigma_second: Tensor) -> Coefficients:
        from mmrl.samplers.transitions import coefficients

        return coefficients("cps", sigma, sigma_next, noise=self.noise)


class DDIM(DenoisingTransition):
    """The stochastic step of models that predict noise, such as Stable Diffusion 1.5."""

    equation: ClassVar[str] = "std = noise sqrt((1 - ab') / (1 - ab) (1 - ab / ab')), ab = 1 - s^2"
    source: ClassVar[str] = "DDIM, arXiv 2010.02502; DDPO, arXiv 2305.13301"
    type: str = "ddim"
    space: ClassVar[Space] = "noise"
    noise: float = option(1.0, "the paper's eta", ge=0, le=1)

    def coefficients(self, sigma: Tensor, sigma_next: Tensor, sigma_second: Tensor) -> Coefficients:
        from mmrl.samplers.transitions import coefficients

        return coefficients("ddim", sigma, sigma_next, noise=self.noise)


class Window(Choice):
    """The steps of a chain that are stochastic and trained. They are selected once per group and training step, so that
    all rollouts of a group share them.

    `first` and `last` bound the usable steps [first, last). The default is all steps with noise except the last one,
    whose noise would stay in the sample.
    """

    title: ClassVar[str] = "window"
    kinds: ClassVar[dict[str, str]] = {
        "all": "mmrl.samplers.settings:AllSteps",
        "first_half": "mmrl.samplers.settings:FirstHalf",
        "sliding": "mmrl.samplers.settings:Sliding",
        "random": "mmrl.samplers.settings:RandomStart",
    }
    test: ClassVar[str] = "tests/samplers/test_sigmas_windows_guidance.py"
    first: int = option(0, "first usable step of the chain", unit="steps", ge=0)
    last: int | None = option(None, "the step after the last usable one; default: as many as the transition allows")

    @abstractmethod
    def width(self, usable: int) -> int:
        """Returns the number of steps in a window, given the number of usable steps."""

    @abstractmethod
    def start(self, usable: int, steps: int, iteration: int, seed: int) -> int:
        """Returns the index of the window's first step among the `usable` steps.

        steps: number of steps of the whole chain. iteration: the training step. seed: the group's first seed.
        """


class AllSteps(Window):
    """Every usable step (Flow-GRPO)."""

    source: ClassVar[str] = "Flow-GRPO, arXiv 2505.05470"
    type: str = "all"

    def width(self, usable: int) -> int:
        return max(1, usable)

    def start(self, usable: int, steps: int, iteration: int, seed: int) -> int:
        return 0


class RandomStart(Window):
    """`size` steps with a random start."""

    source: ClassVar[str] = "Flow-GRPO-Fast"
    type: str = "random"
    size: int = option(2, "steps of a window", unit="steps", ge=1)

    def width(self, usable: int) -> int:
        return self.size

    def start(self, usable: int, steps: int, iteration: int, seed: int) -> int:
        return self._draw(usable - self.size + 1, seed)

    def _draw(self, num_starts: int, seed: int) -> int:
        """Returns a random number below `num_starts`."""
        import torch

        return int(torch.randint(num_starts, (), generator=torch.Generator().manual_seed(seed)))


class FirstHalf(RandomStart):
    """`size` steps with a random start in the first half of the chain."""

    source: ClassVar[str] = "Flow-GRPO-Fast"
    type: str = "first_half"

    def start(self, usable: int, steps: int, iteration: int, seed: int) -> int:
        return self._draw(min(usable - self.size + 1, max(1, steps // 2)), seed)


class Sliding(Window):
    """`size` steps that move by `stride` after `every` training steps and wrap around at the end of the chain."""

    equation: ClassVar[str] = "the window stays at start t for every exp(-decay max(0, t - threshold)) training steps"
    source: ClassVar[str] = "MixGRPO, arXiv 2507.21802"
    type: str = "sliding"
    size: int = option(2, "steps of a window", unit="steps", ge=1)
    every: int = option(25, "training steps at one start", unit="steps", ge=1)
    stride: int = option(1, "steps of the chain by which the window moves", unit="steps", ge=1)
    decay: float = option(0.0, "how fast the number of training steps at one start falls", ge=0)
    threshold: int = option(
        0, "start from which on the number of training steps at one start falls", unit="steps", ge=0
    )

    def width(self, usable: int) -> int:
        return self.size

    def start(self, usable: int, steps: int, iteration: int, seed: int) -> int:
        """Returns the window's start in training step `iteration`. It stays at start t for `every` training steps times
        exp(-decay (t - threshold)) from `threshold` on, and after the last start begins again at 0."""
        starts = range(0, usable - self.size + 1, self.stride)
        durations = [max(1, round(self.every * math.exp(-self.decay * max(0, t - self.threshold)))) for t in starts]
        remaining = iteration % sum(durations)
        for start, duration in zip(starts, durations, strict=True):
            if remaining < duration:
                return start
            remaining -= duration
        raise AssertionError("unreachable: remaining is below the sum of the durations")


class Tail(Choice):
    """The solver of a chain's deterministic steps."""

    title: ClassVar[str] = "tail"
    kinds: ClassVar[dict[str, str]] = {"ode": "mmrl.samplers.settings:Euler", "dpm++": "mmrl.samplers.settings:DPM"}
    test: ClassVar[str] = "tests/samplers/test_chain.py"
    steps: int | None = option(None, "steps after the window; default: one for each remaining noise level", ge=1)


class Euler(Tail):
    """First-order steps."""

    type: str = "ode"


class DPM(Tail):
    """Second-order multistep DPM-Solver++ steps."""

    source: ClassVar[str] = "DPM-Solver++(2M), arXiv 2211.01095"
    type: str = "dpm++"


class Likelihood(Choice):
    """The decisions of a denoised sample, and how its likelihood is computed."""

    title: ClassVar[str] = "likelihood"
    reduction: Literal["mean", "sum"] = option("mean", "how log-likelihoods of the elements of a latent are combined")


class ChainLikelihood(Likelihood):
    """Each step of the chain inside the window is a decision with a Gaussian likelihood."""

    equation: ClassVar[str] = "log Normal(x'; a_x x + a_v v, std)"
    source: ClassVar[str] = "Flow-GRPO, arXiv 2505.05470; DDPO, arXiv 2305.13301"
    test: ClassVar[str] = "tests/policies/diffusion/test_policy.py"
    type: str = "chain"
    transition: DenoisingTransition = option(FlowSDE(), "the Gaussian step inside the window")
    window: Window = option(AllSteps(), "which steps are stochastic and trained")
    step_weight: StepWeight = option(
        "none", "weight of a step in the loss: std (TempFlow-GRPO), inverse_dt (GRPO-Guard), of mean 1 over the window"
    )


class Draws(Likelihood):
    """The final sample is noised to several levels and compared with the network's predictions. All policies get the
    same noise levels and noises."""

    draws: int = option(4, "noisy copies of each sample, each with a noise level and noise of its own", ge=1)


class MatchingLikelihood(Draws):
    """The flow-matching error of the final sample as a log-likelihood."""

    equation: ClassVar[str] = "-w(s) |v - (noise - data)|^2"
    source: ClassVar[str] = "AWM, arXiv 2509.25050; FPO, arXiv 2507.21053; weight elbo: arXiv 2602.04663"
    test: ClassVar[str] = "tests/policies/diffusion/test_policy.py"
    type: str = "matching"


def check_draw_range(bounds: tuple[float, float]) -> None:
    """Raises ValueError unless 0 < low < high < 1 for the bounds of noise levels."""
    low, high = bounds
    if not 0 < low < high < 1:
        raise ValueError(f"draw_range must be [low, high] with 0 < low < high < 1, not {list(bounds)}")


def transitions_for(space: Space) -> list[str]:
    """Returns the types of the shipped transitions for models that predict `space`, noise or velocity."""
    return [kind for kind, path in DenoisingTransition.kinds.items() if locate(path, "transition").space == space]
