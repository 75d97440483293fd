"""Trees of text: `branches`, at uncertain tokens and ends of segments, and their credit: of nodes, `prefix_mean`,
`subtree_advantages`, `node_gains`."""

import math

import pytest
import torch

from mmrl.core.credit import branch_advantages, node_gains, shared_means, subtree_advantages
from mmrl.errors import UserError
from tests.joints.parts import Table, close

ONE = ["rollout.prompts=1", "algorithm.scale=none"]
BRANCHES = "rollout.extras=[{type: branches, count: 2%s}]"


def grown(given, options="", *overrides, continues=None, count=None):
    """Rows 0 and 1, of four decisions and of two, are a group. Row 0 is most uncertain before its third decision and
    then before its fourth (nothing is drawn anew at the first); there it becomes row 2 of five, and row 3 of four."""
    logp = [[-1.0] * 4, [-1.0] * 2, [-1.0] * 5, [-1.0] * 4, [-1.0] * 3]
    entropy = [[9.0, 1.0, 3.0, 2.0], [9.0, 0.5], [9.0, 1.0, 3.0, 2.5, 0.0], [9.0, 1.0, 3.0, 2.0], [9.0, 1.0, 3.0]]
    table = Table(logp, group=[0, 0, 1, 1, 1], rewards=[1.0, 0.0, 0.0, 1.0, 1.0], entropy=entropy)
    made = given(table, *ONE, BRANCHES % options, *overrides)
    made.trainer.policy.continues = continues or {(0, 2): [2, 4], (0, 3): [3]}
    return made


def tree(rollouts):
    """Nodes with the ids of branches numbered as they come, from 10 on."""
    own = [number for number in dict.fromkeys(rollouts.nodes.flatten().tolist()) if number > 1000]
    assert all(1 << 32 <= number < 1 << 33 for number in own)
    return [[10 + own.index(n) if n in own else n for n in row] for row in rollouts.nodes.tolist()]


def test_a_group_branches_where_it_is_uncertain(given):
    """Worth of the nodes: two thirds and 0 in the first two decisions, then 1, 0 and 0, then each its own."""
    made = grown(given)
    rollouts = made.next()
    assert rollouts.inputs == [0, 1, 2, 3] and rollouts.group.tolist() == [0] * 4
    assert rollouts.origin.tolist() == [0, 0, 3, 3] and rollouts.rewards[:, 0].tolist() == [1, 0, 0, 1]
    assert tree(rollouts) == [[0] * 5, [1] * 5, [0, 0, 10, 10, 10], [0, 0, 0, 11, 11]]
    made.prepare(rollouts)
    third, half = 1 / 3, 0.5
    expected = [
        [third, third, 2 * third, half, half],
        [-third, -third, -third, -half, -half],
        [third, third, -third, -half, -half],
        [third, third, 2 * third, half, half],
    ]
    close(rollouts.advantages, expected)
    made.learn()
    lengths = [4, 2, 5, 4]  # 15 decisions, each with ratio 1
    counted = [[-a if t < n else 0.0 for t, a in enumerate(row)] for row, n in zip(expected, lengths, strict=True)]
    close(made.gradient()[:4] * 15, counted)
    assert made.metrics.result()["loss"] == pytest.approx(-sum(-a for row in counted for a in row) / 15, abs=1e-6)


def test_a_branch_keeps_what_the_engine_gave_its_parent(given):
    """Row 2 keeps two decisions of row 0 and row 3 three: as sampled then. The others are as the engine samples them
    now, -100 and below."""
    made = grown(given)
    policy = made.trainer.policy
    sample, go_on = policy.rollout, policy.continue_from

    def measured(rollouts, first):
        shape = rollouts.mask.shape
        rollouts.behaviour_logp = first - torch.arange(float(shape.numel())).view(shape)
        return rollouts

    policy.rollout = lambda *inputs, **options: measured(sample(*inputs, **options), 0.0)
    policy.continue_from = lambda *inputs: measured(go_on(*inputs), -100.0)
    found = made.next().behaviour_logp
    close(found[:2], [[0, -1, -2, -3, -4], [-5, -6, -7, -8, -9]])
    close(found[2:], [[0, -1, -102, -103, -104], [0, -1, -2, -108, -109]])


