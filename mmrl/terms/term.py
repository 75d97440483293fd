"""Base classes of what can be added to an algorithm: loss terms, advantage shapers and masks.

A class of your own inherits from one of them; the YAML names it as `type: package.module:Class`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.protocols.requirements import Needs
from mmrl.settings import Choice

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch
    from mmrl.protocols.parts import RolloutKind
    from mmrl.rollouts import Replay, Rollouts


class Term(Choice):
    """A loss term: values that are added to the algorithm's and reduced together with them.

    at_one_update: what the term does if all ratios are 1, as with one update per step; empty: the same as otherwise.
    """

    title: ClassVar[str] = "loss term"
    changes: ClassVar[frozenset[str]] = frozenset({"gradient"})  # what the term changes in a step
    kinds: ClassVar[dict[str, str]] = {
        "kl": "mmrl.terms.losses.kl:KL",
        "entropy": "mmrl.terms.losses.entropy:Entropy",
        "likelihood": "mmrl.terms.losses.likelihood:LikelihoodTerm",
        "advantage_weighted": "mmrl.terms.losses.advantage_weighted:AdvantageWeightedTerm",
        "replay_policy_gradient": "mmrl.terms.losses.replay_policy_gradient:ReplayPolicyGradient",
        "q_weighted": "mmrl.terms.losses.q_weighted:QWeightedTerm",
        "q_policy_gradient": "mmrl.terms.losses.q_policy_gradient:QPolicyGradient",
        "q_gradient": "mmrl.terms.losses.q_gradient:QGradient",
        "of_part": "mmrl.terms.losses.of_part:OfPart",
        "distillation": "mmrl.terms.losses.distillation:Distillation",
        "sampler_distillation": "mmrl.terms.losses.sampler_distillation:SamplerDistillation",
        "support_coverage": "mmrl.terms.losses.support:SupportCoverage",
        "region": "mmrl.terms.losses.region:Region",
        "likelihood_drop": "mmrl.terms.losses.likelihood:LikelihoodDrop",
        "head_cost": "mmrl.terms.losses.head_cost:HeadCost",
    }
    test: ClassVar[str] = "tests/joints/test_terms.py"
    at_one_update: ClassVar[str] = ""

    @property
    def needs(self) -> Needs:
        """Returns what the term requires of the policy and the job, such as the reference policy."""
        return Needs()

    @property
    def learns_from(self) -> frozenset[RolloutKind]:
        """Returns the only kinds of rollouts that the term applies to, so that rollout.extras must have a source of one
        of them; empty: it applies to all rollouts."""
        return frozenset()

    @property
    def note_at_one_update(self) -> str:
        """Returns `at_one_update` for the term's settings; a term that wraps another one returns the other's note."""
        return self.at_one_update

    @property
    def remark(self) -> str:
        """Returns a warning about these settings, which is printed before training; empty: none."""
        return ""

    def prepare(self, batch: Batch) -> None:
        """Prepares a step once advantages and masks are set. It may store columns in `batch.rollouts.extras` under
        `key`."""

    @abstractmethod
    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes values to minimize, coefficient included, and statistics to average; all [rollout, decision].

        micro: a micro-batch of rollouts; replay: log-probabilities and other outputs of the policy for it, with
        gradients.
        """


