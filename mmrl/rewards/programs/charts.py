"""Rewards of programs and SVGs that have to reproduce an image."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mmrl.errors import UserError
from mmrl.rewards.programs.responses import extract_program, extract_svg
from mmrl.rewards.programs.runner import ProgramReward
from mmrl.rewards.types import Score
from mmrl.rewards.visual.edits import compare
from mmrl.rollouts import Prompt, Sample

MAX_CACHED = 1024  # gold programs whose charts are kept
Measure = Literal["l1", "ssim"]


class ChartCode(ProgramReward):
    """Similarity of the chart that a Matplotlib program draws to the prompt's chart: 0 if it fails or draws nothing,
    else the mean, weighted by `weights`, of

    runs      1
    image     the structural similarity of its last figure, or 1 - mean |difference| (measure=l1), to the prompt's first
              image, scaled to that one's size; never below 0
    elements  the mean over texts, marks, colours and values of the F1 between those of its figure and of the figure
              that the gold program in the row's answer draws (after ChartMimic, arXiv 2406.09961)

    Chart-to-code rewards of MSRL (arXiv 2508.13587) and ChartMaster (arXiv 2508.17608), reconstructed: both add the
    similarity of the text to that of the image. The other options are those of `ProgramRunner`.
    """

    kind = "charts"

    def __init__(
        self,
        *,
        weights: Mapping[str, float] | None = None,
        measure: Measure = "ssim",
        **options: Any,
    ) -> None:
        self.weights = normalize_weights(weights or {"image": 1.0}, ("runs", "image", "elements"))
        self.compare = compare(measure)
        super().__init__(**options)
        self._golds: OrderedDict[str, dict[str, list[str]]] = OrderedDict()  # elements of the chart, by gold program

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Scores programs. Raises UserError for a row without an image, or whose gold program fails."""
        if "elements" in self.weights:
            self._draw_golds([sample.prompt for sample in samples])
        rows = [row for row, sample in enumerate(samples) if extract_program(sample)]
        answers = self.runner.run([{"source": extract_program(samples[row])} for row in rows])
        scores: list[Score] = [0.0] * len(samples)
        for row, answer in zip(rows, answers, strict=True):
            scores[row] = 0.0 if "failed" in answer else self._score(samples[row].prompt, answer)
        return scores

    def _score(self, prompt: Prompt, answer: Mapping[str, Any]) -> float:
        """Returns the score of a program, 0 to 1. answer: what the executor returned, the "image" and "elements" of its
        chart."""
        image = to_image(answer.get("image"))
        if image is None:
            return 0.0
        parts = {
            "runs": lambda: 1.0,
            "image": lambda: similarity(image, target_image(prompt), self.compare),
            "elements": lambda: elements_f1(answer.get("elements"), self._golds[str(prompt.answer)]),
        }
        return sum(weight * parts[name]() for name, weight in self.weights.items())

    def _draw_golds(self, prompts: Sequence[Prompt]) -> None:
        """Draws the charts of gold programs that are not cached yet. Raises UserError for a prompt without a gold
        program, or whose program draws nothing."""
        sources = {str(prompt.answer): prompt for prompt in prompts if prompt.answer is not None}
        if lacking := next((prompt for prompt in prompts if prompt.answer is None), None):
            raise UserError(
                f"prompt {lacking.id!r} has no answer, but weights.elements needs a reference program there; add one "
                "to its row, or leave out weights.elements"
            )
        missing = [source for source in sources if source not in self._golds]
        for source, answer in zip(missing, self.runner.run([{"source": source} for source in missing]), strict=True):
            if "failed" in answer:
                raise UserError(
                    f"prompt {sources[source].id!r}: the program in its answer draws no chart: {answer['failed']}; "
                    "correct the program in its row"
                )
            self._golds[source] = answer["elements"]
        while len(self._golds) > max(MAX_CACHED, len(sources)):
            self._golds.popitem(last=False)


