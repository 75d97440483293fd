"""Baselines and scales beside the most common ones, from their keys to the advantages."""

import json
import math

import pytest

from mmrl.errors import UserError
from mmrl.prompts.sampler import Permutation
from mmrl.settings import option
from tests.joints.parts import Table, close

UNSCALED = ["algorithm.scale=none"]


def advantages(given, table, *overrides, size=3, **options):
    made = given(table, f"rollout.group_size={size}", *overrides, **options)
    rollouts = made.prepare()
    made.learn()  # the gradient of a decision is -A over the number of decisions
    counted = rollouts.mask
    close(made.gradient()[counted], -rollouts.advantages[counted] / int(counted.sum()))
    return rollouts.advantages[:, 0]


def groups(**columns):
    return Table([[-1.0]] * 6, group=[0, 0, 0, 1, 1, 1], rewards=[1.0, 2.0, 6.0, 0.0, 4.0, 5.0], **columns)


# --- quantile ---


@pytest.mark.parametrize(
    ("q", "expected"),
    [(0.5, [-1.0, 0.0, 4.0, -4.0, 0.0, 1.0]), (1.0, [-5, -4, 0, -5, -1, 0]), (0.25, [-0.5, 0.5, 4.5, -2, 2, 3])],
)
def test_quantile(given, q, expected):
    close(advantages(given, groups(), *UNSCALED, f"algorithm.baseline={{type: quantile, q: {q}}}"), expected)


def test_the_quantile_is_by_default_the_median(given):
    close(advantages(given, groups(), *UNSCALED, "algorithm.baseline=quantile"), [-1.0, 0.0, 4.0, -4.0, 0.0, 1.0])


def test_an_own_baseline_is_divided_by_the_scale_of_the_rewards(given):
    # Around 3 and 3: squares 4 + 1 + 9 and 9 + 1 + 4, over 2 each.
    expected = [a / math.sqrt(7) for a in (-1, 0, 4, -4, 0, 1)]
    close(advantages(given, groups(), "algorithm.baseline=quantile"), expected, atol=5e-6)


def test_the_quantile_leaves_out_what_could_not_be_scored(given):
    table = Table([[-1.0]] * 3, rewards=[1.0, math.nan, 5.0])
    close(advantages(given, table, *UNSCALED, "algorithm.baseline=quantile"), [-2.0, 0.0, 2.0])


# --- batch mean ---


def test_batch_mean(given):
    close(advantages(given, groups(), *UNSCALED, "algorithm.baseline=batch_mean"), [-2.0, -1, 3, -3, 1, 2])


def test_batch_mean_and_batch_std_whiten_the_batch(given):
    # A group that is all alike still learns that it is below the others: 1, 1 and 2, 4 around 2, squares 1, 1, 0, 4.
    table = Table([[-1.0]] * 4, group=[0, 0, 1, 1], rewards=[1.0, 1.0, 2.0, 4.0])
    options = ["algorithm.baseline=batch_mean", "algorithm.scale=batch_std"]
    close(advantages(given, table, *options, size=2), [a / math.sqrt(2) for a in (-1, -1, 0, 2)], atol=5e-6)


def test_the_batch_mean_leaves_out_what_could_not_be_scored(given):
    table = Table([[-1.0]] * 3, rewards=[1.0, math.nan, 5.0])
    close(advantages(given, table, *UNSCALED, "algorithm.baseline=batch_mean"), [-2.0, 0.0, 2.0])


# --- running ---

RUNNING = "algorithm.baseline={type: running, prior: 0.5, strength: 2, half_life: 1}"


def seen(rewards, prompts, group=None):
    table = Table([[-1.0]] * len(rewards), group=group or list(range(len(rewards))), rewards=rewards)
    rollouts = table.rollouts()
    rollouts.prompt = rollouts.prompt.new_tensor(prompts)
    return table, rollouts


def after(made, rewards, prompts):
    return made.prepare(seen(rewards, prompts)[1]).advantages[:, 0]


