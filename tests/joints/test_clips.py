"""Surrogates with bounds of their own, from the key to the loss and its gradient by every decision."""

import math

import pytest
import torch

from tests.joints.parts import Table, close

ONE = ["rollout.prompts=1", "algorithm.scale=none"]
RATIOS = [[1.1, 1.5, 0.5], [0.5, 1.5]]  # advantages 1 and -1


def moved(given, surrogate, *overrides, logp=-1.0, ratios=RATIOS):
    table = Table([[logp] * len(row) for row in ratios], rewards=[2.0, 0.0])
    made = given(table, *ONE, "algorithm.epochs=2", f"algorithm.surrogate={surrogate}", *overrides)
    made.prepare()
    return made.move(logp=[[math.log(ratio) for ratio in row] for row in ratios])


def check(made, loss, first, second, decisions=5):
    close(made.learn(), loss)
    close(made.gradient() * decisions, [[*row, *[0.0] * (3 - len(row))] for row in (first, second)])


def test_geometric(given):
    # Bounds -0.2 and 0.3 of the logarithm. Row 0, A > 0: log 1.1, 0.3 (from log 1.5), log 0.5 as it is: their mean is
    # (0.0953102 + 0.3 - 0.6931472) / 3 = -0.0992790, exp = 0.905490. Row 1, A < 0: -0.2 (from log 0.5) and log 1.5:
    # mean (-0.2 + 0.4054651) / 2 = 0.1027326, exp = 1.108195. A third (a half) of the ratio for each decision, times
    # as many decisions that have it.
    made = moved(given, "{type: geometric, low: 0.2, high: 0.3}", "algorithm.reduce=token_mean")
    loss = (-3 * 0.905490 + 2 * 1.108195) / 5
    check(made, loss, [-0.905490, 0, -0.905490], [0, 1.108195])


def test_geometric_with_its_default_bounds_and_rollouts_that_count_alike(given):
    # +-0.4: log 1.5 = 0.405465 is bounded to 0.4 in row 0 and free in row 1; log 0.5 free, then bounded to -0.4.
    made = moved(given, "geometric")
    first, second = math.exp((math.log(1.1) + 0.4 + math.log(0.5)) / 3), math.exp((-0.4 + math.log(1.5)) / 2)
    close(made.learn(), (-first + second) / 2)
    close(made.gradient(), [[-first / 6, 0, -first / 6], [0, second / 4, 0]])


def test_log_clip(given):
    # Bounds log 0.9 = -0.105361 and log 1.3 = 0.262364. A = 1: 0.095310, 0.262364 (bound), -0.693147;
    # A = -1: -(-0.105361) is the smaller gain, then -0.405465. The gradient is -A, whatever the ratio.
    made = moved(given, "{type: log_clip, low: 0.1, high: 0.3}")
    loss = -(0.095310 + 0.262364 - 0.693147 + 0.105361 - 0.405465) / 5
    check(made, loss, [-1, 0, -1], [0, 1])


def test_tapered(given):
    # A = 1: weight 1 whatever the ratio. A = -1: the ratio 0.5, and 1 for 1.5. Values are -w A.
    made = moved(given, "tapered")
    check(made, (-1 - 1 - 1 + 0.5 + 1) / 5, [-1, -1, -1], [0.5, 1])
    close(made.metrics.result()["surrogate/weight"], (3 + 0.5 + 1) / 5)


def test_tapered_by_the_ratio_of_a_response(given):
    # The ratio of row 1 is sqrt(0.5 x 1.5), of which a half is each decision's.
    made = moved(given, "tapered", "algorithm.level=sequence", "algorithm.reduce=token_mean")
    ratio = math.sqrt(0.75)
    check(made, (-3 + 2 * ratio) / 5, [-1, -1, -1], [ratio, ratio])


