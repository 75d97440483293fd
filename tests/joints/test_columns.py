"""Facts of rollouts: those of turns, and what is refused because no rollout of the job has it."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from mmrl.build import build_task
from mmrl.config import load
from mmrl.errors import UserError
from mmrl.policies.vlm.turns import turns_of
from mmrl.rollouts import Turn
from tests.joints.parts import Table, close
from tests.joints.test_turn_credit import CALLED, FAILED, ONE, rollouts, talk

ANSWER = Turn("1")
# A call and an answer, a call alone, a call that failed and an answer: 3, 2 and 2 decisions.
TALKS = [talk(CALLED, ANSWER), talk(CALLED), talk(FAILED, ANSWER)]
LOGP = [[-1.0, -2.0, -1.0], [-3.0, -1.0], [-1.0, -1.0]]
TURN_COLUMNS = {"turns": [2, 1, 2], "tool_calls": [1, 1, 1], "tool_errors": [0, 0, 1], "turn_tokens": [1.5, 2, 1]}


def prepared(given, *options, talks=TALKS, rewards=(1.0, 0.0, 3.0)):
    made = given(Table(LOGP, rewards=list(rewards)), *ONE, "algorithm.scale=none", *options)
    return made, made.prepare(rollouts(made.table, talks))


@pytest.mark.parametrize("name", TURN_COLUMNS)
def test_facts_of_turns(given, name):
    made, _ = prepared(given)
    close(made.batch.column(name), TURN_COLUMNS[name])


def test_a_conversation_that_was_lost_has_none(given):
    made, _ = prepared(given, talks=[*TALKS[:2], talk(CALLED, ANSWER, end="lost")])
    assert made.batch.column("tool_calls")[2].isnan() and made.batch.column("turn_tokens")[2].isnan()


def test_the_turns_of_a_lost_conversation_are_not_compared():
    """Their rewards of 0 say nothing: the environment failed."""
    ends = [SimpleNamespace(turns=(CALLED, ANSWER), end=end) for end in ("environment", "lost")]
    drafts = [SimpleNamespace(turns=[torch.tensor([0]), torch.tensor([1])], dialogue=dialogue) for dialogue in ends]
    assert turns_of(drafts).mask.tolist() == [[True, True], [False, False]]


def test_strata_of_turns_change_the_advantages(given):
    """Two turns: 1 and 3, around 2 over sqrt 2; one turn: alone. Plain: 1, 0, 3 less 4/3."""
    shaping = "algorithm.shaping=[{type: stratified, by: turns, alpha: 0.5}]"
    _, found = prepared(given, shaping)
    half, plain = math.sqrt(0.5), [-1 / 3, -4 / 3, 5 / 3]
    close(found.advantages[:, 0], [0.5 * w + 0.5 * p for w, p in zip([-half, 0, half], plain, strict=True)], atol=5e-6)


def test_buckets_and_ranks_and_the_best_by_turns(given):
    """Errors: 0, 0 and 1. The first two share a deviation, and are the least."""
    _, found = prepared(given, "algorithm.scale={type: bucket_std, by: tool_errors}")
    close(found.advantages[:, 0], [-1 / 3 / math.sqrt(0.5), -4 / 3 / math.sqrt(0.5), 0.0], atol=5e-6)
    _, found = prepared(given, "algorithm.masks=[{type: best_of_group, by: turn_tokens, count: 2}]")
    close(found.advantages[:, 0], [-1.0, 0.0, 1.0])
    _, found = prepared(given, "algorithm.transforms=[{type: rank, by: turns}]", "algorithm.baseline=none")
    assert found.advantages[1, 0] != found.advantages[0, 0]


def test_a_gate_that_could_not_be_judged_is_not_closed(given):
    """Turn 0 of the others earned 1 and 3; the second rollout, unscored, is not one that earned 0."""
    shaping = "algorithm.shaping=[{type: turn_returns, gamma: 0, gate: mark, scale: none}]"
    _, found = prepared(given, shaping, rewards=(1.0, math.nan, 1.0))
    close(found.advantages[:, 0], [-1.0, 0.0, 1.0])


def test_groups_whose_accuracy_is_unknown_are_a_bucket_of_their_own(given):
    """Not with those that have 0: rewards 0, 2 of an accuracy of 0 have a std of sqrt 2, 0 and 8 of none sqrt 32."""
    rewards, accuracy = [0.0, 2.0, 0.0, 8.0], [0.0, 0.0, math.nan, math.nan]
    table = Table([[-1.0]] * 4, group=[0, 0, 1, 1], rewards=rewards, accuracy=accuracy)
    made = given(table, "algorithm.scale={type: quantile_bucket_std, count: 1}")
    half = math.sqrt(0.5)
    close(made.prepare().advantages[:, 0], [-half, half, -half, half], atol=5e-6)


REFUSED = [
    (
        "shaping=[{type: stratified, by: calls}]",
        r"stratified\) reads calls, which is not a column .* .they have kind, level",
    ),
    ("shaping=[{type: stratified, by: kind}]", "compares rollouts of a group by kind, which is the same for all"),
    ("shaping=[{type: stratified, by: group/length}]", "by group/length, which is the same for all"),
    ("masks=[{type: best_of_group, by: level, count: 1}]", "compares rollouts of a group by level"),
    ("masks=[{type: best_of_group, by: lenght, count: 1}]", "reads lenght, which is not a column"),
    ("masks=[{type: band, fact: reward/sharp, low: 1}]", "reads reward/sharp, but the task's rewards are mark"),
    ("scale={type: bucket_std, by: task}", "algorithm.scale=bucket_std reads task, which is not a column"),
    ("scale={type: quantile_bucket_std, by: task}", "algorithm.scale=quantile_bucket_std reads task"),
    ("transforms=[{type: rank, by: task}]", r"transforms.0 \(rank\) reads task"),
    ("shaping=[{type: turn_returns, gate: sharp}]", "reads reward/sharp, but the task's rewards are mark"),
]


@pytest.mark.parametrize(("option", "message"), REFUSED)
def test_facts_that_nobody_fills_in_are_refused_by_name(given, option, message):
    with pytest.raises(UserError, match=message):
        given(Table(LOGP), f"algorithm.{option}")


def test_facts_of_turns_need_turns():
    with pytest.raises(UserError, match=r"stratified\) needs turns of a conversation \(set task.environment\), which"):
        load("visual_qa_digits", ["algorithm.shaping=[{type: stratified, by: tool_calls}]"])


def test_a_key_that_some_rows_lack_is_named_before_the_start(tmp_path):
    """The first row has a level, the second has none; held-out rows are not looked at."""
    rows = [{"problem": "?", "answer": "1", "images": []} | ({} if i % 2 else {"level": i}) for i in range(4)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = f"task.data={{type: files, train: {file}, eval: {file}}}"
    options = [f"run_dir={tmp_path}", data, "algorithm.scale={type: bucket_std, by: level}"]
    with pytest.raises(UserError, match="reads level, which is not a column of rollouts"):
        build_task(load("visual_qa_digits", options))


def test_metadata_of_the_task_s_own_prompts_is_known(tmp_path):
    options = [f"run_dir={tmp_path}", "task.data={type: digits, train_size: 4, eval_size: 2}"]
    with pytest.raises(UserError, match="reads colour, which is not a column of rollouts"):
        build_task(load("visual_qa_digits", [*options, "algorithm.scale={type: bucket_std, by: colour}"]))


def test_two_prompts_of_a_group_may_differ_in_what_is_theirs(given):
    """A group of twins has two prompts, whose metadata may differ, and still one mean over the group."""
    twins = ["rollout.group_size=4", "rollout.twins=true"]
    for by in ("kind", "length"):
        given(Table(LOGP), *twins, f"algorithm.shaping=[{{type: stratified, by: {by}}}]")
    with pytest.raises(UserError, match="by group/length, which is the same for all"):
        given(Table(LOGP), *twins, "algorithm.shaping=[{type: stratified, by: group/length}]")
