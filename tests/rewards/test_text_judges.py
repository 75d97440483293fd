"""Judges of text, through a real server that speaks OpenAI's protocol."""

import json
import math

import pytest
import torch
from PIL import Image

from mmrl.errors import UserError
from mmrl.rewards import RewardSet, RewardSpec, build
from mmrl.rewards.services import http
from mmrl.rollouts import Prompt, Sample, Video
from tests.rewards.http_servers import scripted
from tests.rewards.test_judges import completion, levels


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(http, "BACKOFF_S", (0.01, 0.02))


def sample(response, answer="seven", text="<image>How many {cats}?", **metadata):
    return Sample(
        Prompt("p", text, images=(Image.new("RGB", (8, 8), (255,) * 3),), answer=answer, metadata=metadata), response
    )


class Asked(list):
    """It keeps what it was asked, and says yes with the probability that the text holds as p=0.8."""

    def __call__(self, handler, body):
        message = json.loads(body)
        (text,) = (part["text"] for part in message["messages"][0]["content"] if part["type"] == "text")
        self.append((text, levels(body), message["max_tokens"]))
        p = float((text.partition("p=")[2].split() or ["0.5"])[0])
        return 200, json.dumps(completion(yes=0.5 * p, no=0.5 * (1 - p))).encode()


def scored(name, samples, **options):
    asked = Asked()
    with scripted(asked) as server:
        options = {"base_url": f"{server.url}/v1/", "model": "judge", "concurrency": 1, **options}
        rewards = RewardSet([RewardSpec(name=name, options=options)])
        return rewards.score(samples)[:, 0].tolist(), asked


def test_answer_judge():
    found, asked = scored("answer_judge", [sample("<think>x</think><answer>p=0.8 </answer>"), sample("p=0.25 ")])
    assert found == pytest.approx([0.8, 0.25])
    text, images, tokens = asked[0]
    assert text.startswith("Question: How many {cats}?\nReference answer: seven\nAnswer: p=0.8\n")
    assert "one word, yes or no" in text and images == [] and tokens == 1


def test_an_answer_that_is_wanted_and_not_there():
    with pytest.raises(UserError, match="prompt 'p' has no answer"):
        scored("answer_judge", [sample("x", answer=None)])


def test_what_was_said_is_not_filled_in_again():
    _, asked = scored("answer_judge", [sample("{gold} {prompt}")])
    assert "Answer: {gold} {prompt}\n" in asked[0][0]


def test_rubric_judge():
    # Of the weights 3 and 1 the criteria are met with 0.5 and 0.9.
    criteria = [["p=0.5 clear", 3], "p=0.9 short"]
    found, asked = scored("rubric_judge", [sample("a response")], criteria=criteria)
    assert found == pytest.approx([(3 * 0.5 + 0.9) / 4])
    assert [text.partition("Criterion: ")[2].splitlines()[0] for text, _, _ in asked] == ["p=0.5 clear", "p=0.9 short"]
    assert "Response: a response\n" in asked[0][0]


def test_rubrics_of_the_prompt():
    own = [sample("a", points=["p=0.1 x"]), sample("b", points=["p=0.3 y", "p=0.7 z"])]
    found, _ = scored("rubric_judge", own, criteria_key="points")
    assert found == pytest.approx([0.1, 0.5])
    with pytest.raises(UserError, match="its metadata has no criteria at the key 'points'"):
        scored("rubric_judge", [sample("a")], criteria_key="points")


THOUGHT = "<think>p=0.7 it is seven</think><answer>7</answer>"


def test_consistency_judge():
    found, asked = scored("consistency_judge", [sample(THOUGHT), sample("<answer>7</answer>")])
    assert found == pytest.approx([0.7, 0.0])  # without reasoning nothing follows, and nobody is asked
    assert len(asked) == 1 and "Reasoning: p=0.7 it is seven\nAnswer: 7\n" in asked[0][0] and "seven" in asked[0][0]
    assert "Reference" not in asked[0][0] and asked[0][1] == []


def test_caption_judge():
    said = "<info>p=0.6 seven cats</info><think>y</think><answer>7</answer>"
    found, asked = scored("caption_judge", [sample(said), sample(THOUGHT)])
    assert found == pytest.approx([0.6, 0.0])
    assert "image: p=0.6 seven cats\n" in asked[0][0] and "Answer: seven\n" in asked[0][0] and asked[0][1] == []


def test_evidence_judge_sees_the_image():
    found, asked = scored("evidence_judge", [sample(THOUGHT)])
    assert found == pytest.approx([0.7]) and asked[0][1] == [1.0]
    assert scored("evidence_judge", [sample(THOUGHT)], images=False)[1][0][1] == []


