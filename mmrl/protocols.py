"""What the training loop asks of its parts, whatever they are."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from mmrl.data import Source
from mmrl.rollouts import Prompt, Replay, Rollouts, Sample


class Policy(Protocol):
    module: nn.Module
    max_decisions: int  # of a rollout

    def rollout(self, prompts: list[Prompt], group_size: int, seeds: list[int], *, step: int) -> Rollouts: ...

    def respond(self, prompts: list[Prompt], seeds: list[int]) -> list[Sample]: ...

    def demonstrate(self, prompts: list[Prompt], seeds: list[int]) -> Rollouts: ...

    def replay(self, rollouts: Rollouts, model: Any) -> Replay: ...

    def reference(self, rollouts: Rollouts) -> Replay: ...

    def counts(self) -> dict[str, float]: ...  # of what went wrong since it was last asked

    def save(self, folder: Path, state: dict[str, Tensor]) -> None: ...


class Task(Protocol):
    train: Source
    evaluation: Source
    reward_names: list[str]
    reward_weights: list[float]

    def score(self, samples: list[Sample], group: Tensor) -> Tensor: ...

    def accuracy(self, samples: list[Sample]) -> Tensor: ...

    def measures(self, samples: list[Sample], group: Tensor) -> dict[str, Tensor]: ...


class Generator(Protocol):
    """Engines that generate for the policy and need its weights. Inside `generation`, and after `synchronise`, they
    have them; both give metrics."""

    def generation(self) -> AbstractContextManager[dict[str, float]]: ...

    def synchronise(self) -> dict[str, float]: ...

    def close(self) -> None: ...
