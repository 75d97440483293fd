"""Settings of games over turns."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.rewards.settings import RewardSpec
from mmrl.settings import load_attribute, option
from mmrl.sims.turns.games import Cards, Game
from mmrl.tasks.settings import TaskSettings

if TYPE_CHECKING:
    from mmrl.protocols.parts import Task


class VisualGamesSettings(TaskSettings):
    """Games that are observed as images and played over several turns. The game reports success at its end."""

    test: ClassVar[str] = "tests/tasks/test_visual_games.py"
    type: str = "visual_games"
    game: Game = option(Cards(), "the game")
    train_size: int = option(100_000, "number of training games, each with a seed", ge=1)
    eval_size: int = option(500, "number of held-out games, each with a seed", ge=1)
    rewards: list[RewardSpec] = option([RewardSpec(name="environment_return")], "rewards of a game", min_length=1)
    careless: float = option(
        0.0, "share of an expert's responses that are replaced by random ones of the same game", ge=0, le=1
    )

    def build(self, seed: int) -> Task:
        return load_attribute("mmrl.tasks.visual_games.task:VisualGames")(self, seed)
