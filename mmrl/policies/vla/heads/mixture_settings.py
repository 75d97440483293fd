"""Settings of mixture heads: a gate weights the proposals of several parts."""

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
    """The actions of the checkpoint's head, which is frozen with its backbone, and a mixture of small experts that
    learns to add to them. The first policy's mean is exactly the base's likeliest chunk.

    The mixture is one of means, not of densities: so entropy and divergence are exact at every level, and of a chunk
    that an episode cuts short only the executed actions are scored. A base that is a flow draws a chunk at each policy
    step, which is stored; other bases give their likeliest chunk."""

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
    shaping: ClassVar[tuple[str, ...]] = ("experts", "code", "noise", "reach", "width", "layers")
    base: ActionHead = option(
        TokenActions(),
        "the head of the checkpoint that training starts from",
        kinds={name: where for name, where in ActionHead.kinds.items() if name not in ("residual", "steered")},
    )
    experts: int = option(4, "M: experts that add to the base's actions", ge=1)
    code: int = option(4, "numbers of the prompt's code that the gate reads", ge=1)
    noise: float = option(
        0.5,
        "standard deviation of the code's noise: it passes at most code / 2 x log(1 + 1 / noise^2) nats of the prompt; "
        "0: none",
        ge=0,
    )
    reach: float = option(0.5, "largest number that the experts add", gt=0)
    width: int = option(64, "of the experts' hidden layers", ge=1)
    layers: int = option(1, "hidden layers of an expert", ge=1)
    std: float = option(0.1, "standard deviation, before training", gt=0)

    @model_validator(mode="after")
    def _base_is_one_head(self) -> ResidualActions:
        if self.base.core is not self.base:
            raise ValueError(f"base.type={self.base.type} is itself built around a head; name that one")
        return self

    def check_chunk(self, chunk: int) -> None:
        self.base.check_chunk(chunk)

    @property
    def demonstrable(self) -> bool:
        return False  # of a demonstration the base's proposal is not known yet, of a rollout it is stored

    @property
    def core(self) -> ActionHead:
        return self.base.core

    @property
    def together(self) -> bool:
        return self.base.together

    @property
    def offers(self) -> frozenset[Offer]:
        return super().offers | ({"information"} if self.noise else set())

    def build(self, action: Actions, backbone: HeadBackbone, action_dim: int, state_dim: int) -> nn.Module:
        backbone.requires_grad_(False)  # else the base's proposals would change
        base = self.base.build(action, backbone, action_dim, state_dim)
        return load_attribute("mmrl.policies.vla.heads.residual:ResidualHead")(
            self, base, action, action_dim, state_dim, backbone.width
        )


class HorizonActions(NormalActions):
    """Chunks of several horizons, fused action by action by a small gate. As `gaussian` it may read the robot's state
    alone.

    The whole chunk is executed, also where horizons disagree: cutting it there would be a decision of the weights
    without a likelihood."""

    equation: ClassVar[str] = (
        "log p(a_k) = log N(a_k; sum_{h > k} g_kh a_kh, (temperature x std)^2), g_k = softmax_{h > k}(s_kh)"
    )
    source: ClassVar[str] = (
        "MoH, arXiv 2511.19433, with one perceptron in place of an action transformer, and without executing only the "
        "prefix on which horizons agree"
    )
    test: ClassVar[str] = "tests/policies/vla/test_horizons.py"
    type: str = "horizons"
    states_suffice: ClassVar[bool] = True
    shaping: ClassVar[tuple[str, ...]] = ("horizons", "width", "layers")
    horizons: list[int] | None = option(
        None,
        "how many actions each of them makes, rising to action.chunk; default: 1, 2, 4 and so on, and the chunk",
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
        """Returns the horizons of a chunk."""
        if self.horizons is not None:
            return self.horizons
        return [*(2**i for i in range(chunk.bit_length()) if 2**i < chunk), chunk]

    def check_chunk(self, chunk: int) -> None:
        lengths = self.lengths(chunk)
        if lengths[0] < 1 or any(a >= b for a, b in pairwise(lengths)):
            raise ValueError(f"head.horizons must rise from 1 or more, got {lengths}")
        if lengths[-1] != chunk:
            raise ValueError(f"head.horizons must end with action.chunk={chunk}, but it ends with {lengths[-1]}")

    def build(self, action: Actions, backbone: HeadBackbone, action_dim: int, state_dim: int) -> nn.Module:
        return load_attribute("mmrl.policies.vla.heads.horizons:HorizonHead")(
            self, action, action_dim, state_dim, backbone.width
        )
