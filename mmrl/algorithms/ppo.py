"""Proximal policy optimization with a critic."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.algorithms.base import Reduction
from mmrl.algorithms.ratio import RatioAlgorithm
from mmrl.collection import CollectionSettings, Independent
from mmrl.needs import Needs
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.facts import Batch
    from mmrl.rollouts import Replay, Rollouts, Steps


class PPO(RatioAlgorithm):
    """A critic says what to expect of an observation, and advantages are generalised estimates of how much better an
    action was. Time passes by looks at the scene: one chunk of actions is one step."""

    equation: ClassVar[str] = (
        "A_t = sum_l (gamma lam)^l delta_{t+l}, standardised; delta_t = r_t + gamma V_{t+1} - V_t; "
        "surrogate(r, A) + value_coefficient (V - (A + V_old))^2"
    )
    source: ClassVar[str] = "arXiv 1707.06347; GAE: arXiv 1506.02438"
    test: ClassVar[str] = "tests/joints/test_ppo.py"
    collects: ClassVar[Literal["groups", "rollouts", "demonstrations"]] = "rollouts"
    collection: ClassVar[CollectionSettings] = Independent
    type: str = "ppo"
    gamma: float = option(0.99, "discount of a step", gt=0, le=1)
    lam: float = option(0.95, "1: returns; towards 0: the critic's word", ge=0, le=1)
    value_coefficient: float = option(0.5, "weight of the critic's loss", gt=0)
    value_clip: float | None = option(
        None, "how far a value may move from what it was before its loss stops to fall; null: as far as it likes", gt=0
    )
    simulator_reward: float = option(0.0, "weight of the simulator's own reward, beside task.rewards", ge=0)

    @property
    def own_needs(self) -> Needs:
        return super().own_needs | Needs(offers=frozenset({"critic"}), critic=True)

    def advantages(self, batch: Batch) -> Tensor:
        """[rollout, decision], standardised over the steps of all ranks; leaves the critic's targets in the rollouts.

        The reward of the task comes with an episode's last step, the simulator's own with each.
        """
        import torch

        from mmrl.core.advantages import gae

        rollouts, steps = batch.rollouts, _steps(batch.rollouts)
        last = torch.arange(steps.mask.shape[1]) == steps.mask.sum(1, keepdim=True) - 1
        total = batch.mine(batch.combined()).nan_to_num(0.0)
        values, steps.returns = gae(
            self.simulator_reward * steps.rewards + total[:, None].where(last, 0.0),
            steps.values,
            steps.terminated,
            torch.zeros_like(steps.mask),
            gamma=self.gamma,
            lam=self.lam,
            mask=steps.mask,
            bootstrap=steps.bootstrap,
        )
        counted = batch.steps(values, steps.mask)
        spread = counted.std() if len(counted) > 1 else torch.zeros(())
        values = ((values - counted.mean()) / (spread + 1e-6)).where(steps.mask, 0.0)
        batch.report(
            {
                "critic/value": float(batch.steps(steps.values, steps.mask).mean()),
                "critic/return": float(batch.steps(steps.returns, steps.mask).mean()),
            }
        )
        return values.repeat_interleave(rollouts.mask.shape[1] // steps.mask.shape[1], 1)

    def objective(self, micro: Rollouts, replay: Replay, over: Reduction) -> tuple[Tensor, dict[str, Tensor]]:
        from mmrl.core.reduce import reduce

        loss, stats = super().objective(micro, replay, over)
        assert replay.value is not None
        error = self._value_error(_steps(micro), replay.value)
        known = _steps(micro).mask.to(error.device)
        stats["critic/error"] = error.detach()
        return loss + self.value_coefficient * reduce(error, known, total=over.totals["steps"]), stats

    def _value_error(self, steps: Steps, value: Tensor) -> Tensor:
        """Squared error of the critic, [rollout, step]. Clipped, the worse of the errors of the value and of the value
        kept near what it was (arXiv 1707.06347's released code)."""
        import torch

        assert steps.returns is not None
        returns, before = steps.returns.to(value.device), steps.values.to(value.device)
        error = (value - returns).square()
        if self.value_clip is None:
            return error
        near = before + (value - before).clamp(-self.value_clip, self.value_clip)
        return torch.maximum(error, (near - returns).square())

    def denominators(self, micro: Rollouts) -> dict[str, Tensor]:
        return super().denominators(micro) | {"steps": _steps(micro).mask.sum()}

    def counted(self, name: str, micro: Rollouts) -> Tensor:
        return _steps(micro).mask if name.startswith("critic/") else micro.mask


def _steps(rollouts: Rollouts) -> Steps:
    from mmrl.rollouts import Steps

    found = rollouts.extras["steps"]
    assert isinstance(found, Steps)
    return found
