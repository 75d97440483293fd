"""Judges that write: the numbers of real servers' texts, a tiny model's own words, and Soft-TIFA by its formula."""

import json
import math

import pytest
import torch

from mmrl.errors import UserError
from mmrl.rewards import RewardSet, RewardSpec, build
from mmrl.rollouts import Prompt, Sample
from tests.helpers import tiny_models
from tests.rewards.http_servers import says, scripted
from tests.rewards.test_judges import QUESTION, completion, first_token_probabilities, levels, loaded, pil, sample

TRUE_FALSE = {"after": '"answer":', "words": {True: 1.0, False: 0.0}}


def writes(text):
    return says(200, {"choices": [{"message": {"role": "assistant", "content": text}}]})


def reads(text, **options):
    return build("written_score", {"base_url": "http://x/v1", "model": "m", **options}).read(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("It is fine.\nFinal Score: 4.2", 0.8),
        ("Final Score: **3**", 0.5),
        ("Final Score: 1/5, no: Final Score: 5.", 1.0),
        ("Final Score: [2]", 0.25),
        ("Final Score:4.0\n", 0.75),
        ("Final Score: 6", None),
        ("Final Score: 0.5", None),
        ("Final Score: good", None),
        ("Final Score: ", None),
        ("final 3", None),
        ("The score is 3", None),
        ("", None),
    ],
)
def test_the_number_after_the_last_marker(text, value):
    """UnifiedReward's format: 1 to 5 become 0 to 1."""
    assert reads(text) == (None if value is None else pytest.approx(value))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('```json\n{"answer": true, "explanation": ""}\n```', 1.0),
        ('{"answer": "False", "explanation": "the cat is true to life"}', 0.0),
        ('<think>"answer": true?</think>{"answer":false}', 0.0),
        ('{"answer": truely}', None),
        ('{"answer": 1}', None),
        ("true", None),
    ],
)
def test_true_and_false_of_json(text, value):
    """OmniVerifier's format."""
    assert reads(text, **TRUE_FALSE) == value


def test_a_server_is_asked_with_image_and_prompt():
    source = pil(sample(0.0))
    broken = sample(0.5)
    broken.image[0] = math.inf
    drawn = Sample(Prompt("p", "a cat", images=(source,)), image=torch.full((3, 16, 16), 1.0))
    with scripted(writes("Final Score: 2"), writes("no"), writes("Final Score: 5")) as server:
        options = {"base_url": f"{server.url}/v1", "model": "m", "concurrency": 1, "max_tokens": 99, "low": 0}
        rewards = RewardSet([RewardSpec(name="written_score", options=options | {"source": True})])
        scores = rewards.score([drawn, broken, drawn, drawn])[:, 0]
    torch.testing.assert_close(scores, torch.tensor([0.4, math.nan, math.nan, 1.0]), equal_nan=True)
    request = json.loads(server.requests[0][2])
    assert levels(server.requests[0][2]) == [0.0, 1.0]  # the source, then the result
    assert request["max_tokens"] == 99 and request["temperature"] == 0 and "logprobs" not in request
    assert '"a cat"' in request["messages"][0]["content"][-1]["text"]


def test_a_server_without_a_text_is_named():
    with (
        scripted(says(200, {"choices": []})) as server,
        pytest.raises(
            UserError, match=r"answered without choices\[0\].message.content .*choose a server of OpenAI's chat API"
        ),
    ):
        build("written_score", {"base_url": server.url, "model": "m"}).score([sample(0.5)])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"question": "Is it good?"}, "question must contain {prompt}"),
        ({"after": ""}, "after must be the text before the number"),
        ({"low": 5, "high": 5}, "high must be above low, not 5 with low 5"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        ({"path": "x"}, "give base_url and model for an endpoint, or path"),
    ],
)
def test_wrong_options(options, words):
    with pytest.raises(ValueError, match=f"reward 'written_score': {words}"):
        build("written_score", {"base_url": "http://x", "model": "m", **options})


# --- in this process ---


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_models.build("qwen2_5_vl", tmp_path_factory.mktemp("writer")))


