"""Settings of heads in which a gate weights the outputs of several experts or horizons."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from pydantic import model_validator

from mmrl.policies.vla.settings import ActionHead, Actions, HeadBackbone, NormalActions, TokenActions
from mmrl.protocols.offers import Offer
from mmrl.settings import load_attribute, option

if TYPE_CHECKING:
    from torch import nn


class ResidualActions(NormalActions):
    """A residual policy: a mixture of small experts learns what to add to the actions of the checkpoint's head (the
    base), which is frozen with its backbone. Before training the mean is exactly the base's likeliest chunk.

    The mixture averages means, not densities. So entropy and divergence are exact at every level, and in a chunk that
    the end of an episode cuts short only the executed actions are scored. A base that is a flow samples a chunk at each
    policy step, which is stored; other bases return their likeliest chunk."""

    equation: ClassVar[str] = (
        "log p(a) = log N(a; base + reach sum_m g_m tanh(r_m), (temperature x std)^2), g = softmax(W z), "
        "z = tanh(V h) + temperature x noise x e, e ~ N(0, 1) kept"
    )
    source: ClassVar[str] = (
        "after DyGRO-VLA, reconstructed from its abstract; the code, its noise and the bound of what is added "
        "are mmrl's own"
    )
    test: ClassVar[str] = "tests/policies/vla/test_residual.py"
    type: str = "residual"
    architecture_keys: ClassVar[tuple[str, ...]] = ("experts", "code", "noise", "reach", "width", "layers")
    base: ActionHead = option(
        TokenActions(),
        "the head of the checkpoint that training starts from",
        kinds={name: path for name, path in ActionHead.kinds.items() if name not in ("residual", "steered")},
    )
    experts: int = option(4, "M: experts that add to the base's actions", ge=1)
    code: int = option(4, "numbers of the code, an encoding of the prompt that the gate reads", ge=1)
    noise: float = option(
        0.5,
        "standard deviation of the noise that is added to the code, which then holds at most "
        "code / 2 x log(1 + 1 / noise^2) nats of information about the prompt; 0: no noise",
        ge=0,
    )
    reach: float = option(0.5, "largest change of a number by the experts", gt=0)
    width: int = option(64, "width of the experts' hidden layers", ge=1)
    layers: int = option(1, "hidden layers of an expert", ge=1)
    std: float = option(0.1, "standard deviation, before training", gt=0)

    @model_validator(mode="after")
    def _base_is_one_head(self) -> ResidualActions:
        """Raises ValueError for a base head that is itself built around another head."""
        if self.base.checkpoint_head is not self.base:
            raise ValueError(
                f"base.type={self.base.type} is itself built around a head; set base.type to the type of that head"
            )
        return self

    def check_chunk(self, chunk: int) -> None:
        self.base.check_chunk(chunk)

    @property
    def mixes_demonstrations(self) -> bool:
        return False  # the base's proposal is stored with rollouts; demonstrations have none

    @property
    def checkpoint_head(self) -> ActionHead:
        return self.base.checkpoint_head

    @property
    def bidirectional(self) -> bool:
        return self.base.bidirectional

    @property
    def offers(self) -> frozenset[Offer]:
        return super().offers | ({"information"} if self.noise else set())

    def build(self, action: Actions, backbone: HeadBackbone, action_dim: int, state_dim: int) -> nn.Module:
        """Builds the head around its base head, and freezes the backbone; see `ActionHead.build`."""
        backbone.requires_grad_(False)  # else the base's proposals would change
        base = self.base.build(action, backbone, action_dim, state_dim)
        return load_attribute("mmrl.policies.vla.heads.residual:ResidualHead")(
            self, base, action, action_dim, state_dim, backbone.width
        )


class HorizonActions(NormalActions):
    """Predicts chunks of several horizons and averages them, action by action, with learned gates. As `gaussian` it may
    read the robot's state alone.

    The whole chunk is executed, even where horizons disagree: to stop earlier would be a decision of the policy that
    has no likelihood."""

    equation: ClassVar[str] = (
        "log p(a_k) = log N(a_k; sum_{h > k} g_kh a_kh, (temperature x std)^2), g_k = softmax_{h > k}(s_kh)"
    )
    source: ClassVar[str] = (
        "MoH, arXiv 2511.19433, with one perceptron in place of an action transformer, and without executing only the "
        "prefix on which horizons agree"
    )
    test: ClassVar[str] = "tests/policies/vla/test_horizons.py"
    type: str = "horizons"
    accepts_state_only: ClassVar[bool] = True
    architecture_keys: ClassVar[tuple[str, ...]] = ("horizons", "width", "layers")
    horizons: list[int] | None = option(
        None,
        "lengths of the predicted chunks, rising to action.chunk; default: powers of 2 below action.chunk, and "
        "action.chunk",
        unit="actions",
        min_length=1,
    )
    width: int = option(256, "width of the MLP's hidden layers", ge=1)
    layers: int = option(3, "hidden layers of the perceptron; 0: actions and scores are linear", ge=0)
    last_gain: float = option(0.01, "size of the last layer's weights, before training", gt=0)

    @property
    def offers(self) -> frozenset[Offer]:
        return super().offers | {"imbalance"}

    def lengths(self, chunk: int) -> list[int]:
        """Returns the horizons in actions, rising to `chunk`."""
        if self.horizons is not None:
            return self.horizons
        return [*(2**i for i in range(chunk.bit_length()) if 2**i < chunk), chunk]

    def check_chunk(self, chunk: int) -> None:
        """Raises ValueError unless the horizons rise from at least 1 to `chunk`, the number of actions in a chunk."""
        lengths = self.lengths(chunk)
        if lengths[0] < 1 or any(a >= b for a, b in pairwise(lengths)):
            raise ValueError(f"head.horizons must be strictly increasing and at least 1, not {lengths}")
        if lengths[-1] != chunk:
            raise ValueError(f"head.horizons must end with action.chunk={chunk}, but it ends with {lengths[-1]}")

    def build(self, action: Actions, backbone: HeadBackbone, action_dim: int, state_dim: int) -> nn.Module:
        return load_attribute("mmrl.policies.vla.heads.horizons:HorizonHead")(
            self, action, action_dim, state_dim, backbone.width
        )
