"""Divergences from a reference, from the old policy and from an average, as loss terms."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.prompts.views import MaskedPatches, View
from mmrl.protocols.requirements import Needs
from mmrl.schedules.schedule import Schedule, number
from mmrl.settings import option
from mmrl.terms.term import Term

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch
    from mmrl.rollouts import Replay, Rollouts


OFFERS = {"exact": "gaussian", "velocity": "velocity"}


class KL(Term):
    """It keeps the policy near the reference, which is the policy that training started from."""

    equation: ClassVar[str] = (
        "coefficient x: k1 d; k2 d^2 / 2; k3 exp(-d) - 1 + d, with d = logp - ref_logp; "
        "exact |mu - mu_ref|^2 / (2 std^2); velocity |v - v_ref|^2"
    )
    source: ClassVar[str] = "Schulman 2020, Approximating KL divergence; GRPO, arXiv 2402.03300; Flow-GRPO, 2505.05470"
    type: str = "kl"
    coefficient: Schedule = number(0.01, "weight of the term", ge=0)
    estimator: Literal["k1", "k2", "k3", "exact", "velocity"] = option(
        "k3", "k1, k2, k3: from single samples; exact, velocity: of denoising steps"
    )
    reset_every: int | None = option(
        None, "steps after which the present policy becomes the reference (ProRL, arXiv 2505.24864)", unit="steps", ge=1
    )

    @property
    def needs(self) -> Needs:
        resets = frozenset() if self.reset_every is None else frozenset({self.reset_every})
        offers = frozenset({OFFERS.get(self.estimator, "single_sample_kl")})
        return Needs(offers=offers, reference=True, reference_resets=resets)

    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        kl = self._divergence(micro, replay)
        return self.coefficient.value * kl, {"kl": kl.detach()}

    def _divergence(self, micro: Rollouts, replay: Replay) -> Tensor:
        from mmrl.core.regularizers import kl_estimate

        if self.estimator in ("k1", "k2", "k3"):
            assert micro.ref_logp is not None
            return kl_estimate(replay.logp, micro.ref_logp.to(replay.logp.device), kind=self.estimator)
        found = replay.reference_kl if self.estimator == "exact" else replay.reference_error
        assert found is not None
        return found


class OldKL(Term):
    """It bounds a step's drift by a price in place of, or beside, a clip. With a coefficient of type multiplier that
    follows the metric old_kl to a target it is a constraint."""

    equation: ClassVar[str] = (
        "coefficient x, from samples of the old policy: forward, KL(old || now), -l + (r - 1); reverse, KL(now || "
        "old), r l - (r - 1); l = log r; normalised leaves out what is in brackets"
    )
    source: ClassVar[str] = "arXiv 2505.17508; the policy drift of CPGD, arXiv 2505.12504, is the forward one"
    test: ClassVar[str] = "tests/joints/test_more_terms.py"
    type: str = "old_kl"
    coefficient: Schedule = number(0.01, "weight of the term", ge=0)
    direction: Literal["forward", "reverse"] = option("forward", "forward: KL(old || now); reverse: KL(now || old)")
    normalised: bool = option(
        False, "leave out the correction of the mass, which makes every single estimate at least 0"
    )

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"single_sample_kl"}), old=True)

    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        from mmrl.core.ratios import BOUND

        old = replay.logp.detach() if micro.old_logp is None else micro.old_logp.to(replay.logp.device)
        log_ratio = (replay.logp - old).clamp(-BOUND, BOUND)
        ratio = log_ratio.exp()
        kl = -log_ratio if self.direction == "forward" else ratio * log_ratio
        if not self.normalised:
            kl = kl + (ratio - 1 if self.direction == "forward" else 1 - ratio)
        return self.coefficient.value * kl, {"old_kl": kl.detach()}


class EmaKL(Term):
    """It slows the policy down without holding it near where it began: the reference follows it step by step."""

    equation: ClassVar[str] = "kl's, with reference <- decay reference + (1 - decay) policy after every step"
    source: ClassVar[str] = "the EMA penalty of AWM, arXiv 2509.25050"
    test: ClassVar[str] = "tests/joints/test_more_terms.py"
    type: str = "ema_kl"
    coefficient: Schedule = number(0.1, "weight of the term", ge=0)
    decay: float = option(0.9, "of the reference's weights a step", ge=0, lt=1)
    estimator: Literal["k1", "k2", "k3", "exact", "velocity"] = option(
        "k3", "k1, k2, k3: from single samples; exact, velocity: of denoising steps"
    )

    @property
    def needs(self) -> Needs:
        offers = frozenset({OFFERS.get(self.estimator, "single_sample_kl")})
        return Needs(offers=offers, reference=True, reference_decays=frozenset({self.decay}))

    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        from mmrl.core.regularizers import kl_estimate

        if self.estimator in ("k1", "k2", "k3"):
            assert micro.ref_logp is not None
            kl = kl_estimate(replay.logp, micro.ref_logp.to(replay.logp.device), kind=self.estimator)
        else:
            found = replay.reference_kl if self.estimator == "exact" else replay.reference_error
            assert found is not None
            kl = found
        return self.coefficient.value * kl, {"ema_kl": kl.detach()}


class DifficultyKL(Term):
    """A right answer to a hard prompt may leave the reference; that to an easy one, and a wrong answer, may not."""

    equation: ClassVar[str] = (
        "coefficient w (exp(-d) - 1 + d), d = logp - ref_logp; w = 1 - exp(-e p) where A > 0 and 0 < p < 1, p the mean "
        "accuracy of the group; else w = 1"
    )
    source: ClassVar[str] = "DADS of View-R1, from its released code"
    test: ClassVar[str] = "tests/joints/test_more_terms.py"
    type: str = "difficulty_kl"
    coefficient: Schedule = number(0.001, "weight of the term", ge=0)

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"single_sample_kl"}), reference=True)

    def prepare(self, batch: Batch) -> None:
        import math

        import torch

        from mmrl.rollouts import DecisionColumn

        rollouts = batch.rollouts
        assert rollouts.advantages is not None
        solved = batch.mine(batch.fact("group/accuracy"))
        weight = 1 - torch.exp(-math.e * solved)
        free = (rollouts.advantages > 0) & ((solved > 0) & (solved < 1))[:, None]
        rollouts.extras[self.key] = DecisionColumn(weight[:, None].expand(free.shape).where(free, 1.0))

    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        from mmrl.core.regularizers import kl_estimate
        from mmrl.rollouts import DecisionColumn

        weight = micro.extras[self.key]
        assert micro.ref_logp is not None and isinstance(weight, DecisionColumn)
        kl = kl_estimate(replay.logp, micro.ref_logp.to(replay.logp.device), kind="k3")
        return self.coefficient.value * weight.values.to(kl) * kl, {"difficulty_kl": kl.detach()}


class CovarianceKL(Term):
    """The share of the decisions whose likelihood and advantage are together furthest above the mean may not leave the
    old policy; the others may. It acts from the second update of a step on, for at the first the ratio is 1."""

    equation: ClassVar[str] = (
        "coefficient |logp - old_logp| (or k2, k3 of it) for the share with the largest (logp - mean logp)(A - mean A) "
        "over the decisions of all ranks; 0 for the others"
    )
    source: ClassVar[str] = "KL-Cov, arXiv 2505.22617"
    test: ClassVar[str] = "tests/joints/test_more_terms.py"
    type: str = "covariance_kl"
    coefficient: Schedule = number(1.0, "weight of the penalty", ge=0)
    share: float = option(2e-4, "of the decisions that are held", gt=0, le=1)
    estimator: Literal["absolute", "k2", "k3"] = option("absolute", "of the divergence from the old policy")

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"single_sample_kl"}), old=True, statistics=frozenset({"logp"}))

    def prepare(self, batch: Batch) -> None:
        from mmrl.rollouts import DecisionColumn

        rollouts = batch.rollouts
        assert rollouts.old_logp is not None and rollouts.advantages is not None
        logp, advantages = batch.decisions(rollouts.old_logp), batch.decisions(rollouts.advantages)
        covariance = (rollouts.old_logp - logp.mean()) * (rollouts.advantages - advantages.mean())
        everyone = batch.decisions(covariance).sort(descending=True).values
        held = rollouts.mask & False
        if len(everyone):
            held = rollouts.mask & (covariance >= everyone[max(1, int(self.share * len(everyone))) - 1])
        rollouts.extras[self.key] = DecisionColumn(held)

    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        from mmrl.core.regularizers import kl_estimate
        from mmrl.rollouts import DecisionColumn

        held = micro.extras[self.key]
        assert micro.old_logp is not None and isinstance(held, DecisionColumn)
        old, chosen = micro.old_logp.to(replay.logp.device), held.values.to(replay.logp.device)
        if self.estimator == "absolute":
            apart = (replay.logp - old).abs()
        else:
            apart = kl_estimate(replay.logp, old, kind=self.estimator)
        values = apart.where(chosen, 0)
        return self.coefficient.value * values, {"covariance_kl": values.detach().where(chosen, torch.nan)}


class ViewKL(Term):
    """It pushes the policy away from what it would say without seeing the picture: a response that is as likely with
    the picture masked was not read off the picture."""

    equation: ClassVar[str] = "-coefficient min(k3(logp, logp under the view), bound)"
    source: ClassVar[str] = "the implicit perception loss of PAPO, arXiv 2507.06448"
    type: str = "view_kl"
    coefficient: Schedule = number(0.01, "weight of the term", ge=0)
    bound: float = option(5.0, "largest divergence that is rewarded", unit="nats", gt=0)
    view: View = option(MaskedPatches(), "the other view")

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"views"}), views=(self.view,))

    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        from mmrl.core.regularizers import kl_estimate

        other = replay.views[self.view.name]
        kl = kl_estimate(replay.logp, other.logp, kind="k3")
        return -self.coefficient.value * kl.clamp(max=self.bound), {"view_kl": kl.detach()}
