"""What a rollout earns more than the reference policy does (AAPO), from the key to the gradient."""

import math

import pytest

from mmrl.config import load
from mmrl.errors import UserError
from tests.joints.parts import Table, close

MOMENTUM = "algorithm.shaping=[advantage_momentum]"
UNSCALED = ["algorithm.scale=none", "algorithm.surrogate=reinforce"]


def table(*rewards, **columns):
    """Groups of two that are asked first, and what the reference policy answers to their prompts."""
    return Table([[-1.0]] * 6, group=[0, 0, 1, 1, 2, 3], rewards=list(rewards), **columns)


def test_the_gain_over_the_reference_is_added_within_its_bounds(given):
    """-0.9 is cut to -0.2 and 1.9 to 0.28; 0.1 and -0.1 are taken as they are."""
    made = given(table(1.0, 2.0, 6.0, 4.0, 1.9, 4.1), *UNSCALED, MOMENTUM)
    rollouts = made.prepare(made.next())
    expected = [-0.5 - 0.2, 0.5 + 0.1, 1 + 0.28, -1 - 0.1]
    close(rollouts.advantages[:, 0], expected)
    made.learn()
    close(made.gradient()[:4, 0], [-a / 4 for a in expected])


def test_the_bounds_are_options(given):
    options = "algorithm.shaping=[{type: advantage_momentum, low: 0.5, high: 1}]"
    made = given(table(1.0, 2.0, 6.0, 4.0, 1.9, 4.1), *UNSCALED, options)
    close(made.prepare(made.next()).advantages[:, 0], [-0.5 - 0.5, 0.5 + 0.1, 1 + 1, -1 - 0.1])


def test_groups_that_are_all_alike_learn(given):
    """That is what it is for: GRPO's own advantages are 0 here."""
    made = given(table(1.0, 1.0, 0.0, 0.0, 0.9, 0.1), MOMENTUM)
    close(made.prepare(made.next()).advantages[:, 0], [0.1, 0.1, -0.1, -0.1])


def test_the_reference_is_asked_once_a_prompt_with_the_weights_of_the_start(given):
    made = given(table(1.0, 2.0, 6.0, 4.0, 1.9, 4.1), *UNSCALED, MOMENTUM)
    for step in range(2):
        made.prepare(made.next(step), step)
        made.learn()
    (first, answer), (later, again) = [made.trainer.policy.calls[i : i + 2] for i in (0, 2)]
    assert len(first.seeds) == 4 and len(answer.seeds) == 2 and not set(first.seeds) & set(answer.seeds)
    assert answer.weights == again.weights == 0.0 and later.weights != 0.0
    assert answer.seeds != again.seeds  # other prompts


def test_components_are_weighed_as_in_the_reward(given):
    """2 x a + b: 0.2 + 0.1 above the reference's 0.1 + 0.1."""
    rewards = [[0.1, 0.1], [0.1, 0.1], [0.0, 0.0], [0.0, 0.0], [0.05, 0.1], [0.0, 0.0]]
    options = ["task.names=[a, b]", "task.weights=[2, 1]"]
    made = given(table(*rewards), *UNSCALED, MOMENTUM, *options)
    close(made.prepare(made.next()).advantages[:, 0], [0.1, 0.1, 0.0, 0.0])


def test_what_is_not_scored_adds_nothing(given):
    """A rollout without a reward, and a group whose reference response has none."""
    made = given(table(1.0, math.nan, 6.0, 4.0, 0.9, math.nan), *UNSCALED, MOMENTUM)
    close(made.prepare(made.next()).advantages[:, 0], [0.1, 0.0, 1.0, -1.0])


def test_an_engine_that_has_other_weights_is_refused(tmp_path):
    recipe = "configs/vlm/visual_qa_digits.yaml"
    with pytest.raises(UserError, match=r"advantage_momentum\) needs responses of the reference policy"):
        load(recipe, [f"run_dir={tmp_path}", MOMENTUM, "rollout.generator=vllm_colocated"])