def test_running_begins_with_the_prior_and_remembers(given):
    table, first = seen([1.0, 0.0], [3, 5])
    made = given(table, "rollout.group_size=1", *UNSCALED, RUNNING)
    close(made.prepare(first).advantages[:, 0], [0.5, -0.5])
    # Next step: prompt 3 has (1 + 1) / (2 + 1) before, prompt 5 has 1 / 3.
    close(after(made, [1.0, 1.0], [3, 5]), [1 - 2 / 3, 1 - 1 / 3])
    # One step passed: half of what was there stays. Prompt 3: (2 / 2 + 1) / (3 / 2 + 1) = 2 / 2.5.
    close(after(made, [0.0, 0.0], [3, 7]), [-0.8, -0.5])
    # Prompt 5 was seen two steps ago with (1 / 2 + 1) / (3 / 2 + 1) = 1.5 / 2.5.
    close(after(made, [0.0, 0.0], [5, 8]), [-0.6, -0.5])
    # Of its 1.5 and 2.5 a half stays, for not less than keep_least does: 0.75 / (1.25 + 1).
    close(after(made, [0.0, 0.0], [5, 9]), [-0.75 / 2.25, -0.5])


def test_running_counts_all_rollouts_of_a_prompt_once(given):
    table, first = seen([1.0, 0.0, 1.0], [3, 3, 4])
    made = given(table, "rollout.group_size=1", *UNSCALED, RUNNING)
    close(made.prepare(first).advantages[:, 0], [0.5, -0.5, 0.5])
    close(after(made, [1.0, math.nan, 0.0], [3, 3, 4]), [1 - 2 / 4, 0.0, -2 / 3])  # what is not scored has no part
    close(after(made, [0.0, 0.0, 0.0], [3, 3, 6]), [-2 / 3, -2 / 3, -0.5])  # (2 / 2 + 1) / (4 / 2 + 1)


def test_what_is_remembered_goes_through_json(given):
    table, first = seen([1.0, 0.0], [3, 5])
    made = given(table, "rollout.group_size=1", *UNSCALED, RUNNING)
    made.prepare(first)
    other = given(table, "rollout.group_size=1", *UNSCALED, RUNNING)
    other.trainer.preparation.memory = json.loads(json.dumps(made.trainer.preparation.memory))
    close(after(made, [1.0, 1.0], [3, 5]), after(other, [1.0, 1.0], [3, 5]))


def test_running_keeps_within_its_bounds(given):
    table, first = seen([1.0], [3])
    bounded = RUNNING.replace("half_life: 1", "half_life: 1, keep_most: 0.1, keep_least: 0")
    made = given(table, "rollout.group_size=1", *UNSCALED, bounded)
    made.prepare(first)  # (0.1 x 1 + 1) / (0.1 x 2 + 1), though no step had passed
    close(after(made, [0.0], [3]), [-1.1 / 1.2])


# --- greedy ---


class Chosen(Permutation):
    """Prompts in an order that is given."""

    order: list[int] = option([], "indices")

    def draw(self, count):
        return self.order[:count]


ORDER = 'rollout.sampler={{type: "tests.joints.test_baselines:Chosen", order: {}}}'


def test_greedy(given):
    """The greedy response of a prompt is the table's row of its id, here 1 and 3; it is asked once a prompt."""
    table = Table([[-1.0]] * 4, group=[0, 0, 1, 1], rewards=[1.0, 2.0, 6.0, 4.0])
    made = given(table, *UNSCALED, "algorithm.baseline=greedy", ORDER.format([1, 3]))
    rollouts = made.next()
    asked = [call for call in made.trainer.policy.calls if call.what == "respond"]
    assert len(asked) == 1 and len(asked[0].seeds) == 2 and asked[0].temperature == 0
    made.prepare(rollouts)
    close(rollouts.advantages[:, 0], [1.0 - 2, 2.0 - 2, 6.0 - 4, 4.0 - 4])
    made.learn()
    close(made.gradient()[:, 0], [1 / 4, 0, -2 / 4, 0])


def test_without_the_baseline_nothing_is_asked_greedily(given):
    made = given(Table([[-1.0]] * 4, group=[0, 0, 1, 1]))
    made.next()
    assert [call.what for call in made.trainer.policy.calls] == ["rollout"]


