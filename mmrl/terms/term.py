"""Base classes of the three kinds of addition to an algorithm. Each is a pure function with its settings; users'
additions inherit from one of them and are named as `package.module:Class`."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.protocols.requirements import Needs
from mmrl.settings import Choice

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch
    from mmrl.rollouts import Replay, Rollouts


class Term(Choice):
    """A loss term: values that are added to the algorithm's and reduced together with them.

    at_one_update: what becomes of it where all ratios are 1, as in a job of one update a step; empty: it acts there as
    anywhere.
    """

    title: ClassVar[str] = "loss term"
    changes: ClassVar[frozenset[str]] = frozenset({"gradient"})  # in a step, by itself
    kinds: ClassVar[dict[str, str]] = {
        "kl": "mmrl.terms.losses.kl:KL",
        "entropy": "mmrl.terms.losses.entropy:Entropy",
        "likelihood": "mmrl.terms.losses.likelihood:LikelihoodTerm",
        "advantage_weighted": "mmrl.terms.losses.advantage_weighted:AdvantageWeightedTerm",
        "q_weighted": "mmrl.terms.losses.q_weighted:QWeightedTerm",
        "q_policy_gradient": "mmrl.terms.losses.q_policy_gradient:QPolicyGradient",
        "of_part": "mmrl.terms.losses.of_part:OfPart",
        "distillation": "mmrl.terms.losses.distillation:Distillation",
        "sampler_distillation": "mmrl.terms.losses.sampler_distillation:SamplerDistillation",
        "region": "mmrl.terms.losses.region:Region",
        "likelihood_drop": "mmrl.terms.losses.likelihood:LikelihoodDrop",
        "head_cost": "mmrl.terms.losses.head_cost:HeadCost",
    }
    test: ClassVar[str] = "tests/joints/test_terms.py"
    at_one_update: ClassVar[str] = ""

    @property
    def needs(self) -> Needs:
        return Needs()

    @property
    def at_rest(self) -> str:
        """Returns `at_one_update` with these settings."""
        return self.at_one_update

    @property
    def remark(self) -> str:
        """Returns what a user should know of its settings, which training says before it starts; empty: nothing."""
        return ""

    def prepare(self, batch: Batch) -> None:
        """Prepares a step, after advantages and masks are set: may store columns in `batch.rollouts.extras` under
        `key`."""

    @abstractmethod
    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes values to minimise, coefficient included, and statistics to average; all [rollout, decision]."""


class Shaper(Choice):
    """A change of the advantages, made once a step before the first update."""

    title: ClassVar[str] = "advantage shaper"
    changes: ClassVar[frozenset[str]] = frozenset({"advantages"})  # in a step, by itself
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
        "curiosity": "mmrl.terms.shapers.turns:Curiosity",
        "stratified": "mmrl.terms.shapers.groups:Stratified",
        "set_diversity": "mmrl.terms.shapers.groups:SetDiversity",
        "entropy_redistribution": "mmrl.terms.shapers.entropy:EntropyRedistribution",
        "self_process": "mmrl.terms.shapers.segments:SelfProcess",
        "long_wrong": "mmrl.terms.shapers.groups:LongWrong",
        "shared_prefix": "mmrl.terms.shapers.segments:SharedPrefix",
        "view_information": "mmrl.terms.shapers.views:ViewInformation",
        "kl_returns": "mmrl.terms.shapers.returns:KLReturns",
        "signal_correction": "mmrl.terms.shapers.groups:SignalCorrection",
        "whitening": "mmrl.terms.shapers.returns:Whitening",
        "span_returns": "mmrl.terms.shapers.spans:SpanReturns",
        "span_minimum": "mmrl.terms.shapers.spans:SpanMinimum",
        "span_signs": "mmrl.terms.shapers.spans:SpanSigns",
        "span_progress": "mmrl.terms.shapers.spans:SpanProgress",
        "implicit_process": "mmrl.terms.shapers.implicit:ImplicitProcess",
    }
    test: ClassVar[str] = "tests/joints/test_terms.py"
    paid_by_environment: ClassVar[bool] = False  # whether it uses the environment's rewards, beside the task's
    of_flat_groups: ClassVar[bool] = False  # whether groups of equal rewards teach something by it
    at_dynamic_sampling: ClassVar[str] = ""  # what becomes of it where only groups with a signal are left; "": it acts

    @property
    def needs_paid_turns(self) -> bool:
        """Returns whether nothing comes of it where the environment gives turns no rewards."""
        return False

    @property
    def needs(self) -> Needs:
        return Needs()

    def check_rewards(self, names: list[str]) -> None:  # noqa: B027  (most shapers name none)
        """Raises ValueError for a reward that is none of the task's."""

    @abstractmethod
    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        """Returns the changed advantages, [rollout, decision]. advantages: of this rank's rollouts, [rollout,
        decision]."""


class Mask(Choice):
    """A selection of rollouts or decisions that count in the loss.

    `of` "rollouts": `keep` returns [rollout] before the advantages, and a masked rollout is not in the statistics of
    its group either. `of` "decisions": it returns [rollout, decision] after them. `of` "objective": likewise, but a
    masked decision has no part in the algorithm's objective alone; it stays in denominators, terms, statistics and the
    ratio of its rollout. An objective of whole rollouts leaves it out altogether.
    """

    title: ClassVar[str] = "mask"
    of: ClassVar[Literal["rollouts", "decisions", "objective"]] = "decisions"
    changes: ClassVar[frozenset[str]] = frozenset({"mask"})  # in a step, by itself
    kinds: ClassVar[dict[str, str]] = {
        "truncated": "mmrl.terms.masks.rollouts:Truncated",
        "over_turn": "mmrl.terms.masks.rollouts:OverTurn",
        "band": "mmrl.terms.masks.rollouts:BandMask",
        "entropy_share": "mmrl.terms.masks.decisions:EntropyShare",
        "covariance_clip": "mmrl.terms.masks.decisions:CovarianceClip",
        "token_budget": "mmrl.terms.masks.decisions:TokenBudget",
        "best_of_group": "mmrl.terms.masks.rollouts:BestOfGroup",
        "process_agreement": "mmrl.terms.masks.rollouts:ProcessAgreement",
    }
    test: ClassVar[str] = "tests/joints/test_terms.py"

    @property
    def needs(self) -> Needs:
        return Needs()

    @abstractmethod
    def keep(self, batch: Batch) -> Tensor:
        """Returns the mask of this rank's rollouts or decisions, bool: True where they count."""
