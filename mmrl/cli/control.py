"""`mmrl control`: the overrides that turn a recipe into its control run, the same training with random rewards. A gain
of the control run is not due to the task's reward."""

from __future__ import annotations

import json

from mmrl.config import Config
from mmrl.errors import UserError
from mmrl.settings import plain


def overrides(config: Config, recipe: str) -> list[str]:
    """Returns the overrides for the control run: random task rewards, no rewards of simulator and environment, and a
    run directory of its own.

    recipe: its name or path, for messages. Raises UserError if the algorithm learns without rewards.
    """
    from_demonstrations = config.algorithm.collects == "demonstrations"
    if from_demonstrations or "rewards" not in type(config.task).model_fields:
        reason = (
            f"algorithm.type={config.algorithm.type} learns without rewards"
            if from_demonstrations
            else f"task.type={config.task.type} has no key task.rewards"
        )
        raise UserError(f"mmrl control replaces rewards by random ones, but {recipe} has none: {reason}")
    control = [f"run_dir={config.run_dir}_control", "task.rewards=[{name: random}]"]
    if "simulator_reward" in type(config.algorithm).model_fields:
        control.append("algorithm.simulator_reward=0.0")
    shapers = config.algorithm.shapers
    without_rewards = [shaper for shaper in shapers if not shaper.uses_environment_rewards]
    if len(without_rewards) < len(shapers):
        control.append(f"algorithm.shaping={json.dumps([plain(shaper) for shaper in without_rewards])}")
    return control
