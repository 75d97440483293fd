"""Credit of sections: parts of a response, such as reasoning and answer, with advantages from rewards of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import model_validator

from mmrl.measurements.sections import SectionMembers
from mmrl.protocols.requirements import Needs
from mmrl.settings import Section, option
from mmrl.terms.term import Shaper

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class ResponseSection(Section):
    """A part of a response, from one text to another, both included."""

    begin: str = option("", 'text that the section begins with, such as <think>; "": the beginning of the response')
    end: str = option(
        "", 'text that the section ends with, such as </think>; "", or where it is missing: the end of the response'
    )
    rewards: dict[str, float] = option(
        {}, "names and weights of the section's own rewards; {}: the algorithm's advantage"
    )
    weight: float = option(1.0, "weight of the section's advantages", ge=0)

    @model_validator(mode="after")
    def _is_bounded(self) -> ResponseSection:
        if not self.begin and not self.end:
            raise ValueError("a section needs `begin` or `end`; without both it is the whole response")
        return self

    @property
    def members(self) -> SectionMembers:
        return SectionMembers(self.begin, self.end)


class SectionCredit(Shaper):
    """Gives sections of a response advantages from rewards of their own, so that a wrong box is not blamed on a right
    answer. The other tokens keep the algorithm's advantage.

    A reward that should count in its section only has the weight 0 in task.rewards. A response without the section
    counts in its group's baseline.
    """

    equation: ClassVar[str] = (
        "A_t = weight (r_s - mean of the group) / scale for t in section s, r_s the weighted sum of the section's own "
        "rewards; the mean over the sections of t if it is in several"
    )
    source: ClassVar[str] = (
        "reconstructed from the abstract of OmniVerifier-M1: separate objectives of a verifier's judgement and of its "
        "boxes"
    )
    test: ClassVar[str] = "tests/joints/test_sections.py"
    type: str = "section_credit"
    sections: list[ResponseSection] = option(description="the sections", min_length=1)
    scale: Literal["group_std", "none"] = option(
        "group_std", "normalization of advantages from a section's own rewards"
    )

    @property
    def needs(self) -> Needs:
        return Needs(measurements=tuple(dict.fromkeys(section.members for section in self.sections)))

    def check_rewards(self, names: list[str]) -> None:
        for section in self.sections:
            for name in section.rewards:
                if name not in names:
                    raise ValueError(
                        f"algorithm.shaping: sections: {name} is not a reward; choose from {', '.join(names)}"
                    )

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        """Returns the advantages of each decision's sections, or the algorithm's outside all sections; [rollout,
        decision]."""
        import torch

        from mmrl.terms.shapers.segments import advantages_of_rewards

        total, count = torch.zeros_like(advantages), torch.zeros_like(advantages)
        for section in self.sections:
            members = batch.measured(section.members).values.to(advantages)
            own = advantages
            if section.rewards:
                own = advantages_of_rewards(section.rewards, batch, self.scale).to(advantages).expand_as(advantages)
            total += section.weight * own * members
            count += members
        return (total / count.clamp(min=1)).where(count > 0, advantages)
