import numpy as np
import pytest
import torch

from mmrl.errors import UserError
from mmrl.rollouts import Prompt, Sample
from mmrl.tasks.image_generation.data import digits
from mmrl.tasks.image_generation.data.digits import (
    DigitCorrect,
    DigitPromptSource,
    heldout_accuracy,
    split_indices,
    texts,
    words,
)
from mmrl.tasks.image_generation.rewards import classifiers
from mmrl.tasks.visual_qa.data.digits import split_indices as visual_qa_split


def drawn(answer, image):
    return Sample(Prompt(id=f"p{answer}", text="", answer=answer), image=image)


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_split_is_that_of_visual_qa(split):
    assert np.array_equal(split_indices(split), visual_qa_split(split))


def test_heldout_texts_are_new_and_their_words_are_not():
    split = {name: {text for digit in range(10) for text in texts(name, digit)} for name in ("train", "heldout")}
    assert len(split["train"]) == len(split["heldout"]) == 60 and not split["train"] & split["heldout"]
    vocabulary = {name: {word for text in all_texts for word in text.split()} for name, all_texts in split.items()}
    assert vocabulary["train"] == vocabulary["heldout"] == set(words()) and words() == sorted(words())
    for digit in range(10):
        for text in texts("train", digit) + texts("heldout", digit):
            named = {str(d) for d in range(10)} & set(text.split()) | set(digits.NAMES) & set(text.split())
            assert named in ({str(digit)}, {digits.NAMES[digit]})


def test_prompts_carry_a_real_image_of_their_digit():
    from sklearn.datasets import load_digits

    bunch = load_digits()
    for split in ("train", "heldout"):
        for index, prompt in enumerate(DigitPromptSource(split, size=40, seed=3)):
            image, target = prompt.metadata["image"], prompt.metadata["target"]
            assert prompt.answer == index % 10 == bunch.target[image]
            assert prompt.text in texts(split, prompt.answer) and image in split_indices(split)
            assert target.shape == (1, 8, 8) and np.array_equal(target[0].numpy() * 16, bunch.images[image])


def test_item_depends_on_split_seed_and_index_only():
    one, two = DigitPromptSource(size=50, seed=7), DigitPromptSource(size=9, seed=7)
    assert [one[i].metadata["image"] for i in (8, 3)] == [two[i].metadata["image"] for i in (8, 3)]
    assert [p.text for p in one] != [p.text for p in DigitPromptSource(size=50, seed=8)]
    with pytest.raises(IndexError):
        two[9]


def test_careless_share_shows_another_digit():
    from sklearn.datasets import load_digits

    target = load_digits().target
    for careless in (0.0, 0.2, 1.0):
        source = DigitPromptSource(size=1000, seed=0, wrong_share=careless)
        wrong = np.mean([target[p.metadata["image"]] != p.answer for p in source])
        assert wrong == pytest.approx(careless, abs=0.03 * (0 < careless < 1))
    assert [p.text for p in source] == [p.text for p in DigitPromptSource(size=1000, seed=0)]


def test_classifiers_know_images_they_never_saw():
    assert heldout_accuracy("reward") > 0.96
    assert heldout_accuracy("second") > 0.97


def test_classifiers_differ_and_are_the_same_in_every_process(tmp_path, monkeypatch):
    monkeypatch.setenv("MMRL_CLASSIFIER_CACHE", str(tmp_path / "one"))
    digits.classifier.cache_clear()
    reward, second = digits.reward_classifier(), digits.second_classifier()
    noise = torch.rand(50, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert (reward(noise).argmax(-1) != second(noise).argmax(-1)).float().mean() > 0.2
    before = torch.random.get_rng_state()
    digits.classifier.cache_clear()
    monkeypatch.setenv("MMRL_CLASSIFIER_CACHE", str(tmp_path / "two"))  # nothing is kept there
    torch.manual_seed(123)
    again = digits.reward_classifier()
    assert torch.initial_seed() == 123 and torch.rand(1) == torch.rand(1, generator=torch.Generator().manual_seed(123))
    torch.random.set_rng_state(before)
    assert torch.equal(reward(noise), again(noise))


def test_a_classifier_is_trained_once_for_the_same_images(tmp_path, monkeypatch):
    monkeypatch.setenv("MMRL_CLASSIFIER_CACHE", str(tmp_path / "new" / "folder"))
    lessons = []
    train = classifiers._train
    monkeypatch.setattr(classifiers, "STEPS", 2)
    monkeypatch.setattr(classifiers, "_train", lambda *words, **named: (lessons.append(1), train(*words, **named)))
    images = torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(20) % 10

    def weights(*, convolutions=False, images=images, labels=labels):
        made = classifiers.trained_classifier(images, labels, convolutions=convolutions)
        assert not made.training and not any(p.requires_grad for p in made.parameters())
        return torch.cat([p.flatten() for p in made.parameters()])

    first = weights()
    assert len(lessons) == 1 and torch.equal(weights(), first) and len(lessons) == 1
    (file,) = (tmp_path / "new" / "folder").iterdir()
    file.write_bytes(b"no weights")
    assert torch.equal(weights(), first) and len(lessons) == 2
    weights(convolutions=True)
    weights(labels=labels.flip(0))
    weights(images=1 - images)
    assert len(lessons) == 5
    monkeypatch.setattr(classifiers.torch, "__version__", "0.0")
    assert torch.equal(weights(), first) and len(lessons) == 6
    monkeypatch.setenv("MMRL_CLASSIFIER_CACHE", str(file))  # a folder that can not be made
    assert torch.equal(weights(), first) and torch.equal(weights(), first) and len(lessons) == 8


def test_the_classifiers_share_no_image():
    reward, second = (set(digits.training_indices(judge)) for judge in digits.JUDGES)
    assert not reward & second and reward | second == set(split_indices("train")) and abs(len(reward) - len(second)) < 2


def test_digit_correct():
    source = DigitPromptSource("heldout", size=200, seed=0)
    right = [drawn(p.answer, p.metadata["target"]) for p in source]
    wrong = [drawn((p.answer + 3) % 10, p.metadata["target"]) for p in source]
    values = DigitCorrect().score(right)
    assert np.mean(values) > 0.96 and np.mean(DigitCorrect().score(wrong)) < 0.04
    stretched = [drawn(p.answer, p.metadata["target"].where(p.metadata["target"] < 1, 5.0)) for p in source]
    assert DigitCorrect().score(stretched) == values  # seen as it would be shown
    assert DigitCorrect(judge="reward").score(right) != values
    assert DigitCorrect().score([right[0], drawn(1, torch.full((1, 8, 8), torch.nan))]) == [values[0], None]
    with pytest.raises(UserError, match=r"'p1' has the shape \[3, 8, 8\], expected \[1, 8, 8\]"):
        DigitCorrect().score([drawn(1, torch.zeros(3, 8, 8))])
    with pytest.raises(ValueError, match="judge must be one of reward, second, not 'third'"):
        DigitCorrect(judge="third")
