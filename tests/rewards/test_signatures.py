"""Rewards as they were written for TRL, verl and EasyR1: what they get, and what they may return, by value."""

import math

import pytest

from mmrl.errors import UserError
from mmrl.rewards import RewardSet, RewardSpec
from mmrl.rollouts import Prompt, Sample

SEEN = []
HERE = __name__


def sample(response, answer="7", **columns):
    prompt = Prompt("rows:3", "How many?", answer=answer, system="Think.", metadata=columns)
    return Sample(prompt, response, 5, False, 100)


def scores(function, samples, signature, **options):
    SEEN.clear()
    rewards = RewardSet([RewardSpec(name=f"{HERE}:{function}", signature=signature, options=options)])
    return rewards.score(samples)[:, 0].tolist()


BATCH = [sample("a 7", level=1), sample("b", "8", level=2), sample("c 9", "9")]


def all_columns(completions, **kwargs):
    SEEN.append((completions, kwargs))
    return [float(gold in text[0]["content"]) for text, gold in zip(completions, kwargs["solution"], strict=True)]


def of_texts(prompts, completions, solution, level, scale=1.0):
    SEEN.append((prompts, solution, level))
    return [scale * (gold in text) for gold, text in zip(solution, completions, strict=True)]


def test_trl_gets_messages_and_all_columns():
    assert scores("all_columns", BATCH, "trl") == [1.0, 0.0, 1.0]
    completions, given = SEEN[0]
    assert completions[1] == [{"role": "assistant", "content": "b"}]
    golds = ["7", "8", "9"]
    asked = [{"role": "system", "content": "Think."}, {"role": "user", "content": "How many?"}]
    assert given == {
        **dict.fromkeys(("answer", "solution", "ground_truth"), golds), "level": [1, 2, None], "prompts": [asked] * 3
    }  # fmt: skip


def test_a_column_of_the_row_comes_before_the_gold():
    assert scores("all_columns", [sample("x 5", solution="5"), sample("x 5", solution="6")], "trl") == [1.0, 0.0]


def test_trl_gets_texts_and_the_columns_that_it_names():
    assert scores("of_texts", BATCH, "trl_text", scale=0.5) == [0.5, 0.0, 0.5]
    assert SEEN == [(["How many?"] * 3, ["7", "8", "9"], [1, 2, None])]
    with pytest.raises(
        UserError, match=rf"'{HERE}:of_texts'.*'level' is not a column of prompt rows:3 \(columns: answer,"
    ):
        scores("of_texts", [sample("a")], "trl_text")


class Swift:
    """A reward as a class whose objects are called."""

    def __init__(self, factor=1):
        self.factor = factor

    def __call__(self, completions, solution, **kwargs):
        return [self.factor * (one in text) for one, text in zip(solution, completions, strict=True)]


def test_a_class_of_callable_objects():
    assert scores("Swift", BATCH, "trl_text", factor=3) == [3.0, 0.0, 3.0]


def too_few(completions, **kwargs):
    return [1.0]


def one_number(completions, **kwargs):
    return 1.0


def texts(completions, **kwargs):
    return ["good" for _ in completions]


def some_none(completions, **kwargs):
    return [None, 2, math.nan]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("too_few", "returned 1 values for 3 samples"),
        ("one_number", "one number for each sample"),
        ("texts", "one number for each sample"),
    ],
)
def test_what_trl_may_not_return(function, reason):
    with pytest.raises(UserError, match=f"'{HERE}:{function}': .*{reason}"):
        scores(function, BATCH, "trl")


def test_none_is_unscored():
    first, second, third = scores("some_none", BATCH, "trl")
    assert math.isnan(first) and second == 2.0 and math.isnan(third)


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    SEEN.append((data_source, solution_str, ground_truth, extra_info))
    return {"score": float(ground_truth in solution_str) - 0.25, "acc": True}


def two_of_them(solution_str, ground_truth, bonus):
    return (solution_str == ground_truth) * 1 + bonus


