"""Gymnasium environments as environments of turns: pictures out, words in."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from mmrl.sims.turns.environment import Environment, Reply
from mmrl.sims.turns.games import BabyAI, Gymnasium
from mmrl.sims.turns.tools import fitted
from PIL import Image

from mmrl.errors import UserError
from mmrl.rollouts import Message, Prompt


def made(settings: Gymnasium) -> Any:
    """Raises UserError where there is no such environment."""
    if isinstance(settings, BabyAI):
        try:
            import minigrid  # noqa: F401 - registers the levels
        except ImportError:
            raise UserError("task.game.type=babyai needs the package minigrid: pip install -e '.[babyai]'") from None
    try:
        return gymnasium.make(settings.env, render_mode="rgb_array", **settings.kwargs)
    except gymnasium.error.Error as error:
        raise UserError(f"task.game.env={settings.env}: {' '.join(str(error).split())}") from None


class World(Environment):
    """A response names one action, as its last word."""

    def __init__(self, settings: Gymnasium) -> None:
        self.settings, self.env = settings, made(settings)
        if not isinstance(self.env.action_space, gymnasium.spaces.Discrete):
            raise UserError(f"task.game.env={settings.env}: actions must be discrete, not {self.env.action_space}")
        count = int(self.env.action_space.n)
        self.actions = settings.actions or {str(number): number for number in range(count)}

    def start(self, prompt: Prompt) -> list[Message]:
        observation, _ = self.env.reset(seed=prompt.metadata["seed"])
        mission = observation.get("mission", "") if isinstance(observation, dict) else ""
        words = prompt.text or str(mission)
        return [Message("user", (self._picture(observation), words) if words else (self._picture(observation),))]

    def step(self, response: str) -> Reply:
        word = (response.split() or [""])[-1].strip(".").lower()
        if word not in self.actions:
            why = f"say one of {', '.join(self.actions)}"
            return Reply([Message("user", (f"error: {why}",))], error=why)
        observation, reward, terminated, truncated, _ = self.env.step(self.actions[word])
        facts = {"success": float(terminated and reward > 0)}
        end = bool(terminated or truncated)
        shown = () if end else (Message("user", (self._picture(observation),)),)
        return Reply(shown, end=end, reward=float(reward), facts=facts)

    def close(self) -> None:
        self.env.close()

    def _picture(self, observation: Any) -> Image.Image:
        settings = self.settings
        if settings.picture == "render":
            pixels = self.env.render()
        elif settings.picture == "view" and isinstance(settings, BabyAI):
            pixels = self.env.unwrapped.get_pov_render(tile_size=settings.tile)
        else:
            pixels = observation[settings.picture]
        picture = Image.fromarray(np.asarray(pixels, np.uint8))
        return picture if settings.pixels is None else fitted(picture, settings.pixels)


def bot(settings: BabyAI, seed: int) -> list[str]:
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
