"""Text and codes of one response: bounds, terms and credit of their own, from the YAML key to the gradient."""

import math

import pytest
import torch

from mmrl.config import validate
from mmrl.errors import UserError
from mmrl.rollouts import IMAGE, PARTS, TEXT, DecisionColumn
from tests.joints.parts import Table, close

PLACES = [[TEXT, TEXT, IMAGE, IMAGE]] * 2
# Two words and two codes; the second rollout has one word. exp: 1.25 of both kinds.
MOVED = [[math.log(1.25)] * 4, [0.0, -7.0, 0.0, 0.0]]


def rollouts_of(made):
    found = made.table.rollouts()
    found.extras[PARTS] = DecisionColumn(torch.tensor(PLACES))
    return found


def table(**columns):
    held = Table([[-1.0] * 4] * 2, rewards=[1.0, 0.0], **columns)
    held.mask[1, 1] = False
    return held


def gradient(given, *overrides, **columns):
    """[rollout, decision] of the loss by logp."""
    made = given(table(**columns), "rollout.prompts=1", "rollout.group_size=2", *overrides)
    made.prepare(rollouts_of(made))
    made.learn()
    return made.gradient()


def test_each_part_has_its_bound(given):
    """r = 1.25 and A = 1 / sqrt(2): within text's bound of 0.3, beyond codes' of 0.2. Seven decisions count."""
    a = 1 / math.sqrt(2)
    shared = ("algorithm.surrogate={type: by_part, text: {type: clip, high: 0.3}, image: {type: clip, high: 0.2}}",)
    found = gradient(given, *shared, log_ratio=MOVED)
    close(found, [[-1.25 * a / 7, -1.25 * a / 7, 0, 0], [a / 7, 0, a / 7, a / 7]])
    turned = ("algorithm.surrogate={type: by_part, text: {type: clip, high: 0.2}, image: {type: clip, high: 0.3}}",)
    close(gradient(given, *turned, log_ratio=MOVED), [[0, 0, -1.25 * a / 7, -1.25 * a / 7], [a / 7, 0, a / 7, a / 7]])


def test_parts_may_have_different_objectives(given):
    """1.25 is within the default bound of 0.28; reinforce does not ask for the ratio."""
    a = 1 / math.sqrt(2)
    found = gradient(given, "algorithm.surrogate={type: by_part, text: reinforce, image: clip}", log_ratio=MOVED)
    close(found, [[-a / 7, -a / 7, -1.25 * a / 7, -1.25 * a / 7], [a / 7, 0, a / 7, a / 7]], atol=1e-6)


def test_a_term_of_one_part(given):
    """An entropy bonus of 0.7 over seven decisions: 0.1 for each of them, of codes alone; nothing for words."""
    columns = {"entropy": [[1.0, 2.0, 3.0, 5.0], [0.0, 9.0, 4.0, 4.0]]}
    made = given(
        table(**columns),
        "rollout.prompts=1",
        "rollout.group_size=2",
        "algorithm.terms=[{type: of_part, part: image, term: {type: entropy, coefficient: 0.7}}]",
    )
    made.prepare(rollouts_of(made))
    made.learn()
    close(made.gradient("entropy"), [[0, 0, -0.1, -0.1], [0, 0, -0.1, -0.1]])
    assert made.metrics.result()["entropy/image"] == 4.0  # what a coefficient may follow


def test_two_parts_have_a_kl_of_their_own(given):
    """k2 = d^2 / 2 with d = 2: a gradient of 2 x coefficient / 7, which is 0.2 in text and 0.02 in codes."""
    kl = "{type: of_part, part: %s, term: {type: kl, estimator: k2, coefficient: %s}}"
    held = table()
    held.rewards = torch.zeros(2, 1)  # so that the loss is that of the terms alone
    terms = f"algorithm.terms=[{kl % ('text', 0.7)}, {kl % ('image', 0.07)}]"
    made = given(held, "rollout.prompts=1", terms).move(logp=[[2.0] * 4] * 2)
    made.prepare(rollouts_of(made))
    close(made.learn(), (3 * 0.7 + 4 * 0.07) * 2 / 7)
    close(made.gradient(), [[0.2, 0.2, 0.02, 0.02], [0.2, 0, 0.02, 0.02]])
    found = made.metrics.result()
    assert (found["kl/text"], found["kl/image"]) == (2.0, 2.0)


def shaped(given, options, names=("mark", "words"), rewards=((1.0, 0.0), (0.0, 4.0))):
    held = Table([[-1.0] * 4] * 2, rewards=[list(row) for row in rewards])
    made = given(
        held,
        "rollout.prompts=1",
        "rollout.group_size=2",
        f"task.names=[{', '.join(names)}]",
        "task.weights=[1, 0.5]",
        "algorithm.scale=none",
        f"algorithm.shaping=[{{type: part_credit, {options}}}]",
    )
    return made.prepare(rollouts_of(made)).advantages


def test_credit_by_weights_and_by_rewards_of_its_own(given):
    """Rewards 1 and 0, and 0 and 4 of half the weight: together 1 and 2, so A = -0.5 and 0.5."""
    close(shaped(given, "text: 2, image: 0"), [[-1, -1, 0, 0], [1, 1, 0, 0]])
    found = shaped(given, "text: 0.5, text_rewards: [words], image_rewards: [mark], scale: none")
    close(found, [[-0.5, -0.5, 0.5, 0.5], [0.5, 0.5, -0.5, -0.5]])
    spread = shaped(given, "text_rewards: [mark]")  # 0.5 over a deviation of 1 / sqrt(2)
    close(spread, [[math.sqrt(0.5)] * 2 + [-0.5] * 2, [-math.sqrt(0.5)] * 2 + [0.5] * 2], atol=1e-5)


def test_what_does_not_fit_is_one_line(given):
    with pytest.raises((UserError, ValueError), match="text_rewards: wrods is not a reward; choose from mark, words"):
        shaped(given, "text_rewards: [wrods]")
    tree = {
        "run_dir": "unset",
        "model": {"type": "autoregressive_image", "path": "x"},
        "task": {"type": "image_generation"},
        "algorithm": {"surrogate": {"type": "by_part"}},
    }
    with pytest.raises(UserError, match=r"needs responses in parts, text before an image .*rollout.reasoning_length"):
        validate(tree, "test")
    validate(tree | {"rollout": {"reasoning_length": 3}}, "test")
    tree["algorithm"] = {"surrogate": {"type": "by_part", "image": "by_part"}}
    with pytest.raises(UserError, match=r"algorithm.surrogate.image"):
        validate(tree, "test")
