"""Settings of the optimizer and of the engine that trains."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import field_validator, model_validator

from mmrl.settings import Choice, Section, option

if TYPE_CHECKING:
    from torch.optim import Optimizer

    OptimizerClass = type[Optimizer]


class ParameterGroup(Section):
    """Options of a named group of parameters that differ from the optimizer's."""

    lr: float | None = option(None, "learning rate; default: optim.lr", gt=0)
    weight_decay: float | None = option(None, "default: optim.weight_decay", ge=0)
    warmup_steps: int | None = option(
        None, "optimizer steps of linear warm-up; default: optim.warmup_steps", unit="optimizer steps", ge=0
    )


class Optim(Choice):
    """The optimizer and its learning rate. An optimizer of your own names its class, a
    `torch.optim.Optimizer`, and its moments."""

    title: ClassVar[str] = "optimizer"
    kinds: ClassVar[dict[str, str]] = {
        "adamw": "mmrl.engine.settings:AdamW",
        "sgd": "mmrl.engine.settings:SGD",
    }
    type: str = "adamw"
    lr: float = option(1e-6, "learning rate", gt=0)
    weight_decay: float = option(0.0, "weight decay; biases and scales of norms are not decayed", ge=0)
    warmup_steps: int = option(
        0,
        "optimizer steps of linear warm-up, the first of which has lr / warmup_steps; transformers begins at 0, a step "
        "later",
        unit="optimizer steps",
        ge=0,
    )
    schedule: Literal["constant", "linear", "cosine"] = option("constant", "learning rate after the warm-up")
    clip_grad_norm: float = option(1.0, "largest norm of the gradient; 0: no bound", ge=0)
    ema: float | None = option(
        None, "decay of an average of the weights, which is evaluated and written at the end", gt=0, lt=1
    )
    groups: dict[str, ParameterGroup] = option(
        {}, "named groups of parameters with a learning rate of their own, such as critic"
    )
    hold_steps: int = option(
        0, "optimizer steps at the beginning in which only optim.groups learn", unit="optimizer steps", ge=0
    )

    @property
    @abstractmethod
    def moments(self) -> tuple[str, ...]:
        """Names, in torch's optimizer state, of the tensors that the optimizer keeps for a parameter, with its shape.
        By them memory is counted, and a checkpoint is divided among another number of ranks."""

    @abstractmethod
    def kind(self) -> OptimizerClass:
        """A class that is called with groups of parameters, `lr`, and `options`."""

    @property
    @abstractmethod
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the class besides `lr`."""

    @model_validator(mode="after")
    def _check_hold_steps(self) -> Optim:
        if self.hold_steps and not self.groups:
            raise ValueError(
                f"hold_steps={self.hold_steps} lets only optim.groups learn at first, but there are none, so nothing "
                "is learned; set optim.groups to those that learn then, such as critic, or hold_steps=0"
            )
        return self


class AdamW(Optim):
    """The running mean of the gradient, divided by the root of the running mean of its square, so that every weight
    moves by about the learning rate."""

    equation: ClassVar[str] = "w <- (1 - lr decay) w - lr m / (sqrt(v) + eps), m and v without the bias of their start"
    source: ClassVar[str] = "Loshchilov and Hutter, arXiv 1711.05101"
    test: ClassVar[str] = "tests/joints/test_optimizer.py"
    type: str = "adamw"
    betas: tuple[float, float] = option((0.9, 0.999), "decay rates of the moments")
    eps: float = option(1e-8, "added to the root of the second moment", gt=0)

    @property
    def moments(self) -> tuple[str, ...]:
        return "exp_avg", "exp_avg_sq"

    def kind(self) -> OptimizerClass:
        from torch.optim import AdamW

        return AdamW

    @property
    def options(self) -> dict[str, Any]:
        # On a CPU, where engine.offload has it, one operator for all tensors of a group takes a quarter of the time.
        return {"betas": self.betas, "eps": self.eps, "fused": True}

    @field_validator("betas")
    @classmethod
    def _decays(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"both must be at least 0 and below 1, got {list(betas)}")
        return betas


class SGD(Optim):
    """The gradient itself: without momentum nothing is kept beside the weights. Its learning rates are far above
    AdamW's."""

    equation: ClassVar[str] = "b <- momentum b + g + decay w, w <- w - lr b"
    source: ClassVar[str] = "Robbins and Monro 1951; in RL with verifiable rewards arXiv 2602.07729"
    test: ClassVar[str] = "tests/joints/test_optimizer.py"
    type: str = "sgd"
    lr: float = option(0.1, "learning rate", gt=0)
    momentum: float = option(0.0, "momentum; 0: none", ge=0, lt=1)

    @property
    def moments(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum > 0 else ()

    def kind(self) -> OptimizerClass:
        from torch.optim import SGD

        return SGD

    @property
    def options(self) -> dict[str, Any]:
        return {"momentum": self.momentum}


class EngineSettings(Section):
    """Settings of DeepSpeed, which runs the job."""

    zero_stage: Literal[0, 1, 2, 3] = option(
        0, "DeepSpeed's ZeRO stage: 1 partitions the optimizer state, 2 also gradients, 3 also weights"
    )
    offload: Literal["none", "optimizer", "all"] = option(
        "none", "what is kept in the CPU's memory; `all` includes the weights and needs stage 3"
    )
    micro_batch: int = option(8, "rollouts replayed at once on a rank; changes memory, not results", ge=1)
    max_bad_steps: int = option(3, "losses or gradients in a row that are not finite before the run stops", ge=1)

    compile: Literal["none", "inductor", "aot_eager", "eager"] = option(
        "none",
        "torch.compile for the forward and backward passes of an update, by its backend; sampling is not compiled. "
        "Each kind of block of the network is compiled once, for all lengths, in the first step, which takes minutes; "
        "results agree to rounding. inductor: fused code, which needs a C++ compiler and on GPUs Triton. aot_eager and "
        "eager: torch's backends for finding errors, which gain nothing",
    )
    deterministic: bool = option(
        False,
        "use kernels that give the same bits each time (torch.use_deterministic_algorithms); an operation without one "
        "is refused by name. On a CPU nothing changes; on a GPU it costs time, which was not measured",
    )
    timeout: float = option(
        1800.0, "the longest that ranks wait for one that is missing before the run ends", unit="s", gt=0
    )

    @property
    def token_limit(self) -> int | None:
        """The most tokens that are replayed at once on a rank; None: as many as there are."""
        return None

    @model_validator(mode="after")
    def _compiles_whole_weights(self) -> EngineSettings:
        """Rejects compile with ZeRO-3."""
        if self.compile != "none" and self.zero_stage == 3:
            raise ValueError(
                f"compile={self.compile} does not go with engine.zero_stage=3, which gathers weights in the midst of a "
                "block; set engine.zero_stage to 0, 1 or 2, or engine.compile=none"
            )
        return self

    @model_validator(mode="after")
    def _offload_needs_zero(self) -> EngineSettings:
        """Rejects an offload that the ZeRO stage cannot do."""
        if self.offload == "all" and self.zero_stage != 3:
            raise ValueError(
                "offload=all moves the parameters, which needs engine.zero_stage=3; set that, or offload=optimizer"
            )
        if self.offload == "optimizer" and self.zero_stage == 0:
            raise ValueError(
                "offload=optimizer does not work with engine.zero_stage=0; set that to 1, 2 or 3, or offload=none"
            )
        return self


class UnevenEngine(Section):
    """Settings of jobs whose rollouts differ in length."""

    balance: Literal["lengths", "none"] = option(
        "lengths",
        "how an update's work is laid out. lengths: groups of similar lengths are replayed together, the longest "
        "first, and several ranks exchange groups until each has about as many tokens (robots: policy steps) in every "
        "minibatch; results agree to rounding, but for masks that are drawn at random. none: a rank learns from what "
        "it sampled, in the order drawn, as it does with algorithm.shuffle=steps",
    )


class Kernels(Section):
    """The backend of the fused operators (mmrl.kernels). The choices agree to rounding."""

    backend: Literal["auto", "cuda", "cpu", "torch"] = option(
        "auto", "auto: the compiled kernels of each tensor's device, where they can be built; torch: plain PyTorch"
    )
