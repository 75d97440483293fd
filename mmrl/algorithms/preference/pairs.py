"""DPO decision by decision (such as of denoising steps), online or on pairs of a data set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.algorithms.preference.group_loss import Preference
from mmrl.collection.settings import CollectionSettings, Demonstrations
from mmrl.errors import UserError
from mmrl.protocols.requirements import Needs, Reference
from mmrl.schedules.schedule import Schedule, number
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch
    from mmrl.rollouts import Prompt, Replay, Rollouts

CLIP = 0.1  # the default of D3PO's released code, train.eps


class StepwisePreference(Preference):
    """DPO of the best and the worst rollout of each group, with a separate preference loss at each decision.

    With likelihoods from flow-matching errors this is Diffusion-DPO (and its flow form), where both rollouts use the
    same noise levels and noises (denoising.likelihood.shared). With denoising chains it is D3PO.
    """

    equation: ClassVar[str] = (
        "mean_t -log sigmoid(beta (l_t of the best - l_t of the worst)), l = logp - ref_logp, for chains clamped to "
        "log(1 - clip) and log(1 + clip); a mean over groups"
    )
    source: ClassVar[str] = (
        "Diffusion-DPO, arXiv 2311.12908, whose beta T omega is beta here; flows: Flow-DPO, arXiv 2501.13918; chains: "
        "D3PO, arXiv 2311.13231, whose eps is clip"
    )
    test: ClassVar[str] = "tests/joints/test_pairs.py"
    pairs_decisions: ClassVar[bool] = True
    type: str = "stepwise_preference"
    beta: Schedule = number(
        100.0, "factor of the log-ratios to the reference, which are means over a latent's elements by default", gt=0
    )

    clip: float | None = option(
        None,
        "ratios to the reference are clamped to 1 - clip .. 1 + clip, beyond which a decision has no gradient; null: "
        "0.1 (D3PO's eps) for Gaussian steps such as those of chains, none for others; 0: none",
        ge=0,
        lt=1,
    )

    @property
    def base_needs(self) -> Needs:
        return Needs(offers=frozenset({"reference_ratio"}), whole_groups=True, reference=Reference())

    def _clamp(self, log_ratios: Tensor, replay: Replay) -> Tensor:
        """Clamps log-ratios [rollout, decision] by `clip`, or by its default: replays of Gaussian steps have a std."""
        clip = self.clip
        if clip is None:
            clip = 0.0 if replay.std is None else CLIP
        return log_ratios.clamp(math.log1p(-clip), math.log1p(clip)) if clip else log_ratios

    def group_loss(
        self, chosen: Tensor, rejected: Tensor, micro: Rollouts, replay: Replay
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes the mean over decisions of -log sigmoid(margin), 0-d, and statistics. The margin of a decision is
        beta x the difference of the log-ratios of the chosen and the rejected rollout to the reference there."""
        import torch.nn.functional as F

        log_ratios = self._clamp(reference_log_ratios(micro, replay), replay)
        margin = self.beta.value * (log_ratios[chosen[0]] - log_ratios[rejected[0]])
        mask = (micro.mask[chosen[0]] & micro.mask[rejected[0]]).to(margin.device).float()
        weight = mask if replay.weight is None else mask * replay.weight[chosen[0]]
        loss = (F.softplus(-margin) * weight).sum() / mask.sum().clamp(min=1)
        mean = (margin * mask).sum() / mask.sum().clamp(min=1)
        return loss, {"preference/margin": mean, "preference/right": (mean > 0).float()}


class PairCollection(Demonstrations):
    """Settings of `rollout` for pairs of a chosen and a rejected answer to each prompt."""

    @property
    def rollouts_per_prompt(self) -> int:
        return 2


class OfflinePreference(StepwisePreference):
    """Offline DPO on pairs of a data set: the prompt's demonstration is chosen, its metadata["rejected"] is
    rejected."""

    equation: ClassVar[str] = (
        "level decision: stepwise_preference's; sequence: preference's, with sums over decisions before the sigmoid"
    )
    source: ClassVar[str] = "Diffusion-DPO, arXiv 2311.12908; of whole sequences: DPO, arXiv 2305.18290"
    collects: ClassVar[Literal["groups", "rollouts", "demonstrations"]] = "demonstrations"
    collection: ClassVar[CollectionSettings] = PairCollection
    type: str = "offline_preference"
    level: Literal["decision", "sequence"] = option(
        "decision", "unit of the preference. decision: as for images; sequence: whole sequences, as for text"
    )

    def prepare_demonstrations(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Returns each prompt twice: with its demonstration, and with its rejected answer."""
        return [variant for prompt in prompts for variant in (prompt, with_rejected_answer(prompt))]

    def advantages(self, batch: Batch) -> Tensor:
        """Returns 1 for chosen answers, -1 for rejected ones, [rollout]."""
        import torch

        return torch.tensor([1.0, -1.0]).repeat(len(batch.rollouts) // 2)

    def group_loss(
        self, chosen: Tensor, rejected: Tensor, micro: Rollouts, replay: Replay
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes DPO's loss of each pair: for each decision, averaged (level=decision), or from the log-ratios summed
        over the rollout (level=sequence)."""
        if self.level == "decision":
            return super().group_loss(chosen, rejected, micro, replay)
        return Preference.group_loss(self, chosen, rejected, micro, replay)

    def _log_ratio(self, row: Tensor, micro: Rollouts, replay: Replay) -> Tensor:
        return reference_log_ratios(micro, replay)[row].where(micro.mask[row].to(replay.logp.device), 0).sum()


def reference_log_ratios(micro: Rollouts, replay: Replay) -> Tensor:
    """Computes log-ratios to the reference, [rollout, decision]; exact ones if the replay has them."""
    from mmrl.rollouts import REFERENCE_LOG_RATIO

    if (exact := REFERENCE_LOG_RATIO.get(replay)) is not None:
        return exact
    assert micro.ref_logp is not None
    return replay.logp - micro.ref_logp.to(replay.logp.device)


def with_rejected_answer(prompt: Prompt) -> Prompt:
    """Returns the prompt with its rejected answer as the demonstration. Raises UserError if it has none."""
    if "rejected" not in prompt.metadata:
        raise UserError(
            f"prompt {prompt.id} has no `rejected` in its metadata, but algorithm.type=offline_preference needs pairs; "
            "use task.data.type=pairs or set task.data.rejected=true"
        )
    # the key that holds the demonstration
    key = "target" if "target" in prompt.metadata else "demonstration"
    return replace(prompt, metadata=prompt.metadata | {key: prompt.metadata["rejected"]})
