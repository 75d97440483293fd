"""Proximal policy optimization with a critic."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.algorithms.algorithm import ONE_UPDATE, REMEDY, Reduction, has_ratios_of_one
from mmrl.algorithms.ratio import RatioAlgorithm
from mmrl.algorithms.trace_decay import ConstantDecay, TraceDecay
from mmrl.collection.settings import CollectionSettings, Independent
from mmrl.protocols.abilities import Stepwise
from mmrl.protocols.critic import CriticSettings, SharedCritic
from mmrl.protocols.offers import Offer
from mmrl.protocols.requirements import Capabilities, Needs
from mmrl.settings import option
from mmrl.terms.reward_kl import RewardKL
from mmrl.terms.step_rewards import StepRewards

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from mmrl.protocols.batch import Batch
    from mmrl.protocols.job import JobConfig
    from mmrl.rollouts import Replay, Rollouts, Steps


class PPO(RatioAlgorithm):
    """Proximal policy optimization with a critic and generalized advantage estimation (GAE).

    A time step is a policy step of a robot (one chunk of actions), a token, or a turn of a conversation. A turn has the
    value of its first token, and the environment's reward with the weight simulator_reward. If a masked diffusion
    model unmasks several tokens at once, a time step is an unmasking step, whose reward and value are means over its
    tokens; a token's advantage also has the difference of its own reward and value from these means (TraceRL).
    """

    equation: ClassVar[str] = (
        "A_t = sum_l (gamma lam)^l delta_{t+l}, normalized; delta_t = r_t + gamma V_{t+1} - V_t; "
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
    type: str = "ppo"
    gamma: float = option(0.99, "discount per time step", gt=0, le=1)
    lam: TraceDecay = option(
        ConstantDecay(), "GAE lambda of the policy's advantages. 1: returns; toward 0: the critic's values"
    )
    value_lam: float | None = option(None, "lambda of the critic's targets, 1: returns; null: lam", ge=0, le=1)
    value_coefficient: float = option(0.5, "weight of the critic's loss", gt=0)
    value_clip: float | None = option(
        None, "clip range of the value around the old value, as in PPO's code; null: no clip", gt=0
    )
    simulator_reward: float = option(0.0, "weight of the simulator's own reward, which is added to task.rewards", ge=0)
    step_rewards: StepRewards | None = option(
        None, "rewards of single policy steps of a robot, from a judge of its observations for example; null: none"
    )
    reward_kl: RewardKL | None = option(
        None, "KL penalty from the reference in the reward of each decision, as in RLHF; null: none"
    )
    critic: CriticSettings = option(SharedCritic(), "the value network")
    horizon: Literal["infinite", "finite"] = option(
        "infinite",
        "infinite: standard GAE; finite: the n-step estimates within the recorded episode are weighted by lam^n, with "
        "weights that sum to 1 (ManiSkill's PPO)",
    )
    bootstrap: Literal["time_limit", "every_end"] = option(
        "time_limit",
        "where the critic's value replaces the return after the end. time_limit: of episodes cut by the time limit; "
        "every_end: of terminated ones too, so that ending early costs nothing under a reward per step",
    )
    standardise: Literal["batch", "minibatch"] = option(
        "batch", "normalize advantages over a training step (batch) or an optimizer step (minibatch)"
    )
    time_step: Literal["decision", "turn"] = option(
        "decision",
        "time step of conversations, for gamma and lam: a token of the policy (decision), or a turn",
    )
    shuffle: Literal["episodes", "steps"] = option(
        "episodes",
        "unit of minibatches: whole episodes, or single steps (engine.micro_batch then counts steps)",
    )

    def remarks(self, config: JobConfig) -> Iterable[str]:
        """Yields warnings about settings, also about a value_clip that cannot bind."""
        yield from super().remarks(config)
        if self.value_clip is not None and has_ratios_of_one(self, config):
            yield f"algorithm.value_clip {ONE_UPDATE}: the critic's values are still the old ones; {REMEDY}"

    @property
    def base_needs(self) -> Needs:
        offers: set[Offer] = {"critic", Stepwise} if self.by_step else {"critic"}
        if self.time_step == "turn":
            offers |= {"turns"}
        needs = super().base_needs | Needs(offers=frozenset(offers), critic=self.critic)
        for part in (self.reward_kl, self.step_rewards):
            needs = needs if part is None else needs | part.needs
        return needs

    def check_rewards(self, names: list[str]) -> None:
        super().check_rewards(names)
        if self.step_rewards is not None:
            self.step_rewards.check_rewards(names)

    @property
    def by_step(self) -> bool:
        return self.shuffle == "steps"

    def check(self, config: JobConfig, offered: Capabilities) -> None:
        """Raises ValueError if shuffle=steps splits episodes that `reduce`, `level` or a part of the algorithm needs
        whole."""
        super().check(config, offered)
        if not self.by_step:
            return
        if self.reduce_mode != "token_mean" or self.level != "decision":
            raise ValueError(
                "algorithm.shuffle=steps splits episodes, so it needs algorithm.reduce=token_mean and "
                f"algorithm.level=decision, not {self.reduce_mode} and {self.level}; set these, or "
                "algorithm.shuffle=episodes"
            )
        for key, needs in self.parts():
            if needs.statistics or needs.whole_groups or needs.prepared:
                raise ValueError(
                    f"{key} needs whole episodes, which algorithm.shuffle=steps splits; set it to episodes"
                )

    def advantages(self, batch: Batch) -> Tensor:
        """Computes advantages, [rollout, decision], and stores the critic's targets in the rollouts.

        The task's reward is added to the last time step of an episode, the simulator's reward and that of
        `step_rewards` to each one, and the KL penalties of `reward_kl` are subtracted. Advantages are normalized over
        the time steps of all ranks, unless `standardise` is minibatch. A rollout whose reward is unknown gets 0 and has
        no targets.
        """
        import torch

        rollouts = batch.rollouts
        if "turns" in rollouts.extras:
            rollouts.extras["steps"] = steps_of_turns(rollouts, self.time_step)
        steps = _steps(rollouts)
        total = batch.local(batch.combined_rewards())
        steps.mask = steps.mask & ~total.isnan()[:, None]  # an unknown reward is not a reward of 0
        moment, exists = moments_of(steps)
        last = moment == exists.sum(1, keepdim=True) - 1  # the steps of the last moment, since moments count from 0
        rewards = self.simulator_reward * steps.rewards + total[:, None].where(last & steps.mask, 0.0)
        if self.step_rewards is not None:
            rewards = rewards + self.step_rewards.of(batch, steps)
        if self.reward_kl is not None:
            penalties = _sum_by_step(self.reward_kl.costs(batch), steps)
            rewards = rewards - penalties.to(rewards).where(steps.mask, 0.0)
        compute = self.step_estimates if steps.moment is None else self.trace_estimates
        advantages, steps.returns = compute(rewards, steps)
        if self.standardise == "batch":
            known = batch.gather_steps(advantages, steps.mask)
            std = known.std() if len(known) > 1 else torch.zeros(())
            advantages = ((advantages - known.mean()) / (std + 1e-6)).where(steps.mask, 0.0)
        for name, column in (("value", steps.values), ("return", steps.returns)):
            if len(known := batch.gather_steps(column, steps.mask)):
                batch.report({f"critic/{name}": float(known.mean())})
        return _by_decision(advantages, rollouts)

    def step_estimates(self, rewards: Tensor, steps: Steps) -> tuple[Tensor, Tensor]:
        """Computes advantages before normalization, and the critic's targets; both [rollout, step], of this rank.

        rewards: [rollout, step].
        """
        advantages, returns = self._gae_per_rollout(self.lam.lambdas(steps.mask.sum(1)), rewards, steps)
        return advantages, returns if self.value_lam is None else self._gae(rewards, steps, self.value_lam)[1]

    def _gae_per_rollout(self, lam: Tensor, rewards: Tensor, steps: Steps) -> tuple[Tensor, Tensor]:
        """Computes advantages and returns, [rollout, step], with a lambda for each rollout, [rollout]."""
        import torch

        lambdas = lam.unique().tolist()
        if len(lambdas) == 1:
            return self._gae(rewards, steps, lambdas[0])
        advantages = torch.zeros_like(rewards + steps.values)  # the dtype of the sum
        returns = torch.zeros_like(advantages)
        for value in lambdas:
            rows = lam == value
            advantages[rows], returns[rows] = self._gae(rewards[rows], steps.select(rows), value)
        return advantages, returns

    def trace_estimates(self, rewards: Tensor, steps: Steps) -> tuple[Tensor, Tensor]:
        """Computes the same as `step_estimates` if several decisions were made at one unmasking step (moment).

        Estimates are computed for moments, whose rewards and values are means over their decisions. To a decision's
        estimates, the difference of its own reward and value from these means is added.
        """
        from mmrl.core.credit import mean_per_moment
        from mmrl.rollouts import Steps

        moment, exists = moments_of(steps)
        num_moments = exists.shape[1]
        mean_rewards = mean_per_moment(rewards, moment, steps.mask, num_moments)
        mean_values = mean_per_moment(steps.values, moment, steps.mask, num_moments)
        by_moment = self.step_estimates(mean_rewards, Steps.from_decisions(exists, mean_values))
        advantages, returns = (estimate.gather(1, moment) for estimate in by_moment)
        extra_reward = rewards - mean_rewards.gather(1, moment)
        extra_value = steps.values - mean_values.gather(1, moment)
        advantages = (advantages + extra_reward - extra_value).where(steps.mask, 0.0)
        return advantages, (returns + extra_reward).where(steps.mask, 0.0)

    def _gae(self, rewards: Tensor, steps: Steps, lam: float) -> tuple[Tensor, Tensor]:
        """Computes advantages and returns, [rollout, step], with one lambda."""
        import torch

        from mmrl.core.advantages import finite_gae, gae

        estimate = gae if self.horizon == "infinite" else finite_gae
        # every_end: the critic's value also replaces the return after terminated episodes, as if they were cut off
        terminated = steps.terminated if self.bootstrap == "time_limit" else torch.zeros_like(steps.terminated)
        return estimate(
            rewards,
            steps.values,
            terminated,
            torch.zeros_like(steps.mask),  # `truncated`: no episode is cut within its recorded steps
            gamma=self.gamma,
            lam=lam,
            mask=steps.mask,
            bootstrap=steps.bootstrap,
        )

    def prepare_minibatch(self, minibatch: Sequence[Rollouts], total: Callable[[Tensor], Tensor]) -> None:
        """Normalizes advantages over the masked-in decisions of rollouts with known rewards, if `standardise` is
        minibatch."""
        import torch

        if self.standardise == "batch":
            return
        pairs = [  # (advantages, mask) of each micro-batch, [rollout, decision]
            (micro.advantages.double(), micro.mask & _by_decision(_steps(micro).mask, micro))
            for micro in minibatch
            if micro.advantages is not None
        ]
        sums = torch.stack([torch.stack([a.where(m, 0.0).sum(), m.sum().double()]) for a, m in pairs]).sum(0)
        advantage_sum, count = total(sums).tolist()
        mean = advantage_sum / max(count, 1.0)
        squares = torch.stack([(a - mean).square().where(m, 0.0).sum() for a, m in pairs]).sum()
        std = (float(total(squares)) / max(count - 1, 1.0)) ** 0.5
        for micro, (a, m) in zip(minibatch, pairs, strict=True):
            micro.advantages = ((a - mean) / (std + 1e-6)).where(m, 0.0).float()

    def objective(self, micro: Rollouts, replay: Replay, reduction: Reduction) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes the surrogate's loss plus value_coefficient x the mean of the critic's squared errors, 0-d, and
        statistics."""
        from mmrl.core.reduce import reduce

        loss, stats = super().objective(micro, replay, reduction)
        assert replay.value is not None
        error = self._value_error(_steps(micro), _steps(micro).at_step_starts(replay.value))
        mask = _steps(micro).mask.to(error.device)
        stats["critic/error"] = error.detach()
        return loss + self.value_coefficient * reduce(error, mask, total=reduction.totals["steps"]), stats

    def _value_error(self, steps: Steps, value: Tensor) -> Tensor:
        """Computes the critic's squared error, [rollout, step].

        With `value_clip` it is the larger of the errors of the value and of the value clipped around the old one, as in
        the released code of arXiv 1707.06347.
        """
        import torch

        assert steps.returns is not None
        returns, old_value = steps.returns.to(value.device), steps.values.to(value.device)
        error = (value - returns).square()
        if self.value_clip is None:
            return error
        clipped = old_value + (value - old_value).clamp(-self.value_clip, self.value_clip)
        return torch.maximum(error, (clipped - returns).square())

    def denominators(self, micro: Rollouts) -> dict[str, Tensor]:
        return super().denominators(micro) | {"steps": _steps(micro).mask.sum()}

    def counted_mask(self, name: str, micro: Rollouts) -> Tensor:
        return _steps(micro).mask if name.startswith("critic/") else micro.mask


