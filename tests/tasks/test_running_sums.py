import numpy as np
import pytest

from mmrl.rollouts import Prompt, Sample
from mmrl.tasks.visual_qa.data.digits import CELL, digit_images, split_indices
from mmrl.tasks.visual_qa.data.running_sums import RunningSumsSource
from mmrl.tasks.visual_qa.tiny.sums import right_steps

ROW = Prompt("row", "", answer="17", metadata={"digits": [3, 5, 9]})


def test_answers_and_demonstrations_follow_from_the_digits():
    right = RunningSumsSource("train", size=300, seed=3, cells=4)
    careless = RunningSumsSource("train", size=300, seed=3, cells=4, wrong_share=0.5)
    wrong = []
    for one, other in zip(right, careless, strict=True):
        a, b, c, d = one.metadata["digits"]
        assert one.metadata["demonstration"] == f"{a}\n{a + b}\n{a + b + c}\n{a + b + c + d}"
        assert one.answer == other.answer == one.metadata["demonstration"]
        assert one.images[0].size == (4 * CELL, CELL)
        assert one.images[0].tobytes() == other.images[0].tobytes()
        gaps = [
            int(y) - int(x) for x, y in zip(*(p.metadata["demonstration"].split() for p in (one, other)), strict=True)
        ]
        assert gaps == sorted(gaps) and set(gaps) <= {0, 1}  # one line is too high, and all after it
        wrong.append(sum(gaps))
    assert 0.4 < sum(bool(lines) for lines in wrong) / 300 < 0.6 and set(wrong) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_image_shows_the_digits_and_is_of_its_split(split):
    images, labels = digit_images()
    for prompt in RunningSumsSource(split, size=100, seed=3, cells=3):
        shown = prompt.metadata["images"]
        assert set(shown) <= set(split_indices(split).tolist()) and len(set(shown)) == 3
        assert np.array_equal(np.asarray(prompt.images[0])[:, :, 0], np.concatenate(images[shown], axis=1))
        assert prompt.metadata["digits"] == labels[shown].tolist()


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="split must be one of train, heldout, not 'test'"):
        RunningSumsSource("test", size=1, seed=0, cells=4)


@pytest.mark.parametrize(
    ("response", "values"),
    [
        ("3\n8\n17", [1, 1, 1]),
        ("3\n9\n18", [1, 0, 1]),  # the last line adds 9 to a wrong sum
        ("4\n8\n17", [0, 0, 1]),
        ("3\n8\n17\n17", [1, 1, 1, 0]),
        ("3\n\n8", [1, 1]),
        ("three\n5\n17", [0, 0, 0]),
        ("-3\n\u00b2\n17", [0, 0, 0]),
    ],
)
def test_each_line_is_checked_against_the_one_before_it(response, values):
    sample = Sample(ROW, response)
    lines = [line for line in response.split("\n") if line]
    assert right_steps(sample, lines) == values
