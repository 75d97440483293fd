"""Rollouts that workers make are those of the training process: whole runs with and without, number by number."""

import os
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
from mmrl.tasks.settings import TaskSettings

from mmrl import build
from mmrl.batches import check_batch
from mmrl.config import load
from mmrl.errors import UserError
from mmrl.generation.settings import RolloutWorkers
from mmrl.workers import pool, without_workers
from mmrl.workers.handles import Handle, Here, Lost
from mmrl.workers.pool import devices_of, shares
from mmrl.workers.wire import decode
from tests.engine.parts import IMAGES, ROBOTS, TINY, Pictures, distance, final, make, metrics, release, timeless, train
from tests.processes import gone, running
from tests.workers.threads import InThread

pytestmark = pytest.mark.usefixtures("alone")
ONE = "rollout.workers={count: 1}"
GUIDED = ["algorithm.minibatches=2", "denoising.guidance=1.5", "rollout.dynamic_sampling={low: 0.4}"]
GUIDED += ["optim.ema=0.9", "evaluation.every=2"]
WALK = ["task.simulator=gymnasium", "task.tasks=[default]", "action.chunk=2", "action.horizon=8"]
WALK += ["task.options={env: 'tests.workers.walk:MMRLWalk-v0', instruction: go, success: solved, max_steps: 8}"]
PPO = [*WALK, "algorithm={type: ppo, simulator_reward: 0.5, gamma: 0.9, lam: 0.8}", "steps=3"]
COOLING = "rollout.temperature={type: linear, start: 2.0, end: 0.5, steps: 2}"


@pytest.fixture
def threads(monkeypatch):
    """Workers are threads; what was launched."""
    made = []

    def launched(settings):
        made.append(InThread())
        return "127.0.0.1", [made[-1]] * settings.count

    monkeypatch.setattr(pool, "launched", launched)
    return made


def run(folder, *options, base):
    train(folder, *options, base=base)
    return [{k: v for k, v in row.items() if not k.startswith("generation/")} for row in timeless(metrics(folder))]


def alike(one, other, rel=0.0):
    """To the bit, or within rounding."""
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys()
        for name, value in a.items():
            assert value == (pytest.approx(b[name], rel=rel, abs=1e-6, nan_ok=True) if rel else b[name]), name


# --- the same numbers ---


def test_pictures_of_a_process_are_those_of_the_trainer(tmp_path):
    """Sampled predictions, guidance, groups that are replaced, and an average that is evaluated: all to the bit."""
    plain = run(tmp_path / "plain", *GUIDED, base=IMAGES)
    apart = run(tmp_path / "apart", *GUIDED, ONE, base=IMAGES)
    alike(plain, apart)
    assert distance(final(tmp_path / "plain"), final(tmp_path / "apart")) == 0
    assert len({row["reward/mark"] for row in apart if "loss" in row}) == 4


def test_episodes_of_a_process_are_those_of_the_trainer(tmp_path):
    """With a critic that spoke while they were played, a temperature that falls, and episodes that break."""
    plain = run(tmp_path / "plain", *PPO, COOLING, base=ROBOTS)
    apart = run(tmp_path / "apart", *PPO, COOLING, ONE, base=ROBOTS)
    alike(plain, apart)
    trained = [row for row in apart if "loss" in row]
    assert max(row["simulator/dropped"] for row in trained) > 0 < max(row["episode/length"] for row in trained)
    assert [row["control/rollout.temperature"] for row in apart if "loss" in row] == [2.0, 1.25, 0.5]
    assert distance(final(tmp_path / "plain"), final(tmp_path / "apart")) == 0