def test_shared_decisions_get_the_mean_of_the_advantages(given):
    """The rollouts' own are a half, less a half twice, and a half: three share two decisions, two the third."""
    made = grown(given, "", "algorithm.shaping=[{type: prefix_mean, scale: none}]")
    rollouts = made.next()
    made.prepare(rollouts)
    sixth = 1 / 6
    expected = [
        [sixth, sixth, 0.5, 0.5, 0.5],
        [-0.5] * 5,
        [sixth, sixth, -0.5, -0.5, -0.5],
        [sixth, sixth, 0.5, 0.5, 0.5],
    ]
    close(rollouts.advantages, expected)
    made = grown(given, "", "algorithm.shaping=[prefix_mean]")
    rollouts = made.next()
    made.prepare(rollouts)
    close(rollouts.advantages, torch.tensor(expected) / math.sqrt(1 / 3), atol=1e-5)  # four rewards, 1 0 0 1


@pytest.mark.parametrize(
    ("weights", "right", "wrong"),
    [("alike", (1 / 2 + 1 / 3 + 0) / 3, -(1 / 2 + 2 / 3) / 2), ("size", (4 / 2 + 3 / 3 + 0) / 9, -(4 / 2 + 6 / 3) / 7)],
)
def test_a_rollout_is_compared_with_its_subtrees(given, weights, right, wrong):
    """Row 0 is in the whole group, in the three that share two decisions, and with row 3 alone, which earned as much.
    Row 2 is in the first two, row 1 in the first."""
    made = grown(given, "", f"algorithm.shaping=[{{type: subtree_advantages, weights: {weights}}}]")
    rollouts = made.next()
    made.prepare(rollouts)
    close(rollouts.advantages, [[right] * 5, [-0.5] * 5, [wrong] * 5, [right] * 5])


def test_a_node_is_worth_what_it_gains_on_the_one_before_it(given):
    """The group is worth 1/2; the node of rows 0, 2 and 3 is worth 2/3, after it that of rows 0 and 3 is worth 1, and
    row 2's own 0. The last nodes of rows 0 and 3 gain nothing. Row 1 is worth 0."""
    made = grown(given, "", "algorithm.shaping=[node_gains]")
    rollouts = made.next()
    made.prepare(rollouts)
    sixth, third = 1 / 6, 1 / 3
    local = [[sixth, sixth, third, 0, 0], [-0.5] * 5, [sixth, sixth, *[-2 * third] * 3], [sixth, sixth, third, 0, 0]]
    close(rollouts.advantages, local)
    made = grown(given, "", "algorithm.shaping=[{type: node_gains, whole: 2, by_leaves: true}]")
    rollouts = made.next()
    made.prepare(rollouts)
    whole = [[sixth, sixth, 0.5, 0.5, 0.5], [-0.5] * 5, [sixth, sixth, *[-0.5] * 3], [sixth, sixth, 0.5, 0.5, 0.5]]
    leaves = [[3, 3, 2, 1, 1], [1] * 5, [3, 3, 1, 1, 1], [3, 3, 2, 1, 1]]
    close(rollouts.advantages, (torch.tensor(local) + 2 * torch.tensor(whole)) / torch.tensor(leaves).sqrt())


def test_gains_of_nodes_of_equal_rewards_are_exactly_0():
    nodes = torch.tensor([[0, 0], [0, 1], [2, 2]])
    assert not node_gains(torch.full((3,), 0.1), torch.zeros(3), nodes, whole=1.0).any()
    found = node_gains(torch.tensor([torch.nan, 1.0, 0.0]), torch.zeros(3), nodes)
    close(found, [[0.5, 0.0], [0.5, 0.0], [-0.5, -0.5]])  # row 0 alone is worth nothing known


PIECES = [["a", "</th", "ink>", "7"], ["b", "</think>"], ["a", "</think>x", "8"], ["a", "</th", "ink>", "9"], ["c"]]


def test_answers_branch_where_a_thought_ends(given):
    """Row 0's thought ends with its third decision, and row 1 ends there: it has no answer to give again. Each other
    branch is a whole new response."""
    options = ", at: text_ends"
    made = grown(given, options, continues={(0, 3): [3], (0, 0): [2]})
    made.table.pieces = PIECES
    rollouts = made.next()
    assert rollouts.inputs == [0, 1, 3, 2]
    assert tree(rollouts)[2] == [0, 0, 0, 10, 10]
    made = grown(given, ", at: {type: text_ends, text: nowhere}", continues={(0, 0): [2, 4]})
    made.table.pieces = PIECES
    assert made.next().inputs == [0, 1, 2, 4]


