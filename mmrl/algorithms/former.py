"""Algorithms by names of before November 2026, written as they are now; see `mmrl.settings.Choice.former`."""

from __future__ import annotations

from typing import Any


def decoupled_ppo(tree: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns it as `ppo`, with the defaults that were its own. Without a length_scale its lambda was `lam`."""
    scale = tree.pop("length_scale", 0.05)
    defaults = {"type": "ppo", "gamma": 1.0, "value_lam": 1.0}
    lam = {} if scale is None else {"lam": {"type": "by_length", "scale": scale}}
    return [defaults | tree | {"type": "ppo"} | lam]
