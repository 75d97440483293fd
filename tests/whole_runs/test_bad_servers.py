"""Servers that answer badly, over real connections: each kind is named or corrected, and none is asked without end."""

import pytest

from mmrl.generation.vllm.client import ATTEMPTS
from mmrl.generation.vllm.responses import BadAnswer, check, prompt_ids, read, versions
from tests.whole_runs.bad_servers import GROUP, PROMPTS, SAMPLING, tried
from tests.whole_runs.stand_in_server import END, KINDS, ON_THE_WIRE, Handler, Server

CONTENT = [kind for kind in KINDS if not kind.startswith("status") and kind not in ("a redirect", "another prompt")]
NOT_JSON = {"broken JSON", "HTML", "JSON 100,000 deep"}


@pytest.fixture
def answer(monkeypatch):
    """What the stand-in answers rightly to a request for two responses to the prompt [5]."""
    monkeypatch.setattr("tests.whole_runs.stand_in_server.DELAY", 0.0)
    handler = object.__new__(Handler)
    handler.server = object.__new__(Server)
    handler.server.version = "now"
    return lambda: handler.generated({"token_ids": [5], "sampling_params": {"seed": 3, "n": 2}})


def looked_at(found):
    answers = read(found, 2, 2, SAMPLING, (END,))
    if versions(found) != {"now"}:
        raise BadAnswer("other weights")
    prompt_ids(found)
    return answers


def test_a_right_answer_is_taken(answer):
    assert [found.ids.tolist() for found in looked_at(answer())] == [[5, 3], [5, 4]]


@pytest.mark.parametrize("kind", [kind for kind in CONTENT if kind not in NOT_JSON])
def test_what_is_wrong_with_an_answer_is_said_in_a_few_words(answer, kind):
    with pytest.raises(BadAnswer) as error:
        looked_at(KINDS[kind](answer()))
    assert 10 < len(str(error.value)) < 200 and "\n" not in str(error.value)


def test_rounding_may_lift_a_probability_above_1(answer):
    found = answer()
    found["choices"][0]["logprobs"]["content"] = [{"logprob": 2e-4}, {"logprob": -0.5}]
    assert looked_at(found)[0].logp[0] == pytest.approx(2e-4)
    found["choices"][0]["logprobs"]["content"][0]["logprob"] = 2e-3
    with pytest.raises(BadAnswer, match="log-probability 0.002"):
        looked_at(found)


def test_an_unknown_vocabulary_still_has_no_negative_tokens(answer):
    found = looked_at(answer())[0]
    found.ids[1] = -1
    with pytest.raises(BadAnswer, match="token -1"):
        check(found, 2, SAMPLING.__class__(), (END,))


@pytest.mark.parametrize("kind", ["status 500", "HTML", "closed connections", "half an answer"])
@pytest.mark.quick("HTML")
def test_a_server_that_fails_is_asked_three_times_a_prompt_and_named(kind):
    found = tried(kind)
    assert found.how == "named" and f"was sent {ATTEMPTS} times" in found.words and "127.0.0.1" in found.words
    assert PROMPTS <= found.asked <= ATTEMPTS * PROMPTS and found.seconds < 20


@pytest.mark.parametrize("kind", ["hangs", "a byte now and then"])
@pytest.mark.quick("a byte now and then")
def test_a_server_that_is_too_slow_is_named(kind):
    found = tried(kind, timeout=0.5)
    assert found.how == "named" and found.asked <= ATTEMPTS * PROMPTS and found.seconds < 20


@pytest.mark.parametrize("kind", ["token -7", "status 503"])
def test_what_one_server_answers_badly_another_one_answers(kind):
    found = tried(kind, beside_a_good_one=True)
    assert found.how == "corrected" and found.asked < ATTEMPTS * PROMPTS * GROUP


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", [*KINDS, *ON_THE_WIRE])
def test_every_kind_is_named_or_corrected(kind):
    alone, beside = tried(kind), tried(kind, beside_a_good_one=True)
    assert alone.how == "named" and beside.how in ("named", "corrected")
    assert max(alone.asked, beside.asked) <= ATTEMPTS * PROMPTS
