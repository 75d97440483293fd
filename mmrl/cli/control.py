"""The control of a recipe: the same run with random rewards, whose gain is not due to the task's reward."""

from __future__ import annotations

import json

from mmrl.config import Config
from mmrl.errors import UserError
from mmrl.settings import plain


def overrides(config: Config, recipe: str) -> list[str]:
    """Returns the overrides that turn a recipe into its control: the task's rewards are random, rewards of simulator
    and environment are dropped, and the run directory is another one.

    Raises UserError for a recipe that learns from no reward.
    """
    if config.algorithm.collects == "demonstrations" or "rewards" not in type(config.task).model_fields:
        raise UserError(f"{recipe} has no control: algorithm.type={config.algorithm.type} learns from no reward")
    changes = [f"run_dir={config.run_dir}_control", "task.rewards=[{name: random}]"]
    if "simulator_reward" in type(config.algorithm).model_fields:
        changes.append("algorithm.simulator_reward=0.0")
    shapers = config.algorithm.shapers
    unpaid = [shaper for shaper in shapers if not shaper.uses_environment_rewards]
    if len(unpaid) < len(shapers):
        changes.append(f"algorithm.shaping={json.dumps([plain(shaper) for shaper in unpaid])}")
    return changes
