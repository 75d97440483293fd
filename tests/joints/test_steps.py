"""What changes from step to step: epochs, minibatches, controls, the reference, averages of weights, evaluation."""

import math

import pytest
import torch

from mmrl.errors import UserError
from mmrl.rollouts import Replay
from tests.joints.parts import Table, close
from tests.joints.test_collection import Held


def four(**columns):
    """Two groups of two; with scale=none their advantages are 1, -1 and 2, -2."""
    return Table([[-1.0]] * 4, group=[0, 0, 1, 1], rewards=[2.0, 0.0, 4.0, 0.0], **columns)


def trained(given, *overrides, table=None):
    made = given(table or four(), "algorithm.scale=none", *overrides)
    made.trainer.train()
    return made


# --- epochs and minibatches ---

FREE = ["algorithm.surrogate.low=1", "algorithm.surrogate.high=9"]  # nothing is clipped


def test_two_epochs_of_two_minibatches(given):
    """A minibatch is a group here: its gradients are -A / 2. In the second epoch its own step has moved the ratio."""
    made = trained(given, "steps=1", "algorithm.epochs=2", "algorithm.minibatches=2", *FREE)
    found = [made.gradient(update=i)[:, 0] for i in range(len(made.trainer.engine.gradients))]
    first, second = torch.tensor([-0.5, 0.5, 0, 0]), torch.tensor([0, 0, -1.0, 1.0])
    again = torch.tensor([-0.5 * math.exp(0.5), 0.5 * math.exp(-0.5), 0, 0])
    twice = torch.tensor([0, 0, -math.exp(1.0), math.exp(-1.0)])
    assert len(found) == 4
    for epoch, expected in ((found[:2], (first, second)), (found[2:], (again, twice))):
        ordered = sorted(epoch, key=lambda g: float(g[2].abs()))
        close(ordered[0], expected[0])
        close(ordered[1], expected[1])


def watched(made):
    """The groups of which the policy is asked, in order, and whether for a gradient."""
    asked, replay = [], made.trainer.policy.replay

    def recorded(rollouts, model, **options):
        asked.append((rollouts.group.unique().tolist(), torch.is_grad_enabled()))
        return replay(rollouts, model, **options)

    made.trainer.policy.replay = recorded
    return asked


def test_the_minibatch_that_is_learned_from_first_is_its_own_old_policy(given):
    """So only of the other one the old policy is asked, before the first update has moved the weights of both."""
    made = given(four(), "algorithm.scale=none", "steps=8", "algorithm.minibatches=2", *FREE)
    asked = watched(made)
    made.trainer.train()
    assert [gradient for _, gradient in asked] == [False, True, True] * 8
    firsts = set()
    for step in range(8):
        (other, _), (first, _), (last, _) = asked[3 * step : 3 * step + 3]
        assert other == last and sorted([first, other]) == [[2 * step], [2 * step + 1]]
        both = made.gradient(update=2 * step)[:, 0] + made.gradient(update=2 * step + 1)[:, 0]
        close(both, [-0.5, 0.5, -1.0, 1.0])
        firsts.add(first[0] % 2)
    assert firsts == {0, 1}


def test_an_epoch_takes_every_minibatch_and_the_next_one_may_take_them_in_another_order(given):
    made = given(four(), "algorithm.scale=none", "steps=8", "algorithm.minibatches=2", "algorithm.epochs=2", *FREE)
    asked = watched(made)
    made.trainer.train()
    taken = [groups for groups, gradient in asked if gradient]
    pairs = [(taken[4 * step :][:2], taken[4 * step + 2 :][:2]) for step in range(8)]
    for step, epochs in enumerate(pairs):
        assert all(sorted(epoch) == [[2 * step], [2 * step + 1]] for epoch in epochs)
    assert {first == second for first, second in pairs} == {True, False}


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.epochs=2"],  # it is learned from again when the weights have moved
        ["algorithm.shaping=[{type: entropy, bonus: {alpha: 0.4, kappa: 2}}]"],  # which wants statistics of all
    ],
)
def test_else_the_old_policy_is_asked_of_all(given, overrides):
    made = given(four(entropy=[[1.0]] * 4), "algorithm.scale=none", "steps=1", "algorithm.minibatches=2", *overrides)
    asked = watched(made)
    made.trainer.train()
    assert sorted(groups for groups, gradient in asked if not gradient) == [[0], [1]]


