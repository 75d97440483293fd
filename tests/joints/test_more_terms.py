"""Further loss terms, from their keys to the loss and its gradient by every decision."""

import math

import pytest
import torch

from mmrl.errors import UserError
from tests.joints.parts import Table, close

ONE = ["rollout.prompts=1", "algorithm.scale=none"]


def flat(given, term, *overrides, logp=((-1.0, -2.0), (-3.0,)), **columns):
    """Rewards are equal, so advantages are 0 and the loss is that of the term alone."""
    table = Table([list(row) for row in logp], **columns)
    return given(table, *ONE, f"algorithm.terms=[{term}]", *overrides)


# --- KL against the old policy ---

MOVES = [[0.5, -0.5], [1.0]]
OLD_KL = [
    ("forward", "k3", lambda x: math.exp(x) - 1 - x, lambda x: math.exp(x) - 1),
    ("forward", "k1", lambda x: -x, lambda x: -1),
    ("reverse", "k3", lambda x: math.exp(x) * x - math.exp(x) + 1, lambda x: math.exp(x) * x),
    ("reverse", "k1", lambda x: math.exp(x) * x, lambda x: math.exp(x) * (x + 1)),
    ("unweighted", "k1", lambda x: x, lambda x: 1),
    ("unweighted", "k3", lambda x: math.exp(-x) - 1 + x, lambda x: 1 - math.exp(-x)),
    ("forward", "absolute", abs, lambda x: math.copysign(1, x)),
]


@pytest.mark.parametrize(("direction", "estimator", "value", "slope"), OLD_KL)
def test_kl_against_the_old_policy(given, direction, estimator, value, slope):
    term = f"{{type: kl, against: {{type: old, direction: {direction}}}, coefficient: 0.3, estimator: {estimator}}}"
    made = flat(given, term, "algorithm.epochs=2")
    made.prepare()
    made.move(logp=MOVES)
    total = sum(value(x) for row in MOVES for x in row)
    close(made.learn(), 0.1 * total)
    close(made.gradient(), [[0.1 * slope(0.5), 0.1 * slope(-0.5)], [0.1 * slope(1.0), 0]])
    close(made.metrics.result()["old_kl"], total / 3)


def test_it_is_by_default_the_forward_k3(given):
    made = flat(given, "{type: kl, against: old, coefficient: 0.3}", "algorithm.epochs=2")
    made.prepare()
    made.move(logp=MOVES)
    close(made.learn(), 0.1 * sum(math.exp(x) - 1 - x for row in MOVES for x in row))


def test_it_is_the_kl_in_expectation():
    """Of two choices, over the probabilities of the old policy."""
    old, now = torch.tensor([0.3, 0.7]).double(), torch.tensor([0.6, 0.4]).double()
    x = (now / old).log()
    for direction, estimator, value, _ in OLD_KL[:4]:
        mean = sum(float(p) * value(float(v)) for p, v in zip(old, x, strict=True))
        kl = (old * (old / now).log()).sum() if direction == "forward" else (now * (now / old).log()).sum()
        assert mean == pytest.approx(float(kl)), (direction, estimator)


def test_a_coefficient_that_follows_it_makes_a_constraint(given):
    """DisCO's squared hinge: k_p x what it is above the target; below it costs nothing."""
    coefficient = "{type: multiplier, metric: old_kl, target: 0.05, k_p: 10, k_i: 0, start: 0}"
    table = Table([[-1.0], [-1.0]], rewards=[2.0, 0.0])
    term = f"algorithm.terms=[{{type: kl, against: old, coefficient: {coefficient}}}]"
    made = given(table, *ONE, "algorithm.epochs=2", "steps=2", term)
    made.trainer.train()
    first, second = made.trainer.run.rows
    drift = (math.exp(0.5) - 1.5 + math.exp(-0.5) - 0.5) / 4  # after the first update, over both epochs
    close(first["old_kl"], drift)
    close(second["control/algorithm.terms.0.coefficient"], 10 * (drift - 0.05))


