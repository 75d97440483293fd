"""Commands of the pages, run as they are printed, in a copy of the recipes that trains two steps of a few rollouts. Two
of them on every run, all with `-m slow`."""

import json
import subprocess

import pytest
from PIL import Image

from tests.helpers.pages import PAGES, ROOT, printed, workshop

ARM = "runs/vla/manipulation_tabletop"
# In the order in which they build on one another, with what each has to leave behind.
RUN = {
    "bash scripts/quickstart.sh": "runs/visual_qa_digits_seed0/final",
    "mmrl control configs/vlm/visual_qa_digits.yaml": "runs/vlm/visual_qa_digits_control/final",
    "mmrl train configs/digits/image_digits_flow.yaml": "runs/digits/image_digits_flow/final",
    "mmrl train manipulation_tabletop": "runs/vla/manipulation_tabletop/final",
    f"mmrl eval {ARM}": "runs/vla/manipulation_tabletop/evaluation.json",
    f"mmrl report {ARM}": "runs/vla/manipulation_tabletop/report.html",
    "mmrl doctor": "",
    "mmrl new algorithm MyAlgorithm": "my_algorithm.py",
    "mmrl train my_algorithm.yaml": "runs/my_algorithm/final",
    "python -m pytest test_my_algorithm.py": "",
    "mmrl new reward MyReward": "my_reward.py",
    "mmrl train my_reward.yaml": "runs/my_reward/final",
}
# What a command needs to have been run before it: any of them may be the only one that is chosen.
AFTER = {
    f"mmrl eval {ARM}": "mmrl train manipulation_tabletop",
    f"mmrl report {ARM}": "mmrl train manipulation_tabletop",
    "mmrl train my_algorithm.yaml": "mmrl new algorithm MyAlgorithm",
    "python -m pytest test_my_algorithm.py": "mmrl new algorithm MyAlgorithm",
    "mmrl train my_reward.yaml": "mmrl new reward MyReward",
}
# A recipe that makes its base first, and a skeleton; neither builds on another command.
QUICK = ("mmrl train configs/digits/image_digits_flow.yaml", "mmrl new reward MyReward")
OWN = "task.data.type=files task.data.train=train.jsonl task.data.eval=eval.jsonl"


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readme")
    return folder, workshop(folder)


def run(shop, command):
    folder, environment = shop
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=500
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", [pytest.param(c, marks=[pytest.mark.slow] * (c not in QUICK)) for c in RUN])
def test_a_command_runs_as_printed(shop, command):
    earlier = AFTER.get(command)
    if earlier is not None and not (shop[0] / RUN[earlier]).exists():
        assert run(shop, earlier).returncode == 0
    done = run(shop, command)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (shop[0] / RUN[command]).exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_own_questions_train_from_a_recipe(shop):
    """The page gives this command, and nothing else."""
    command = f"mmrl train configs/vlm/visual_qa_digits.yaml {OWN}"
    assert command in printed(ROOT / "tasks" / "README.md")
    Image.new("RGB", (16, 16)).save(shop[0] / "one.png")
    for name in ("train", "eval"):
        row = {"images": ["one.png"], "problem": f"<image>What is it, {name}?", "answer": "1"}
        (shop[0] / f"{name}.jsonl").write_text("".join(json.dumps(row | {"answer": str(i)}) + "\n" for i in range(5)))
    done = run(shop, f"{command} run_dir=runs/own")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    steps = [json.loads(line) for line in (shop[0] / "runs/own/metrics.jsonl").read_text().splitlines()]
    assert sum("loss" in row for row in steps) == 2 and steps[-1]["evaluation/n"] == 4  # evaluation.prompts, made small


def test_all_of_them_are_on_the_pages():
    assert set(RUN) <= {command for page in PAGES for command in printed(page)}
