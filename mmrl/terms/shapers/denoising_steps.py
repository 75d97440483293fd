"""Credit of denoising steps."""

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
    """What each stochastic step of the chain added: the reward of where its end leads without further noise, less that
    of its beginning; compared with the same step of the other rollouts of the group. A step at which the chain turns
    towards its outcome gets all that comes after its beginning."""

    equation: ClassVar[str] = (
        "d_k = R_k - R_(k-1), R_k the reward of k steps and then the ODE, R_K the rollout's; s_k = sign(d_k) sign(R_K "
        "- R_0); where s_(k-1) < 0 < s_k and d_k (R_K - R_k) > 0 (first step: the latter alone) it is R_K - R_(k-1); "
        "A_k = outcome A + weight (d_k - mean) / (std + eps), by group"
    )
    source: ClassVar[str] = "TP-GRPO, arXiv 2602.06422, without its balance of positive and negative turning points"
    test: ClassVar[str] = "tests/joints/test_step_gains.py"
    type: str = "step_gains"
    turning_points: bool = option(True, "a step at which the chain turns gets all that comes after; false: none does")
    weight: float = option(1.0, "of the steps' advantages", ge=0)
    outcome: float = option(0.0, "weight of the advantages that the algorithm gave the whole rollout", ge=0)
    scale: Literal["group_std", "none"] = option("group_std", "what differences are divided by")

    @property
    def needs(self) -> Needs:
        return Needs(measurements=(Completions(),))

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        from mmrl.core.credit import gains, turned
        from mmrl.core.turns import turn_advantages

        worth = batch.measured(Completions()).values
        found = turned(worth) if self.turning_points else gains(worth)
        known = ~found.isnan() & batch.rollouts.mask & batch.kept[:, None]
        own = turn_advantages(found.nan_to_num(0.0), known, batch.rollouts.group, scale=self.scale)
        return self.outcome * advantages + self.weight * own


class BranchCredit(Shaper):
    """At every step of the window the rollouts of a group branch off from one state, each with noise of its own, and
    every branch is led to its end without further noise. What it earns is compared with the other branches of the step:
    all else is equal, so that the difference is that step's own. With `denoising.likelihood.trunk=ode` and
    `step_weight=std` this is TempFlow-GRPO; a group is its seed group."""

    equation: ClassVar[str] = (
        "A_k = outcome A + weight (R_k - mean) / (std + eps), over the branches of step k in the group, R_k the reward "
        "of the branch's ODE completion"
    )
    source: ClassVar[str] = "TempFlow-GRPO, arXiv 2508.04324, with one seed a group"
    test: ClassVar[str] = "tests/joints/test_branch_credit.py"
    type: str = "branch_credit"
    weight: float = option(1.0, "of the steps' advantages", ge=0)
    outcome: float = option(0.0, "weight of the advantages that the algorithm gave the whole rollout", ge=0)
    scale: Literal["group_std", "none"] = option("group_std", "what differences are divided by")

    @property
    def needs(self) -> Needs:
        return Needs(measurements=(CandidateCompletions(),))

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        from mmrl.core.turns import turn_advantages

        worth = batch.measured(CandidateCompletions()).values
        known = ~worth.isnan() & batch.rollouts.mask & batch.kept[:, None]
        own = turn_advantages(worth.nan_to_num(0.0), known, batch.rollouts.group, scale=self.scale)
        return self.outcome * advantages + self.weight * own


WORDS = 64  # places that the words of prompts are counted in


class LatentValues(Shaper):
    """A small network learns on line what the latent of a chain will earn, V(x_t, t, prompt). A segment of the chain
    gets what it added to that value, compared with the same segment of the others of its group; the last one ends with
    the reward. So credit costs no completions. With eta above 0 the value is the tilted one, of which the optimum is
    p exp(eta r)."""

    equation: ClassVar[str] = (
        "V = argmin E[e^z - z - 1], z = eta (r - V), so V = (1 / eta) log E exp(eta r); d_k = V(end of segment k) - "
        "V(its beginning), V(end of the chain) = r; A_k = outcome A + weight (d_k - mean) / (std + eps), by group"
    )
    source: ClassVar[str] = "reconstructed from VRPO (Value-as-Return, ICML 2026): values of short segments as returns"
    test: ClassVar[str] = "tests/joints/test_latent_values.py"
    type: str = "latent_values"
    every: int = option(1, "decisions of a segment", unit="steps", ge=1)
    eta: float = option(0.0, "of the tilted value; 0: the mean", ge=0)
    weight: float = option(1.0, "of the segments' advantages", ge=0)
    outcome: float = option(0.0, "weight of the advantages that the algorithm gave the whole rollout", ge=0)
    scale: Literal["group_std", "none"] = option("group_std", "what differences are divided by")
    width: int = option(64, "of the network's hidden layers", ge=1)
    lr: float = option(1e-3, "of its optimizer (Adam)", gt=0)
    passes: int = option(4, "over the latents of a step, after their advantages", ge=0)
    batch_size: int = option(256, "latents of an update of the network", ge=1)
    warm_up: int = option(5, "steps in which it only learns, and advantages stay as they are", unit="steps", ge=0)

    @property
    def needs(self) -> Needs:
        return Needs(measurements=(PooledLatents(),))

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        """The network is asked before it learns from these rollouts: it has not seen their rewards."""
        import torch

        from mmrl.core.turns import turn_advantages
        from mmrl.core.values import ValueNetwork, word_counts

        read = batch.measured(PooledLatents()).values.double()
        words = torch.stack([word_counts(sample.prompt.text, WORDS) for sample in batch.rollouts.samples])
        x = torch.cat([read, words[:, None].expand(-1, read.shape[1], -1)], -1)
        memory = batch.memory.setdefault(self.key, {"calls": 0})
        network = batch.modules.get(self.key, lambda: ValueNetwork(x.shape[-1], self.width, 0), self.lr)
        value = network.ask(x.flatten(0, 1)).view(x.shape[:2]).float()
        everyone = batch.combined()
        own = batch.mine(everyone)
        gains = segment_returns(value, own, self.every)
        batch.report(self._learn(network, x, everyone, batch))
        memory["calls"] += 1
        if memory["calls"] <= self.warm_up:
            return advantages
        known = ~gains.isnan() & batch.rollouts.mask & batch.kept[:, None]
        found = turn_advantages(gains.nan_to_num(0.0), known, batch.rollouts.group, scale=self.scale)
        return self.outcome * advantages + self.weight * found

    def _learn(self, network: AuxiliaryModule, x: Tensor, everyone: Tensor, batch: Batch) -> dict[str, float]:
        """From the latents of all ranks, so that they all learn the same."""
        from mmrl.core.values import fit_values

        states = batch.everyone(x)
        outcome = everyone[:, None].expand(states.shape[:2]).flatten()
        known = ~outcome.isnan()
        if not bool(known.any()) or not self.passes:
            return {}
        loss = fit_values(
            network.module,
            network.update,
            states.flatten(0, 1)[known],
            outcome[known],
            eta=self.eta,
            passes=self.passes,
            size=self.batch_size,
            seed=network.updates,
        )
        return {"latent_values/loss": loss}


def segment_returns(value: Tensor, outcome: Tensor, every: int) -> Tensor:
    """[rollout, decision] what the segment that a decision is in added: its end's value less its beginning's, the
    chain's end being its outcome. value: [rollout, decision] before each decision; outcome: [rollout]."""
    import torch

    count = value.shape[1]
    first = torch.arange(count) // every * every
    ends = torch.cat([value, outcome[:, None].to(value)], 1)
    return ends[:, (first + every).clamp(max=count)] - value[:, first]
