"""Settings of games that start from a seed: card games, Gymnasium environments with images, OpenEnv and verifiers."""

from __future__ import annotations

import importlib.util
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import model_validator

from mmrl.settings import load_attribute, locate, option
from mmrl.sims.turns.settings import EnvironmentSettings

FIRST_TRAINING_SEED = 1_000_000  # held-out seeds are below

if TYPE_CHECKING:
    from mmrl.rollouts import Prompt
    from mmrl.sims.turns.environment import Environment


class Game(EnvironmentSettings):
    """A game that starts from a seed in the prompt's metadata."""

    title: ClassVar[str] = "game"
    kinds: ClassVar[dict[str, str]] = {
        "cards": "mmrl.sims.turns.games:Cards",
        "gymnasium": "mmrl.sims.turns.games:Gymnasium",
        "babyai": "mmrl.sims.turns.games:BabyAIGame",
        "openenv": "mmrl.sims.turns.games:OpenEnv",
        "verifiers": "mmrl.sims.turns.games:Verifiers",
    }
    test: ClassVar[str] = "tests/sims/test_games.py"

    @abstractmethod
    def prompt(self, seed: int) -> Prompt:
        """Returns the prompt of the game with this seed. Metadata: `seed`, and `kind` if the game has several kinds."""

    def demonstration(self, prompt: Prompt) -> list[str]:
        """Returns the responses of an expert, one for each turn. Raises ValueError if the game has no expert."""
        raise ValueError(
            f"task.game.type={self.type} has no expert to learn from; set model.path to a model that can play a little"
        )


class Cards(Game):
    """A card game: the policy says which card matches the first one, by the count or by the color of its spots. Each
    right round has the reward 1 / rounds."""

    type: str = "cards"
    rounds: int = option(3, "rounds of a game", ge=1)
    choices: int = option(3, "cards to choose from", ge=2, le=4)
    rules: tuple[Literal["count", "colour"], ...] = option(
        ("count", "colour"), "properties that have to match", min_length=1
    )

    def make(self) -> Environment:
        from mmrl.sims.turns.cards import CardGame

        return CardGame(self.rounds, self.choices)

    def prompt(self, seed: int) -> Prompt:
        """Returns the prompt of the game with this seed. The rules take turns from seed to seed."""
        from mmrl.rollouts import Prompt

        rule = self.rules[seed % len(self.rules)]
        return Prompt(f"cards-{seed}", f"Match the {rule}.", metadata={"seed": seed, "kind": rule})

    def demonstration(self, prompt: Prompt) -> list[str]:
        """Returns the right answer of each round."""
        from mmrl.sims.turns.cards import deal

        rule, seed = prompt.metadata["kind"], prompt.metadata["seed"]
        return [deal(seed, number, rule, self.choices).expert(rule) for number in range(self.rounds)]


class NamedActions(Game):
    """A Gymnasium environment with discrete actions. The policy observes images and responds with names of actions."""

    env: str = option(description="id of the environment; module:Id-v0 imports the module that registers it")
    actions: dict[str, int] = option({}, "the environment's action for each word; by default its number is the word")
    image: str | None = option(
        None,
        "key of the image in the observation, or render for what render() shows; default: the observation itself "
        "where it is an image, numbers of 8 bits [height, width, 3], else render",
    )
    instruction: str = option("", "what is to be done; default: `mission` of the observation, where it has one")
    pixels: int | None = option(None, "larger images are scaled down to this number of pixels", unit="pixels", ge=1)
    kwargs: dict[str, Any] = option({}, "further arguments of the environment")

    def make(self) -> Environment:
        return load_attribute("mmrl.sims.turns.gymnasium:GymnasiumWorld")(self)

    def prompt(self, seed: int) -> Prompt:
        from mmrl.rollouts import Prompt

        return Prompt(f"{self.env}-{seed}", self.instruction, metadata={"seed": seed})


class Gymnasium(NamedActions):
    """A Gymnasium environment with discrete actions. The policy observes images and responds with names of actions."""

    type: str = "gymnasium"
    expert: str | None = option(
        None,
        "package.module:function that is called with the environment and its observation and gives the right action, "
        "as its number or word: what algorithm.type=supervised learns from",
    )

    def check(self) -> None:
        """Starts a game, so that an environment without images is reported before a model is loaded."""
        if self.isolated is None:  # else it is not trusted in this process
            load_attribute("mmrl.sims.turns.gymnasium:try_out")(self)
        if self.expert is not None:
            locate(self.expert, "task.game.expert")

    def demonstration(self, prompt: Prompt) -> list[str]:
        """Plays the prompt's game with the function `expert`. Returns the responses that make its actions, one for each
        turn. Raises ValueError if `expert` is not set."""
        if self.expert is None:
            raise ValueError("task.game.expert is not set: name a function that gives the right action")
        return load_attribute("mmrl.sims.turns.gymnasium:demonstrated")(
            self, prompt.metadata["seed"], locate(self.expert, "task.game.expert")
        )


