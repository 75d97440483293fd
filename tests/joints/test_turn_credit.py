"""Credit over turns, from the key to the gradient of each decision, by hand."""

import math
from dataclasses import replace

import pytest
import torch

from mmrl.build import build_task
from mmrl.config import load
from mmrl.core.turns import discounted_returns, turn_advantages
from mmrl.errors import UserError
from mmrl.rewards import RewardSet, RewardSpec
from mmrl.rewards.turns import conversation_measures
from mmrl.rollouts import Conversation, Message, Prompt, Sample, Turn, Turns
from tests.joints.parts import GARBAGE, Table, close

# Three rollouts of one group: two turns, two turns, one; decisions of turn 0, then those of turn 1.
NUMBER = [[0, 0, 1], [0, 1, 0], [0, 0, 0]]
REACHED = [[True, True], [True, True], [True, False]]
EARNED = [[1.0, 2.0], [0.0, 1.0], [3.0, GARBAGE]]
LOGP = [[-1.0, -2.0, -1.0], [-3.0, -1.0], [-1.0, -1.0]]
ONE = ["rollout.prompts=1", "rollout.group_size=3"]


def talk(*turns, end="environment"):
    return Conversation((Message("user", ("?",)),), tuple(turns), end)


def rollouts(table, talks=None, earned=EARNED, reached=REACHED):
    made = table.rollouts()
    turns = Turns(torch.tensor(NUMBER), torch.tensor(reached), torch.tensor(earned))
    talks = talks or [talk()] * len(made)
    samples = [replace(s, conversation=one) for s, one in zip(made.samples, talks, strict=True)]
    return replace(made, samples=samples, extras={"turns": turns})


def gradient(given, *options, rewards=(0.0, 0.0, 0.0), talks=None, **more):
    table = Table(LOGP, rewards=list(rewards))
    made = given(table, *ONE, *options)
    made.prepare(rollouts(table, talks, **more))
    made.learn()
    return made


def test_returns_of_each_turn_are_compared_with_that_turn_of_the_group(given):
    """R = [2, 2], [0.5, 1], [3]; turn 0: mean 11/6, differences 1/6, -4/3, 7/6; turn 1: mean 1.5, 0.5 and -0.5."""
    made = gradient(given, "algorithm.shaping=[{type: turn_returns, gamma: 0.5, scale: none}]")
    first, second, third = 1 / 6, -4 / 3, 7 / 6
    want = [[first, first, 0.5], [second, -0.5, 0.0], [third, third, 0.0]]
    close(made.gradient(), [[-a / 7 for a in row] for row in want])


def test_returns_are_compared_with_the_others_of_the_group(given):
    """Turn 0: 2 - (0.5 + 3) / 2, 0.5 - (2 + 3) / 2, 3 - (2 + 0.5) / 2; turn 1: 2 - 1 and 1 - 2."""
    options = "{type: turn_returns, gamma: 0.5, scale: none, baseline: leave_one_out}"
    made = gradient(given, f"algorithm.shaping=[{options}]")
    want = [[0.25, 0.25, 1.0], [-2.0, -1.0, 0.0], [1.75, 1.75, 0.0]]
    close(made.gradient(), [[-a / 7 for a in row] for row in want])


def test_returns_divided_by_the_group_s_deviation_and_beside_the_outcome(given):
    """gamma 0: turn 0 earned 1, 0, 3 (mean 4/3, std 1.527525), turn 1 earned 2 and 1 (std 0.707107)."""
    options = "{type: turn_returns, gamma: 0, weight: 0.5, outcome: 2}"
    made = gradient(given, "algorithm.scale=none", f"algorithm.shaping=[{options}]", rewards=(1.0, 0.0, 2.0))
    std, late = 1.527525, 0.5 / 0.707107
    outcome = [0.0, -2.0, 2.0]
    turn = [0.5 * (1 - 4 / 3) / std, 0.5 * (0 - 4 / 3) / std, 0.5 * (3 - 4 / 3) / std]
    want = [
        [turn[0], turn[0], 0.5 * late],
        [outcome[1] + turn[1], outcome[1] - 0.5 * late, 0.0],
        [outcome[2] + turn[2], outcome[2] + turn[2], 0.0],
    ]
    close(made.gradient(), [[-a / 7 for a in row] for row in want])


