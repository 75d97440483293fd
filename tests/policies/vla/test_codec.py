"""Action bins and statistics, against OpenVLA's published numbers and values worked out by hand."""

import json

import numpy as np
import pytest
import torch

from mmrl.errors import UserError
from mmrl.policies.vla.heads.codec import ActionCodec
from mmrl.policies.vla.statistics import load_statistics

OPENVLA = ActionCodec(32000, 256)  # Llama's vocabulary: ids 31744 to 31999


@pytest.mark.parametrize(
    ("action", "token"),
    # vocabulary - digitize(action, linspace(-1, 1, 256)): -1 is bin 1; 0 lies in the middle bin 128; 1 is edge 256.
    [(-1.0, 31999), (-0.9999, 31999), (-0.99, 31998), (0.0, 31872), (0.9999, 31745), (1.0, 31744), (7.0, 31744)],
)
def test_ids_are_openvlas(action, token):
    assert OPENVLA.ids(OPENVLA.encode(torch.tensor([action]))).item() == token


def test_the_two_highest_bins_stand_for_the_same_action():
    lowest, second = OPENVLA.decode(torch.tensor([0, 1]))
    assert lowest == second and lowest.item() == pytest.approx(254 / 255, abs=1e-7)
    assert OPENVLA.decode(torch.tensor([255])).item() == pytest.approx(-254 / 255, abs=1e-7)


@pytest.mark.parametrize("bins", [3, 16, 256])
def test_what_was_decoded_encodes_to_itself_and_is_near(bins):
    codec = ActionCodec(1000, bins)
    columns = torch.arange(1, bins)
    assert torch.equal(codec.encode(codec.decode(columns)), columns)
    actions = torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 2 - 1
    assert (codec.decode(codec.encode(actions)) - actions).abs().max() <= 1 / (bins - 1) + 1e-6


def test_numpy_digitizes_alike():
    actions = torch.rand(2000, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2.4 - 1.2
    expected = 256 - np.digitize(actions.clamp(-1, 1).numpy(), np.linspace(-1, 1, 256))
    assert OPENVLA.encode(actions).tolist() == expected.tolist()


def test_nan_is_refused():
    with pytest.raises(ValueError, match="NaN"):
        OPENVLA.encode(torch.tensor([float("nan")]))


def write(path, action):
    path.write_text(json.dumps({"arm": {"action": action}}))
    return str(path)


def test_statistics_scale_and_return(tmp_path):
    file = write(tmp_path / "s.json", {"q01": [-2.0, 0.0, 5.0], "q99": [4.0, 1.0, 5.0], "mask": [True, False, True]})
    stats = load_statistics(file, None, 3)
    np.testing.assert_allclose(stats.to_robot(np.array([0.5, 0.5, 0.3])), [2.5, 0.5, 5.0])
    np.testing.assert_allclose(stats.from_robot(np.array([2.5, 0.5, 5.0])), [0.5, 0.5, 0.0])
    np.testing.assert_allclose(stats.from_robot(np.array([9.0, 9.0, 5.0])), [1.0, 9.0, 0.0])


@pytest.mark.parametrize(
    ("content", "key", "message"),
    [
        ({"q99": [1.0]}, None, r"s\.json: arm\.action\.q01 is missing"),
        ({"q01": [0.0], "q99": [1.0, 2.0]}, None, "arm.action.q99 has 2 numbers, but the robot takes 1"),
        ({"q01": [0.0], "q99": [1.0], "mask": [True, True]}, None, "arm.action.mask has 2 numbers"),
        ({"q01": [0.0], "q99": [1.0]}, "leg", "statistics_key=leg does not name one data set of .*; it holds arm"),
    ],
)
def test_faulty_statistics_are_named(tmp_path, content, key, message):
    with pytest.raises(UserError, match=message):
        load_statistics(write(tmp_path / "s.json", content), key, 1)


def test_statistics_of_a_models_configuration(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"norm_stats": {"a": {"action": {"q01": [0], "q99": [2]}}}}))
    assert load_statistics(str(tmp_path), None, 1).to_robot(np.array([0.0])) == 1.0
    with pytest.raises(UserError, match="No such file"):
        load_statistics(str(tmp_path / "nowhere"), None, 1)
