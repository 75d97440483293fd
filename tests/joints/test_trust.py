"""Surrogates with trust regions of their own, from the key to the loss and its gradient by every decision."""

import math

import pytest

from mmrl.core.duals import solve_trust_region_dual
from tests.joints.parts import Table, close

ONE = ["rollout.prompts=1", "algorithm.scale=none"]
RATIOS = [[1.1, 1.5, 0.5], [0.5, 1.5]]  # advantages 1 and -1


def moved(given, surrogate, *overrides, logp=((-1.0, -1.0, -1.0), (-1.0, -1.0)), ratios=RATIOS, **columns):
    table = Table([list(row) for row in logp], rewards=[2.0, 0.0], **columns)
    made = given(table, *ONE, "algorithm.epochs=2", f"algorithm.surrogate={surrogate}", *overrides)
    made.prepare()
    return made.move(logp=[[math.log(ratio) for ratio in row] for row in ratios])


def check(made, loss, first, second, decisions=5):
    close(made.learn(), loss)
    close(made.gradient() * decisions, [[*row, *[0.0] * (3 - len(row))] for row in (first, second)])


def test_ratio_variance(given):
    # -r A + 0.5 (r - 1)^2; gradient -r A + (r - 1) r.
    made = moved(given, "{type: ratio_variance, price: 0.5}")
    squares = 0.01 + 0.25 + 0.25 + 0.25 + 0.25
    first = [-1.1 + 0.1 * 1.1, -1.5 + 0.5 * 1.5, -0.5 - 0.5 * 0.5]
    check(made, (-3.1 + 2.0 + 0.5 * squares) / 5, first, [0.5 - 0.25, 1.5 + 0.75])
    close(made.metrics.result()["surrogate/variance"], squares / 5)


def test_the_price_of_the_variance_follows_it(given):
    price = "{type: multiplier, metric: surrogate/variance, target: 0.1, k_i: 1, start: 0.5}"
    made = given(Table([[-1.0]] * 2, rewards=[2.0, 0.0]), "rollout.prompts=1", "algorithm.scale=none", "steps=2",
                 "algorithm.epochs=2", f"algorithm.surrogate={{type: ratio_variance, price: {price}}}")  # fmt: skip
    made.trainer.train()
    first, second = made.trainer.run.rows
    # The first update moves log r by +-0.5: variances 0, 0, then (e^0.5 - 1)^2 and (e^-0.5 - 1)^2.
    variance = ((math.exp(0.5) - 1) ** 2 + (math.exp(-0.5) - 1) ** 2) / 4
    close(first["surrogate/variance"], variance)
    close(second["control/algorithm.surrogate.price"], 0.5 + variance - 0.1)


def test_query_trust_region(given):
    # Advantages 1 and -1 at the price 2: weights 0.731059 and 0.268941, log 2 - 0.582203 = 0.110944 from even ones.
    # The gradient is -r (A - 2 log r), and so are the values: 2 log 1.5 = 0.810930, 2 log 1.1 = 0.190620.
    made = moved(given, "{type: query_trust_region, bound: 0.1109441}")
    first = [-1.1 * (1 - 0.190620), -1.5 * (1 - 0.810930), -0.5 * (1 + 1.386294)]
    second = [-0.5 * (-1 + 1.386294), -1.5 * (-1 - 0.810930)]
    close(made.learn(), (sum(first) + sum(second)) / 5, atol=1e-5)
    close(made.gradient() * 5, [first, [*second, 0.0]], atol=2e-5)
    close(made.metrics.result()["surrogate/price"], 2.0, atol=1e-5)


def test_every_prompt_has_its_own_price(given):
    # The second group's advantages are twice as large: so is its price. A flat group has the least.
    table = Table([[-1.0]] * 6, group=[0, 0, 1, 1, 2, 2], rewards=[2.0, 0.0, 4.0, 0.0, 3.0, 3.0])
    surrogate = "algorithm.surrogate={type: query_trust_region, bound: 0.1109441, least: 0.03}"
    made = given(table, "algorithm.scale=none", surrogate)
    rollouts = made.prepare()
    (prices,) = rollouts.extras.values()
    close(prices.values, [2, 2, 4, 4, 0.03, 0.03], atol=2e-5)


def test_a_price_stays_within_its_bounds():
    import torch

    a = torch.tensor([1.0, -1.0])
    assert solve_trust_region_dual(a, 0.9, 0.01, 10.0) == 0.01  # more than log 2 can not be reached
    assert solve_trust_region_dual(a, 1e-9, 0.01, 10.0) == 10.0


