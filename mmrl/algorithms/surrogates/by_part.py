"""Separate surrogates for the text and the image of a response."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import model_validator

from mmrl.algorithms.surrogates.surrogate import Clip, Result, Surrogate
from mmrl.protocols.requirements import Needs
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch
    from mmrl.rollouts import Replay, Rollouts

# teacher_ratio changes the ratio of all decisions, so it cannot be that of one part
OTHER_SURROGATES = {name: path for name, path in Surrogate.kinds.items() if name not in ("by_part", "teacher_ratio")}


class ByPart(Surrogate):
    """Separate surrogates for the text tokens of a response and for its image tokens or denoising steps.

    So a text token may have a wider clip range than one of hundreds of image tokens, for example.
    """

    equation: ClassVar[str] = (
        "text's values where a decision is a text token, image's where it is an image token or a step"
    )
    source: ClassVar[str] = (
        "reconstructed from T2I-R1, arXiv 2505.00703, and ReasonGen-R1, arXiv 2505.24875: two levels of tokens in one "
        "objective"
    )
    test: ClassVar[str] = "tests/joints/test_parts.py"
    at_one_update: ClassVar[str] = "see the surrogate of each part; with clip the gradient is that of reinforce"
    type: str = "by_part"
    text: Surrogate = option(Clip(), "objective of the text's tokens", kinds=OTHER_SURROGATES)
    image: Surrogate = option(Clip(), "objective of the image's tokens or steps", kinds=OTHER_SURROGATES)

    @model_validator(mode="after")
    def _check_objectives(self) -> ByPart:
        """Raises ValueError if a surrogate has an objective of whole rollouts."""
        for name, surrogate in (("text", self.text), ("image", self.image)):
            if type(surrogate).objective not in (Surrogate.objective, Clip.objective):
                raise ValueError(
                    f"{name}={surrogate.type} has an objective of whole rollouts, which cannot be split into text and "
                    "image; set a surrogate of single decisions, such as clip"
                )
        return self

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"parts"})) | self.text.needs | self.image.needs

    @property
    def note_at_one_update(self) -> str:
        """Returns what the two surrogates do if all ratios are 1, each with the name of its part."""
        parts = (("text", self.text), ("image", self.image))
        notes = ((name, surrogate.note_at_one_update) for name, surrogate in parts)
        return "; ".join(f"{name}: {note}" for name, note in notes if note)

    def prepare(self, batch: Batch) -> None:
        self.text.prepare(batch)
        self.image.prepare(batch)

    def values(self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay) -> Result:
        """Computes the values of text tokens by the surrogate `text`, and those of image tokens or steps by `image`.
        Statistics are NaN outside their part; all [rollout, decision]."""
        import torch

        from mmrl.rollouts import IMAGE, TEXT, part_mask

        total = torch.zeros_like(log_ratio)
        stats: dict[str, Tensor] = {}
        for name, part, surrogate in (("text", TEXT, self.text), ("image", IMAGE, self.image)):
            is_part = part_mask(micro, part).to(log_ratio.device)
            values, part_stats = surrogate.values(log_ratio, advantages, micro, replay)
            total = values.where(is_part, total)
            stats |= {f"{name}_{key}": value.where(is_part, torch.nan) for key, value in part_stats.items()}
        return total, stats