def test_gated_turns_earn_where_the_outcome_holds(given):
    """Only the third rollout is right: R_0 = 0, 0, 3."""
    options = "{type: turn_returns, gate: mark, scale: none}"
    made = gradient(given, f"algorithm.shaping=[{options}]", rewards=(0.0, 0.0, 1.0))
    want = [[-1.0, -1.0, 0.0], [-1.0, 0.0, 0.0], [2.0, 2.0, 0.0]]
    close(made.gradient(), [[-a / 7 for a in row] for row in want])


def test_entropies_of_turns(given):
    """Means of turns: 0.3 and 0.9, 0.5 and 0.7, and 0.1, scaled to 1/4, 1, 1/2, 3/4 and 0. Row 1's last column is no
    decision, and so is row 2's. Six decisions; advantages 1, -1 and 0."""
    entropy = [[0.2, 0.4, 0.9], [0.5, 0.7], [0.0, 0.2]]
    table = Table(LOGP, rewards=[2.0, 0.0, 1.0], entropy=entropy)
    options = "sure: {k: 2, unit: turn}, bonus: {type: clarity, k: 3, zeta: 0.1, unit: turn}"
    made = given(table, *ONE, "algorithm.scale=none", f"algorithm.shaping=[{{type: entropy, {options}}}]")
    found = made.prepare(rollouts(table)).advantages
    sure = [[math.exp(-0.5), math.exp(-0.5), math.exp(-2)], [math.exp(-1), math.exp(-1.5)], [1.0, 1.0]]
    mean = sum(map(sum, sure)) / 7
    first, second = 0.1 * math.exp(-3), 0.1 * math.exp(-3 * 0.75)
    close(found[0], [sure[0][0] / mean + first, sure[0][1] / mean + first, sure[0][2] / mean], atol=1e-5)
    close(found[1, :2], [-sure[1][0] / mean + second, -sure[1][1] / mean], atol=1e-5)
    close(found[2, :2], [0.0, 0.0], atol=1e-5)


@pytest.mark.parametrize("options", ["sure: {unit: turn}", "bonus: {type: clarity, unit: turn}"])
def test_entropies_of_turns_need_turns(options):
    with pytest.raises(UserError, match=r"entropy\) needs turns of a conversation"):
        load("visual_qa_digits", [f"algorithm.shaping=[{{type: entropy, {options}}}]"])


def test_a_turn_that_one_rollout_reached_alone_gets_nothing():
    reached = torch.tensor([[True, True], [True, False]])
    found = turn_advantages(torch.tensor([[1.0, 5.0], [0.0, GARBAGE]]), reached, torch.tensor([0, 0]), scale="none")
    assert found.tolist() == [[0.5, 0.0], [-0.5, 0.0]]


def test_groups_are_apart():
    values = torch.tensor([[1.0], [3.0], [10.0], [10.0]])
    found = turn_advantages(values, torch.ones(4, 1, dtype=torch.bool), torch.tensor([0, 0, 1, 1]), scale="none")
    assert found.flatten().tolist() == [-1.0, 1.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="group_std or none; got 'std'"):
        turn_advantages(values, torch.ones(4, 1, dtype=torch.bool), torch.zeros(4), scale="std")


def test_discounting():
    assert discounted_returns(torch.tensor([[1.0, 2.0, 4.0]]), 0.5).tolist() == [[3.0, 4.0, 4.0]]


CALLED = Turn("zoom()", tool="zoom")
FAILED = Turn("zoom()", tool="zoom", error="the box is empty")


