"""Whitened advantages and the divergence in the reward, against numbers that verl computed on the same rows.

The file is verl/trainer/ppo/core_algos.py of Aiolus-X/RIPO at 6482fd6, a copy of verl, executed in fp64.
"""

import math

import pytest

from tests.joints.parts import Table, close

RAW = ["algorithm.baseline=none", "algorithm.scale=none"]
LENGTHS, REWARDS, GROUP = (3, 1, 2, 2, 4), [2.0, 0.0, 1.0, 5.0, 4.0], [0, 0, 0, 1, 1]
# compute_reinforce_plus_plus_baseline_outcome_advantage of them, one number a rollout.
WHITENED = [1.306296, -1.543805, -0.118754, 0.593771, -0.831280]


def uneven(rewards=REWARDS):
    return Table([[-1.0] * n for n in LENGTHS], group=GROUP, rewards=rewards)


def test_whitening_of_centred_rewards_is_reinforce_plus_plus_baseline(given):
    made = given(uneven(), "algorithm.scale=none", "algorithm.shaping=[whitening]")
    found = made.prepare().advantages
    for row, (length, expected) in enumerate(zip(LENGTHS, WHITENED, strict=True)):
        close(found[row], [expected] * length + [0.0] * (4 - length))
    made.learn()
    close(made.gradient()[0, 0], -1.306296 / 12)


def test_whitening_over_rollouts(given):
    # Centred: 1, -1, 0, 0.5, -0.5, whose variance is 2.5 / 4.
    made = given(uneven(), "algorithm.scale=none", "algorithm.shaping=[{type: whitening, over: rollouts}]")
    scale = math.sqrt(0.625)
    close(made.prepare().advantages[:, 0], [1 / scale, -1 / scale, 0.0, 0.5 / scale, -0.5 / scale])


def test_the_scale_of_the_batch_is_of_rewards_as_they_are(given):
    """What LitePPO and TRL's scale_rewards=batch divide by is larger where prompts differ."""
    made = given(uneven(), "algorithm.scale=batch_std")
    std = math.sqrt(sum((r - 2.4) ** 2 for r in REWARDS) / 4)
    close(made.prepare().advantages[:, 0], [1 / std, -1 / std, 0.0, 0.5 / std, -0.5 / std])


@pytest.mark.parametrize("shaping", ["whitening", "{type: whitening, over: rollouts}", "kl_returns"])
def test_what_is_not_scored_has_no_part(given, shaping):
    """Its tokens are in no mean; it is 0, and not less the mean of the others."""
    options = ["algorithm.scale=none", f"algorithm.shaping=[{shaping}]", "rollout.prompts=1", "rollout.group_size=3"]
    table = Table([[-1.0], [-1.0], [-1.0] * 3], rewards=[2.0, 0.0, math.nan])
    made = given(table, *options)
    made.move(logp=[[0.5], [0.5], [0.5] * 3])
    found = made.prepare().advantages
    close(found[2], [0.0] * 3)
    if shaping != "kl_returns":
        close(found[:2, 0], [math.sqrt(0.5), -math.sqrt(0.5)])


def test_groups_without_signal_do_not_make_a_step_smaller(given):
    """GPG's alpha: of five scored rollouts two are in a group with two rewards, and the third prompt has one score."""
    table = Table([[-1.0]] * 6, group=[0, 0, 1, 1, 2, 2], rewards=[1.0, 0.0, 3.0, 3.0, 1.0, math.nan])
    keys = ["rollout.prompts=3", "algorithm.scale=none", "algorithm.surrogate=reinforce"]
    made = given(table, *keys, "algorithm.shaping=[signal_correction]")
    close(made.prepare().advantages[:, 0], [1.25, -1.25, 0.0, 0.0, 0.0, 0.0])
    flat = given(Table([[-1.0]] * 2, rewards=[1.0, 1.0]), *keys, "algorithm.shaping=[signal_correction]")
    close(flat.prepare().advantages, [[0.0], [0.0]])


# --- the divergence in the reward ---

