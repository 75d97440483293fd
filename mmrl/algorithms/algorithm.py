"""Base classes of algorithms.

An algorithm of your own inherits from `Algorithm` or from a shipped one; the YAML names it as
`algorithm.type: package.module:Class`.
"""

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
    from mmrl.protocols.parts import Policy, RolloutKind
    from mmrl.rollouts import Prompt, Replay, Rollouts

SEGMENT_IDS = SegmentIds()
# parts of a warning about options without an effect at the first update of a step: "KEY {ONE_UPDATE}: WHY; {REMEDY}"
ONE_UPDATE = "with one update per step"
REMEDY = "it acts from the second update on: set algorithm.minibatches or algorithm.epochs above 1"
ReduceMode = Literal["token_mean", "segment_mean", "sequence_mean", "sequence_sum", "constant"]


@dataclass(frozen=True)
class Reduction:
    """A reduction of values [rollout, decision] of a micro-batch to its part of the loss, 0-d.

    Its denominators are totals over the whole optimizer step, so that the loss does not depend on the micro-batches.
    """

    mode: ReduceMode
    mask: Tensor  # [rollout, decision] bool, the decisions that are trained on
    totals: dict[str, Tensor]  # `Algorithm.denominators`, summed over the micro-batches of all ranks
    length: int  # decisions of the longest rollout
    segments: Tensor | None = None  # [rollout, decision] int64, the segment of a decision, for segment_mean

    def __call__(self, values: Tensor) -> Tensor:
        from mmrl.core.reduce import reduce

        total, length = self.totals["decisions"], self.length
        return reduce(values, self.mask, mode=self.mode, total=total, length=length, segments=self.segments)

    def as_decisions(self) -> tuple[ReduceMode, Tensor | None]:
        """Returns an equivalent reduction without segments: its mode, and weights of decisions [rollout, decision]
        (None: all 1)."""
        from mmrl.core.reduce import segment_weights

        if self.mode != "segment_mean":
            return self.mode, None
        return "token_mean", segment_weights(self.mask, self.segments)


class SamplingPolicy(Section):
    """An EMA of the weights that samples the rollouts. Its decay is slope x (step - start), at most `most`
    (DiffusionNFT, arXiv 2509.16117)."""

    slope: float = option(0.001, "growth of the decay per step", ge=0)
    most: float = option(0.5, "largest decay", ge=0, lt=1)
    start: int = option(0, "step at which the decay starts to grow", unit="steps", ge=0)


