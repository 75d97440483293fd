"""Rewards of an image alone, or against its prompt: file size, a classifier, the text in the image."""

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
    """bytes(JPEG of the image at `quality`) / 1000 (Black et al. 2023, DDPO, arXiv:2305.13301): detail is rewarded.

    None for an image that holds NaN or inf.
    """
    if not 1 <= quality <= 100:
        raise ValueError(f"quality must lie in 1 .. 100, not {quality}")

    def reward(sample: Sample) -> float | None:
        if not image_of(sample).isfinite().all():
            return None
        file = io.BytesIO()
        as_pil(image_of(sample)).save(file, "JPEG", quality=quality)
        return file.tell() / 1000

    return reward


def jpeg_compressibility(*, quality: int = 95) -> Reward:
    """-bytes(JPEG) / 1000, the negative of `jpeg_incompressibility`: smooth images are rewarded."""
    kilobytes = jpeg_incompressibility(quality=quality)

    def reward(sample: Sample) -> float | None:
        size = kilobytes(sample)
        return -size if isinstance(size, float) else None

    return reward


class ClassifierLogp:
    """log p(class = prompt.answer | image) under a classifier, in nats.

    `classifier` is 'package.module:function', called once without arguments for an nn.Module that takes images
    [rollout, channel, height, width], fp32 clamped to 0..1, and gives logits [rollout, class]. The images of one
    batch must have one size. None for an image that holds NaN or inf.
    """

    scope: Literal["sample"] = "sample"

    def __init__(self, *, classifier: str, device: str | None = None):
        self.device = device
        model = load_object(classifier)()
        if not isinstance(model, nn.Module):
            raise ValueError(f"classifier {classifier} gives {type(model).__name__}, not an nn.Module")
        self.model = model.eval().requires_grad_(False)

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return score_finite(samples, self._score)

    def differentiable(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Computes log-probabilities [rollout] with the gradient by images [rollout, channel, height, width]; outside
        0..1 the gradient is that at the border."""
        inside = images + (images.clamp(0, 1) - images).detach()
        logp = self.model.to(images.device)(inside).float().log_softmax(-1)
        classes = [_class_of(Sample(prompt), logp.shape[1]) for prompt in prompts]
        return logp[torch.arange(len(prompts)), torch.tensor(classes)]

    @torch.no_grad()
    def _score(self, samples: list[Sample]) -> list[float]:
        shapes = {tuple(image_of(sample).shape) for sample in samples}
        if len(shapes) > 1:
            raise UserError(f"a classifier needs images of one size, not {sorted(shapes)}")
        device = device_of(self.device)
        images = torch.stack([image_of(sample) for sample in samples]).clamp(0, 1).to(device)
        logp = self.model.to(device)(images).float().log_softmax(-1).cpu()
        classes = [_class_of(sample, logp.shape[1]) for sample in samples]
        return logp[torch.arange(len(samples)), torch.tensor(classes)].tolist()


def _class_of(sample: Sample, count: int) -> int:
    answer = sample.prompt.answer
    if not isinstance(answer, int) or not 0 <= answer < count:
        raise UserError(f"the answer of prompt {sample.prompt.id!r} is {answer!r}, not a class in 0 .. {count - 1}")
    return answer


def ocr(*, threads: int = 1) -> Reward:
    """1 - min(d, n) / n, with d the edit distance of the text read in the image to the n letters wanted.

    Case, white space and typography do not count, and a requested text that occurs in the text read has d = 0:
    the measure of Flow-GRPO (Liu et al. 2025, arXiv:2505.05470). The requested text is prompt.metadata["text"], a
    string or a list of them, else what the prompt puts in quotes. Of several strings each has the least d of the whole
    text read and its lines, and n counts the letters of all. Text is read by RapidOCR (the extra `ocr`) on `threads`
    threads of the CPU. None for an image that holds NaN or inf.
    """
    read_lines = reader(threads)

    def reward(sample: Sample) -> float | None:
        wanted = [letters for text in _asked_texts(sample) if (letters := _letters(text))]
        if not wanted:
            raise UserError(f"prompt {sample.prompt.id!r} asks for no text: set metadata['text'], or quote it")
        if not image_of(sample).isfinite().all():
            return None
        lines = [_letters(line) for line in read_lines(as_pil(image_of(sample)))]
        texts = ["".join(lines), *(lines if len(wanted) > 1 else ())]
        return 1 - sum(_distance(letters, texts) for letters in wanted) / sum(map(len, wanted))

    return reward


def _asked_texts(sample: Sample) -> Sequence[str]:
    if "text" not in sample.prompt.metadata:
        return quoted_texts(sample.prompt.text)
    texts = sample.prompt.metadata["text"]
    return [str(text) for text in texts] if isinstance(texts, (list, tuple)) else [str(texts)]


def _distance(letters: str, texts: Sequence[str]) -> int:
    """The edit distance of letters to the nearest of several strings, at most their number."""
    if any(letters in text for text in texts):
        return 0
    return min(len(letters), *(edit_distance(text, letters) for text in texts))


def _letters(text: str) -> str:
    return "".join(normalize_case(text).split())


def edit_distance(a: str, b: str) -> int:
    """Returns the fewest insertions, deletions and replacements of letters that turn `a` into `b` (Levenshtein)."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        corner, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (x != y))
    return row[-1]