class SvgCode(ProgramReward):
    """Similarity of the last <svg> of a response, drawn on white, to the prompt's first image: the structural
    similarity, or 1 - mean |difference| (measure=l1), never below 0.

    It is 0 if there is no SVG that can be drawn. resvg draws it (the extra `svg`), which reads nothing that an SVG
    links to. The other options are those of `ProgramRunner`.
    """

    kind = "vectors"

    def __init__(
        self,
        *,
        measure: Measure = "ssim",
        **options: Any,
    ) -> None:
        self.compare = compare(measure)
        super().__init__(**options)

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Scores drawings. Raises UserError for a row without an image."""
        targets = [target_image(sample.prompt) for sample in samples]
        rows = [row for row, sample in enumerate(samples) if extract_svg(sample)]
        sizes = [(targets[row].shape[2], targets[row].shape[1]) for row in rows]
        requests = [{"source": extract_svg(samples[row]), "size": size} for row, size in zip(rows, sizes, strict=True)]
        scores: list[Score] = [0.0] * len(samples)
        for row, answer in zip(rows, self.runner.run(requests), strict=True):
            image = to_image(answer.get("image"))
            scores[row] = 0.0 if image is None else similarity(image, targets[row], self.compare)
        return scores


def target_image(prompt: Prompt) -> Tensor:
    """Returns the prompt's first image, [3, height, width] in 0..1. Raises UserError if there is none."""
    if not prompt.images:
        raise UserError(f"prompt {prompt.id!r} has no image to compare the drawing with; add one to its row")
    return _tensor(prompt.images[0].convert("RGB"))


def similarity(image: Image.Image, target: Tensor, measure: Callable[[Tensor, Tensor, Tensor], Tensor]) -> float:
    """Returns the similarity, 0 to 1, of an image, scaled to the target's size, to `target` [3, height, width].

    measure: see `mmrl.rewards.visual.edits.compare`. An image of a single colour gets 0, unless the target has a single
    colour, too: most of a chart is white, so that an empty image would score high.
    """
    height, width = target.shape[1:]
    if _is_uniform(_tensor(image)) and not _is_uniform(target):
        return 0.0
    scaled = image if image.size == (width, height) else image.resize((width, height), Image.Resampling.BICUBIC)
    return min(1.0, max(0.0, float(measure(_tensor(scaled), target, torch.ones(height, width)))))


def elements_f1(elements: object, gold: Mapping[str, Sequence[str]]) -> float:
    """Returns the mean over kinds of elements (texts, marks, ...) of the F1 between the elements of a chart and of the
    gold chart.

    Kinds that the gold chart lacks are left out. elements: those of the program's chart, by kind; anything but a dict
    of lists of strings scores 0.
    """
    if not isinstance(elements, Mapping):
        return 0.0
    scores = []
    for kind, gold_items in gold.items():
        items = elements.get(kind)
        items = [item for item in items if isinstance(item, str)] if isinstance(items, list) else []
        if gold_items:
            shared = (Counter(items) & Counter(gold_items)).total()
            scores.append(2 * shared / (len(items) + len(gold_items)))
    return sum(scores) / len(scores) if scores else 0.0


def to_image(value: object) -> Image.Image | None:
    """Converts the image in an executor's answer; None for anything else, since a program may have written the
    answer."""
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or value.ndim != 3 or value.shape[2] != 3:
        return None
    return Image.fromarray(value) if value.size else None


def _is_uniform(image: Tensor) -> bool:
    return bool((image == image[:, :1, :1]).all())


def _tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255


def normalize_weights(weights: Mapping[str, float], known: Sequence[str]) -> dict[str, float]:
    """Returns weights that add up to 1. Raises ValueError for unknown names, and for weights that are not positive."""
    unknown = next((name for name in weights if name not in known), None)
    if unknown is not None:
        raise ValueError(f"weights: unknown name {unknown!r}; the names are {', '.join(known)}")
    if not all(isinstance(weight, int | float) and weight > 0 for weight in weights.values()):
        raise ValueError(f"weights must be numbers above 0, not {dict(weights)!r}")
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}
