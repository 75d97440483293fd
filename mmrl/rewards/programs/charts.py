"""Programs and SVGs that have to draw an image."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mmrl.errors import UserError
from mmrl.rewards.programs.responses import drawing, program
from mmrl.rewards.programs.runner import ProgramReward
from mmrl.rewards.types import Score
from mmrl.rewards.visual.edits import compare
from mmrl.rollouts import Prompt, Sample

CACHED = 1024  # charts of gold programs
Measure = Literal["l1", "ssim"]


class ChartCode(ProgramReward):
    """Likeness of what a Matplotlib program draws to the chart that it has to repeat: 0 where it fails or draws
    nothing, else the mean, weighted by `weights`, of

    runs      1
    image     the structural similarity of its last figure, or 1 - mean |difference| (measure=l1), to the prompt's first
              image, scaled to that one's size; never below 0
    elements  the mean over texts, marks, colours and values of the F1 between those of its figure and of the figure
              that the gold program in the row's answer draws (after ChartMimic, arXiv 2406.09961)

    Chart-to-code rewards of MSRL (arXiv 2508.13587) and ChartMaster (arXiv 2508.17608), reconstructed: both add the
    likeness of the text to that of the image. The rest as in `ProgramRunner`.
    """

    kind = "charts"

    def __init__(
        self,
        *,
        weights: Mapping[str, float] | None = None,
        measure: Measure = "ssim",
        **options: Any,
    ) -> None:
        self.weights = shares(weights or {"image": 1.0}, ("runs", "image", "elements"))
        self.compare = compare(measure)
        super().__init__(**options)
        self._golds: OrderedDict[str, dict[str, list[str]]] = OrderedDict()  # elements by program

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Scores programs; raises UserError for a row without an image, or whose gold program fails."""
        if "elements" in self.weights:
            self._draw_golds([sample.prompt for sample in samples])
        rows = [row for row, sample in enumerate(samples) if program(sample)]
        answers = self.runner.run([{"source": program(samples[row])} for row in rows])
        scores: list[Score] = [0.0] * len(samples)
        for row, answer in zip(rows, answers, strict=True):
            scores[row] = 0.0 if "failed" in answer else self._score(samples[row].prompt, answer)
        return scores

    def _score(self, prompt: Prompt, answer: Mapping[str, Any]) -> float:
        shown = pixels(answer.get("image"))
        if shown is None:
            return 0.0
        parts = {"runs": lambda: 1.0, "image": lambda: likeness(shown, target_of(prompt), self.compare)}
        parts["elements"] = lambda: common(answer.get("elements"), self._golds[str(prompt.answer)])
        return sum(weight * parts[name]() for name, weight in self.weights.items())

    def _draw_golds(self, prompts: Sequence[Prompt]) -> None:
        """Draws the charts of gold programs that are not cached yet. Raises UserError for a prompt without one, or
        whose program draws none."""
        sources = {str(prompt.answer): prompt for prompt in prompts if prompt.answer is not None}
        if without := next((prompt for prompt in prompts if prompt.answer is None), None):
            raise UserError(f"prompt {without.id!r} has no program in its answer, which weights.elements compares with")
        missing = [source for source in sources if source not in self._golds]
        for source, answer in zip(missing, self.runner.run([{"source": one} for one in missing]), strict=True):
            if "failed" in answer:
                raise UserError(f"prompt {sources[source].id!r}: its gold program draws no chart: {answer['failed']}")
            self._golds[source] = answer["elements"]
        while len(self._golds) > max(CACHED, len(sources)):
            self._golds.popitem(last=False)


class SvgCode(ProgramReward):
    """Likeness of the last <svg> of a response, drawn on white, to the prompt's first image: the structural similarity,
    or 1 - mean |difference| (measure=l1), never below 0; 0 where there is none that can be drawn. Drawn by resvg (the
    extra `svg`), which reads nothing that an SVG links to. The rest as in `ProgramRunner`.
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
        """Scores drawings; raises UserError for a row without an image."""
        targets = [target_of(sample.prompt) for sample in samples]
        rows = [row for row, sample in enumerate(samples) if drawing(sample)]
        sizes = [(targets[row].shape[2], targets[row].shape[1]) for row in rows]
        requests = [{"source": drawing(samples[row]), "size": size} for row, size in zip(rows, sizes, strict=True)]
        scores: list[Score] = [0.0] * len(samples)
        for row, answer in zip(rows, self.runner.run(requests), strict=True):
            shown = pixels(answer.get("image"))
            scores[row] = 0.0 if shown is None else likeness(shown, targets[row], self.compare)
        return scores


def target_of(prompt: Prompt) -> Tensor:
    """Returns the prompt's first image on white, [3, height, width], 0 to 1. Raises UserError where there is none."""
    if not prompt.images:
        raise UserError(f"prompt {prompt.id!r} has no image that a drawing could be compared with")
    return _tensor(prompt.images[0].convert("RGB"))


def likeness(shown: Image.Image, target: Tensor, measure: Callable[[Tensor, Tensor, Tensor], Tensor]) -> float:
    """Returns the measure of an image, scaled to the target's size, against `target`, 0 to 1. An empty one is like no
    target that is not empty, though most of a chart is white."""
    height, width = target.shape[1:]
    if _flat(_tensor(shown)) and not _flat(target):
        return 0.0
    scaled = shown if shown.size == (width, height) else shown.resize((width, height), Image.Resampling.BICUBIC)
    return min(1.0, max(0.0, float(measure(_tensor(scaled), target, torch.ones(height, width)))))


def common(elements: object, gold: Mapping[str, Sequence[str]]) -> float:
    """Returns the mean over kinds of elements of the F1 between two multisets; kinds that the gold lacks are left
    out. What is not a mapping of lists of strings has nothing in common."""
    if not isinstance(elements, Mapping):
        return 0.0
    scores = []
    for kind, wanted in gold.items():
        ours = elements.get(kind)
        counted = Counter(one for one in ours if isinstance(one, str)) if isinstance(ours, list) else Counter[str]()
        if wanted:
            scores.append(2 * (counted & Counter(wanted)).total() / (counted.total() + len(wanted)))
    return sum(scores) / len(scores) if scores else 0.0


def pixels(value: object) -> Image.Image | None:
    """Returns an answer's image; None for anything else, for a program may have written the answer."""
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or value.ndim != 3 or value.shape[2] != 3:
        return None
    return Image.fromarray(value) if value.size else None


def _flat(image: Tensor) -> bool:
    return bool((image == image[:, :1, :1]).all())


def _tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255


def shares(weights: Mapping[str, float], known: Sequence[str]) -> dict[str, float]:
    """Returns weights that sum to 1. Raises ValueError for unknown names, and numbers that are not positive."""
    unknown = next((name for name in weights if name not in known), None)
    if unknown is not None or not all(isinstance(w, int | float) and w > 0 for w in weights.values()):
        raise ValueError(f"weights are positive numbers of {', '.join(known)}, not {dict(weights)!r}")
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}
