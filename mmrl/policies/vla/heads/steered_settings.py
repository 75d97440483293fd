"""Settings of the head that steers a frozen flow by its noise."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.policies.vla.settings import ActionHead, Actions, FrozenFlow, GaussianActions, HeadBackbone
from mmrl.protocols.offers import Offer
from mmrl.settings import load_attribute, option

if TYPE_CHECKING:
    from torch import nn


class SteeredActions(GaussianActions):
    """The flow of the checkpoint, which is frozen with its backbone, denoises from noise that a perceptron learns to
    draw. The first policy draws standard normal noise, as the flow alone does.

    A decision is of the noise, and its likelihood is exact; denoising has no noise of its own. All noise of a chunk
    counts, also where an episode ends inside it, for every action depends on it. At temperature 0 a chunk comes from
    the mean of the noise; `evaluation.temperature=1` plays the first policy as the flow alone plays."""

    equation: ClassVar[str] = (
        "a = flow(w), log p(w) = log N(w; mean(h, s), (temperature x std)^2); displacement, for the term head_cost: "
        "E |w - e|^2 by number = mean^2 + (std - 1)^2, e = (w - mean) / std the flow's own noise"
    )
    source: ClassVar[str] = (
        "the actor of DSRL, arXiv 2506.15799, with a policy gradient in place of its critic's; the displacement is "
        "what LP-DS bounds, reconstructed from its abstract"
    )
    test: ClassVar[str] = "tests/policies/vla/test_steered.py"
    type: str = "steered"
    states_suffice: ClassVar[bool] = False
    teachable: ClassVar[bool] = False
    shaping: ClassVar[tuple[str, ...]] = ("width", "layers", "noises")
    base: ActionHead = option(
        FrozenFlow(),
        "the flow that training starts from",
        kinds={"flow": "mmrl.policies.vla.settings:FrozenFlow"},
    )
    noises: int | None = option(
        None,
        "how many of the chunk's noises are drawn, one an action; the last of them stands for all behind it, as DSRL "
        "does with pi0. Default: all",
        ge=1,
    )
    std: float = option(1.0, "standard deviation, before training; the flow's own noise has 1", gt=0)
    last_gain: float = option(0.0, "size of the last layer's weights, before training", ge=0)

    def check_chunk(self, chunk: int) -> None:
        self.base.check_chunk(chunk)

    @property
    def core(self) -> ActionHead:
        return self.base

    @property
    def offers(self) -> frozenset[Offer]:
        return super().offers | {"displacement"}

    def build(self, action: Actions, backbone: HeadBackbone, action_dim: int, state_dim: int) -> nn.Module:
        backbone.requires_grad_(False)  # else the flow would change
        base = self.base.build(action, backbone, action_dim, state_dim)
        return load_attribute("mmrl.policies.vla.heads.steered:SteeredHead")(
            self, base, action, action_dim, state_dim, backbone.width
        )