@pytest.mark.parametrize("base, options", [(IMAGES, GUIDED), (ROBOTS, [*PPO, COOLING])], ids=["pictures", "robots"])
def test_three_workers_make_what_one_does(tmp_path, threads, base, options):
    plain = run(tmp_path / "plain", *options, base=base)
    alike(plain, run(tmp_path / "apart", *options, "rollout.workers.count=3", base=base), rel=2e-4)
    assert len(threads[0].links) == 3
    log = tmp_path / "apart" / "workers"
    assert {path.name for path in log.iterdir()} == {f"worker-{i}.log" for i in range(3)}, "weights are cleared away"


@pytest.mark.parametrize(
    "options",
    [
        ["algorithm={type: contrast}", "denoising.likelihood={type: contrast}"],
        ["algorithm={type: matching}", "denoising.likelihood={type: matching}", "rollout.micro_batch=8"],
        ["denoising.likelihood={branching: [2, 2], window: {type: random, size: 2}}"],
    ],
    ids=["contrast", "matching", "trees"],
)
def test_other_decisions_of_pictures_pass_too(tmp_path, threads, options):
    plain = run(tmp_path / "plain", *options, "steps=2", base=IMAGES)
    alike(plain, run(tmp_path / "apart", *options, "steps=2", ONE, base=IMAGES))


def test_prompts_are_shared_in_order():
    assert shares(5, 2) == [(0, 2), (2, 5)] and shares(2, 3) == [(0, 1), (1, 2)] and shares(4, 1) == [(0, 4)]


# --- ahead of training ---


@pytest.mark.parametrize("base, options", [(IMAGES, []), (ROBOTS, PPO)], ids=["pictures", "robots"])
def test_a_batch_ahead_is_of_weights_one_step_old(tmp_path, threads, base, options):
    """The second batch is that of a run in which the first step changed nothing; the third is not."""
    ahead = run(tmp_path / "ahead", *options, "rollout.workers.async_steps=1", base=base)
    still = run(tmp_path / "still", *options, "optim.lr=1e-30", base=base)
    name = "reward/mark" if base == IMAGES else "episode/length"
    of_ahead, of_still = ([row[name] for row in rows if "loss" in row] for rows in (ahead, still))
    assert of_ahead[:2] == of_still[:2]
    told = [row for row in metrics(tmp_path / "ahead") if "loss" in row]
    assert [row["generation/staleness"] for row in told] == [0.0, *[1.0] * (len(told) - 1)]
    gaps = [row["correction/logp_gap"] for row in told]
    assert gaps[0] < 1e-6 and min(gaps[1:]) > 1e-4
    assert of_ahead[2] != of_still[2]


def test_likelihoods_that_come_along_are_those_of_the_weights_that_drew(tmp_path, threads):
    trainer = make(tmp_path, "rollout.workers.async_steps=1", base=IMAGES)
    pictures, policy = trainer.generator, trainer.policy
    prompts, seeds = [trainer.task.train[i] for i in range(2)], [11, 12, 13, 14]
    with pictures.generation():
        made = pictures.rollout(prompts, 2, seeds, step=0)
    with torch.no_grad():
        now = policy.replay(made, policy.module).logp
        for parameter in policy.module.parameters():
            parameter.add_(0.05)
        later = policy.replay(made, policy.module).logp
    assert (made.behaviour_logp - now).abs().max() < 1e-6 < (made.behaviour_logp - later).abs().min()
    release(trainer)


# --- what goes wrong ---


def killed_while_asked(monkeypatch, what):
    """The first worker that is asked for `what` is killed before it answers; the processes that were started."""
    pids, killed, ask = [], [], Handle.ask

    def dangerous(handle, message, seconds):
        pids.append(handle._running.pid)
        if not killed and what in decode(message):
            killed.append(handle._running.pid)
            os.kill(killed[0], signal.SIGSTOP)
            threading.Timer(0.3, os.kill, (killed[0], signal.SIGKILL)).start()
        return ask(handle, message, seconds)

    monkeypatch.setattr(Handle, "ask", dangerous)
    return pids