@pytest.mark.parametrize("tau", [0.1, 2.0])
def test_mirror_descent(given, tau):
    # tau / 2 l^2 - A l, whose derivative is tau l - A; where the ratio is 1 that is -A.
    made = moved(given, f"{{type: mirror_descent, tau: {tau}}}")
    logs = [[math.log(r) for r in row] for row in RATIOS]
    values = [tau / 2 * x * x - x for x in logs[0]] + [tau / 2 * x * x + x for x in logs[1]]
    check(made, sum(values) / 5, [tau * x - 1 for x in logs[0]], [tau * x + 1 for x in logs[1]])
    close(made.metrics.result()["surrogate/pull"], sum(tau / 2 * x * x for row in logs for x in row) / 5)


RARE = [[0.25, 0.01, 0.0001, 0.25], [0.25, 0.01, 0.0001, 0.01]]  # probabilities under the old policy
FAR = [[1.5, 3.0, 12.0, 0.5], [0.54, 0.45, 0.6, 4.0]]


def rare(given, surrogate):
    table = Table([[math.log(p) for p in row] for row in RARE], rewards=[2.0, 0.0])
    made = given(table, *ONE, "algorithm.epochs=2", f"algorithm.surrogate={surrogate}")
    made.prepare()
    return made.move(logp=[[math.log(r) for r in row] for row in FAR])


def test_sqrt_clip_is_the_released_code(given):
    """RIPO's policy loss (Aiolus-X/RIPO at 6482fd6, verl/trainer/ppo/core_algos.py) executed on these rows: bounds
    0.553..1.447, 0.5..3.236 and 0.5..10, and a loss of at most 3 where A < 0."""
    made = rare(given, "sqrt_clip")
    close(made.learn(), -1.2868034)
    close(made.gradient() * 8, [[0, -3, 0, -0.5], [0, 0, 0.6, 0]], atol=1e-5)


def test_sqrt_clip_by_its_options(given):
    # low 0.01: 1 - 0.1 / 0.5 = 0.8, 1 - 0.1 / 0.1 = 0 and less. high 0.04: 1 + 0.2 / 0.5 = 1.4, 3, then most: 5.
    made = rare(given, "{type: sqrt_clip, low: 0.01, high: 0.04, least: 0.1, most: 5, cap: null}")
    close(made.learn(), (-1.4 - 3 - 5 - 0.5 + 0.8 + 0.45 + 0.6 + 4) / 8, atol=1e-5)
    close(made.gradient() * 8, [[0, -3, 0, -0.5], [0, 0.45, 0.6, 4]], atol=1e-5)


BAND = "{{type: boundary_chance, low: 0.1, high: 0.3, band: {band}, keep: {keep}}}"


def test_just_past_the_bound_is_kept_by_chance(given):
    # Past the bounds are 1.5 (A > 0) and 0.5 (A < 0), 0.2 and 0.4 away. Kept: -r A; else the bound's value.
    clipped = ([-1.1, 0, -0.5], [0, 1.5])
    for band, keep, first, second in (
        (0.5, 1, [-1.1, -1.5, -0.5], [0.5, 1.5]),
        (0.5, 0, *clipped),
        (0.3, 1, [-1.1, -1.5, -0.5], [0, 1.5]),
        (0.1, 1, *clipped),
    ):
        loss = -1.1 - (1.5 if first[1] else 1.3) - 0.5 + (0.5 if second[0] else 0.9) + 1.5
        check(moved(given, BAND.format(band=band, keep=keep)), loss / 5, first, second)


def test_the_chance_is_what_it_says_and_anew_each_step(given):
    ratios = [[1.5] * 8] * 12
    table = Table([[-1.0] * 8] * 12, rewards=[1.0] * 12)
    options = [
        "rollout.group_size=12",
        "algorithm.baseline=none",
        "algorithm.surrogate=" + BAND.format(band=1, keep=0.3),
    ]
    found = []
    for step in (0, 0, 1):
        made = given(table, *ONE, "algorithm.epochs=2", *options)
        made.prepare(step=step)
        made.move(logp=[[math.log(r) for r in row] for row in ratios])
        made.learn()
        found.append(made.gradient() != 0)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert 0.15 < float(found[0].float().mean()) < 0.45
