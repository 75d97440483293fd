"""Requirements of algorithms and their parts, capabilities of policies, and the check that compares them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import reduce
from typing import TYPE_CHECKING, Any

from mmrl.protocols.columns import DECISION_STATISTICS, STATISTICS, TURN_COLUMNS, NeededColumn
from mmrl.protocols.measurement import CollectedMeasurement, Measurement, PreparedMeasurement, ReplayedMeasurement
from mmrl.protocols.offers import Offer, describe_offer
from mmrl.settings import SettingsError

if TYPE_CHECKING:
    from mmrl.protocols.critic import CriticSettings


@dataclass(frozen=True)
class Reference:
    """The reference policy that a part needs: the weights at the start of the run, unless it moves.

    resets: periods in steps after which the reference is set to the current policy. decays: decays of an exponential
    moving average of the policy's weights, which is then the reference. optimizer_resets: periods in steps after which
    the optimizer's moments are set to 0.
    """

    resets: frozenset[int] = frozenset()
    decays: frozenset[float] = frozenset()
    optimizer_resets: frozenset[int] = frozenset()

    @property
    def moves(self) -> bool:
        """Returns whether the reference changes during the run."""
        return bool(self.resets or self.decays)

    def __or__(self, other: Reference) -> Reference:
        return Reference(
            self.resets | other.resets, self.decays | other.decays, self.optimizer_resets | other.optimizer_resets
        )


@dataclass(frozen=True)
class Needs:
    """Requirements of an algorithm, or of a part of it (a term, a shaper, a mask), on the rest of the job.

    - offers: features that the policy's decisions must support, as keys of OFFERS and ability classes
    - old: log-probabilities under the policy that sampled the rollouts, in each micro-batch of the loss
    - reference: log-probabilities under the reference policy
    - critic: an estimate of the value of every observation
    - statistics: statistics of decisions that are computed before the advantages ("logp", "entropy", "square_sum")
    - whole_groups: every micro-batch must hold whole groups
    - measurements: further quantities of a step's rollouts
    - columns: columns of `Batch.column` that are read by name, see `needs_column`
    - gates: names of rewards that multiply the other rewards; such a reward must be 1, not 0, for prompts that it does
      not judge
    """

    offers: frozenset[Offer] = frozenset()
    old: bool = False
    reference: Reference | None = None
    critic: CriticSettings | None = None
    statistics: frozenset[str] = frozenset()
    whole_groups: bool = False
    measurements: tuple[Measurement[Any], ...] = ()
    columns: frozenset[NeededColumn] = frozenset()
    gates: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Raises SettingsError for a value of a wrong type, with the form to write, and for an unknown statistic."""
        if self.reference is not None and not isinstance(self.reference, Reference):
            raise SettingsError(
                f"Needs(reference={self.reference!r}): write Needs(reference=Reference()), with Reference from "
                "mmrl.protocols.requirements; the log-probabilities are then in micro.ref_logp"
            )
        for name in ("offers", "statistics", "columns", "gates"):
            if not isinstance(vars(self)[name], frozenset):
                raise SettingsError(f"Needs({name}={vars(self)[name]!r}): write it as frozenset({{...}})")
        if not isinstance(self.measurements, tuple):
            raise SettingsError(f"Needs(measurements={self.measurements!r}): write it as a tuple, (Mine(),)")
        for measurement in self.measurements:
            if not isinstance(measurement, Measurement):
                raise SettingsError(
                    f"Needs(measurements=...): {measurement!r} is not an object of a class that inherits from "
                    "CollectedMeasurement, PreparedMeasurement or ReplayedMeasurement of mmrl.protocols.measurement"
                )
        unknown = self.statistics - DECISION_STATISTICS
        if unknown:
            raise SettingsError(
                f"Needs(statistics=...): unknown {min(unknown)!r}; there are {', '.join(sorted(DECISION_STATISTICS))}"
            )

    @property
    def required(self) -> frozenset[Offer]:
        """Returns what the policy's decisions must support, for this part and its measurements."""
        return self.offers.union(*(measurement.required for measurement in self.measurements))

    @property
    def collected(self) -> list[CollectedMeasurement[Any]]:
        return [measurement for measurement in self.measurements if isinstance(measurement, CollectedMeasurement)]

    @property
    def prepared(self) -> list[PreparedMeasurement[Any]]:
        return [measurement for measurement in self.measurements if isinstance(measurement, PreparedMeasurement)]

    @property
    def replayed(self) -> list[ReplayedMeasurement[Any]]:
        return [measurement for measurement in self.measurements if isinstance(measurement, ReplayedMeasurement)]

    def __or__(self, other: Needs) -> Needs:
        return Needs(**{f.name: _merge_values(vars(self)[f.name], vars(other)[f.name]) for f in fields(Needs)})


