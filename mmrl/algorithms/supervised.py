"""Supervised learning from demonstrations (SFT, behavior cloning)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.algorithms.algorithm import Algorithm
from mmrl.collection.settings import CollectionSettings, Demonstrations

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch
    from mmrl.rollouts import Replay, Rollouts


class Supervised(Algorithm):
    """The negative log-likelihood of demonstrations: answers, images, or chunks of an expert's actions."""

    equation: ClassVar[str] = "-logp"
    source: ClassVar[str] = "maximum likelihood, as in behaviour cloning"
    collects: ClassVar[Literal["groups", "rollouts", "demonstrations"]] = "demonstrations"
    collection: ClassVar[CollectionSettings] = Demonstrations
    type: str = "supervised"

    def advantages(self, batch: Batch) -> Tensor:
        import torch

        return torch.ones(len(batch.rollouts))

    def loss(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        return -replay.logp, {}
