"""The folder of a saved robot policy: its settings, and the weights of its head and critic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from mmrl.policies.vla.backbones.backbone import Backbone
from mmrl.policies.vla.heads.head import Head
from mmrl.policies.vla.settings import Actions
from mmrl.policies.vla.states import StateStatistics
from mmrl.runtime.files import use_default_permissions
from mmrl.settings import plain

CONFIG, WEIGHTS = "vla.json", "vla.safetensors"
ARCHITECTURE_KEYS = ("chunk", "proprioception")  # keys of `action` that the saved weights depend on, whatever the head


def read_saved_config(folder: Path) -> dict[str, Any]:
    """Reads the `action` section that the policy in `folder` was trained with. In folders of older versions the head's
    options are keys of that section; they become a section "head"."""
    saved: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    return saved | {"head": {**saved, "type": saved["head"]}} if isinstance(saved["head"], str) else saved


def has_own_weights(head: Head) -> bool:
    """Returns whether a head has parameters that only a folder which a run saved holds: those of published models are
    part of the backbone, and standard deviation and scale may have initial values."""
    may_be_initial = (*head.optional_parameters, "log_std", "log_scale")
    return any(not name.startswith(may_be_initial) for name, _ in head.named_parameters())


def save(
    folder: Path,
    backbone: Backbone,
    head: Head,
    action: Actions,
    state: dict[str, Tensor],
    state_statistics: StateStatistics | None,
) -> None:
    """Saves a policy's network and its settings; see `VisionLanguageActionPolicy.save`. state: state dict of the whole
    network."""
    weights = {name: value.contiguous() for name, value in state.items() if not name.startswith("backbone.")}
    backbone.save(folder, without_prefix("backbone.", state))
    head_weights = head.save(folder, without_prefix("head.", weights))
    critic_weights = {name: value for name, value in weights.items() if not name.startswith("head.")}
    save_file({**critic_weights, **{f"head.{name}": value for name, value in head_weights.items()}}, folder / WEIGHTS)
    config = plain(action) | ({} if state_statistics is None else {"states": state_statistics.to_json()})
    (folder / CONFIG).write_text(json.dumps(config, indent=2))
    use_default_permissions(folder)


def without_prefix(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors whose names begin with `prefix`, and removes it from their names."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
