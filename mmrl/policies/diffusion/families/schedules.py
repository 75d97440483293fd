"""Verdicts on schedulers: which of diffusers' classes, with which fields, have noise levels that a family reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

FLOW = ("FlowMatchEulerDiscreteScheduler",)
# Solvers of higher order whose levels are those of FlowMatchEulerDiscreteScheduler under another name.
FLOW_SOLVERS = ("UniPCMultistepScheduler", "DPMSolverMultistepScheduler")
# One training schedule in each: a class of another prediction or chain (LCM, TCD, EDM, flow) is not among them.
NOISE = (
    *("DDIMScheduler", "DDIMParallelScheduler", "DDPMScheduler", "DDPMParallelScheduler", "PNDMScheduler"),
    *("EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler", "LMSDiscreteScheduler", "HeunDiscreteScheduler"),
    *("KDPM2DiscreteScheduler", "KDPM2AncestralDiscreteScheduler", "DPMSolverMultistepScheduler"),
    *("DEISMultistepScheduler", "UniPCMultistepScheduler", "SASolverScheduler"),
)
SCHEDULE = ("num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas")
SPACING = ("timestep_spacing", "steps_offset", "prediction_type")
BETAS = ("linear", "scaled_linear", "squaredcos_cap_v2")

Fields = dict[str, tuple[Any, ...]]  # the values that are read, by field
_OFF: tuple[Any, ...] = (False, None)
_OTHER_LEVELS: Fields = dict.fromkeys(("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas"), _OFF)
_FLOW: Fields = {"invert_sigmas": _OFF, "stochastic_sampling": _OFF}
_FIXED_SHIFT: Fields = {"use_dynamic_shifting": _OFF}
_SHIFT_ALONE: Fields = _OTHER_LEVELS | _FIXED_SHIFT | {"shift_terminal": _OFF}
_SOLVER: Fields = {"prediction_type": ("flow_prediction",), "use_flow_sigmas": (True,), "thresholding": _OFF}
_NOISE: Fields = {
    "prediction_type": ("epsilon",),
    "rescale_betas_zero_snr": _OFF,
    "beta_schedule": BETAS,
    "thresholding": _OFF,
    "use_flow_sigmas": _OFF,
    "use_lu_lambdas": _OFF,
    "timestep_type": ("discrete",),
    "interpolation_type": ("linear",),
    "sigma_min": (None,),
    "sigma_max": (None,),
    **_OTHER_LEVELS,
}


class ReadSchedules(Protocol):
    """The schedulers that a family reads."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Returns the classes of diffusers that are read."""

    def fault(self, name: str, config: Mapping[str, Any]) -> str | None:
        """Returns why the noise levels of a scheduler of class `name` are not read; None where they are."""


@dataclass(frozen=True)
class FlowSchedules:
    """Schedulers of flows. dynamic: the family's pipeline passes a shift that depends on the size; shift_alone: the
    family reads the shift alone, which solvers have too."""

    kinds: tuple[str, ...] = FLOW
    dynamic: bool = True
    shift_alone: bool = False

    def fault(self, name: str, config: Mapping[str, Any]) -> str | None:
        """Implements `ReadSchedules`."""
        if name not in self.kinds:
            return _unlisted(self.kinds)
        if name not in FLOW:
            if "flow_shift" not in config:
                return f"it has no flow_shift. {_instead(FLOW)}"
            return _unread(config, _SOLVER | _SHIFT_ALONE)
        more = _SHIFT_ALONE if self.shift_alone else {} if self.dynamic else _FIXED_SHIFT
        return _unread(config, _FLOW | more)


@dataclass(frozen=True)
class NoiseSchedules:
    """Schedulers of networks that predict noise. clips: the family's pipeline clips what it predicts where the
    scheduler has clip_sample."""

    kinds: tuple[str, ...] = NOISE
    clips: bool = False

    def fault(self, name: str, config: Mapping[str, Any]) -> str | None:
        """Implements `ReadSchedules`."""
        missing = [field for field in (*SCHEDULE, *SPACING) if field not in config]
        if name not in self.kinds:
            return _unlisted(self.kinds)
        if missing:
            return f"it has no {' and no '.join(missing)}. {_instead(self.kinds)}"
        kind = config["prediction_type"]
        if config.get("rescale_betas_zero_snr") and kind == "epsilon":
            return (
                "rescale_betas_zero_snr=True (zero terminal SNR) begins with noise alone, of which a network that "
                "predicts noise (prediction_type=epsilon) tells nothing about the image. Set rescale_betas_zero_snr "
                "to false there, as such a network was trained"
            )
        if kind != "epsilon":
            return f"its network predicts {kind}; networks that predict noise (epsilon) are supported"
        return _unread(config, _NOISE | ({"clip_sample": _OFF} if self.clips else {}))


def _unread(config: Mapping[str, Any], fields: Fields) -> str | None:
    """Returns the first field of a value that is not read."""
    for field, values in fields.items():
        if field in config and config[field] not in values:
            allowed = " or ".join(str(value) for value in values if value is not None) or "null"
            return f"{field}={config[field]} is not read. Set it to {allowed} in scheduler/scheduler_config.json"
    return None


def _unlisted(kinds: tuple[str, ...]) -> str:
    """Returns why a scheduler of another class is not read."""
    return f"its noise levels are not read. {_instead(kinds)}"


def _instead(kinds: tuple[str, ...]) -> str:
    return f"Supported are {', '.join(kinds)}: set pipe.scheduler to one of them and save the pipeline again"
