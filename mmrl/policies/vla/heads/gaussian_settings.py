"""Settings of heads with Gaussian actions."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.policies.vla.settings import Actions, HeadBackbone, NormalActions
from mmrl.protocols.offers import Offer
from mmrl.settings import load_attribute, option

if TYPE_CHECKING:
    from torch import nn


class GaussianActions(NormalActions):
    """Gaussian actions whose mean an MLP predicts. It needs no backbone: it may read the robot's state alone."""

    source: ClassVar[str] = "ManiSkill's PPO, arXiv 2410.00425, after CleanRL"
    type: str = "gaussian"
    accepts_state_only: ClassVar[bool] = True
    architecture_keys: ClassVar[tuple[str, ...]] = ("width", "layers")
    width: int = option(256, "width of the MLP's hidden layers", ge=1)
    layers: int = option(3, "hidden layers of the perceptron; 0: the mean is linear", ge=0)
    last_gain: float = option(0.01, "size of the last layer's weights, before training", gt=0)

    def build(self, action: Actions, backbone: HeadBackbone, action_dim: int, state_dim: int) -> nn.Module:
        return load_attribute("mmrl.policies.vla.heads.gaussian:GaussianHead")(
            self, action, action_dim, state_dim, backbone.width
        )


class SquashedGaussianActions(GaussianActions):
    """Gaussian numbers whose mean an MLP predicts, followed by tanh, so that actions lie in (-1, 1). For
    algorithm.type=soft_actor_critic; it needs no backbone."""

    equation: ClassVar[str] = (
        "a = tanh(u), log p(a) = log N(u; mean, (temperature x std)^2) - log(1 - a^2), summed over numbers"
    )
    source: ClassVar[str] = "the policy of SAC, arXiv 1812.05905, with a standard deviation that reads no observation"
    test: ClassVar[str] = "tests/policies/vla/test_squashed.py"
    type: str = "squashed_gaussian"

    def build(self, action: Actions, backbone: HeadBackbone, action_dim: int, state_dim: int) -> nn.Module:
        return load_attribute("mmrl.policies.vla.heads.gaussian:SquashedGaussianHead")(
            self, action, action_dim, state_dim, backbone.width
        )

    @property
    def offers(self) -> frozenset[Offer]:
        return super().offers - {"entropy"}


class L1Actions(NormalActions):
    """Gaussian actions around the output of OpenVLA-OFT's own L1 regression head, from a converted checkpoint. At
    temperature 0, in evaluation, actions are those of the published head."""

    source: ClassVar[str] = "OpenVLA-OFT, arXiv 2502.19645; the standard deviation around its actions is mmrl's own"
    test: ClassVar[str] = "tests/policies/vla/test_oft.py"
    type: str = "l1"
    bounded: ClassVar[bool] = False
    std: float = option(0.1, "standard deviation, before training", gt=0)

    @property
    def bidirectional(self) -> bool:
        return True

    def build(self, action: Actions, backbone: HeadBackbone, action_dim: int, state_dim: int) -> nn.Module:
        return backbone.l1_head(self, action, action_dim)


class LatentActions(NormalActions):
    """Gaussian actions whose mean reads latent vectors that the policy samples before a chunk. After each latent it
    decides whether to sample another one or to exit. Latents and exits are decisions beside the actions. As `gaussian`
    it may read the robot's state alone."""

    equation: ClassVar[str] = (
        "z_k ~ N(mu(h, z_<k), (temperature x latent_std)^2); after it the latents end with probability "
        "sigmoid(exit(h, z_<=k) / temperature), and after `steps` latents anyway; "
        "a ~ N(mean(h, z), (temperature x std)^2). Demonstrations: log p(a | h, z), with z sampled from the policy, "
        "through which the gradient flows"
    )
    source: ClassVar[str] = "after AVA-VLA; reconstructed from a description of it"
    test: ClassVar[str] = "tests/policies/vla/test_latent.py"
    type: str = "latent"
    accepts_state_only: ClassVar[bool] = True
    architecture_keys: ClassVar[tuple[str, ...]] = ("width", "layers", "steps", "latent", "latent_std", "early_exit")
    steps: int = option(4, "largest number of latents before a chunk", ge=1)
    latent: int = option(8, "numbers of a latent", ge=1)
    latent_std: float = option(
        0.3, "standard deviation of a latent; not learned, since demonstrations would only shrink it", gt=0
    )
    early_exit: bool = option(True, "fewer than `steps` latents may be sampled before a chunk")
    exit_chance: float = option(0.2, "probability before training of an exit after a latent", gt=0, lt=1)
    width: int = option(256, "width of the perceptrons' hidden layers", ge=1)
    layers: int = option(2, "hidden layers of each perceptron", ge=1)
    last_gain: float = option(
        0.01, "size of the last layers' weights, before training; of the one that makes latents it is 1", gt=0
    )

    def build(self, action: Actions, backbone: HeadBackbone, action_dim: int, state_dim: int) -> nn.Module:
        return load_attribute("mmrl.policies.vla.heads.latent:LatentHead")(
            self, action, action_dim, state_dim, backbone.width
        )
