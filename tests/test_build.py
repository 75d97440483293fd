"""Models that a function of the configuration writes."""

import pytest

from mmrl import build
from mmrl.config import load
from mmrl.errors import UserError
from tests.whole_runs.parts import TINY


def lacks_an_extra(folder, seed):
    raise UserError("the model comes with the extra large")


def is_broken(folder, seed):
    return [][seed]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("lacks_an_extra", r"^model.build=tests.test_build:lacks_an_extra: the model comes with the extra large$"),
        (
            "is_broken",
            r"^model.build=tests.test_build:is_broken failed: IndexError: list index out of range \(test_build",
        ),
    ],
)
def test_a_function_that_builds_no_model_is_named(function, message):
    config = load(TINY, [f"model.build=tests.test_build:{function}"])
    with pytest.raises(UserError, match=message):
        build.build_policy(config, None)