# Of the ratios: k3 = r - 1 - log r of a sample of the old policy: 0.00469, 0.09453, 0.19315; 0.19315, 0.09453.
MASKS = [
    ("k3", 0.1, False, False),
    ("k3", 0.195, True, True),
    ("tv", 0.1, False, False),  # exp(-1) |r - 1| = 0.184 in both
    ("tv", 0.19, True, True),
    ("kl", 0.08, False, False),  # 0.0935 at 0.5
    ("kl", 0.1, True, True),
]


@pytest.mark.parametrize(("estimate", "bound", "first", "second"), MASKS)
def test_sequence_mask(given, estimate, bound, first, second):
    made = moved(given, f"{{type: sequence_mask, bound: {bound}, estimate: {estimate}}}")
    kept = [-r if first else 0.0 for r in RATIOS[0]], [r if second else 0.0 for r in RATIOS[1]]
    check(made, (sum(kept[0]) + sum(kept[1])) / 5, *kept)


def test_one_decision_drops_its_whole_rollout_and_no_other(given):
    ratios = [[1.0, 1.0, 1.6], [0.9, 1.1]]
    made = moved(given, "{type: sequence_mask, bound: 0.1}", ratios=ratios)
    check(made, (0.9 + 1.1) / 5, [0, 0, 0], [0.9, 1.1])


GEPO = ((-1.0, -0.5, -1.5), (-2.0, -2.0))  # of the old policy


def test_group_expectation(given):
    # q = exp(-1), exp(-2) (means of tokens): sum q^2 / sum q = (0.135335 + 0.018316) / (0.367879 + 0.135335)
    # = 0.305339. p: row 0 moved by log(1.1 x 1.5 x 0.5) / 3 = log 0.937889, row 1 by log(0.75) / 2.
    made = moved(given, "{type: group_expectation, low: 1, high: 9}", logp=GEPO)
    one, two = math.exp(-1), math.exp(-2)
    expected = (one * one + two * two) / (one + two)
    first, second = one * 0.825 ** (1 / 3) / expected, two * math.sqrt(0.75) / expected
    close(made.learn(), (-first + second) / 2)
    close(made.gradient(), [[-first / 6] * 3, [second / 4, second / 4, 0]])


def test_group_expectation_is_the_released_code(given):
    """HeteroRL_GEPO at 97000a8, src/open-r1/online_rl.py, executed on these rows: the second weight, 0.384, is below
    its bound, and with bounds of 0.1 both weights are beyond theirs."""
    made = moved(given, "group_expectation", logp=GEPO)
    close(made.learn(), -0.1649955)
    close(made.gradient(), [[-0.1883318] * 3, [0.0] * 3])
    made = moved(given, "{type: group_expectation, low: 0.1, high: 0.1}", logp=GEPO)
    close(made.learn(), -0.1)
    close(made.gradient(), [[0.0] * 3] * 2)


def test_group_expectation_is_of_the_group_alone(given):
    table = Table([[-1.0], [-1.0], [-3.0], [-3.0]], group=[0, 0, 1, 1], rewards=[2.0, 0.0, 2.0, 0.0])
    made = given(table, "algorithm.scale=none", "algorithm.surrogate=group_expectation")
    made.prepare()
    made.learn()  # equal likelihoods within a group: weights are 1
    close(made.gradient()[:, 0] * 4, [-1, 1, -1, 1])


def test_unclipped_with_the_term_of_covariances_is_kl_cov(given):
    """compute_policy_loss_kl_cov of verl (in Aiolus-X/RIPO at 6482fd6), executed on these rows with kl_cov_ratio 0.4
    and ppo_kl_coef 0.3: two of five decisions pay. Its covariances are those of the present likelihoods, which here
    have the same order as those of the old policy."""
    held = "{type: kl, against: old, estimator: absolute, coefficient: 0.3, weighting: {type: covariance, share: 0.4}}"
    ratios = [[3.0, 0.5], [1.5, 2.0, 0.7]]
    rows = ((-1.0, -2.0), (-3.0, -0.5, -1.2))
    made = moved(given, "unclipped", f"algorithm.terms=[{held}]", logp=rows, ratios=ratios)
    close(made.learn(), 0.2302446)
    close(made.gradient(), [[-0.54, -0.1, 0.0], [0.36, 0.4, 0.14]])