# --- KL against an average ---


def test_the_average_follows_the_policy(given):
    """The reference begins where the policy is, and moves by a quarter of the way after each step."""
    term = "algorithm.terms=[{type: kl, against: {type: ema, decay: 0.75}, coefficient: 0, estimator: k1}]"
    made = given(Table([[-1.0]] * 2, rewards=[2.0, 0.0]), *ONE, term, "steps=3")
    made.trainer.train()
    # Each step moves the two by +-0.5; the second step sees 0.5 x 0.75, the third (1 - 0.25 x 0.5 - ...) and so on.
    kept = [0.0]
    for now in (0.5, 1.0):
        kept.append(0.75 * kept[-1] + 0.25 * now)
    reference = made.trainer.reference.copies[0][:2, 0]
    last = 0.75 * kept[-1] + 0.25 * 1.5
    close(reference, [last, -last])


def test_kl_against_an_average(given):
    made = flat(given, "{type: kl, against: {type: ema, decay: 0.9}, coefficient: 0.3, estimator: k2}")
    made.move(logp=MOVES)  # the reference is still where it began
    made.prepare()
    close(made.learn(), 0.1 * (0.125 + 0.125 + 0.5))
    close(made.gradient(), [[0.05, -0.05], [0.1, 0]])
    close(made.metrics.result()["ema_kl"], 0.25)


def test_kl_of_denoising_steps_against_an_average(given):
    # Moved by 0.5: the squared distance is 0.25, with the slope 1.
    term = "{type: kl, against: ema, coefficient: 0.2, estimator: velocity}"
    made = flat(given, term, logp=((-1.0,), (-1.0,)), prediction=[[0.3], [0.7]])
    made.move(prediction=[[0.5], [-0.5]])
    made.prepare()
    close(made.learn(), 0.2 * 0.25)
    close(made.gradient("prediction"), [[0.1], [-0.1]])


def test_there_is_one_reference(given):
    with pytest.raises(UserError, match="a job has one reference"):
        flat(given, "{type: kl}, {type: kl, against: ema}")
    with pytest.raises(UserError, match="decay 0.5.*0.9"):
        flat(given, "{type: kl, against: ema}, {type: kl, against: {type: ema, decay: 0.5}}")
    flat(given, "{type: kl, against: ema}, {type: kl, against: ema, estimator: k1}")


@pytest.mark.parametrize("other", ["old", "view"])
def test_steps_of_a_denoiser_are_compared_with_the_reference_alone(given, other):
    expected = (
        f"algorithm.terms.0: estimator=exact does not work with against={other}; set it to one of k1, k2, k3, absolute$"
    )
    with pytest.raises(UserError, match=expected):
        flat(given, f"{{type: kl, against: {other}, estimator: exact}}")


def test_an_option_of_another_comparison_is_an_unknown_key(given):
    with pytest.raises(UserError, match="unknown key algorithm.terms.0.against.decay"):
        flat(given, "{type: kl, against: {type: old, decay: 0.5}}")


# --- KL weighted by difficulty ---


