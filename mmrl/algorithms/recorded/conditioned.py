"""Imitation of recorded episodes under prompts that say which steps were good."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import PrivateAttr

from mmrl.algorithms.recorded.recorded import RecordedSteps
from mmrl.protocols.abilities import AdvantageLabelling
from mmrl.protocols.requirements import Needs
from mmrl.settings import option
from mmrl.terms.losses.advantage_weighted import check_returns

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.engine import Ranks
    from mmrl.protocols.parts import Policy
    from mmrl.rollouts import Prompt, Replay, Rollouts


class AdvantageConditioned(RecordedSteps):
    """Imitation of recorded steps, including failures, under a prompt with a label (action.labels) that says whether
    the step's return is higher than a critic expects. New episodes are then played under the label of good steps. The
    critic learns from prompts without a label, which a share of the steps has."""

    equation: ClassVar[str] = (
        "-logp(a | s, label) + value_coefficient |expectile - 1[R < V]| (R - V)^2 of steps without a label; good where "
        "R - V(s) is among the largest `positive` of the batch"
    )
    source: ClassVar[str] = (
        "after RECAP of pi*0.6, arXiv 2511.14759: its labels and their dropout; without its distributional critic and "
        "its guidance"
    )
    test: ClassVar[str] = "tests/whole_runs/test_recorded_episodes.py"
    type: str = "advantage_conditioned"
    positive: float = option(0.3, "share of a rank's batch whose label is that of good steps", gt=0, lt=1)
    dropout: float = option(0.3, "chance that a step has no label", gt=0, lt=1)
    _policy: Any = PrivateAttr(None)

    @property
    def base_needs(self) -> Needs:
        return super().base_needs | Needs(offers=frozenset({AdvantageLabelling}))

    def start(self, policy: Policy, engine: Ranks) -> None:
        self._policy = policy

    def prepare_demonstrations(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Returns the prompts with metadata["label"]: the policy's label of good steps for the share `positive` whose
        returns exceed the critic's values most, else that of bad steps, or "" where the label is dropped. Raises
        UserError like `check_returns`."""
        import torch

        check_returns(f"algorithm.type={self.type}", prompts)
        returns = self.returns.of(prompts)
        good, bad = self._policy.advantage_labels
        with torch.no_grad():
            # one seed for all, since only the critic's values are read
            steps = self._policy.demonstrate(list(prompts), [0] * len(prompts))
            differences = returns - self._policy.replay(steps, self._policy.module).value[:, 0].cpu()
        bound = differences.quantile(1 - self.positive)
        labelled = []
        for prompt, difference in zip(prompts, differences.tolist(), strict=True):
            # The seed depends on the critic's value, which changes with the weights: a step that is used again gets a
            # new draw, and a resumed run repeats its draws.
            drops = random.Random(f"{prompt.id} {difference!r}").random() < self.dropout
            label = "" if drops else good if difference > bound else bad
            labelled.append(replace(prompt, metadata={**prompt.metadata, "label": label}))
        return labelled

    def valued(self, micro: Rollouts) -> Tensor:
        return micro.mask.any(1) & (self._label_column(micro) == 0)

    def loss(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        label = self._label_column(micro).to(replay.logp)[:, None].expand(replay.logp.shape)
        stats = {"good": (label == 1).to(replay.logp), "unlabelled": (label == 0).to(replay.logp)}
        return -replay.logp, {f"advantage_conditioned/{name}": column for name, column in stats.items()}

    def _label_column(self, micro: Rollouts) -> Tensor:
        """Returns 1 for steps that are labelled good, -1 for bad ones, 0 for those without a label; [rollout] int64."""
        import torch

        good, _ = self._policy.advantage_labels
        labels = [sample.prompt.metadata["label"] for sample in micro.samples]
        return torch.tensor([0 if label == "" else 1 if label == good else -1 for label in labels])
