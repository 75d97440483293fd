"""Checks that vLLM engines compute with the trained weights: by checksums of their tensors, and by log-probabilities
of their responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from mmrl.generation.weight_sync.checksums import HELD, Checksum, Report, absent, differing

MAX_NAMED = 3  # tensors that a message names
NOISE_FACTOR = 4.0  # a later gap may be this many times the first gap
# Mean gaps that count as rounding, in nats: the lower bound of the limit, and the limit for the first gap.
LIMITS = {torch.float32: (1e-3, 1e-2), torch.bfloat16: (4e-2, 0.2)}
PREFIX = "after sending the weights to vLLM,"
SUFFIX = "nothing was sampled with them; set rollout.generator=transformers"


class ChecksumComparison:
    """Compares the checksums of the tensors in each engine with those of the tensors that were sent to it."""

    def __init__(self) -> None:
        # Sent tensors that no engine loaded the first time. They must not change later, or training has no effect.
        self.unused: dict[str, Checksum] | None = None

    def compare(
        self, base: Mapping[str, Checksum], adapter: Mapping[str, Checksum], reports: Sequence[Report]
    ) -> tuple[str | None, dict[str, float]]:
        """Returns an error message or None, and three numbers of tensors as metrics: those compared in the form with
        which the engine computes (held), those compared in the form before the engine packed them (packed), and those
        that were sent, but that no engine loads (unused).

        base, adapter: checksums of the sent weights and of the sent LoRA, by name. reports: one per engine. Sent
        tensors that the first engine does not load at the first call are remembered in `unused`. The metrics are those
        of the first engine.
        """
        is_first_sync = self.unused is None
        for report in reports:
            unused = {name: base[name] for name in absent(base, report.tensors)}
            self.unused = unused if self.unused is None else self.unused
            if problem := self._problem(base, adapter, report, unused, is_first_sync):
                return f"{PREFIX} {problem}; {SUFFIX}", {}
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
        is_first_sync: bool,
    ) -> str | None:
        """Returns what is wrong with the tensors of one engine, for a message, or None. Checked are missing and
        different tensors, the memory layout, parameters without weights, and trained tensors that the engine does not
        load.

        unused: sent tensors that this engine did not load. is_first_sync: whether this is the first synchronisation.
        """
        sent = {**base, **adapter}
        if missing := [name for name in adapter if name not in report.tensors]:
            return f"its LoRA lacks {names(missing)}"
        if different := differing(sent, report.tensors):
            return f"{len(different)} of the {len(sent)} tensors in it are not as they were sent: {names(different)}"
        if report.misplaced:
            return (
                f"{names(report.misplaced)} have the values that were sent, but another memory layout than at the "
                "start, so its kernels would read wrong values (repacked or transposed weights)"
            )
        if is_first_sync and report.blank:
            hint = f", and it did not load {names(list(unused))}: the names do not match" if unused else ""
            return f"its parameters {names(report.blank)} got no weights{hint}"
        assert self.unused is not None
        if trained := [name for name, checksum in unused.items() if self.unused.get(name) != checksum]:
            return f"{names(trained)} are trained, but it does not load them"
        return None


@dataclass(frozen=True)
class Gap:
    """The mean of |log-probability in the engine - log-probability in the model| over the response tokens of probes
    (see `Synced`)."""

    mean: float  # of all probes
    images: float | None = None  # of probes with images; None: no probe has images
    text: float | None = None  # of probes without images


class GapLimit:
    """The largest gap that counts as rounding. If the user sets no limit, it is NOISE_FACTOR times the first gap, which
    measures the rounding of this model and engine."""

    def __init__(self, limit: float | None, dtype: torch.dtype) -> None:
        """limit: rollout.generator.probe_limit. dtype: the number format of the model's weights."""
        self.min_limit, first_limit = LIMITS[dtype]
        self.calibrated = limit is not None  # False: the first gap will set `value`
        self.value = first_limit if limit is None else limit

    def problem(self, gap: Gap, *, compared: bool) -> str | None:
        """Returns an error message if the gap is above the limit, else None. If the user set no limit, the first
        gap determines it. compared: whether the checksums of the weights were compared, and are equal."""
        if not gap.mean <= self.value:  # true for NaN too
            return self._message(gap, compared)
        if not self.calibrated:
            self.value, self.calibrated = max(self.min_limit, NOISE_FACTOR * gap.mean), True
        return None

    def _message(self, gap: Gap, compared: bool) -> str:
        """Returns the error message for a gap above the limit, with its likely cause. compared: see `problem`."""
        cause = "its weights or caches are stale"
        if compared and not self.calibrated:
            cause = (
                "it has all tensors as they were sent, but computes something else with them, or its caches are stale"
            )
        elif compared:
            cause = f"it has all tensors as they were sent, so {self._stale_cache(gap)} is stale"
        return (
            f"{PREFIX} its log-probabilities differ from the trained model's by {gap.mean:.2g} on average, more than "
            f"rollout.generator.probe_limit={self.value:.3g}: {cause}; set rollout.generator=transformers, or a higher "
            "limit"
        )

    def _stale_cache(self, gap: Gap) -> str:
        """Returns the name of the stale cache: the cache of encoded images if only probes with images have a large gap,
        else the key-value cache, which probes without images use too."""
        # written with `not`, so that NaN counts as large; a gap is None if no probe is of that kind
        images_only = gap.text is not None and gap.text <= self.value and not (gap.images or 0.0) <= self.value
        return "its cache of encoded images" if images_only else "its key-value cache"


def names(parts: Sequence[str]) -> str:
    """Returns up to MAX_NAMED names as text for a message, and how many more there are."""
    more = f" and {len(parts) - MAX_NAMED} more" if len(parts) > MAX_NAMED else ""
    return ", ".join(parts[:MAX_NAMED]) + more
