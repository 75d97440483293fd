"""Settings of heads with Laplace-distributed actions."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.policies.vla.settings import ActionHead, Actions, HeadBackbone, Level
from mmrl.protocols.offers import Offer
from mmrl.settings import load_attribute, option

if TYPE_CHECKING:
    from torch import nn


class LaplaceActions(ActionHead):
    """Laplace-distributed actions, with a predicted median and a learned scale."""

    equation: ClassVar[str] = (
        "log p(a) = -|a - median| / scale - log(2 scale); sampled and scored at temperature x scale"
    )
    source: ClassVar[str] = "RIPT-VLA, arXiv 2505.17016"
    level: Level = option("token", "what a decision is: one number of an action, an action, or the chunk")
    scale: float = option(0.1, "scale of the Laplace distribution before training", gt=0)

    @property
    def offers(self) -> frozenset[Offer]:
        return frozenset({"entropy", "single_sample_kl", "reference_ratio"})


class RegressionActions(LaplaceActions):
    """Laplace-distributed actions, whose median comes from one learned query for each action."""

    type: str = "regression"

    def build(self, action: Actions, backbone: HeadBackbone, action_dim: int, state_dim: int) -> nn.Module:
        return load_attribute("mmrl.policies.vla.heads.head:RegressionHead")(
            self, action, action_dim, state_dim, backbone.width
        )


class BridgeActions(LaplaceActions):
    """Laplace-distributed actions, whose median comes from the backbone's last layers, by bridge attention."""

    source: ClassVar[str] = "VLA-Adapter, arXiv 2509.09372"
    type: str = "bridge"
    architecture_keys: ClassVar[tuple[str, ...]] = ("width", "depth", "queries")
    width: int = option(128, "width of the bridge", ge=1)
    depth: int = option(3, "blocks, one for each of the backbone's last layers", ge=1)
    queries: int = option(16, "queries that the backbone reads", ge=1)

    def build(self, action: Actions, backbone: HeadBackbone, action_dim: int, state_dim: int) -> nn.Module:
        return load_attribute("mmrl.policies.vla.heads.head:BridgeHead")(
            self, action, action_dim, state_dim, backbone.width
        )
