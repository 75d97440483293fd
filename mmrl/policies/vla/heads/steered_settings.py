"""Settings of the head that learns the distribution of the noise from which a frozen flow head denoises."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.policies.vla.heads.gaussian_settings import GaussianActions
from mmrl.policies.vla.settings import ActionHead, Actions, FrozenFlow, HeadBackbone
from mmrl.protocols.offers import Offer
from mmrl.settings import load_attribute, option

if TYPE_CHECKING:
    from torch import nn


class SteeredActions(GaussianActions):
    """Trains an MLP that outputs the distribution of the noise from which the checkpoint's flow head denoises. The flow
    is frozen with its backbone. Before training the noise is standard normal, as for the flow alone.

    A decision is a part of the noise. Its likelihood is exact, since denoising itself is deterministic. All noise of a
    chunk is scored, even if an episode ends inside the chunk, because every action depends on it. At temperature 0 a
    chunk is denoised from the mean of the noise; `evaluation.temperature=1` samples the noise, as the flow alone
    does. With `bound` the noise stays in (-bound, bound), as in DSRL's code. Before training it is then bound tanh(e),
    e standard normal, and its entropy and displacement have no closed form."""

    equation: ClassVar[str] = (
        "a = flow(w), log p(w) = log N(w; mean(h, s), (temperature x std)^2); with bound b: w = b tanh(u), log p(w) = "
        "log N(u; mean(h, s), (temperature x std)^2) - log(b (1 - tanh(u)^2)); displacement, for the term head_cost: "
        "E |w - e|^2 by number = mean^2 + (std - 1)^2, e = (w - mean) / std the flow's own noise"
    )
    source: ClassVar[str] = (
        "the actor of DSRL, arXiv 2506.15799; its critic is soft_actor_critic with q.noise; the displacement is "
        "what LP-DS bounds, reconstructed from its abstract"
    )
    test: ClassVar[str] = "tests/policies/vla/test_steered.py"
    type: str = "steered"
    accepts_state_only: ClassVar[bool] = False
    scores_demonstrations: ClassVar[bool] = False
    architecture_keys: ClassVar[tuple[str, ...]] = ("width", "layers", "noises", "bound")
    base: ActionHead = option(
        FrozenFlow(),
        "the flow that training starts from",
        kinds={"flow": "mmrl.policies.vla.settings:FrozenFlow"},
    )
    noises: int | None = option(
        None,
        "number of actions in the flow's chunk for which noise is sampled; the noise of the last one is repeated for "
        "all later actions, as DSRL does with pi0; default: all",
        ge=1,
    )
    bound: float | None = option(
        None, "largest absolute value of the noise, which tanh keeps below it; null: no bound", gt=0
    )
    std: float = option(1.0, "standard deviation, before training; the flow's own noise has 1", gt=0)
    last_gain: float = option(0.0, "size of the last layer's weights, before training", ge=0)

    def check_chunk(self, chunk: int) -> None:
        self.base.check_chunk(chunk)

    @property
    def checkpoint_head(self) -> ActionHead:
        return self.base

    @property
    def offers(self) -> frozenset[Offer]:
        offers = super().offers | {"noise"}
        return offers | {"displacement"} if self.bound is None else offers - {"entropy"}

    def build(self, action: Actions, backbone: HeadBackbone, action_dim: int, state_dim: int) -> nn.Module:
        """Builds the head around the flow head, and freezes the backbone; see `ActionHead.build`."""
        backbone.requires_grad_(False)  # else the flow would change
        base = self.base.build(action, backbone, action_dim, state_dim)
        return load_attribute("mmrl.policies.vla.heads.steered:SteeredHead")(
            self, base, action, action_dim, state_dim, backbone.width
        )