@pytest.mark.parametrize(
    ("count", "frames", "seen"),
    [(11, {}, [0, 1, 3, 4, 6, 7, 9, 10]), (11, {"frames": 2}, [0, 10]), (3, {}, [0, 1, 2]), (8, {}, list(range(8)))],
)
def test_a_judge_sees_clips_as_frames_behind_the_images(count, frames, seen):
    still = Image.new("RGB", (8, 8), (255,) * 3)
    clip = Video(tuple(Image.new("RGB", (8, 8), (20 * place,) * 3) for place in range(count)))
    asking = Sample(Prompt("p", "<video>What moves?", images=(still,), videos=(clip, clip)), THOUGHT)
    found, asked = scored("evidence_judge", [asking], **frames)
    text, images, _ = asked[0]
    once = [20 * place / 255 for place in seen]
    assert found == pytest.approx([0.7]) and images == pytest.approx([1.0, *once, *once], abs=1e-3)
    assert text.startswith("Question: What moves?\n")


def test_a_judge_that_says_neither_word():
    with scripted(lambda handler, body: (200, json.dumps(completion(maybe=0.9)).encode())) as server:
        rewards = RewardSet([RewardSpec(name="answer_judge", options={"base_url": server.url, "model": "j"})])
        assert math.isnan(rewards.score([sample("7")])[0, 0])


def test_an_image_against_its_reference():
    """Yes with the brightness of the first over that of both."""

    def lighter(handler, body):
        made, reference = levels(body)
        p = made / (made + reference)
        return 200, json.dumps(completion(yes=0.5 * p, no=0.5 * (1 - p))).encode()

    prompt = Prompt("p", "a cat", images=(Image.new("RGB", (8, 8), (255,) * 3),))
    rows = [Sample(prompt, image=torch.full((3, 8, 8), level)) for level in (1.0, 0.0)]
    with scripted(lighter) as server:
        options = {"base_url": server.url, "model": "j"}
        assert RewardSet([RewardSpec(name="vlm_reference", options=options)]).score(rows)[:, 0].tolist() == [0.25, 0.0]
        options["normalise"] = True
        assert RewardSet([RewardSpec(name="vlm_reference", options=options)]).score(rows)[0, 0].item() == 0.5


def test_an_edit_beside_its_source():
    """Yes with 0.1 and half of how much darker the second image, the edit, is than the first."""
    asked = []

    def darker(handler, body):
        source, edited = levels(body)
        asked.append(json.loads(body)["messages"][0]["content"][-1]["text"])
        yes = 0.1 + 0.5 * (source - edited)
        return 200, json.dumps(completion(yes=yes, no=0.6 - yes)).encode()

    prompt = Prompt("p", "make it dark", images=(Image.new("RGB", (8, 8), (255,) * 3),))
    rows = [Sample(prompt, image=torch.full((3, 8, 8), level)) for level in (1.0, 0.0)]
    with scripted(darker) as server:
        rewards = RewardSet([RewardSpec(name="edit_judge", options={"base_url": server.url, "model": "j"})])
        assert rewards.score(rows)[:, 0].tolist() == pytest.approx([0.1 / 0.6, 1.0], abs=1e-6)
        assert all('by the instruction "make it dark"' in text for text in asked)
        with pytest.raises(UserError, match="has no image; add the image that was edited"):
            rewards.score([Sample(Prompt("q", "make it dark"), image=rows[0].image)])


def thinks(*said):
    """A judge that says these tokens, each with alternatives by probability."""

    def answer(handler, body):
        content = [
            {"token": token, "top_logprobs": [{"token": t, "logprob": math.log(p)} for t, p in other.items()]}
            for token, other in said
        ]
        assert json.loads(body)["max_tokens"] == 41
        return 200, json.dumps({"choices": [{"logprobs": {"content": content}}]}).encode()

    return answer


def test_the_verdict_comes_after_the_thinking():
    said = thinks(
        ("no", {"no": 0.9, "yes": 0.1}), ("but", {"but": 1.0}), (" Yes", {" Yes": 0.6, "no": 0.2}), (".", {".": 1.0})
    )
    with scripted(said) as server:
        options = {"base_url": server.url, "model": "j", "think_tokens": 40}
        rewards = RewardSet([RewardSpec(name="answer_judge", options=options)])
        assert rewards.score([sample("7")])[0, 0].item() == pytest.approx(0.75)
    with scripted(thinks(("hm", {"yes": 0.9}))) as server:
        rewards = RewardSet([RewardSpec(name="answer_judge", options={**options, "base_url": server.url})])
        assert math.isnan(rewards.score([sample("7")])[0, 0])


WRONG = [
    ("rubric_judge", {}, "set either criteria or criteria_key"),
    ("rubric_judge", {"criteria": []}, "criteria: the list is empty"),
    ("rubric_judge", {"criteria": [["x", -1]]}, "a weight above 0, not"),
    ("rubric_judge", {"criteria": ["x"], "question": "{prompt}?"}, "must contain {criterion}"),
    ("answer_judge", {"question": "Is it?"}, "must contain {prompt}"),
    ("answer_judge", {"think_tokens": -1}, "must not be negative"),
    ("evidence_judge", {"frames": 1}, "at least 2, the first and the last"),
]


@pytest.mark.parametrize(("name", "options", "message"), WRONG)
def test_wrong_options(name, options, message):
    with pytest.raises(ValueError, match=message):
        build(name, {"base_url": "http://localhost:9", "model": "j", **options})
