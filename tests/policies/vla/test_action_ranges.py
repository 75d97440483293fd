"""Remarks on ranges of actions, by values worked out by hand."""

import json
import logging
import re
from dataclasses import replace

import numpy as np
import pytest

from mmrl.policies.vla.action_ranges import check_demonstrations, check_statistics
from mmrl.policies.vla.heads.codec import ActionStatistics
from mmrl.sims import Observation
from tests.policies.vla.conftest import starts


def scale(low, high, mask=None, **options):
    masked = np.ones(len(low), bool) if mask is None else np.array(mask)
    return ActionStatistics(np.array(low, float), np.array(high, float), masked, **options)


def box(low, high):
    return np.array(low, float), np.array(high, float)


@pytest.mark.parametrize(
    ("made", "bounds", "remarks"),
    [
        (scale([-1.0, 0.0], [1.0, 0.5]), None, []),
        (scale([-1.05, -90.0], [1.05, 90.0], [True, False]), None, []),  # within the margin; not scaled
        (scale([-90.0], [90.0]), box([-180], [180]), []),
        (scale([-90.0], [90.0]), box([-np.inf], [np.inf]), []),
        (
            scale([-90.0], [90.0]),
            box([-np.inf], [1]),
            ["the range of number 0 of an action is -90 to 90, but the simulator accepts -inf to"],
        ),
        (
            scale([-1.0, -90.0, -2.0], [1.0, 1.0, 2.0]),
            None,
            ["numbers 1, 2 of an action is -90, -2 to 1, 2, but the simulator accepts -1, -1 to 1, 1"],
        ),
        (scale([0.25, -1.0], [0.25, 1.0]), None, ["of number 0 of an action are equal, 0.25, so"]),
        (
            scale([9.0], [9.0]),
            None,
            ["of number 0 of an action are equal, 9,", "the range of number 0 of an action is 9 to 9"],
        ),
        (scale([9.0], [9.0], [False]), None, []),
    ],
)
def test_statistics_and_the_simulator(made, bounds, remarks):
    found = list(check_statistics("F", made, bounds))
    assert len(found) == len(remarks)
    for remark, expected in zip(found, remarks, strict=True):
        assert remark.startswith("action.statistics=F: ") and expected in remark


def test_how_far_outside_by_hand():
    made = scale([-2.0, 0.0, 5.0], [4.0, 1.0, 5.0], [True, False, True])
    actions = np.array([[1.0, 7.0, 5.0], [-5.0, -0.5, 5.1]])
    np.testing.assert_allclose(made.distance_from_center(actions), [[0.0, 7.0, 0.0], [2.0, 0.5, np.inf]])


@pytest.mark.parametrize(
    ("clipped", "actions", "expected"),
    [
        (True, [1.09] * 10, None),
        (True, [1.2, *[0.0] * 19], None),  # 5 %
        (True, [1.2, -1.3, *[0.0] * 18], "10% of the numbers .* and are clipped to it; number 0 goes from -1.3 to 1.2"),
        (False, [4.9] * 10, None),
        (False, [6.0] * 10, "100% of the numbers .* number 0 goes from 6 to 6. Set action.statistics"),
    ],
)
def test_demonstrations_outside_of_the_range(clipped, actions, expected):
    found = list(check_demonstrations(scale([-1.0], [1.0], clipped=clipped), np.array(actions)[:, None]))
    assert len(found) == (expected is not None)
    if expected is not None:
        assert re.search(expected, found[0])


def test_a_policy_says_once_that_demonstrations_do_not_fit(make, tmp_path, caplog):
    (tmp_path / "s.json").write_text(json.dumps({"line": {"action": {"q01": [-0.5], "q99": [0.5]}}}))
    policy = make("regression", statistics=str(tmp_path / "s.json"), supervised=True)
    image = np.zeros((1, *policy.sim.simulator.image_shape), np.uint8)
    seen = Observation(image, np.zeros((1, policy.sim.simulator.state_dim), np.float32), ["go"], policy.sim.cameras)

    def shown(*values):
        return [replace(starts(0)[0], metadata={"observation": seen, "actions": np.array(values, np.float32)[:, None]})]

    caplog.set_level(logging.WARNING)
    policy.demonstrate(shown(0.5, -0.5), [1])  # padded with 0
    assert caplog.text == ""
    taught = policy.demonstrate(shown(0.25, 45.0), [1]).inputs[0][0].sampled["actions"]
    np.testing.assert_allclose(taught[:2, 0], [0.5, 1.0])
    policy.demonstrate(shown(45.0), [1])
    assert caplog.text.count("50% of the numbers in actions lie outside") == 1 == caplog.text.count("lie outside")
