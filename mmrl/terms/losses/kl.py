"""The KL divergence from another policy as a loss term: which policy, which estimator, and weights of decisions."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import model_validator

from mmrl.measurements.responses import GroupDivergence, ViewLikelihoods, ViewReplay
from mmrl.prompts.views import MaskedPatches, View
from mmrl.protocols.requirements import Needs, Reference
from mmrl.schedules.schedule import Schedule, number
from mmrl.settings import Choice, option
from mmrl.terms.term import Term

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch
    from mmrl.rollouts import Replay, Rollouts

# estimators for denoising steps -> what the policy must offer
STEP_ESTIMATORS = {"exact": "gaussian", "velocity": "velocity"}
SAMPLE_ESTIMATORS = ("k1", "k2", "k3", "absolute")


# --- the other policy ---


class OtherPolicy(Choice):
    """The policy that the KL divergence is measured from."""

    title: ClassVar[str] = "other policy of kl"
    kinds: ClassVar[dict[str, str]] = {
        "reference": "mmrl.terms.losses.kl:InitialReference",
        "ema": "mmrl.terms.losses.kl:AverageReference",
        "old": "mmrl.terms.losses.kl:OldPolicy",
        "view": "mmrl.terms.losses.kl:PolicyUnderView",
    }
    test: ClassVar[str] = "tests/joints/test_more_terms.py"
    metric: ClassVar[str]  # name of the logged divergence
    at_one_update: ClassVar[str] = ""  # as in `Term`: its effect if all ratios are 1; "": the usual effect
    estimators: ClassVar[tuple[str, ...]] = SAMPLE_ESTIMATORS

    @property
    def needs(self) -> Needs:
        """Returns what the divergence requires of the job with the default estimator."""
        return self.needs_of("k3")

    @abstractmethod
    def needs_of(self, estimator: str) -> Needs:
        """Returns what the divergence requires of the policy and the job with this estimator."""

    @abstractmethod
    def logp(self, micro: Rollouts, replay: Replay) -> Tensor:
        """Returns the log-probabilities under the other policy, [rollout, decision], on the device of `replay`."""

    def divergence(self, estimator: str, micro: Rollouts, replay: Replay) -> Tensor:
        """Estimates the divergence at each decision, [rollout, decision]."""
        from mmrl.core.regularizers import kl_estimate

        return kl_estimate(replay.logp, self.logp(micro, replay), kind=estimator)

    def cost(self, kl: Tensor) -> Tensor:
        """Returns the values to minimize, [rollout, decision], for the divergence `kl`."""
        return kl


class ReferencePolicy(OtherPolicy):
    """The reference policy; with it, denoising steps can be compared exactly too."""

    estimators: ClassVar[tuple[str, ...]] = (*SAMPLE_ESTIMATORS, *STEP_ESTIMATORS)

    def needs_of(self, estimator: str) -> Needs:
        return Needs(offers=frozenset({STEP_ESTIMATORS.get(estimator, "single_sample_kl")}), reference=Reference())

    def logp(self, micro: Rollouts, replay: Replay) -> Tensor:
        assert micro.ref_logp is not None
        return micro.ref_logp.to(replay.logp.device)

    def divergence(self, estimator: str, micro: Rollouts, replay: Replay) -> Tensor:
        """Estimates the divergence from the reference, [rollout, decision]: from samples, or for denoising steps
        exactly or by the squared distance of predictions."""
        if estimator in SAMPLE_ESTIMATORS:
            return super().divergence(estimator, micro, replay)
        from mmrl.rollouts import REFERENCE_ERROR, require

        return require(replay.reference_kl, "exact KLs") if estimator == "exact" else REFERENCE_ERROR.of(replay)


class InitialReference(ReferencePolicy):
    """The initial policy, which training started from."""

    equation: ClassVar[str] = "d = logp - ref_logp; exact |mu - mu_ref|^2 / (2 std^2); velocity |v - v_ref|^2"
    source: ClassVar[str] = "GRPO, arXiv 2402.03300; Flow-GRPO, arXiv 2505.05470; reset_every: ProRL, arXiv 2505.24864"
    test: ClassVar[str] = "tests/joints/test_terms.py"
    metric: ClassVar[str] = "kl"
    type: str = "reference"
    reset_every: int | None = option(
        None,
        "steps after which the current policy becomes the reference (ProRL, arXiv 2505.24864); null: never",
        unit="steps",
        ge=1,
    )
    reset_optimizer: bool = option(True, "reset the optimizer's moments with the reference, as ProRL does")

    def needs_of(self, estimator: str) -> Needs:
        resets = frozenset() if self.reset_every is None else frozenset({self.reset_every})
        reference = Reference(resets=resets, optimizer_resets=resets if self.reset_optimizer else frozenset())
        return super().needs_of(estimator) | Needs(reference=reference)


class AverageReference(ReferencePolicy):
    """An exponential moving average (EMA) of the policy's weights. It slows the policy down, but does not hold it near
    the initial policy."""

    equation: ClassVar[str] = "as of reference, with reference <- decay reference + (1 - decay) policy after every step"
    source: ClassVar[str] = "the EMA penalty of AWM, arXiv 2509.25050"
    metric: ClassVar[str] = "ema_kl"
    type: str = "ema"
    decay: float = option(0.9, "EMA decay per step", ge=0, lt=1)

    def needs_of(self, estimator: str) -> Needs:
        return super().needs_of(estimator) | Needs(reference=Reference(decays=frozenset({self.decay})))


class OldPolicy(OtherPolicy):
    """The old policy, which made the rollouts: a penalty on the policy's drift within a step, instead of a clip or with
    one. With a coefficient of type multiplier on the metric old_kl it is a constraint. At the first update of a step it
    has no effect, since the ratio is 1."""

    equation: ClassVar[str] = (
        "d = logp - old_logp, r = exp(d); forward: the estimate at -d, KL(old || now), k3 is r - 1 - d; reverse: r x "
        "the estimate at d, KL(now || old), k3 is r d - (r - 1); unweighted: the estimate at d"
    )
    source: ClassVar[str] = (
        "arXiv 2505.17508, whose normalised divergences are k1 and the others k3; the policy drift of CPGD, arXiv "
        "2505.12504, is the forward one"
    )
    metric: ClassVar[str] = "old_kl"
    at_one_update: ClassVar[str] = "the ratio is 1: the divergence is 0, and so is its gradient (that of k1 on average)"
    type: str = "old"
    direction: Literal["forward", "reverse", "unweighted"] = option(
        "forward",
        "forward: KL(old || now); reverse: KL(now || old), samples weighted by their ratios; unweighted: no weights",
    )

    def needs_of(self, estimator: str) -> Needs:
        return Needs(offers=frozenset({"single_sample_kl"}), old=True)

    def logp(self, micro: Rollouts, replay: Replay) -> Tensor:
        from mmrl.rollouts import old_logp

        return old_logp(micro, replay)

    def divergence(self, estimator: str, micro: Rollouts, replay: Replay) -> Tensor:
        """Estimates the divergence in `direction`, [rollout, decision]. With direction=reverse a sample of the old
        policy is weighted by its likelihood ratio."""
        from mmrl.core.ratios import BOUND
        from mmrl.core.regularizers import kl_estimate

        logp, old = replay.logp, self.logp(micro, replay)
        if self.direction == "forward":
            return kl_estimate(old, logp, kind=estimator)
        kl = kl_estimate(logp, old, kind=estimator)
        return kl if self.direction == "unweighted" else kl * (logp - old).clamp(-BOUND, BOUND).exp()


class PolicyUnderView(OtherPolicy):
    """The policy given a view of the prompt, such as a masked image. The divergence from it is maximized: a response
    that is as likely without the image does not depend on the image. The log-probabilities under the view are those of
    the policy that made the rollouts, computed once per step as in PAPO's released code; with `gradient`, those of the
    current policy."""

    equation: ClassVar[str] = "d = logp - logp under the view; it costs -min(estimate, bound)"
    source: ClassVar[str] = "the implicit perception loss of PAPO, arXiv 2507.06448"
    test: ClassVar[str] = "tests/joints/test_terms.py"
    metric: ClassVar[str] = "view_kl"
    type: str = "view"
    bound: float = option(5.0, "largest divergence that is rewarded", unit="nats", gt=0)
    view: View = option(MaskedPatches(), "change of the prompt")
    gradient: bool = option(False, "also backpropagate through the log-probabilities under the view (a second pass)")

    def needs_of(self, estimator: str) -> Needs:
        return Needs(measurements=((ViewReplay if self.gradient else ViewLikelihoods)(self.view),))

    def logp(self, micro: Rollouts, replay: Replay) -> Tensor:
        """Returns the log-probabilities given the view of the prompt, [rollout, decision]; with `gradient`, those of
        the current policy."""
        from mmrl.rollouts import DecisionColumn

        if self.gradient:
            return ViewReplay(self.view).of(replay).logp
        return micro.extra(ViewLikelihoods(self.view).name, DecisionColumn).values.to(replay.logp.device)

    def cost(self, kl: Tensor) -> Tensor:
        return -kl.clamp(max=self.bound)


# --- weights of decisions ---


class KLWeighting(Choice):
    """Weights of the decisions in a KL term, computed once per step. Decisions of weight 0 are not in the metric."""

    title: ClassVar[str] = "weighting of kl"
    kinds: ClassVar[dict[str, str]] = {
        "difficulty": "mmrl.terms.losses.kl:DifficultyWeighting",
        "covariance": "mmrl.terms.losses.kl:CovarianceWeighting",
        "divergence": "mmrl.terms.losses.kl:DivergenceWeighting",
    }
    test: ClassVar[str] = "tests/joints/test_more_terms.py"
    metric: ClassVar[str]  # name of the logged divergence, instead of the other policy's `metric`

    @property
    def needs(self) -> Needs:
        """Returns what the weights require of the policy and the job."""
        return Needs()

    @abstractmethod
    def weights(self, batch: Batch) -> Tensor:
        """Returns weights of this rank's decisions, [rollout, decision], float or bool."""


