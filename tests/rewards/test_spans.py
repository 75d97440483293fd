"""Rewards that return values of spans: at the door, in other processes, over HTTP, and of steps."""

import math
import re
import time

import pytest

from mmrl.errors import UserError
from mmrl.rewards import RewardSet, RewardSpec, build
from mmrl.rewards.services import isolated
from mmrl.rewards.services.server import RewardServer
from mmrl.rollouts import Prompt, Sample, Spans
from tests.rewards.http_servers import running, says, scripted

HERE = __name__
BAD = {
    "order": ([(2, 3, 1.0), (0, 1, 1.0)], "span 1, 0 to 1, begins before 3, the end of the previous span"),
    "overlap": ([(0, 2, 1.0), (1, 3, 1.0)], "span 1, 1 to 3, begins before 2"),
    "empty": ([(2, 2, 1.0)], "span 0, 2 to 2, is empty"),
    "before": ([(-1, 2, 1.0)], "span 0, -1 to 2, begins before 0"),
    "after": ([(0, 9, 1.0)], "span 0, 0 to 9, ends after the response's 5 characters"),
    "nan": ([(0, 1, math.nan)], "the value of span 0 is nan"),
    "floats": ([(0.0, 1, 1.0)], r"each span must be \(begin, end, value\), two integers and a number"),
    "pairs": ([(0, 1)], r"each span must be \(begin, end, value\)"),
    "text": ([(0, 1, "good")], r"each span must be \(begin, end, value\)"),
}


def sample(response="a\nb c", **prompt):
    return Sample(Prompt(**{"id": "p", "text": "q"} | prompt), response, 3, False, 8)


def planted(sample, of="characters", total=None):
    """Spans by the prompt's text; 1 for a prompt without any."""
    return Spans(BAD.get(sample.prompt.text, ([(0, 2, 1.0)],))[0], total, of)


def line_lengths(sample, steps):
    return [float(len(step)) for step in steps]


class Vowels:
    """A scorer that is made once."""

    def __init__(self, sign=1.0):
        self.sign = sign

    def __call__(self, sample, steps):
        return [self.sign * sum(letter in "aeiou" for letter in step) for step in steps]


def too_few(sample, steps):
    return [1.0]


@pytest.mark.parametrize("kind", BAD)
def test_bad_spans_cost_their_sample(kind):
    made = RewardSet([RewardSpec(name=f"{HERE}:planted")])
    samples = [sample(), sample("12345", id="other", text=kind), sample()]
    scores = made.score(samples).flatten()
    assert scores.isnan().tolist() == [False, True, False]
    assert made.components[0].failures.causes == {"error": 1} and "\n" not in made.reasons[made.names[0]]
    assert re.search("prompt other: " + BAD[kind][1], made.reasons[made.names[0]])
    assert [bool(each.spans) for each in samples] == [True, False, True]


def test_unknown_units_and_totals_that_are_not_finite():
    for options, reason in (
        ({"of": "words"}, "not 'words'"),
        ({"total": math.inf}, "the total of its spans is inf"),
    ):
        made = RewardSet([RewardSpec(name=f"{HERE}:planted", options=options)])
        assert made.score([sample(text="empty")]).isnan().all() and reason in made.reasons[made.names[0]]
    made = RewardSet([RewardSpec(name=f"{HERE}:turned")])
    assert made.score([sample()]).isnan().all()
    assert "ends after the response's 0 turns" in made.reasons[made.names[0]]


def turned(sample):
    return Spans([(0, 1, 1.0)], unit="turns")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["One. Two 3.5!\n\n", "四。五？\n", "end"]),
        ({"split": "sentence"}, ["One. ", "Two 3.5!\n\n", "四。", "五？\n \n", "end"]),
        ({"split": "separator", "separator": "Two "}, ["One. Two ", "3.5!\n\n四。五？\n \nend"]),
    ],
)
def test_steps_of_a_response(options, expected):
    text = "One. Two 3.5!\n\n四。五？\n \nend"
    reward = build("process", {"scorer": f"{HERE}:line_lengths", **options})
    spans = reward(sample(text))
    assert [text[begin:end] for begin, end, _ in spans.values] == expected
    assert [value for _, _, value in spans.values] == [len(step) for step in expected]
    assert list(reward(sample(" \n")).values) == []


def test_steps_take_linear_time():
    start = time.perf_counter()
    reward = build("process", {"scorer": f"{HERE}:line_lengths", "split": "sentence"})
    reward(sample("." * 100_000 + "a" + ".'" * 100_000 + "\n" * 100_000))
    assert time.perf_counter() - start < 2


