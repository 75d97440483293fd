"""Rates of a step: units of work and floating-point operations a second and rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmrl.engine.device_peaks import device_flops
from mmrl.engine.flops import PolicyWork
from mmrl.protocols.abilities import Counting

FLOPS = "_flops"  # ending of the operations of a phase among totals of work
PHASES = ("rollout", "update")


@dataclass(frozen=True)
class Workload:
    """The work of a policy, and the rates of a step. epochs: how often an update learns from a rollout. peak:
    operations a second of a rank's GPU; None: not known."""

    work: PolicyWork
    epochs: int
    peak: float | None

    @classmethod
    def from_policy(cls, policy: object, epochs: int, dtype: str) -> Workload | None:
        """Returns the workload of a policy whose products are of this dtype; None where it counts nothing."""
        return cls(policy.work, epochs, device_flops(dtype)) if isinstance(policy, Counting) else None

    def rates(
        self, work: Sequence[Mapping[str, float]], busy: Sequence[Mapping[str, float]], times: Mapping[str, float]
    ) -> dict[str, float]:
        """Returns the rates of a step. work: units and operations of each rank; busy: its seconds by phase without
        waiting; times: seconds by metric."""
        totals = {name: sum(by_name[name] for by_name in work) for name in work[0]}
        seconds = {phase: times[f"time/{phase}"] for phase in (*PHASES, "step") if f"time/{phase}" in times}
        worked = sum(sum(phases.values()) for phases in busy) / len(busy)
        idle = max(0.0, 1 - worked / seconds["step"])
        by_unit = rates(totals, seconds, ranks=len(work), epochs=self.epochs, peak=self.peak)
        return {**by_unit, "throughput/idle_share": idle}


def rates(
    work: Mapping[str, float], seconds: Mapping[str, float], *, ranks: int, epochs: int, peak: float | None
) -> dict[str, float]:
    """Returns the rates of a step by metric name, of one rank on average: a rank is a GPU, where there are any.

    work: totals over ranks, by unit or by phase + FLOPS. seconds: of "rollout", "update" and "step". Where peak is
    given, the share of it that is reached (MFU) comes too. Phases without operations of this process, as where others
    generate, have no rate of them.
    """
    metrics = {}
    for unit, total in work.items():
        if unit.endswith(FLOPS):
            continue
        for phase, spent in seconds.items():
            prefix, times = ("", 1) if phase == "step" else (f"{phase}_", epochs if phase == "update" else 1)
            metrics[f"throughput/{prefix}{unit}_per_second"] = total * times / ranks / spent
    every = {phase: work.get(phase + FLOPS, 0.0) / ranks for phase in PHASES}
    every["step"] = sum(every.values())
    for phase, flops in every.items():
        if flops > 0:
            rate, prefix = flops / seconds[phase], "" if phase == "step" else f"{phase}_"
            metrics[f"throughput/{prefix}tflops_per_second"] = rate / 1e12
            if peak is not None:
                metrics[f"throughput/{prefix}mfu"] = rate / peak
    return metrics