@pytest.mark.parametrize("epochs", [1, 2])
def test_what_a_policy_kept_of_its_rollouts_is_the_old_one_behind_the_first_update(given, epochs):
    """It kept likelihoods below those of a replay, by log 2: where they are used the ratio is 2."""
    options = ["steps=1", "optim.lr=1e-9", "algorithm.minibatches=2", f"algorithm.epochs={epochs}", *FREE]
    made = given(four(), "algorithm.scale=none", *options)
    made.trainer.policy.recorded_replay = lambda rollouts: Replay(torch.full((4, 1), -1.0 - math.log(2)))
    asked = watched(made)
    made.trainer.train()
    first = next(groups for groups, gradient in asked if gradient)
    assert [groups for groups, gradient in asked if not gradient] == ([first] if epochs == 2 else [])
    ratios = [1.0, 1.0, 2.0, 2.0] if first == [0] else [2.0, 2.0, 1.0, 1.0]
    whole = [sign * ratio for sign, ratio in zip((-0.5, 0.5, -1.0, 1.0), ratios, strict=True)]
    found = sum(made.gradient(update=i)[:, 0] for i in range(2 * epochs))
    close(found / epochs, whole)


def test_one_epoch_is_one_update(given):
    made = trained(given, "steps=2", *FREE)
    assert len(made.trainer.engine.gradients) == 2
    for update in range(2):  # each step asks the policy of its time: the ratio is 1 again
        close(made.gradient(update=update)[:, 0], [-0.25, 0.25, -0.5, 0.5])


def test_the_loss_that_is_reported_is_the_mean_of_the_updates(given):
    table = Table([[-1.0]] * 4, group=[0, 0, 1, 1], rewards=[1.0, 1.0, 1.0, 1.0], entropy=[[1.0], [2.0], [3.0], [6.0]])
    options = ["optim.lr=1e-9", "steps=1", "algorithm.terms=[{type: entropy, coefficient: 1}]"]
    for cut in ([], ["algorithm.minibatches=2"], ["algorithm.epochs=3"], ["engine.micro_batch=1"]):
        made = trained(given, *options, *cut, table=table)
        close(made.trainer.run.rows[0]["loss"], -3.0)


# --- controls ---


def test_a_schedule_of_a_clip_bound_acts_in_its_step(given):
    """The first epoch moves every ratio to 1.25 or 0.8; whether the second has a gradient is up to the bound."""
    table = Table([[-1.0]] * 2, rewards=[2.0, 0.0])
    options = ["rollout.prompts=1", "steps=3", "algorithm.epochs=2", f"optim.lr={2 * math.log(1.25)}"]
    bounds = ["algorithm.surrogate.low=0.9", "algorithm.surrogate.high={type: linear, start: 0.1, end: 0.5, steps: 2}"]
    made = trained(given, *options, *bounds, table=table)
    second = [made.gradient(update=2 * step + 1)[:, 0].tolist() for step in range(3)]
    close(second, [[0.0, 0.4], [-0.625, 0.4], [-0.625, 0.4]])
    values = [row["control/algorithm.surrogate.high"] for row in made.trainer.run.rows]
    close(values, [0.1, 0.3, 0.5])


def test_a_schedule_of_the_lower_bound(given):
    table = Table([[-1.0]] * 2, rewards=[2.0, 0.0])
    options = ["rollout.prompts=1", "steps=2", "algorithm.epochs=2", f"optim.lr={2 * math.log(1.25)}"]
    low = "algorithm.surrogate.low={type: stages, starts: [0, 1], values: [0.1, 0.3]}"
    made = trained(given, *options, low, "algorithm.surrogate.high=0.1", table=table)
    close([made.gradient(update=2 * step + 1)[:, 0].tolist() for step in range(2)], [[0.0, 0.0], [0.0, 0.4]])