class BabyAIGame(NamedActions):
    """A level of BabyAI (arXiv 1810.08272) in the package `minigrid`: a grid of rooms as the agent sees it, and an
    instruction from a grammar."""

    type: str = "babyai"
    env: str = option("BabyAI-GoToRedBallGrey-v0", "the level")
    actions: dict[str, int] = option(
        {"left": 0, "right": 1, "forward": 2, "pickup": 3, "drop": 4, "toggle": 5, "done": 6}, "by their words"
    )
    image: str | None = option("view", "view: what the agent sees, from above; or render, for the whole world")
    tile: int = option(8, "side of a square of the grid", unit="pixels", ge=1)

    def demonstration(self, prompt: Prompt) -> list[str]:
        return load_attribute("mmrl.sims.turns.gymnasium:bot")(self, prompt.metadata["seed"])


class OpenEnv(Game):
    """An environment of OpenEnv: an `Environment` class in this process, or a server at an address. A game begins with
    `reset(seed=...)`. The policy gets observations as JSON, or selected fields of them."""

    test: ClassVar[str] = "tests/sims/test_other_environments.py"
    type: str = "openenv"
    target: str | None = option(None, "package.module:name of an environment's class, or of a function that makes one")
    address: str | None = option(None, "address of a server, such as http://localhost:8000; set this or target")
    action: str | None = option(None, "package.module:name of the class of actions, which target needs")
    action_field: str | None = option(
        None, "field of an action that a response's text fills; null: the response is the action, as a JSON object"
    )
    text: tuple[str, ...] | None = option(
        None, "fields of an observation that are shown; null: all, as JSON", min_length=1
    )
    image: str | None = option(None, "field that holds an image: a file in base64, or numbers [height, width, 3]")
    instruction: str = option("", "what is to be done, after the first observation")
    won: float = option(1.0, "a game is a success if its rewards add up to at least this")

    @model_validator(mode="after")
    def _one_place(self) -> OpenEnv:
        """Checks that either target or address is set, and action exactly with target."""
        if (self.target is None) == (self.address is None):
            raise ValueError("type=openenv: set either target or address")
        if (self.target is None) != (self.action is None):
            raise ValueError("type=openenv: set action if target is set, and leave it out if address is set")
        return self

    def check(self) -> None:
        """Imports target and action. Raises ValueError if the package is needed and not installed."""
        if self.address is not None and importlib.util.find_spec("openenv") is None:
            raise ValueError("task.game.type=openenv needs the package openenv-core: pip install openenv-core")
        for target, key in ((self.target, "task.game.target"), (self.action, "task.game.action")):
            if target is not None:
                locate(target, key)

    def make(self) -> Environment:
        return load_attribute("mmrl.sims.turns.openenv:OpenEnvWorld")(self)

    def prompt(self, seed: int) -> Prompt:
        from mmrl.rollouts import Prompt

        return Prompt(f"openenv-{seed}", self.instruction, metadata={"seed": seed})


class Verifiers(Game):
    """An environment of the package verifiers (0.1: `MultiTurnEnv`, `ToolEnv`, `SingleTurnEnv`). Its own loop runs the
    conversation, and its rubric gives the reward at the end. A seed is a row of its dataset. Tool calls are written as
    <tool_call>{"name": ..., "arguments": {...}}</tool_call>. Rewards that compare a group are not supported."""

    test: ClassVar[str] = "tests/sims/test_other_environments.py"
    type: str = "verifiers"
    env: str | None = option(None, "id of an installed environment, as verifiers.load_environment takes it")
    target: str | None = option(None, "package.module:name of a function that returns an environment; this or env")
    kwargs: dict[str, Any] = option({}, "arguments of the environment")
    won: float = option(1.0, "a game is a success if its reward is at least this")

    @model_validator(mode="after")
    def _one_place(self) -> Verifiers:
        """Checks that either env or target is set."""
        if (self.target is None) == (self.env is None):
            raise ValueError("type=verifiers: set either env or target")
        return self

    def check(self) -> None:
        if importlib.util.find_spec("verifiers") is None:
            raise ValueError("task.game.type=verifiers needs its package: pip install 'verifiers<0.2'")

    def make(self) -> Environment:
        return load_attribute("mmrl.sims.turns.verifiers:VerifiersWorld")(self)

    def prompt(self, seed: int) -> Prompt:
        from mmrl.rollouts import Prompt

        return Prompt(f"verifiers-{seed}", "", metadata={"seed": seed})
