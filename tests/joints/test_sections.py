"""Credit of sections of a response, from the YAML keys to the advantage of each token, by hand."""

import pytest
import torch

from mmrl.errors import UserError
from mmrl.measurements.sections import section_bounds
from mmrl.training.metrics import Metrics
from tests.joints.parts import Table, close
from tests.whole_runs.parts import make, release

VERDICT = ["<answer>", "no", "</answer>", "<box>", "1", "</box>", ""]  # a text for each token
SHORT = ["<answer>", "yes", "</answer>", ""]


def shaped(given, sections, *overrides):
    """Advantages of two responses. Rewards of the answer 1 and 0, of the box 0.5 and 0; the box has no weight in the
    task, so the algorithm's advantages are 0.5 and -0.5."""
    pieces = [VERDICT, SHORT]
    table = Table(
        [[-1.0] * len(row) for row in pieces],
        rewards=[[1.0, 0.5], [0.0, 0.0]],
        responses=["".join(row) for row in pieces],
        pieces=pieces,
    )
    made = given(
        table,
        "rollout.prompts=1",
        "task.names=[right, box]",
        "task.weights=[1, 0]",
        "algorithm.scale=none",
        f"algorithm.shaping=[{{type: section_credit, scale: none, sections: {sections}}}]",
        *overrides,
    )
    rollouts = made.next()
    made.prepare(rollouts)
    return [rollouts.advantages[row][rollouts.mask[row]].tolist() for row in range(2)]


def test_each_section_has_the_credit_of_its_own_rewards(given):
    """Answer: 3 (1 - 1/2) and its opposite. Box: half of 2 (0.5 - 0.25); the other response has none."""
    answer = "{begin: <answer>, end: </answer>, rewards: {right: 3}}"
    box = "{begin: <box>, end: </box>, rewards: {box: 2}, weight: 0.5}"
    first, second = shaped(given, f"[{answer}, {box}]")
    close(first, [1.5, 1.5, 1.5, 0.25, 0.25, 0.25, 0.5])
    close(second, [-1.5, -1.5, -1.5, -0.5])


def test_a_token_of_two_sections_gets_their_mean_and_a_missing_end_is_that_of_the_response(given):
    """All from <box> on: 0.25. All up to </box>: twice the algorithm's 0.5. So 1, then 0.625, and 0.25 at the end."""
    first, second = shaped(given, "[{end: </box>, weight: 2}, {begin: <box>, end: nowhere, rewards: {box: 1}}]")
    close(first, [1.0, 1.0, 1.0, 0.625, 0.625, 0.625, 0.5])
    close(second, [-1.0] * 3 + [-0.5])


@pytest.mark.parametrize(
    "begin,end,expected",
    [
        ("<b>", "</b>", "<b>x</b>"),
        ("<b>", "", "<b>x</b>d</b>"),
        ("", "<b>", "a<b>"),
        ("d", "<b>", "d</b>"),  # an end before the beginning is none
        ("</b>", "</b>", "</b>d</b>"),  # one text may open and close, as ``` does
        ("q", "</b>", None),
    ],
)
def test_a_section_goes_from_a_text_to_the_next_end(begin, end, expected):
    text = "a<b>x</b>d</b>"
    bounds = section_bounds(text, begin, end)
    assert (None if bounds is None else text[slice(*bounds)]) == expected


@pytest.mark.parametrize(
    "sections,message",
    [
        ("[{begin: <box>, rewards: {boxes: 1}}]", r"sections: boxes is not a reward; choose from right, box"),
        ("[{rewards: {box: 1}}]", r"sections.0: a section needs `begin` or `end`"),
        ("[]", r"sections"),
    ],
)
def test_sections_that_select_nothing_are_refused(given, sections, message):
    with pytest.raises(UserError, match=message):
        shaped(given, sections)


@pytest.mark.usefixtures("alone")
def test_tokens_of_a_real_model(tmp_path):
    """From the text of a token in the middle of a response on, advantages are twice the others."""
    trainer = make(tmp_path, "rollout.max_response_length=6")
    rollouts = trainer.collector.next(0, Metrics(trainer.engine))
    pieces = trainer.policy.decision_texts(rollouts)
    begin = next(
        text
        for row in pieces
        for t, text in enumerate(row)
        if t and text.isalnum() and text not in "".join(row[:t]) and "".join(row[:t])
    )
    release(trainer)
    shaping = f"algorithm.shaping=[{{type: section_credit, sections: [{{begin: '{begin}', weight: 2}}]}}]"
    trainer = make(tmp_path / "again", "rollout.max_response_length=6", shaping)
    rollouts = trainer.collector.next(0, Metrics(trainer.engine))
    shuffle = torch.Generator().manual_seed(0)
    parts, _ = trainer.preparation.minibatches(rollouts, 0, shuffle, Metrics(trainer.engine))
    doubled = 0
    for micro in parts[0]:
        for row, texts in enumerate(trainer.policy.decision_texts(micro)):
            first = "".join(texts).find(begin)
            starts = [sum(map(len, texts[:t])) for t in range(len(texts))]
            inside = [first >= 0 and start + len(text) > first for start, text in zip(starts, texts, strict=True)]
            advantages = micro.advantages[row][micro.mask[row]]
            unit = advantages[torch.tensor(inside)].div(2).tolist() + advantages[~torch.tensor(inside)].tolist()
            assert max(unit) - min(unit) < 1e-6
            doubled += sum(inside) if abs(unit[0]) > 0.01 else 0
    assert doubled >= 2
    release(trainer)
