"""Values of spans, from a reward that returns them to the gradient of each decision, by hand."""

import math

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mmrl.core.turns import character_shares, distribute_credit, softmin_weighted, subtract_group_baseline, unit_shares
from mmrl.errors import UserError
from mmrl.policies.vlm.responses.tokens import ChatTokenizer
from mmrl.rewards import RewardSet, RewardSpec
from mmrl.rollouts import Spans, Turns
from mmrl.training.metrics import Metrics
from tests.joints.parts import Table, close
from tests.whole_runs.parts import make, metrics, release, train

HERE = __name__
VALUES = {  # of spans, by response
    "ab\ncd": [(0, 3, 1.0), (3, 5, -1.0)],
    "x\ny": [(0, 2, 0.5), (2, 3, 0.5)],
}
RIGHT = "ab\ncd"


def valued(sample):
    return Spans(VALUES[sample.response])


def right(sample):
    return float(sample.response == RIGHT)


def first_half(sample):
    return Spans([(0, 2, 3.0)], unit="decisions")


REWARDS = f"task.rewards=[{{name: '{HERE}:valued', label: process, weight: 0}}, {{name: '{HERE}:right'}}]"


def table():
    pieces = [["ab", "\n", "cd", ""], ["x\n", "y"]]
    return Table([[-1.0] * 4, [-1.0] * 2], responses=list(VALUES), pieces=pieces, accuracy=[1.0, 0.0])


def shaped(given, shaping, *overrides, rewards=REWARDS):
    """Advantages of a step, and what was prepared. The first response is right: those of the outcome are 1/2, -1/2."""
    shapers = f"algorithm.shaping=[{shaping}]"
    made = given(table(), "rollout.prompts=1", "algorithm.scale=none", rewards, shapers, *overrides)
    rollouts = made.next()
    made.prepare(rollouts)
    return rollouts.advantages, made


# --- from characters to decisions ---


def test_a_letter_of_several_tokens_is_in_the_span_that_it_is_in():
    pieces = ["a", "", "é", "", "", "漢b", ""]  # the token before é is a part of it, and the last one ends the response
    decision, span, share = character_shares(pieces, [(0, 1), (1, 2), (2, 3)])
    assert decision.tolist() == [0, 1, 2, 3, 4, 5] and span.tolist() == [0, 1, 1, 2, 2, 2]
    assert share.tolist() == [1.0] * 6


def test_a_token_in_two_spans_has_a_share_of_each():
    entries = character_shares(["ab\ncd", "e", "f"], [(0, 3), (3, 6)])
    assert entries.T.tolist() == [[0, 0, 0.6], [0, 1, 0.4], [1, 1, 1.0]]
    close(distribute_credit([torch.tensor([1.0, -1.0])], [entries], 4), [[0.2, -1.0, 0.0, 0.0]])


def test_spans_of_a_real_tokenizer_of_bytes():
    """Each byte is a token: é has two, 漢 three, and the end token none of the text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")
    chat = ChatTokenizer.__new__(ChatTokenizer)
    chat.tokenizer = tokenizer
    ids = [*tokenizer("é\n漢!").input_ids, tokenizer.eos_token_id]
    entries = character_shares(chat.pieces(torch.tensor(ids)), [(0, 2), (2, 3), (3, 4)])
    assert entries[:2].T.tolist() == [[0, 0], [1, 0], [2, 0], [3, 1], [4, 1], [5, 1], [6, 2]]


def test_spans_of_units():
    number = torch.tensor([0, 0, -1, 1, 2])
    assert unit_shares(number, [(0, 2)]).T.tolist() == [[0, 0, 1], [1, 0, 1], [3, 0, 1]]


# --- credit ---


def test_returns_by_hand(given):
    """Returns [0, -1] and [1, .5]; less the other's: [-1, -1.5] and [1, 1.5]; twice that. The end token is in none."""
    advantages, made = shaped(given, "{type: span_returns, weight: 2, outcome: 0}")
    close(advantages, [[-2, -2, -3, 0], [2, 3, 0, 0]])
    made.learn()
    close(made.gradient() * 6, [[2, 2, 3, 0], [-2, -3, 0, 0]])


def test_returns_are_discounted_and_the_outcome_is_added(given):
    """With gamma 0.5 they are [.5, -1] and [.75, .5]."""
    advantages, _ = shaped(given, "{type: span_returns, gamma: 0.5}")
    close(advantages[0], [0.25, 0.25, -1.0, 0.5])
    close(advantages[1, :2], [-0.25, 1.0])