def test_a_worker_that_is_killed_is_started_again_and_nothing_is_lost(tmp_path, monkeypatch, capfd):
    plain = run(tmp_path / "plain", "steps=2", base=IMAGES)
    pids = killed_while_asked(monkeypatch, "rollout")
    alike(plain, run(tmp_path / "apart", "steps=2", ONE, base=IMAGES))
    rows = [row for row in metrics(tmp_path / "apart") if "generation/restarts" in row]
    assert sum(row["generation/restarts"] for row in rows) == sum(row["generation/asked_again"] for row in rows) == 1
    assert "rollout worker 0: it ended" in capfd.readouterr().out
    assert len(set(pids)) == 2 and gone(set(pids))


class OnlyHere(TaskSettings):
    """A task that workers can not build."""

    def build(self, seed):
        main = sys.modules["__main__"].__spec__
        if threading.current_thread() is not threading.main_thread() or (main and main.name == "mmrl.worker"):
            raise ArithmeticError("not on this\nhost")
        return Pictures().build(seed)


def test_a_worker_that_raises_says_why_in_one_line(tmp_path, threads):
    with pytest.raises(UserError, match=r"^rollout worker 0: ArithmeticError: not on this host \(test_pool.py:\d+\)$"):
        run(tmp_path, ONE, "task.type=tests.workers.test_pool:OnlyHere", base=IMAGES)


