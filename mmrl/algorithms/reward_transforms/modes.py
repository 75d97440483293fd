"""A bonus for rare modes (clusters) of right answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.reward_transforms.transform import Transform, group_rows
from mmrl.protocols.requirements import Needs
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class Modes(Transform):
    """Clusters the right answers of a group by their text, and gives those of small clusters a bonus."""

    equation: ClassVar[str] = (
        "r_i <- r_i + bonus (1 / p(mode_i) - 1) / (m - 1) where r_i > threshold, p the fraction of the mode among the "
        "m right answers; a response joins the first mode whose first member has a cosine similarity of character "
        "n-gram counts of at least `alike` to it"
    )
    source: ClassVar[str] = "reconstructed from what Geometric G^2RPO says: a bonus of about 1 / p(mode)"
    type: str = "modes"
    bonus: float = option(0.5, "largest bonus: of an answer in a mode of its own", gt=0)
    threshold: float = option(0.5, "an answer is right if its reward is above it")
    alike: float = option(0.6, "smallest cosine similarity within a mode", gt=0, le=1)
    n: int = option(3, "characters per n-gram", ge=1)

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"text"}))

    def change(self, rewards: Tensor, batch: Batch) -> Tensor:
        """Returns the rewards, [rollout of all ranks], plus a bonus for right answers, which is largest for an answer
        without a similar right answer in its group."""
        from mmrl.core.distances import ngram_similarity

        changed, responses = rewards.clone(), batch.responses()
        # the right answers of each group
        for rows in group_rows(rewards.where(rewards > self.threshold, float("nan")), batch.column("group")):
            if len(rows) < 2:
                continue
            similar = ngram_similarity([responses[row] for row in rows.tolist()], self.n) >= self.alike
            mode = _cluster(similar)
            mode_size = (mode[:, None] == mode[None]).sum(1)
            changed[rows] += self.bonus * (len(rows) / mode_size - 1) / (len(rows) - 1)
        return changed


def _cluster(similar: Tensor) -> Tensor:
    """Assigns each row to the first earlier mode whose first member is similar, or else to a new mode.

    similar: [n, n] bool. Returns the first member of each row's mode, [n] int64.
    """
    import torch

    mode = torch.full((len(similar),), -1)
    for i in range(len(similar)):
        first_members = [j for j in range(i) if mode[j] == j and similar[i, j]]
        mode[i] = first_members[0] if first_members else i
    return mode