def test_a_thought_may_end_within_a_decision(given):
    """Row 0 says what ends it in its second decision, with more after it."""
    made = grown(given, ", at: text_ends, width: 2", continues={(0, 2): [2, 4]})
    made.table.pieces = [["a", "</think>x", "8", "</think>"], *PIECES[1:]]
    assert made.next().inputs == [0, 1, 2, 4]


def test_a_point_may_have_several_branches(given):
    made = grown(given, ", width: 2")
    rollouts = made.next()
    assert rollouts.inputs == [0, 1, 2, 4]
    assert tree(rollouts) == [[0] * 5, [1] * 5, [0, 0, 10, 10, 10], [0, 0, 11, 11, 11]]
    made = grown(given, ", width: 2", "rollout.extras.0.count=3")
    assert made.next().inputs == [0, 1, 2, 4, 3]


def test_branches_branch_in_a_later_round_and_never_twice_at_a_point(given):
    """Rows 0 and 2 share their third decision's point, where row 2 began; the next is row 2's own before its fourth."""
    made = grown(given, ", rounds: 2", continues={(0, 2): [2], (2, 3): [4]})
    rollouts = made.next()
    assert rollouts.inputs == [0, 1, 2, 4]
    assert tree(rollouts) == [[0] * 5, [1] * 5, [0, 0, 10, 10, 10], [0, 0, 10, 11, 11]]
    with pytest.raises(UserError, match="rounds=3 is more than count=2"):
        grown(given, ", rounds: 3")


def test_points_keep_apart(given):
    made = grown(given, ", at: {type: uncertain_tokens, apart: 2}", continues={(0, 2): [2], (1, 1): [4]})
    assert made.next().inputs == [0, 1, 2, 4]


def test_segments_end_where_they_do(given):
    """Ends after two decisions, and by entropy that of the surest segments last: row 0 has one end, row 1 none."""
    made = grown(given, ", at: {type: segment_ends, every: 2, by: entropy}", continues={(0, 2): [2], (0, 0): [4]})
    rollouts = made.next()
    assert rollouts.inputs == [0, 1, 2, 4]  # and a whole new response
    assert tree(rollouts) == [[0] * 5, [1] * 5, [0, 0, 10, 10, 10], [11] * 5]
    # Segments of one decision: before the third of row 0 (3), its fourth (2)
    made = grown(given, ", at: {type: segment_ends, every: 1, by: entropy}", continues={(0, 2): [2], (0, 3): [3]})
    assert made.next().inputs == [0, 1, 2, 3]


def test_segments_are_drawn_by_the_seed_and_the_group(given):
    """Of the four ends, after each decision but the last, two are taken: all pairs come, and the same seed repeats."""
    places = {(0, 1): [2, 2], (0, 2): [3, 3], (0, 3): [4, 4], (1, 1): [2, 2]}
    found = []
    for seed in (*range(12), 3):
        made = grown(given, ", at: {type: segment_ends, every: 1}", f"seed={seed}", continues=places)
        del made.table.columns["entropy"]  # nobody asks for it
        found.append((made.next().inputs, made.trainer.policy.calls[-1].seeds))
        made.close()
    assert found[3] == found[12] and len({tuple(inputs) for inputs, _ in found}) > 3
    seeds = [number for _, both in found[:12] for number in both]
    assert len(set(seeds)) == 24


def test_seeds_are_those_of_no_other_responses(given):
    made = grown(given, "", "algorithm.shaping=[{type: segment_values, every: 2, count: 1}]")
    made.next()
    calls = [call.seeds for call in made.trainer.policy.calls]
    assert len(calls) == 3 and len({number for seeds in calls for number in seeds}) == sum(map(len, calls))


def test_a_group_without_points_gets_whole_responses(given):
    table = Table(
        [[-1.0], [-1.0], [-2.0], [-3.0]], group=[0, 0, 1, 1], rewards=[1.0, 0.0, 0.0, 1.0], entropy=[[1.0]] * 4
    )
    made = given(table, *ONE, BRANCHES % "")
    made.trainer.policy.continues = {(0, 0): [2, 3]}
    rollouts = made.next()
    assert rollouts.inputs == [0, 1, 2, 3] and tree(rollouts) == [[0], [1], [10], [11]]
    made.prepare(rollouts)
    close(rollouts.advantages[:, 0], [0.5, -0.5, -0.5, 0.5])


