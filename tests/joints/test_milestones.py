"""Credit for the segments between milestones of conversations: `milestones`."""

from dataclasses import replace

import torch

from mmrl.rollouts import Turns
from tests.joints.parts import GARBAGE, Table, close

ONE = ["rollout.prompts=1", "rollout.group_size=3"]
# Turns that earn something end a segment. Row 0: after two turns, then one in vain; row 1: each of two; row 2: none.
PASSED = {
    "earned": [[0.0, 1.0, 0.0], [2.0, 0.5, -GARBAGE], [0.0, -GARBAGE, -GARBAGE]],
    "reached": [[True] * 3, [True, True, False], [True, False, False]],
}
TURN_COLUMNS = [[0, 1, 2], [0, 1, 1], [0, 0, 0]]


def passed(given, options, rewards=(0.0, 0.0, 0.0)):
    table = Table([[-1.0] * 3, [-1.0] * 3, [-1.0] * 2], rewards=list(rewards))
    made = given(table, *ONE, "algorithm.scale=none", f"algorithm.shaping=[{{type: milestones, {options}}}]")
    turns = Turns(torch.tensor(TURN_COLUMNS), torch.tensor(PASSED["reached"]), torch.tensor(PASSED["earned"]))
    return made.prepare(replace(table.rollouts(), extras={"turns": turns})).advantages


def test_segments_between_milestones_are_compared(given):
    """gamma 0.5: the first segments are worth 0.5, 1 and 0, mean 0.5; the second ones of rows 0 and 1 0 and 1."""
    want = [[0.0, 0.0, -0.5], [0.5, 0.5, 0.5], [-0.5, -0.5, -0.5]]
    close(passed(given, "gamma: 0.5, scale: none"), want)
    close(passed(given, "gamma: 0.5, scale: none, weight: 3"), [[3 * a for a in row] for row in want])
    first, second = 1 / 0.5, 0.5 / 0.5**0.5  # deviations 0.5 and 0.707
    scaled = [[0.0, 0.0, -second], [0.5 * first, second, second], [-0.5 * first] * 3]
    close(passed(given, "gamma: 0.5"), scaled, atol=1e-4)


def test_what_the_conversation_earned_counts_beside_them(given):
    """Outcomes 2, -1 and -1 against their mean; without a discount the first segments are worth 1, 1 and 0."""
    found = passed(given, "gamma: 1, scale: none, outcome: 0.5", rewards=(3.0, 0.0, 0.0))
    want = [[1 + 1 / 3, 1 + 1 / 3, 1 - 0.5], [-0.5 + 1 / 3, 0.0, 0.0], [-0.5 - 2 / 3] * 3]
    close(found, want)
