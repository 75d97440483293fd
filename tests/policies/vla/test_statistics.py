"""Statistics as OpenVLA, LeRobot and openpi write them, by values worked out by hand."""

import json

import numpy as np
import pytest

from mmrl.errors import UserError
from mmrl.policies.vla.statistics import load_state_quantiles, load_statistics

ROBOT = np.array([0.5, 0.0])  # what a policy says; middle of -1 .. 1 and a half above it


def entry(low, high, **others):
    return {"q01": [low, -1.0], "q99": [high, 3.0], **others}


def every(low, high):
    """Six statistics of which each pair gives another range."""
    return {
        "mean": [5.0, 6.0],
        "std": [2.0, 3.0],
        "min": [low - 4, -9.0],
        "max": [high + 4, 9.0],
        "count": [7],
        **entry(low, high),
    }


LEROBOT = {
    "observation.images.top": {"mean": [[[0.5]]], "count": [7]},
    "observation.state": {"mean": [1.0, 2.0], "std": [0.5, 4.0], "min": [0.0, 0.0], "max": [2.0, 8.0]},
    "action": every(-90.0, 90.0),
    "timestamp": {"mean": [1.0]},
}
OPENPI = {"norm_stats": {"state": entry(0.0, 4.0), "actions": {**entry(-90.0, 90.0), "mean": [0, 0], "std": [1, 1]}}}
OPENVLA = {"arm": {"action": entry(-90.0, 90.0, mask=[True, False]), "proprio": entry(0.0, 4.0), "num_transitions": 3}}


def write(folder, name, tree):
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(tree))
    return file


@pytest.mark.parametrize(
    ("name", "tree", "second"),
    [
        ("meta/stats.json", LEROBOT, 1.0),
        ("norm_stats.json", OPENPI, 1.0),
        ("assets/physical-intelligence/libero/norm_stats.json", OPENPI, 1.0),
        ("dataset_statistics.json", OPENVLA, 0.0),  # the mask leaves it as it is
        ("config.json", {"norm_stats": OPENVLA, "model_type": "openvla"}, 0.0),
        ("meta/stats.json", {"so100.buffer.action": every(-90.0, 90.0)}, 1.0),
    ],
)
def test_each_library_and_place(tmp_path, name, tree, second):
    file = write(tmp_path, name, tree)
    for path in {file, file.parent, tmp_path}:
        if path == file.parent and path != tmp_path and path.name not in ("meta", "libero"):
            continue
        scale = load_statistics(str(path), None, 2)
        np.testing.assert_allclose(scale.to_robot(ROBOT), [45.0, second])
        np.testing.assert_allclose(scale.from_robot(np.array([45.0, second])), ROBOT)


def test_what_stands_for_one_follows_normalisation(tmp_path):
    path = str(write(tmp_path, "meta/stats.json", LEROBOT))
    assert load_statistics(path, None, 2, normalisation="min_max").to_robot(ROBOT)[0] == 47.0
    scale = load_statistics(path, None, 2, bounded=False, normalisation="mean_std")
    np.testing.assert_allclose(scale.to_robot(np.array([0.5, -2.0])), [6.0, 0.0])
    np.testing.assert_allclose(scale.from_robot(np.array([11.0, 0.0])), [3.0, -2.0])  # not clipped
    with pytest.raises(UserError, match=r"normalisation=mean_std: the head's actions lie in \[-1, 1\]"):
        load_statistics(path, None, 2, normalisation="mean_std")
    tree = {"action": {"mean": [0.0], "std": [1.0]}}
    with pytest.raises(UserError, match="action holds mean, std; to scale into .* needs q01 and q99, or min"):
        load_statistics(str(write(tmp_path, "less.json", tree)), None, 1)


def test_least_and_largest_numbers_where_there_are_no_quantiles(tmp_path, caplog):
    caplog.set_level("INFO")
    tree = {"action": {"min": [-2.0], "max": [4.0], "mean": [9.0], "std": [1.0]}}
    assert load_statistics(str(write(tmp_path, "stats.json", tree)), None, 1).to_robot(np.array([0.5])) == 2.5
    assert "action has no q01 and q99; its min and max are mapped to -1 and 1" in caplog.text


def test_states_of_each_library(tmp_path):
    state = np.array([3.0, 1.0])
    for name, tree in (("dataset_statistics.json", OPENVLA), ("norm_stats.json", OPENPI)):
        path = str(write(tmp_path, name, tree))
        np.testing.assert_allclose(load_state_quantiles(path, None, 2).normalize(state), [0.5, 0.0], atol=1e-6)
    masked = str(write(tmp_path, "masked.json", {"arm": {"proprio": entry(0.0, 4.0, mask=[False, True])}}))
    np.testing.assert_allclose(load_state_quantiles(masked, None, 2).normalize(state), [1.0, 0.0], atol=1e-6)
    path = str(write(tmp_path, "stats.json", LEROBOT))
    np.testing.assert_allclose(load_state_quantiles(path, None, 2).normalize(state), [1.0, -0.75], atol=1e-6)
    found = load_state_quantiles(path, None, 2, "mean_std").normalize(state)
    np.testing.assert_allclose(found, [4.0, -0.25], atol=1e-6)
    still = write(tmp_path, "still.json", {"state": {"mean": [0.25], "std": [0.0]}})
    assert load_state_quantiles(str(still), None, 1, "mean_std").normalize(np.array([9.0])) == 0


