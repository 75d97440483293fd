"""Judges: through a real server that speaks OpenAI's protocol, and through a tiny model in this process."""

import base64
import io
import json
import math
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from mmrl.errors import UserError
from mmrl.rewards import RewardSet, RewardSpec, build
from mmrl.rewards.services import http
from mmrl.rollouts import Prompt, Sample
from tests.helpers import tiny_models
from tests.rewards.http_servers import says, scripted, sleeps


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(http, "BACKOFF_S", (0.01, 0.02))


def sample(level, text="a cat", id="p"):
    return Sample(Prompt(id, text), image=torch.full((3, 16, 16), level))


def levels(body):
    """The mean brightness of each image of a request."""
    parts = json.loads(body)["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["image_url"] * (len(parts) - 1) + ["text"]
    found = []
    for part in parts[:-1]:
        kind, data = part["image_url"]["url"].split(",")
        assert kind == "data:image/png;base64"
        found.append(np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))).mean() / 255)
    return found


def completion(**probabilities):
    """What the protocol answers: the first token's alternatives, by probability."""
    top = [{"token": token, "logprob": math.log(p), "bytes": None} for token, p in probabilities.items() if p > 0]
    return {
        "id": "x",
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "finish_reason": "length",
                "message": {"role": "assistant", "content": "Yes"},
                "logprobs": {"content": [{"token": "Yes", "logprob": -0.1, "top_logprobs": top}]},
            }
        ],
    }


def likes_light(handler, body):
    """Yes with 0.7 of the brightness, in two spellings; no with 0.6 of the rest; and something else."""
    (level,) = levels(body)
    words = {" Yes": 0.5 * level, "yes": 0.2 * level, "NO": 0.6 * (1 - level), "yesterday": 0.1, "n": 0.05}
    return 200, json.dumps(completion(**words)).encode()


def prefers_light(handler, body):
    first, second = levels(body)
    p = 0.5 if first == second else 0.8 if first > second else 0.1
    return 200, json.dumps(completion(**{"1": p, "2": 1 - p})).encode()


def judge(server, name="vlm_judge", **options):
    options = {"base_url": f"{server.url}/v1/", "model": "judge-7b", **options}
    return RewardSet([RewardSpec(name=name, options=options, label="judge")])


def is_lighter(handler, body):
    """Yes with 0.9 where the first image is the lighter one, else with 0.2."""
    first, second = levels(body)
    p = 0.9 if first > second else 0.2
    return 200, json.dumps(completion(yes=p, no=1 - p)).encode()


# --- pointwise ---


def test_the_generated_image_stands_before_its_reference():
    reference = Image.new("RGB", (16, 16), (128, 128, 128))
    samples = [replace(one, prompt=Prompt("p", "a cat", images=(reference,))) for one in (sample(1.0), sample(0.2))]
    with scripted(is_lighter) as server:
        scores = judge(server, "vlm_reference").score(samples).flatten()
    torch.testing.assert_close(scores, torch.tensor([0.9, 0.2]), atol=1e-5, rtol=0)


