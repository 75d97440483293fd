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
    """The gain of each stochastic step of the chain: the reward of the noise-free completion from its end, less that
    from its beginning, compared with the same step of the other rollouts of the group. A turning point, at which the
    chain turns towards its outcome, gets the gain of all steps from it on."""

    equation: ClassVar[str] = (
        "d_k = R_k - R_(k-1), R_k the reward of k steps and then the ODE, R_K the rollout's; s_k = sign(d_k) sign(R_K "
        "- R_0); where s_(k-1) < 0 < s_k and d_k (R_K - R_k) > 0 (first step: the latter alone) it is R_K - R_(k-1); "
        "A_k = outcome A + weight (d_k - mean) / (std + eps), by group"
    )
    source: ClassVar[str] = "TP-GRPO, arXiv 2602.06422, without its balance of positive and negative turning points"
    test: ClassVar[str] = "tests/joints/test_step_gains.py"
    type: str = "step_gains"
    turning_points: bool = option(True, "a step at which the chain turns gets all that comes after; false: none does")
    weight: float = option(1.0, "weight of the steps' advantages", ge=0)
    outcome: float = option(0.0, "weight of the advantages that the algorithm gave the whole rollout", ge=0)
    scale: Literal["group_std", "none"] = option("group_std", "scale by which differences are divided")

    @property
    def needs(self) -> Needs:
        return Needs(measurements=(Completions(),))

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        from mmrl.core.credit import gains, turned
        from mmrl.core.turns import turn_advantages

        worth = batch.measured(Completions()).values
        gained = turned(worth) if self.turning_points else gains(worth)
        counted = ~gained.isnan() & batch.rollouts.mask & batch.rollout_mask[:, None]
        shaped = turn_advantages(gained.nan_to_num(0.0), counted, batch.rollouts.group, scale=self.scale)
        return self.outcome * advantages + self.weight * shaped


class BranchCredit(Shaper):
    """At every step of the window the rollouts of a group branch off from one state, each with its noise, and every
    branch is completed without further noise. Its reward is compared with those of the other branches of the step: all
    else is equal, so the difference is due to that step. With `denoising.likelihood.trunk=ode` and `step_weight=std`
    this is TempFlow-GRPO; a group is its seed group."""

    equation: ClassVar[str] = (
        "A_k = outcome A + weight (R_k - mean) / (std + eps), over the branches of step k in the group, R_k the reward "
        "of the branch's ODE completion"
    )
    source: ClassVar[str] = "TempFlow-GRPO, arXiv 2508.04324, with one seed a group"
    test: ClassVar[str] = "tests/joints/test_branch_credit.py"
    type: str = "branch_credit"
    weight: float = option(1.0, "weight of the steps' advantages", ge=0)
    outcome: float = option(0.0, "weight of the advantages that the algorithm gave the whole rollout", ge=0)
    scale: Literal["group_std", "none"] = option("group_std", "scale by which differences are divided")

    @property
    def needs(self) -> Needs:
        return Needs(measurements=(CandidateCompletions(),))

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        from mmrl.core.turns import turn_advantages

        worth = batch.measured(CandidateCompletions()).values
        counted = ~worth.isnan() & batch.rollouts.mask & batch.rollout_mask[:, None]
        shaped = turn_advantages(worth.nan_to_num(0.0), counted, batch.rollouts.group, scale=self.scale)
        return self.outcome * advantages + self.weight * shaped


PROMPT_WIDTH = 64  # buckets of the hashed word counts of prompts


class LatentValues(Shaper):
    """A small value network V(x_t, t, prompt) on the latents of a chain is trained online. A segment of the chain gets
    its gain in value, compared with the same segment of the others of its group; the last one ends with the reward. So
    credit costs no completions. With eta above 0 the value is the tilted one, whose optimum is p exp(eta r)."""

    equation: ClassVar[str] = (
        "V = argmin E[e^z - z - 1], z = eta (r - V), so V = (1 / eta) log E exp(eta r); d_k = V(end of segment k) - "
        "V(its beginning), V(end of the chain) = r; A_k = outcome A + weight (d_k - mean) / (std + eps), by group"
    )
    source: ClassVar[str] = "reconstructed from VRPO (Value-as-Return, ICML 2026): values of short segments as returns"
    test: ClassVar[str] = "tests/joints/test_latent_values.py"
    type: str = "latent_values"
    every: int = option(1, "decisions of a segment", unit="steps", ge=1)
    eta: float = option(0.0, "of the tilted value; 0: the mean", ge=0)
    weight: float = option(1.0, "weight of the segments' advantages", ge=0)
    outcome: float = option(0.0, "weight of the advantages that the algorithm gave the whole rollout", ge=0)
    scale: Literal["group_std", "none"] = option("group_std", "scale by which differences are divided")
    width: int = option(64, "width of the network's hidden layers", ge=1)
    lr: float = option(1e-3, "learning rate of its optimizer (Adam)", gt=0)
    passes: int = option(4, "over the latents of a step, after their advantages", ge=0)
    batch_size: int = option(256, "latents of an update of the network", ge=1)
    warm_up: int = option(
        5, "steps in which only the network is trained, and advantages stay as they are", unit="steps", ge=0
    )

    @property
    def needs(self) -> Needs:
        return Needs(measurements=(PooledLatents(),))

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        """Shapes advantages by values from before the network is trained on these rollouts' rewards."""
        import torch

        from mmrl.core.turns import turn_advantages
        from mmrl.core.values import ValueNetwork, word_counts

        latents = batch.measured(PooledLatents()).values.double()
        text = torch.stack([word_counts(sample.prompt.text, PROMPT_WIDTH) for sample in batch.rollouts.samples])
        x = torch.cat([latents, text[:, None].expand(-1, latents.shape[1], -1)], -1)
        memory = batch.memory.setdefault(self.key, {"calls": 0})
        network = batch.modules.get(self.key, lambda: ValueNetwork(x.shape[-1], self.width, 0), self.lr)
        value = network.predict(x.flatten(0, 1)).view(x.shape[:2]).float()
        combined = batch.combined_rewards()
        rewards = batch.local(combined)
        gains = segment_returns(value, rewards, self.every)
        batch.report(self._learn(network, x, combined, batch))
        memory["calls"] += 1
        if memory["calls"] <= self.warm_up:
            return advantages
        counted = ~gains.isnan() & batch.rollouts.mask & batch.rollout_mask[:, None]
        shaped = turn_advantages(gains.nan_to_num(0.0), counted, batch.rollouts.group, scale=self.scale)
        return self.outcome * advantages + self.weight * shaped

    def _learn(self, network: AuxiliaryModule, x: Tensor, combined: Tensor, batch: Batch) -> dict[str, float]:
        """Trains the network on the latents of all ranks, so that it stays equal on them."""
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
    """Computes the gain of each decision's segment, [rollout, decision]: the value at its end less that at its
    beginning; at the end of the chain the value is the outcome. value: [rollout, decision] before each decision;
    outcome: [rollout]."""
    import torch

    count = value.shape[1]
    first = torch.arange(count) // every * every
    ends = torch.cat([value, outcome[:, None].to(value)], 1)
    return ends[:, (first + every).clamp(max=count)] - value[:, first]
