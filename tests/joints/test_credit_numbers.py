"""Credit beside the code that people run: numbers that public functions gave, through the trainer's own path.

`credit_numbers.json` holds, by repository, the commit and the files, and for each function its inputs and what it
returned: advantages, or a loss and its gradient by the log-probabilities; of decisions that count alone."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mmrl.measurements.implicit import ImplicitRewards, outcome_loss
from mmrl.rollouts import REPLAYED, DecisionColumn, Spans, Turns
from tests.joints.parts import GARBAGE, Table, close
from tests.joints.public_cases import INPUTS

HERE = __name__
PUBLIC = json.loads((Path(__file__).parent / "credit_numbers.json").read_text())["repositories"]
# The methods that this shows, by title of the choice and name, with the repositories.
SHOWN = {
    ("baseline", "greedy"): {"volcengine/verl", "liziniu/ReMax"},
    ("advantage shaper", "token_baseline"): {"volcengine/verl"},
    ("advantage shaper", "subtree_advantages"): {"multimodal-art-projection/TreePO"},
    ("advantage shaper", "implicit_process"): {"PRIME-RL/PRIME"},
    ("advantage shaper", "span_signs"): {"turboLJY/FSPO"},
    ("advantage shaper", "segment_values"): {"McGill-NLP/VinePPO"},
    ("transform of rewards", "view_contrast"): {"tulerfeng/Video-R1"},
    ("mask", "small_advantages"): {"597358816/EFRame"},
    ("source", "advantage_replay"): {"597358816/EFRame"},
}
DIFFERENT = {
    ("advantage shaper", "subtree_advantages"): {"multimodal-art-projection/TreePO"},
    ("advantage shaper", "node_gains"): {"THUDM/TreeRL"},
    ("advantage shaper", "turn_returns"): {"SiliangZeng/Multi-Turn-RL-Agent"},
    ("transform of rewards", "view_contrast"): {"tulerfeng/Video-R1"},
}
PLAIN = "algorithm={type: grpo, baseline: none, scale: none%s}"


def numbers_of(repository, function):
    return PUBLIC[repository]["numbers"][function]


def table(**columns):
    """Two groups of three rollouts, as in `public_numbers.json`."""
    columns = {"rewards": INPUTS["rewards"], "group": INPUTS["group"]} | columns
    return Table(INPUTS["old_logp"], **columns)


def agree(found, rows, atol=2e-5):
    """Whether the decisions of all rows are what they should be; found: [rollout, decision]."""
    found = [values[: len(row)] for values, row in zip(found.detach(), rows, strict=True)]
    return torch.allclose(torch.cat(found), torch.tensor(sum(rows, [])), atol=atol, rtol=0)


# --- baselines ---


@pytest.mark.parametrize(
    ("repository", "function"),
    [("volcengine/verl", "compute_remax_outcome_advantage"), ("liziniu/ReMax", "compute_loss kl_ctl=0")],
)
def test_the_reward_of_a_greedy_response(given, repository, function):
    """The greedy responses to the two prompts are the table's rows 1 and 4."""
    expected = numbers_of(repository, function)
    order = f'rollout.sampler={{type: "tests.joints.test_baselines:Chosen", order: {expected["greedy"]}}}'
    config = "algorithm={type: grpo, baseline: greedy, scale: none, surrogate: reinforce}"
    made = given(table(), config, order, "rollout.group_size=3")
    rollouts = made.prepare(made.next())
    if "advantages" in expected:
        assert agree(rollouts.advantages.expand(6, 4), expected["advantages"])
        return
    made.learn()
    assert agree(made.gradient(), expected["gradient"])


def test_a_baseline_at_each_token(given):
    expected = numbers_of("volcengine/verl", "compute_optimal_token_baseline_advantage")
    config = PLAIN % ", shaping: [token_baseline]"
    made = given(table(square_sum=expected["square_sum"]), config, "rollout.group_size=3")
    assert agree(made.prepare().advantages, expected["advantages"])


# --- trees ---