class Shaper(Choice):
    """A change of the advantages, applied once per step before the first update."""

    title: ClassVar[str] = "advantage shaper"
    changes: ClassVar[frozenset[str]] = frozenset({"advantages"})  # what the shaper changes in a step
    kinds: ClassVar[dict[str, str]] = {
        "entropy": "mmrl.terms.shapers.entropy:EntropyShaping",
        "advantage_momentum": "mmrl.terms.shapers.groups:AdvantageMomentum",
        "token_baseline": "mmrl.terms.shapers.entropy:TokenBaseline",
        "turn_returns": "mmrl.terms.shapers.turns:TurnReturns",
        "step_gains": "mmrl.terms.shapers.denoising_steps:StepGains",
        "branch_credit": "mmrl.terms.shapers.denoising_steps:BranchCredit",
        "part_credit": "mmrl.terms.shapers.segments:PartCredit",
        "latent_values": "mmrl.terms.shapers.denoising_steps:LatentValues",
        "milestones": "mmrl.terms.shapers.turns:Milestones",
        "segment_values": "mmrl.terms.shapers.segments:SegmentValues",
        "subtree_advantages": "mmrl.terms.shapers.trees:SubtreeAdvantages",
        "prefix_mean": "mmrl.terms.shapers.trees:PrefixMean",
        "node_gains": "mmrl.terms.shapers.trees:NodeGains",
        "perplexity_weight": "mmrl.terms.shapers.likelihoods:PerplexityWeight",
        "position_bonus": "mmrl.terms.shapers.likelihoods:PositionBonus",
        "curiosity": "mmrl.terms.shapers.turns:Curiosity",
        "stratified": "mmrl.terms.shapers.groups:Stratified",
        "set_diversity": "mmrl.terms.shapers.groups:SetDiversity",
        "entropy_redistribution": "mmrl.terms.shapers.entropy:EntropyRedistribution",
        "self_process": "mmrl.terms.shapers.segments:SelfProcess",
        "divergence_weight": "mmrl.terms.shapers.groups:DivergenceWeight",
        "long_wrong": "mmrl.terms.shapers.groups:LongWrong",
        "shared_prefix": "mmrl.terms.shapers.segments:SharedPrefix",
        "view_information": "mmrl.terms.shapers.views:ViewInformation",
        "kl_returns": "mmrl.terms.shapers.returns:KLReturns",
        "signal_correction": "mmrl.terms.shapers.groups:SignalCorrection",
        "whitening": "mmrl.terms.shapers.returns:Whitening",
        "section_credit": "mmrl.terms.shapers.sections:SectionCredit",
        "span_returns": "mmrl.terms.shapers.spans:SpanReturns",
        "span_minimum": "mmrl.terms.shapers.spans:SpanMinimum",
        "span_signs": "mmrl.terms.shapers.spans:SpanSigns",
        "span_progress": "mmrl.terms.shapers.spans:SpanProgress",
        "implicit_process": "mmrl.terms.shapers.implicit:ImplicitProcess",
    }
    test: ClassVar[str] = "tests/joints/test_terms.py"
    uses_environment_rewards: ClassVar[bool] = False  # reads the rewards that the environment gives for turns
    learns_from_equal_rewards: ClassVar[bool] = (
        False  # whether a group of equal rewards may get advantages other than 0
    )
    at_dynamic_sampling: ClassVar[str] = ""  # why it has no effect with dynamic sampling; "": it has one

    @property
    def needs_turn_rewards(self) -> bool:
        """Returns whether the shaper needs rewards for turns from the environment; without them it has no effect."""
        return False

    @property
    def needs(self) -> Needs:
        """Returns what the shaper requires of the policy and the job."""
        return Needs()

    def check_rewards(self, names: list[str]) -> None:  # noqa: B027  (most shapers name none)
        """Raises ValueError if an option names a reward that is not among the task's rewards `names`."""

    @abstractmethod
    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        """Returns the changed advantages of this rank's rollouts, of the same shape as `advantages` [rollout,
        decision]."""


class Mask(Choice):
    """A selection of the rollouts or decisions that are trained on.

    The class attribute `of` says what `keep` returns:

        rollouts    [rollout], before the advantages; a masked rollout is also left out of its group's statistics
        decisions   [rollout, decision], after the advantages
        objective   [rollout, decision], after the advantages; a masked decision is left out of the algorithm's
                    objective only. It stays in denominators, terms, statistics and its rollout's ratio. Objectives of
                    whole rollouts treat it as "decisions".
    """

    title: ClassVar[str] = "mask"
    of: ClassVar[Literal["rollouts", "decisions", "objective"]] = "decisions"
    changes: ClassVar[frozenset[str]] = frozenset({"mask"})  # what the mask changes in a step
    kinds: ClassVar[dict[str, str]] = {
        "truncated": "mmrl.terms.masks.rollouts:Truncated",
        "over_turn": "mmrl.terms.masks.rollouts:OverTurn",
        "band": "mmrl.terms.masks.rollouts:BandMask",
        "entropy_share": "mmrl.terms.masks.decisions:EntropyShare",
        "covariance_clip": "mmrl.terms.masks.decisions:CovarianceClip",
        "token_budget": "mmrl.terms.masks.decisions:TokenBudget",
        "small_advantages": "mmrl.terms.masks.decisions:SmallAdvantages",
        "mastered": "mmrl.terms.masks.decisions:Mastered",
        "best_of_group": "mmrl.terms.masks.rollouts:BestOfGroup",
        "process_agreement": "mmrl.terms.masks.rollouts:ProcessAgreement",
    }
    test: ClassVar[str] = "tests/joints/test_terms.py"

    @property
    def needs(self) -> Needs:
        """Returns what the mask requires of the policy and the job."""
        return Needs()

    @abstractmethod
    def keep(self, batch: Batch) -> Tensor:
        """Returns which rollouts or decisions of this rank are trained on, bool (see `of` for the shape)."""
