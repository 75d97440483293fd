"""The task of games over several turns: prompts, rewards and success."""

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
    """The task: training games, held-out games and rewards. seed: the seed of the run; runs with other seeds play other
    games."""

    def __init__(self, settings: VisualGamesSettings, seed: int) -> None:
        self.environment = settings.game
        # held-out games have the seeds 0, 1, ...; a run has FIRST_TRAINING_SEED seeds of its own above these
        first_seed = FIRST_TRAINING_SEED * (1 + seed)
        self.train = Games(settings.game, first_seed, min(settings.train_size, FIRST_TRAINING_SEED), settings.careless)
        self.evaluation = Games(settings.game, 0, min(settings.eval_size, FIRST_TRAINING_SEED), 0.0)
        rewards = RewardSet(settings.rewards)
        self.reward_names, self.reward_weights, self.rewards = rewards.names, rewards.weights, rewards

    def score(self, samples: Sequence[Sample], group: torch.Tensor | None = None) -> torch.Tensor:
        """Returns unweighted rewards [rollout, component], float32; NaN: it could not be computed. group:
        [rollout], the index of each rollout's prompt."""
        return self.rewards.score(samples, group)

    def unscored_reasons(self) -> Mapping[str, str]:
        """Returns for each reward with a NaN in the last `score` why it could not be computed."""
        return self.rewards.reasons

    def accuracy(self, samples: Sequence[Sample]) -> torch.Tensor:
        """Returns the success of each game, [rollout]; NaN if its environment failed."""
        return torch.tensor([math.nan if is_lost(sample) else success(sample) for sample in samples])

    def measures(self, samples: Sequence[Sample], group: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns metrics of conversations [rollout] by name."""
        return conversation_measures(samples)


def success(sample: Sample) -> float:
    """Returns the `success` that the environment reported in the last turn; 0 if it reported none."""
    assert sample.conversation is not None
    turns = sample.conversation.turns
    return float(turns[-1].facts.get("success", 0.0)) if turns else 0.0


class Games:
    """`size` prompts of a game with the seeds `first_seed`, `first_seed` + 1, ...

    Metadata: that of the game, and `demonstration`, a function that returns an expert's responses. It is a function
    because the expert has to play the game, which would be wasted time in RL.
    """

    def __init__(self, game: Game, first_seed: int, size: int, wrong_share: float) -> None:
        self.game, self.first_seed, self.size, self.wrong_share = game, first_seed, size, wrong_share

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        """Returns the prompt of game `index`, with a function in its metadata that plays it and returns an expert's
        responses."""
        if not 0 <= index < self.size:
            raise IndexError(f"index {index} is out of range: there are {self.size} prompts")
        prompt = self.game.prompt(self.first_seed + index)
        demonstration = partial(expert_responses, self.game, prompt, self.wrong_share)
        return replace(prompt, metadata=prompt.metadata | {"demonstration": demonstration})


def expert_responses(game: Game, prompt: Prompt, wrong_share: float) -> list[str]:
    """Returns an expert's responses, one for each turn. Each is replaced by a random one of the same game with the
    probability `wrong_share`."""
    responses = game.demonstration(prompt)
    rng = np.random.default_rng([prompt.metadata["seed"], 7])  # 7: independent of the random numbers of the game
    return [str(rng.choice(responses)) if rng.random() < wrong_share else response for response in responses]
