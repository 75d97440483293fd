"""Settings of the prompt rewriting task."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import model_validator

from mmrl.settings import load_attribute, option
from mmrl.settings.origins import WeightsOrigin
from mmrl.tasks.image_generation.settings import ImageGenerationSettings

if TYPE_CHECKING:
    from mmrl.protocols.parts import Task


class FrozenGenerator(WeightsOrigin):
    """The frozen image generator: a diffusers pipeline, or the result of a run with digits."""

    dtype: Literal["float32", "bfloat16"] = option("float32", "data type of its weights")
    device: str | None = option(None, "device of the generator; default: the rank's GPU, or the CPU")
    steps: int = option(10, "denoising steps of an image", unit="steps", ge=1)
    guidance: float = option(1.0, "classifier-free guidance; 1: none", ge=0)
    negative_prompt: str = option("", "the prompt that guidance leads away from")
    resolution: int | tuple[int, int] | None = option(
        None, "one side of a square, or height and width; default: the model's own", unit="pixels"
    )
    text_tokens: int | None = option(
        None, "tokens of a prompt that the text encoder with the largest limit reads; default: the pipeline's own", ge=1
    )
    decoding: Literal["whole", "sliced", "tiled"] = option("sliced", "how the VAE decodes, see model.decoding")
    at_once: int = option(64, "images that are generated in one batch", ge=1)


class PromptRewritingSettings(ImageGenerationSettings):
    """A language model rewrites prompts for a frozen image generator, and gets the rewards of the images (RePrompt,
    arXiv 2505.17540). Data, rewards and accuracy are those of image_generation."""

    test: ClassVar[str] = "tests/tasks/test_prompt_rewriting.py"
    type: str = "prompt_rewriting"
    generator: FrozenGenerator = option(description="the frozen generator")
    template: str = option(
        "Rewrite this prompt for an image generator, with all that it should show: {}",
        "prompt of the rewriter; {} stands for the original prompt",
    )
    tag: str | None = option(
        None,
        "the rewritten prompt is the text between <tag> and </tag>, after reasoning; null: it is the whole response",
    )
    images: int = option(1, "images for each rewritten prompt, whose rewards are averaged", ge=1)

    @model_validator(mode="after")
    def _check_template(self) -> Self:
        if self.template.count("{}") != 1:
            raise ValueError(f"template must hold {{}} exactly once, in place of the prompt, not {self.template!r}")
        return self

    def build(self, seed: int) -> Task:
        return load_attribute("mmrl.tasks.image_generation.rewriting:PromptRewriting")(self, seed)