class DifficultyWeighting(KLWeighting):
    """A smaller penalty for rollouts with a positive advantage, the smaller the harder the prompt is."""

    equation: ClassVar[str] = (
        "w = 1 - exp(-e p) where A > 0 and 0 < p < 1, p the mean accuracy of the group; else w = 1"
    )
    source: ClassVar[str] = "DADS of View-R1, from its released code"
    metric: ClassVar[str] = "difficulty_kl"
    type: str = "difficulty"

    def weights(self, batch: Batch) -> Tensor:
        """Returns 1 - exp(-e x the group's accuracy) where the advantage is positive and the accuracy neither 0 nor 1,
        else 1; [rollout, decision]."""
        import math

        import torch

        rollouts = batch.rollouts
        assert rollouts.advantages is not None
        accuracy = batch.local(batch.column("group/accuracy"))
        weight = 1 - torch.exp(-math.e * accuracy)
        reduced = (rollouts.advantages > 0) & ((accuracy > 0) & (accuracy < 1))[:, None]
        return weight[:, None].expand(reduced.shape).where(reduced, 1.0)


class CovarianceWeighting(KLWeighting):
    """The penalty applies only to the decisions with the largest covariance of log-probability and advantage."""

    equation: ClassVar[str] = (
        "w = 1 for the share with the largest (logp - mean logp)(A - mean A) over the decisions of all ranks; else 0"
    )
    source: ClassVar[str] = "KL-Cov, arXiv 2505.22617"
    metric: ClassVar[str] = "covariance_kl"
    type: str = "covariance"
    share: float = option(2e-4, "fraction of the decisions that are penalized", gt=0, le=1)

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"single_sample_kl"}), statistics=frozenset({"logp"}))

    def weights(self, batch: Batch) -> Tensor:
        """Returns which decisions are in the `share` with the largest covariances of log-probability and advantage,
        [rollout, decision] bool."""
        rollouts = batch.rollouts
        assert rollouts.old_logp is not None and rollouts.advantages is not None
        logp, advantages = batch.gather_decisions(rollouts.old_logp), batch.gather_decisions(rollouts.advantages)
        covariance = (rollouts.old_logp - logp.mean()) * (rollouts.advantages - advantages.mean())
        ranked = batch.gather_decisions(covariance).sort(descending=True).values
        if not len(ranked):
            return rollouts.mask & False  # no rank has a decision
        return rollouts.mask & (covariance >= ranked[max(1, int(self.share * len(ranked))) - 1])


