import json
import math
import re
from pathlib import Path

import pytest
import torch

import mmrl.tasks.visual_qa as visual_qa
from mmrl.rollouts import Sample
from tests.tasks.choosing import build


def answered(prompt, response):
    return Sample(prompt, response, 3, False, 16)


def test_digits_by_default():
    task = build("visual_qa", {}, seed=3)
    assert (len(task.train), len(task.evaluation)) == (20_000, 500)
    assert task.train[0].id == "digits-train-3-0"
    assert task.evaluation[0].id == "digits-heldout-0-0"  # every run is judged on the same questions
    assert (task.reward_names, task.reward_weights) == (("exact_match",), (1.0,))
    prompt = task.train[1]
    samples = [answered(prompt, prompt.answer), answered(prompt, "nothing")]
    assert task.score(samples).tolist() == [[1.0], [0.0]]
    assert task.accuracy(samples).tolist() == [1.0, 0.0]


def test_rewards_may_differ_from_what_is_reported():
    options = {
        "data": {"type": "digits", "train_size": 5, "eval_size": 5, "questions": ["sum"], "scale": 2},
        "rewards": [{"name": "random"}, {"name": "numeric", "weight": 0.5, "options": {"atol": 2}, "label": "near"}],
        "accuracy": {"name": "numeric"},
        "instruction": "Answer in digits.",
        "system": "You add.",
    }
    task = build("visual_qa", options, seed=0)
    prompt = task.train[0]
    assert prompt.text == "What is the sum of the digits?\nAnswer in digits." and prompt.system == "You add."
    assert prompt.images[0].size == (48, 16)
    assert (task.reward_names, task.reward_weights) == (("random", "near"), (1.0, 0.5))
    near = answered(prompt, str(int(prompt.answer) + 2))
    assert task.score([near])[0, 1] == 1 and task.accuracy([near]) == 0


def test_files_and_what_cannot_be_scored(tmp_path):
    path = tmp_path / "eval.jsonl"
    path.write_text(json.dumps({"problem": "2 + 2?", "answer": "four"}) + "\n")
    task = build("visual_qa", {"data": {"type": "files", "eval": str(path)}, "accuracy": {"name": "numeric"}}, seed=0)
    assert task.train is None
    values = task.accuracy([answered(task.evaluation[0], "4")])
    assert values.dtype == torch.float32 and math.isnan(values[0])


@pytest.mark.parametrize(
    "options, words",
    [
        ({"dat": {}}, r"unknown key task\.dat; did you mean task\.data\?"),
        ({"data": {"type": "digits", "train_sise": 4}}, r"task\.data\.train_sise; did you mean task\.data\.train_size"),
        (
            {"data": {"type": "digit"}},
            r"task\.data\.type=digit is unknown .did you mean digits.*; .* digits, running_sums, scenes, still_lifes,",
        ),
        ({"data": {"type": "files"}}, r"^task\.data\.eval: Field required"),
        ({"data": {"type": "digits", "train_size": 0}}, r"^task\.data\.train_size: .* .got 0."),
        ({"data": {"type": "digits", "questions": ["product"]}}, r"^task\.data\.questions\.0: .* 'which'"),
        (
            {"rewards": [{"name": "numeric", "wieght": 1}]},
            r"task\.rewards\.0\.wieght; did you mean .*\.weight",
        ),
        ({"rewards": []}, r"^task\.rewards: .* at least 1 item"),
        ({"accuracy": {"name": "exact"}}, "unknown reward 'exact'"),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(ValueError, match=words) as caught:
        build("visual_qa", options, seed=0)
    assert "\n" not in str(caught.value)


def test_task_imports_no_room_above_it():
    for path in Path(visual_qa.__file__).parent.glob("*.py"):
        assert not re.search(r"mmrl\.(trainer|cli|config)\b", path.read_text()), path
