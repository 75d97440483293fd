"""A few steps of training in ManiSkill, with whatever Vulkan driver there is."""

import json

import numpy as np
import pytest

from mmrl.errors import UserError
from mmrl.settings.recipes import shipped
from tests.whole_runs.parts import HERE, ROBOTS, make, metrics, release, train

pytest.importorskip("mani_skill", reason="needs ManiSkill: pip install -e '.[maniskill]'")

from mmrl.sims.maniskill.driver import choose_device  # noqa: E402

try:
    choose_device()
except UserError as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = pytest.mark.usefixtures("alone")


def test_a_policy_trains_in_maniskill(tmp_path):
    task = [
        "task.simulator=maniskill",
        "task.tasks=[PickCube-v1]",
        "task.options={observation: rgb, image_size: 64, max_steps: 4, reward: dense}",
        "task.rewards=[{name: 'mmrl.tasks.manipulation.rewards:simulator'}]",
    ]
    size = ["steps=2", "rollout.prompts=1", "rollout.group_size=2", "evaluation.prompts=1", "action.prompt=null"]
    train(tmp_path / "run", *task, *size, base=ROBOTS)
    rows = [row for row in metrics(tmp_path / "run") if "loss" in row]
    assert [row["episode/length"] for row in rows] == [4, 4]
    assert all(row["surrogate/ratio_gap_max"] == 0 and row["grad_norm"] > 0 for row in rows)


@pytest.mark.slow
def test_the_recipe_from_random_weights_trains(tmp_path):
    size = ["rollout.prompts=4", "evaluation.prompts=2", "task.options.max_steps=4", "task.rows=4", "steps=2"]
    once = ["algorithm.epochs=1", "algorithm.minibatches=1", "threads=1", "action.standardise=true"]
    recipe = HERE.parent.parent / "configs/vla/manipulation_maniskill_pushcube.yaml"
    train(tmp_path / "run", *size, *once, base=recipe)
    rows = [row for row in metrics(tmp_path / "run") if "loss" in row]
    assert len(rows) == 2
    for row in rows:
        assert row["surrogate/ratio_gap_max"] == 0 and row["grad_norm"] > 0 and row["critic/return"] > 0
    # What states were standardised by is kept, and what is loaded sees the same.
    told = json.loads((tmp_path / "run/final/vla.json").read_text())["states"]
    model = ["model.build=null", f"model.path={tmp_path / 'run/final'}", "evaluation.before=false"]
    again = make(tmp_path / "again", *size, *once, *model, base=recipe)
    known = again.policy.state_statistics
    assert np.allclose(known.mean, told["mean"]) and np.allclose(known.std, told["std"])
    rollouts = again.policy.rollout([again.task.train[0]], 2, [1, 2])
    seen = np.stack([look.state for episode in rollouts.inputs for look in episode])
    assert np.abs(seen[:, :7]).max() < 10 and seen.std(0).max() > 0.1  # joint angles in standard units
    release(again)


@pytest.mark.slow
def test_the_recipe_trains_from_its_base(tmp_path):
    """The scripted arm is watched, then success alone counts, with the base's statistics."""
    configs = shipped()
    small = ["evaluation.prompts=1", "evaluation.before=false", "task.rows=4", "threads=1"]
    shown = ["steps=3", "task.demonstrations.episodes=2", "task.options.max_steps=20", "rollout.prompts=4"]
    train(tmp_path / "base", *small, *shown, base=configs["manipulation_maniskill_pushcube_warm_start"])
    size = ["steps=2", "rollout.prompts=2", "rollout.group_size=2", "task.options.max_steps=4"]
    reward = ["task.rewards=[{name: random}]"]  # a group of four actions has no success to learn from
    model = ["model.warm_start=null", f"model.path={tmp_path / 'base/final'}"]
    train(tmp_path / "run", *small, *size, *reward, *model, base=configs["manipulation_maniskill_pushcube_grpo"])
    rows = [row for row in metrics(tmp_path / "run") if "loss" in row]
    assert [row["episode/length"] for row in rows] == [4, 4]
    assert any(row["grad_norm"] > 0 for row in rows)  # the rewards of a group may be equal
    base, after = (json.loads((tmp_path / run / "final/vla.json").read_text()) for run in ("base", "run"))
    assert base["states"] == after["states"]