def test_greedy_takes_components_as_the_rewards_are_taken(given):
    table = Table([[-1.0]] * 2, group=[0, 1], rewards=[[1.0, 2.0], [3.0, 4.0]])
    options = ["task.names=[a, b]", "task.weights=[2, 1]", "rollout.group_size=1", ORDER.format([1, 0])]
    for components, expected in (("sum", [4 - 10, 10 - 4]), ("{type: gated, gates: [a]}", [2 - 12, 12 - 2])):
        made = given(table, *UNSCALED, "algorithm.baseline=greedy", f"algorithm.components={components}", *options)
        rollouts = made.next()
        made.prepare(rollouts)
        close(rollouts.advantages[:, 0], expected)


def test_greedy_rewards_travel_with_further_rollouts(given):
    """Demonstrations have no greedy response, and no advantage."""
    table = Table([[-1.0]] * 6, group=[0, 0, 1, 1, 2, 2], rewards=[1.0, 2.0, 6.0, 4.0, 0.0, 0.0])
    extras = "rollout.extras=[{type: demonstrations, prompts: 2}]"
    made = given(table, *UNSCALED, "algorithm.baseline=greedy", extras)
    rollouts = made.prepare(made.next())
    assert len(rollouts) == 6
    close(rollouts.advantages[4:, 0], [0.0, 0.0])


