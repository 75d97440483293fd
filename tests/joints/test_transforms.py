"""Transforms of rewards, from their keys to the advantages."""

import itertools
import math
import statistics

import pytest
import torch

from mmrl.core.ranking import best_of_subsets
from mmrl.errors import UserError
from tests.joints.parts import Table, close

BARE = ["algorithm.baseline=none", "algorithm.scale=none"]


def advantages(given, rewards, transform, *overrides, group=None, size=3, **columns):
    table = Table(columns.pop("logp", [[-1.0]] * len(rewards)), group=group, rewards=rewards, **columns)
    made = given(table, f"rollout.group_size={size}", f"algorithm.transforms=[{transform}]", *overrides)
    rollouts = made.prepare()
    made.learn()
    counted = rollouts.mask
    close(made.gradient()[counted], -rollouts.advantages[counted] / int(counted.sum()))
    close(made.metrics.result()["advantages/reward_mean"], statistics.mean(r for r in rewards if r == r))
    return rollouts.advantages[:, 0]


def test_rank(given):
    # Beaten: 0, 1, 3 and the equal ones half of one another: 1.5 of 3 others.
    close(advantages(given, [-9.0, 2.0, 2.0, 70.0], "rank", *BARE, size=4), [0, 0.5, 0.5, 1])


def test_rank_with_a_baseline_and_a_scale(given):
    # 0, 1/2, 1 and 1/2, 1, 0: less 1/2, over a std of 1/2.
    found = advantages(given, [1.0, 5.0, 9.0, 3.0, 4.0, -2.0], "rank", group=[0, 0, 0, 1, 1, 1])
    close(found, [-1, 0, 1, 0, 1, -1], atol=5e-6)


def test_a_flat_group_has_no_rank(given):
    close(advantages(given, [3.0, 3.0, 3.0], "rank"), [0, 0, 0])


def test_rank_leaves_out_what_could_not_be_scored(given):
    close(advantages(given, [1.0, math.nan, 5.0], "rank", *BARE), [0, 0, 1])


def test_pairwise(given):
    # Differences over 2: -1, -2 for the first; 1, -1; 2, 1.
    one, two = math.tanh(1), math.tanh(2)
    expected = [-(one + two) / 2, 0, (one + two) / 2]
    close(advantages(given, [1.0, 3.0, 5.0], "{type: rank, score: {type: pairwise, temperature: 2}}", *BARE), expected)


NORMAL = "{type: rank, score: inverse_normal}"


def test_inverse_normal(given):
    # Places 0, 1, 2 of 3: quantiles at 1/6, 1/2, 5/6; the 5/6 quantile is 0.967422.
    close(advantages(given, [5.0, -1.0, 700.0], NORMAL, *BARE), [0, -0.967422, 0.967422])


def test_equal_rewards_share_their_quantile(given):
    # Places 0.5, 0.5, 2: quantiles at 1/3 and 5/6.
    close(advantages(given, [1.0, 1.0, 2.0], NORMAL, *BARE), [-0.430727, -0.430727, 0.967422])


def test_ranks_by_task(given):
    # Two groups of one task are ranked together: 0 1 2 3 of four; the quantiles at 1/8, 3/8, 5/8, 7/8.
    columns = {"group": [0, 0, 1, 1], "size": 2, "metadata": [{"kind": "count"}] * 4}
    found = advantages(given, [0.1, 0.4, 0.2, 0.9], NORMAL.replace("}", ", by: kind}"), *BARE, **columns)
    close(found, [-1.150349, 0.318639, -0.318639, 1.150349])
    found = advantages(given, [0.1, 0.4, 0.2, 0.9], "{type: rank, score: win_rate, by: kind}", *BARE, **columns)
    close(found, [0, 2 / 3, 1 / 3, 1])


