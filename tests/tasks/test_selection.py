"""Episodes that are learned from: splits, lists and a share of bad ones, by numbers worked out by hand."""

import pytest

from mmrl.errors import UserError
from mmrl.tasks.manipulation.selection import EpisodeSelection

NUMBERS = [0, 1, 2, 4, 5, 6]  # one was deleted
SPLITS = {"train": "0:4", "val": "4:5", "rest": "4:", "most": ":-1", "odd": "0, 1"}


@pytest.mark.parametrize(
    ("options", "splits", "expected"),
    [
        ({}, {}, NUMBERS),
        ({}, {"test": "0:1"}, NUMBERS),
        ({}, SPLITS, [0, 1, 2, 4]),
        ({}, {"train": "0:6"}, NUMBERS),
        ({"episodes": 2}, SPLITS, [0, 1]),
        ({"episodes": 9}, SPLITS, [0, 1, 2, 4]),
        ({"split": "val"}, SPLITS, [5]),
        ({"split": "rest"}, SPLITS, [5, 6]),
        ({"split": "rest", "episodes": 1}, SPLITS, [5]),
        ({"split": "all"}, SPLITS, NUMBERS),
        ({"split": "all"}, {"all": "0 : 2"}, [0, 1]),
        ({"episodes": [6, 0]}, SPLITS, [6, 0]),  # listed ones are of any split
        ({"episodes": [6], "split": "rest"}, SPLITS, [6]),
    ],
)
def test_chosen_episodes(options, splits, expected):
    assert EpisodeSelection(**options).select("F", NUMBERS, splits) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"episodes": [0, 3, 7]}, "episodes: F has no episode 3, 7; it has 6 episodes, from 0 to 6"),
        ({"episodes": [0], "split": "rest"}, "F has no episode 0 in its split rest; it has 2 episodes, from 5 to 6"),
        ({"split": "vall"}, "split=vall: F has no such split, only train, val, rest, most, odd, all"),
        ({"split": "odd"}, "F/meta/info.json: the split odd is '0, 1', not FIRST:END"),
        ({"split": "most"}, "the split most is ':-1', not FIRST:END"),
    ],
)
def test_what_is_not_there_is_named(options, message):
    with pytest.raises(UserError, match=message):
        EpisodeSelection(**options).select("F", NUMBERS, SPLITS)


def test_a_smaller_split_is_told(caplog):
    caplog.set_level("INFO")
    EpisodeSelection().select("F", NUMBERS, {"train": "0:6"})
    assert caplog.text == ""
    EpisodeSelection().select("F", NUMBERS, SPLITS)
    assert "F: 4 of 6 episodes are in its split train" in caplog.text


def read(number):
    if number % 3 == 0:
        raise UserError(f"episode {number} is torn")
    return 10 * number


def test_bad_episodes_are_left_out_within_a_share_and_named(caplog):
    assert EpisodeSelection(max_bad_share=0.5).read_usable("F", [0, 1, 2, 3], read) == [10, 20]
    assert "left out: episode 0 is torn" in caplog.text and "left out: episode 3 is torn" in caplog.text
    with pytest.raises(
        UserError,
        match=r"F: 2 of 4 episodes cannot be used, more than task.demonstrations.max_bad_share=0.49 allows; .*"
        "episode 0 is torn; episode 3 is torn$",
    ):
        EpisodeSelection(max_bad_share=0.49).read_usable("F", [0, 1, 2, 3], read)
    with pytest.raises(UserError, match="1 of 2 episodes cannot be used, .*max_bad_share=0 allows"):
        EpisodeSelection().read_usable("F", [0, 1], read)
    with pytest.raises(UserError, match="no episode to train on is left: episode 0 is torn; episode 3 is torn"):
        EpisodeSelection(max_bad_share=1.0).read_usable("F", [0, 3], read)
    with pytest.raises(UserError, match="no episode to train on is left: none was selected"):
        EpisodeSelection(split="all").read_usable("F", [], read)
    with pytest.raises(UserError, match=r"torn; \.\.\.$"):
        EpisodeSelection().read_usable("F", range(0, 30, 3), read)
