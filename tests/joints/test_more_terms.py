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


# --- old KL ---

MOVES = [[0.5, -0.5], [1.0]]
OLD_KL = [
    ("forward", "false", lambda x: math.exp(x) - 1 - x, lambda x: math.exp(x) - 1),
    ("forward", "true", lambda x: -x, lambda x: -1),
    ("reverse", "false", lambda x: math.exp(x) * x - math.exp(x) + 1, lambda x: math.exp(x) * x),
    ("reverse", "true", lambda x: math.exp(x) * x, lambda x: math.exp(x) * (x + 1)),
]


@pytest.mark.parametrize(("direction", "normalised", "value", "slope"), OLD_KL)
def test_old_kl(given, direction, normalised, value, slope):
    term = f"{{type: old_kl, coefficient: 0.3, direction: {direction}, normalised: {normalised}}}"
    made = flat(given, term, "algorithm.epochs=2")
    made.prepare()
    made.move(logp=MOVES)
    total = sum(value(x) for row in MOVES for x in row)
    close(made.learn(), 0.1 * total)
    close(made.gradient(), [[0.1 * slope(0.5), 0.1 * slope(-0.5)], [0.1 * slope(1.0), 0]])
    close(made.metrics.result()["old_kl"], total / 3)


def test_old_kl_is_the_kl_in_expectation():
    """Of two choices, over the probabilities of the old policy."""
    old, now = torch.tensor([0.3, 0.7]).double(), torch.tensor([0.6, 0.4]).double()
    x = (now / old).log()
    for direction, normalised, value, _ in OLD_KL:
        mean = sum(float(p) * value(float(v)) for p, v in zip(old, x, strict=True))
        kl = (old * (old / now).log()).sum() if direction == "forward" else (now * (now / old).log()).sum()
        assert mean == pytest.approx(float(kl)), (direction, normalised)


def test_old_kl_as_a_constraint(given):
    """DisCO's squared hinge: k_p x what it is above the target; below it costs nothing."""
    coefficient = "{type: multiplier, metric: old_kl, target: 0.05, k_p: 10, k_i: 0, start: 0}"
    table = Table([[-1.0], [-1.0]], rewards=[2.0, 0.0])
    made = given(
        table, *ONE, "algorithm.epochs=2", "steps=2", f"algorithm.terms=[{{type: old_kl, coefficient: {coefficient}}}]"
    )  # noqa: E501
    made.trainer.train()
    first, second = made.trainer.run.rows
    drift = (math.exp(0.5) - 1.5 + math.exp(-0.5) - 0.5) / 4  # after the first update, over both epochs
    close(first["old_kl"], drift)
    close(second["control/algorithm.terms.0.coefficient"], 10 * (drift - 0.05))


# --- EMA KL ---


def test_ema_kl_follows_the_policy(given):
    """The reference begins where the policy is, and moves by a quarter of the way after each step."""
    term = "algorithm.terms=[{type: ema_kl, coefficient: 0, decay: 0.75, estimator: k1}]"
    made = given(Table([[-1.0]] * 2, rewards=[2.0, 0.0]), *ONE, term, "steps=3")
    made.trainer.train()
    # Each step moves the two by +-0.5; the second step sees 0.5 x 0.75, the third (1 - 0.25 x 0.5 - ...) and so on.
    kept = [0.0]
    for now in (0.5, 1.0):
        kept.append(0.75 * kept[-1] + 0.25 * now)
    reference = made.trainer.reference.kept[0][:2, 0]
    last = 0.75 * kept[-1] + 0.25 * 1.5
    close(reference, [last, -last])


def test_ema_kl(given):
    made = flat(given, "{type: ema_kl, coefficient: 0.3, decay: 0.9, estimator: k2}")
    made.move(logp=MOVES)  # the reference is still where it began
    made.prepare()
    close(made.learn(), 0.1 * (0.125 + 0.125 + 0.5))
    close(made.gradient(), [[0.05, -0.05], [0.1, 0]])
    close(made.metrics.result()["ema_kl"], 0.25)


def test_ema_kl_of_denoising_steps(given):
    # Moved by 0.5: the squared distance is 0.25, with the slope 1.
    term = "{type: ema_kl, coefficient: 0.2, estimator: velocity}"
    made = flat(given, term, logp=((-1.0,), (-1.0,)), prediction=[[0.3], [0.7]])
    made.move(prediction=[[0.5], [-0.5]])
    made.prepare()
    close(made.learn(), 0.2 * 0.25)
    close(made.gradient("prediction"), [[0.1], [-0.1]])


