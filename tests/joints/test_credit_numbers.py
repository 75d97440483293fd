"""Credit beside the code that people run: numbers that public functions gave, through the trainer's own path.

`credit_numbers.json` holds, by repository, the commit and the files, and for each function its inputs and what it
returned: advantages, or a loss and its gradient by the log-probabilities; of decisions that count alone."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mmrl.measurements.chains import CandidateCompletions
from mmrl.measurements.implicit import ImplicitRewards, outcome_loss
from mmrl.prompts.sampler import Outcome, Permutation, PromptSampler
from mmrl.rollouts import REPLAYED, Column, DecisionColumn, Spans, Turn, Turns
from mmrl.schedules.schedule import Schedule
from mmrl.settings import choose
from tests.joints.parts import GARBAGE, Table, close
from tests.joints.public_cases import INPUTS
from tests.joints.test_turn_credit import talk

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
    ("algorithm", "candidate_preference"): {"RockeyCoss/SPO"},
    ("algorithm", "distribution_matching"): {"yuchen-zhu-zyc/DMPO"},
    ("advantage shaper", "long_wrong"): {"Indolent-Kawhi/View-R1"},
    ("weighting of kl", "difficulty"): {"Indolent-Kawhi/View-R1"},
    ("transform of rewards", "certainty"): {"satrams/rent-rl"},
    ("transform of rewards", "pass_at_k"): {"kpahwa16/pass-k-policy-optimization"},
    ("prompt sampler", "skip_flat"): {"Infini-AI-Lab/GRESO"},
    ("control", "adaptive"): {"volcengine/verl"},
    ("control", "additive"): {"SkyworkAI/Skywork-OR1"},
}
DIFFERENT = {
    ("advantage shaper", "subtree_advantages"): {"multimodal-art-projection/TreePO"},
    ("advantage shaper", "node_gains"): {"THUDM/TreeRL"},
    ("advantage shaper", "turn_returns"): {"SiliangZeng/Multi-Turn-RL-Agent"},
    ("transform of rewards", "view_contrast"): {"tulerfeng/Video-R1"},
    ("advantage shaper", "curiosity"): {"TIGER-AI-Lab/Pixel-Reasoner"},
    ("mask", "over_turn"): {"Mini-o3/Mini-o3"},
    ("prompt sampler", "skip_flat"): {"Infini-AI-Lab/GRESO"},
    ("control", "additive"): {"SkyworkAI/Skywork-OR1"},
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


def test_conversations_that_reach_the_limit(given):
    """They leave the loss in both; here the statistics of their group, too."""
    expected = numbers_of("Mini-o3/Mini-o3", "compute_grpo_outcome_advantage ignore_exceed")
    one = table()
    made = given(one, "algorithm={type: grpo, masks: [over_turn]}", "rollout.group_size=3")
    rollouts = one.rollouts()
    ends = [talk(end="turns" if flag else "environment") for flag in expected["exceeded"]]
    samples = [replace(s, conversation=end) for s, end in zip(rollouts.samples, ends, strict=True)]
    rollouts = replace(rollouts, samples=samples)
    made.prepare(rollouts)
    learned = rollouts.advantages.expand(6, 4).where(rollouts.mask, 0.0)
    assert not agree(learned, expected["advantages"])
    for row, flag in enumerate(expected["exceeded"]):
        assert (not learned[row].any()) is (not any(expected["advantages"][row])) is flag


def test_a_bonus_for_a_tool_that_is_used_too_seldom(given):
    """There it is divided by the share, by 4 and so on, a part of the reward, and smaller the more calls there are."""
    expected = numbers_of("TIGER-AI-Lab/Pixel-Reasoner", "shaped rewards")
    one = Table([[-1.0]] * 6, rewards=expected["accuracy"])
    made = given(one, PLAIN % ", shaping: [curiosity]", "rollout={prompts: 1, group_size: 6}")
    called, answered = Turn("zoom()", tool="zoom"), Turn("1")
    talks = [talk(*[called] * calls, answered) for calls in expected["calls"]]
    rollouts = one.rollouts()
    samples = [replace(s, conversation=each) for s, each in zip(rollouts.samples, talks, strict=True)]
    turns = Turns(torch.zeros(6, 1, dtype=torch.long), torch.ones(6, 1, dtype=torch.bool), torch.zeros(6, 1))
    rollouts = replace(rollouts, samples=samples, extras={"turns": turns})
    made.prepare(rollouts)
    bonus = rollouts.advantages[:, 0] - torch.tensor(expected["accuracy"])
    theirs = torch.tensor(expected["rewards"]) - torch.tensor(expected["accuracy"])
    assert (bonus > 0).tolist() == (theirs > 0).tolist() == [calls > 0 for calls in expected["calls"]]
    close(bonus[1], 0.5 * (0.3 - 1 / 6))
    close(theirs[1], (0.3 - 1 / 6) / 2 / (1 / 6) * 0.25)


# --- losses of groups ---


@pytest.mark.parametrize("eps", [0.1, 0.03])
def test_pairs_of_candidates_whose_ratios_are_clamped(given, eps):
    """The loss is a mean over steps. The policy is the reference when its rollouts are prepared."""
    expected = numbers_of("RockeyCoss/SPO", f"loss eps={eps} beta=2")
    one = Table(expected["logp"])
    algorithm = f"algorithm={{type: candidate_preference, beta: 2.0, clip: {eps}}}"
    made = given(one, algorithm, "rollout={prompts: 1, group_size: 3}")
    rollouts = one.rollouts()
    rollouts.extras[CandidateCompletions().name] = Column(torch.tensor(expected["completions"]))
    made.prepare(rollouts)
    made.move(logp=expected["moved"])
    close(made.learn(), expected["loss"])
    close(made.gradient(), expected["gradient"])


@pytest.mark.parametrize("baseline", ["none", "mean", "present", "negative"])
def test_distributions_that_are_matched(given, baseline):
    """Half the way was gone when the rollouts were made. The reference is where the policy began."""
    expected = numbers_of("yuchen-zhu-zyc/DMPO", f"compute_loss centering={baseline}")
    one = Table(INPUTS["old_logp"][:3], rewards=INPUTS["rewards"][:3])
    algorithm = f"algorithm={{type: distribution_matching, alpha: {expected['alpha']}, weight_baseline: {baseline}}}"
    made = given(one, algorithm, "rollout={prompts: 1, group_size: 3}", "algorithm.epochs=2")
    moved = INPUTS["moved"][:3]
    made.move(logp=[[value / 2 for value in row] for row in moved])
    made.prepare()
    made.move(logp=moved)
    close(made.learn(), expected["loss"], atol=2e-5)
    assert agree(made.gradient(), expected["gradient"])


# --- lengths, difficulty, certainty ---


def test_wrong_responses_that_are_longer_than_right_ones(given):
    """Right are rewards of 1 there, above a threshold here. Lengths there were 20000 times as large, and its base of
    1.00001, in fp32, is that of one token."""
    expected = numbers_of("Indolent-Kawhi/View-R1", "group_norm use_stcr")
    options = f"{{type: long_wrong, base: {expected['base']}, threshold: 0.9}}"
    made = given(table(rewards=expected["rewards"]), f"algorithm.shaping=[{options}]", "rollout.group_size=3",
                 "algorithm.scale=group_std")  # fmt: skip
    assert agree(made.prepare().advantages.expand(6, 4), expected["advantages"])


def test_penalties_by_the_difficulty_of_the_prompt(given):
    """The mean over sequences of their means of k3. The surrogate has no gradient where the ratio is 1 and rewards
    alone differ, so its part is taken away."""
    expected = numbers_of("Indolent-Kawhi/View-R1", "calculate_kl_weight use_dads")
    one = table(rewards=expected["rewards"], accuracy=expected["accuracy"])
    term = "{type: kl, coefficient: %s, estimator: k3, weighting: difficulty}"
    gradients = []
    for coefficient in (1.0, 1.0e-12):
        config = PLAIN % f", reduce: sequence_mean, terms: [{term % coefficient}]"
        made = given(one, config, "rollout.group_size=3", "algorithm.epochs=2")
        made.prepare()
        made.move(logp=INPUTS["moved"])
        made.learn()
        gradients.append(made.gradient())
    assert agree(gradients[0] - gradients[1], expected["gradient"])


def test_the_mean_entropy_is_the_reward(given):
    expected = numbers_of("satrams/rent-rl", "minimize_entropy")
    config = PLAIN % ", transforms: [{type: certainty, outcome: 0}]"
    made = given(table(entropy=expected["entropy"]), config, "rollout.group_size=3")
    close(made.prepare().advantages[:, 0], expected["rewards"])


# --- prompts and controls ---


@pytest.mark.parametrize(
    ("function", "is_equal"),
    [
        ("easy_probabilistic_skip p=0.5", True),
        ("hard_probabilistic_skip p=0.5", True),
        ("easy_probabilistic_skip p=0.5 of 9 visits", False),
    ],
)
def test_prompts_that_are_skipped(monkeypatch, function, is_equal):
    """With a random number u there, 1 - u here. A hundredth of all visits is never skipped there."""
    reward = 1.0 if function.startswith("easy") else 0.0
    found, theirs = [], []
    for case in numbers_of("Infini-AI-Lab/GRESO", function)["cases"]:
        for number, skipped in case["skipped"]:
            sampler = choose(PromptSampler, {"type": "skip_flat", "explore": 0.5})
            sampler.start(2, 0)
            for _ in range(case["visits"]):
                sampler.observe([Outcome(0, (reward,) * 3, (reward,) * 3)])
            order = iter([[0], [1]])
            monkeypatch.setattr(Permutation, "draw", lambda self, count, order=order: next(order))
            drawn = SimpleNamespace(random=lambda number=number: 1 - number)
            monkeypatch.setattr(type(sampler), "rng", lambda self, key, drawn=drawn: drawn)
            found.append(sampler.draw(1) == [1])
            theirs.append(skipped)
    assert (found == theirs) is is_equal


@pytest.mark.parametrize(
    ("repository", "function", "kind", "is_equal"),
    [
        ("volcengine/verl", "AdaptiveKLController", "adaptive", True),
        ("SkyworkAI/Skywork-OR1", "EntController", "additive", True),
        ("SkyworkAI/Skywork-OR1", "EntController at the target", "additive", False),
    ],
)
def test_values_that_follow_a_metric(repository, function, kind, is_equal):
    """A coefficient of entropies falls at the target itself there, here it stays."""
    expected = numbers_of(repository, function)
    bounds = {"low": expected["least"], "high": expected["most"]} if "most" in expected else {}
    options = {name: expected[name] for name in ("start", "target", "rate")}
    control = choose(Schedule, {"type": kind, "metric": "followed", **options, **bounds})
    found = []
    for step, metric in enumerate(expected["metric"]):
        control.update(step, {"followed": metric})
        found.append(control.value)
    assert (found == pytest.approx(expected["values"], abs=1e-7)) is is_equal


# --- rewards, and what is learned from ---


@pytest.mark.parametrize(
    ("function", "is_equal"),
    [("compute_loss temporal", True), ("compute_loss temporal of graded answers", False)],
)
def test_right_answers_that_need_the_order_of_frames(given, function, is_equal):
    expected = numbers_of("tulerfeng/Video-R1", function)
    accuracy, shuffled = expected["accuracy"], expected["shuffled"]
    rewards = [sum(pair) for pair in zip(accuracy, expected["format"], strict=True)]
    size = expected["size"]
    prompts = len(rewards) // size
    one = Table(
        [[-1.0]] * (2 * size * prompts),
        group=[row // size for row in range(2 * size * prompts)],
        rewards=rewards + [0.0] * len(shuffled),
        accuracy=accuracy + shuffled,
    )
    transform = PLAIN % ", transforms: [{type: view_contrast, view: no_text}]"  # the table says what a view changes
    made = given(one, transform, f"rollout={{prompts: {prompts}, group_size: {size}}}")
    found = made.prepare(made.next()).advantages[:, 0]
    assert torch.allclose(found, torch.tensor(expected["rewards"]), atol=2e-6) is is_equal


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize(("function", "leave_one_out"), [("sloo_minus_one", "true"), ("s", "false")])
def test_the_best_of_k(given, function, leave_one_out, k):
    """Times the number of rollouts, six, since the loss is their mean."""
    expected = numbers_of("kpahwa16/pass-k-policy-optimization", f"{function} k={k}")
    transform = f", transforms: [{{type: pass_at_k, k: {k}, leave_one_out: {leave_one_out}}}]"
    one = Table([[-1.0]] * 6, rewards=expected["rewards"])
    made = given(one, PLAIN % transform, "rollout={prompts: 1, group_size: 6}")
    close(made.prepare().advantages[:, 0] / 6, expected["advantages"])


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
