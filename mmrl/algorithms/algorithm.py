"""Base classes of algorithms. Users' algorithms inherit from `Algorithm` or from a shipped one, and are named in the
configuration as `algorithm.type=package.module:Class`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.collection.settings import CollectionSettings, Groups
from mmrl.measurements.segments import SegmentIds
from mmrl.protocols.requirements import Capabilities, Needs, merge_needs
from mmrl.settings import Choice, Section, option
from mmrl.terms.term import Mask, Shaper, Term

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mmrl.engine import Ranks
    from mmrl.protocols.batch import Batch
    from mmrl.protocols.job import JobConfig
    from mmrl.protocols.parts import Policy
    from mmrl.rollouts import Prompt, Replay, Rollouts

SEGMENT_IDS = SegmentIds()
IDLE, ACTS = "at one update a step", "it acts from the second on: set algorithm.minibatches or algorithm.epochs above 1"
ReduceMode = Literal["token_mean", "segment_mean", "sequence_mean", "sequence_sum", "constant"]


@dataclass(frozen=True)
class Reduction:
    """A reduction of values [rollout, decision] to a loss. totals: the algorithm's `denominators`, summed over all
    micro-batches of the optimizer step on all ranks, so that a loss does not depend on how rollouts are cut into
    micro-batches."""

    mode: ReduceMode
    mask: Tensor  # [rollout, decision] bool, which decisions count
    totals: dict[str, Tensor]
    length: int  # decisions of the longest rollout
    segments: Tensor | None = None  # [rollout, decision] int64, the segment of a decision, for segment_mean

    def __call__(self, values: Tensor) -> Tensor:
        from mmrl.core.reduce import reduce

        total, length = self.totals["decisions"], self.length
        return reduce(values, self.mask, mode=self.mode, total=total, length=length, segments=self.segments)

    def as_decisions(self) -> tuple[ReduceMode, Tensor | None]:
        """Returns a mode without segments, and the weights of decisions [rollout, decision] with which it is this
        reduction; None: all 1."""
        from mmrl.core.reduce import segment_weights

        if self.mode != "segment_mean":
            return self.mode, None
        return "token_mean", segment_weights(self.mask, self.segments)


class SamplingPolicy(Section):
    """Rollouts come from an average of the weights, whose decay grows as slope x (step - start), up to `most`
    (DiffusionNFT, arXiv 2509.16117)."""

    slope: float = option(0.001, "growth of the decay a step", ge=0)
    most: float = option(0.5, "largest decay", ge=0, lt=1)
    start: int = option(0, "step from which on it grows", unit="steps", ge=0)


class Algorithm(Choice):
    """An algorithm: computes advantages once a step, then a loss for every micro-batch."""

    title: ClassVar[str] = "algorithm"
    kinds: ClassVar[dict[str, str]] = {
        "grpo": "mmrl.algorithms.grpo:GRPO",
        "ppo": "mmrl.algorithms.ppo:PPO",
        "supervised": "mmrl.algorithms.supervised:Supervised",
        "contrast": "mmrl.algorithms.denoising.contrast:Contrast",
        "matching": "mmrl.algorithms.denoising.matching:Matching",
        "reward_gradient": "mmrl.algorithms.denoising.reward_gradient:RewardGradient",
        "preference": "mmrl.algorithms.preference.group_loss:Preference",
        "stepwise_preference": "mmrl.algorithms.preference.pairs:StepwisePreference",
        "candidate_preference": "mmrl.algorithms.preference.candidates:CandidatePreference",
        "offline_preference": "mmrl.algorithms.preference.pairs:OfflinePreference",
        "mixed_preference": "mmrl.algorithms.preference.group_loss:MixedPreference",
        "discriminative": "mmrl.algorithms.preference.discriminative:Discriminative",
        "distillation": "mmrl.algorithms.distillation:OnPolicyDistillation",
        "advantage_weighted": "mmrl.algorithms.recorded.weighted:AdvantageWeighted",
        "advantage_conditioned": "mmrl.algorithms.recorded.conditioned:AdvantageConditioned",
        "implicit_q_learning": "mmrl.algorithms.recorded.q_learning:ImplicitQLearning",
        "reweighted_supervised": "mmrl.algorithms.reweighted:ReweightedSupervised",
        "distribution_matching": "mmrl.algorithms.denoising.distribution_matching:DistributionMatching",
        "tilt_matching": "mmrl.algorithms.denoising.tilt_matching:TiltMatching",
    }
    test: ClassVar[str] = "tests/joints/test_surrogates.py"
    collects: ClassVar[Literal["groups", "rollouts", "demonstrations"]] = "groups"  # what it learns from
    collection: ClassVar[CollectionSettings] = Groups  # the settings of that, as `rollout`
    weighs_decisions: ClassVar[bool] = True  # whether a decision that `Replay.weight` has at 0 leaves its objective
    pairs_decisions: ClassVar[bool] = False  # compares rollouts of a group decision by decision

    type: str = "grpo"
    reduce: ReduceMode | None = option(
        None,
        "how the losses of decisions are averaged; constant divides by the length of the longest rollout; segment_mean "
        "gives every segment the same weight (GCPO's chunks); null: token_mean, or sequence_mean or segment_mean where "
        "a rollout or a segment has a single importance weight",
    )
    terms: list[Term] = option([], "loss terms that are added")
    masks: list[Mask] = option([], "masks: decisions or rollouts that are left out of the loss")
    epochs: int = option(1, "passes over a step's rollouts", ge=1)
    minibatches: int = option(1, "optimizer steps in each pass", ge=1)

    @property
    def shapers(self) -> list[Shaper]:
        return []

    @property
    def slow_sampling(self) -> SamplingPolicy | None:
        return None

    # --- what it needs ---

    @property
    def base_needs(self) -> Needs:
        return Needs()

    def parts(self) -> Iterable[tuple[str, Needs]]:
        """Yields every part of the algorithm that has needs, with its key."""
        yield f"algorithm.type={self.type}", self.base_needs
        added: dict[str, Sequence[Term | Shaper | Mask]]
        added = {"terms": self.terms, "shaping": self.shapers, "masks": self.masks}
        for name, members in added.items():
            for i, member in enumerate(members):
                yield f"algorithm.{name}.{i} ({member.type})", member.needs
        if self.reduce_mode == "segment_mean":
            yield "algorithm.reduce=segment_mean", Needs(measurements=(SEGMENT_IDS,))

    def remarks(self, config: JobConfig) -> Iterable[str]:
        """Yields what a user should know of the settings of its parts, with their keys."""
        still = has_ratios_of_one(self, config)
        for i, term in enumerate(self.terms):
            if term.remark:
                yield f"algorithm.terms.{i} ({term.type}): {term.remark}"
            if still and term.at_rest:
                yield f"algorithm.terms.{i} ({term.type}) {IDLE}: {term.at_rest}; {ACTS}"
        if config.rollout.filters is None:
            return
        for i, shaper in enumerate(self.shapers):
            if shaper.at_dynamic_sampling:
                idle = f"does nothing with rollout.dynamic_sampling: {shaper.at_dynamic_sampling}"
                yield f"algorithm.shaping.{i} ({shaper.type}) {idle}"

    @property
    def needs(self) -> Needs:
        return merge_needs(needs for _, needs in self.parts())

    @property
    def reduce_mode(self) -> ReduceMode:
        """Returns how values of decisions become the loss, if `reduce` is not set."""
        return self.reduce or "token_mean"

    @property
    def updates(self) -> int:
        """Returns the number of optimizer steps a step."""
        return self.epochs * self.minibatches

    def check(self, config: JobConfig, offered: Capabilities) -> None:
        """Raises ValueError for settings of other sections that do not fit."""

    def check_rewards(self, names: list[str]) -> None:
        """Raises ValueError for a reward that is none of the task's."""

    @property
    def by_step(self) -> bool:
        """Returns whether updates use single steps of episodes in random order, instead of whole episodes."""
        return False

    def start(self, policy: Policy, engine: Ranks) -> None:
        """Receives the policy and its engine, once, for an objective that needs more of the policy than its replay."""

    # --- what it computes ---

    def shown(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Returns prompts with their demonstrations, for an algorithm that collects demonstrations; of each prompt as
        many in a row as there are rollouts a prompt."""
        return list(prompts)

    @abstractmethod
    def advantages(self, batch: Batch) -> Tensor:
        """Computes the advantages of this rank's rollouts, [rollout] or [rollout, decision]."""

    def prepare(self, batch: Batch) -> None:
        """Lets the parts store what they need in `batch.rollouts.extras`, after advantages and masks are set."""
        for term in self.terms:
            term.prepare(batch)

    def prepare_minibatch(self, minibatch: Sequence[Rollouts], total: Callable[[Tensor], Tensor]) -> None:
        """May change the advantages of an optimizer step's micro-batches, before the first update. total: sums a tensor
        over ranks, a collective."""

    @property
    def watched(self) -> tuple[str, ...]:
        """Returns the names of statistics of the loss that `enough` needs."""
        return ()

    def ends_epochs(self, means: dict[str, float]) -> bool:
        """Returns whether a step ends after the update that was just made. means: of `watched`, over all decisions of
        the update on all ranks, before the update."""
        return False

    @abstractmethod
    def loss(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes values to minimise and statistics to average, [rollout, decision], on the device of `replay`."""

    def objective(self, micro: Rollouts, replay: Replay, over: Reduction) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes this micro-batch's part of the loss without the terms, 0-d, and statistics.

        To be overridden by an algorithm that computes values and reduction in one pass, or several losses.
        """
        from mmrl.protocols.checks import check_values

        values, stats = self.loss(micro, replay)
        check_values(f"algorithm.type={self.type}", values, micro.mask.shape)
        return over(values if replay.weight is None else values * replay.weight), stats

    def denominators(self, micro: Rollouts) -> dict[str, Tensor]:
        """Computes what a micro-batch adds to `Reduction.totals`, 0-d each."""
        from mmrl.core.reduce import denominator

        return {"decisions": denominator(micro.mask, mode=self.reduce_mode, segments=self.segments(micro))}

    def reduction(self, micro: Rollouts, totals: dict[str, Tensor], length: int, device: torch.device) -> Reduction:
        """Returns how values of a micro-batch become its part of the loss. length: decisions of the longest rollout."""
        segments = self.segments(micro)
        placed = None if segments is None else segments.to(device)
        return Reduction(self.reduce_mode, micro.mask.to(device), totals, length, placed)

    def segments(self, micro: Rollouts) -> Tensor | None:
        """Returns the segment of each decision where `reduce` needs them, [rollout, decision] int64."""
        from mmrl.rollouts import DecisionColumn

        wanted = self.reduce_mode == "segment_mean"
        return micro.extra(SEGMENT_IDS.name, DecisionColumn).values if wanted else None

    def informative(self, rollouts: Rollouts, weights: Tensor, names: list[str]) -> Tensor:
        """Returns whether each rollout's group is informative, for dynamic sampling, [rollout] bool: by default,
        whether the combined reward differs in it. rollouts: whole groups. weights, names: of the reward components."""
        from mmrl.core.advantages import combined_reward
        from mmrl.core.filters import varied_groups

        assert rollouts.rewards is not None
        return varied_groups(combined_reward(rollouts.rewards, weights), rollouts.group)

    def counted_mask(self, name: str, micro: Rollouts) -> Tensor:
        """Returns the entries over which the statistic `name` is averaged: bool, of the statistic's shape."""
        return micro.mask


def has_ratios_of_one(algorithm: Algorithm, config: JobConfig) -> bool:
    """Returns whether a step has one update, of rollouts whose likelihoods are those of the trained weights."""
    return algorithm.updates == 1 and algorithm.slow_sampling is None and not config.rollout.extra_sources


class RewardedAlgorithm(Algorithm):
    """An algorithm that learns from rewards: advantages may be shaped, and an average of the weights may roll out."""

    shaping: list[Shaper] = option([], "changes of advantages, in this order")
    sampling_policy: SamplingPolicy | None = option(
        None, "sample rollouts with a moving average of the weights; null: with the trained weights"
    )

    def check(self, config: JobConfig, offered: Capabilities) -> None:
        super().check(config, offered)
        filters = config.rollout.filters
        of_flat = next((shaper.type for shaper in self.shaping if shaper.of_flat_groups), None)
        if filters is not None and of_flat is not None and filters.low is filters.high is None:
            raise ValueError(
                f"rollout.dynamic_sampling drops nothing, for {of_flat} (algorithm.shaping) learns from groups of "
                "equal rewards as well; set it to null, or give it low or high"
            )

    @property
    def shapers(self) -> list[Shaper]:
        return self.shaping

    @property
    def slow_sampling(self) -> SamplingPolicy | None:
        return self.sampling_policy