def test_a_schedule_of_the_temperature(given):
    made = trained(given, "rollout.temperature={type: linear, start: 1, end: 0.5, steps: 2}", "steps=4")
    heats = [call.temperature for call in made.trainer.policy.calls if call.what == "rollout"]
    assert heats == [1.0, 0.75, 0.5, 0.5]


def test_an_adaptive_kl_coefficient_acts_in_the_next_step(given):
    """In step 1 the policy is the reference: KL 0 is below the target, and 0.1 becomes 0.1 x (1 - 0.5 x 0.2) = 0.09.
    Then the policy has moved by d = 0.25, -0.25, 0.5, -0.5, far past the target: 0.09 x 1.1."""
    control = "{type: adaptive, start: 0.1, metric: kl, target: 1.0e-4, rate: 0.5}"
    made = trained(given, "steps=2", f"algorithm.terms=[{{type: kl, coefficient: {control}}}]")
    d = [0.25, -0.25, 0.5, -0.5]
    expected = [(-a + 0.09 * (1 - math.exp(-x))) / 4 for a, x in zip((1, -1, 2, -2), d, strict=True)]
    close(made.gradient()[:, 0], expected)
    rows = made.trainer.run.rows
    close([row["kl"] for row in rows], [0.0, sum(math.exp(-x) - 1 + x for x in d) / 4])
    assert [row["control/algorithm.terms.0.coefficient"] for row in rows] == pytest.approx([0.1, 0.09])
    assert made.trainer.config.algorithm.terms[0].coefficient.value == pytest.approx(0.099)


def test_entropy_that_follows_a_target(given):
    """Entropy 3 is above 1: the coefficient falls from 0.5 to 0.3."""
    control = "{type: additive, start: 0.5, metric: entropy, target: 1, rate: 0.2}"
    options = ["steps=2", "optim.lr=1e-9", f"algorithm.terms=[{{type: entropy, coefficient: {control}}}]"]
    made = trained(given, *options, table=four(entropy=[[3.0]] * 4))
    close([made.gradient("entropy", update=i)[0, 0] for i in range(2)], [-0.5 / 4, -0.3 / 4])


# --- the reference ---


def test_the_reference_is_what_the_run_started_from(given):
    # A = 2, 0, 4, 0: each step moves logp by A / 4, on average by 6 / 16. k1 is what it moved by.
    term = "algorithm.terms=[{type: kl, estimator: k1, coefficient: 1.0e-9}]"
    made = trained(given, "algorithm.baseline=none", "steps=3", term)
    close([row["kl"] for row in made.trainer.run.rows], [0.0, 6 / 16, 12 / 16], atol=1e-5)


def test_a_reference_that_is_taken_anew(given):
    term = "algorithm.terms=[{type: kl, estimator: k1, coefficient: 1.0e-9, against: {reset_every: 2}}]"
    made = trained(given, "algorithm.baseline=none", "steps=5", term)
    close([row["kl"] for row in made.trainer.run.rows], [0.0, 6 / 16, 0.0, 6 / 16, 0.0], atol=1e-5)


@pytest.mark.parametrize(
    ("against", "resets"),
    [("{reset_every: 2}", [2, 4]), ("{reset_every: 2, reset_optimizer: false}", []), ("reference", [])],
)
def test_the_optimizer_begins_anew_with_its_reference(given, against, resets):
    made = trained(given, "steps=5", f"algorithm.terms=[{{type: kl, against: {against}}}]")
    assert made.trainer.engine.resets == resets


@pytest.mark.parametrize(
    ("against", "kept"),
    [("reference", []), ("{reset_every: 2}", ["reference"]), ("{type: ema, decay: 0.5}", ["reference"])],
)
def test_checkpoints_hold_a_reference_that_moves(given, against, kept):
    made = given(Table([[-1.0]] * 2), f"algorithm.terms=[{{type: kl, against: {against}}}]", "rollout.prompts=1")
    assert list(made.trainer._copies()) == kept


# --- averages of weights ---


