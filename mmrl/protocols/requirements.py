"""What decisions can support, what algorithms and terms need of them, and the one place where the two are compared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import reduce
from typing import TYPE_CHECKING, Any

from mmrl.protocols.measurement import CollectedMeasurement, Measurement, PreparedMeasurement, ReplayedMeasurement
from mmrl.protocols.offers import Offer, sentence_of
from mmrl.settings import SettingsError

if TYPE_CHECKING:
    from mmrl.protocols.critic import CriticSettings


@dataclass(frozen=True)
class Reference:
    """The reference policy that a part asks for. resets: the present policy becomes it every so many steps; decays: it
    follows the present one as an average of its weights, with this decay a step; neither: it stays what it was."""

    resets: frozenset[int] = frozenset()
    decays: frozenset[float] = frozenset()

    @property
    def moves(self) -> bool:
        return bool(self.resets or self.decays)

    def __or__(self, other: Reference) -> Reference:
        return Reference(self.resets | other.resets, self.decays | other.decays)


@dataclass(frozen=True)
class Needs:
    """What an algorithm or a part of it asks of the rest of the job.

    offers: what decisions must support; keys of OFFERS, and abilities. old: likelihoods under the policy that made the
    rollouts, in the micro-batches of a loss; None where that is the policy that is trained. reference: likelihoods
    under the reference policy. critic: what gives a value of every observation. statistics: of decisions ("logp",
    "entropy", "square_sum"), before the advantages. whole_groups: every micro-batch holds whole groups. measurements:
    whatever else is to be known of a step's rollouts.
    """

    offers: frozenset[Offer] = frozenset()
    old: bool = False
    reference: Reference | None = None
    critic: CriticSettings | None = None
    statistics: frozenset[str] = frozenset()
    whole_groups: bool = False
    measurements: tuple[Measurement[Any], ...] = ()

    @property
    def required(self) -> frozenset[Offer]:
        """What decisions must support, for its measurements too."""
        return self.offers.union(*(measurement.required for measurement in self.measurements))

    @property
    def collected(self) -> list[CollectedMeasurement[Any]]:
        return [found for found in self.measurements if isinstance(found, CollectedMeasurement)]

    @property
    def prepared(self) -> list[PreparedMeasurement[Any]]:
        return [found for found in self.measurements if isinstance(found, PreparedMeasurement)]

    @property
    def replayed(self) -> list[ReplayedMeasurement[Any]]:
        return [found for found in self.measurements if isinstance(found, ReplayedMeasurement)]

    def __or__(self, other: Needs) -> Needs:
        return Needs(**{f.name: _either(vars(self)[f.name], vars(other)[f.name]) for f in fields(Needs)})


def _either(one: Any, other: Any) -> Any:
    """Of tuples each member once; of a thing that there is one of, the one that is there."""
    if one is None or other is None:
        return one if other is None else other
    return tuple(dict.fromkeys((*one, *other))) if isinstance(one, tuple) else one | other


def together(parts: Iterable[Needs]) -> Needs:
    return reduce(Needs.__or__, parts, Needs())


@dataclass(frozen=True)
class Capabilities:
    """What the decisions of a job's policy support. of: the key and value that decide it, for messages."""

    of: str
    offers: frozenset[Offer] = frozenset()
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    groups: tuple[str, ...] = field(default=())  # named groups of parameters beside the policy's own


def check(parts: Iterable[tuple[str, Needs]], offered: Capabilities) -> None:
    """Raises SettingsError for the first part, named by its key, that needs what is not offered, or another reference
    than a part before it."""
    parts = list(parts)
    _one_reference([(key, needs.reference.decays) for key, needs in parts if needs.reference is not None])
    for key, needs in parts:
        lacked = sorted(needs.required - offered.offers, key=lambda offer: (isinstance(offer, str), sentence_of(offer)))
        if lacked:
            raise SettingsError(f"{key} needs {sentence_of(lacked[0])}, which {offered.of} does not have")


def _one_reference(asked: list[tuple[str, frozenset[float]]]) -> None:
    """There is one reference policy: where it follows the present one, all that ask for it must mean that."""
    for key, decays in asked:
        if decays != asked[0][1]:
            first, other = (", ".join(map(str, found)) or "none" for found in (asked[0][1], decays))
            raise SettingsError(
                f"{key} asks for a reference that follows with decay {other}, {asked[0][0]} with {first}: a job has "
                "one reference; leave one of them out, or give both the same decay"
            )
