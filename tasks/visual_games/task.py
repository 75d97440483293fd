"""Games over turns: seeds to play, rewards and success."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from mmrl.rewards import RewardSet
from mmrl.rewards.turns import conversation_measures, is_lost
from mmrl.rollouts import Prompt, Sample
from mmrl.sims.turns.games import FIRST_TRAINING_SEED, Game
from mmrl.tasks.visual_games.settings import VisualGamesSettings


class VisualGames:
    def __init__(self, settings: VisualGamesSettings, seed: int) -> None:
        self.environment = settings.game
        first = FIRST_TRAINING_SEED * (1 + seed)
        self.train = Games(settings.game, first, min(settings.train_size, FIRST_TRAINING_SEED), settings.careless)
        self.evaluation = Games(settings.game, 0, min(settings.eval_size, FIRST_TRAINING_SEED), 0.0)
        rewards = RewardSet(settings.rewards)
        self.reward_names, self.reward_weights, self.rewards = rewards.names, rewards.weights, rewards

    def score(self, samples: Sequence[Sample], group: torch.Tensor | None = None) -> torch.Tensor:
        return self.rewards.score(samples, group)

    def unscored_reasons(self) -> Mapping[str, str]:
        """Why a rollout was not scored, by reward."""
        return self.rewards.reasons

    def accuracy(self, samples: Sequence[Sample]) -> torch.Tensor:
        """Returns whether the game was won, [rollout]; NaN where its environment failed."""
        return torch.tensor([math.nan if is_lost(sample) else success(sample) for sample in samples])

    def measures(self, samples: Sequence[Sample], group: torch.Tensor) -> dict[str, torch.Tensor]:
        return conversation_measures(samples)


def success(sample: Sample) -> float:
    """Returns the `success` that the world reported in the last turn; 0 where there is none."""
    assert sample.conversation is not None
    turns = sample.conversation.turns
    return float(turns[-1].facts.get("success", 0.0)) if turns else 0.0


class Games:
    """Prompts of a game's seeds. Metadata: those of the game, and `demonstration`, a function that returns an
    expert's responses: playing for a prompt that is only sampled from would cost time for nothing."""

    def __init__(self, game: Game, first: int, size: int, careless: float) -> None:
        self.game, self.first, self.size, self.careless = game, first, size, careless

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < self.size:
            raise IndexError(f"item {index} of {self.size}")
        seed = self.first + index
        prompt = self.game.prompt(seed)
        return replace(
            prompt,
            metadata=prompt.metadata | {"demonstration": partial(expert_responses, self.game, prompt, self.careless)},
        )


def expert_responses(game: Game, prompt: Prompt, careless: float) -> list[str]:
    """Returns an expert's responses; the share `careless` of them is replaced by others of the same game."""
    responses = game.demonstration(prompt)
    rng = np.random.default_rng([prompt.metadata["seed"], 7])
    return [str(rng.choice(responses)) if rng.random() < careless else response for response in responses]