def test_paragraphs_are_compared_within_the_group(given):
    """PRPO: values 1, -1, .5, .5 of all; mean 1/4, std sqrt(.75)."""
    options = "{type: span_returns, gamma: 0, outcome: 0, against: group, scale: group_std}"
    advantages, _ = shaped(given, options)
    std = math.sqrt((0.75**2 + 1.25**2 + 2 * 0.25**2) / 3)
    close(advantages[0], [0.75 / std, 0.75 / std, -1.25 / std, 0], atol=1e-5)
    same, _ = shaped(given, "{type: span_returns, gamma: 0, outcome: 0, against: span, scale: group_std}")
    close(same[:, 0], [math.sqrt(0.5), -math.sqrt(0.5)], atol=1e-5)


def test_the_strict_minimum_by_hand(given):
    """Worth -1 and 1/2: up to the worst span, and 0 after it: [-1, -1] and [.5, 0]."""
    advantages, _ = shaped(given, "{type: span_minimum, temperature: 0, outcome: 0, against: none}")
    close(advantages, [[-1, -1, -1, 0], [0.5, 0, 0, 0]])
    advantages, _ = shaped(given, "{type: span_minimum, temperature: 0, outcome: 0}")
    close(advantages, [[-1.5, -1.5, -1, 0], [1.5, 1, 0, 0]])


def test_the_soft_minimum_by_hand(given):
    """Weights at T = 2 of 1 and -1 are as 1 to e; those of equal values 1/2 each."""
    advantages, _ = shaped(given, "{type: span_minimum, temperature: 2, outcome: 0, against: none}")
    bad = math.e / (1 + math.e)
    close(advantages, [[1 - 2 * bad, 1 - 2 * bad, -bad, 0], [0.5, 0.25, 0, 0]])


def test_padding_with_good_steps_pays_in_the_sum_and_not_in_the_minimum():
    bad = torch.tensor([-1.0, 0.9])
    padded = torch.cat([bad, torch.full((8,), 0.9)])
    assert bad.sum() < 0 < padded.sum()
    assert float(softmin_weighted(padded, 0.1).sum()) == pytest.approx(-1.0, abs=1e-4)
    assert not len(softmin_weighted(torch.zeros(0), 0.0))


def test_signs_turn_advantages(given):
    """FSPO: the wrong span of the right response is pushed down, true ones of the wrong response up."""
    advantages, _ = shaped(given, "{type: span_signs}")
    close(advantages[0], [0.5, 0.5, -0.5, 0.5])
    close(advantages[1, :2], [0.5, 0.5])


def test_contributions_sum_to_the_reward_and_find_the_step_that_loses_it(given):
    """Before it has learned, each half gets half: returns [1, 1/2] and 0. Later the second line of the right response
    is what earns: `cd` is in it alone, and so is `ab`; the network may choose, but the sum is 1."""
    advantages, made = shaped(given, "{type: span_progress, against: none, lr: 0.02, passes: 30}")
    close(advantages, [[1, 1, 0.5, 0], [0, 0, 0, 0]])
    for _ in range(3):
        made.prepare(rollouts := made.next())
    close(rollouts.advantages[:, 0], [1, 0])
    assert made.batch.reports["span_progress/loss"] < 0.01


def test_a_planted_step_that_loses_gets_the_blame(given):
    """`bad` loses wherever it stands, in the first line or in the second; `good` and `fair` never do."""
    texts = ["good\nbad", "bad\ngood", "fair\nbad", "bad\nfair", "good\nfair", "fair\ngood", "good\ngood", "bad\nbad"]
    rewards = [float("bad" not in text) for text in texts]
    pieces = [[(parts := text.partition("\n"))[0] + "\n", parts[2]] for text in texts]
    rows = Table([[-1.0] * 2] * 8, group=[0] * 8, responses=texts, pieces=pieces, accuracy=rewards)
    name = f"task.rewards=[{{name: process, weight: 0, options: {{scorer: '{HERE}:zeros'}}}}, {{name: '{HERE}:good'}}]"
    shaping = "algorithm.shaping=[{type: span_progress, gamma: 0, against: none, lr: 0.02, passes: 100}]"
    made = given(rows, "rollout.prompts=1", "rollout.group_size=8", name, shaping)
    for _ in range(3):
        made.prepare(rollouts := made.next())
    close(rollouts.advantages[:, :2].sum(1), rewards)
    for text, (first, second) in zip(texts, rollouts.advantages[:, :2].tolist(), strict=True):
        if "bad" in text and text != "bad\nbad":
            blamed, other = (first, second) if text.startswith("bad") else (second, first)
            assert blamed < other - 0.3, text