def needs_column(name: str, *, varies: bool = False) -> Needs:
    """Returns the needs of a part that reads `Batch.column(name)`. varies: whether the column must differ between the
    rollouts of a group."""
    needed = NeededColumn(name, varies)
    offers: set[Offer] = {"turns"} if needed.column in TURN_COLUMNS else set()
    if needed.column == "entropy":
        offers.add("entropy")
    return Needs(frozenset(offers), statistics=frozenset({needed.column} & STATISTICS), columns=frozenset({needed}))


def _merge_values(left: Any, right: Any) -> Any:
    """Merges two values of a field of `Needs`: concatenates tuples without duplicates, joins others by `|`. None counts
    as missing."""
    if left is None or right is None:
        return left if right is None else right
    return tuple(dict.fromkeys((*left, *right))) if isinstance(left, tuple) else left | right


def merge_needs(parts: Iterable[Needs]) -> Needs:
    """Returns the union of the needs of several parts."""
    return reduce(Needs.__or__, parts, Needs())


@dataclass(frozen=True)
class Capabilities:
    """The capabilities of a job's policy. source: the key and value that determine them, for error messages, such as
    "model.type=diffusion". offers: what its decisions support. groups: names of parameter groups besides the
    policy's own, such as "critic"."""

    source: str
    offers: frozenset[Offer] = frozenset()
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    groups: tuple[str, ...] = field(default=())


def check(parts: Iterable[tuple[str, Needs]], offered: Capabilities) -> None:
    """Compares the needs of a job's parts with what its policy offers.

    parts: pairs of a configuration key and the needs of the part there. Raises SettingsError with the key of the first
    part that needs something the policy does not offer, a critic that no part trains, or a moving reference that
    conflicts with another part's.
    """
    parts = list(parts)
    _check_one_reference([(key, needs.reference.decays) for key, needs in parts if needs.reference is not None])
    for key, needs in parts:
        missing = needs.required - offered.offers
        if missing:
            # of several missing ones: abilities first, then by description, so that the message is always the same
            named = min(missing, key=lambda offer: (isinstance(offer, str), describe_offer(offer)))
            raise SettingsError(
                f"{key} needs {describe_offer(named)}, which {offered.source} does not have; change one of them"
            )
        if "critic" in needs.required and all(needs.critic is None for _, needs in parts):
            raise SettingsError(f"{key} needs a critic, and no part of the job trains one: use algorithm.type=ppo")


def _check_one_reference(references: list[tuple[str, frozenset[float]]]) -> None:
    """Raises SettingsError where two parts need reference policies with different decays, since a job has one.
    references: pairs of a configuration key and the decays."""
    for key, decays in references:
        first_key, first_decays = references[0]
        if decays != first_decays:
            first, other = (", ".join(map(str, values)) or "none" for values in (first_decays, decays))
            raise SettingsError(
                f"{key} needs a reference policy that is an average with decay {other}, and {first_key} one with decay "
                f"{first}, but a job has one reference; give both the same decay, or remove one of them"
            )
