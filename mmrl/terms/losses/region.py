"""A loss term for image editing: keep the unedited region near the source, and change the edited region."""

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
    """Two hinge losses on the data that the policy predicts from the noised edit, by their distance to the source.

    In edits with high advantages, the region outside the mask is kept near the source image. In edits with low
    advantages, the region inside the mask is pushed away from it. CoCoEdit applies the second loss to DiffusionNFT's
    negative policy; here it is applied to the policy itself, since the negative policy moves in the opposite direction.
    Distances are between latents. The mask is in the prompts' metadata; sampling does not use it.
    """

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
    keep: Schedule = number(1.0, "weight of the loss outside the mask (lambda_ner)", ge=0)
    change: Schedule = number(1.0, "weight of the loss inside the mask (lambda_er)", ge=0)
    near: float = option(0.0, "mean squared distance outside the mask below which the loss is 0 (tau+)", ge=0)
    far: float = option(0.1, "mean squared distance inside the mask above which the loss is 0 (tau-)", ge=0)
    mask: str = option("region", "key of the prompts' metadata: which pixels may change, [height, width], 0 or 1")
    bound: float = option(5.0, "advantages are clamped to +-bound, as in DiffusionNFT", gt=0)

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"source"}))

    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes the hinge losses on the predicted data outside and inside the mask, weighted by r and 1 - r, and the
        mean squared distances; [rollout, decision]. Raises UserError if the model has no source image."""
        from mmrl.core.contrast import optimality_weight, predict_data
        from mmrl.core.regularizers import masked_distance
        from mmrl.rollouts import MATCHING

        assert micro.advantages is not None
        matching = MATCHING.of(replay)
        data, source = predict_data(matching, matching.prediction), matching.source
        if source is None:
            raise UserError(
                "this model does not edit images, so the term region has no source image to compare with; use an "
                "editing model such as FLUX.1-Kontext, and task.data with images"
            )
        mask = self._latent_mask(micro, source)
        outside, inside = masked_distance(data, source, 1 - mask), masked_distance(data, source, mask)
        weight = optimality_weight(micro.advantages.to(outside), self.bound)
        keep_loss, change_loss = (outside - self.near).clamp(min=0), (self.far - inside).clamp(min=0)
        values = self.keep.value * weight * keep_loss + self.change.value * (1 - weight) * change_loss
        return values, {"region/stayed": outside.detach(), "region/changed": inside.detach()}

    def _latent_mask(self, micro: Rollouts, source: Tensor) -> Tensor:
        """Returns the mask at the resolution of the latents, [rollout, 1, 1, height, width]: 1 if any pixel of the
        latent may change, else 0. Raises UserError if a prompt has no mask, or one of another shape."""
        import torch
        import torch.nn.functional as F

        missing = next((s.prompt.id for s in micro.samples if self.mask not in s.prompt.metadata), None)
        if missing is not None:
            raise UserError(
                f"prompt {missing!r} has no metadata {self.mask!r}, the mask of pixels that may change; add it, or set "
                "`mask` of the term region to the key that holds it"
            )
        masks = torch.stack([torch.as_tensor(s.prompt.metadata[self.mask]).float() for s in micro.samples])
        if masks.dim() != 3:
            raise UserError(
                f"metadata {self.mask!r} must be a mask [height, width] for the term region, got "
                f"{list(masks.shape[1:])}"
            )
        return F.adaptive_max_pool2d(masks[:, None], source.shape[-2:])[:, None].to(source)
