"""Two responses of a group that become one: `self_corrections`."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mmrl.build import build_policy, build_task
from mmrl.collection.extra_sources import SourceContext
from mmrl.collection.self_correction import SelfCorrections
from mmrl.config import load
from mmrl.rollouts import FRESH, Rollouts
from tests.helpers.command_line import GRPO, TINY, WARM_START
from tests.joints.parts import Table, close

MADE = "rollout.extras=[{type: self_corrections%s}]"
ONE = ["rollout.prompts=1", "rollout.group_size=3", "algorithm.scale=none"]


def corrected(given, rewards, options="", *more):
    """Row 3 is what a wrong and a right response become, row 4 two wrong ones."""
    table = Table([[-1.0]] * 5, group=[0, 0, 0, 1, 1], rewards=[*rewards, 1.0, 0.0])
    made = given(table, *ONE, MADE % options, *more)
    right = [row for row, reward in enumerate(rewards) if reward == 1]
    pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
    made.trainer.policy.recombines = {(a, b): 3 if b in right else 4 for a, b in pairs if a not in right}
    rollouts = made.next()
    made.prepare(rollouts)
    return made, rollouts


def test_a_wrong_and_a_right_response_join_their_group_as_one(given):
    """Rewards 1, 0, 0, and then 1 and 0: their mean is 0.4."""
    made, rollouts = corrected(given, [1.0, 0.0, 0.0], ", text: hm")
    assert rollouts.inputs == [0, 1, 2, 3, 4] and rollouts.origin.tolist() == [0, 0, 0, 3, 3]
    assert rollouts.group.tolist() == [0] * 5 and len(set(rollouts.prompt.tolist())) == 1
    close(rollouts.advantages[:, 0], [0.6, -0.4, -0.4, 0.6, -0.4])
    assert made.trainer.policy.calls[-1].seeds == ["hm"]
    made.learn()
    close(made.gradient()[:, 0] * 5, [-0.6, 0.4, 0.4, -0.6, 0.4])


def test_half_of_them_mend_what_was_wrong(given):
    assert corrected(given, [1.0, 0.0, 0.0], ", count: 3")[1].inputs[3:] == [3, 3, 4]
    assert corrected(given, [1.0, 0.0, 0.0], ", count: 1")[1].inputs[3:] == [3]
    assert corrected(given, [1.0, 1.0, 0.0], ", count: 3")[1].inputs[3:] == [3, 3, 3]  # one wrong response alone


def test_a_group_needs_right_and_wrong_ones(given):
    for rewards in ([1.0, 1.0, 1.0], [0.0, 0.0, 0.0]):
        assert len(corrected(given, rewards)[1]) == 3
    assert len(corrected(given, [0.5, 0.0, 0.0], ", accuracy: 0.6")[1]) == 3


def test_what_is_too_long_is_dropped(given, caplog):
    """The stand-in says that row 1000 has four tokens, one more than a response may have."""
    table = Table([[-1.0]] * 1001, group=[0] * 3 + [1] * 998, rewards=[1.0, 0.0, 0.0] + [0.0] * 998)
    made = given(table, *ONE, MADE % ", count: 1")
    made.trainer.policy.recombines = dict.fromkeys([(1, 0), (2, 0)], 1000)
    assert len(made.next()) == 3 and len(made.next()) == 3
    assert [record.getMessage() for record in caplog.records] == [
        "rollout.extras (self_corrections): none of 1 joined responses (a response, the text between, and the next "
        "response) is short enough; the shortest has 4 tokens, but rollout.max_response_length=3: raise it, or shorten "
        "the text between"
    ]
    made.trainer.policy.recombines = dict.fromkeys([(1, 0), (2, 0)], 999)
    made.trainer.policy.asked = 0
    assert len(made.next(1)) == 4


# --- with a real model's tokens and a real verifier ---

FORMS = {
    "exact_match": "{}",
    "answer_tag": "<answer>{}</answer>",
    "think_answer": "<think>hm</think><answer>{}</answer>",
}


@pytest.mark.parametrize("verifier", FORMS)
def test_the_right_answer_after_a_wrong_one_earns_what_it_would_alone(verifier):
    """One right and two wrong responses to a prompt of the digits: the right correction has 1, the other 0, and both
    have the form that is asked for."""
    options = [f"task.rewards=[{{name: {verifier}}}]", "task.accuracy={name: exact_match}"]
    config = load(WARM_START, [*TINY, *GRPO, *options, "run_dir=unused", "rollout.max_response_length=120"])
    task = build_task(config)
    policy, prompt = build_policy(config, task), task.train[0]
    gold = str(prompt.answer)
    others = [digit for digit in "0123456789" if digit != gold][:2]
    said = [FORMS[verifier].format(text) for text in (gold, *others)]
    fresh: Rollouts = policy.demonstrate([replace(prompt, metadata={"demonstration": text}) for text in said])
    fresh.samples = [replace(sample, prompt=prompt) for sample in fresh.samples]
    assert [sample.response for sample in fresh.samples] == said
    fresh.group, fresh.prompt = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    fresh.rewards, fresh.accuracy = task.score(fresh.samples, fresh.group), task.accuracy(fresh.samples)
    fresh.origin = torch.full((3,), FRESH)
    assert fresh.accuracy.tolist() == [1.0, 0.0, 0.0]
    source = SelfCorrections(count=2)
    source.start(SourceContext(policy, task.train, task, 0, (0, 1), int, Path(), 1))
    made = source.make(fresh)
    right, wrong = (sample.response for sample in made.samples)
    assert right.endswith(said[0]) and "again" in right and not wrong.endswith(said[0])
    # The whole would have none of them: two answers, and twice the tags
    assert made.rewards[:, 0].tolist() == fresh.rewards[:2, 0].tolist() and made.accuracy.tolist() == [1.0, 0.0]
    assert not task.score(made.samples, made.group).any()
    assert bool((made.mask.sum(1) == fresh.mask.sum(1)[[0, 1]]).all())  # the second response alone is learned from
