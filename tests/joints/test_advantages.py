"""From the rewards of a task to advantages: baseline, scale, components, who takes part, who is compared with whom."""

import math
import statistics

import pytest
import torch

from tests.joints.parts import Table, close

UNSCALED = ["algorithm.scale=none"]
FIVE = {"group": [0, 0, 0, 1, 1], "rewards": [1.0, 2.0, 6.0, 0.0, 4.0]}


def advantages(given, table, *overrides, size=3, **options):
    made = given(table, f"rollout.group_size={size}", *overrides, **options)
    rollouts = made.prepare()
    made.learn()  # the gradient of a decision is -A over the number of decisions
    counted = rollouts.mask
    close(made.gradient()[counted], -rollouts.advantages[counted] / (int(counted.sum()) * options.get("world", 1)))
    return rollouts.advantages[:, 0]


def five(**columns):
    return Table([[-1.0], [-1.0, -1.0], [-1.0], [-1.0], [-1.0, -1.0, -1.0]], **FIVE, **columns)


BASELINES = [
    ("mean", [-2.0, -1.0, 3.0, -2.0, 2.0]),  # 3 and 2
    ("leave_one_out", [-3.0, -1.5, 4.5, -4.0, 4.0]),  # 1 - 4, 2 - 3.5, 6 - 1.5
    ("length_weighted", [-1.75, -0.75, 3.25, -3.0, 1.0]),  # (1 + 2 x 2 + 6) / 4 and 3 x 4 / 4
    ("none", [1.0, 2.0, 6.0, 0.0, 4.0]),
]


@pytest.mark.parametrize(("baseline", "expected"), BASELINES)
def test_baseline(given, baseline, expected):
    close(advantages(given, five(), *UNSCALED, f"algorithm.baseline={baseline}"), expected)


def test_baseline_shrinkage(given):
    """By its definition, one rollout at a time; q is 0.03, 0.07 and, where the others are alike, 1."""
    groups = [[1.0, 2.0, 6.0], [0.0, 4.0], [13.0, 13.5, 15.0]]
    expected = []
    for g, own in enumerate(groups):
        others = [other for h, other in enumerate(groups) if h != g]
        means = [statistics.mean(other) for other in others]
        variances = [statistics.variance(other) for other in others]
        noise = statistics.mean(v / len(other) for v, other in zip(variances, others, strict=True))
        v = statistics.mean(variances) / (len(own) - 1)
        q = v / (v + max(0.0, statistics.variance(means) - noise))
        for i, reward in enumerate(own):
            rest = statistics.mean(own[:i] + own[i + 1 :])
            expected.append(reward - (1 - q) * rest - q * statistics.mean(means))
    table = Table([[-1.0]] * 8, group=[0, 0, 0, 1, 1, 2, 2, 2], rewards=[r for own in groups for r in own])
    close(advantages(given, table, *UNSCALED, "algorithm.baseline=shrinkage"), expected, atol=1e-5)


SCALES = [
    ("none", [-2.0, -1.0, 3.0, -2.0, 2.0]),
    # Squares 4 + 1 + 9 over 2; 4 + 4 over 1.
    ("group_std", [-2 / math.sqrt(7), -1 / math.sqrt(7), 3 / math.sqrt(7), -2 / math.sqrt(8), 2 / math.sqrt(8)]),
    # Of all five around 2.6: 23.2 over 4.
    ("batch_std", [a / math.sqrt(5.8) for a in (-2, -1, 3, -2, 2)]),
]


@pytest.mark.parametrize(("scale", "expected"), SCALES)
def test_scale(given, scale, expected):
    close(advantages(given, five(), f"algorithm.scale={scale}"), expected, atol=5e-6)


def test_group_std_is_the_default_scale_and_mean_the_default_baseline(given):
    close(advantages(given, five()), SCALES[1][1], atol=5e-6)


def test_scale_by_buckets(given):
    # Groups 0 and 2 are hard: 1, 2, 6, 5, 9 around 4.6: 41.2 over 4. Group 1 alone is easy: 8 over 1.
    kinds = [{"level": kind} for kind in ("hard", "hard", "hard", "easy", "easy", "hard", "hard")]
    rewards = [*FIVE["rewards"], 5.0, 9.0]
    table = Table([[-1.0]] * 7, group=[0, 0, 0, 1, 1, 2, 2], rewards=rewards, metadata=kinds)
    hard, easy = math.sqrt(10.3), math.sqrt(8)
    expected = [-2 / hard, -1 / hard, 3 / hard, -2 / easy, 2 / easy, -2 / hard, 2 / hard]
    close(advantages(given, table, "algorithm.scale={type: bucket_std, by: level}"), expected, atol=5e-6)


