"""A loss term on the regions of an image that an edit should keep and should change."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.errors import UserError
from mmrl.protocols.requirements import Needs
from mmrl.schedules.schedule import Schedule, number
from mmrl.settings import option
from mmrl.terms.term import Term

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.rollouts import Replay, Rollouts


class Region(Term):
    """Keeps the region that should not change near the source image, in edits with high advantages, and drives the
    region that should change away from it, in edits with low ones. Both apply to the policy's prediction from the
    noised edit. CoCoEdit applies the latter to DiffusionNFT's negative policy, the mirror image of the trained one:
    driving that away from the source would draw the policy near, so it is applied to the policy itself here. Distances
    are of latents; the mask comes with the prompts, and is not needed to sample."""

    equation: ClassVar[str] = (
        "keep r max(0, d(x0, c; outside M) - near) + change (1 - r) max(0, far - d(x0, c; M)); "
        "r = clamp(A / (2 bound) + 1/2, 0, 1), x0 the data that the policy predicts, c the source, d the mean squared "
        "distance of latents"
    )
    source: ClassVar[str] = (
        "reconstructed from a note on CoCoEdit, arXiv 2602.14068: its hinges and weights; the distance, thresholds "
        "that stay as they are, and whose prediction is driven away, are a reading"
    )
    test: ClassVar[str] = "tests/policies/diffusion/test_region.py"
    type: str = "region"
    keep: Schedule = number(1.0, "weight of what should stay, in edits that earn much (lambda_ner)", ge=0)
    change: Schedule = number(1.0, "weight of what should change, in edits that earn little (lambda_er)", ge=0)
    near: float = option(0.0, "mean squared distance to the source that is free where all should stay (tau+)", ge=0)
    far: float = option(0.1, "mean squared distance to the source that is enough where it should change (tau-)", ge=0)
    mask: str = option("region", "key of the prompts' metadata: which pixels may change, [height, width], 0 or 1")
    bound: float = option(5.0, "advantages beyond it count as it does, as the algorithm has it", gt=0)

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"source"}))

    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        from mmrl.core.contrast import optimality, predicted_data
        from mmrl.core.regularizers import masked_distance
        from mmrl.rollouts import MATCHING

        assert micro.advantages is not None
        matching = MATCHING.of(replay)
        data, source = predicted_data(matching, matching.prediction), matching.source
        if source is None:
            raise UserError(
                "this model edits no image, so that there is no source that the term region could compare with; use "
                "one such as FLUX.1-Kontext, and task.data with images"
            )
        changes = self._region(micro, source)
        stayed, changed = masked_distance(data, source, 1 - changes), masked_distance(data, source, changes)
        good = optimality(micro.advantages.to(stayed), self.bound)
        keep_loss, change_loss = (stayed - self.near).clamp(min=0), (self.far - changed).clamp(min=0)
        values = self.keep.value * good * keep_loss + self.change.value * (1 - good) * change_loss
        return values, {"region/stayed": stayed.detach(), "region/changed": changed.detach()}

    def _region(self, micro: Rollouts, source: Tensor) -> Tensor:
        """Returns the region in latents, [rollout, 1, 1, height, width]: 1 where some pixel of a latent may change,
        else 0."""
        import torch
        import torch.nn.functional as F

        missing = next((s.prompt.id for s in micro.samples if self.mask not in s.prompt.metadata), None)
        if missing is not None:
            raise UserError(
                f"prompt {missing!r} has no metadata {self.mask!r}, by which the term region knows what may change; "
                "set its key `mask`"
            )
        masks = torch.stack([torch.as_tensor(s.prompt.metadata[self.mask]).float() for s in micro.samples])
        if masks.dim() != 3:
            raise UserError(f"masks of the term region are [height, width], got {list(masks.shape[1:])}")
        return F.adaptive_max_pool2d(masks[:, None], source.shape[-2:])[:, None].to(source)
