"""Throughput of a step: units of work (such as tokens) and floating-point operations a second, for each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmrl.engine.device_peaks import device_flops
from mmrl.engine.flops import PolicyWork
from mmrl.protocols.abilities import Counting

FLOPS = "_flops"  # a phase's floating-point operations have the key PHASE_flops among the totals of work
PHASES = ("rollout", "update")


@dataclass(frozen=True)
class Workload:
    """The work of a policy, from which the throughput of a step is computed. epochs: number of passes over a rollout in
    updates. peak: peak operations a second of a rank's GPU; None: unknown."""

    work: PolicyWork
    epochs: int
    peak: float | None

    @classmethod
    def from_policy(cls, policy: object, epochs: int, dtype: str) -> Workload | None:
        """Returns the workload of a policy; None if it does not count its work. dtype: the dtype of its matrix
        products."""
        return cls(policy.work, epochs, device_flops(dtype)) if isinstance(policy, Counting) else None

    def rates(
        self, work: Sequence[Mapping[str, float]], busy: Sequence[Mapping[str, float]], times: Mapping[str, float]
    ) -> dict[str, float]:
        """Returns the throughput metrics of a step.

        work: for each rank, units by name, and operations by phase + FLOPS. busy: for each rank, seconds by phase
        without waiting for other ranks. times: metrics "time/..." of the step in seconds."""
        totals = {name: sum(by_name[name] for by_name in work) for name in work[0]}
        seconds = {phase: times[f"time/{phase}"] for phase in (*PHASES, "step") if f"time/{phase}" in times}
        worked = sum(sum(phases.values()) for phases in busy) / len(busy)
        idle = max(0.0, 1 - worked / seconds["step"])
        by_unit = rates(totals, seconds, ranks=len(work), epochs=self.epochs, peak=self.peak)
        return {**by_unit, "throughput/idle_share": idle}


def rates(
    work: Mapping[str, float], seconds: Mapping[str, float], *, ranks: int, epochs: int, peak: float | None
) -> dict[str, float]:
    """Returns throughput metrics by name, averaged over ranks (a rank is a GPU, where there are any).

    work: totals over ranks, by unit or by phase + FLOPS. seconds: duration by phase (rollout, update), and of the whole
    step. peak: peak operations a second; if given, the share of it that is reached (MFU) is a metric too. A phase
    without operations in this process, as where vLLM servers generate, has no metrics of operations.
    """
    metrics = {}
    for unit, total in work.items():
        if unit.endswith(FLOPS):
            continue
        for phase, phase_seconds in seconds.items():
            prefix, passes = ("", 1) if phase == "step" else (f"{phase}_", epochs if phase == "update" else 1)
            metrics[f"throughput/{prefix}{unit}_per_second"] = total * passes / ranks / phase_seconds
    flops_by_phase = {phase: work.get(phase + FLOPS, 0.0) / ranks for phase in PHASES}
    flops_by_phase["step"] = sum(flops_by_phase.values())
    for phase, flops in flops_by_phase.items():
        if flops > 0:
            rate, prefix = flops / seconds[phase], "" if phase == "step" else f"{phase}_"
            metrics[f"throughput/{prefix}tflops_per_second"] = rate / 1e12
            if peak is not None:
                metrics[f"throughput/{prefix}mfu"] = rate / peak
    return metrics