class Algorithm(Choice):
    """Base class of algorithms, which compute advantages once per step, and then a loss for each micro-batch."""

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
        "soft_actor_critic": "mmrl.algorithms.recorded.soft_actor_critic:SoftActorCritic",
        "reweighted_supervised": "mmrl.algorithms.reweighted:ReweightedSupervised",
        "distribution_matching": "mmrl.algorithms.denoising.distribution_matching:DistributionMatching",
        "tilt_matching": "mmrl.algorithms.denoising.tilt_matching:TiltMatching",
    }
    test: ClassVar[str] = "tests/joints/test_surrogates.py"
    collects: ClassVar[Literal["groups", "rollouts", "demonstrations"]] = "groups"  # what it is trained on
    collection: ClassVar[CollectionSettings] = Groups  # the class of the section `rollout` of such a job
    weighs_decisions: ClassVar[bool] = True  # whether the objective multiplies decisions by `Replay.weight`
    # the only kinds of rollouts that it learns from, one of which rollout.extras must bring; empty: it learns from all
    learns_from: ClassVar[frozenset[RolloutKind]] = frozenset()
    pairs_decisions: ClassVar[bool] = False  # whether it compares rollouts of a group decision by decision

    type: str = "grpo"
    reduce: ReduceMode | None = option(
        None,
        "reduction of the values of decisions to the loss. constant: divide by the longest rollout; segment_mean: "
        "equal weights of segments of any length (GCPO's chunks); null: token_mean, but sequence_mean if all decisions "
        "of a rollout have one ratio, and segment_mean if those of a segment have",
    )
    terms: list[Term] = option([], "loss terms that are added")
    masks: list[Mask] = option([], "masks of rollouts and decisions that are not trained on")
    epochs: int = option(1, "passes over the rollouts of a step", ge=1)
    minibatches: int = option(1, "optimizer steps per epoch", ge=1)

    @property
    def shapers(self) -> list[Shaper]:
        """Returns the advantage shapers, in the order in which they are applied."""
        return []

    @property
    def slow_sampling(self) -> SamplingPolicy | None:
        """Returns the settings of the EMA that samples rollouts; None: the trained weights sample."""
        return None

    # --- requirements ---

    @property
    def base_needs(self) -> Needs:
        """Returns what the algorithm itself requires of the policy and the job, without its terms, shapers and
        masks."""
        return Needs()

    def parts(self) -> Iterable[tuple[str, Needs]]:
        """Yields each part of the algorithm as its key in the YAML and its requirements."""
        yield f"algorithm.type={self.type}", self.base_needs
        lists: dict[str, Sequence[Term | Shaper | Mask]]
        lists = {"terms": self.terms, "shaping": self.shapers, "masks": self.masks}
        for key, members in lists.items():
            for i, member in enumerate(members):
                yield f"algorithm.{key}.{i} ({member.type})", member.needs
        if self.reduce_mode == "segment_mean":
            yield "algorithm.reduce=segment_mean", Needs(measurements=(SEGMENT_IDS,))

    def remarks(self, config: JobConfig) -> Iterable[str]:
        """Yields warnings about the settings of its parts, with their keys."""
        ratios_are_one = has_ratios_of_one(self, config)
        for i, term in enumerate(self.terms):
            if term.remark:
                yield f"algorithm.terms.{i} ({term.type}): {term.remark}"
            if ratios_are_one and term.note_at_one_update:
                yield f"algorithm.terms.{i} ({term.type}) {ONE_UPDATE}: {term.note_at_one_update}; {REMEDY}"
        if config.rollout.filters is None:  # no dynamic sampling
            return
        for i, shaper in enumerate(self.shapers):
            if shaper.at_dynamic_sampling:
                reason = f"has no effect with rollout.dynamic_sampling: {shaper.at_dynamic_sampling}"
                yield f"algorithm.shaping.{i} ({shaper.type}) {reason}"

    @property
    def needs(self) -> Needs:
        """Returns the requirements of all parts together."""
        return merge_needs(needs for _, needs in self.parts())

    @property
    def reduce_mode(self) -> ReduceMode:
        """Returns the reduction to the loss: `reduce`, or its default."""
        return self.reduce or "token_mean"

    @property
    def updates(self) -> int:
        """Returns the number of optimizer steps per training step."""
        return self.epochs * self.minibatches

    def check(self, config: JobConfig, offered: Capabilities) -> None:
        """Raises ValueError if settings of other sections do not fit. offered: what the policy offers."""

    def check_rewards(self, names: list[str]) -> None:
        """Raises ValueError if an option names a reward that is not among the task's rewards `names`."""

    @property
    def by_step(self) -> bool:
        """Returns whether minibatches consist of single steps of episodes, instead of whole episodes."""
        return False

    def start(self, policy: Policy, engine: Ranks) -> None:
        """Receives the policy and its engine once, before training, for objectives that need more than replays."""

    # --- computation ---

    def prepare_demonstrations(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Returns the prompts whose demonstrations are trained on, for an algorithm that collects demonstrations.

        Each prompt becomes `rollouts_per_prompt` consecutive prompts (1 by default), with changed metadata if needed.
        """
        return list(prompts)

    @abstractmethod
    def advantages(self, batch: Batch) -> Tensor:
        """Computes the advantages of this rank's rollouts, [rollout] or [rollout, decision]."""

    def prepare(self, batch: Batch) -> None:
        """Prepares the parts for a step once advantages and masks are set. They may store columns in
        `batch.rollouts.extras`."""
        from mmrl.protocols.checks import noting_columns

        for i, term in enumerate(self.terms):
            with noting_columns(f"algorithm.terms.{i} ({term.type})", rollouts=batch.rollouts):
                term.prepare(batch)

    def prepare_minibatch(self, minibatch: Sequence[Rollouts], total: Callable[[Tensor], Tensor]) -> None:
        """Prepares the micro-batches of an optimizer step before the first update, and may change their advantages.

        total: sums a tensor over ranks; all ranks must call it.
        """

    @property
    def early_stop_statistics(self) -> tuple[str, ...]:
        """Returns the names of the loss statistics that `ends_epochs` needs."""
        return ()

    def ends_epochs(self, means: dict[str, float]) -> bool:
        """Returns whether to skip the remaining updates of the step.

        means: the means of the `early_stop_statistics` over the decisions of all ranks in the last update, by name.
        """
        return False

    @abstractmethod
    def loss(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes values to minimize and statistics to average, [rollout, decision], on the device of `replay`.

        micro: a micro-batch of rollouts; replay: log-probabilities and other outputs of the policy for it, with
        gradients.
        """

    def objective(self, micro: Rollouts, replay: Replay, reduction: Reduction) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes this micro-batch's part of the loss without the terms, 0-d, and statistics [rollout, decision].

        Override it if values and reduction are computed in one pass, or if there are several losses.
        """
        from mmrl.protocols.checks import check_pair, check_values, noting_columns

        key = f"algorithm.type={self.type}"
        with noting_columns(key, micro=micro, replay=replay):
            values, stats = check_pair(key, self.loss(micro, replay))
        check_values(key, values, micro.mask.shape)
        return reduction(values if replay.weight is None else values * replay.weight), stats

    def denominators(self, micro: Rollouts) -> dict[str, Tensor]:
        """Computes this micro-batch's contribution to `Reduction.totals`, the sums over an optimizer step by which the
        loss is divided; 0-d each."""
        from mmrl.core.reduce import denominator

        return {"decisions": denominator(micro.mask, mode=self.reduce_mode, segments=self.segments(micro))}

    def reduction(self, micro: Rollouts, totals: dict[str, Tensor], length: int, device: torch.device) -> Reduction:
        """Returns the reduction of a micro-batch's values to its part of the loss. length: decisions of the longest
        rollout."""
        segments = self.segments(micro)
        segments = None if segments is None else segments.to(device)
        return Reduction(self.reduce_mode, micro.mask.to(device), totals, length, segments)

    def segments(self, micro: Rollouts) -> Tensor | None:
        """Returns the segment of each decision, [rollout, decision] int64; None if the reduction needs no segments."""
        from mmrl.rollouts import DecisionColumn

        if self.reduce_mode != "segment_mean":
            return None
        return micro.extra(SEGMENT_IDS.name, DecisionColumn).values

    def informative(self, rollouts: Rollouts, weights: Tensor, names: list[str]) -> Tensor:
        """Returns whether each rollout's group has a learning signal, for dynamic sampling, [rollout] bool.

        By default a group has one if its combined rewards differ. rollouts: whole groups; weights: [component], the
        weights of the rewards; names: the names of the rewards.
        """
        from mmrl.core.advantages import combined_reward
        from mmrl.core.filters import varied_groups

        assert rollouts.rewards is not None
        return varied_groups(combined_reward(rollouts.rewards, weights), rollouts.group)

    def counted_mask(self, name: str, micro: Rollouts) -> Tensor:
        """Returns the mask over which the statistic `name` is averaged: bool, of the statistic's shape."""
        return micro.mask


def has_ratios_of_one(algorithm: Algorithm, config: JobConfig) -> bool:
    """Returns whether all likelihood ratios are 1: a step has one update, and the trained weights sampled all
    rollouts."""
    return algorithm.updates == 1 and algorithm.slow_sampling is None and not config.rollout.extra_sources


class RewardedAlgorithm(Algorithm):
    """Base class of algorithms that learn from rewards. It adds advantage shapers, and sampling by an EMA of the
    weights."""

    shaping: list[Shaper] = option([], "advantage shapers, applied in this order")
    sampling_policy: SamplingPolicy | None = option(None, "sample rollouts with an EMA of the weights; null: do not")

    def check(self, config: JobConfig, offered: Capabilities) -> None:
        """Raises ValueError if dynamic sampling, without a bound `low` or `high`, would drop nothing, since a shaper
        also learns from groups of equal rewards."""
        super().check(config, offered)
        filters = config.rollout.filters
        shaper_type = next((shaper.type for shaper in self.shaping if shaper.learns_from_equal_rewards), None)
        if filters is not None and shaper_type is not None and filters.low is filters.high is None:
            raise ValueError(
                f"rollout.dynamic_sampling would drop no groups, since {shaper_type} (algorithm.shaping) learns from "
                "groups with equal rewards too; set rollout.dynamic_sampling=null, or its key low or high"
            )

    @property
    def shapers(self) -> list[Shaper]:
        return self.shaping

    @property
    def slow_sampling(self) -> SamplingPolicy | None:
        return self.sampling_policy