def test_a_number_that_never_moved(tmp_path):
    path = str(write(tmp_path, "stats.json", {"action": {"q01": [0.25, 0.0], "q99": [0.25, 2.0]}}))
    scale = load_statistics(path, None, 2)
    np.testing.assert_allclose(scale.to_robot(np.array([0.7, 1.0])), [0.25, 2.0])
    np.testing.assert_allclose(scale.from_robot(np.array([0.3, 1.5])), [0.0, 0.5])


def test_statistics_of_episodes_are_pooled(tmp_path):
    """Frames 0, 2 and 4, 4, 4, 8: mean 22 / 6; squares 116 / 6 less the mean's."""
    episodes = [
        {"mean": [1.0], "std": [1.0], "min": [0.0], "max": [2.0], "count": [2]},
        {"mean": [5.0], "std": [3**0.5], "min": [4.0], "max": [8.0], "count": [4]},
    ]
    lines = [json.dumps({"episode_index": i, "stats": {"action": one, "index": one}}) for i, one in enumerate(episodes)]
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta/episodes_stats.jsonl").write_text("\n".join(lines))
    assert load_statistics(str(tmp_path), None, 1).to_robot(np.array([-1.0, 1.0])[:, None]).ravel().tolist() == [0, 8]
    scale = load_statistics(str(tmp_path), None, 1, bounded=False, normalisation="mean_std")
    deviation = (116 / 6 - (22 / 6) ** 2) ** 0.5
    np.testing.assert_allclose(scale.to_robot(np.array([[0.0], [2.0]])).ravel(), [22 / 6, 22 / 6 + 2 * deviation])


GROUPS = {"so100.buffer.action": every(-1.0, 1.0), "so100-red.buffer.action": every(-2.0, 2.0)}


@pytest.mark.parametrize("key", ["so100-red", "so100-red.buffer", "so100-red.buffer.action"])
def test_a_group_is_chosen(tmp_path, key):
    path = str(write(tmp_path, "stats.json", GROUPS))
    assert load_statistics(path, key, 2).to_robot(ROBOT)[0] == 1.0
    with pytest.raises(UserError, match=r"holds so100\.buffer, so100-red\.buffer; choose one with action"):
        load_statistics(path, None, 2)
    with pytest.raises(
        UserError, match="statistics_key=so does not name one data set of .*; it holds so100.buffer, so100-red.buffer"
    ):
        load_statistics(path, "so", 2)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            {"observation.state": every(0, 1)},
            r"has no statistics of actions \(action or actions\); it holds obs",
        ),
        ({"timestamp": {"mean": [1.0]}}, r"no statistics of actions \(action or actions\); it holds timestamp"),
        ({"action": {"q01": [0.0] * 6, "q99": [1.0] * 6}}, "action.q01 has 6 numbers, but the robot takes 2"),
        ({"action": {"q01": [0.0, None], "q99": [1.0, 1.0]}}, "action.q01 must be finite"),
        ({"action": {"q01": 0.0, "q99": 1.0}}, "action.q01 must be a list of numbers"),
        ({"action": {"q01": [[0.0], [0.0]], "q99": [1.0, 1.0]}}, "action.q01 must be a list of 2 numbers"),
        ({"action": {"q01": [0.0, 2.0], "q99": [1.0, 1.0]}}, "action.q01 must be finite and at most q99"),
        ({"action": {"q01": ["a", 2.0], "q99": [1.0, 1.0]}}, "action.q01 must hold numbers"),
        ([1], "stats.json holds no mapping from data sets to statistics"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, tree, message):
    with pytest.raises(UserError, match=message) as error:
        load_statistics(str(write(tmp_path, "stats.json", tree)), None, 2)
    assert "\n" not in str(error.value) and "stats.json" in str(error.value)


def test_folders_without_a_file_or_with_two(tmp_path):
    with pytest.raises(UserError, match="is a folder without dataset_statistics.json, .*name the file"):
        load_statistics(str(tmp_path), None, 2)
    for asset in ("a", "b"):
        write(tmp_path, f"assets/{asset}/norm_stats.json", OPENPI)
    with pytest.raises(UserError, match="holds .*a/norm_stats.json, .*b/norm_stats.json and perhaps more"):
        load_statistics(str(tmp_path), None, 2)
    assert load_statistics(str(tmp_path / "assets/a"), None, 2).to_robot(ROBOT)[0] == 45.0