SAMPLED = [[-1.0, -2.0, -0.5], [-1.5], [-0.3, -0.7]]
REFERENCE = [[-1.2, -1.5, -0.5], [-1.0], [-0.9, -0.2]]
MOVED = [[a - b for a, b in zip(*rows, strict=True)] for rows in zip(SAMPLED, REFERENCE, strict=True)]
# compute_reinforce_plus_plus_outcome_advantage with kl_penalty in the token rewards, coefficient 0.5, gamma 1.
PLUS_PLUS = {
    "k1": [[0.849241, 0.975055, 0.660521], [-1.541216, 0, 0], [-0.660521, -0.283080, 0]],
    "absolute": [[0.670612, 0.783954, 1.067311], [-1.482902, 0, 0], [-0.689502, -0.349474, 0]],
    "k2": [[0.795158, 0.807153, 0.882121], [-1.591816, 0, 0], [-0.500285, -0.392332, 0]],
    "k3": [[0.789676, 0.800901, 0.890024], [-1.596162, 0, 0], [-0.486808, -0.397631, 0]],
}


def apart(given, *overrides):
    """A policy that has moved from its reference before the step's rollouts are prepared."""
    table = Table(REFERENCE, rewards=[2.0, 0.0, 1.0])
    made = given(table, "rollout.prompts=1", "rollout.group_size=3", *overrides)
    return made.move(logp=MOVED)


@pytest.mark.parametrize("estimator", PLUS_PLUS)
def test_kl_returns_with_whitening_are_reinforce_plus_plus(given, estimator):
    shaper = f"{{type: kl_returns, kl: {{coefficient: 0.5, estimator: {estimator}}}}}"
    made = apart(given, *RAW, f"algorithm.shaping=[{shaper}, whitening]")
    close(made.prepare().advantages, PLUS_PLUS[estimator], atol=5e-6)
    made.learn()
    close(made.gradient(), [[-a / 6 for a in row] for row in PLUS_PLUS[estimator]], atol=5e-6)


def test_a_decision_pays_for_those_after_it(given):
    # Differences 0.2, -0.5, 0: at half the price and a discount of 0.5, the first pays 0.5 (0.2 - 0.25).
    made = apart(given, *RAW, "algorithm.shaping=[{type: kl_returns, kl: {coefficient: 0.5}, gamma: 0.5}]")
    found = made.prepare().advantages
    close(found[0], [2 + 0.025, 2 + 0.25, 2.0])
    close(found[2, :2], [1 - 0.5 * (0.6 - 0.25), 1 + 0.25])
    made.learn()
    close(made.metrics.result()["reward_kl"], (0.2 - 0.5 - 0.5 + 0.6 - 0.5) / 6)


def test_a_rollout_pays_before_its_group_is_compared(given):
    """RLOO of TRL: rewards less beta times the sum of log-ratios, then the mean of the others."""
    options = ["algorithm.baseline=leave_one_out", "algorithm.scale=none"]
    made = apart(given, *options, "algorithm.transforms=[{type: kl_penalty, kl: {coefficient: 0.5}}]")
    a, b, c = 2 + 0.15, 0 + 0.25, 1 - 0.05
    close(made.prepare().advantages[:, 0], [a - (b + c) / 2, b - (a + c) / 2, c - (a + b) / 2])


def test_the_price_may_follow_the_divergence(given):
    """verl's adaptive controller, as a control of the coefficient."""
    price = "{type: adaptive, metric: reward_kl, target: 0.1, start: 0.5}"
    table = Table([[-1.0]] * 2, rewards=[1.0, 0.0])
    made = given(table, *RAW, "rollout.prompts=1", "steps=3",
                 f"algorithm.shaping=[{{type: kl_returns, kl: {{coefficient: {price}}}}}]")  # fmt: skip
    made.trainer.train()
    rows = made.trainer.run.rows
    assert rows[0]["reward_kl"] == 0.0 and rows[1]["reward_kl"] != 0.0
    close(rows[1]["control/algorithm.shaping.0.kl.coefficient"], 0.5 * (1 - 0.1 * 0.2))
