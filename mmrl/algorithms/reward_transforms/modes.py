"""A bonus for rare kinds of right answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.reward_transforms.transform import Transform, groups_of
from mmrl.protocols.requirements import Needs
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class Modes(Transform):
    """The right answers of a group are clustered by their text, and those of small clusters earn a bonus."""

    equation: ClassVar[str] = (
        "r_i <- r_i + bonus (1 / p(mode_i) - 1) / (m - 1) where r_i > threshold, p the share of the mode among the m "
        "right answers; a response joins the first mode whose first member is at least `alike` to it, by the cosine of "
        "counted n-grams of characters"
    )
    source: ClassVar[str] = "reconstructed from what Geometric G^2RPO says: a bonus of about 1 / p(mode)"
    type: str = "modes"
    bonus: float = option(0.5, "of the only right answer of its kind, where the others are all of one kind", gt=0)
    threshold: float = option(0.5, "rewards above it are of right answers")
    alike: float = option(0.6, "smallest cosine within a mode", gt=0, le=1)
    n: int = option(3, "characters of an n-gram", ge=1)

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"text"}))

    def change(self, rewards: Tensor, batch: Batch) -> Tensor:
        from mmrl.core.distances import similarity

        shaped, responses = rewards.clone(), batch.responses()
        for rows in groups_of(rewards.where(rewards > self.threshold, float("nan")), batch.column("group")):
            if len(rows) < 2:
                continue
            near = similarity([responses[row] for row in rows.tolist()], self.n) >= self.alike
            mode = _modes(near)
            count = (mode[:, None] == mode[None]).sum(1)
            shaped[rows] += self.bonus * (len(rows) / count - 1) / (len(rows) - 1)
        return shaped


def _modes(near: Tensor) -> Tensor:
    """Returns for each row the first row that begins a mode and is near, [n, n] bool -> [n] int64."""
    import torch

    mode = torch.full((len(near),), -1)
    for i in range(len(near)):
        begun = [j for j in range(i) if mode[j] == j and near[i, j]]
        mode[i] = begun[0] if begun else i
    return mode