def test_kl_weighted_by_difficulty(given):
    # One of four is right: p = 0.25, its weight 1 - exp(-e / 4) = 0.493186; the wrong ones have 1.
    # All are at d = 0.5 from the reference: k3 = 0.106531, slope 0.393469.
    table = Table([[-1.0]] * 4, rewards=[1.0, 0.0, 0.0, 0.0])
    options = ["rollout.group_size=4", "algorithm.surrogate=reinforce"]
    made = given(table, *ONE, *options, "algorithm.terms=[{type: kl, coefficient: 0.4, weighting: difficulty}]")
    made.move(logp=[[0.5]] * 4)
    made.prepare()
    weight = 1 - math.exp(-math.e / 4)
    close(made.learn(), 0.1 * (weight + 3) * 0.106531)
    slope = 0.1 * 0.393469
    close(made.gradient()[:, 0], [-0.75 / 4 + slope * weight, *[0.25 / 4 + slope] * 3])
    close(made.metrics.result()["difficulty_kl"], 0.106531)  # before the weights


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_prompts_that_are_all_right_or_all_wrong_keep_the_whole_kl(given, right):
    """Both are better than the baseline, which is 0, and so would be free in a group of mixed accuracy."""
    term, plain = "{type: kl, coefficient: 0.3, weighting: difficulty}", ["algorithm.baseline=none"]
    columns = {"rewards": [1.0, 1.0], "accuracy": [right, right]}
    made = flat(given, term, "algorithm.surrogate=reinforce", *plain, **columns)
    made.move(logp=[[0.5, 0.5], [0.5]])
    made.prepare()
    close(made.learn(), -1 + 0.3 * 0.106531)


# --- KL of the decisions of highest covariance ---

HELD = "algorithm.terms=[{type: kl, against: {type: old, direction: %s}, coefficient: 0.5, estimator: %s, %s}]"
THIRD = "weighting: {type: covariance, share: 0.34}"


def test_kl_of_a_share_by_covariance(given):
    # As for covariance_clip: covariances 4/3, -4/3 and 0; of three decisions the first is held.
    table = Table([[0.0, -4.0], [-2.0]], rewards=[2.0, 0.0])
    term = HELD % ("forward", "absolute", THIRD)
    made = given(table, *ONE, "algorithm.epochs=2", "algorithm.surrogate=reinforce", term)
    made.prepare()
    made.move(logp=[[-0.2, 0.3], [0.4]])
    close(made.learn(), (-1 - 1 + 1 + 0.5 * 0.2) / 3)
    close(made.gradient(), [[(-1 - 0.5) / 3, -1 / 3], [1 / 3, 0]])
    close(made.metrics.result()["covariance_kl"], 0.2)


ESTIMATES = [
    ("unweighted", "k2", 0.02, -0.2),
    ("unweighted", "k3", 0.021403, -0.221403),  # d = -0.2: exp(0.2) - 1.2, with the slope 1 - exp(0.2)
    ("forward", "k3", 0.018731, -0.181269),  # exp(-0.2) - 0.8, with the slope exp(-0.2) - 1
]


@pytest.mark.parametrize(("direction", "estimator", "value", "slope"), ESTIMATES)
def test_estimates_of_a_share_by_covariance(given, direction, estimator, value, slope):
    table = Table([[0.0, -4.0], [-2.0]], rewards=[2.0, 0.0])
    term = HELD % (direction, estimator, THIRD)
    made = given(table, *ONE, "algorithm.epochs=2", "algorithm.surrogate=reinforce", term)
    made.prepare()
    made.move(logp=[[-0.2, 0.3], [0.4]])
    close(made.learn(), (-1 + 0.5 * value) / 3)
    close(made.gradient()[0, 0], (-1 + 0.5 * slope) / 3)


def test_the_share_by_covariance_is_of_all_ranks(given):
    table = Table([[0.0, -4.0], [-2.0]], rewards=[2.0, 0.0])
    term = HELD % ("forward", "absolute", "weighting: {type: covariance, share: 0.5}")
    made = given(table, *ONE, "rollout.prompts=2", term, world=2)
    (held,) = made.prepare().extras.values()  # 3 of 6, whose last has an equal on the other rank; of 3 it were 1
    assert held.values.tolist() == [[True, False], [True, False]]


def test_covariances_are_about_the_means_of_both(given):
    # Deviations of logp 1.5, -0.5, -1, of advantages 2/3, 2/3, -4/3: the last is held; by 1, 1, -1 it were the first.
    table = Table([[-0.5, -2.5], [-3.0]], rewards=[2.0, 0.0])
    (held,) = given(table, *ONE, HELD % ("forward", "absolute", THIRD)).prepare().extras.values()
    assert held.values.tolist() == [[False, False], [True, False]]