def test_best_only(given):
    # 6 is 4 ahead of 2; squares around 3: 4 + 1 + 9 over 2. In the second group nobody is ahead.
    found = advantages(given, [1.0, 2.0, 6.0, 4.0, 4.0, 0.0], "best_only", *BARE, group=[0, 0, 0, 1, 1, 1])
    close(found, [0, 0, 4 / math.sqrt(7), 0, 0, 0])


def test_best_only_without_division(given):
    close(advantages(given, [1.0, 2.0, 6.0], "{type: best_only, divide: false}", *BARE), [0, 0, 4])


def brute(rewards, k, leave_one_out):
    """By the definition, over all subsets."""
    n, found = len(rewards), []
    for i in range(n):
        total = 0.0
        for subset in itertools.combinations(range(n), k):
            if i in subset:
                others = [rewards[j] for j in subset if j != i]
                total += max(rewards[j] for j in subset) - (max(others) if leave_one_out and others else 0.0)
        found.append(n * total / math.comb(n, k))
    return found


REWARDS = [0.3, 2.0, -1.0, 2.0, 0.5]


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("leave_one_out", [True, False])
def test_pass_at_k_by_all_subsets(given, k, leave_one_out):
    transform = f"{{type: pass_at_k, k: {k}, leave_one_out: {str(leave_one_out).lower()}}}"
    close(advantages(given, REWARDS, transform, *BARE, size=5), brute(REWARDS, k, leave_one_out))


def test_pass_at_k_of_right_and_wrong(given):
    # One right of four, k = 2: each of its 3 subsets of 6 gains 1, so 4 x 3 / 6; wrong answers gain nothing.
    close(advantages(given, [0.0, 1.0, 0.0, 0.0], "{type: pass_at_k, k: 2}", *BARE, size=4), [0, 2, 0, 0])
    # Two right: each gains only where its partner is wrong, 2 of 6 subsets.
    close(advantages(given, [0.0, 1.0, 1.0, 0.0], "{type: pass_at_k, k: 2}", *BARE, size=4), [0, 4 / 3, 4 / 3, 0])


def test_the_gradient_of_pass_at_k_is_without_bias():
    """A policy that is right with probability p: d/dp of 1 - (1 - p)^k, as the mean over all outcomes of a group."""
    p, n, k = 0.3, 4, 2
    expected, found = k * (1 - p) ** (k - 1), 0.0
    for outcome in itertools.product([0.0, 1.0], repeat=n):
        chance = math.prod(p if right else 1 - p for right in outcome)
        best = best_of_subsets(torch.tensor(outcome, dtype=torch.float64), k)
        score = torch.tensor([1 / p if right else -1 / (1 - p) for right in outcome], dtype=torch.float64)
        found += chance * float((k * (best.holding - best.without) * score).mean())
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("wrong", "k"), [(1, 2), (3, 2), (2, 3), (3, 4)])
def test_pass_at_k_analytic(given, wrong, k):
    """The paper's closed forms, of right and wrong answers."""
    n = 5
    passed = 1 - math.comb(wrong, k) / math.comb(n, k)
    std = math.sqrt(passed * (1 - passed))
    missed = 1 - passed - math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1)
    right = [(1 - passed) / std if std else 0.0] * (n - wrong)
    transform = f"{{type: pass_at_k_analytic, k: {k}}}"
    found = advantages(given, [0.0] * wrong + [1.0] * (n - wrong), transform, *BARE, size=n)
    close(found, [missed / std if std else 0.0] * wrong + right)


def test_pass_at_k_analytic_of_any_reward(given):
    subsets = list(itertools.combinations(REWARDS, 3))
    best = [max(subset) for subset in subsets]
    mean, std = statistics.mean(best), statistics.pstdev(best)
    places = list(itertools.combinations(range(5), 3))
    expected = [
        (statistics.mean(b for b, place in zip(best, places, strict=True) if i in place) - mean) / std for i in range(5)
    ]
    close(advantages(given, REWARDS, "{type: pass_at_k_analytic, k: 3}", *BARE, size=5), expected)


