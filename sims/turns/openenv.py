"""Environments of OpenEnv: played in this process, or by a server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mmrl.errors import UserError
from mmrl.rollouts import Message, Prompt
from mmrl.settings import locate
from mmrl.sims.turns.chat import Part, joined, read_image
from mmrl.sims.turns.environment import Environment, Reply
from mmrl.sims.turns.games import OpenEnv

NOT_OBSERVED = ("done", "reward", "metadata")  # fields of an observation that the policy does not read


def make_env(settings: OpenEnv) -> Any:
    """Returns an environment, or a client of one, with `reset(seed=...)` and `step(action)`. Raises UserError if the
    server cannot be reached."""
    if settings.target is not None:
        return locate(settings.target, "task.game.target")()
    try:
        from openenv.core.generic_client import GenericEnvClient
    except ImportError as error:
        raise UserError(f"task.game.address needs a package: pip install openenv-core ({error})") from None
    client = GenericEnvClient(base_url=settings.address).sync()
    try:
        return client.connect()
    except Exception as error:  # the client raises many kinds of network errors
        raise UserError(
            f"task.game.address={settings.address} cannot be reached: {' '.join(str(error).split())}"
        ) from None


class OpenEnvWorld(Environment):
    """An environment of OpenEnv as a multi-turn environment. earned: the sum of the rewards of the game so far."""

    def __init__(self, settings: OpenEnv) -> None:
        self.settings, self.env, self.earned = settings, make_env(settings), 0.0
        self.action = None if settings.action is None else locate(settings.action, "task.game.action")

    def start(self, prompt: Prompt) -> list[Message]:
        observation, _, _ = self._outcome(self.env.reset(seed=prompt.metadata["seed"]))
        return [Message("user", joined([*self._shown(observation), *filter(None, [prompt.text])]))]

    def step(self, response: str) -> Reply:
        """Executes the response as an action. A response that is not one is answered by an error, and the game goes on.
        A success is an end with a sum of rewards of at least `settings.won`."""
        try:
            action = self._action(response)
        except (ValueError, RecursionError) as error:  # RecursionError: deeply nested JSON
            why = f"no action ({' '.join(str(error).split())[:200]})"
            return Reply([Message("user", (f"error: {why}",))], error=why)
        observation, reward, done = self._outcome(self.env.step(action))
        self.earned += reward
        facts = {"success": float(done and self.earned >= self.settings.won)}
        return Reply([] if done else [Message("user", self._shown(observation))], end=done, reward=reward, facts=facts)

    def close(self) -> None:
        self.env.close()

    def _outcome(self, result: Any) -> tuple[dict[str, Any], float, bool]:
        """Returns observation, reward and whether the game has ended. A client's result has the observation as a
        mapping; the result of an environment in this process is a pydantic model with reward and done as fields."""
        observation = result.observation if self.settings.target is None else result.model_dump()
        return dict(observation), float(result.reward or 0.0), bool(result.done)

    def _action(self, response: str) -> object:
        """Parses a response. Raises ValueError for one that is not an action."""
        field = self.settings.action_field
        fields = json.loads(response) if field is None else {field: response.strip()}
        if not isinstance(fields, dict):
            raise ValueError("an action is a JSON object")
        return fields if self.action is None else self.action(**fields)

    def _shown(self, observation: Mapping[str, Any]) -> tuple[Part, ...]:
        """Returns the parts of the message that shows an observation: the image, if any, and the fields `text`
        (default: all) as JSON, or as plain text if `text` names only one."""
        settings = self.settings
        images = [] if settings.image is None else [read_image(observation[settings.image])]
        names = settings.text or [name for name in observation if name not in (*NOT_OBSERVED, settings.image)]
        if settings.text is not None and len(names) == 1:
            return joined([*images, str(observation[names[0]])])
        fields = {name: observation[name] for name in names}
        return joined([*images, json.dumps(fields, default=str)] if fields else images)
