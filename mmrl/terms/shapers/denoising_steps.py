"""Credit assignment to denoising steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.measurements.chains import CandidateCompletions, Completions, PooledLatents
from mmrl.protocols.requirements import Needs
from mmrl.settings import option
from mmrl.terms.term import Shaper

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.auxiliary import AuxiliaryModule
    from mmrl.protocols.batch import Batch


class StepGains(Shaper):
    """The gain in expected reward of each stochastic denoising step, normalized among the same step of the group.

    The gain is the reward of the noise-free completion of the state after the step, minus that of the state before it.
    A turning point, where the gains change sign toward the final reward, gets the total gain of all steps from it on.
    """

    equation: ClassVar[str] = (
        "d_k = R_k - R_(k-1), R_k the reward of k steps and then the ODE, R_K the rollout's; s_k = sign(d_k) sign(R_K "
        "- R_0); where s_(k-1) < 0 < s_k and d_k (R_K - R_k) > 0 (first step: the latter alone) it is R_K - R_(k-1); "
        "A_k = outcome A + weight (d_k - mean) / (std + eps), by group"
    )
    source: ClassVar[str] = "TP-GRPO, arXiv 2602.06422, without its balance of positive and negative turning points"
    test: ClassVar[str] = "tests/joints/test_step_gains.py"
    type: str = "step_gains"
    turning_points: bool = option(True, "turning points get the total gain from there on; false: their own gain only")
    weight: float = option(1.0, "weight of the steps' advantages", ge=0)
    outcome: float = option(0.0, "weight of the algorithm's own advantage of the rollout", ge=0)
    scale: Literal["group_std", "none"] = option("group_std", "divide differences by the std of the group, or not")

    @property
    def needs(self) -> Needs:
        return Needs(measurements=(Completions(),))

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        """Returns outcome x the advantages + weight x the gains in expected reward of the denoising steps, normalized
        among the same step of the group; [rollout, decision]."""
        from mmrl.core.credit import step_gains, turning_point_gains
        from mmrl.core.turns import turn_advantages

        values = batch.measured(Completions()).values
        gains = turning_point_gains(values) if self.turning_points else step_gains(values)
        mask = ~gains.isnan() & batch.rollouts.mask & batch.rollout_mask[:, None]
        step_advantages = turn_advantages(gains.nan_to_num(0.0), mask, batch.rollouts.group, scale=self.scale)
        return self.outcome * advantages + self.weight * step_advantages


class BranchCredit(Shaper):
    """Credit of a denoising step from branches: rollouts of a group share the state before the step and differ only in
    its noise.

    Each branch is completed without further noise, and its reward is normalized among the branches of the step, so a
    difference is due to that step alone. With `denoising.likelihood.trunk=ode` and `step_weight=std` this is
    TempFlow-GRPO; its seed group is a group here.
    """

    equation: ClassVar[str] = (
        "A_k = outcome A + weight (R_k - mean) / (std + eps), over the branches of step k in the group, R_k the reward "
        "of the branch's ODE completion"
    )
    source: ClassVar[str] = "TempFlow-GRPO, arXiv 2508.04324, with one seed a group"
    test: ClassVar[str] = "tests/joints/test_branch_credit.py"
    type: str = "branch_credit"
    weight: float = option(1.0, "weight of the steps' advantages", ge=0)
    outcome: float = option(0.0, "weight of the algorithm's own advantage of the rollout", ge=0)
    scale: Literal["group_std", "none"] = option("group_std", "divide differences by the std of the group, or not")

    @property
    def needs(self) -> Needs:
        return Needs(measurements=(CandidateCompletions(),))

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        """Returns outcome x the advantages + weight x the rewards of the branches' completions, normalized among the
        branches of the step in the group; [rollout, decision]."""
        from mmrl.core.turns import turn_advantages

        rewards = batch.measured(CandidateCompletions()).values
        mask = ~rewards.isnan() & batch.rollouts.mask & batch.rollout_mask[:, None]
        step_advantages = turn_advantages(rewards.nan_to_num(0.0), mask, batch.rollouts.group, scale=self.scale)
        return self.outcome * advantages + self.weight * step_advantages


PROMPT_WIDTH = 64  # buckets of the hashed word counts of prompts


class LatentValues(Shaper):
    """Credit of segments of the denoising chain from a small value network V(x_t, t, prompt), which is trained online.

    A segment gets its gain in value, normalized among the same segment of the group's rollouts; the last segment ends
    with the reward. Unlike `step_gains` it needs no completions. With eta above 0, V estimates the tilted value
    (1 / eta) log E exp(eta r).
    """

    equation: ClassVar[str] = (
        "V = argmin E[e^z - z - 1], z = eta (r - V), so V = (1 / eta) log E exp(eta r); d_k = V(end of segment k) - "
        "V(its beginning), V(end of the chain) = r; A_k = outcome A + weight (d_k - mean) / (std + eps), by group"
    )
    source: ClassVar[str] = "reconstructed from VRPO (Value-as-Return, ICML 2026): values of short segments as returns"
    test: ClassVar[str] = "tests/joints/test_latent_values.py"
    type: str = "latent_values"
    every: int = option(1, "decisions per segment", unit="steps", ge=1)
    eta: float = option(0.0, "eta of the tilted value; 0: the mean", ge=0)
    weight: float = option(1.0, "weight of the segments' advantages", ge=0)
    outcome: float = option(0.0, "weight of the algorithm's own advantage of the rollout", ge=0)
    scale: Literal["group_std", "none"] = option("group_std", "divide differences by the std of the group, or not")
    width: int = option(64, "width of the network's hidden layers", ge=1)
    lr: float = option(1e-3, "learning rate of the network (Adam)", gt=0)
    passes: int = option(4, "training epochs over the latents of a step", ge=0)
    batch_size: int = option(256, "latents per update of the network", ge=1)
    warm_up: int = option(
        5, "first steps, in which the network is trained but advantages are not changed", unit="steps", ge=0
    )

    @property
    def needs(self) -> Needs:
        return Needs(measurements=(PooledLatents(),))

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        """Returns outcome x the advantages + weight x the segments' gains in value, normalized by group, and then
        trains the network on these rollouts; [rollout, decision]. In the first `warm_up` steps the advantages are
        unchanged."""
        import torch

        from mmrl.core.turns import turn_advantages
        from mmrl.core.values import ValueNetwork, word_counts

        latents = batch.measured(PooledLatents()).values.double()
        text = torch.stack([word_counts(sample.prompt.text, PROMPT_WIDTH) for sample in batch.rollouts.samples])
        x = torch.cat([latents, text[:, None].expand(-1, latents.shape[1], -1)], -1)
        memory = batch.memory.setdefault(self.key, {"calls": 0})  # kept across steps, and in checkpoints
        network = batch.modules.get(self.key, lambda: ValueNetwork(x.shape[-1], self.width, seed=0), self.lr)
        value = network.predict(x.flatten(0, 1)).view(x.shape[:2]).float()
        combined = batch.combined_rewards()
        rewards = batch.local(combined)
        gains = segment_returns(value, rewards, self.every)
        batch.report(self._learn(network, x, combined, batch))
        memory["calls"] += 1
        if memory["calls"] <= self.warm_up:
            return advantages
        mask = ~gains.isnan() & batch.rollouts.mask & batch.rollout_mask[:, None]
        step_advantages = turn_advantages(gains.nan_to_num(0.0), mask, batch.rollouts.group, scale=self.scale)
        return self.outcome * advantages + self.weight * step_advantages

    def _learn(self, network: AuxiliaryModule, x: Tensor, combined: Tensor, batch: Batch) -> dict[str, float]:
        """Trains the network on the latents of all ranks, so that it stays equal on all of them. Returns metrics.

        x: [rollout, decision, feature] of this rank; combined: [rollout], the rewards of all ranks.
        """
        from mmrl.core.values import fit_values

        states = batch.gather(x)
        outcome = combined[:, None].expand(states.shape[:2]).flatten()
        scored = ~outcome.isnan()
        if not bool(scored.any()) or not self.passes:
            return {}
        loss = fit_values(
            network.module,
            network.update,
            states.flatten(0, 1)[scored],
            outcome[scored],
            eta=self.eta,
            passes=self.passes,
            size=self.batch_size,
            seed=network.updates,
        )
        return {"latent_values/loss": loss}


def segment_returns(value: Tensor, outcome: Tensor, every: int) -> Tensor:
    """Computes the gain in value over each decision's segment, [rollout, decision].

    value: [rollout, decision], before each decision; outcome: [rollout], which is the value at the end of the chain;
    every: decisions per segment.
    """
    import torch

    num_decisions = value.shape[1]
    first = torch.arange(num_decisions) // every * every  # [decision], the first decision of its segment
    with_outcome = torch.cat([value, outcome[:, None].to(value)], 1)
    return with_outcome[:, (first + every).clamp(max=num_decisions)] - value[:, first]