def test_a_worker_that_never_comes_up_is_named_with_its_last_words(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/sh")
    handle = Handle(3, tmp_path / "log", Here(None))
    door = pool.Door("127.0.0.1")
    with pytest.raises(Lost, match=r"it ended with \d+; .*log says: .+"):
        handle.start(door, 20)
    handle.stop()
    door.close()


def test_a_worker_that_is_silent_is_given_up(tmp_path, threads, monkeypatch):
    monkeypatch.setattr(InThread, "__call__", lambda self, arguments, environment, log: threads_running(log))
    trainer = make(tmp_path, "rollout.workers={timeout: 0.2}", base=IMAGES)
    with pytest.raises(UserError, match=r"rollout worker 0 was lost 3 times .* rollout.workers.timeout=0.2 s"):
        trainer.generator.synchronise()
    release(trainer)


def threads_running(log):
    from tests.workers.threads import Running

    log.touch()
    return Running()


def test_weights_that_arrive_otherwise_are_named(tmp_path, threads, monkeypatch):
    trainer = make(tmp_path, ONE, base=IMAGES)
    write = pool.write_weights

    def wrongly(folder, named):
        write(folder, ((n, v.flip(0) if v.ndim == 1 and len(v.unique()) > 1 else v) for n, v in named))

    trainer.generator.synchronise()
    with torch.no_grad():
        for parameter in trainer.policy.module.parameters():
            parameter.add_(torch.linspace(0, 1, parameter.numel()).view(parameter.shape))
    monkeypatch.setattr(pool, "write_weights", wrongly)
    with pytest.raises(UserError, match=r"rollout worker 0 has \S+ otherwise than it was sent; set rollout.workers"):
        trainer.generator.synchronise()
    release(trainer)


@pytest.mark.parametrize("changed", [False, True])
def test_a_policy_that_is_built_otherwise_each_time_is_refused(tmp_path, threads, changed):
    trainer = make(tmp_path, ONE, base=IMAGES)
    name, parameter = next(iter(trainer.policy.module.named_parameters()))
    parameter.requires_grad_(False)
    if not changed:
        assert trainer.generator.synchronise()["time/synchronise"] > 0
        assert name in trainer.generator.frozen and name not in trainer.generator.current.given
    else:
        parameter.data.add_(1e-3)
        with pytest.raises(UserError, match=rf"rollout worker 0 has built {name} otherwise .* model.build"):
            trainer.generator.synchronise()
    release(trainer)


def test_workers_end_with_the_training(tmp_path):
    handle, door = Handle(0, tmp_path / "log", Here(None)), pool.Door("127.0.0.1")
    handle.start(door, 120)
    pid = handle._running.pid
    assert running(pid) and os.getpgid(pid) == pid
    handle._running.stdin.close()  # as it is when the process that started it has ended, however that was
    assert gone([pid])
    handle.stop()
    door.close()


# --- what is refused ---


@pytest.mark.parametrize(
    "base, options, said",
    [
        (IMAGES, "rollout.workers.count=0", r"rollout.workers.count: .* greater than or equal to 1"),
        (IMAGES, "rollout.workers.async_steps=2", r"rollout.workers.async_steps"),
        (IMAGES, "rollout.workers.first_device=0", r"rollout.workers.first_device"),
        (IMAGES, "rollout.generator=vllm_server", r"unknown key rollout.generator"),
        (TINY, "rollout.workers={}", r"unknown key rollout.workers"),
        (
            IMAGES,
            "rollout.workers.async_steps=1 algorithm={type: matching} denoising.likelihood={type: matching}",
            r"rollout.workers.async_steps=1 is corrected by likelihoods .* type chain",
        ),
        (
            IMAGES,
            "rollout.workers.async_steps=1 denoising.likelihood={old: sampled}",
            r"denoising.likelihood.old=sampled .* use old=replayed",
        ),
        (ROBOTS, f"rollout.workers.async_steps=1 {COOLING}", r"rollout.temperature changes, .* set async_steps to 0"),
        (
            IMAGES,
            "algorithm={type: supervised} task={type: image_generation, data: {type: digits}} rollout.workers={}",
            r"unknown key rollout.(workers|group_size)",
        ),
    ],
)
def test_what_does_not_go_together_is_one_line(base, options, said):
    with pytest.raises(UserError, match=said) as refused:
        load(base, ["run_dir=unset", *split(options)])
    assert "\n" not in str(refused.value)


def split(options):
    """At spaces outside braces."""
    found, depth = [""], 0
    for letter in options:
        depth += (letter == "{") - (letter == "}")
        if letter == " " and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return found


@pytest.mark.parametrize(
    "options, world, most",
    [(["rollout.workers.count=5"], 1, 4), (["rollout.workers.count=3"], 2, 2)]
    + [(["rollout.workers.count=2", "rollout.micro_batch=4"], 1, 1)],
)
def test_more_workers_than_prompts_are_refused(options, world, most):
    config = load(IMAGES, ["run_dir=unset", *options])
    with pytest.raises(UserError, match=rf"^rollout.workers.count=\d is more than the {most} prompts .* lower it$"):
        check_batch(config, world)
    check_batch(load(IMAGES, ["run_dir=unset", *options, f"rollout.workers.count={most}"]), world)


def test_weights_that_are_finished_need_no_workers(threads):
    config = without_workers(load(IMAGES, ["run_dir=unset", ONE]))
    assert config.generator is None and config.rollout.prompts == 4
    assert without_workers(load(TINY, ["run_dir=unset"])).generator is not None


def test_gpus_of_workers_are_no_rank_s(monkeypatch):
    two = RolloutWorkers(count=2, first_device=2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert devices_of(two, 6) == [4, 5]
    with pytest.raises(UserError, match=r"rollout.workers.count=2 .* needs 6 GPUs, and this host shows 5"):
        devices_of(two, 5)
    with pytest.raises(UserError, match=r"rollout.workers.first_device=1 is a GPU that a rank trains on"):
        devices_of(RolloutWorkers(first_device=1), 8)


def test_a_trainer_has_one_environment_where_workers_play(tmp_path):
    def rows(*options):
        config = load(ROBOTS, [f"run_dir={tmp_path}", *options])
        return len(build.build_policy(config, build.build_task(config)).sim)

    assert rows() == 16 and rows(ONE) == 1 and rows(ONE, "action.standardise=true") == 16
    assert Path(tmp_path).is_dir()