def zeros(sample, steps):
    return [0.0] * len(steps)


def good(sample):
    return float("bad" not in sample.response)


def test_what_differs_between_spans():
    credits = [torch.tensor([1.0, 2.0]), torch.tensor([3.0]), torch.tensor([7.0])]
    group = torch.tensor([0, 0, 1])
    close(torch.cat(subtract_group_baseline(credits, group, "others", "none")), [-2.0, 0.0, 2.0, 0.0])
    close(torch.cat(subtract_group_baseline(credits, group, "span", "none")), [-1.0, 0.0, 1.0, 0.0])
    close(torch.cat(subtract_group_baseline(credits, group, "group", "none")), [-1.0, 0.0, 1.0, 0.0])
    close(torch.cat(subtract_group_baseline(credits, group, "none", "none")), [1.0, 2.0, 3.0, 7.0])


# --- the agreement of process and outcome ---

# Rewards by rollout: process, outcome; of four, two are right, one of them by a low process, and one is unknown.
AGREEMENT = [[-1.0, 1.0], [0.5, 1.0], [-1.0, 0.0], [0.5, 0.0], [math.nan, 1.0]]


@pytest.mark.parametrize(
    ("drop", "kept"), [("right", [0, 1, 1, 1, 1]), ("both", [0, 1, 1, 0, 1]), ("none", [1, 1, 1, 1, 1])]
)
def test_a_right_answer_by_a_wrong_way_teaches_nothing(given, drop, kept):
    rows = Table([[-1.0]] * 5, rewards=AGREEMENT, accuracy=[row[1] for row in AGREEMENT])
    mask = f"algorithm.masks=[{{type: process_agreement, reward: process, drop: {drop}}}]"
    task = ["task.names=[process, outcome]", "task.weights=[0, 1]", "rollout.prompts=1", "rollout.group_size=5"]
    made = given(rows, mask, *task, "algorithm.scale=none")
    rollouts = made.prepare()
    mean = sum(row[1] * keep for row, keep in zip(AGREEMENT, kept, strict=True)) / sum(kept)
    expected = [(row[1] - mean) * keep for row, keep in zip(AGREEMENT, kept, strict=True)]
    close(rollouts.advantages[:, 0], expected)
    shares = {name: value for name, value in made.batch.reports.items() if name.startswith("agreement/")}
    assert shares == {"agreement/right_by_low_process": 0.5, "agreement/wrong_by_high_process": 0.5}


# --- other units, and what does not fit ---


def test_spans_of_decisions(given):
    name = f"task.rewards=[{{name: '{HERE}:first_half', label: process, weight: 0}}, {{name: '{HERE}:right'}}]"
    options = "{type: span_returns, of: decisions, against: none, outcome: 0}"
    advantages, _ = shaped(given, options, rewards=name)
    close(advantages, [[3, 3, 0, 0], [3, 3, 0, 0]])


def test_spans_of_turns():
    from mmrl.measurements.spans import SpanValues

    rollouts = table().rollouts()
    turns = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0]])
    rollouts.extras["turns"] = Turns(turns, torch.tensor([[True, True], [True, False]]), torch.zeros(2, 2))
    for sample, end in zip(rollouts.samples, (2, 1), strict=True):
        sample.spans["process"] = Spans([(t, t + 1, t - 1.0) for t in range(end)], unit="turns")
    column = SpanValues("process", "turns").measure(rollouts, None)
    close(distribute_credit(column.values, column.shares, 4), [[-1, -1, 0, 0], [-1, -1, 0, 0]])


@pytest.mark.parametrize(
    ("shaping", "message"),
    [
        ("{type: span_returns, reward: other}", "reward=other is not a reward; choose from process"),
        ("{type: span_returns, of: decisions}", "returned spans of characters; set of=characters"),
        (f"{{type: span_minimum, reward: '{HERE}:right'}}", "returned only numbers"),
    ],
)
def test_what_does_not_fit_is_named(given, shaping, message):
    with pytest.raises(UserError, match=message):
        shaped(given, shaping)


def test_a_rollout_without_a_score_has_no_part(given, monkeypatch):
    """Its spans are out of order; the other one is alone, and keeps its outcome, which is 0 for the same reason."""
    monkeypatch.setitem(VALUES, "x\ny", [(2, 3, 1.0), (0, 2, 1.0)])
    advantages, made = shaped(given, "{type: span_returns}", REWARDS.replace("weight: 0", "weight: 1"))
    close(advantages, torch.zeros(2, 4))


