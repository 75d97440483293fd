"""The schedulers of diffusers, and values of their configuration, that are supported: those whose noise levels are
reproduced here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

FLOW = ("FlowMatchEulerDiscreteScheduler",)
# Solvers of higher order with the noise levels of FlowMatchEulerDiscreteScheduler.
FLOW_SOLVERS = ("UniPCMultistepScheduler", "DPMSolverMultistepScheduler")
# Schedulers of networks that predict noise; not those with another prediction or sampler (LCM, TCD, EDM, flow).
NOISE = (
    *("DDIMScheduler", "DDIMParallelScheduler", "DDPMScheduler", "DDPMParallelScheduler", "PNDMScheduler"),
    *("EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler", "LMSDiscreteScheduler", "HeunDiscreteScheduler"),
    *("KDPM2DiscreteScheduler", "KDPM2AncestralDiscreteScheduler", "DPMSolverMultistepScheduler"),
    *("DEISMultistepScheduler", "UniPCMultistepScheduler", "SASolverScheduler"),
)
SCHEDULE = ("num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas")
SPACING = ("timestep_spacing", "steps_offset", "prediction_type")
BETAS = ("linear", "scaled_linear", "squaredcos_cap_v2")

Fields = dict[str, tuple[Any, ...]]  # supported values by field of a scheduler's configuration
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


class SupportedSchedules(Protocol):
    """The schedulers that a family supports."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The names of supported classes of diffusers."""

    def problem(self, name: str, config: Mapping[str, Any]) -> str | None:
        """Returns why a scheduler of class `name` is not supported, None if it is. config: its configuration."""


@dataclass(frozen=True)
class FlowSchedules:
    """Supported schedulers of flow models."""

    kinds: tuple[str, ...] = FLOW
    dynamic: bool = True  # the pipeline passes a shift that depends on the image size (use_dynamic_shifting)
    shift_alone: bool = False  # the family reads only the shift, which the solvers in FLOW_SOLVERS have too

    def problem(self, name: str, config: Mapping[str, Any]) -> str | None:
        """Returns why a scheduler of class `name` is not supported, as the end of an error message; None if it is.
        config: the scheduler's configuration."""
        if name not in self.kinds:
            return _unsupported_class(self.kinds)
        if name not in FLOW:
            if "flow_shift" not in config:
                return f"it has no flow_shift. {_supported_classes(FLOW)}"
            return _unsupported_value(config, _SOLVER | _SHIFT_ALONE)
        # fields that must have certain values because the family computes noise levels from the shift alone, or because
        # it passes no shift that depends on the image size
        more = _SHIFT_ALONE if self.shift_alone else {} if self.dynamic else _FIXED_SHIFT
        return _unsupported_value(config, _FLOW | more)


@dataclass(frozen=True)
class NoiseSchedules:
    """Supported schedulers of networks that predict noise."""

    kinds: tuple[str, ...] = NOISE
    clips: bool = False  # the pipeline applies clip_sample of the scheduler, which is not supported

    def problem(self, name: str, config: Mapping[str, Any]) -> str | None:
        """Returns why a scheduler of class `name` is not supported, as the end of an error message; None if it is.
        config: the scheduler's configuration."""
        missing = [field for field in (*SCHEDULE, *SPACING) if field not in config]
        if name not in self.kinds:
            return _unsupported_class(self.kinds)
        if missing:
            return f"it has no {' and no '.join(missing)}. {_supported_classes(self.kinds)}"
        prediction = config["prediction_type"]
        if config.get("rescale_betas_zero_snr") and prediction == "epsilon":
            return (
                "with rescale_betas_zero_snr=True (zero terminal SNR) sampling starts from pure noise, from which a "
                "network that predicts noise (prediction_type=epsilon) cannot make an image. Set "
                "rescale_betas_zero_snr to false in scheduler/scheduler_config.json, as in the training of such "
                "networks"
            )
        if prediction != "epsilon":
            return f"its network predicts {prediction}, but only networks that predict noise (epsilon) are supported"
        return _unsupported_value(config, _NOISE | ({"clip_sample": _OFF} if self.clips else {}))


def _unsupported_value(config: Mapping[str, Any], fields: Fields) -> str | None:
    """Returns a message for the first field with an unsupported value, None if there is none."""
    for field, values in fields.items():
        if field in config and config[field] not in values:
            allowed = " or ".join(str(value) for value in values if value is not None) or "null"
            return f"{field}={config[field]} is not supported. Set it to {allowed} in scheduler/scheduler_config.json"
    return None


def _unsupported_class(kinds: tuple[str, ...]) -> str:
    """Returns the message for a scheduler whose class is not one of `kinds`."""
    return f"it is not supported. {_supported_classes(kinds)}"


def _supported_classes(kinds: tuple[str, ...]) -> str:
    """Returns the part of a message that says which schedulers are supported."""
    return f"Supported are {', '.join(kinds)}: set pipe.scheduler to one of them and save the pipeline again"