def test_curiosity_pays_those_who_use_a_tool_that_is_used_too_seldom(given):
    """One of three used a tool, where 0.5 are wanted: 0.6 x (0.5 - 1/3) = 0.1 for that one."""
    talks = [talk(CALLED, Turn("1")), talk(FAILED, Turn("1")), talk(Turn("1"))]
    made = gradient(given, "algorithm.shaping=[{type: curiosity, target: 0.5, weight: 0.6}]", talks=talks)
    close(made.gradient(), [[-0.1 / 7] * 3, [0, 0, 0], [0, 0, 0]])
    assert made.metrics.result()["curiosity/share"] == pytest.approx(1 / 3)


def test_curiosity_is_satisfied(given):
    talks = [talk(CALLED, Turn("1")), talk(CALLED, Turn("1")), talk(Turn("1"))]
    made = gradient(given, "algorithm.shaping=[{type: curiosity, target: 0.5}]", talks=talks)
    close(made.gradient(), [[0, 0, 0]] * 3)


@pytest.mark.parametrize("end", ["turns", "length"])
def test_over_turn_responses_leave_the_loss_and_the_statistics(given, end):
    """Rewards 1, 0, 5, of which the last is masked: the mean of the others is 0.5. Five decisions are left."""
    talks = [talk(), talk(), talk(end=end)]
    options = ("algorithm.scale=none", "algorithm.masks=[{type: over_turn}]")
    made = gradient(given, *options, rewards=(1.0, 0.0, 5.0), talks=talks)
    close(made.gradient(), [[-0.1] * 3, [0.1, 0.1, 0], [0, 0, 0]])


@pytest.mark.parametrize("option", ["shaping=[turn_returns]", "shaping=[curiosity]", "masks=[over_turn]"])
def test_turn_credit_needs_turns(option):
    with pytest.raises(UserError, match=r"needs turns of a conversation \(set task.environment\), which model.type"):
        load("configs/vlm/visual_qa_digits.yaml", [f"algorithm.{option}"])
    load("configs/vlm/visual_qa_zoom.yaml", [f"algorithm.{option}"])


# --- rewards ---


def sample(*turns, answer="7", response="7", end="environment", target=None):
    prompt = Prompt("p", "?", answer=answer, metadata={} if target is None else {"target": target})
    return Sample(prompt, response=response, conversation=talk(*turns, end=end))


def score(name, *samples, **options):
    return RewardSet([RewardSpec(name=name, options=options)]).score(samples)[:, 0].tolist()


def test_the_environment_s_rewards_are_a_reward():
    turns = (Turn("a", reward=1.0), Turn("b", reward=2.0), Turn("c", reward=4.0))
    assert score("environment_return", sample(*turns), gamma=0.5) == [3.0]
    assert score("environment_return", sample(*turns)) == [7.0]


def test_the_tool_bonus_is_for_success_only():
    right, wrong = sample(CALLED, Turn("7")), sample(CALLED, Turn("8"), response="8")
    bare, failed = sample(Turn("7")), sample(FAILED, Turn("7"))
    assert score("tool_bonus", right, wrong, bare, failed) == [1.0, 0.0, 0.0, 0.0]


def test_a_lost_conversation_is_scored_by_nobody():
    values = score("exact_match", sample(Turn("7")), sample(Turn("7"), end="lost"))
    assert values[0] == 1.0 and values[1] != values[1]


def test_measures():
    box = [0.0, 0.0, 0.5, 0.5]
    looked = Turn("zoom()", tool="zoom", facts={"box": box, "image": 0})
    other = Turn("zoom()", tool="zoom", facts={"box": [0.5, 0.5, 1.0, 1.0], "image": 0})
    within = Turn("zoom()", tool="zoom", facts={"box": box, "image": 1})  # of a crop
    samples = [
        sample(looked, Turn("7"), target=box),
        sample(other, Turn("7", reward=2.0), target=box),
        sample(within, end="turns", target=box),
        sample(FAILED, end="lost", target=box),
    ]
    found = {name: values.tolist() for name, values in conversation_measures(samples).items()}
    assert found == {
        "turns/count": [2, 2, 1, 1],
        "turns/tool_share": [1, 1, 1, 0],
        "turns/error_share": [0, 0, 0, 1],
        "turns/over_limit": [0, 0, 1, 0],
        "turns/lost": [0, 0, 0, 1],
        "turns/reward": [0, 2, 0, 0],
        "turns/zoomed_right": [1, 0, 0, 0],
    }
    assert conversation_measures([Sample(Prompt("p", "?"))]) == {}