def test_a_group_with_too_few_scores_learns_nothing(given):
    for kind in ("pass_at_k", "pass_at_k_analytic"):
        close(advantages(given, [1.0, math.nan, math.nan], f"{{type: {kind}, k: 2}}", *BARE), [0, 0, 0])


def test_smoothing(given):
    # Mean log-likelihoods -2 and -4; only the right answers earn more for being unlikely: 1 + 0.1 x 2, 1 + 0.1 x 4.
    logp = [[-1.0, -3.0], [-4.0], [-9.0]]
    found = advantages(given, [1.0, 1.0, 0.0], "{type: smoothing, tau: 0.1}", *BARE, logp=logp)
    close(found, [1.2, 1.4, 0.0])


def test_modes(given):
    # Three right answers, two of them alike: p = 2/3, 2/3, 1/3; bonuses (1.5 - 1) / 2 and (3 - 1) / 2 times 0.4.
    table = dict(responses=["one and two", "one and two!", "count the cats", "one and two"])
    transform = "{type: modes, bonus: 0.4}"
    found = advantages(given, [1.0, 1.0, 1.0, 0.0], transform, *BARE, size=4, **table)
    close(found, [1.1, 1.1, 1.4, 0.0])


def test_a_mode_is_what_is_like_its_first_member(given):
    # Each is like the next one only: the third is not like the first, so it begins the mode that the fourth joins.
    transform = "{type: modes, bonus: 0.6, n: 1, alike: 0.4}"
    found = advantages(given, [1.0] * 4, transform, *BARE, size=4, responses=["ab", "bc", "cd", "de"])
    close(found, [1.2] * 4)


def test_sequence_entropy(given):
    # Right: mean entropies 1 and 3 share 0.2 x 2 as 1/4 and 3/4. Wrong: 2 and 1/2, reciprocals 1/2 and 2, as 1/5, 4/5.
    columns = dict(logp=[[-1.0, -1.0], [-1.0], [-1.0], [-1.0]], entropy=[[0.5, 1.5], [3.0], [2.0], [0.5]])
    transform = "{type: sequence_entropy, beta_1: 2, beta_2: 0.2}"
    found = advantages(given, [1.0, 1.0, 0.0, 0.0], transform, *BARE, size=4, **columns)
    close(found, [2.1, 2.3, -0.08, -0.32])


def test_transforms_follow_one_another_and_reach_every_component(given):
    # Places of the columns, each normalised on its own: both -1, 0, 1 and -1, 1, 0 over 0.5; added, over their std.
    table = Table([[-1.0]] * 3, rewards=[[1.0, 0.0], [3.0, 90.0], [50.0, 7.0]])
    options = ["task.names=[a, b]", "task.weights=[1, 1]", "algorithm.components=normalise_each"]
    made = given(table, "rollout.group_size=3", "algorithm.transforms=[rank]", *options)
    both = [-2.0, 1.0, 1.0]
    close(made.prepare().advantages[:, 0], [a / statistics.stdev(both) for a in both], atol=1e-5)


@pytest.mark.parametrize("kind", ["best_only", "{type: pass_at_k, k: 2}", "{type: pass_at_k_analytic, k: 2}"])
def test_what_gives_advantages_takes_no_baseline(given, kind):
    with pytest.raises(UserError, match="set algorithm.baseline=none and algorithm.scale=none"):
        given(Table([[-1.0]] * 2), f"algorithm.transforms=[{kind}]")


