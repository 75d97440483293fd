"""`mmrl control`: the same run, but that nothing that is paid for knows anything."""

import pytest

from mmrl.cli import control
from mmrl.config import load
from mmrl.errors import UserError
from mmrl.settings import plain
from mmrl.settings.recipes import shipped

RANDOM = {"name": "random", "weight": 1.0, "on_timeout": "unscored"}
REFUSED = {name for name in shipped() if load(name).algorithm.collects == "demonstrations"}
SAID = ("run_dir", "task.rewards", "algorithm.simulator_reward", "algorithm.shaping")


def controlled(recipe, *overrides):
    return load(recipe, [*control.overrides(load(recipe, list(overrides)), recipe), *overrides])


@pytest.mark.parametrize("recipe", sorted(shipped().keys() - REFUSED))
def test_nothing_but_rewards_changes(recipe):
    before, after = plain(load(recipe)), plain(controlled(recipe))
    assert after.pop("run_dir") == before.pop("run_dir") + "_control"
    (reward,) = after["task"].pop("rewards")
    assert {key: reward[key] for key in RANDOM} == RANDOM
    before["task"].pop("rewards", None)
    for key in ("simulator_reward", "shaping"):
        before["algorithm"].pop(key, None), after["algorithm"].pop(key, None)
    assert after == before


def test_what_a_simulator_and_an_environment_pay_is_left_out():
    assert load("manipulation_ogbench").algorithm.simulator_reward != 0.0
    assert controlled("manipulation_ogbench").algorithm.simulator_reward == 0.0
    assert [shaper.type for shaper in load("visual_games").algorithm.shaping] == ["turn_returns"]
    assert controlled("visual_games").algorithm.shaping == []
    two = "algorithm.shaping=[{type: curiosity, weight: 0.25}, {type: milestones}]"
    config = load("visual_games", [two])
    without = [word for word in control.overrides(config, "visual_games") if word.startswith("algorithm.shaping=")]
    (left,) = load("visual_games", without).algorithm.shaping
    assert (left.type, left.weight) == ("curiosity", 0.25)


def test_what_is_given_wins():
    assert controlled("visual_qa_digits", "run_dir=here", "steps=3").run_dir == "here"


@pytest.mark.parametrize("recipe", ["visual_qa_digits_warm_start", "image_digits_dpo_offline"])
def test_a_recipe_without_rewards_has_none(recipe):
    with pytest.raises(UserError, match=f"but {recipe} has none: algorithm.type=.* learns without rewards$"):
        controlled(recipe)