def test_yes_probability(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    samples = [sample(level) for level in (1.0, 0.0, 0.4, 0.2)]
    with scripted(likes_light) as server:
        scores = judge(server, api_key_env="JUDGE_KEY").score(samples).flatten()
        plain = judge(server, normalise=False).score(samples).flatten()
    expected = [1, 0, 0.28 / (0.28 + 0.36), 0.14 / (0.14 + 0.48)]
    torch.testing.assert_close(scores, torch.tensor(expected), atol=1e-5, rtol=0)
    torch.testing.assert_close(plain, torch.tensor([0.7, 0, 0.28, 0.14]), atol=1e-5, rtol=0)
    path, headers, body = server.requests[0]
    request = json.loads(body)
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer secret"
    assert request["model"] == "judge-7b" and request["max_tokens"] == 1 and request["temperature"] == 0
    assert request["logprobs"] is True and request["top_logprobs"] == 20
    assert '"a cat"' in request["messages"][0]["content"][-1]["text"]
    assert "Authorization" not in server.requests[-1][1]


def test_question_and_answers_may_be_chosen():
    with scripted(says(200, completion(ja=0.3, Nein=0.1, yes=0.6))) as server:
        rewards = judge(server, question="Ist das {prompt}? {x}", answers=["Ja", "nein"])
        torch.testing.assert_close(rewards.score([sample(0.5)]), torch.tensor([[0.75]]))
        assert json.loads(server.requests[0][2])["messages"][0]["content"][-1]["text"] == "Ist das a cat? {x}"


def test_no_word_of_either_is_no_score():
    broken = sample(0.5)
    broken.image[0, 0, 0] = math.nan
    with scripted(says(200, completion(perhaps=0.9))) as server:
        for normalise in (True, False):
            assert judge(server, normalise=normalise).score([sample(0.5), broken]).isnan().all()
        assert len(server.requests) == 2  # the broken ones are not asked about


@pytest.mark.parametrize(
    "act, words, requests",
    [
        (says(503, b"loading"), "did not answer in 3 tries.*status 503: loading", 3),
        (sleeps(3.0), "did not answer in 3 tries.*Timeout", 3),
        (says(404, {"error": "no model judge-7b"}), "refused the request: status 404.*no model judge-7b", 1),
        (says(200, b"hello"), "did not answer with a JSON object", 1),
        (says(200, {"choices": []}), r"\(judge-7b\) that return log-probabilities", 1),
        (says(200, {"choices": [{"logprobs": None}]}), r"\(judge-7b\) that return log-probabilities", 1),
    ],
)
def test_an_endpoint_that_fails(act, words, requests):
    with scripted(act) as server:
        with pytest.raises(UserError, match=f"reward 'judge': .*{words}"):
            judge(server, retries=2, deadline_s=0.3 if "Timeout" in words else 20).score([sample(0.5)])
        assert len(server.requests) == requests


def test_an_outage_costs_one_question_and_not_all():
    with scripted(says(500, b"")) as server:
        with pytest.raises(UserError, match="did not answer in 1 tries"):
            judge(server, retries=0, concurrency=1).score([sample(0.5)] * 50)
        assert len(server.requests) < 10


def test_it_recovers():
    with scripted(says(500, b""), likes_light) as server:
        torch.testing.assert_close(judge(server, retries=1).score([sample(1.0)]), torch.tensor([[1.0]]))


# --- preference ---


def test_win_rates_within_groups():
    samples = [sample(level) for level in (0.1, 0.9, 0.5, 0.2, 0.9, 0.5, 0.3)]
    group = torch.tensor([3, 8, 3, 8, 3, 3, 5])
    with scripted(prefers_light) as server:
        scores = judge(server, "vlm_preference").score(samples, group).flatten()
        assert len(server.requests) == 4 * 3 + 2 * 1  # n (n - 1) / 2 pairs, both orders
        pairs = {tuple(round(level, 1) for level in levels(body)) for _, _, body in server.requests}
    # group 3 holds 0.1, 0.5, 0.9, 0.5: 0.5 beats 0.1, loses to 0.9 and ties with the other
    torch.testing.assert_close(scores[:6], torch.tensor([0, 1, 0.5, 0, 1, 0.5]))
    assert scores[6].isnan()  # nobody to compare with
    one, other = [(0.1, 0.5), (0.1, 0.9), (0.5, 0.9)], [(0.2, 0.9)]
    assert pairs == {(0.5, 0.5), *one, *other, *((b, a) for a, b in one + other)}


def test_order_of_rollouts_does_not_matter():
    samples = [sample(level) for level in (0.1, 0.9, 0.5, 0.2)]
    order = [2, 0, 3, 1]
    with scripted(prefers_light) as server:
        rewards = judge(server, "vlm_preference")
        scores = rewards.score(samples, torch.zeros(4))
        turned = rewards.score([samples[i] for i in order], torch.zeros(4))
    torch.testing.assert_close(turned, scores[order])


def test_a_judge_that_prefers_a_place_makes_ties():
    group = torch.zeros(4, dtype=torch.int64)
    with scripted(says(200, completion(**{"1": 0.9, "2": 0.1}))) as server:
        scores = judge(server, "vlm_preference").score([sample(level) for level in (0.1, 0.9, 0.5, 0.2)], group)
    assert scores.flatten().tolist() == [0.5] * 4


def test_random_order_asks_once_and_repeats_itself():
    samples = [sample(0.1 * n) for n in range(8)]
    group = torch.zeros(8, dtype=torch.int64)
    with scripted(prefers_light) as server:
        rewards = judge(server, "vlm_preference", orders="random")
        scores = rewards.score(samples, group)
        first = {tuple(levels(body)) for _, _, body in server.requests}
        assert len(server.requests) == len(first) == 28
        assert torch.equal(rewards.score(samples, group), scores)
        assert {tuple(levels(body)) for _, _, body in server.requests[28:]} == first
    torch.testing.assert_close(scores.flatten(), torch.arange(8) / 7)
    turned = sum(a > b for a, b in first)
    assert 5 <= turned <= 23  # of 28


def test_pairs_without_an_answer_are_left_out():
    def only_dark(handler, body):
        return (
            prefers_light(handler, body) if max(levels(body)) < 0.6 else (200, json.dumps(completion(x=0.9)).encode())
        )

    broken = sample(0.5)
    broken.image[0, 0, 0] = math.inf
    samples = [sample(0.9), sample(0.1), broken, sample(0.5)]
    with scripted(only_dark) as server:
        scores = judge(server, "vlm_preference").score(samples, torch.zeros(4)).flatten()
    assert scores[0].isnan() and scores[2].isnan()
    assert scores[1] == 0 and scores[3] == 1  # their one pair that was judged


# --- in this process ---


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_models.build("qwen2_5_vl", tmp_path_factory.mktemp("judge")))


