"""Views of a prompt: changed prompts under which the same response is replayed."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from pydantic import PrivateAttr

from mmrl.errors import UserError
from mmrl.settings import Choice, option

if TYPE_CHECKING:
    from numpy.random import Generator

    from mmrl.rollouts import Message, Prompt


class View(Choice):
    """A change of a prompt: images masked, words left out, a counterfactual. It depends on the prompt and the step
    alone, so that all rollouts of a group see the same."""

    title: ClassVar[str] = "view"
    changes: ClassVar[frozenset[str]] = frozenset({"gradient"})  # in a step, by itself
    kinds: ClassVar[dict[str, str]] = {
        "masked_patches": "mmrl.prompts.views:MaskedPatches",
        "no_text": "mmrl.prompts.views:NoText",
        "blank": "mmrl.prompts.counterfactual_views:Blank",
        "mirrored": "mmrl.prompts.counterfactual_views:Mirrored",
        "hidden_regions": "mmrl.prompts.counterfactual_views:HiddenRegions",
        "shuffled_patches": "mmrl.prompts.counterfactual_views:ShuffledPatches",
        "shuffled_frames": "mmrl.prompts.counterfactual_views:ShuffledFrames",
    }
    test: ClassVar[str] = "tests/prompts/test_views.py"

    @property
    def name(self) -> str:
        """Returns the key of the replay under this view; equal for equal settings."""
        return self.model_dump_json()

    @abstractmethod
    def change(self, prompt: Prompt) -> Prompt: ...

    def check(self, prompt: Prompt) -> None:  # noqa: B027  (most views change any prompt)
        """Raises UserError for the first prompt of a job where the view can not change such prompts."""

    def at(self, step: int) -> View:
        """Returns the view of a step, the number of finished ones; by default itself."""
        return self

    def changed(self, prompt: Prompt, step: int = 0) -> Prompt:
        """Returns the prompt under this view of a step. Raises UserError where `change` returns something else."""
        from dataclasses import replace

        from mmrl.rollouts import Prompt

        changed = self.at(step).change(prompt)
        if not isinstance(changed, Prompt):
            raise UserError(
                f"the view {self.type} made {type(changed).__name__} of prompt {prompt.id}; expected a Prompt"
            )
        if prompt.before_start is None:
            return changed
        return replace(changed, before_start=self.changed(prompt.before_start, step))


class DrawnView(View):
    """A view that is drawn by chance, from the prompt's id and the step: anew in every step, and alike after a resume.
    Its `change` draws from `generator`."""

    _step: int = PrivateAttr(0)

    def at(self, step: int) -> DrawnView:
        drawn = self.model_copy()
        drawn._step = step
        return drawn

    def generator(self, prompt: Prompt) -> Generator:
        import zlib

        import numpy as np

        return np.random.default_rng([zlib.crc32(prompt.id.encode()), self._step])


class MaskedPatches(DrawnView):
    """Square patches of every image and frame are black, drawn by chance anew in every step."""

    equation: ClassVar[str] = "a patch is black with probability `share`"
    source: ClassVar[str] = "PAPO, arXiv 2507.06448"
    type: str = "masked_patches"
    share: float = option(0.6, "share of the patches that are masked", gt=0, le=1)
    patch: int = option(14, "side of a patch", unit="pixels", ge=1)

    def change(self, prompt: Prompt) -> Prompt:
        import numpy as np
        from PIL import Image

        random = self.generator(prompt)

        def masked(image: Image.Image) -> Image.Image:
            rows, columns = (-(-size // self.patch) for size in (image.height, image.width))
            black = (random.random((rows, columns)) < self.share).repeat(self.patch, 0).repeat(self.patch, 1)
            pixels = np.array(image.convert("RGB"))
            pixels[black[: image.height, : image.width]] = 0
            return Image.fromarray(pixels)

        return prompt.map_images(masked)


class NoText(View):
    """The prompt without its text: only its images and videos are left."""

    equation: ClassVar[str] = "text = its <image> and <video> markers"
    source: ClassVar[str] = "language-prior ablations of visual question answering, arXiv 1612.00837"
    type: str = "no_text"

    def change(self, prompt: Prompt) -> Prompt:
        import re
        from dataclasses import replace

        messages = tuple(_without_text(message) for message in prompt.messages)
        return replace(prompt, text="".join(re.findall("<image>|<video>", prompt.text)), messages=messages)


def _without_text(message: Message) -> Message:
    """Returns a message of the user without its text, unless that is all; others stay."""
    from dataclasses import replace

    parts = tuple(part for part in message.parts if not isinstance(part, str))
    return replace(message, parts=parts) if message.role == "user" and parts else message
