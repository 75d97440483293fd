"""Two steps of training from ManiSkill's pictures, with whatever Vulkan driver there is."""

import pytest

from mmrl.errors import UserError
from tests.engine.parts import ROBOTS, metrics, train

pytest.importorskip("mani_skill", reason="needs ManiSkill: pip install 'mmrl[maniskill]'")

from sims.maniskill.driver import choose_device  # noqa: E402

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
        "task.rewards=[{name: 'tasks.manipulation.rewards:simulator'}]",
    ]
    size = ["steps=2", "rollout.prompts=1", "rollout.group_size=2", "evaluation.prompts=1", "action.prompt=null"]
    train(tmp_path / "run", *task, *size, base=ROBOTS)
    rows = [row for row in metrics(tmp_path / "run") if "loss" in row]
    assert [row["episode/length"] for row in rows] == [4, 4]
    assert all(row["surrogate/ratio_gap_max"] == 0 and row["grad_norm"] > 0 for row in rows)
