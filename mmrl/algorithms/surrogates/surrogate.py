"""Surrogate objectives: losses of likelihood ratios and advantages, in place of the expected reward."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.protocols.requirements import Needs
from mmrl.schedules.schedule import Schedule, number
from mmrl.settings import Choice, option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.algorithms.algorithm import Reduction
    from mmrl.protocols.batch import Batch
    from mmrl.rollouts import Replay, Rollouts

Result = tuple["Tensor", dict[str, "Tensor"]]
AS_REINFORCE = "the ratio is 1 and the gradient is that of reinforce"


class Surrogate(Choice):
    """An objective of the likelihood ratio r = pi / pi_old and the advantage A of each decision.

    one_weight: whether all decisions of a rollout have the same ratio, so that `reduce` defaults to sequence_mean.
    at_one_update: what the surrogate does if all ratios are 1, as with one update per step; empty: the same as
    otherwise.
    """

    title: ClassVar[str] = "surrogate"
    changes: ClassVar[frozenset[str]] = frozenset({"gradient"})  # what the surrogate changes in a step
    kinds: ClassVar[dict[str, str]] = {
        "clip": "mmrl.algorithms.surrogates.surrogate:Clip",
        "dual_clip": "mmrl.algorithms.surrogates.surrogate:DualClip",
        "cispo": "mmrl.algorithms.surrogates.surrogate:CISPO",
        "soft": "mmrl.algorithms.surrogates.surrogate:Soft",
        "divergence_mask": "mmrl.algorithms.surrogates.surrogate:DivergenceMask",
        "gaussian_weight": "mmrl.algorithms.surrogates.surrogate:GaussianWeight",
        "unclipped": "mmrl.algorithms.surrogates.surrogate:Unclipped",
        "reinforce": "mmrl.algorithms.surrogates.surrogate:Reinforce",
        "geometric": "mmrl.algorithms.surrogates.clips:Geometric",
        "log_clip": "mmrl.algorithms.surrogates.clips:LogClip",
        "sqrt_clip": "mmrl.algorithms.surrogates.clips:SqrtClip",
        "tapered": "mmrl.algorithms.surrogates.clips:Tapered",
        "boundary_chance": "mmrl.algorithms.surrogates.clips:BoundaryChance",
        "ratio_variance": "mmrl.algorithms.surrogates.trust:RatioVariance",
        "query_trust_region": "mmrl.algorithms.surrogates.trust:QueryTrustRegion",
        "sequence_mask": "mmrl.algorithms.surrogates.trust:SequenceMask",
        "group_expectation": "mmrl.algorithms.surrogates.trust:GroupExpectation",
        "trajectory_trust_region": "mmrl.algorithms.surrogates.trajectories:TrajectoryTrustRegion",
        "mirror_descent": "mmrl.algorithms.surrogates.mirror:MirrorDescent",
        "by_part": "mmrl.algorithms.surrogates.by_part:ByPart",
        "guided": "mmrl.algorithms.surrogates.guided:Guided",
        "self_normalised": "mmrl.algorithms.surrogates.self_normalised:SelfNormalised",
        "teacher_ratio": "mmrl.algorithms.surrogates.teacher_ratio:TeacherRatio",
    }
    test: ClassVar[str] = "tests/core/test_surrogates.py"
    one_weight: ClassVar[bool] = False
    at_one_update: ClassVar[str] = ""

    @property
    def needs(self) -> Needs:
        """Returns what the surrogate requires of the policy and the job."""
        return Needs()

    @property
    def note_at_one_update(self) -> str:
        """Returns `at_one_update` for these settings; `by_part` joins the notes of its two surrogates."""
        return self.at_one_update

    def prepare(self, batch: Batch) -> None:
        """Prepares a step once advantages and masks are set. It may store columns in `batch.rollouts.extras` under
        `key`."""

    def log_anchor(self, micro: Rollouts, replay: Replay) -> Tensor | None:
        """Computes log(anchor / pi_old) for a surrogate whose ratio is relative to another distribution than the old
        policy, without gradient, [rollout, decision]; None: its ratio is pi / pi_old."""
        return None

    @abstractmethod
    def values(self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay) -> Result:
        """Computes values to minimize and statistics, [rollout, decision] like log_ratio and advantages.

        micro: the micro-batch of rollouts; replay: the policy's outputs for it, with gradients.
        """

    def objective(
        self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay, reduction: Reduction
    ) -> Result:
        """Computes the reduced values, 0-d, and statistics [rollout, decision]. Arguments as in `values`."""
        from mmrl.protocols.checks import check_pair, check_values

        key = f"algorithm.surrogate={self.type}"
        values, stats = check_pair(key, self.values(log_ratio, advantages, micro, replay))
        check_values(key, values, micro.mask.shape)
        return reduction(values if replay.weight is None else values * replay.weight), stats


class Clipped(Surrogate):
    """Base class of surrogates that clip the ratio on both sides."""

    low: Schedule = number(0.2, "lower clip bound: the ratio gains nothing below 1 - low", ge=0, le=1)
    high: Schedule = number(0.28, "upper clip bound: the ratio gains nothing above 1 + high", ge=0)

    @property
    def bounds(self) -> dict[str, float]:
        """Returns the current clip bounds, as arguments of `core.surrogates.surrogate`."""
        return {"clip_low": self.low.value, "clip_high": self.high.value}


class Clip(Clipped):
    """PPO's clipped objective, with separate bounds for both sides."""

    equation: ClassVar[str] = "-min(r A, clamp(r, 1 - low, 1 + high) A)"
    source: ClassVar[str] = "PPO, arXiv 1707.06347; two bounds: DAPO, arXiv 2503.14476"
    at_one_update: ClassVar[str] = f"{AS_REINFORCE}: low and high have no effect"
    type: str = "clip"

    def values(self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay) -> Result:
        from mmrl.core.surrogates import surrogate

        return surrogate(log_ratio, advantages, kind=self.type, **self.bounds)

    def objective(
        self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay, reduction: Reduction
    ) -> Result:
        """Computes the objective in one kernel. Statistics are means, repeated for each decision."""
        from mmrl.kernels import clipped_surrogate

        mode, segment_weight = reduction.as_decisions()
        # the objective is proportional to the advantage, so weights of decisions (0 or more) are applied to it
        for weight in (replay.weight, segment_weight):
            advantages = advantages if weight is None else advantages * weight
        loss, means = clipped_surrogate(
            log_ratio,
            advantages,
            reduction.mask,
            **self.bounds,
            mode=mode,
            total=reduction.totals["decisions"],
            length=reduction.length,
        )
        return loss, {name: mean.expand_as(log_ratio) for name, mean in means.items()}


