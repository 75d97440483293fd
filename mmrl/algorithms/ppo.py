"""Proximal policy optimization with a critic."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.algorithms.algorithm import Reduction
from mmrl.algorithms.ratio import RatioAlgorithm
from mmrl.algorithms.trace_decay import ConstantDecay, TraceDecay
from mmrl.collection.settings import CollectionSettings, Independent
from mmrl.protocols.abilities import Stepwise
from mmrl.protocols.critic import CriticSettings, SharedCritic
from mmrl.protocols.offers import Offer
from mmrl.protocols.requirements import Capabilities, Needs
from mmrl.settings import option
from mmrl.terms.reward_kl import RewardKL

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from mmrl.protocols.batch import Batch
    from mmrl.protocols.job import JobConfig
    from mmrl.rollouts import Replay, Rollouts, Steps


class PPO(RatioAlgorithm):
    """Proximal policy optimisation with a critic and generalised advantage estimates. A time step is a policy step with
    its chunk of actions, a token of a response, or a turn of a conversation, whose value is that of its first token and
    whose rewards are those of its environment, with the weight simulator_reward. Where a model unmasks several tokens
    at once, in any order, a time step is a step of unmasking: its reward and value are means over its tokens, and a
    token differs from its step by its own reward and value (TraceRL)."""

    equation: ClassVar[str] = (
        "A_t = sum_l (gamma lam)^l delta_{t+l}, standardised; delta_t = r_t + gamma V_{t+1} - V_t; "
        "surrogate(r, A) + value_coefficient (V - (A + V_old))^2, this A with value_lam; of traces "
        "A_j = A_t + (r_j - r_t) - (V_j - V_t) for token j of step t, r_t and V_t means over the tokens of t"
    )
    source: ClassVar[str] = (
        "arXiv 1707.06347; GAE: arXiv 1506.02438; over traces: TraceRL, arXiv 2509.06949; value_lam and a lambda by "
        "length: VAPO, arXiv 2504.05118, and arXiv 2503.01491"
    )
    test: ClassVar[str] = "tests/joints/test_ppo.py"
    collects: ClassVar[Literal["groups", "rollouts", "demonstrations"]] = "rollouts"
    collection: ClassVar[CollectionSettings] = Independent
    compared: ClassVar[str] = "volcengine/verl@b178a3cd"
    type: str = "ppo"
    gamma: float = option(0.99, "discount factor", gt=0, le=1)
    lam: TraceDecay = option(
        ConstantDecay(), "lambda of the policy's advantages. 1: returns; towards 0: the critic's values"
    )
    value_lam: float | None = option(None, "lambda of the critic's targets, 1: returns; null: lam", ge=0, le=1)
    value_coefficient: float = option(0.5, "weight of the critic's loss", gt=0)
    value_clip: float | None = option(
        None, "how far a value may move from the old value before its loss is clipped; null: no clip", gt=0
    )
    simulator_reward: float = option(0.0, "weight of the simulator's own reward, beside task.rewards", ge=0)
    reward_kl: RewardKL | None = option(
        None, "price of the divergence from the reference, paid by the reward of each decision, as in RLHF; null: none"
    )
    critic: CriticSettings = option(SharedCritic(), "estimates the value of an observation")
    horizon: Literal["infinite", "finite"] = option(
        "infinite",
        "finite: the estimates over 1, 2, ... steps are weighted by lam^n only as far as the episode was seen, and the "
        "weights sum to 1; infinite: all weight beyond its end goes to the longest estimate",
    )
    bootstrap: Literal["time_limit", "every_end"] = option(
        "time_limit",
        "where the critic's value stands for the return after the end: where the time limit cut an episode, or also "
        "where it ended by itself, so that ending early is not a loss under a reward of every step",
    )
    standardise: Literal["batch", "minibatch"] = option(
        "batch", "over which advantages are standardised: a step's, or an optimizer step's"
    )
    time_step: Literal["decision", "turn"] = option(
        "decision",
        "of conversations: each token that the policy chose is a time step, or each turn; gamma and lam are by it",
    )
    shuffle: Literal["episodes", "steps"] = option(
        "episodes",
        "what minibatches are drawn from: whole episodes, or single steps of them (which engine.micro_batch counts)",
    )

    @property
    def base_needs(self) -> Needs:
        offers: set[Offer] = {"critic", Stepwise} if self.by_step else {"critic"}
        if self.time_step == "turn":
            offers |= {"turns"}
        needs = super().base_needs | Needs(offers=frozenset(offers), critic=self.critic)
        return needs if self.reward_kl is None else needs | self.reward_kl.needs

    @property
    def by_step(self) -> bool:
        return self.shuffle == "steps"

    def check(self, config: JobConfig, offered: Capabilities) -> None:
        super().check(config, offered)
        if not self.by_step:
            return
        if self.reduce_mode != "token_mean" or self.level != "decision":
            raise ValueError(
                "algorithm.shuffle=steps takes episodes apart: it needs algorithm.reduce=token_mean and "
                "algorithm.level=decision"
            )
        for key, needs in self.parts():
            if needs.statistics or needs.whole_groups or needs.prepared:
                raise ValueError(f"{key} needs whole episodes; use algorithm.shuffle=episodes")

    def advantages(self, batch: Batch) -> Tensor:
        """Computes advantages, [rollout, decision], standardised over the steps of all ranks unless `standardise` is
        minibatch; stores the critic's targets in the rollouts.

        The reward of the task is added to an episode's last step, the simulator's reward to every step, from which what
        `reward_kl` costs its decisions is taken. An unscored
        rollout gets the advantage 0, and is neither in the standardisation nor among the critic's targets.
        """
        import torch

        rollouts = batch.rollouts
        if "turns" in rollouts.extras:
            rollouts.extras["steps"] = steps_of_turns(rollouts, self.time_step)
        steps = _steps(rollouts)
        total = batch.local(batch.combined_rewards())
        steps.mask = steps.mask & ~total.isnan()[:, None]  # what could not be scored is not known to be worth 0
        moment, exists = moments_of(steps)
        last = moment == exists.sum(1, keepdim=True) - 1
        rewards = self.simulator_reward * steps.rewards + total[:, None].where(last & steps.mask, 0.0)
        if self.reward_kl is not None:
            costs = _summed(self.reward_kl.costs(batch), steps)
            rewards = rewards - costs.to(rewards).where(steps.mask, 0.0)
        estimates = self.estimates if steps.moment is None else self.estimates_of_traces
        values, steps.returns = estimates(rewards, steps)
        if self.standardise == "batch":
            counted = batch.gather_steps(values, steps.mask)
            spread = counted.std() if len(counted) > 1 else torch.zeros(())
            values = ((values - counted.mean()) / (spread + 1e-6)).where(steps.mask, 0.0)
        for name, column in (("value", steps.values), ("return", steps.returns)):
            if len(counted := batch.gather_steps(column, steps.mask)):
                batch.report({f"critic/{name}": float(counted.mean())})
        return _by_decision(values, rollouts)

    def estimates(self, rewards: Tensor, steps: Steps) -> tuple[Tensor, Tensor]:
        """Computes advantages before they are standardised, and the critic's targets; [rollout, step], of this rank."""
        advantages, returns = self.estimated_by(self.lam.of(steps.mask.sum(1)), rewards, steps)
        return advantages, returns if self.value_lam is None else self.estimated(rewards, steps, self.value_lam)[1]

    def estimated_by(self, lam: Tensor, rewards: Tensor, steps: Steps) -> tuple[Tensor, Tensor]:
        """Computes advantages and returns, [rollout, step]. lam: of each rollout, [rollout]."""
        import torch

        present = lam.unique().tolist()
        if len(present) == 1:
            return self.estimated(rewards, steps, present[0])
        advantages = torch.zeros_like(rewards + steps.values)
        returns = torch.zeros_like(advantages)
        for value in present:
            rows = lam == value
            advantages[rows], returns[rows] = self.estimated(rewards[rows], steps.select(rows), value)
        return advantages, returns

    def estimates_of_traces(self, rewards: Tensor, steps: Steps) -> tuple[Tensor, Tensor]:
        """Computes `estimates` where several decisions may be one step: estimates of the steps, whose rewards and
        values are means, plus the difference of each decision from its step."""
        from mmrl.core.credit import mean_by_moment
        from mmrl.rollouts import Steps

        moment, exists = moments_of(steps)
        earned, worth = (mean_by_moment(each, moment, steps.mask, exists.shape[1]) for each in (rewards, steps.values))
        advantages, returns = (
            part.gather(1, moment) for part in self.estimates(earned, Steps.from_decisions(exists, worth))
        )
        more = rewards - earned.gather(1, moment)
        apart = steps.values - worth.gather(1, moment)
        return (advantages + more - apart).where(steps.mask, 0.0), (returns + more).where(steps.mask, 0.0)

    def estimated(self, rewards: Tensor, steps: Steps, lam: float) -> tuple[Tensor, Tensor]:
        """Computes advantages and returns with one lambda, [rollout, step]."""
        import torch

        from mmrl.core.advantages import finite_gae, gae

        estimate = gae if self.horizon == "infinite" else finite_gae
        ends = steps.terminated if self.bootstrap == "time_limit" else torch.zeros_like(steps.terminated)
        return estimate(
            rewards,
            steps.values,
            ends,
            torch.zeros_like(steps.mask),
            gamma=self.gamma,
            lam=lam,
            mask=steps.mask,
            bootstrap=steps.bootstrap,
        )

    def prepare_minibatch(self, minibatch: Sequence[Rollouts], total: Callable[[Tensor], Tensor]) -> None:
        """Standardises advantages over the decisions that count, of scored rollouts."""
        import torch

        if self.standardise == "batch":
            return
        scored = [
            (micro.advantages.double(), micro.mask & _by_decision(_steps(micro).mask, micro))
            for micro in minibatch
            if micro.advantages is not None
        ]
        sums = torch.stack([torch.stack([a.where(m, 0.0).sum(), m.sum().double()]) for a, m in scored]).sum(0)
        added, count = total(sums).tolist()
        mean = added / max(count, 1.0)
        squares = torch.stack([(a - mean).square().where(m, 0.0).sum() for a, m in scored]).sum()
        spread = (float(total(squares)) / max(count - 1, 1.0)) ** 0.5
        for micro, (a, m) in zip(minibatch, scored, strict=True):
            micro.advantages = ((a - mean) / (spread + 1e-6)).where(m, 0.0).float()

    def objective(self, micro: Rollouts, replay: Replay, over: Reduction) -> tuple[Tensor, dict[str, Tensor]]:
        from mmrl.core.reduce import reduce

        loss, stats = super().objective(micro, replay, over)
        assert replay.value is not None
        error = self._value_error(_steps(micro), _steps(micro).at_step_starts(replay.value))
        counted = _steps(micro).mask.to(error.device)
        stats["critic/error"] = error.detach()
        return loss + self.value_coefficient * reduce(error, counted, total=over.totals["steps"]), stats

    def _value_error(self, steps: Steps, value: Tensor) -> Tensor:
        """Computes the critic's squared error, [rollout, step]. With `value_clip`, the larger of the errors of the
        value and of the value clipped around the old one (arXiv 1707.06347's released code)."""
        import torch

        assert steps.returns is not None
        returns, before = steps.returns.to(value.device), steps.values.to(value.device)
        error = (value - returns).square()
        if self.value_clip is None:
            return error
        clipped = before + (value - before).clamp(-self.value_clip, self.value_clip)
        return torch.maximum(error, (clipped - returns).square())

    def denominators(self, micro: Rollouts) -> dict[str, Tensor]:
        return super().denominators(micro) | {"steps": _steps(micro).mask.sum()}

    def counted_mask(self, name: str, micro: Rollouts) -> Tensor:
        return _steps(micro).mask if name.startswith("critic/") else micro.mask


