"""Masks of decisions and of rollouts, from their keys to what is learned from."""

from dataclasses import replace

import pytest
import torch

from tests.joints.parts import Table, close

ONE = ["rollout.prompts=1", "algorithm.scale=none"]


@pytest.mark.parametrize(("budget", "kept"), [(1, 1), (3, 3), (5, 5), (99, 5)])
def test_token_budget(given, budget, kept):
    table = Table([[-1.0] * 3, [-1.0] * 2], rewards=[2.0, 0.0])
    made = given(table, *ONE, f"algorithm.masks=[{{type: token_budget, budget: {budget}}}]")
    mask = made.prepare().mask
    assert int(mask.sum()) == kept and not mask[1, 2]
    made.learn()
    close(made.gradient(), torch.tensor([[-1.0], [1.0]]) * mask / kept)


def test_the_budget_is_over_all_ranks_and_drawn_anew_each_step(given):
    table = Table([[-1.0] * 8] * 6, group=[0] * 3 + [1] * 3, rewards=[1.0, 0.0, 2.0] * 2)
    options = ["rollout.group_size=3", "algorithm.masks=[{type: token_budget, budget: 20}]", "algorithm.scale=none"]
    masks = [given(table, *options, "rollout.prompts=4", world=2).prepare(step=step).mask for step in (0, 0, 1)]
    assert int(masks[0].sum()) == 10  # both ranks of the stand-in draw alike, and share the budget
    assert torch.equal(masks[0], masks[1]) and not torch.equal(masks[0], masks[2])


def filtered(given, mask, table):
    made = given(table, *ONE, f"rollout.group_size={len(table.group)}", f"algorithm.masks=[{mask}]")
    rollouts = made.prepare()
    made.learn()
    return made, rollouts


def test_the_shortest_of_a_group(given):
    # Lengths 3, 1, 2: kept are the second and the third, whose rewards 2 and 4 are around 3.
    table = Table([[-1.0] * 3, [-1.0], [-1.0] * 2], rewards=[90.0, 2.0, 4.0])
    made, rollouts = filtered(given, "{type: best_of_group, count: 2}", table)
    close(rollouts.advantages[:, 0], [0.0, -1.0, 1.0])
    assert rollouts.mask.sum(1).tolist() == [0, 1, 2]
    close(made.gradient(), [[0, 0, 0], [1 / 3, 0, 0], [-1 / 3, -1 / 3, 0]])


def test_the_best_reward_of_a_token(given):
    # 3, 2, 4 a token: kept are the first and the third.
    table = Table([[-1.0] * 3, [-1.0], [-1.0] * 2], rewards=[9.0, 2.0, 8.0])
    mask = "{type: best_of_group, count: 2, by: reward_per_length, highest: true}"
    close(filtered(given, mask, table)[1].advantages[:, 0], [0.5, 0.0, -0.5])


@pytest.mark.parametrize("highest", [True, False])
def test_what_is_unknown_comes_last_of_a_group(given, highest):
    """The first response has no accuracy: of three the two others are kept, whichever end is."""
    table = Table([[-1.0]] * 3, rewards=[9.0, 1.0, 2.0], accuracy=[float("nan"), 0.2, 0.8])
    mask = f"{{type: best_of_group, count: 2, by: accuracy, highest: {str(highest).lower()}}}"
    close(filtered(given, mask, table)[1].advantages[:, 0], [0.0, -0.5, 0.5])


def test_filters_are_of_each_group_and_of_a_fact(given):
    table = Table(
        [[-1.0]] * 4,
        group=[0, 0, 1, 1],
        rewards=[1.0, 2.0, 3.0, 4.0],
        accuracy=[0.9, 0.1, 0.5, 0.5],
    )
    mask = "algorithm.masks=[{type: best_of_group, count: 1, by: accuracy, highest: true}]"
    made = given(table, "algorithm.scale=none", mask)
    assert made.prepare().mask[:, 0].tolist() == [True, False, True, False]  # of equal ones the earlier


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ("", [[False, True], [True, True], [True, True]]),
        (", entropy: 0.6", [[False, True], [True, True], [False, False]]),
        (", probability: 0.5", [[False, False], [True, True], [True, True]]),
        (", threshold: -1", [[False, True], [False, False], [True, True]]),
    ],
)
def test_what_is_mastered_is_not_learned_again(given, options, kept):
    """Probabilities 0.995 and 0.6 in row 0, whose mean entropy is 0.1; row 1 is wrong, row 2 of entropy 0.5."""
    sure, likely = -0.005, -0.5
    table = Table(
        [[sure, likely], [sure, sure], [sure, sure]],
        rewards=[1.0, 0.0, 1.0],
        entropy=[[0.0, 0.2], [0.1, 0.1], [0.4, 0.6]],
    )
    made, rollouts = filtered(given, f"{{type: mastered{options}}}", table)
    assert rollouts.mask.all()  # they stay in the denominator
    expected = -rollouts.advantages * torch.tensor(kept) / 6
    close(made.gradient(), expected)
    dropped = sum(not each for row in kept for each in row)
    close(made.metrics.result()["mastered/share"], dropped / 6)


def test_runs_with_neighbouring_seeds_draw_differently(given):
    """The second step of a run with seed 0, and the first one of a run with seed 1."""
    drawn = []
    for seed, step in ((0, 1), (1, 0)):
        made = given(Table([[-1.0]] * 2, rewards=[1.0, 0.0]), f"seed={seed}")
        made.prepare(step=step)
        drawn.append(torch.rand(4, generator=made.batch.generator("random")))
        made.close()
    assert not torch.equal(*drawn)


def test_what_the_objective_leaves_out_and_the_policys_weights_multiply(given):
    """The policy weighs decisions by 3, 5, 7 and 2; the mask keeps the two of high entropy, of four."""
    table = Table([[-1.0, -2.0], [-1.0, -1.0]], rewards=[1.0, 0.0], entropy=[[0.1, 0.9], [0.2, 0.8]])
    made = given(table, "algorithm.masks=[{type: entropy_share, share: 0.5}]", "algorithm.scale=none")
    policy, weights = made.trainer.policy, torch.tensor([[3.0, 5.0], [7.0, 2.0]])
    replay = policy.replay

    def weighted(rollouts, model, *, reference=False):
        return replace(replay(rollouts, model, reference=reference), weight=weights[rollouts.inputs])

    policy.replay = weighted
    made.prepare()
    made.learn()
    close(made.gradient() * 4, [[0.0, -0.5 * 5], [0.0, 0.5 * 2]])
