"""The three kinds of addition to an algorithm. Each is a pure function with its settings; one of one's own inherits
from its class here and is named as `package.module:Class`."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.needs import Needs
from mmrl.settings import Choice

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.facts import Batch
    from mmrl.rollouts import Replay, Rollouts


class Term(Choice):
    """A loss term: values that are added to the algorithm's and reduced together with them."""

    title: ClassVar[str] = "loss term"
    kinds: ClassVar[dict[str, str]] = {
        "kl": "mmrl.terms.kl:KL",
        "entropy": "mmrl.terms.entropy:Entropy",
        "likelihood": "mmrl.terms.likelihood:Likelihood",
        "view_kl": "mmrl.terms.view_kl:ViewKL",
        "double_entropy": "mmrl.terms.double_entropy:DoubleEntropy",
        "old_kl": "mmrl.terms.old_kl:OldKL",
        "ema_kl": "mmrl.terms.ema_kl:EmaKL",
        "difficulty_kl": "mmrl.terms.difficulty_kl:DifficultyKL",
        "covariance_kl": "mmrl.terms.covariance_kl:CovarianceKL",
        "entropy_likelihood": "mmrl.terms.entropy_likelihood:EntropyLikelihood",
        "of_part": "mmrl.terms.of_part:OfPart",
        "sampler_distillation": "mmrl.terms.sampler_distillation:SamplerDistillation",
        "region": "mmrl.terms.region:Region",
        "likelihood_drop": "mmrl.terms.likelihood_drop:LikelihoodDrop",
        "head_cost": "mmrl.terms.head_cost:HeadCost",
    }
    test: ClassVar[str] = "tests/joints/test_terms.py"

    @property
    def needs(self) -> Needs:
        return Needs()

    def prepare(self, batch: Batch) -> None:
        """Once a step, when advantages and masks are known: may leave columns in `batch.rollouts.extras`, as `key`."""

    @abstractmethod
    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        """Values to minimise, coefficient included, and statistics to average; [rollout, decision] all of them."""


class Shaper(Choice):
    """A change of the advantages, made once a step before the first update."""

    title: ClassVar[str] = "advantage shaper"
    kinds: ClassVar[dict[str, str]] = {
        "entropy_bonus": "mmrl.terms.entropy_bonus:EntropyBonus",
        "advantage_momentum": "mmrl.terms.advantage_momentum:AdvantageMomentum",
        "token_baseline": "mmrl.terms.token_baseline:TokenBaseline",
        "turn_returns": "mmrl.terms.turn_returns:TurnReturns",
        "step_gains": "mmrl.terms.step_gains:StepGains",
        "branch_credit": "mmrl.terms.branch_credit:BranchCredit",
        "part_credit": "mmrl.terms.part_credit:PartCredit",
        "latent_values": "mmrl.terms.latent_values:LatentValues",
        "milestones": "mmrl.terms.milestones:Milestones",
        "segment_values": "mmrl.terms.segment_values:SegmentValues",
        "curiosity": "mmrl.terms.curiosity:Curiosity",
        "stratified": "mmrl.terms.stratified:Stratified",
        "set_diversity": "mmrl.terms.set_diversity:SetDiversity",
        "entropy_redistribution": "mmrl.terms.entropy_redistribution:EntropyRedistribution",
        "entropy_modulation": "mmrl.terms.entropy_modulation:EntropyModulation",
        "self_process": "mmrl.terms.self_process:SelfProcess",
        "long_wrong": "mmrl.terms.long_wrong:LongWrong",
        "shared_prefix": "mmrl.terms.shared_prefix:SharedPrefix",
        "view_information": "mmrl.terms.view_information:ViewInformation",
    }
    test: ClassVar[str] = "tests/joints/test_terms.py"

    @property
    def needs(self) -> Needs:
        return Needs()

    def check_rewards(self, names: list[str]) -> None:  # noqa: B027  (most shapers name none)
        """Raises ValueError in one line for a reward that is none of the task's."""

    @abstractmethod
    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        """advantages: of this rank's rollouts, [rollout, decision]; returns the like."""


class Mask(Choice):
    """A choice of what is learned from.

    `of` "rollouts": `keep` gives [rollout] before the advantages, and a rollout that is left out also leaves the
    statistics of its group. `of` "decisions": it gives [rollout, decision] after them.
    """

    title: ClassVar[str] = "mask"
    of: ClassVar[Literal["rollouts", "decisions"]] = "decisions"
    kinds: ClassVar[dict[str, str]] = {
        "truncated": "mmrl.terms.truncated:Truncated",
        "over_turn": "mmrl.terms.over_turn:OverTurn",
        "band": "mmrl.terms.band:Band",
        "entropy_share": "mmrl.terms.entropy_share:EntropyShare",
        "covariance_clip": "mmrl.terms.covariance_clip:CovarianceClip",
        "token_budget": "mmrl.terms.token_budget:TokenBudget",
        "best_of_group": "mmrl.terms.best_of_group:BestOfGroup",
    }
    test: ClassVar[str] = "tests/joints/test_terms.py"

    @property
    def needs(self) -> Needs:
        return Needs()

    @abstractmethod
    def keep(self, batch: Batch) -> Tensor:
        """Of this rank's rollouts, bool: True where something is learned."""