def test_a_model_in_this_process_writes_its_most_probable_words(model):
    """The first token that it writes is the most probable one of a forward pass without padding."""
    samples = [sample(0.2, "a number"), sample(0.8, "the largest digit"), sample(0.5, "one")]
    reward = build("written_score", {"path": model, "question": QUESTION, "batch_size": 2, "device": "cpu"})
    texts = reward.judge.write([reward._build_question(s) for s in samples], 1)
    processor, module = loaded(model)
    for s, text in zip(samples, texts, strict=True):
        chat = f"<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Is it {s.prompt.text}?<|im_end|>\n"
        inputs = processor(text=[chat + "<|im_start|>assistant\n"], images=[[pil(s)]], return_tensors="pt")
        with torch.no_grad():
            best = module(**inputs).logits[0, -1].argmax()
        assert text == processor.tokenizer.decode([best], skip_special_tokens=True)
    assert len(reward.judge.write([reward._build_question(samples[0])], 9)[0]) >= len(texts[0])


# --- Soft-TIFA ---


ATOMS = [["How many bicycles are there?", "four"], ["Are they white?", "Yes"], ["Are there any?", "Yes"]]


def answers(handler, body):
    """Four with .3 as a word and .2 as a digit; yes with the brightness; no word at all for whatever is black."""
    (level,) = levels(body)
    text = json.loads(body)["messages"][0]["content"][-1]["text"]
    assert text.endswith(" Answer with one word.")
    words = {"Four": 0.3, "4": 0.2} if text.startswith("How many") else {" yes": 0.5 * level, "YES": 0.5 * level}
    return 200, json.dumps(completion(**words)).encode()


def tifa(server, **options):
    return build("soft_tifa", {"base_url": server.url, "model": "m", **options})


def with_atoms(level, atoms=ATOMS):
    return Sample(Prompt("p", "four white bicycles", metadata={"vqa_list": atoms}), image=torch.full((3, 4, 4), level))


def test_soft_tifa_is_the_mean_of_the_answers_probabilities():
    samples = [with_atoms(0.8), with_atoms(0.0), with_atoms(0.2, ATOMS[1:]), with_atoms(1.0, ATOMS[:1])]
    with scripted(answers) as server:
        geometric = tifa(server).score(samples)
        arithmetic = tifa(server, mean="arithmetic").score(samples)
    expected = [(0.5 * 0.8 * 0.8) ** (1 / 3), 0.0, 0.2, 0.5]
    assert geometric == pytest.approx(expected, abs=1e-5)
    assert arithmetic == pytest.approx([(0.5 + 0.8 + 0.8) / 3, 0.5 / 3, 0.2, 0.5], abs=1e-5)


def test_soft_tifa_reads_a_model_in_this_process(model):
    """Each answer of the prompt's own words, whichever it is, by a forward pass."""
    atoms = [["Is it one?", "one"], ["Is it two?", "Two"]]
    s = with_atoms(0.6, atoms)
    value = build("soft_tifa", {"path": model, "question": "{question}", "device": "cpu"}).score([s])
    texts = [question for question, _ in atoms]
    pairs = [first_token_probabilities(model, [pil(s)], text, words) for text, words in zip(texts, PAIRS, strict=True)]
    assert value == pytest.approx([math.sqrt(sum(pairs[0]) * sum(pairs[1]))], abs=1e-5)


PAIRS = [["one", "1"], ["two", "2"]]


@pytest.mark.parametrize("metadata", [{}, {"vqa_list": []}, {"vqa_list": ["Is it?"]}, {"vqa_list": [["Is it?"]]}])
def test_a_prompt_without_questions_is_named(metadata):
    with pytest.raises(UserError, match="prompt 'p7' has no list of .question, answer. in its metadata as 'vqa_list'"):
        build("soft_tifa", {"base_url": "http://x", "model": "m"}).score(
            [Sample(Prompt("p7", "?", metadata=metadata), image=torch.zeros(3, 2, 2))]
        )


@pytest.mark.parametrize("options", [{"mean": "harmonic"}, {"question": "what?"}, {"think_tokens": 3}])
def test_wrong_options_of_soft_tifa(options):
    with pytest.raises(ValueError, match="reward 'soft_tifa'(: mean must|: question must| has no option 'think_tok)"):
        build("soft_tifa", {"base_url": "http://x", "model": "m", **options})