# --- components ---


def several(rewards, weights, group=None):
    names = "[one, two, three]" if len(rewards[0]) == 3 else "[one, two]"
    table = Table([[-1.0]] * len(rewards), group=group, rewards=rewards)
    return table, f"task.names={names}", f"task.weights={weights}"


def test_components_sum(given):
    # 0.5 x 1 + 2 x 0 = 0.5 and 0.5 x 3 + 2 x 1 = 3.5.
    close(advantages(given, *several([[1.0, 0.0], [3.0, 1.0]], [0.5, 2]), *UNSCALED), [-1.5, 1.5])


def test_a_component_without_weight_is_not_looked_at(given):
    close(advantages(given, *several([[1.0, math.nan], [3.0, 1.0]], [1, 0]), *UNSCALED), [-1.0, 1.0])


def test_components_normalise_each(given):
    # Centred: -1, 1, -2, 2 and 0, 0, -0.5, 0.5; with weights 1 and 2 together -1, 1, -3, 3, whose std is
    # sqrt(20 / 3). A sum that is normalised once would give -1, 1, -3, 3.
    table, *names = several([[0.0, 1.0], [2.0, 1.0], [0.0, 0.0], [4.0, 1.0]], [1, 2], [0, 0, 1, 1])
    expected = [a / math.sqrt(20 / 3) for a in (-1, 1, -3, 3)]
    close(advantages(given, table, *names, *UNSCALED, "algorithm.components=normalise_each"), expected, atol=5e-6)


def test_normalise_each_divides_every_component_by_its_own_std(given):
    # Over their stds: -1, 1 / sqrt 2 each; the second component has no signal in the first group.
    # Together -a, a, -3 a, 3 a: the same as above. In one group of three: (0, 1, 5) and (4, 0, 2).
    table, *names = several([[0.0, 4.0], [1.0, 0.0], [5.0, 2.0]], [1, 1])
    first = [(r - 2) / math.sqrt(7) for r in (0, 1, 5)]  # squares 4 + 1 + 9 over 2
    second = [(r - 2) / 2 for r in (4, 0, 2)]
    both = [a + b for a, b in zip(first, second, strict=True)]
    expected = [a / statistics.stdev(both) for a in both]
    close(advantages(given, table, *names, "algorithm.components=normalise_each"), expected, atol=5e-6)


def test_a_group_without_a_signal_stays_without_one_where_the_batch_is_centred(given):
    # Less the medians: 0, 0, 3 and 0, 0, 0, around 0.5 with squares 7.5 over 5. The second group is not moved by 0.5.
    table, *names = several(
        [[0.0, 1.0], [0.0, 1.0], [3.0, 1.0], [1.0, 2.0], [1.0, 2.0], [1.0, 2.0]], [1, 1], [0] * 3 + [1] * 3
    )
    options = ["algorithm.components=normalise_each", "algorithm.baseline=quantile"]
    expected = [a / math.sqrt(1.5) for a in (-0.5, -0.5, 2.5, 0, 0, 0)]
    close(advantages(given, table, *names, *UNSCALED, *options), expected, atol=5e-6)


def test_components_gated(given):
    # The gate is the second of the three: (2 x 1 + 1 x 3) x 1 = 5, and 0 where it is closed, whatever stands there.
    rewards = [[2.0, 1.0, 3.0], [4.0, 0.0, math.nan]]
    options = "algorithm.components={type: gated, gates: [two]}"
    close(advantages(given, *several(rewards, [1, 7, 1]), *UNSCALED, options), [2.5, -2.5])


def test_two_gates(given):
    rewards = [[2.0, 1.0, 3.0], [1.0, 1.0, 4.0], [1.0, 0.0, 9.0]]
    options = "algorithm.components={type: gated, gates: [two, one]}"
    close(advantages(given, *several(rewards, [1, 7, 2]), *UNSCALED, options), [12 - 20 / 3, 8 - 20 / 3, -20 / 3])


# --- who takes part ---


