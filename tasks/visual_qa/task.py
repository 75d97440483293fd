"""Visual question answering: questions, rewards and a verifier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from mmrl.protocols.parts import ExactSource, PromptCheck, Source
from mmrl.rewards import RewardSet
from mmrl.rewards.turns import conversation_measures
from mmrl.rollouts import Prompt, Sample
from mmrl.sims.turns.settings import EnvironmentSettings
from mmrl.tasks.visual_qa.data.rows import RowSource
from mmrl.tasks.visual_qa.settings import VisualQASettings


class VisualQA:
    """The task: training questions (None if it is only evaluated), held-out questions, rewards and a verifier, whose
    value is the accuracy."""

    def __init__(
        self,
        train: Source | None,
        evaluation: Source,
        rewards: RewardSet,
        accuracy: RewardSet,
        environment: EnvironmentSettings | None = None,
    ):
        """accuracy: verifies answers in evaluations. environment: answers the policy in conversations; None: a response
        is the whole rollout."""
        self.environment = environment
        self.train, self.evaluation = train, evaluation
        self.reward_names, self.reward_weights = rewards.names, rewards.weights
        self.rewards, self.verifier = rewards, accuracy

    @staticmethod
    def from_settings(settings: VisualQASettings, seed: int) -> VisualQA:
        """Builds the task from its settings. seed: the random seed of the training questions.

        Raises ValueError if a source or a reward raises it.
        """
        train, evaluation = settings.data.sources(seed)
        texts = settings.instruction, settings.system
        train_source = None if train is None else with_instruction(train, *texts, settings.data.num_readers)
        held_out = with_instruction(evaluation, *texts)
        rewards, accuracy = RewardSet(settings.rewards), RewardSet([settings.accuracy])
        return VisualQA(train_source, held_out, rewards, accuracy, settings.environment)

    def score(self, samples: Sequence[Sample], group: torch.Tensor | None = None) -> torch.Tensor:
        """Returns unweighted rewards [rollout, component], float32; NaN: it could not be computed. group:
        [rollout], the index of each rollout's prompt, for rewards that compare the rollouts of a prompt."""
        return self.rewards.score(samples, group)

    def unscored_reasons(self) -> Mapping[str, str]:
        """Returns for each reward with a NaN in the last `score` why it could not be computed."""
        return self.rewards.reasons

    def use_resize(self, resize: Mapping[str, int] | None) -> None:
        """Tells rewards with the option coordinates=resized how the model's image processor resizes images. Raises
        UserError if a reward sets other numbers, or needs them and `resize` is None."""
        self.rewards.use_resize(resize)
        self.verifier.use_resize(resize)

    def accuracy(self, samples: Sequence[Sample]) -> torch.Tensor:
        """Returns the values of the verifier [rollout], float32, NaN for responses that it could not judge."""
        return self.verifier.score(samples)[:, 0]

    def measures(self, samples: Sequence[Sample], group: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns metrics [rollout] by name: the length in tokens, whether generation was truncated, and in
        conversations the metrics of `conversation_measures`."""
        return {
            "response/length": torch.tensor([float(s.response_length) for s in samples]),
            "response/truncated": torch.tensor([float(s.truncated) for s in samples]),
            **conversation_measures(samples),
        }


class InstructedSource:
    """A source whose prompts get an instruction after the question and a system message, unless these are None.

    readers: the number of processes that read ahead, for which the source must be picklable; 0: none.
    """

    def __init__(self, source: Source, instruction: str | None, system: str | None, readers: int = 0):
        self.source, self.instruction, self.system, self.readers = source, instruction, system, readers

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Prompt:
        return self._instructed(self.source[index])

    def read(self, index: int) -> Prompt:
        """Returns the prompt of exactly this row, not of the next one if it cannot be used: see `ExactSource`."""
        assert isinstance(self.source, ExactSource), "only sources of rows have readers"
        return self._instructed(self.source.read(index))

    def _instructed(self, prompt: Prompt) -> Prompt:
        """Returns the prompt with the instruction and the system message."""
        text = f"{prompt.text}\n{self.instruction}" if self.instruction else prompt.text
        return replace(prompt, text=text, system=prompt.system if self.system is None else self.system)


class InstructedRows(InstructedSource):
    """An `InstructedSource` of rows, which leaves out prompts that do not fit the model: see `FittedSource`."""

    def __init__(self, rows: RowSource, instruction: str | None, system: str | None, readers: int = 0):
        super().__init__(rows, instruction, system, readers)
        self.rows, self.name, self.max_bad_share = rows, rows.name, rows.max_bad_share
        rows.change = self._instructed

    def __getitem__(self, index: int) -> Prompt:
        return self.rows[index]

    def read(self, index: int) -> Prompt:
        return self.rows.read(index)

    def fit(self, prompt_problem: PromptCheck) -> None:
        self.rows.fit(prompt_problem)

    def fits(self, index: int) -> bool:
        return self.rows.fits(index)


def with_instruction(source: Source, instruction: str | None, system: str | None, readers: int = 0) -> InstructedSource:
    """Returns the source with an instruction and a system message; see `InstructedSource`."""
    if isinstance(source, RowSource):
        return InstructedRows(source, instruction, system, readers)
    return InstructedSource(source, instruction, system, readers)
