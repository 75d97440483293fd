"""The entropy at named words, such as those where a model reconsiders: by hand, from the YAML key to the gradient."""

import pytest
import torch

from mmrl.errors import UserError
from mmrl.measurements.words import beginnings
from tests.joints.parts import Table, close
from tests.whole_runs.parts import ROBOTS, make

ENTROPY = [[1.0, 2.0, 5.0, 7.0], [4.0, 3.0], [6.0]]
PIECES = [["So", " wait", ". W", "ait"], ["Wait", "ing"], ["But"]]


@pytest.mark.parametrize(
    ("pieces", "words", "expected"),
    [
        (["So", " Wait", ", Wa", "it"], ["Wait"], [1, 2]),  # a word begins in a piece and ends in another
        (["Wait", "ing", " awa", "it ", "wait"], ["Wait", "wait"], [4]),  # whole words, as they are written
        (["a", "", "hm", "m. hm"], ["hm"], [3]),
        (["a ", "", "hm", ". hm"], ["hm"], [2, 3]),
        (["I see: let", " me", " check"], ["let me check", "me"], [0]),  # of overlapping words the first
        (["1+", "1 (?)"], ["(?)"], [1]),
        (["等", "等,", "等等"], ["等等"], [0, 2]),
        ([], ["Wait"], []),
    ],
)
def test_where_a_word_begins(pieces, words, expected):
    assert beginnings(pieces, words) == expected


def test_a_bonus_at_named_words_alone(given):
    """Wait begins at the third decision of the first response (H 5), But is the third response (H 6)."""
    table = Table([[-1.0] * 4, [-1.0] * 2, [-1.0]], rewards=[0.0] * 3, entropy=ENTROPY, pieces=PIECES)
    term = "algorithm.terms=[{type: entropy, coefficient: 0.7, words: [Wait, But]}]"
    made = given(table, "rollout={prompts: 1, group_size: 3}", term)
    made.prepare()
    close(made.learn(), -0.7 * (5.0 + 6.0) / 7)
    close(made.gradient("entropy"), [[0.0, 0.0, -0.1, 0.0], [0.0] * 4, [-0.1, 0.0, 0.0, 0.0]])
    close(made.metrics.result()["entropy/words"], 5.5)
    close(made.metrics.result()["entropy"], 28 / 7)


def test_the_metric_alone(given):
    table = Table([[-1.0] * 4, [-1.0] * 2, [-1.0]], rewards=[0.0] * 3, entropy=ENTROPY, pieces=PIECES)
    term = "algorithm.terms=[{type: entropy, coefficient: 0.0, words: [wait]}]"
    made = given(table, "rollout={prompts: 1, group_size: 3}", term)
    made.prepare()
    close(made.learn(), 0.0)
    close(made.gradient("entropy"), torch.zeros(3, 4))
    close(made.metrics.result()["entropy/words"], 2.0)


def test_words_of_a_robot_are_refused(tmp_path):
    options = ["action.head={type: gaussian}", "algorithm.terms=[{type: entropy, words: [Wait]}]"]
    with pytest.raises(UserError, match=r"algorithm.terms.0 \(entropy\) needs responses whose text is known"):
        make(tmp_path, *options, base=ROBOTS)
