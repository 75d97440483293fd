"""Settings of critics: what says how much an observation is worth. What they are made of belongs to the policies."""

from __future__ import annotations

from typing import ClassVar

from mmrl.settings import Choice, option


class CriticSettings(Choice):
    """What says how much an observation is worth. In `optim.groups` the name critic gives it a learning rate of its
    own, and with `optim.hold_steps` it learns alone for a while."""

    title: ClassVar[str] = "critic"
    kinds: ClassVar[dict[str, str]] = {
        "shared": "mmrl.protocols.critic:SharedCritic",
        "separate": "mmrl.protocols.critic:SeparateCritic",
    }
    test: ClassVar[str] = "tests/policies/vla/test_critics.py"
    type: str = "shared"
    width: int = option(128, "of its hidden layers", ge=1)
    layers: int = option(1, "hidden layers", ge=1)


class SharedCritic(CriticSettings):
    """A perceptron reads what the policy's backbone made of the observation, and the robot's state if there is one; of
    a response in the making, what the model made of its last token, or of the empty place that is filled next."""

    type: str = "shared"
    detach: bool = option(False, "the backbone does not learn from the critic's loss")


class SeparateCritic(CriticSettings):
    """A perceptron of its own reads the robot's state, and what only a simulator knows where that is asked for."""

    type: str = "separate"
    width: int = option(256, "of its hidden layers", ge=1)
    layers: int = option(3, "hidden layers", ge=1)
