"""Views that remove visual information."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.errors import UserError
from mmrl.prompts.views import RandomView, View
from mmrl.settings import option

if TYPE_CHECKING:
    from PIL import Image

    from mmrl.rollouts import Prompt, Video


class Blank(View):
    """The prompt with uniformly grey images: a response to it cannot depend on the images."""

    equation: ClassVar[str] = "every pixel = level"
    source: ClassVar[str] = "the image that pointwise mutual information leaves out, as for MIRL"
    test: ClassVar[str] = "tests/prompts/test_counterfactual_views.py"
    type: str = "blank"
    level: int = option(127, "grey level of every pixel and channel", ge=0, le=255)

    def change(self, prompt: Prompt) -> Prompt:
        """Returns the prompt with grey images of the same sizes."""
        from PIL import Image

        grey = (self.level,) * 3
        return prompt.map_images(lambda image: Image.new("RGB", image.size, grey))


class Mirrored(View):
    """The prompt with its images and frames flipped left to right, so that left and right are swapped."""

    equation: ClassVar[str] = "x <- width - 1 - x"
    source: ClassVar[str] = "consistency under flips, as for OT-GRPO"
    test: ClassVar[str] = "tests/prompts/test_counterfactual_views.py"
    type: str = "mirrored"

    def change(self, prompt: Prompt) -> Prompt:
        from PIL import ImageOps

        return prompt.map_images(ImageOps.mirror)


class HiddenRegions(View):
    """The prompt with the image regions that its answer depends on blacked out. Everything else stays."""

    equation: ClassVar[str] = "pixels in the boxes of metadata[boxes] = 0"
    source: ClassVar[str] = (
        "CFPO, arXiv 2606.23206: critical visual cues are suppressed; whose boxes they are is mmrl's choice"
    )
    test: ClassVar[str] = "tests/prompts/test_counterfactual_views.py"
    type: str = "hidden_regions"
    boxes: str = option("boxes", "key of the prompts' metadata with [x1, y1, x2, y2] of the first image", unit="pixels")

    def check(self, prompt: Prompt) -> None:
        if prompt.before_start is not None:
            raise UserError(
                "view.type=hidden_regions needs boxes of the prompt's own image and cannot hide regions of what an "
                "environment shows; choose another view"
            )
        if prompt.metadata.get(self.boxes) is None:
            raise UserError(
                f"prompt {prompt.id!r} has no metadata {self.boxes!r}, the boxes that view.type=hidden_regions hides; "
                "add them to its row, or set view.boxes to the key that holds them"
            )
        if not prompt.seen_images:
            raise UserError(
                f"prompt {prompt.id!r} has no image, which view.type=hidden_regions needs; add one to its row, or "
                "choose another view"
            )

    def change(self, prompt: Prompt) -> Prompt:
        """Returns the prompt with the boxes of its metadata blacked out in its first image."""
        from PIL import ImageDraw

        self.check(prompt)
        boxes = prompt.metadata[self.boxes]
        first_images = [prompt.seen_images[0], *prompt.images[:1]]  # the first image, in both places that hold it

        def hidden(image: Image.Image) -> Image.Image:
            """Returns the image with the boxes blacked out if it is the prompt's first image, else the image itself."""
            if not any(image is first_image for first_image in first_images):
                return image
            covered = image.convert("RGB")  # a copy
            draw = ImageDraw.Draw(covered)
            for x1, y1, x2, y2 in boxes:
                draw.rectangle((x1, y1, x2 - 1, y2 - 1), fill=(0, 0, 0))  # PIL includes the last row and column
            return covered

        return prompt.map_images(hidden)


class ShuffledPatches(RandomView):
    """The patches of every image in a random order, new in every step: the content stays, the layout is lost."""

    equation: ClassVar[str] = "a permutation of whole patches; what is left at the right and at the bottom stays"
    source: ClassVar[str] = "mmrl's own ablation, beside masked_patches"
    test: ClassVar[str] = "tests/prompts/test_counterfactual_views.py"
    type: str = "shuffled_patches"
    patch: int = option(14, "side of a patch", unit="pixels", ge=1)

    def change(self, prompt: Prompt) -> Prompt:
        """Returns the prompt with the patches of each image in a random order."""
        import numpy as np
        from PIL import Image

        rng, side = self.generator(prompt), self.patch

        def shuffled(image: Image.Image) -> Image.Image:
            """Returns the image with its whole patches permuted; what is left at the right and at the bottom stays."""
            pixels = np.array(image.convert("RGB"))
            rows, columns = image.height // side, image.width // side
            grid = pixels[: rows * side, : columns * side].reshape(rows, side, columns, side, 3).swapaxes(1, 2)
            # [patch, y, x, RGB], in a random order
            patches = grid.reshape(rows * columns, side, side, 3)[rng.permutation(rows * columns)]
            grid = patches.reshape(rows, columns, side, side, 3).swapaxes(1, 2)
            pixels[: rows * side, : columns * side] = grid.reshape(rows * side, columns * side, 3)
            return Image.fromarray(pixels)

        return prompt.map_images(shuffled)


class ShuffledFrames(RandomView):
    """The frames of every video in a random order, new in every step: the content stays, the motion is lost."""

    equation: ClassVar[str] = "a permutation of the frames, never the order that they have"
    source: ClassVar[str] = "the contrast of T-GRPO, Video-R1, arXiv 2503.21776"
    test: ClassVar[str] = "tests/prompts/test_counterfactual_views.py"
    type: str = "shuffled_frames"

    def check(self, prompt: Prompt) -> None:
        if not prompt.seen_videos:
            raise UserError(
                f"prompt {prompt.id!r} has no video, which view.type=shuffled_frames needs; choose another view"
            )

    def change(self, prompt: Prompt) -> Prompt:
        """Returns the prompt with the frames of each video in another order, in its messages and its list of videos."""
        from dataclasses import replace

        from mmrl.rollouts import Video

        self.check(prompt)
        rng = self.generator(prompt)

        def random_order(num_frames: int) -> list[int]:
            """Returns a random permutation of the frames' indices; not the identity, unless there is a single frame."""
            order = list(range(num_frames))
            while num_frames > 1 and order == sorted(order):
                order = rng.permutation(num_frames).tolist()
            return order

        def shuffled(video: Video) -> Video:
            return replace(video, frames=tuple(video.frames[i] for i in random_order(len(video.frames))))

        messages = []
        for message in prompt.messages:
            parts = tuple(shuffled(part) if isinstance(part, Video) else part for part in message.parts)
            messages.append(replace(message, parts=parts))
        videos = tuple(shuffled(video) for video in prompt.videos)
        return replace(prompt, messages=tuple(messages), videos=videos)