def of_tree(given, expected, *options):
    """The advantages of rollouts that share the decisions which have the same nodes, [rollout, decision]."""
    nodes, rewards = expected["nodes"], expected["rewards"]
    size = 4
    group = [row // size for row in range(len(nodes))]
    one = Table([[-1.0] * len(row) for row in nodes], group=group, rewards=rewards)
    extras = "rollout.extras=[{type: branches, count: 2}]"
    made = given(one, f"rollout={{prompts: {len(nodes) // size}, group_size: {size}}}", extras, *options)
    numbers = torch.tensor([[*row, *[-1] * (one.mask.shape[1] - len(row))] for row in nodes])
    rollouts = replace(one.rollouts(), nodes=numbers)
    made.prepare(rollouts)
    return rollouts.advantages


@pytest.mark.parametrize(("theirs", "ours"), [("average", "alike"), ("group_size", "size")])
def test_advantages_in_a_group_and_its_subtrees(given, theirs, ours):
    """A set of rollouts that does not branch within a segment counts twice there."""
    function = f"compute_tree_reinforce_plus_plus_baseline_outcome_advantage {theirs}"
    for name, is_equal in ((function, True), (f"{function}, a segment that does not branch", False)):
        expected = numbers_of("multimodal-art-projection/TreePO", name)
        shaping = f"algorithm.shaping=[{{type: subtree_advantages, weights: {ours}}}, whitening]"
        assert agree(of_tree(given, expected, shaping), expected["advantages"]) is is_equal


def test_gains_of_nodes(given):
    """Leaves are compared with the other three of the group there, which makes all values 4/3 times as large. Divided
    by roots of the numbers of leaves, the value of each node is divided by its own there, here the gain."""
    theirs = "gather_paths use_state_value_reward weighted_value_style={} overall_norm_style={}"
    options = "{{type: node_gains, whole: 1, by_leaves: {}}}"
    for style, norm, is_equal in (("original", "none", True), ("sqrt", "none", False), ("sqrt", "token", False)):
        expected = numbers_of("THUDM/TreeRL", theirs.format(style, norm))
        shaping = options.format(str(style == "sqrt").lower())
        found = of_tree(given, expected, "algorithm.scale=none", f"algorithm.shaping=[{shaping}]")
        assert agree(found * 4 / 3, expected["advantages"]) is is_equal


# --- process rewards ---


def test_returns_of_implicit_process_rewards(given, monkeypatch):
    """The reward model says the log-ratios times beta; `batch_norm` there divides beta out again."""
    expected = numbers_of("PRIME-RL/PRIME", "compute_implicit_reward batch_norm compute_rloo_returns")
    accuracy = expected["accuracy"]
    one = table(rewards=accuracy, accuracy=accuracy, ratios=expected["log_ratios"])
    scores = 5.0 * one.columns["ratios"].where(one.mask, 0.0)
    monkeypatch.setattr(ImplicitRewards, "measure", lambda self, rollouts, context: DecisionColumn(scores))
    implicit = "type: implicit_process, beta: 5.0, gamma: 0.9, baseline: released, normalise: true, updates: after"
    returns = f"algorithm={{type: grpo, baseline: leave_one_out, scale: none, shaping: [{{{implicit}}}%s]}}"
    for more, what in (("", "returns"), (", whitening", "advantages")):
        made = given(one, returns % more, "rollout.group_size=3")
        assert agree(made.prepare().advantages, expected[what])


def test_the_loss_of_an_implicit_reward_model():
    expected = numbers_of("PRIME-RL/PRIME", "compute_ce_dpo_loss_rm")
    one = table(ratios=expected["log_ratios"])
    ratios = one.columns["ratios"].where(one.mask, 0.0).requires_grad_()
    loss = outcome_loss((expected["beta"] * ratios).sum(1), torch.tensor(expected["accuracy"])) / 6
    loss.backward()
    close(loss.detach(), expected["loss"])
    assert agree(ratios.grad, expected["gradient"])


def score(sample):
    return INPUTS["rewards"][int(sample.response)]


def signed(sample):
    signs = numbers_of("turboLJY/FSPO", "compute_advantage grpo")["signs"][int(sample.response)]
    return Spans([(t, t + 1, float(sign)) for t, sign in enumerate(signs) if sign], unit="decisions")


def test_signs_of_spans_turn_advantages(given):
    expected = numbers_of("turboLJY/FSPO", "compute_advantage grpo")
    rewards = f"task.rewards=[{{name: '{HERE}:signed', label: process, weight: 0}}, {{name: '{HERE}:score'}}]"
    shaping = "algorithm.shaping=[{type: span_signs, of: decisions}]"
    made = given(table(), rewards, shaping, "algorithm.scale=group_std", "rollout.group_size=3")
    assert agree(made.prepare(made.next()).advantages, expected["advantages"])


def test_gains_of_segments(given):
    """Segments of two decisions. Row 0 is worth what its group earned on average, then what comes of going on."""
    expected = numbers_of("McGill-NLP/VinePPO", "_compute_token_advantages")
    start, *later = expected["values"]
    assert start == (expected["reward"] + 0.0) / 2  # the other rollout earned 0
    one = Table([[-1.0] * 5, [-1.0] * 2, *[[-1.0]] * 2], group=[0, 0, 1, 1], rewards=[expected["reward"], 0.0, *later])
    made = given(one, "rollout.prompts=1", "algorithm.shaping=[{type: segment_values, every: 2, count: 1}]")
    made.trainer.policy.continues = {(0, 2): [2], (0, 4): [3]}
    rollouts = made.prepare(made.next())
    close(rollouts.advantages[0], expected["advantages"])


# --- turns ---


@pytest.mark.parametrize(
    ("function", "second", "is_equal"),
    [
        ("_assign_advantages", [True, True, True], True),
        ("_assign_advantages of a rollout without a tool", [True, True, False], False),
    ],
)
def test_advantages_of_turns_with_a_tool(given, function, second, is_equal):
    """Two decisions of the first turn, the rest of the second. The divisor is the deviation plus 1e-4 there, here plus
    1e-6. A rollout that called no tool gets the advantage of the sum of both rewards there."""
    expected = numbers_of("SiliangZeng/Multi-Turn-RL-Agent", function)
    lengths = [len(row) for row in expected["advantages"]]
    one = Table([[-1.0] * n for n in lengths], rewards=expected["outcomes"])
    options = f"{{type: turn_returns, gamma: 0, outcome: 1, weight: {expected['weight']}}}"
    made = given(one, "rollout={prompts: 1, group_size: 3}", f"algorithm={{type: grpo, shaping: [{options}]}}")
    number = [[0, 0, *[1] * (n - 2), *[0] * (4 - n)] for n in lengths]
    earned = [[tool, 0.0 if reached else GARBAGE] for tool, reached in zip(expected["tools"], second, strict=True)]
    turns = Turns(torch.tensor(number), torch.tensor([[True, reached] for reached in second]), torch.tensor(earned))
    rollouts = replace(one.rollouts(), extras={"turns": turns})
    made.prepare(rollouts)
    assert agree(rollouts.advantages, expected["advantages"], atol=5e-4) is is_equal
    assert not agree(rollouts.advantages, expected["advantages"])


# --- rewards, and what is learned from ---


@pytest.mark.parametrize(
    ("function", "is_equal"),
    [("compute_loss temporal", True), ("compute_loss temporal of graded answers", False)],
)
def test_right_answers_that_need_the_order_of_frames(given, function, is_equal):
    expected = numbers_of("tulerfeng/Video-R1", function)
    accuracy, shuffled = expected["accuracy"], expected["shuffled"]
    rewards = [sum(pair) for pair in zip(accuracy, expected["format"], strict=True)]
    prompts = len(rewards) // 3
    one = Table(
        [[-1.0]] * (6 * prompts),
        group=[row // 3 for row in range(6 * prompts)],
        rewards=rewards + [0.0] * len(shuffled),
        accuracy=accuracy + shuffled,
    )
    transform = PLAIN % ", transforms: [{type: view_contrast, view: no_text}]"  # the table says what a view changes
    made = given(one, transform, f"rollout={{prompts: {prompts}, group_size: 3}}")
    found = made.prepare(made.next()).advantages[:, 0]
    assert torch.allclose(found, torch.tensor(expected["rewards"]), atol=2e-6) is is_equal


def test_rollouts_whose_advantages_are_large_enough(given):
    function = "_select_by_advantage threshold=0.05 _filtering_overlong"
    expected = numbers_of("597358816/EFRame", function)
    one = Table([[-1.0]] * 8, rewards=expected["advantages"], truncated=expected["truncated"])
    made = given(one, "rollout={prompts: 1, group_size: 8}", PLAIN % ", masks: [small_advantages]")
    made.prepare()
    made.learn()
    assert made.gradient()[:, 0].nonzero().flatten().tolist() == expected["kept"]


def test_rollouts_that_are_replayed(given):
    expected = numbers_of("597358816/EFRame", "_select_by_advantage threshold=1")
    one = Table([[-1.0]] * 8, rewards=expected["advantages"])
    term = ", terms: [{type: replay_policy_gradient, coefficient: 1}]"
    source = "extras: [{type: advantage_replay, every: 1}]"
    made = given(one, f"rollout={{prompts: 1, group_size: 8, {source}}}", PLAIN % term)
    made.prepare(made.next(0), 0)
    made.trainer.collector.observe(made.batch)
    rollouts = made.next(1)
    replayed = {rollouts.inputs[row] for row in (rollouts.origin == REPLAYED).nonzero().flatten().tolist()}
    assert sorted(replayed) == expected["kept"]