class DualClip(Clipped):
    """PPO's clipped objective, with an upper bound of the loss of negative advantages."""

    equation: ClassVar[str] = "clip's, at most cap |A| where A < 0"
    source: ClassVar[str] = "arXiv 1912.09729"
    at_one_update: ClassVar[str] = f"{AS_REINFORCE}: low, high and cap have no effect"
    type: str = "dual_clip"
    cap: float = option(3.0, "largest loss of a negative advantage, in |A|", gt=1)

    def values(self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay) -> Result:
        from mmrl.core.surrogates import surrogate

        return surrogate(log_ratio, advantages, kind=self.type, cap=self.cap, **self.bounds)


class CISPO(Clipped):
    """The policy gradient with a clipped, detached importance weight, so that no decision loses its gradient.

    MiniMax-M1 and TRL have no lower bound. TRL's epsilon_high is the largest weight itself: its 5 is high=4 with low=1
    here.
    """

    equation: ClassVar[str] = "gradient -clamp(r, 1 - low, 1 + high) A dlogp"
    source: ClassVar[str] = "MiniMax-M1, arXiv 2506.13585"
    at_one_update: ClassVar[str] = f"{AS_REINFORCE}: low and high have no effect"
    type: str = "cispo"
    low: Schedule = number(0.2, "smallest weight is 1 - low; 1: no lower bound", ge=0, le=1)
    high: Schedule = number(0.28, "largest weight is 1 + high, TRL's epsilon_high", ge=0)

    def values(self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay) -> Result:
        from mmrl.core.surrogates import surrogate

        return surrogate(log_ratio, advantages, kind=self.type, **self.bounds)


