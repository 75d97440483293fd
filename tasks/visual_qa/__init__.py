"""Visual question answering with checkable answers: digits, the user's own files, or a Hugging Face dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from mmrl.rewards import RewardSet
from mmrl.rollouts import Prompt, Sample
from tasks.visual_qa.config import DigitsData, FilesData, HuggingFaceData, VisualQAConfig, parse
from tasks.visual_qa.digits import DigitsSource
from tasks.visual_qa.files import FileSource
from tasks.visual_qa.huggingface import HuggingFaceSource

__all__ = ["DigitsSource", "FileSource", "HuggingFaceSource", "Source", "VisualQA", "VisualQAConfig", "build"]


class Source(Protocol):
    """Prompts by index: the same index gives the same prompt."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Prompt: ...


class VisualQA:
    """A task: questions to train on (None where it is only evaluated), questions held out, rewards and a verifier."""

    def __init__(self, train: Source | None, evaluation: Source, rewards: RewardSet, accuracy: RewardSet):
        self.train, self.evaluation = train, evaluation
        self.reward_names, self.reward_weights = rewards.names, rewards.weights
        self._rewards, self._accuracy = rewards, accuracy

    def score(self, samples: Sequence[Sample], group: torch.Tensor | None = None) -> torch.Tensor:
        """Unweighted reward components [rollout, component], float32, NaN where one could not be scored."""
        return self._rewards.score(samples)

    def accuracy(self, samples: Sequence[Sample]) -> torch.Tensor:
        """What the verifier of the evaluation gives [rollout], float32, NaN where it could not tell."""
        return self._accuracy.score(samples)[:, 0]

    def measures(self, samples: Sequence[Sample], group: torch.Tensor) -> dict[str, torch.Tensor]:
        """Length in tokens and whether generation was cut, [rollout]."""
        return {
            "response/length": torch.tensor([float(s.response_length) for s in samples]),
            "response/truncated": torch.tensor([float(s.truncated) for s in samples]),
        }


class Asked:
    """A source whose problems are followed by an instruction and preceded by a system message, where given."""

    def __init__(self, source: Source, instruction: str | None, system: str | None):
        self.source, self.instruction, self.system = source, instruction, system

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Prompt:
        prompt = self.source[index]
        text = f"{prompt.text}\n{self.instruction}" if self.instruction else prompt.text
        return replace(prompt, text=text, system=self.system)


def build(options: Mapping[str, Any], seed: int) -> VisualQA:
    """The task that `options` (see `VisualQAConfig`) describe; `seed` draws the training questions of digits.

    Raises ValueError in one line for a key or value that is not valid, and as the sources and rewards do.
    """
    config = parse(options)
    rewards, accuracy = RewardSet(config.rewards), RewardSet([config.accuracy])
    train, evaluation = _sources(config.data, seed)
    asked = None if train is None else Asked(train, config.instruction, config.system)
    return VisualQA(asked, Asked(evaluation, config.instruction, config.system), rewards, accuracy)


def _sources(data: DigitsData | FilesData | HuggingFaceData, seed: int) -> tuple[Source | None, Source]:
    if isinstance(data, DigitsData):
        layout: dict[str, Any] = data.model_dump(include={"kinds", "cells", "scale", "jitter"})
        return (
            DigitsSource("train", size=data.train_size, seed=seed, careless=data.careless, **layout),
            DigitsSource("heldout", size=data.eval_size, seed=data.eval_seed, **layout),
        )
    rows: dict[str, Any] = data.model_dump(
        include={"image_field", "problem_field", "answer_field", "image_root", "max_bad_share"}
    ) | {"validate": data.check_rows}
    if isinstance(data, FilesData):
        return None if data.train is None else FileSource(data.train, **rows), FileSource(data.eval, **rows)
    train, evaluation = (
        None if split is None else HuggingFaceSource(data.name, split, options=data.options, **rows)
        for split in (data.train_split, data.eval_split)
    )
    assert evaluation is not None
    return train, evaluation