def test_the_sampling_policy(given):
    """The decay of update n is 0.25 (n - 1), at most 0.3. Weights grow by c = 1/4 a step."""
    # After steps 1 and 2 the average is the policy; after step 3 it is 0.25 x 2c + 0.75 x 3c = 2.75c; after step 4 with
    # the decay 0.3 it is 0.3 x 2.75c + 0.7 x 4c = 3.625c.
    average = "algorithm.sampling_policy={slope: 0.25, most: 0.3, start: 1}"
    made = trained(given, "steps=5", "algorithm.surrogate=reinforce", average)
    seen = [call.weights for call in made.trainer.policy.calls if call.what == "rollout"]
    close(seen, [0.0, 0.25, 0.5, 2.75 / 4, 3.625 / 4])
    # The ratio is to the policy that sampled, which is 0.25c and 0.375c behind; c is 1, -1, 2, -2 over 4.
    gaps = [row["surrogate/ratio_gap"] for row in made.trainer.run.rows]
    behind = [sum(abs(math.exp(b * a / 4) - 1) for a in (1, -1, 2, -2)) / 4 for b in (0, 0, 0, 0.25, 0.375)]
    close(gaps, behind)


def test_without_a_sampling_policy_the_present_one_samples(given):
    made = trained(given, "steps=4", "algorithm.surrogate=reinforce")
    close([call.weights for call in made.trainer.policy.calls if call.what == "rollout"], [0.0, 0.25, 0.5, 0.75])


def test_evaluation_has_its_own_temperature_seeds_and_weights(given):
    """optim.ema: the average's decay is min((1 + n) / (10 + n), 0.05): 0.05 of the past."""
    options = ["evaluation={temperature: 0.3, prompts: 4, every: 1, before: false}", "rollout.temperature=1.5"]
    made = trained(given, "steps=2", "optim.ema=0.05", "algorithm.surrogate=reinforce", *options)
    calls = made.trainer.policy.calls
    asked = [call for call in calls if call.what == "respond"]
    assert {call.temperature for call in asked} == {0.3}
    assert {call.temperature for call in calls if call.what == "rollout"} == {1.5}
    first = 0.05 * 0 + 0.95 * 0.25
    close([call.weights for call in asked], [first, 0.05 * first + 0.95 * 0.5])
    rolled = {seed for call in calls if call.what == "rollout" for seed in call.seeds}
    assert asked[0].seeds == asked[1].seeds and not rolled & set(asked[0].seeds)


def test_a_generator_is_evaluated_with_the_average_and_not_with_the_trained_weights(given):
    """The weights are 4 after a step that the average, 0, has not seen."""
    server, held = "rollout.generator={type: vllm_server}", Held()
    made = given(four(), server, "optim.ema=0.5", generator=held)
    held.policy = made.trainer.policy
    with torch.no_grad():
        made.module.logp[0, 0] = 4.0
    made.trainer.evaluate()
    assert (held.given, held.weights, made.trainer.policy.weights) == (1, 0.0, 4.0)


# --- the best weights ---


def kept(given, measures, *overrides):
    """After which of the evaluations, with these measures one after another, the weights were written."""
    made = given(four(), "checkpoint.best=true", *overrides)
    found, trainer = [], made.trainer
    trainer.save_weights = lambda name: found.append((name, trainer.step))
    for step, value in enumerate(measures, 1):
        trainer.step = step
        trainer.task.measures = lambda samples, group, value=value: {"entropy": torch.full((len(samples),), value)}
        trainer.evaluate()
    return found


def test_the_best_weights_are_those_of_the_metric_that_is_asked_for(given):
    by = "checkpoint.best_by=evaluation/entropy"
    assert kept(given, [0.5, 0.4, 0.7, 0.7], by) == [("best", 1), ("best", 3)]
    assert kept(given, [0.5, 0.4, 0.7, 0.3], by, "checkpoint.best_is=lowest") == [("best", 1), ("best", 2), ("best", 4)]
    assert kept(given, [0.5, 0.4]) == [("best", 1)]  # by accuracy, which stays as it is


def test_a_metric_that_evaluations_do_not_have(given):
    with pytest.raises(UserError, match="checkpoint.best_by=evaluation/entropie is not a metric.*evaluation/entropy"):
        kept(given, [0.5], "checkpoint.best_by=evaluation/entropie")
