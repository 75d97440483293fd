"""Gymnasium environments as multi-turn environments: observations are images, responses are names of actions."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import gymnasium
import numpy as np
from PIL import Image

from mmrl.errors import UserError, describe_error
from mmrl.rollouts import Message, Prompt
from mmrl.runtime.installation import extra_command
from mmrl.sims.turns.environment import Environment, Reply
from mmrl.sims.turns.games import BabyAIGame, Gymnasium, NamedActions
from mmrl.sims.turns.tools import fitted

RENDER = "render"  # the image is the result of render()
Act = Callable[[Any, Any], int | str]  # an expert: environment, observation -> the right action


def make_env(settings: NamedActions, *, rendered: bool = True) -> Any:
    """Makes the environment. rendered: whether render() is needed. Raises UserError if it cannot be made."""
    if isinstance(settings, BabyAIGame):
        try:
            import minigrid  # noqa: F401 - registers the levels
        except ImportError:
            raise UserError(f"task.game.type=babyai needs the package minigrid: {extra_command('babyai')}") from None
    mode: dict[str, Any] = {"render_mode": "rgb_array"} if rendered else {}
    try:
        return gymnasium.make(settings.env, **mode, **settings.kwargs)
    except gymnasium.error.Error as error:
        raise UserError(f"task.game.env={settings.env}: {' '.join(str(error).split())}") from None
    except Exception as error:  # any fault of an environment of the user's own
        raise UserError(f"task.game.env={settings.env} cannot be made: {describe_error(error)}") from None


def is_image(space: object) -> bool:
    """Returns whether a space holds images, uint8 [height, width, 3]."""
    return isinstance(space, gymnasium.spaces.Box) and space.dtype == np.uint8 and space.shape[2:] == (3,)


@cache
def observes_images(env: str, kwargs: str) -> bool:
    """Returns whether the observations of an environment are images. kwargs: its arguments as JSON, which can
    be a key of the cache."""
    env_instance = make_env(Gymnasium(env=env, kwargs=json.loads(kwargs)), rendered=False)
    images = is_image(env_instance.observation_space)
    env_instance.close()
    return images


class GymnasiumWorld(Environment):
    """A Gymnasium environment as a multi-turn environment; the action is the last word of a response."""

    def __init__(self, settings: NamedActions) -> None:
        """Makes the environment. Its image is the one that `settings.image` names, else the observation if that is an
        image, else that of render(). Raises UserError if it has no such image, or its actions are not discrete."""
        self.settings, self.image = settings, settings.image
        if self.image is None and not observes_images(settings.env, json.dumps(settings.kwargs)):
            self.image = RENDER
        needs_render = self.image == RENDER or isinstance(settings, BabyAIGame)
        self.env = make_env(settings, rendered=needs_render)
        spaces = self.env.observation_space
        keys = spaces.spaces if isinstance(spaces, gymnasium.spaces.Dict) else {}
        if not needs_render and self.image is not None and self.image not in keys:
            raise UserError(
                f"task.game.image={self.image}: the observation of {settings.env} has no such key; it has "
                f"{', '.join(keys) or 'none'}; set it to one of these, or to render for the image of render()"
            )
        if not isinstance(self.env.action_space, gymnasium.spaces.Discrete):
            raise UserError(f"task.game.env={settings.env}: actions must be discrete, not {self.env.action_space}")
        count = int(self.env.action_space.n)
        self.actions = settings.actions or {str(number): number for number in range(count)}

    def start(self, prompt: Prompt) -> list[Message]:
        """Resets the environment with the prompt's seed. Returns a message with the first image, and the prompt's text
        or the mission."""
        observation, _ = self.env.reset(seed=prompt.metadata["seed"])
        mission = observation.get("mission", "") if isinstance(observation, dict) else ""
        text = prompt.text or str(mission)
        return [Message("user", (self._image(observation), text) if text else (self._image(observation),))]

    def step(self, response: str) -> Reply:
        """Executes the action that the last word of the response names. For another word the reply is an error, and the
        game goes on. A success is a termination with a positive reward."""
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
        """Returns the image of an observation, or of render(), reduced to `settings.pixels` if that is set."""
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
    """Starts a game to test the environment. Raises UserError for any exception of it."""
    world = GymnasiumWorld(settings)
    try:
        world.start(settings.prompt(0))
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"task.game.env={settings.env} cannot begin a game: {describe_error(error)}") from None
    finally:
        world.close()


def demonstrated(settings: Gymnasium, seed: int, act: Act) -> list[str]:
    """Plays the game of a seed with the expert `act`. Returns the names of its actions, at most `limits.max_turns`.

    Raises UserError for an unknown action.
    """
    world = GymnasiumWorld(settings)
    names = {number: word for word, number in world.actions.items()}
    observation, _ = world.env.reset(seed=seed)
    responses: list[str] = []
    over = False
    while not over and len(responses) < settings.limits.max_turns:
        chosen = act(world.env.unwrapped, observation)
        word = chosen if isinstance(chosen, str) else names.get(int(chosen), str(chosen))
        if word not in world.actions:
            raise UserError(
                f"task.game.expert={settings.expert} returned {word}, which is not one of {', '.join(world.actions)}"
            )
        responses.append(word)
        observation, _, terminated, truncated, _ = world.env.step(world.actions[word])
        over = bool(terminated or truncated)
    world.close()
    return responses


def bot(settings: BabyAIGame, seed: int) -> list[str]:
    """Plays the game of a seed with BabyAI's own expert. Returns the names of its actions."""
    from minigrid.utils.baby_ai_bot import BabyAIBot

    env, names = make_env(settings), {number: word for word, number in settings.actions.items()}
    env.reset(seed=seed)
    expert, responses, over, action = BabyAIBot(env), [], False, None
    while not over:
        action = expert.replan(action)
        responses.append(names[int(action)])
        _, _, terminated, truncated, _ = env.step(action)
        over = terminated or truncated
    env.close()
    return responses
