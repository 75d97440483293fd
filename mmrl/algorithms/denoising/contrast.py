"""DiffusionNFT: contrast of good and bad samples in the forward (noising) process."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.grouped import GroupedAlgorithm
from mmrl.protocols.requirements import Needs
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.rollouts import Replay, Rollouts


class Contrast(GroupedAlgorithm):
    """DiffusionNFT: samples with high advantages train an implicit positive policy, those with low ones a negative one.

    The two policies lie on opposite sides of the old policy, in the direction of the trained one. No likelihood ratio
    and no denoising chain is needed, and any solver may sample.
    """

    equation: ClassVar[str] = (
        "bound / nft_beta (o |v+ error|^2 + (1 - o) |v- error|^2), v+- = v_old +- nft_beta (v - v_old), "
        "o = clamp(A / (2 bound) + 1/2, 0, 1)"
    )
    source: ClassVar[str] = "DiffusionNFT, arXiv 2509.16117"
    type: str = "contrast"
    nft_beta: float = option(1.0, "distance of the implicit policies from the old policy", gt=0)
    bound: float = option(5.0, "advantages are clamped to +-bound", gt=0)

    @property
    def base_needs(self) -> Needs:
        return Needs(offers=frozenset({"contrast"}), old=True)

    def loss(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes DiffusionNFT's objective from the errors of the two implicit policies, and statistics, [rollout,
        decision]."""
        from mmrl.core.contrast import contrast, implicit_errors
        from mmrl.rollouts import MATCHING

        assert micro.advantages is not None
        errors = implicit_errors(MATCHING.of(replay), self.nft_beta)
        advantages = micro.advantages.to(replay.logp.device)
        values, stats = contrast(*errors, advantages, strength=self.nft_beta, bound=self.bound)
        return values, {f"surrogate/{name}": value for name, value in stats.items()}
