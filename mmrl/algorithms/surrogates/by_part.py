"""A surrogate for each part of a response: one for the text, one for the image that follows."""

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

OTHERS = {name: where for name, where in Surrogate.kinds.items() if name != "by_part"}


class ByPart(Surrogate):
    """The text that plans an image and the image tokens or denoising steps that draw it have separate surrogates: a
    word may move further than one of hundreds of image tokens."""

    equation: ClassVar[str] = (
        "text's values where a decision is a text token, image's where it is an image token or a step"
    )
    source: ClassVar[str] = (
        "reconstructed from T2I-R1, arXiv 2505.00703, and ReasonGen-R1, arXiv 2505.24875: two levels of tokens in one "
        "objective"
    )
    test: ClassVar[str] = "tests/joints/test_parts.py"
    at_one_update: ClassVar[str] = "each part has what its own surrogate has there; with clip the gradient of reinforce"
    type: str = "by_part"
    text: Surrogate = option(Clip(), "objective of the text's tokens", kinds=OTHERS)
    image: Surrogate = option(Clip(), "objective of the image's tokens or steps", kinds=OTHERS)

    @model_validator(mode="after")
    def _of_single_decisions(self) -> ByPart:
        for name, chosen in (("text", self.text), ("image", self.image)):
            if type(chosen).objective not in (Surrogate.objective, Clip.objective):
                raise ValueError(f"{name}={chosen.type} compares whole rollouts; use one of single decisions")
        return self

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"parts"})) | self.text.needs | self.image.needs

    @property
    def at_rest(self) -> str:
        """Returns what becomes of the parts that do not act."""
        parts = (("text", self.text), ("image", self.image))
        return "; ".join(f"{name}: {chosen.at_rest}" for name, chosen in parts if chosen.at_rest)

    def prepare(self, batch: Batch) -> None:
        self.text.prepare(batch)
        self.image.prepare(batch)

    def values(self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay) -> Result:
        import torch

        from mmrl.rollouts import IMAGE, TEXT, part_mask

        total = torch.zeros_like(log_ratio)
        stats: dict[str, Tensor] = {}
        for name, part, chosen in (("text", TEXT, self.text), ("image", IMAGE, self.image)):
            inside = part_mask(micro, part).to(log_ratio.device)
            values, measured = chosen.values(log_ratio, advantages, micro, replay)
            total = values.where(inside, total)
            stats |= {f"{name}_{key}": value.where(inside, torch.nan) for key, value in measured.items()}
        return total, stats
