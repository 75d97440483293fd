"""Views of a prompt: the same prompt with changed images or text, under which the same response is replayed."""

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
    """A change of a prompt, such as masked images or removed text. A method compares the likelihood of the same
    response with and without it.

    The change depends on the prompt and the training step alone, so that all rollouts of a group get the same view.
    """

    title: ClassVar[str] = "view"
    changes: ClassVar[frozenset[str]] = frozenset({"gradient"})  # what the view changes in a step
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
        """Returns the name of the replay under this view; equal settings have equal names."""
        return self.model_dump_json()

    @abstractmethod
    def change(self, prompt: Prompt) -> Prompt:
        """Returns the changed prompt."""

    def check(self, prompt: Prompt) -> None:  # noqa: B027  (most views change any prompt)
        """Raises UserError if the view cannot change prompts like this one, the first of the job."""

    def at(self, step: int) -> View:
        """Returns the view for a training step, counted from 0; by default the view itself."""
        return self

    def changed(self, prompt: Prompt, step: int = 0) -> Prompt:
        """Returns the prompt under this view at a training step. Raises UserError if `change` does not return a
        Prompt; its exceptions get a note that names the view and the prompt."""
        from dataclasses import replace

        from mmrl.rollouts import Prompt

        try:
            changed = self.at(step).change(prompt)
        except Exception as error:
            error.add_note(f"raised by change() of view.type={self.type} for prompt {prompt.id}")
            raise
        if not isinstance(changed, Prompt):
            raise UserError(
                f"view.type={self.type}: change() returned {type(changed).__name__} for prompt {prompt.id}; expected a "
                "Prompt"
            )
        if prompt.before_start is None:
            return changed
        return replace(changed, before_start=self.changed(prompt.before_start, step))


class RandomView(View):
    """A view with random numbers, seeded by the prompt's id and the training step: they are new in every step, and the
    same in a resumed run. Its `change` takes them from `generator`."""

    _step: int = PrivateAttr(0)

    def at(self, step: int) -> RandomView:
        view = self.model_copy()
        view._step = step
        return view

    def generator(self, prompt: Prompt) -> Generator:
        """Returns the random generator for a prompt at this view's training step."""
        import zlib

        import numpy as np

        return np.random.default_rng([zlib.crc32(prompt.id.encode()), self._step])


class MaskedPatches(RandomView):
    """The prompt with random square patches of every image and frame blacked out, new patches in every step."""

    equation: ClassVar[str] = "a patch is black with probability `share`"
    source: ClassVar[str] = "PAPO, arXiv 2507.06448"
    type: str = "masked_patches"
    share: float = option(0.6, "share of the patches that are masked", gt=0, le=1)
    patch: int = option(14, "side of a patch", unit="pixels", ge=1)

    def change(self, prompt: Prompt) -> Prompt:
        """Returns the prompt with a random share of the patches of each image and frame blacked out."""
        import numpy as np
        from PIL import Image

        rng = self.generator(prompt)

        def masked(image: Image.Image) -> Image.Image:
            """Returns the image with random patches blacked out."""
            # rounded up: patches at the right and at the bottom may be cut off
            rows, columns = (-(-size // self.patch) for size in (image.height, image.width))
            is_black = (rng.random((rows, columns)) < self.share).repeat(self.patch, 0).repeat(self.patch, 1)
            pixels = np.array(image.convert("RGB"))
            pixels[is_black[: image.height, : image.width]] = 0
            return Image.fromarray(pixels)

        return prompt.map_images(masked)


class NoText(View):
    """The prompt without its text: only its images and videos remain."""

    equation: ClassVar[str] = "text = its <image> and <video> markers"
    source: ClassVar[str] = "language-prior ablations of visual question answering, arXiv 1612.00837"
    type: str = "no_text"

    def change(self, prompt: Prompt) -> Prompt:
        """Returns the prompt with only the image and video markers of its text."""
        import re
        from dataclasses import replace

        messages = tuple(_without_text(message) for message in prompt.messages)
        return replace(prompt, text="".join(re.findall("<image>|<video>", prompt.text)), messages=messages)


def _without_text(message: Message) -> Message:
    """Removes the text of a user's message, unless it holds nothing else. Other messages are returned unchanged."""
    from dataclasses import replace

    parts = tuple(part for part in message.parts if not isinstance(part, str))
    return replace(message, parts=parts) if message.role == "user" and parts else message