def test_whole_responses_of_a_later_round_have_seeds_of_their_own(given):
    table = Table([[-1.0], [-1.0], [-2.0]], group=[0, 0, 1], rewards=[1.0, 0.0, 0.0], entropy=[[1.0]] * 3)
    made = given(table, *ONE, BRANCHES % ", rounds: 2")
    made.trainer.policy.continues = {(0, 0): [2]}
    assert made.next().inputs == [0, 1, 2, 2]
    seeds = [call.seeds for call in made.trainer.policy.calls if call.what == "continued"]
    assert [len(numbers) for numbers in seeds] == [1, 1] and seeds[0] != seeds[1]


def test_each_group_has_its_own_tree(given):
    logp = [[-1.0] * 2] * 8
    entropy = [[1.0, 2.0], [1.0, 1.0], [1.0, 1.0], [1.0, 2.0], *[[1.0, 1.0]] * 4]
    table = Table(
        logp, group=[0, 0, 1, 1, 2, 2, 2, 2], rewards=[1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0], entropy=entropy
    )
    made = given(table, "algorithm.scale=none", "rollout.extras=[{type: branches, count: 1}]")
    made.trainer.policy.continues = {(0, 1): [4], (3, 1): [5]}
    rollouts = made.next()
    assert rollouts.inputs == [0, 1, 2, 3, 4, 5] and rollouts.group.tolist() == [0, 0, 1, 1, 0, 1]
    made.prepare(rollouts)
    close(rollouts.advantages[:, 0], [0.25, -0.25, -0.5, 0.5, 0.25, 0.5])


def test_log_probabilities_of_the_sampler_are_kept_for_the_beginning():
    """An engine tells them for what it drew alone."""
    from mmrl.collection.branches.source import resize_columns, shared_prefix

    mask = torch.tensor([[True, False, True, False, True]])
    # What was read after the last decision that is kept belongs to the beginning
    assert shared_prefix(mask, torch.tensor([2]), 5).tolist() == [[True, True, True, True, False]]
    assert shared_prefix(mask, torch.tensor([2]), 3).tolist() == [[True] * 3]
    assert shared_prefix(mask, torch.tensor([1]), 7).tolist() == [[True, True, *[False] * 5]]
    assert resize_columns(torch.tensor([[1, 2, 3]]), 4).tolist() == [[1, 2, 3, 0]]


@pytest.mark.parametrize(
    "override", ["algorithm.baseline=leave_one_out", "algorithm.scale=batch_std", "algorithm.transforms=[smoothing]"]
)
def test_nodes_are_compared_by_their_means(given, override):
    with pytest.raises(UserError, match="rollouts form trees"):
        grown(given, "", override)


@pytest.mark.parametrize("shaper", ["prefix_mean", "subtree_advantages", "node_gains"])
def test_credit_of_trees_needs_a_tree(given, shaper):
    with pytest.raises(
        UserError, match=f"{shaper}.* needs rollouts that share their first decisions, as branches of a tree"
    ):
        given(Table([[-1.0]] * 2), *ONE, f"algorithm.shaping=[{shaper}]")


def test_what_ended_earlier_shares_nothing():
    """Columns that were padded, -1, are not one node of two rollouts."""
    rewards, group = torch.tensor([1.0, 0.0, 1.0]), torch.zeros(3, dtype=torch.int64)
    nodes = torch.tensor([[0, -1], [1, -1], [0, 9]])
    close(branch_advantages(rewards, group, nodes, scale="none")[:, 1], [1 / 3, -2 / 3, 1 / 3])
    close(shared_means(rewards, group, nodes), [[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]])
    close(subtree_advantages(rewards, group, nodes), [1 / 6, -2 / 3, 1 / 6])


def test_what_is_unscored_is_in_no_mean():
    rewards, group = torch.tensor([1.0, torch.nan, 0.0]), torch.zeros(3, dtype=torch.int64)
    nodes = torch.tensor([[0, 0], [0, 1], [0, 2]])
    close(subtree_advantages(rewards, group, nodes), [0.5, 0.0, -0.5])
    close(shared_means(rewards, group, nodes), [[0.5, 1.0], [0.5, 0.0], [0.5, 0.0]])