def test_what_could_not_be_scored_has_no_advantage_and_no_part_in_the_mean(given):
    table = Table([[-1.0]] * 3, rewards=[1.0, math.nan, 5.0])
    close(advantages(given, table, *UNSCALED), [-2.0, 0.0, 2.0])


@pytest.mark.parametrize("rank", [0, 1])
def test_statistics_are_of_all_ranks(given, rank):
    """Both ranks hold the same groups: five rewards twice, 46.4 over 9."""
    found = advantages(given, five(), "algorithm.scale=batch_std", "rollout.prompts=4", world=2, rank=rank)
    close(found, [a / math.sqrt(46.4 / 9) for a in (-2, -1, 3, -2, 2)], atol=5e-6)


class Others:
    """It ranks the responses to one prompt: how many of them were longer."""

    scope = "group"
    seen: list[list[str]] = []

    def score(self, samples):
        self.seen.append([s.response for s in samples])
        return [float(sum(other.response > s.response for other in samples)) for s in samples]


RANKED = '[{name: "tests.joints.test_advantages:Others"}]'
TASKS = {
    "visual_qa": "task={type: visual_qa, data: {type: digits, train_size: 8, eval_size: 8}",
    "manipulation": "task={type: manipulation, simulator: tabletop, tasks: [reach]",
    "given": 'task={type: "tests.joints.parts:GivenTaskSettings"',
}


@pytest.mark.parametrize("task", TASKS)
def test_rewards_of_scope_group_reach_the_task(given, task):
    Others.seen.clear()
    table = Table([[-1.0]] * 4, group=[0, 0, 1, 1])
    made = given(table, f"{TASKS[task]}, rewards: {RANKED}}}", *UNSCALED)
    rollouts = made.next()
    assert Others.seen == [["0", "1"], ["2", "3"]]
    made.prepare(rollouts)
    close(rollouts.advantages[:, 0], [0.5, -0.5, 0.5, -0.5])


def first_letter(sample):
    return float(sample.response)  # the row of the table


def test_where_routes_a_reward_by_prompt(given):
    # The rows of the table are the rewards: 0, 1 of a sum, 2, 3 of a count. "twice" is for counts alone.
    rewards = [
        '{name: "tests.joints.test_advantages:first_letter"}',
        '{name: "tests.joints.test_advantages:first_letter", label: twice, weight: 2, where: {kind: count}}',
    ]
    kinds = [{"kind": "sum"}] * 2 + [{"kind": "count"}] * 2
    table = Table([[-1.0]] * 4, group=[0, 0, 1, 1], metadata=kinds)
    made = given(table, f"task.rewards=[{', '.join(rewards)}]", *UNSCALED)
    rollouts = made.next()
    assert rollouts.rewards.tolist() == [[0, 0], [1, 0], [2, 2], [3, 3]]
    made.prepare(rollouts)
    close(rollouts.advantages[:, 0], [-0.5, 0.5, -1.5, 1.5])


def test_weights_of_rewards_may_be_negative(given):
    close(advantages(given, *several([[1.0, 0.0], [1.0, 2.0]], [1, -1]), *UNSCALED), [1.0, -1.0])


def test_the_samples_table_tells_advantages(given):
    shown = {}
    made = given(five(), *UNSCALED, "rollout.group_size=3", "log.samples_every=1", "log.samples=4")
    made.trainer.run.samples = lambda kind, step, samples, columns: shown.update(columns)
    rollouts = made.prepare()
    made.trainer.step = 1
    made.trainer.log(rollouts, made.metrics)
    close(shown["advantage"], [-2.0, -1.0, 3.0, -2.0, 2.0])  # four are wanted, of whole groups
    assert shown["mark"] == torch.tensor([1.0, 2.0, 6.0, 0.0, 4.0]).tolist()


def test_the_deviation_within_groups_is_reported(given):
    """Beside that of the batch, which does not fall while the groups become all alike."""
    made = given(five(), "rollout.group_size=3")
    made.prepare()
    close(made.metrics.result()["advantages/reward_std_within"], (math.sqrt(7) + math.sqrt(8)) / 2)
    flat = given(Table([[-1.0]] * 4, group=[0, 0, 1, 1], rewards=[1.0, 1.0, 9.0, 9.0]))
    flat.prepare()
    close(flat.metrics.result()["advantages/reward_std_within"], 0.0)