def test_there_is_one_reference(given):
    with pytest.raises(UserError, match="a job has one reference"):
        flat(given, "{type: kl}, {type: ema_kl}")
    with pytest.raises(UserError, match="decay 0.5.*0.9"):
        flat(given, "{type: ema_kl}, {type: ema_kl, decay: 0.5}")
    flat(given, "{type: ema_kl}, {type: ema_kl, estimator: k1}")


# --- difficulty KL ---


def test_difficulty_kl(given):
    # One of four is right: p = 0.25, its weight 1 - exp(-e / 4) = 0.493186; the wrong ones have 1.
    # All are at d = 0.5 from the reference: k3 = 0.106531, slope 0.393469.
    table = Table([[-1.0]] * 4, rewards=[1.0, 0.0, 0.0, 0.0])
    options = ["rollout.group_size=4", "algorithm.surrogate=reinforce"]
    made = given(table, *ONE, *options, "algorithm.terms=[{type: difficulty_kl, coefficient: 0.4}]")
    made.move(logp=[[0.5]] * 4)
    made.prepare()
    weight = 1 - math.exp(-math.e / 4)
    close(made.learn(), 0.1 * (weight + 3) * 0.106531)
    slope = 0.1 * 0.393469
    close(made.gradient()[:, 0], [-0.75 / 4 + slope * weight, *[0.25 / 4 + slope] * 3])


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_prompts_that_are_all_right_or_all_wrong_keep_the_whole_kl(given, right):
    made = flat(given, "{type: difficulty_kl, coefficient: 0.3}", rewards=[right, right])
    made.move(logp=[[0.5, 0.5], [0.5]])
    made.prepare()
    close(made.learn(), 0.3 * 0.106531)


# --- covariance KL ---


def test_covariance_kl(given):
    # As for covariance_clip: covariances 4/3, -4/3 and 0; of three decisions the first is held.
    table = Table([[0.0, -4.0], [-2.0]], rewards=[2.0, 0.0])
    term = "algorithm.terms=[{type: covariance_kl, coefficient: 0.5, share: 0.34}]"
    made = given(table, *ONE, "algorithm.epochs=2", "algorithm.surrogate=reinforce", term)
    made.prepare()
    made.move(logp=[[-0.2, 0.3], [0.4]])
    close(made.learn(), (-1 - 1 + 1 + 0.5 * 0.2) / 3)
    close(made.gradient(), [[(-1 - 0.5) / 3, -1 / 3], [1 / 3, 0]])
    close(made.metrics.result()["covariance_kl"], 0.2)


@pytest.mark.parametrize(("estimator", "value", "slope"), [("k2", 0.02, -0.2), ("k3", 0.021403, -0.221403)])
def test_estimators_of_covariance_kl(given, estimator, value, slope):
    # d = -0.2: d^2 / 2; exp(0.2) - 1.2, with the slope 1 - exp(0.2).
    table = Table([[0.0, -4.0], [-2.0]], rewards=[2.0, 0.0])
    term = f"algorithm.terms=[{{type: covariance_kl, coefficient: 0.5, share: 0.34, estimator: {estimator}}}]"
    made = given(table, *ONE, "algorithm.epochs=2", "algorithm.surrogate=reinforce", term)
    made.prepare()
    made.move(logp=[[-0.2, 0.3], [0.4]])
    close(made.learn(), (-1 + 0.5 * value) / 3)
    close(made.gradient()[0, 0], (-1 + 0.5 * slope) / 3)


def test_the_share_of_covariance_kl_is_of_all_ranks(given):
    table = Table([[0.0, -4.0], [-2.0]], rewards=[2.0, 0.0])
    term = "algorithm.terms=[{type: covariance_kl, share: 0.34}]"
    made = given(table, *ONE, "rollout.prompts=2", term, world=2)  # 2 of 6, one of them here
    (held,) = made.prepare().extras.values()
    assert held.values.tolist() == [[True, False], [False, False]]


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


def test_what_has_not_moved_costs_nothing(given):
    made = flat(given, "{type: likelihood_drop, coefficient: 0.5}")
    made.prepare()
    close(made.learn(), 0.0)
    close(made.gradient(), torch.zeros(2, 2))


# --- double entropy ---


def test_double_entropy(given):
    # -0.3 logp - 0.6 logp under the view, of three decisions: both are pulled up.
    term = "{type: double_entropy, coefficient: 0.3, view_coefficient: 0.6, view: {type: no_text}}"
    made = flat(given, term, view=[[-0.5, -0.5], [-2.0]])
    made.prepare()
    close(made.learn(), (0.3 * 6 + 0.6 * 3) / 3)
    close(made.gradient(), [[-0.1, -0.1], [-0.1, 0]])
    close(made.gradient("view"), [[-0.2, -0.2], [-0.2, 0]])
    close(made.metrics.result()["view_entropy"], 1.0)