def moments_of(steps: Steps) -> tuple[Tensor, Tensor]:
    """Returns the moment of each step, [rollout, step] int64 from 0 without gaps among counted steps; and which moments
    exist, [rollout, moment] bool."""
    import torch

    from mmrl.core.credit import dense_moments

    if steps.moment is None:
        return torch.arange(steps.mask.shape[1]).expand(steps.mask.shape), steps.mask
    return dense_moments(steps.moment, steps.mask)


def steps_of_turns(rollouts: Rollouts, time_step: str) -> Steps:
    """Returns the steps of conversations, from steps of all decisions: a turn each, or a token that the policy chose
    each, without the observations in between. The environment's reward of a turn is of its last step."""
    import torch.nn.functional as F

    from mmrl.rollouts import Turns

    turns, every = rollouts.extra("turns", Turns), _steps(rollouts)
    rewards = turns.rewards * turns.mask
    if time_step == "turn":
        steps = every.merge(turns.number)
        steps.rewards = rewards[:, : steps.mask.shape[1]].where(steps.mask, 0.0)
        return steps
    steps = every.merge((every.mask.cumsum(1) - 1).clamp(min=0))
    assert steps.begin is not None
    number = turns.number.gather(1, steps.begin).where(steps.mask, -1)
    following = F.pad(number[:, 1:], (0, 1), value=-1)
    steps.rewards = rewards.gather(1, number.clamp(min=0)).where(steps.mask & (number != following), 0.0)
    return steps


def _summed(costs: Tensor, steps: Steps) -> Tensor:
    """Returns sums over the decisions of each step, [rollout, decision] -> [rollout, step]."""
    if steps.index is None:
        return costs.view(*steps.mask.shape, -1).sum(2)
    return costs.new_zeros(steps.mask.shape).scatter_add(1, steps.index, costs)


def _by_decision(values: Tensor, rollouts: Rollouts) -> Tensor:
    """Repeats values of steps for each of their decisions, [rollout, step] -> [rollout, decision]."""
    return _steps(rollouts).by_decision(values, rollouts.mask.shape[1])


def _steps(rollouts: Rollouts) -> Steps:
    from mmrl.rollouts import Steps

    return rollouts.extra("steps", Steps)