class DivergenceWeighting(KLWeighting):
    """A larger penalty where the distributions of the group's rollouts differ most, with the weights of the shaper
    divergence_weight."""

    equation: ClassVar[str] = "w_t = 1 + (max_weight - 1) scaled D_t, as of the shaper divergence_weight"
    source: ClassVar[str] = "TW-GRPO, arXiv 2505.24718, whose weights multiply the whole loss of a token"
    test: ClassVar[str] = "tests/joints/test_group_divergence.py"
    metric: ClassVar[str] = "divergence_kl"
    type: str = "divergence"
    max_weight: float = option(1.4, "weight at the position of the largest divergence", ge=1)
    block: int = option(
        32768, "tokens of the vocabulary whose log-probabilities are stored at once", unit="tokens", ge=1
    )

    @property
    def needs(self) -> Needs:
        return Needs(measurements=(GroupDivergence(self.block),))

    def weights(self, batch: Batch) -> Tensor:
        """Returns weights from 1 to `max_weight`, [rollout, decision]."""
        return GroupDivergence(self.block).token_weights(batch, self.max_weight)


# --- the term ---


class KL(Term):
    """The KL divergence from another policy, by default the initial policy.

    As a loss, only k2 has the KL's gradient in expectation. k3 has the gradient of KL(other || policy), and k1 has none
    in expectation, so it penalizes nothing. To use k1, subtract it from the reward: the shaper kl_returns or the reward
    transform kl_penalty.
    """

    equation: ClassVar[str] = (
        "coefficient w x: k1 d; k2 d^2 / 2; k3 exp(-d) - 1 + d; absolute |d|, d = logp - logp of the other policy; "
        "exact |mu - mu_ref|^2 / (2 std^2); velocity |v - v_ref|^2"
    )
    source: ClassVar[str] = "Schulman 2020, Approximating KL divergence; GRPO, arXiv 2402.03300; Flow-GRPO, 2505.05470"
    type: str = "kl"
    coefficient: Schedule = number(0.01, "weight of the term", ge=0)
    against: OtherPolicy = option(InitialReference(), "policy that the divergence is measured from")
    estimator: Literal["k1", "k2", "k3", "absolute", "exact", "velocity"] = option(
        "k3",
        "k1, k2, k3, absolute: from single samples, k1 with an expected gradient of 0; exact, velocity: for denoising "
        "steps, against the reference",
    )
    weighting: KLWeighting | None = option(None, "weights of decisions; null: equal")

    @model_validator(mode="after")
    def _check_estimator(self) -> KL:
        if self.estimator not in self.against.estimators:
            raise ValueError(
                f"estimator={self.estimator} does not work with against={self.against.type}; set it to one of "
                f"{', '.join(self.against.estimators)}"
            )
        return self

    @property
    def needs(self) -> Needs:
        needs = self.against.needs_of(self.estimator)
        return needs if self.weighting is None else needs | self.weighting.needs

    @property
    def note_at_one_update(self) -> str:
        return self.against.at_one_update

    @property
    def remark(self) -> str:
        """Returns a warning for k1 against the reference without weights, whose expected gradient is 0; else ""."""
        if self.estimator != "k1" or not isinstance(self.against, ReferencePolicy) or self.weighting is not None:
            return ""
        return (
            "estimator=k1 has an expected gradient of 0 in a loss, so it penalizes nothing: use k2 or k3, or put k1 in "
            "the reward by algorithm.shaping=[kl_returns]"
        )

    def prepare(self, batch: Batch) -> None:
        from mmrl.rollouts import DecisionColumn

        if self.weighting is not None:
            batch.rollouts.extras[self.weighting.key] = DecisionColumn(self.weighting.weights(batch))

    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes coefficient x the divergence, weighted if `weighting` is set, and the divergence as a metric;
        [rollout, decision]."""
        kl = self.against.divergence(self.estimator, micro, replay)
        values = self.coefficient.value * self.against.cost(kl)
        if self.weighting is None:
            return values, {self.against.metric: kl.detach()}
        return self._weighted(self.weighting, values, kl.detach(), micro)

    @staticmethod
    def _weighted(
        weighting: KLWeighting, values: Tensor, kl: Tensor, micro: Rollouts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the values [rollout, decision] times the weights that `prepare` stored, and as the metric the
        divergence `kl`, NaN (left out) where the weight is 0."""
        import torch

        from mmrl.rollouts import DecisionColumn

        weights = micro.extra(weighting.key, DecisionColumn).values.to(kl)
        return (weights * values).where(weights != 0, 0), {weighting.metric: kl.where(weights != 0, torch.nan)}
