"""Checks that engines compute with the trained weights: by the tensors that they hold, and by log-probabilities of
their responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from mmrl.generation.weight_sync.checksums import HELD, Checksum, Report, absent, differing

NAMED = 3  # tensors in a message
NOISE = 4.0  # times the gap at the start, that a later one may have
# Mean gaps of the probe: up to the first one rounding is taken for the cause, up to the second one at the start.
FLOORS = {torch.float32: (1e-3, 1e-2), torch.bfloat16: (4e-2, 0.2)}
BEFORE = "after giving the weights to vLLM"
AFTER = "nothing was sampled with them; set rollout.generator=transformers"


class Arrivals:
    """Compares the tensors that engines hold with those that were sent, after each synchronisation."""

    def __init__(self) -> None:
        self.unused: dict[str, Checksum] | None = None  # tensors that no engine took the first time

    def judge(
        self, base: Mapping[str, Checksum], adapter: Mapping[str, Checksum], reports: Sequence[Report]
    ) -> tuple[str | None, dict[str, float]]:
        """Returns an error in one line or None, and how many tensors were compared as the engine computes with them
        (held), as they were before it packed them (packed), and not taken (unused)."""
        first = self.unused is None
        for report in reports:
            unused = {name: base[name] for name in absent(base, report.tensors)}
            self.unused = unused if self.unused is None else self.unused
            if problem := self._problem(base, adapter, report, unused, first):
                return f"{BEFORE} {problem}; {AFTER}", {}
        states = [tensor.state for report in reports[:1] for tensor in report.tensors.values()]
        held = sum(state == HELD for state in states)
        counts = {"held": held, "packed": len(states) - held, "unused": len(self.unused or ())}
        return None, {f"generation/tensors_{name}": float(count) for name, count in counts.items() if reports}

    def _problem(
        self,
        base: Mapping[str, Checksum],
        adapter: Mapping[str, Checksum],
        report: Report,
        unused: Mapping[str, Checksum],
        first: bool,
    ) -> str | None:
        """Returns what is wrong with the weights that an engine reports, or None: tensors that are missing or differ, a
        changed layout, parameters that got nothing, trained ones that it does not take."""
        sent = {**base, **adapter}
        if missing := [name for name in adapter if name not in report.tensors]:
            return f"its LoRA lacks {names(missing)}"
        if other := differing(sent, report.tensors):
            return f"{len(other)} of {len(sent)} tensors are not as they were sent: {names(other)}"
        if report.misplaced:
            return (
                f"{names(report.misplaced)} came as they were sent, but lie in another layout than at the start: its "
                "kernels read something else (repacked or transposed weights)"
            )
        if first and report.blank:
            others = f", while it did not take {names(list(unused))}: names do not fit" if unused else ""
            return f"its parameters {names(report.blank)} got nothing{others}"
        assert self.unused is not None
        if trained := [name for name, checksum in unused.items() if self.unused.get(name) != checksum]:
            return f"{names(trained)} are trained, and it does not take them"
        return None


@dataclass(frozen=True)
class Gap:
    """Means of |log-probability in the engine - in the model| over the tokens of all probes, of those with images and
    of those without."""

    mean: float
    images: float | None = None
    text: float | None = None


class Limit:
    """The largest gap that is still noise. Unless it is given, the first gap measures the model's own noise, in its
    precision and with its engine."""

    def __init__(self, limit: float | None, dtype: torch.dtype) -> None:
        self.floor, start = FLOORS[dtype]
        self.calibrated = limit is not None
        self.value = start if limit is None else limit

    def problem(self, gap: Gap, *, compared: bool) -> str | None:
        """Returns an error in one line if the gap is above the limit. compared: the weights were compared, and are
        right."""
        if not gap.mean <= self.value:  # true for NaN too
            return self._stale(gap, compared)
        if not self.calibrated:
            self.value, self.calibrated = max(self.floor, NOISE * gap.mean), True
        return None

    def _stale(self, gap: Gap, compared: bool) -> str:
        """Returns the message for a probe beyond the limit. compared: whether the engine's checksums were compared."""
        what = "weights or caches are stale"
        if compared and not self.calibrated:
            what = (
                "it has all tensors as they were sent, but computes something else with them, or its caches are stale"
            )
        elif compared:
            what = f"it has all tensors as they were sent, so that {self._remembered(gap)} caches are stale"
        return (
            f"{BEFORE} its log-probabilities differ from the trained model's by {gap.mean:.2g} in the mean, more than "
            f"rollout.generator.probe_limit={self.value:.3g}: {what}; set rollout.generator=transformers, or a higher "
            "limit"
        )

    def _remembered(self, gap: Gap) -> str:
        """Returns which caches are stale. Keys and values are cached of text too, so a gap of text means all of
        them."""
        alone = gap.text is not None and gap.text <= self.value and not (gap.images or 0.0) <= self.value
        return "of encoded images the" if alone else "its"


def names(parts: Sequence[str]) -> str:
    more = f" and {len(parts) - NAMED} more" if len(parts) > NAMED else ""
    return ", ".join(parts[:NAMED]) + more
