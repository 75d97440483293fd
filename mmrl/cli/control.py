"""The control of a recipe: the same run with rewards that know nothing, which shows what the reward itself has
taught."""

from __future__ import annotations

import json

from mmrl.config import Config
from mmrl.errors import UserError
from mmrl.settings import plain


def overrides(config: Config, recipe: str) -> list[str]:
    """Returns the overrides that turn a recipe into its control: rewards of the task are drawn by chance, what a
    simulator or an environment pays beside them is left out, and the run has a directory of its own.

    Raises UserError for a recipe that learns from no reward.
    """
    if config.algorithm.collects == "demonstrations" or "rewards" not in type(config.task).model_fields:
        raise UserError(f"{recipe} has no control: algorithm.type={config.algorithm.type} learns from no reward")
    found = [f"run_dir={config.run_dir}_control", "task.rewards=[{name: random}]"]
    if "simulator_reward" in type(config.algorithm).model_fields:
        found.append("algorithm.simulator_reward=0.0")
    shapers = config.algorithm.shapers
    left = [shaper for shaper in shapers if not shaper.paid_by_environment]
    if len(left) < len(shapers):
        found.append(f"algorithm.shaping={json.dumps([plain(shaper) for shaper in left])}")
    return found
