"""Bases that are trained on what RL holds out later: `mmrl check` knows it by a key of their data."""

import pytest

from mmrl.build import build_task
from mmrl.cli.check import JobCheck
from mmrl.config import load


@pytest.mark.parametrize("recipe", ["image_edit_shapes_base", "video_moving_shapes_base", "image_shapes_base"])
def test_a_base_that_shows_all_is_no_alarm_and_what_learns_from_it_holds_out(recipe):
    config = load(recipe)
    check = JobCheck(recipe)
    assert config.task.shows_held_out
    check._check_prompts(config, build_task(config))
    assert not check.report.alarms
    assert not load(recipe.removesuffix("_base")).task.shows_held_out
