"""Settings of worlds that are played by seed: card games, and Gymnasium environments seen as pictures."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from mmrl.sims.turns.settings import EnvironmentSettings

from mmrl.settings import option

if TYPE_CHECKING:
    from mmrl.sims.turns.environment import Environment

    from mmrl.rollouts import Prompt


class Game(EnvironmentSettings):
    """A world that begins as a seed in the prompt's metadata says."""

    title: ClassVar[str] = "game"
    kinds: ClassVar[dict[str, str]] = {
        "cards": "mmrl.sims.turns.games:Cards",
        "gymnasium": "mmrl.sims.turns.games:Gymnasium",
        "babyai": "mmrl.sims.turns.games:BabyAI",
    }
    test: ClassVar[str] = "tests/sims/test_games.py"

    @abstractmethod
    def prompt(self, seed: int) -> Prompt:
        """Where a game begins; `seed` in its metadata, and `kind` where games come in kinds."""

    def demonstration(self, prompt: Prompt) -> list[str]:
        """What an expert says, response by response. Raises ValueError for a game that has none."""
        raise ValueError(f"task.game.type={self.type} has no expert; set model.path to a model that can play a little")


class Cards(Game):
    """Rows of cards with coloured spots: the first is to be matched by one of the others, by its count or by its
    colour; several rounds, each of which earns its share of 1."""

    type: str = "cards"
    rounds: int = option(3, "rounds of a game", ge=1)
    choices: int = option(3, "cards to choose from", ge=2, le=4)
    rules: tuple[Literal["count", "colour"], ...] = option(("count", "colour"), "what has to match", min_length=1)

    def make(self) -> Environment:
        from mmrl.sims.turns.cards import CardGame

        return CardGame(self.rounds, self.choices)

    def prompt(self, seed: int) -> Prompt:
        from mmrl.rollouts import Prompt

        rule = self.rules[seed % len(self.rules)]
        return Prompt(f"cards-{seed}", f"Match the {rule}.", metadata={"seed": seed, "kind": rule})

    def demonstration(self, prompt: Prompt) -> list[str]:
        from mmrl.sims.turns.cards import deal

        rule, seed = prompt.metadata["kind"], prompt.metadata["seed"]
        return [str(deal(seed, number, rule, self.choices).right + 1) for number in range(self.rounds)]


class Gymnasium(Game):
    """Any Gymnasium environment with discrete actions, whose picture the policy sees and whose actions it names."""

    type: str = "gymnasium"
    env: str = option(description="id of the environment")
    actions: dict[str, int] = option({}, "the environment's action for each word; by default its number is the word")
    picture: str = option("render", "key of the picture in the observation, or render for what render() shows")
    instruction: str = option("", "what is to be done; default: `mission` of the observation, where it has one")
    pixels: int | None = option(None, "pictures are made smaller than this", unit="pixels", ge=1)
    kwargs: dict[str, Any] = option({}, "further arguments of the environment")

    def make(self) -> Environment:
        from mmrl.sims.turns.gymnasium import World

        return World(self)

    def prompt(self, seed: int) -> Prompt:
        from mmrl.rollouts import Prompt

        return Prompt(f"{self.env}-{seed}", self.instruction, metadata={"seed": seed})


class BabyAI(Gymnasium):
    """A level of BabyAI (arXiv 1810.08272) in the package `minigrid`: what the agent sees of a grid of rooms, and an
    instruction out of a grammar."""

    type: str = "babyai"
    env: str = option("BabyAI-GoToRedBallGrey-v0", "the level")
    actions: dict[str, int] = option(
        {"left": 0, "right": 1, "forward": 2, "pickup": 3, "drop": 4, "toggle": 5, "done": 6}, "by their words"
    )
    picture: str = option("view", "view: what the agent sees, from above; or render, for the whole world")
    tile: int = option(8, "side of a square of the grid", unit="pixels", ge=1)

    def demonstration(self, prompt: Prompt) -> list[str]:
        from mmrl.sims.turns.gymnasium import bot

        return bot(self, prompt.metadata["seed"])