def test_history(given):
    """The first step is on its own scale: around 2 with a std of 1; the second on that of the first."""
    made = given(Table([[-1.0]] * 2, rewards=[1.0, 3.0]), *BARE, "algorithm.transforms=[{type: history, keep: 0.75}]")
    close(made.prepare().advantages[:, 0], [-1.0, 1.0], atol=1e-5)

    def again(*rewards):
        return made.prepare(Table([[-1.0]] * 2, rewards=list(rewards)).rollouts()).advantages[:, 0]

    close(again(4.0, 6.0), [2.0, 4.0], atol=1e-5)
    # Mean 0.75 x 2 + 0.25 x 5; squares 0.75 x 5 + 0.25 x 26: deviation sqrt(10.25 - 2.75^2).
    close(again(2.75, 6.0), [0.0, 3.25 / math.sqrt(2.6875)], atol=1e-5)


def test_short_right_responses_earn_a_bonus(given):
    # Lengths 1, 3, 2, 2 of 1 .. 3: 1/2, -1/2, 0, 0. Right ones get it, the wrong ones 0 and min(0, 0).
    logp = [[-1.0], [-1.0] * 3, [-1.0] * 2, [-1.0] * 2]
    found = advantages(given, [1.0, 1.0, 1.0, 0.0], "{type: length, weight: 0.4}", *BARE, size=4, logp=logp)
    close(found, [1.2, 0.8, 1.0, 0.0])


def test_long_wrong_responses_are_punished_and_short_ones_not_rewarded(given):
    # Lengths 1, 3, 2 of 1 .. 3: 1/2 is for no wrong one, -1/2 is; threshold 2 makes all of them wrong.
    logp = [[-1.0], [-1.0] * 3, [-1.0] * 2]
    close(advantages(given, [0.0, 0.0, 0.0], "length", *BARE, logp=logp), [0.0, -0.25, 0.0])
    close(advantages(given, [1.0, 1.0, 1.0], "{type: length, threshold: 2}", *BARE, logp=logp), [1.0, 0.75, 1.0])


def test_lengths_are_compared_within_the_group_of_what_is_scored(given):
    # The second group is of one length, and what is not scored is longer than all.
    logp = [[-1.0], [-1.0] * 2, [-1.0] * 5, *[[-1.0] * 4] * 3]
    rewards, group = [1.0, 1.0, math.nan, 1.0, 0.0, 1.0], [0, 0, 0, 1, 1, 1]
    close(advantages(given, rewards, "length", *BARE, logp=logp, group=group), [1.25, 0.75, 0, 1, 0, 1])


def test_noise_is_drawn_for_each_reward_and_step(given):
    rewards = [1.0] * 12
    options = (*BARE, "algorithm.surrogate=reinforce")
    one = advantages(given, rewards, "{type: perturbation, std: 0.5}", *options, size=12)
    close(advantages(given, rewards, "{type: perturbation, std: 0.5}", *options, size=12), one)
    noise = one - 1
    assert len(set(noise.tolist())) == 12 and 0.2 < float(noise.std()) < 0.9 and abs(float(noise.mean())) < 0.5
    close(advantages(given, rewards, "{type: perturbation, std: 1.0}", *options, size=12) - 1, 2 * noise)
    assert not torch.equal(
        advantages(given, rewards, "{type: perturbation, std: 0.5}", *options, "seed=1", size=12), one
    )
    close(advantages(given, rewards, "{type: perturbation, std: 0.0}", *options, size=12), rewards)


@pytest.mark.parametrize(
    ("outcome", "expected"), [(1, [0.7, -0.4, -0.1]), (0, [-0.3, -0.4, -0.1]), (2, [1.7, -0.4, -0.1])]
)
def test_certainty_is_a_reward(given, outcome, expected):
    # Mean entropies 0.6 (of 0.2 and 1), 0.8 and 0.2, half of each.
    columns = {"logp": [[-1.0] * 2, [-1.0], [-1.0]], "entropy": [[0.2, 1.0], [0.8], [0.2]]}
    transform = f"{{type: certainty, weight: 0.5, outcome: {outcome}}}"
    close(advantages(given, [1.0, 0.0, 0.0], transform, *BARE, **columns), expected)