def moments_of(steps: Steps) -> tuple[Tensor, Tensor]:
    """Returns the moment of each step, [rollout, step] int64, and which moments exist, [rollout, moment] bool.

    A moment is the unmasking step at which a token was filled in, from 0 without gaps within the mask. Without moments,
    each step is a moment of its own.
    """
    import torch

    from mmrl.core.credit import renumber_moments

    if steps.moment is None:
        return torch.arange(steps.mask.shape[1]).expand(steps.mask.shape), steps.mask
    return renumber_moments(steps.moment, steps.mask)


def steps_of_turns(rollouts: Rollouts, time_step: str) -> Steps:
    """Returns the time steps of conversations: turns, or tokens of the policy without the observations in between.

    time_step: turn or decision. The last time step of a turn has the environment's reward of the turn.
    """
    import torch.nn.functional as F

    from mmrl.rollouts import Turns

    turns, all_steps = rollouts.extra("turns", Turns), _steps(rollouts)
    rewards = turns.rewards * turns.mask
    if time_step == "turn":
        steps = all_steps.merge(turns.number)
        steps.rewards = rewards[:, : steps.mask.shape[1]].where(steps.mask, 0.0)
        return steps
    # a step number for each token of the policy; observations after a token have the token's number
    steps = all_steps.merge((all_steps.mask.cumsum(1) - 1).clamp(min=0))
    assert steps.begin is not None
    turn = turns.number.gather(1, steps.begin).where(steps.mask, -1)
    next_turn = F.pad(turn[:, 1:], (0, 1), value=-1)  # differs from `turn` at the last token of a turn
    steps.rewards = rewards.gather(1, turn.clamp(min=0)).where(steps.mask & (turn != next_turn), 0.0)
    return steps


def _sum_by_step(values: Tensor, steps: Steps) -> Tensor:
    """Sums values [rollout, decision] over the decisions of each time step. Returns [rollout, step]."""
    if steps.index is None:
        return values.view(*steps.mask.shape, -1).sum(2)
    return values.new_zeros(steps.mask.shape).scatter_add(1, steps.index, values)


def _by_decision(values: Tensor, rollouts: Rollouts) -> Tensor:
    """Repeats values [rollout, step] of time steps for each of their decisions. Returns [rollout, decision]."""
    return _steps(rollouts).by_decision(values, rollouts.mask.shape[1])


def _steps(rollouts: Rollouts) -> Steps:
    """Returns the time steps of the rollouts, which the trainer stored in `extras`."""
    from mmrl.rollouts import Steps

    return rollouts.extra("steps", Steps)
