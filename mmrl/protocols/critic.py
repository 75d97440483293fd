"""Settings of critics, which estimate the value of an observation. Their networks belong to the policies."""

from __future__ import annotations

from typing import ClassVar

from mmrl.settings import Choice, option


class CriticSettings(Choice):
    """A network that estimates the value of an observation. In `optim.groups` the name critic sets its learning rate,
    and with `optim.hold_steps` it is trained alone for the first steps."""

    title: ClassVar[str] = "critic"
    kinds: ClassVar[dict[str, str]] = {
        "shared": "mmrl.protocols.critic:SharedCritic",
        "separate": "mmrl.protocols.critic:SeparateCritic",
    }
    test: ClassVar[str] = "tests/policies/vla/test_critics.py"
    type: str = "shared"
    width: int = option(128, "width of its hidden layers", ge=1)
    layers: int = option(1, "hidden layers", ge=1)


class SharedCritic(CriticSettings):
    """A perceptron on the features of the policy's backbone, and on the robot's state if there is one. For text the
    features are those of the last token, or of the masked position that is filled next."""

    type: str = "shared"
    detach: bool = option(False, "true: no gradient of the critic's loss reaches the backbone")


class SeparateCritic(CriticSettings):
    """A separate perceptron on the robot's state, and on privileged simulator state where it is configured."""

    type: str = "separate"
    width: int = option(256, "width of its hidden layers", ge=1)
    layers: int = option(3, "hidden layers", ge=1)
