"""Rewards of an image alone, or with its prompt: JPEG size, a classifier, the text in the image."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from mmrl.errors import UserError
from mmrl.rewards.parsing.quotes import quoted_texts
from mmrl.rewards.parsing.typography import normalize_case
from mmrl.rewards.reading import reader
from mmrl.rewards.types import Reward, Score, as_pil, device_of, image_of, load_object, score_finite
from mmrl.rollouts import Prompt, Sample


def jpeg_incompressibility(*, quality: int = 95) -> Reward:
    """Builds a reward of detail: the kilobytes of the image as a JPEG of this quality (Black et al. 2023, DDPO,
    arXiv:2305.13301).

    None for an image with NaN or inf.
    """
    if not 1 <= quality <= 100:
        raise ValueError(f"quality must be from 1 to 100, not {quality}")

    def reward(sample: Sample) -> float | None:
        """Returns the size of the image as a JPEG, in kilobytes; None for NaN or inf."""
        if not image_of(sample).isfinite().all():
            return None
        file = io.BytesIO()
        as_pil(image_of(sample)).save(file, "JPEG", quality=quality)
        return file.tell() / 1000

    return reward


def jpeg_compressibility(*, quality: int = 95) -> Reward:
    """Builds a reward of smooth images: the negative of `jpeg_incompressibility`."""
    kilobytes = jpeg_incompressibility(quality=quality)

    def reward(sample: Sample) -> float | None:
        size = kilobytes(sample)
        return -size if isinstance(size, float) else None

    return reward


class ClassifierLogp:
    """The log-probability of the class prompt.answer given the image, under a classifier, in nats.

    classifier: 'package.module:function', called once without arguments; it returns an nn.Module from images [rollout,
    channel, height, width], fp32 in 0..1, to logits [rollout, class]. The images of one batch must have one size. None
    for an image with NaN or inf.
    """

    scope: Literal["sample"] = "sample"

    def __init__(self, *, classifier: str, device: str | None = None):
        self.device = device
        model = load_object(classifier)()
        if not isinstance(model, nn.Module):
            raise ValueError(f"classifier {classifier} must return an nn.Module, not {type(model).__name__}")
        self.model = model.eval().requires_grad_(False)

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return score_finite(samples, self._score)

    def differentiable(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Returns log-probabilities [rollout] of images [rollout, channel, height, width], with gradients. Pixels
        outside 0..1 have the gradient of the border."""
        clamped = images + (images.clamp(0, 1) - images).detach()
        logp = self.model.to(images.device)(clamped).float().log_softmax(-1)
        classes = [_class_of(Sample(prompt), logp.shape[1]) for prompt in prompts]
        return logp[torch.arange(len(prompts)), torch.tensor(classes)]

    @torch.no_grad()
    def _score(self, samples: list[Sample]) -> list[float]:
        """Returns the log-probability of each prompt's class given its image. Raises UserError for images of several
        sizes."""
        shapes = {tuple(image_of(sample).shape) for sample in samples}
        if len(shapes) > 1:
            raise UserError(f"a classifier needs images of one size, not {sorted(shapes)}")
        device = device_of(self.device)
        images = torch.stack([image_of(sample) for sample in samples]).clamp(0, 1).to(device)
        logp = self.model.to(device)(images).float().log_softmax(-1).cpu()
        classes = [_class_of(sample, logp.shape[1]) for sample in samples]
        return logp[torch.arange(len(samples)), torch.tensor(classes)].tolist()


def _class_of(sample: Sample, num_classes: int) -> int:
    """Returns the class in the prompt's answer. Raises UserError if the answer is not a class."""
    answer = sample.prompt.answer
    if not isinstance(answer, int) or not 0 <= answer < num_classes:
        raise UserError(
            f"the answer of prompt {sample.prompt.id!r} is {answer!r}, not a class in 0 .. {num_classes - 1}"
        )
    return answer


def ocr(*, threads: int = 1) -> Reward:
    """Builds a reward for text in images: 1 - min(d, n) / n, d the edit distance of the text read in the image to the n
    requested letters.

    Case, white space and typography are ignored. A requested text that occurs in the text read has d = 0, as in
    Flow-GRPO (Liu et al. 2025, arXiv:2505.05470). The requested text is prompt.metadata["text"], a string or a list of
    them, else the quoted parts of the prompt. Of several texts, each has its smallest d to the full text read or to a
    line of it, and n counts the letters of all. Text is read by RapidOCR (the extra `ocr`) on `threads` threads of the
    CPU. None for an image with NaN or inf.
    """
    read_lines = reader(threads)

    def reward(sample: Sample) -> float | None:
        """Returns 1 - d / n. d is the sum of the edit distances of the requested texts to the text that is read in the
        image; if several texts are requested, each may match one line of it instead. n is the number of their letters.
        Returns None for an image with NaN or inf. Raises UserError if no text is requested."""
        requested = [letters for text in _requested_texts(sample) if (letters := _letters(text))]
        if not requested:
            raise UserError(
                f"prompt {sample.prompt.id!r} asks for no text: set the key `text` of its row, or put the text in "
                "quotes in the prompt"
            )
        if not image_of(sample).isfinite().all():
            return None
        lines = [_letters(line) for line in read_lines(as_pil(image_of(sample)))]
        texts = ["".join(lines), *(lines if len(requested) > 1 else ())]
        return 1 - sum(_distance(letters, texts) for letters in requested) / sum(map(len, requested))

    return reward


def _requested_texts(sample: Sample) -> Sequence[str]:
    """Returns the texts that the image should show, from the prompt's metadata or its quotes."""
    if "text" not in sample.prompt.metadata:
        return quoted_texts(sample.prompt.text)
    texts = sample.prompt.metadata["text"]
    return [str(text) for text in texts] if isinstance(texts, (list, tuple)) else [str(texts)]


def _distance(letters: str, texts: Sequence[str]) -> int:
    """Returns the smallest edit distance of `letters` to one of `texts`, at most len(letters); 0 if a text contains
    them."""
    if any(letters in text for text in texts):
        return 0
    return min(len(letters), *(edit_distance(text, letters) for text in texts))


def _letters(text: str) -> str:
    """Returns a text without case and white space."""
    return "".join(normalize_case(text).split())


def edit_distance(a: str, b: str) -> int:
    """Returns the Levenshtein distance: the fewest insertions, deletions and replacements of letters that turn `a` into
    `b`."""
    row = list(range(len(b) + 1))  # row[j]: the distance from the letters of `a` so far to b[:j]
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]
