"""Sums as text: which are held out, what is demonstrated, what an answer earns."""

import pytest
import torch

from mmrl.rollouts import Sample
from mmrl.tasks.text_sums.settings import TextSumsSettings
from mmrl.tasks.text_sums.task import Sums, held_out, without_carry


def numbers(prompt):
    return tuple(int(n) for n in prompt.text.removesuffix("=").split("+"))


def test_no_held_out_pair_is_trained_on_in_either_order():
    task = TextSumsSettings(train_size=3000).build(seed=1)
    train = {frozenset(numbers(task.train[i])) for i in range(3000)}
    rest = {frozenset(numbers(task.evaluation[i])) for i in range(500)}
    assert not train & rest and len(train) > 1500
    share = sum(held_out(a, b) for a in range(100) for b in range(a, 100)) / 5050
    assert 0.22 < share < 0.28


def test_answers_are_sums_and_the_careless_forget_to_carry():
    source = Sums("train", 400, 0, 99, wrong_share=0.5)
    wrong = 0
    for i in range(400):
        prompt, (a, b) = source[i], numbers(source[i])
        assert int(prompt.answer) == a + b
        shown = int(prompt.metadata["demonstration"])
        assert shown in (a + b, without_carry(a, b))
        wrong += shown != a + b
    assert 50 < wrong < 130  # half of those that have something to carry
    assert (without_carry(27, 45), without_carry(20, 45), without_carry(99, 99)) == (62, 65, 188)
    assert source[3] == Sums("train", 400, 0, 99, wrong_share=0.5)[3]
    with pytest.raises(IndexError):
        source[400]


def test_what_an_answer_earns():
    task = TextSumsSettings().build(seed=0)
    prompt = task.train[0]
    samples = [Sample(prompt, response=text, response_length=2) for text in (prompt.answer, "", prompt.answer + "1")]
    assert task.score(samples).tolist() == [[1.0], [0.0], [0.0]]
    assert task.accuracy(samples).tolist() == [1.0, 0.0, 0.0]
    assert torch.equal(task.measures(samples, torch.zeros(3))["response/length"], torch.full((3,), 2.0))
    assert prompt.metadata["kind"] in ("carry", "plain")
