"""Direct preference optimisation by decision, of denoising steps and matchings, online or from pairs of a data set."""

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

CLIP = 0.1  # D3PO's train.eps


class StepwisePreference(Preference):
    """The best rollout of every group is preferred to its worst, separately in each decision: with matchings that is
    Diffusion-DPO (and its flow form), whose pairs share noise levels and noises
    (denoising.likelihood.shared); with chains D3PO."""

    equation: ClassVar[str] = (
        "mean_t -log sigmoid(beta (l_t of the best - l_t of the worst)), l = logp - ref_logp, for chains kept within "
        "log(1 - clip) and log(1 + clip); a mean over groups"
    )
    source: ClassVar[str] = (
        "Diffusion-DPO, arXiv 2311.12908, whose beta T omega is beta here; flows: Flow-DPO, arXiv 2501.13918; chains: "
        "D3PO, arXiv 2311.13231, whose eps is clip and which prefers decision by decision as here"
    )
    test: ClassVar[str] = "tests/joints/test_pairs.py"
    pairs_decisions: ClassVar[bool] = True
    type: str = "stepwise_preference"
    beta: Schedule = number(
        100.0, "of the log-ratios to the reference, which are means over a latent's elements by default", gt=0
    )

    clip: float | None = option(
        None,
        "a ratio to the reference stays within 1 - clip and 1 + clip, beyond which a decision teaches nothing; "
        "default: 0.1, D3PO's eps, for Gaussian steps, such as those of chains, and none for others; 0: none",
        ge=0,
        lt=1,
    )

    @property
    def base_needs(self) -> Needs:
        return Needs(offers=frozenset({"reference_ratio"}), whole_groups=True, reference=Reference())

    def _kept(self, gained: Tensor, replay: Replay) -> Tensor:
        """Clamps log-ratios [rollout, decision] as `clip` says; a Gaussian step has a standard deviation."""
        clip = self.clip if self.clip is not None else 0.0 if replay.std is None else CLIP
        return gained.clamp(math.log1p(-clip), math.log1p(clip)) if clip else gained

    def of_group(self, good: Tensor, bad: Tensor, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        import torch.nn.functional as F

        gained = self._kept(gains(micro, replay), replay)
        margin = self.beta.value * (gained[good[0]] - gained[bad[0]])
        counted = (micro.mask[good[0]] & micro.mask[bad[0]]).to(margin.device).float()
        weight = counted if replay.weight is None else counted * replay.weight[good[0]]
        loss = (F.softplus(-margin) * weight).sum() / counted.sum().clamp(min=1)
        mean = (margin * counted).sum() / counted.sum().clamp(min=1)
        return loss, {"preference/margin": mean, "preference/right": (mean > 0).float()}


class PairCollection(Demonstrations):
    """Pairs of answers to prompts, one of which is better."""

    @property
    def rollouts_per_prompt(self) -> int:
        return 2


class OfflinePreference(StepwisePreference):
    """Direct preference optimisation on pairs of a data set: a prompt's demonstration is preferred to its `rejected`
    answer."""

    equation: ClassVar[str] = (
        "level decision: stepwise_preference's; sequence: preference's, with sums over decisions before the sigmoid"
    )
    source: ClassVar[str] = "Diffusion-DPO, arXiv 2311.12908; of whole sequences: DPO, arXiv 2305.18290"
    collects: ClassVar[Literal["groups", "rollouts", "demonstrations"]] = "demonstrations"
    collection: ClassVar[CollectionSettings] = PairCollection
    type: str = "offline_preference"
    level: Literal["decision", "sequence"] = option(
        "decision", "what is compared: decision by decision, as for images; or whole sequences, as for text"
    )

    def shown(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        return [one for prompt in prompts for one in (prompt, rejected(prompt))]

    def advantages(self, batch: Batch) -> Tensor:
        """Returns 1 for preferred answers, -1 for rejected ones, [rollout]."""
        import torch

        return torch.tensor([1.0, -1.0]).repeat(len(batch.rollouts) // 2)

    def of_group(self, good: Tensor, bad: Tensor, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        if self.level == "decision":
            return super().of_group(good, bad, micro, replay)
        return Preference.of_group(self, good, bad, micro, replay)

    def _gained(self, row: Tensor, micro: Rollouts, replay: Replay) -> Tensor:
        return gains(micro, replay)[row].where(micro.mask[row].to(replay.logp.device), 0).sum()


def gains(micro: Rollouts, replay: Replay) -> Tensor:
    """Computes log-ratios to the reference, [rollout, decision], in their exact form where there is one."""
    from mmrl.rollouts import REFERENCE_LOG_RATIO

    if (exact := REFERENCE_LOG_RATIO.get(replay)) is not None:
        return exact
    assert micro.ref_logp is not None
    return replay.logp - micro.ref_logp.to(replay.logp.device)


def rejected(prompt: Prompt) -> Prompt:
    """Returns the prompt with its rejected answer as the demonstration. Raises UserError where it has none."""
    if "rejected" not in prompt.metadata:
        raise UserError(
            f"prompt {prompt.id} has no `rejected` in its metadata: algorithm.type=offline_preference learns from "
            "pairs, such as those of task.data.type=pairs or task.data.rejected=true"
        )
    key = "target" if "target" in prompt.metadata else "demonstration"
    return replace(prompt, metadata=prompt.metadata | {key: prompt.metadata["rejected"]})