QUESTION = "Is it {prompt}?"


@lru_cache
def loaded(path):
    return AutoProcessor.from_pretrained(path), AutoModelForImageTextToText.from_pretrained(
        path, dtype=torch.float32
    ).eval()


def first_token_probabilities(path, images, text, words):
    """One question, no padding: the words' probabilities, read off the whole vocabulary."""
    processor, module = loaded(path)
    chat = f"<|im_start|>user\n{'<|vision_start|><|image_pad|><|vision_end|>' * len(images)}{text}<|im_end|>\n"
    inputs = processor(text=[chat + "<|im_start|>assistant\n"], images=[images], return_tensors="pt")
    with torch.no_grad():
        p = module(**inputs).logits[0, -1].double().softmax(-1)
    spellings = [processor.tokenizer.decode([i]).strip().lower() for i in range(len(p))]
    return [sum(p[i].item() for i, spelling in enumerate(spellings) if spelling == word) for word in words]


def pil(sample):
    return Image.fromarray((sample.image * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy())


def test_a_model_in_process_judges(model):
    samples = [sample(0.2, "a number"), sample(0.8, "the largest digit of the image"), sample(0.5, "one")]
    samples[0] = Sample(samples[0].prompt, image=torch.rand(3, 32, 16))
    options = {"path": model, "question": QUESTION, "answers": ["one", "two"], "device": "cpu"}
    rewards = build("vlm_judge", options | {"batch_size": 2})
    expected = []
    for s in samples:
        yes, no = first_token_probabilities(model, [pil(s)], f"Is it {s.prompt.text}?", ["one", "two"])
        assert yes > 0 and no > 0
        expected.append((yes / (yes + no), yes))
    together = rewards.score(samples)
    assert together == pytest.approx([a for a, _ in expected], abs=1e-5)
    assert together != pytest.approx([together[0]] * 3, abs=1e-4)  # the images and prompts matter
    assert rewards.score(samples[::-1]) == pytest.approx(together[::-1], abs=1e-5)
    assert build("vlm_judge", options | {"batch_size": 1}).score(samples) == pytest.approx(together, abs=1e-5)
    plain = build("vlm_judge", options | {"normalise": False}).score(samples)
    assert plain == pytest.approx([b for _, b in expected], abs=1e-6)


def test_a_model_in_process_judges_an_edit_beside_its_source(model):
    """The source comes first: the other order gives another number."""
    source, edited = torch.rand(3, 16, 16), torch.rand(3, 32, 16)
    prompt = Prompt("p", "draw a digit", images=(pil(Sample(Prompt("x", "x"), image=source)),))
    shown = Sample(prompt, image=edited)
    options = {"path": model, "question": QUESTION, "answers": ["one", "two"], "device": "cpu"}
    found = build("edit_judge", options).score([shown])[0]
    both = [prompt.images[0], pil(shown)]
    yes, no = first_token_probabilities(model, both, "Is it draw a digit?", ["one", "two"])
    swapped, against = first_token_probabilities(model, both[::-1], "Is it draw a digit?", ["one", "two"])
    assert found == pytest.approx(yes / (yes + no), abs=1e-5) != pytest.approx(swapped / (swapped + against), abs=1e-5)


def test_a_model_in_process_prefers(model):
    samples = [Sample(Prompt("p", "a digit"), image=torch.rand(3, 16, 16)) for _ in range(3)]
    options = {"path": model, "question": QUESTION, "answers": ["first", "second"], "device": "cpu"}
    won = torch.zeros(3)
    for i in range(3):
        for j in range(3):
            if i != j:
                images = [pil(samples[i]), pil(samples[j])]
                a, b = first_token_probabilities(model, images, "Is it a digit?", ["first", "second"])
                won[i] += float(a > b) / 4
                won[j] += float(b > a) / 4
    rewards = RewardSet([RewardSpec(name="vlm_preference", options=options)])
    torch.testing.assert_close(rewards.score(samples, torch.zeros(3)).flatten(), won)


@pytest.mark.parametrize(
    "options, words",
    [
        ({}, "give base_url and model for an endpoint, or path"),
        ({"base_url": "http://127.0.0.1:1"}, "give base_url and model"),
        ({"base_url": "http://127.0.0.1:1", "model": "m", "path": "p"}, "give base_url and model"),
        ({"base_url": "127.0.0.1:1", "model": "m"}, "begins with http"),
        ({"base_url": "http://127.0.0.1:1", "model": "m", "deadline_s": 0}, "deadline_s"),
        ({"base_url": "http://127.0.0.1:1", "model": "m", "api_key_env": "NO_SUCH_KEY"}, "api_key_env: .*NO_SUCH_KEY"),
        ({"base_url": "http://127.0.0.1:1", "model": "m", "answers": ["yes", "Yes"]}, "two different words"),
        ({"base_url": "http://127.0.0.1:1", "model": "m", "question": "Is it?"}, "must contain {prompt}"),
        ({"base_url": "http://127.0.0.1:1", "model": "m", "concurrency": 0}, "concurrency"),
        ({"base_ulr": "http://127.0.0.1:1"}, "did you mean 'base_url'"),
        ({"path": "no/such/folder"}, "judge 'no/such/folder' cannot be loaded"),
    ],
)
@pytest.mark.parametrize("name", ["vlm_judge", "vlm_preference"])
def test_bad_options(name, options, words, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=f"reward '{name}'.*{words}"):
        build(name, options)


def test_words_that_are_no_tokens(model):
    with pytest.raises(ValueError, match="'yes' is not one token"):
        build("vlm_judge", {"path": model})
    with pytest.raises(ValueError, match="orders must be both or random"):
        build("vlm_preference", {"path": model, "orders": "once"})
