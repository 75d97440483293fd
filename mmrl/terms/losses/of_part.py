"""A loss term that is restricted to the text or the image of a response."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.protocols.requirements import Needs
from mmrl.settings import option
from mmrl.terms.losses.kl import KL
from mmrl.terms.term import Term

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch
    from mmrl.rollouts import Replay, Rollouts

OTHER_TERMS = {name: path for name, path in Term.kinds.items() if name != "of_part"}


class OfPart(Term):
    """Another term, such as `kl` or `entropy`, restricted to the text or the image tokens of a response.

    Two of these give text and image separate weights. The term's metrics get the part's name, and `entropy/text` (or
    `entropy/image`) is logged; a coefficient that follows it is ReasonGen-R1's adaptive entropy.
    """

    equation: ClassVar[str] = "the term's values where a decision is in the part, else 0"
    source: ClassVar[str] = "reconstructed from T2I-R1, arXiv 2505.00703, and ReasonGen-R1, arXiv 2505.24875"
    test: ClassVar[str] = "tests/joints/test_parts.py"
    type: str = "of_part"
    part: Literal["text", "image"] = option(description="part of the response")
    term: Term = option(KL(), "loss term of that part", kinds=OTHER_TERMS)

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"parts"})) | self.term.needs

    def prepare(self, batch: Batch) -> None:
        self.term.prepare(batch)

    @property
    def note_at_one_update(self) -> str:
        return self.term.note_at_one_update

    @property
    def remark(self) -> str:
        return self.term.remark

    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes the term's values, 0 outside the part, and its statistics and the entropy, NaN outside the
        part; [rollout, decision]."""
        import torch

        from mmrl.rollouts import IMAGE, TEXT, part_mask

        values, stats = self.term.values(micro, replay)
        if replay.entropy is not None:
            stats = stats | {"entropy": replay.entropy.detach()}
        inside = part_mask(micro, TEXT if self.part == "text" else IMAGE).to(values.device)
        return values.where(inside, 0.0), {
            f"{name}/{self.part}": value.where(inside, torch.nan) for name, value in stats.items()
        }