# --- tools and tasks that pay turns ---

PAID = "algorithm.shaping=[{type: turn_returns, answer: mark, scale: none%s}]"


def test_the_answer_pays_the_last_turn(given):
    """Calls earned 0.2 in the first two rollouts. R: 1.2, 1; 0.2, 0; 1 in its only turn: of turn 0 the mean is 0.8."""
    earned = [[0.2, 0.0], [0.2, 0.0], [0.0, GARBAGE]]
    made = gradient(given, PAID % "", rewards=(1.0, 0.0, 1.0), earned=earned)
    want = [[0.4, 0.4, 0.5], [-0.6, -0.5, 0.0], [0.2, 0.2, 0.0]]
    close(made.gradient(), [[-a / 7 for a in row] for row in want])


def test_mt_grpo_is_not_grpo(given):
    """A call that failed beside a right answer: the first turn loses by it, where GRPO praises both alike."""
    earned = [[0.0, 0.0], [1.0, 0.0], [1.0, GARBAGE]]
    options = PAID % ", gamma: 0, outcome: 1"
    made = gradient(given, "algorithm.scale=none", options, rewards=(1.0, 0.0, 0.5), earned=earned)
    plain = gradient(given, "algorithm.scale=none", rewards=(1.0, 0.0, 0.5), earned=earned)
    close(plain.gradient(), [[-0.5 / 7] * 3, [0.5 / 7, 0.5 / 7, 0.0], [0.0] * 3])
    # Turn 0: 0, 1 and 1.5 (the third answered in it) less 5/6; turn 1: 1 and 0 less 0.5; 0.5, -0.5, 0 of the outcome.
    want = [[0.5 - 5 / 6, 0.5 - 5 / 6, 1.0], [-0.5 + 1 / 6, -1.0, 0.0], [2 / 3, 2 / 3, 0.0]]
    close(made.gradient(), [[-a / 7 for a in row] for row in want])


def test_an_answer_that_could_not_be_scored_is_compared_with_nothing(given):
    made = gradient(given, PAID % ", gamma: 0", rewards=(1.0, float("nan"), 0.0))
    close(made.gradient()[1], [0.0] * 3)


ZOOM = ["run_dir=unset", "task.data.train_size=4", "task.data.eval_size=2", "model={build: 'unused:unused'}"]
TOOL = "task.environment.tools=[{type: zoom, pixels: 64, reward: 0.2}]"


@pytest.mark.parametrize("shaper", ["turn_returns", "milestones"])
def test_credit_of_turns_that_nobody_pays_is_refused(shaper):
    shaping = f"algorithm.shaping=[{shaper}]"
    with pytest.raises(
        UserError,
        match=rf"shaping \({shaper}\) computes advantages from rewards of turns, but task.environment gives none",
    ):
        build_task(load("visual_qa_zoom", [*ZOOM, shaping]))
    build_task(load("visual_qa_zoom", [*ZOOM, shaping, TOOL]))


def test_a_tool_pays_for_calls_that_were_carried_out():
    """The recipe for MT-GRPO's own case; a call that can not be read earns nothing."""
    shaping = "algorithm.shaping=[{type: turn_returns, answer: exact_match}]"
    task = build_task(load("visual_qa_zoom", [*ZOOM, shaping, TOOL]))
    environment, prompt = task.environment.make(), task.train[0]
    environment.start(replace(prompt, messages=(Message("user", prompt.images),)))
    paid = [environment.step(text).reward for text in ("zoom(0, 0, 1, 1)", "zoom(0, 0)", "fly(1)", "7")]
    assert paid == [0.2, 0.0, 0.0, 0.0]