def test_what_joined_a_group_has_no_spans_and_keeps_its_outcome(given):
    """Where all are wrong a right answer is shown, the table's last row; the others are compared without it."""
    responses, pieces = ["x\ny", "z\ny", RIGHT], [["x\n", "y"], ["z\n", "y"], ["ab\ncd"]]
    rows = Table(
        [[-1.0] * 2] * 2 + [[-1.0]], group=[0, 0, 1], responses=responses, pieces=pieces, accuracy=[0.0, 0.0, 1.0]
    )
    options = ["rollout.extras=[{type: guided_groups}]", "algorithm.shaping=[{type: span_returns, gamma: 0}]"]
    rewards = REWARDS.replace(":valued", ":lines")
    made = given(rows, "rollout.prompts=1", "algorithm.scale=none", rewards, *options)
    made.prepare(rollouts := made.next())
    assert rollouts.origin.tolist() == [0, 0, 1]
    assert [len(values) for values in rollouts.extras["spans process"].values] == [2, 2, 0]
    third = 1 / 3
    close(rollouts.advantages, [[-1 - third, -third], [1 - third, -third], [2 * third, 2 * third]])


def lines(sample):
    """The first line of `z` is worth more by 1 than that of `x`, and all second lines are worth the same."""
    return Spans([(0, 2, float(sample.response[0] == "z")), (2, 3, 0.5)])


def test_spans_of_a_rollout_whose_outcome_is_unknown_have_no_part(given):
    """Nothing is left to compare the first response with."""
    advantages, _ = shaped(given, "{type: span_returns}", rewards=REWARDS.replace(":right", ":right_or_unknown"))
    close(advantages, torch.zeros(2, 4))


def right_or_unknown(sample):
    return 1.0 if sample.response == RIGHT else None


# --- a real model ---


def every_letter(sample):
    """A wrong step is planted at each vowel: a span for every letter, worth -1 there and 0 elsewhere."""
    return Spans([(i, i + 1, -float(letter in "aeiou")) for i, letter in enumerate(sample.response)], total=0.0)


def test_a_planted_wrong_step_of_a_real_policy_gets_the_blame(tmp_path):
    trainer = make(
        tmp_path,
        f"task.rewards=[{{name: '{HERE}:every_letter', label: process}}]",
        "algorithm.shaping=[{type: span_returns, gamma: 0, against: none}]",
    )
    rollouts = trainer.collector.next(0, made := Metrics(trainer.engine))
    trainer.preparation.minibatches(rollouts, 0, torch.Generator().manual_seed(0), made)
    pieces = trainer.policy.decision_texts(rollouts)
    release(trainer)
    expected = torch.zeros(rollouts.mask.shape)
    for row, texts in enumerate(pieces):
        for place, text in enumerate(texts):
            expected[row, place] = -sum(letter in "aeiou" for letter in text) / max(1, len(text))
    assert (expected < 0).any() and (expected == 0)[rollouts.mask].any()
    close(rollouts.advantages, expected)


@pytest.mark.slow
def test_a_planted_wrong_step_is_unlearned(tmp_path):
    """Vowels become rarer where each costs, and letters behind them do not pay for them."""
    options = ["steps=12", "optim.lr=0.003", "rollout.prompts=16", "engine.micro_batch=64"]
    options += [f"task.rewards=[{{name: '{HERE}:every_letter', label: process, total: sum}}]"]
    options += [f"task.accuracy={{name: '{HERE}:vowels'}}"]
    train(tmp_path, *options, "algorithm.shaping=[{type: span_returns, gamma: 0, outcome: 0, against: none}]")
    shares = [row["accuracy"] for row in metrics(tmp_path) if "loss" in row]
    assert sum(shares[-3:]) < 0.5 * sum(shares[:3])


def vowels(sample):
    return sum(letter in "aeiou" for letter in sample.response) / max(1, len(sample.response))


# --- the rollout's own number ---


@pytest.mark.parametrize(("total", "expected"), [("sum", 2.0), ("mean", 1.0), ("min", -1.0)])
def test_the_total_of_spans(total, expected):
    made = RewardSet([RewardSpec(name=f"{HERE}:two", total=total)])
    assert made.score(table().rollouts().samples).flatten().tolist() == [expected, expected]
    told = RewardSet([RewardSpec(name=f"{HERE}:every_letter", total=total)])
    assert told.score(table().rollouts().samples).flatten().tolist() == [0.0, 0.0]


def two(sample):
    return Spans([(0, 1, -1.0), (1, 3, 3.0)])