class Soft(Surrogate):
    """A sigmoid gate in place of the clip, with a temperature for each sign of the advantage (SAPO).

    The paper and verl average over each rollout first: algorithm.reduce=sequence_mean.
    """

    equation: ClassVar[str] = "-A sigmoid(tau (r - 1)) 4 / tau"
    source: ClassVar[str] = "SAPO, arXiv 2511.20347"
    at_one_update: ClassVar[str] = f"{AS_REINFORCE}, whatever tau"
    type: str = "soft"
    tau_positive: float = option(1.0, "tau where A > 0", gt=0)
    tau_negative: float = option(1.05, "tau where A <= 0", gt=0)

    def values(self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay) -> Result:
        from mmrl.core.surrogates import surrogate

        taus = {"tau_positive": self.tau_positive, "tau_negative": self.tau_negative}
        return surrogate(log_ratio, advantages, kind=self.type, **taus)


class DivergenceMask(Surrogate):
    """The policy gradient without the decisions that are beyond a divergence bound and would move further away."""

    equation: ClassVar[str] = "-r A, or 0 where divergence > bound and the step moves further away"
    source: ClassVar[str] = "DPPO, arXiv 2602.04879; of denoising steps: Flow-DPPO"
    at_one_update: ClassVar[str] = f"{AS_REINFORCE}: no divergence is above bound"
    type: str = "divergence_mask"
    bound: float = option(description="largest divergence", gt=0)
    estimate: Literal["tv", "kl"] = option(
        "tv", "total variation or KL of 'this token or another', for decisions without an exact divergence"
    )

    def values(self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay) -> Result:
        """Computes the loss -r A of each decision and statistics, [rollout, decision].

        The loss is 0 where the divergence from the old policy is above `bound` and a gradient step would increase it.
        replay: log-probabilities of the micro-batch under the current weights; where its divergence is None, it is
        estimated from the sampled token.
        """
        from mmrl.core.regularizers import token_divergence
        from mmrl.core.surrogates import surrogate
        from mmrl.rollouts import old_logp

        divergence = replay.divergence
        if divergence is None:
            divergence = token_divergence(replay.logp, old_logp(micro, replay), kind=self.estimate)
        return surrogate(log_ratio, advantages, kind=self.type, divergence=divergence, bound=self.bound)


class GaussianWeight(Surrogate):
    """The policy gradient with a weight that falls with the distance of the log-ratio from 0."""

    equation: ClassVar[str] = "-w r A, w = exp(-log(r)^2 / (2 sigma^2)) detached"
    source: ClassVar[str] = "arXiv 2603.03955"
    at_one_update: ClassVar[str] = f"{AS_REINFORCE}: all weights are 1"
    type: str = "gaussian_weight"
    sigma: float = option(0.2, "std of the weight, in log-ratios", gt=0)

    def values(self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay) -> Result:
        from mmrl.core.surrogates import surrogate

        return surrogate(log_ratio, advantages, kind=self.type, sigma=self.sigma)


class Unclipped(Surrogate):
    """The policy gradient with the full importance weight, without a clip.

    To bound the policy's drift, add a term: KL-Cov adds kl against old with weighting covariance.
    """

    equation: ClassVar[str] = "-r A"
    source: ClassVar[str] = "the surrogate of KL-Cov, arXiv 2505.22617; conservative policy iteration, Kakade 2002"
    at_one_update: ClassVar[str] = AS_REINFORCE
    type: str = "unclipped"

    def values(self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay) -> Result:
        from mmrl.core.surrogates import surrogate

        return surrogate(log_ratio, advantages, kind=self.type)


class Reinforce(Surrogate):
    """The policy gradient without an importance weight."""

    equation: ClassVar[str] = "gradient -A dlogp"
    source: ClassVar[str] = "Williams 1992"
    type: str = "reinforce"

    def values(self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay) -> Result:
        from mmrl.core.surrogates import surrogate

        return surrogate(log_ratio, advantages, kind=self.type)
