"""The comparison with ManiSkill's PPO: both arms play --task by equal settings, and curves become tables."""

import json

import numpy as np
import pytest
import torch

from scripts.bench import maniskill_ppo
from scripts.bench.maniskill_ppo import TASKS, Compared, ManiSkillPPO

PICK, PUSH = "PickCube-v1", "PushCube-v1"


def options(*arguments):
    return maniskill_ppo.parser().parse_args(list(map(str, arguments)))


def point(steps, seconds, success):
    return {"steps": steps, "seconds": seconds, "success": success}


CURVES = {
    "maniskill": [point(50_000, 100, 0.1), point(100_000, 200, 0.85), point(150_000, 300, 0.8)],
    "ours": [point(51_000, 90, 0.2), point(100_100, 180, 0.95)],
}


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """Arms and seeds in the order in which they were run; each leaves the curve of CURVES."""
    started = []

    def run(arm, seed):
        started.append((arm, seed))
        (tmp_path / f"{arm}-{seed}.json").write_text(json.dumps(CURVES[arm]))

    monkeypatch.setattr(maniskill_ppo, "run", run)
    return started


def table(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def test_a_task_is_chosen_among_those_that_have_a_recipe():
    assert options().task == PUSH and options("--task", PICK).task == PICK
    with pytest.raises(SystemExit):
        options("--task", "StackCube-v1")


@pytest.mark.parametrize("task", TASKS)
def test_the_recipe_has_the_task_and_the_settings_of_the_peer(task):
    config = maniskill_ppo.recipe(task, 7, ["optim.lr=0.5"])
    assert (list(config.task.tasks), list(config.task.options["tasks"]), config.seed) == ([task], [task], 7)
    assert (config.task.workers, config.task.turns, config.optim.lr) == (0, 1, 0.5)
    assert config.task.options["control_mode"] == maniskill_ppo.CONTROL
    own, peer = config.algorithm, ManiSkillPPO
    assert (own.gamma, own.target_kl, own.surrogate.high.number) == (peer.gamma, peer.target_kl, peer.clip)
    assert (own.epochs, own.minibatches) == (peer.epochs, peer.minibatches)
    assert own.value_coefficient == 0.5 * peer.value_weight  # the peer halves the squared error, too
    assert config.rollout.prompts * 50 == peer.envs * TASKS[task].length  # actions of an update, if none ends early


def test_the_tables_say_when_marks_were_reached_and_what_each_evaluation_found(runs, tmp_path):
    given = options("--seeds", 0, "--most", 150_000, "--curves", "--out", tmp_path)
    rows = table(maniskill_ppo.learning(given))
    assert runs == [("maniskill", "0"), ("ours", "0")]
    assert rows[2] == ["maniskill", "0", "100,000", "200", "-", "-", "0.85", "0.80", "500"]
    assert rows[3] == ["ours", "0", "100,100", "180", "100,100", "180", "0.95", "0.95", "556"]
    assert rows[6] == ["1", "50,000", "0.10", "100", "51,000", "0.20", "90"]
    assert rows[8] == ["3", "150,000", "0.80", "300", "-", "-", "-"]


def test_a_curve_in_the_folder_is_used_up_to_the_end_that_the_options_set(runs, tmp_path):
    for arm, curve in CURVES.items():
        (tmp_path / f"{arm}-0.json").write_text(json.dumps(curve))
    shorter = table(maniskill_ppo.learning(options("--seeds", 0, "--most", 50_000, "--out", tmp_path)))
    assert [row[-2] for row in shorter[2:]] == ["0.10", "0.20"] and not runs
    easier = table(maniskill_ppo.learning(options("--seeds", 0, "--until", 0.85, "--out", tmp_path)))
    assert [row[-2] for row in easier[2:]] == ["0.85", "0.95"] and not runs
    maniskill_ppo.learning(options("--seeds", 0, "--most", 200_000, "--out", tmp_path))
    assert runs == [("maniskill", "0")]  # the other one reached 0.9


@pytest.fixture
def simulated():
    pytest.importorskip("mani_skill", reason="needs ManiSkill: pip install -e '.[maniskill]'")
    from mmrl.errors import UserError
    from mmrl.sims.maniskill.driver import choose_device

    try:
        choose_device()
    except UserError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(("task", "state", "action"), [(PICK, 42, 8), (PUSH, 35, 8)])
def test_the_peer_plays_the_task_and_estimates_advantages(monkeypatch, task, state, action):
    monkeypatch.setattr(ManiSkillPPO, "envs", 2)
    monkeypatch.setitem(TASKS, task, Compared(TASKS[task].recipe, 53))  # an episode has 50 actions
    peer = ManiSkillPPO(task, 0)
    assert {env.unwrapped.spec.id for env in peer.sim.envs} == {task}
    played = peer.play()
    assert (played["state"].shape, played["action"].shape) == ((53, 2, state), (53, 2, action))
    assert played["ended"].sum(0).tolist() == [1, 1] and peer.steps == 106
    advantages, returns = peer.estimate(played)
    assert torch.allclose(returns - played["value"], advantages, atol=1e-6)
    for t, row in ((0, 0), (49, 1), (50, 0), (52, 1)):
        assert float(advantages[t, row]) == pytest.approx(weighted(played, t, row), abs=1e-5)


def weighted(played, first, row):
    """The advantages of 1, 2, ... steps up to the end, averaged with weights 1, 0.9, 0.81, ..."""
    ends = [t for t in range(first, 53) if t == 52 or bool(played["ended"][t, row])]
    estimates, earned = [], 0.0
    for n, t in enumerate(range(first, ends[0] + 1)):
        earned += 0.8**n * float(played["reward"][t, row])
        estimates.append(earned + 0.8 ** (n + 1) * float(played["next"][t, row]) - float(played["value"][first, row]))
    return np.average(estimates, weights=0.9 ** np.arange(len(estimates)))


@pytest.mark.usefixtures("simulated", "alone")
def test_both_arms_train_on_the_task_and_are_evaluated_in_it(monkeypatch, tmp_path):
    from mmrl.sims.maniskill.simulator import RowBlock

    started = []
    reset = RowBlock.reset

    def noted(self, rows, seeds, tasks, out, indices):
        started.extend(tasks)
        reset(self, rows, seeds, tasks, out, indices)

    monkeypatch.setattr(RowBlock, "reset", noted)
    monkeypatch.setattr(ManiSkillPPO, "envs", 2)
    monkeypatch.setitem(TASKS, PICK, Compared(TASKS[PICK].recipe, 8))  # two actions a minibatch
    small = ["--task", PICK, "--most", 1, "--every", 1, "--prompts", 1, "--out", tmp_path]
    less = ["rollout.prompts=2", "task.options.max_steps=3", "task.rows=2", "algorithm.minibatches=1"]
    for arm in ("maniskill", "ours"):
        maniskill_ppo.ARMS[arm](0, options(*small, *less))
    steps = {arm: json.loads((tmp_path / f"{arm}-0.json").read_text())[0]["steps"] for arm in ("maniskill", "ours")}
    assert steps == {"maniskill": 16, "ours": 6}
    assert len(started) >= 4 and set(started) == {PICK}
