"""Questions about words: which are asked, that half of them is yes, and that no word is in both splits."""

import pytest

from mmrl.settings import make
from mmrl.tasks.data.named_images.images import groups, names
from mmrl.tasks.visual_qa.data.words import WordsSource
from mmrl.tasks.visual_qa.settings import WordsData

GROUP = dict(zip(names(), groups(), strict=True))
SPLITS = [[source[i] for i in range(len(source))] for source in map(WordsSource, ("train", "heldout"))]


def test_the_answer_is_what_the_word_is():
    for prompt in (prompt for split in SPLITS for prompt in split):
        kind, name = prompt.metadata["kind"], prompt.metadata["name"]
        right = {"food": ("food",), "animal": ("nature",)}[kind]
        assert prompt.answer == ("yes" if GROUP[name] in right else "no") == prompt.metadata["demonstration"]
        assert GROUP[name] in (*right, "objects", "travel", "activities") and not prompt.images
        assert name not in ("teapot", "cactus", "mushroom")
    said = {prompt.text: prompt.answer for split in SPLITS for prompt in split}
    assert said["Can you eat an avocado? Answer yes or no."] == "yes"
    assert said["Is an ant an animal? Answer yes or no."] == "yes"
    assert said["Is a sun an animal? Answer yes or no."] == "no"


def test_half_of_either_kind_is_yes_and_no_word_is_in_both_splits():
    for split in SPLITS:
        for kind in ("food", "animal"):
            answers = [prompt.answer for prompt in split if prompt.metadata["kind"] == kind]
            assert answers.count("yes") == answers.count("no") >= 20
    train, held_out = ([prompt.metadata["name"] for prompt in split] for split in SPLITS)
    assert len(train) == len(held_out) == 86
    assert len({*train, *held_out}) == 172 and train[:3] == ["avocado", "accordion", "bagel"]


def test_what_is_not_there_is_refused():
    with pytest.raises(ValueError, match="split must be one of train, heldout, not 'eval'"):
        WordsSource("eval")
    with pytest.raises(IndexError):
        WordsSource("train")[86]


def test_the_data_gives_training_and_held_out_questions_whatever_the_seed():
    train, held_out = make(WordsData, {}).sources(3)
    assert [train[i].id for i in range(86)] == [prompt.id for prompt in SPLITS[0]]
    assert [held_out[i].id for i in range(86)] == [prompt.id for prompt in SPLITS[1]]
