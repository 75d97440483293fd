"""The training engine: DeepSpeed, the ranks of a job and their collectives, and averages of weights."""

from typing import TYPE_CHECKING

from mmrl.runtime import lazy_attributes

if TYPE_CHECKING:
    from mmrl.engine.deepspeed import Engine, Ranks, gathered_parameters, start_distributed
    from mmrl.engine.ema import EMA, applied, ema_warmup, ramp
    from mmrl.engine.files import weights_only
    from mmrl.engine.heartbeat import Heartbeat
    from mmrl.engine.interruption import Interruption
    from mmrl.engine.launcher import end_with_launcher, select_device
    from mmrl.engine.memory import memory_estimate

__all__ = [
    "Engine",
    "Heartbeat",
    "Interruption",
    "Ranks",
    "EMA",
    "applied",
    "end_with_launcher",
    "gathered_parameters",
    "memory_estimate",
    "ramp",
    "start_distributed",
    "select_device",
    "ema_warmup",
    "weights_only",
]

__getattr__ = lazy_attributes.attributes(
    __name__,
    {name: "mmrl.engine.deepspeed" for name in ("Engine", "Ranks", "gathered_parameters", "start_distributed")}
    | {"memory_estimate": "mmrl.engine.memory", "Heartbeat": "mmrl.engine.heartbeat"}
    | {"weights_only": "mmrl.engine.files", "Interruption": "mmrl.engine.interruption"}
    | {name: "mmrl.engine.launcher" for name in ("end_with_launcher", "select_device")}
    | {name: "mmrl.engine.ema" for name in ("EMA", "applied", "ramp", "ema_warmup")},
)
