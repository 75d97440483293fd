"""What becomes of responses that go on anew from inside, and what that says of their segments."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mmrl.core.advantages import combined_reward
from mmrl.core.credit import segment_gains
from mmrl.protocols.parts import Continuing, Task
from mmrl.protocols.requirements import Continuations
from mmrl.rollouts import Rollouts
from mmrl.runtime.seeds import continuation_seeds


def continued(
    policy: Continuing, task: Task, batch: Rollouts, asked: Continuations, seed: int, most: Callable[[int], int]
) -> Tensor:
    """[rollout, decision]: what the segment of `asked.every` decisions that a decision belongs to added to the reward
    that is expected. That is the mean reward of what follows the segment's end, less that of what follows its
    beginning; at the beginning of a response it is the mean of its group, at its end its own reward.

    batch: scored rollouts in whole groups. most: the largest of a number over the ranks.
    """
    assert batch.rewards is not None
    weights, lengths = torch.tensor(task.reward_weights), batch.mask.sum(1)
    own = combined_reward(batch.rewards, weights)
    worth = torch.full((len(batch), -(-batch.mask.shape[1] // asked.every)), torch.nan)
    worth[:, 0] = torch.stack([own[batch.group == group].nanmean() for group in batch.group])
    cuts = [(row, cut) for row in range(len(batch)) for cut in range(asked.every, int(lengths[row]), asked.every)]
    if most(len(cuts)):
        chosen = cuts or [(0, 0)]  # ranks may have to generate together
        rows = torch.tensor([row for row, _ in chosen]).repeat_interleave(asked.count)
        members = [int((batch.group[:row] == batch.group[row]).sum()) for row, _ in chosen]
        seeds = [
            number
            for (row, cut), member in zip(chosen, members, strict=True)
            for number in continuation_seeds(seed, int(batch.group[row]), member, cut, asked.count)
        ]
        places = [cut for _, cut in chosen for _ in range(asked.count)]
        made = policy.continued(batch.select(rows), places, seeds)
        earned = combined_reward(task.score(made.samples, torch.arange(len(rows)) // asked.count), weights)
        for (row, cut), value in zip(cuts, earned.view(-1, asked.count).nanmean(1)[: len(cuts)], strict=True):
            worth[row, cut // asked.every] = value
    return segment_gains(worth, own, batch.mask, every=asked.every)