REFUSED = [
    (["algorithm.baseline=greedy", "evaluation.temperature=0.7"], "set evaluation.temperature=0"),
    (["algorithm.baseline=greedy", "algorithm.transforms=[rank]"], "algorithm.transforms=[]"),
    (["algorithm.baseline=running", "algorithm.components=normalise_each"], "algorithm.components=sum or gated"),
    (["algorithm.baseline=quantile", "rollout.group_size=1"], "raise rollout.group_size"),
    (["algorithm.baseline=median"], "algorithm.baseline.type=median is unknown"),
    (["algorithm.components={type: gated, gates: [lenght]}"], "lenght is not a reward; choose from mark"),
    (
        ["algorithm.components={type: gated, gates: [mark]}"],
        "gates names every reward (mark), so that no reward is left to multiply",
    ),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_does_not_fit_is_refused(given, options, message):
    with pytest.raises(UserError) as refusal:
        given(groups(), *options)
    assert message in str(refusal.value)


# --- scale of quantile buckets ---


def test_groups_of_like_accuracy_share_a_deviation(given):
    # Accuracies 0.5, 0.9, 0.4: at the median 0.5 and below are groups 0 and 2, above is group 1.
    # Rewards of 0 and 2 around 4.5: 1, 3, 5, 9: squares 12.25 + 2.25 + 0.25 + 20.25 over 3; of group 1: 8 over 1.
    table = Table(
        [[-1.0]] * 6,
        group=[0, 0, 1, 1, 2, 2],
        rewards=[1.0, 3.0, 0.0, 4.0, 5.0, 9.0],
        accuracy=[0.0, 1.0, 0.8, 1.0, 0.3, 0.5],
    )
    hard, easy = math.sqrt(35 / 3), math.sqrt(8)
    expected = [-1 / hard, 1 / hard, -2 / easy, 2 / easy, -2 / hard, 2 / hard]
    scale = "algorithm.scale={type: quantile_bucket_std, count: 2}"
    close(advantages(given, table, scale, size=2), expected, atol=5e-6)
    one = "algorithm.scale={type: quantile_bucket_std, count: 1}"  # that is the batch: 0 1 3 4 5 9 around 22 / 6
    batch = math.sqrt((132 - 22**2 / 6) / 5)
    close(advantages(given, table, one, size=2), [a / batch for a in (-1, 1, -2, 2, -2, 2)], atol=5e-6)


def test_cuts_between_buckets_are_quantiles_of_groups_not_of_rollouts(given):
    """Accuracies 0.2, 0.5 and 0.9 of groups of four, two and two: groups 0 and 1 are at or below the median, whose
    rewards 0 2 0 2 1 3 are around 4 / 3: 18 - 64 / 6 over 5. Group 2 has 0 and 8: 32 over 1."""
    table = Table(
        [[-1.0]] * 8,
        group=[0, 0, 0, 0, 1, 1, 2, 2],
        rewards=[0.0, 2.0, 0.0, 2.0, 1.0, 3.0, 0.0, 8.0],
        accuracy=[0.2] * 4 + [0.5] * 2 + [0.9] * 2,
    )
    hard, easy = math.sqrt((18 - 64 / 6) / 5), math.sqrt(32)
    expected = [-1 / hard, 1 / hard] * 3 + [-4 / easy, 4 / easy]
    scale = "algorithm.scale={type: quantile_bucket_std, count: 2}"
    close(advantages(given, table, scale, size=2), expected, atol=5e-6)


def test_buckets_by_the_confidence_of_the_policy(given):
    # The mean log-likelihood of group 1 is the highest; the others share theirs.
    table = Table(
        [[-2.0], [-2.0, -4.0], [-0.1], [-0.3], [-3.0], [-5.0]],
        group=[0, 0, 1, 1, 2, 2],
        rewards=[1.0, 3.0, 0.0, 4.0, 5.0, 9.0],
    )
    hard, easy = math.sqrt(35 / 3), math.sqrt(8)
    scale = "algorithm.scale={type: quantile_bucket_std, by: logp, count: 2}"
    expected = [-1 / hard, 1 / hard, -2 / easy, 2 / easy, -2 / hard, 2 / hard]
    close(advantages(given, table, scale, size=2), expected, atol=5e-6)


# --- the scale that a baseline comes with ---


@pytest.mark.parametrize("kind", ["none", "batch_mean", "running", "greedy"])
def test_a_group_of_one_learns_where_the_baseline_needs_no_group(given, kind):
    """Nobody asked for a scale: that of a group of one would be 0."""
    table = Table([[-1.0]] * 4, group=[0, 1, 2, 3], rewards=[1.0, 0.0, 0.0, 1.0])
    made = given(
        table, "rollout={prompts: 4, group_size: 1}", f"algorithm.baseline={kind}", "algorithm.surrogate=reinforce"
    )
    made.prepare(made.next())
    made.learn()
    assert made.gradient()[0, 0] < 0 and made.metrics.result()["grad_norm"] > 0.1


def test_methods_have_the_scale_of_their_source(given):
    """Rewards 1, 0, 1: RLOO, OPO with lengths of 1, and REINFORCE, not divided; the mean by a std of 0.57735."""
    table = Table([[-1.0]] * 3, rewards=[1.0, 0.0, 1.0])
    close(advantages(given, table, "algorithm.baseline=leave_one_out"), [0.5, -1.0, 0.5])
    close(advantages(given, table, "algorithm.baseline=length_weighted"), [1 / 3, -2 / 3, 1 / 3])
    close(advantages(given, table, "algorithm.baseline=none"), [1.0, 0.0, 1.0])
    close(advantages(given, table, "algorithm.baseline=mean"), [0.57735, -1.1547, 0.57735], atol=1e-5)
    close(advantages(given, table), [0.57735, -1.1547, 0.57735], atol=1e-5)
    given_one = "algorithm.baseline=leave_one_out", "algorithm.scale=group_std"
    close(advantages(given, table, *given_one), [0.5 / 0.57735, -1 / 0.57735, 0.5 / 0.57735], atol=1e-5)


def test_greedy_is_remax(given):
    """A group that is all right while the greedy response is wrong: 1 each."""
    table = Table([[-1.0]] * 4, group=[0, 0, 1, 1], rewards=[0.0, 0.0, 1.0, 1.0])
    made = given(table, "algorithm.baseline=greedy", ORDER.format([0, 1]), "rollout.prompts=2")
    close(made.prepare(made.next()).advantages[2:, 0], [1.0, 1.0])


def test_a_deviation_of_a_group_of_one_is_refused(given):
    with pytest.raises(UserError, match="the std of a group of one is 0.* set algorithm.scale=none or batch_std"):
        given(groups(), "rollout.group_size=1", "algorithm.baseline=none", "algorithm.scale=group_std")


def test_the_advice_for_a_group_of_one_works(given):
    with pytest.raises(UserError, match="set algorithm.baseline=running, greedy, batch_mean or none"):
        given(groups(), "rollout.group_size=1")
