import math
import re
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from mmrl.children.limits import Limits
from mmrl.rewards import RewardSet, RewardSpec, build, registry
from mmrl.rewards.compose import build_reward
from mmrl.rollouts import Prompt, Sample


def sample(response, answer="7"):
    return Sample(Prompt("p", "question", answer=answer), response, 5, False, 100)


def longest(sample, *, limit=3):
    """A reward of a user's own, found by name."""
    return float(len(sample.response) <= limit)


OWN = f"{__name__}:longest"


def test_columns_keep_names_and_weights():
    rewards = RewardSet(
        [
            RewardSpec(name="exact_match"),
            RewardSpec(name="numeric", weight=0.5, options={"atol": 1.0}),
            RewardSpec(name=OWN, weight=0.1, label="short"),
        ]
    )
    assert rewards.names == ("exact_match", "numeric", "short")
    assert rewards.weights == (1.0, 0.5, 0.1)
    scores = rewards.score([sample("7"), sample("8"), sample("seven", "seven")])
    expected = torch.tensor([[1, 1, 1], [0, 1, 1], [1, math.nan, 0]])  # weights are not applied here
    torch.testing.assert_close(scores, expected, equal_nan=True, rtol=0, atol=0)
    assert scores.dtype == torch.float32
    assert rewards.score([]).shape == (0, 3)


def test_own_reward_takes_options():
    assert build(OWN, {"limit": 9})(sample("seven")) == 1
    assert build(OWN)(sample("seven")) == 0


@pytest.mark.parametrize(
    "name, options, words",
    [
        ("exact_mach", {}, "did you mean 'exact_match'"),
        ("exact_match", {"article": True}, "did you mean 'articles'"),
        ("overlong_penalty", {}, "needs option buffer"),
        ("overlong_penalty", {"buffer": 0}, "buffer"),
        ("numeric", {"rtol": -1.0}, "rtol"),
        ("random", {"probability": 2.0}, "probability"),
        ("nowhere_at_all:reward", {}, "nowhere_at_all"),
        (f"{__name__}:longst", {}, "did you mean 'longest'"),
        (OWN, {"limits": 3}, "did you mean 'limit'"),
    ],
)
def test_bad_names_and_options(name, options, words):
    with pytest.raises(ValueError, match=words) as caught:
        build(name, options)
    assert "\n" not in str(caught.value)


class Saving:
    scope = "sample"

    def score(self, samples):
        return [0.0] * len(samples)

    def state(self):
        return {}


def test_a_state_that_nothing_could_restore_is_refused():
    with pytest.raises(ValueError, match=r"test_compose:Saving' has a method state\(\) but no load\(state\)"):
        build_reward(RewardSpec(name="tests.rewards.test_compose:Saving"))


def test_bad_sets():
    with pytest.raises(ValueError, match="at least one"):
        RewardSet([])
    with pytest.raises(ValueError, match="two components are named 'numeric'"):
        RewardSet([RewardSpec(name="numeric"), RewardSpec(name="numeric", options={"atol": 1.0})])
    with pytest.raises(ValueError, match="finite"):
        RewardSet([RewardSpec(name="numeric", weight=math.nan)])
    with pytest.raises(ValueError, match="deadline_s needs isolated"):
        RewardSet([RewardSpec(name="numeric", deadline_s=1.0)])
    with pytest.raises(ValueError, match="on_timeout needs isolated"):
        RewardSet([RewardSpec(name="numeric", on_timeout="lowest")])
    with pytest.raises(ValueError, match="deadline_s\n  Input should be greater than 0"):
        RewardSet([RewardSpec(name="math", deadline_s=0.0)])


def test_rewards_import_no_room_above_them():
    for path in Path(registry.__file__).parent.rglob("*.py"):
        assert not re.search(
            r"mmrl\.(?!rewards|rollouts|errors|children|core|settings|runtime)\w+", path.read_text()
        ), path


def test_limits_are_a_section_of_their_own():
    spec = TypeAdapter(RewardSpec)
    made = spec.validate_python({"name": "math", "workers": 3, "limits": {"memory_gib": 0.5}, "on_timeout": "lowest"})
    reward = build_reward(made)
    assert made.limits == Limits(memory_gib=0.5) and reward.limits.memory_gib == 0.5 and reward.workers == 3
    for wrong in ({"limits": {"memory": 1}}, {"limits": {"cpu_s": 0}}, {"on_timeout": "zero"}, {"isolation": True}):
        with pytest.raises(ValidationError, match="|".join(wrong)):
            spec.validate_python({"name": "math"} | wrong)
