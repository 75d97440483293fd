"""Gymnasium environments as environments of turns: images out, words in."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import gymnasium
import numpy as np
from PIL import Image

from mmrl.errors import UserError, told
from mmrl.rollouts import Message, Prompt
from mmrl.sims.turns.environment import Environment, Reply
from mmrl.sims.turns.games import BabyAIGame, Gymnasium, NamedActions
from mmrl.sims.turns.tools import fitted

RENDER = "render"  # the image is what render() shows
Act = Callable[[Any, Any], int | str]  # the right action, of an environment and its observation


def made(settings: NamedActions, *, rendered: bool = True) -> Any:
    """Raises UserError where there is no such environment, or where it can not be made."""
    if isinstance(settings, BabyAIGame):
        try:
            import minigrid  # noqa: F401 - registers the levels
        except ImportError:
            raise UserError("task.game.type=babyai needs the package minigrid: pip install -e '.[babyai]'") from None
    mode: dict[str, Any] = {"render_mode": "rgb_array"} if rendered else {}
    try:
        return gymnasium.make(settings.env, **mode, **settings.kwargs)
    except gymnasium.error.Error as error:
        raise UserError(f"task.game.env={settings.env}: {' '.join(str(error).split())}") from None
    except Exception as error:  # any fault of an environment of the user's own
        raise UserError(f"task.game.env={settings.env} can not be made: {told(error)}") from None


def is_image(space: Any) -> bool:
    """Whether what a space holds is numbers of 8 bits, [height, width, 3]."""
    return isinstance(space, gymnasium.spaces.Box) and space.dtype == np.uint8 and space.shape[2:] == (3,)


@cache
def observed(env: str, kwargs: str) -> bool:
    """Whether the observations of an environment with these arguments, as JSON, are images."""
    one = made(Gymnasium(env=env, kwargs=json.loads(kwargs)), rendered=False)
    found = is_image(one.observation_space)
    one.close()
    return found


class GymnasiumWorld(Environment):
    """A response names one action, as its last word."""

    def __init__(self, settings: NamedActions) -> None:
        self.settings, self.image = settings, settings.image
        if self.image is None and not observed(settings.env, json.dumps(settings.kwargs)):
            self.image = RENDER
        drawn = self.image == RENDER or isinstance(settings, BabyAIGame)
        self.env = made(settings, rendered=drawn)
        spaces = self.env.observation_space
        keys = spaces.spaces if isinstance(spaces, gymnasium.spaces.Dict) else {}
        if not drawn and self.image is not None and self.image not in keys:
            raise UserError(
                f"task.game.image={self.image}: the observation of {settings.env} has no such key; it has "
                f"{', '.join(keys) or 'none'}, and render stands for what render() shows"
            )
        if not isinstance(self.env.action_space, gymnasium.spaces.Discrete):
            raise UserError(f"task.game.env={settings.env}: actions must be discrete, not {self.env.action_space}")
        count = int(self.env.action_space.n)
        self.actions = settings.actions or {str(number): number for number in range(count)}

    def start(self, prompt: Prompt) -> list[Message]:
        observation, _ = self.env.reset(seed=prompt.metadata["seed"])
        mission = observation.get("mission", "") if isinstance(observation, dict) else ""
        words = prompt.text or str(mission)
        return [Message("user", (self._image(observation), words) if words else (self._image(observation),))]

    def step(self, response: str) -> Reply:
        word = (response.split() or [""])[-1].strip(".").lower()
        if word not in self.actions:
            why = f"say one of {', '.join(self.actions)}"
            return Reply([Message("user", (f"error: {why}",))], error=why)
        observation, reward, terminated, truncated, _ = self.env.step(self.actions[word])
        facts = {"success": float(terminated and reward > 0)}
        end = bool(terminated or truncated)
        shown = () if end else (Message("user", (self._image(observation),)),)
        return Reply(shown, end=end, reward=float(reward), facts=facts)

    def close(self) -> None:
        self.env.close()

    def _image(self, observation: Any) -> Image.Image:
        settings = self.settings
        if self.image == RENDER:
            pixels = self.env.render()
        elif isinstance(settings, BabyAIGame):
            pixels = self.env.unwrapped.get_pov_render(tile_size=settings.tile)
        else:
            pixels = observation if self.image is None else observation[self.image]
        image = Image.fromarray(np.asarray(pixels, np.uint8))
        return image if settings.pixels is None else fitted(image, settings.pixels)


def try_out(settings: Gymnasium) -> None:
    """Begins a game. Raises UserError in one line for whatever an environment of the user's own raises."""
    world = GymnasiumWorld(settings)
    try:
        world.start(settings.prompt(0))
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"task.game.env={settings.env} can not begin a game: {told(error)}") from None
    finally:
        world.close()


def demonstrated(settings: Gymnasium, seed: int, act: Act) -> list[str]:
    """What an expert does from a seed on, in words, to the end of the game or as long as a conversation may be.

    Raises UserError for an action that is none of the game's.
    """
    world = GymnasiumWorld(settings)
    words = {number: word for word, number in world.actions.items()}
    observation, _ = world.env.reset(seed=seed)
    said: list[str] = []
    over = False
    while not over and len(said) < settings.limits.max_turns:
        chosen = act(world.env.unwrapped, observation)
        word = chosen if isinstance(chosen, str) else words.get(int(chosen), str(chosen))
        if word not in world.actions:
            raise UserError(
                f"task.game.expert={settings.expert} gave {word}, which is none of {', '.join(world.actions)}"
            )
        said.append(word)
        observation, _, terminated, truncated, _ = world.env.step(world.actions[word])
        over = bool(terminated or truncated)
    world.close()
    return said


def bot(settings: BabyAIGame, seed: int) -> list[str]:
    """The actions of BabyAI's own expert, in words."""
    from minigrid.utils.baby_ai_bot import BabyAIBot

    env, words = made(settings), {number: word for word, number in settings.actions.items()}
    env.reset(seed=seed)
    expert, said, over, action = BabyAIBot(env), [], False, None
    while not over:
        action = expert.replan(action)
        said.append(words[int(action)])
        _, _, terminated, truncated, _ = env.step(action)
        over = terminated or truncated
    env.close()
    return said