def without_a_score(solution_str, **kwargs):
    SEEN.append(sorted(kwargs))
    return {"acc": 1.0}


def test_verl_by_value():
    row = {"data_source": "own/set", "extra_info": {"index": 4}}
    assert scores("compute_score", [sample("is 7", **row), sample("is 8")], "verl") == [0.75, -0.25]
    assert SEEN == [("own/set", "is 7", "7", {"index": 4}), (None, "is 8", "7", None)]
    assert scores("two_of_them", [sample("7"), sample("8")], "verl", bonus=2) == [3.0, 2.0]
    with pytest.raises(UserError, match=r"without 'score' \(keys: acc\)"):
        scores("without_a_score", [sample("7")], "verl")
    assert SEEN == [["data_source", "extra_info", "ground_truth"]]
    with pytest.raises(ValueError, match="needs option bonus"):
        scores("two_of_them", BATCH, "verl")


def of_a_batch(reward_inputs, format_weight=0.0):
    SEEN.append(reward_inputs)
    return [{"overall": float(one["ground_truth"] in one["response"]) + format_weight} for one in reward_inputs]


def of_one(reward_input):
    return {"overall": reward_input["response_length"] / 10}


def a_number(reward_inputs):
    return 1.0


def test_easyr1_by_value():
    assert scores("of_a_batch", BATCH, "easyr1", format_weight=0.5) == [1.5, 0.5, 1.5]
    assert SEEN[0][1] == {"response": "b", "response_length": 5, "ground_truth": "8"}
    assert scores("of_one", BATCH, "easyr1") == [0.5] * 3
    with pytest.raises(UserError, match="a list of mappings with 'overall', not float"):
        scores("a_number", BATCH, "easyr1")


@pytest.mark.parametrize(
    ("function", "line"),
    [
        ("all_columns", "signature: trl}; signature: trl_text gives"),
        ("of_texts", "of a reward of TRL (prompts, completions, solution, level, scale)"),
        ("compute_score", "signature: verl}"),
        ("two_of_them", "signature: verl}"),
        ("of_a_batch", "signature: easyr1}"),
        ("of_one", "signature: easyr1}"),
    ],
)
def test_without_a_signature_the_line_to_write_is_named(function, line):
    with pytest.raises(ValueError) as raised:
        RewardSet([RewardSpec(name=f"{HERE}:{function}")])
    assert f"reward '{HERE}:{function}' has the parameters" in str(raised.value) and line in str(raised.value)
    assert "\n" not in str(raised.value)


def own(sample, completions=0):
    return completions


async def later(completions):
    return [1.0]


def test_signatures_that_do_not_fit():
    assert RewardSet([RewardSpec(name=f"{HERE}:own", options={"completions": 3})]).score([sample("a")]).item() == 3
    for function, signature, options, reason in (
        ("of_a_batch", "trl", {}, "parameter completions, but its parameters are: reward_inputs, format_weight"),
        ("own", "verl", {}, "parameter solution_str"),
        ("of_texts", "trl", {"scales": 1}, "no option 'scales'"),
        ("later", "trl", {}, "it must be a function that is not async"),
    ):
        with pytest.raises(ValueError, match=f"reward '{HERE}:{function}'.*{reason}"):
            RewardSet([RewardSpec(name=f"{HERE}:{function}", signature=signature, options=options)])
    with pytest.raises(ValueError, match="signature: trl is for your own function"):
        RewardSet([RewardSpec(name="exact_match", signature="trl")])
    with pytest.raises(ValueError, match="works only without isolated: true"):
        RewardSet([RewardSpec(name=f"{HERE}:all_columns", signature="trl", isolated=True)])


def raises_on_one(completions, solution, **kwargs):
    if "8" in solution:
        raise KeyError("8")
    return [1.0] * len(completions)


def test_a_fault_costs_its_sample_alone(caplog):
    first, second, third = scores("raises_on_one", BATCH, "trl")
    assert (first, third) == (1.0, 1.0) and math.isnan(second)