def test_a_scorer_is_a_function_or_a_class():
    spec = {"name": "process", "options": {"scorer": f"{HERE}:Vowels", "options": {"sign": -1.0}}, "total": "min"}
    made = RewardSet([RewardSpec(**spec)])
    (one,) = samples = [sample("aei\nob")]
    assert made.score(samples).item() == -3.0
    assert one.spans["process"] == Spans(((0, 4, -3.0), (4, 6, -1.0)))
    broken = RewardSet([RewardSpec(name="process", options={"scorer": f"{HERE}:too_few"})])
    assert broken.score(samples).isnan().all() and "returned 1 values for 2 steps" in broken.reasons["process"]


def test_the_accuracy_does_not_take_the_place_of_a_reward_of_its_name():
    reward, accuracy = (
        RewardSet([RewardSpec(name="process", options={"scorer": f"{HERE}:{scorer}"}, total="sum")])
        for scorer in ("line_lengths", "Vowels")
    )
    (one,) = samples = [sample("ab")]
    assert (reward.score(samples).item(), accuracy.score(samples).item()) == (2.0, 1.0)
    assert one.spans["process"] == Spans(((0, 2, 2.0),))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "word"}, "split must be newline, sentence or separator, not 'word'"),
        ({"split": "separator"}, "split: separator needs the option separator"),
        ({"separator": ";"}, "separator is for split: separator, but split is newline"),
        ({"scorer": f"{HERE}:BAD"}, "is neither a function nor a class"),
        ({"scorer": f"{HERE}:nothing"}, "has no 'nothing'"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build("process", {"scorer": f"{HERE}:line_lengths"} | options)


def test_a_worker_answers_with_plain_spans(monkeypatch):
    """What an isolated reward sends and what is read of it, in this process. A worker ends its children after each
    answer; this process must keep its own, such as the fork server of multiprocessing."""
    monkeypatch.setattr(isolated, "end_descendants", lambda: None)
    score = isolated.scorer("process", {"scorer": f"{HERE}:line_lengths"})
    answer = score(sample("é\nbc"))
    assert answer == {"spans": [[0, 2, 2.0], [2, 4, 2.0]], "total": None, "of": "characters"}
    assert isolated._parse_answer(answer) == Spans([[0, 2, 2.0], [2, 4, 2.0]])
    infinite = isolated.scorer(f"{HERE}:planted", {"total": math.inf})(sample())
    assert infinite["raised"].startswith("ValueError: the total of its spans is inf")


@pytest.mark.slow
def test_an_isolated_process_reward():
    spec = {"options": {"scorer": "tests.rewards.test_spans:line_lengths"}, "isolated": True, "deadline_s": 30.0}
    made = RewardSet([RewardSpec(name="process", **spec, total="sum")])
    (one,) = samples = [sample("é\nbc")]
    try:
        assert made.score(samples).item() == 4.0
        assert one.spans["process"] == Spans(((0, 2, 2.0), (2, 4, 2.0)))
    finally:
        made.components[0].close()


def remote(url):
    return RewardSet([RewardSpec(name="http", options={"url": url, "retries": 0}, label="far")])


def test_a_process_reward_over_http():
    spec = RewardSpec(name="process", options={"scorer": f"{HERE}:line_lengths"}, total="min")
    with running(RewardServer(spec, "127.0.0.1", 0)) as server:
        samples = [sample("é\nbcd"), sample(""), sample("f")]
        scores = remote(f"http://127.0.0.1:{server.server_port}").score(samples).flatten()
    assert scores.isnan().tolist() == [False, True, False] and scores[[0, 2]].tolist() == [2.0, 1.0]
    assert samples[0].spans["far"] == Spans(((0, 2, 2.0), (2, 5, 3.0)), 2.0) and not samples[1].spans


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([None], "not a list with one entry for each score"),
        ({}, "not a list with one entry for each score"),
        ([None, [[0, 1, 1.0]]], "an object with a list `values`"),
        ([{"values": 3}, None], "an object with a list `values`"),
    ],
)
def test_a_server_that_answers_badly(spans, message):
    answer = says(200, {"scores": [1.0, 2.0], "spans": spans})
    with scripted(answer) as server, pytest.raises(UserError, match=message):
        remote(server.url).score([sample(), sample()])


def test_bad_spans_of_a_server_cost_their_sample():
    spans = [{"values": [[0, 99, 1.0]]}, {"values": [[0, 1, 1.0]], "of": "characters"}]
    with scripted(says(200, {"scores": [1.0, 2.0], "spans": spans})) as server:
        scores = remote(server.url).score([sample(), sample()]).flatten()
    assert scores.isnan().tolist() == [True, False] and scores[1] == 2.0