def test_two_shares_by_covariance_do_not_meet(given):
    """The first term holds one decision of three, the second two; their estimates differ."""
    table = Table([[0.0, -4.0], [-2.0]], rewards=[2.0, 0.0])
    both = (HELD % ("forward", "absolute", THIRD)).removesuffix("]") + ", {type: kl, against: old, coefficient: 1, "
    both += "estimator: k1, weighting: {type: covariance, share: 0.67}}]"
    made = given(table, *ONE, "algorithm.epochs=2", "algorithm.surrogate=reinforce", both)
    made.prepare()
    made.move(logp=[[-0.2, 0.3], [0.4]])
    close(made.learn(), (-1 + 0.5 * 0.2 + 0.2 - 0.4) / 3)  # k1 forward is -d


# --- likelihood drop ---


def dropped(given, of):
    """The first rollout falls by 0.1 as a whole though one token rose; the second falls, the third rises."""
    table = Table([[-1.0, -1.0], [-1.0, -1.0], [-1.0]], rewards=[1.0, 0.0, 0.5])
    term = f"algorithm.terms=[{{type: likelihood_drop, coefficient: 0.5{of}}}]"
    options = ["rollout.group_size=3", "algorithm.surrogate=reinforce", "algorithm.epochs=2"]
    made = given(table, *ONE, *options, term)
    made.prepare()
    return made.move(logp=[[0.2, -0.3], [-0.4, 0.0], [0.6]])


def test_likelihood_drop(given):
    made = dropped(given, "")
    close(made.learn(), (-0.5 * 2 + 0.5 * 2 + 0.5 * 0.3) / 5)
    close(made.gradient(), [[-0.1, -0.1 - 0.1], [0.1, 0.1], [0, 0]])
    close(made.metrics.result()["likelihood_fell"], 4 / 5)


def test_likelihood_drop_of_all(given):
    made = dropped(given, ", of: all")
    close(made.learn(), 0.5 * (0.3 + 0.4) / 5)
    close(made.gradient(), [[-0.1, -0.2], [0.1 - 0.1, 0.1], [0, 0]])


def test_likelihood_drop_of_rollouts_without_an_advantage(given):
    """A group of equal rewards, whose advantages are 0: the second of its two rollouts falls."""
    options = ["algorithm.epochs=2", "algorithm.terms=[{type: likelihood_drop, coefficient: 0.5}]"]
    made = given(Table([[-1.0]] * 2, rewards=[1.0, 1.0]), *ONE, *options)
    made.prepare()
    close(made.move(logp=[[0.2], [-0.4]]).learn(), 0.5 * 0.4 / 2)
    close(made.gradient()[:, 0], [0.0, -0.25])


def test_what_has_not_moved_costs_nothing(given):
    made = flat(given, "{type: likelihood_drop, coefficient: 0.5}")
    made.prepare()
    close(made.learn(), 0.0)
    close(made.gradient(), torch.zeros(2, 2))


# --- likelihood of all ---


def test_likelihood_of_all_also_under_a_view(given):
    # -0.3 logp - 0.6 logp under the view, of three decisions: both are pulled up.
    likely = "{type: likelihood, of: all, coefficient: "
    made = flat(given, f"{likely}0.3}}, {likely}0.6, under: no_text}}", view=[[-0.5, -0.5], [-2.0]])
    made.prepare()
    close(made.learn(), (0.3 * 6 + 0.6 * 3) / 3)
    close(made.gradient(), [[-0.1, -0.1], [-0.1, 0]])
    close(made.gradient("view"), [[-0.2, -0.2], [-0.2, 0]])
    close(made.metrics.result()["view_likelihood"], -1.0)
    close(made.metrics.result()["likelihood"], -2.0)
