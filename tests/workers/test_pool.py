"""Rollouts that workers make are those of the training process: whole runs with and without, number by number. Workers
are threads here; `test_processes.py` has processes."""

import sys
import threading
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from mmrl import build
from mmrl.children.child import Lost
from mmrl.children.frames import decode
from mmrl.children.listener import Pair
from mmrl.collection.checks import check_batch
from mmrl.config import load
from mmrl.errors import UserError
from mmrl.generation.settings import RolloutWorkers
from mmrl.rollouts import Prompt, Replay, Rollouts, Sample
from mmrl.tasks.settings import TaskSettings
from mmrl.workers import pool
from mmrl.workers.handles import Handle
from mmrl.workers.local import without_workers
from mmrl.workers.pool import WorkerPool, devices_of, shares
from mmrl.workers.worker import RolloutWorker
from tests.whole_runs.parts import IMAGES, ROBOTS, TINY, Images, make, metrics, release
from tests.workers.runs import COOLING, GUIDED, ONE, PPO, alike, run
from tests.workers.threads import InThread, Running

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def threads(monkeypatch):
    """Workers are threads; what was launched."""
    made = []

    def launched(settings, logs):
        made.append(InThread())
        for log in logs:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.touch()
        return [made[-1]] * settings.count

    monkeypatch.setattr(pool, "launched", launched)
    return made


# --- the same numbers ---


@pytest.mark.parametrize("base, options", [(IMAGES, GUIDED), (ROBOTS, [*PPO, COOLING])], ids=["images", "robots"])
def test_three_workers_make_what_one_does(tmp_path, threads, base, options):
    plain = run(tmp_path / "plain", *options, base=base)
    alike(plain, run(tmp_path / "apart", *options, "rollout.workers.count=3", base=base), rel=2e-4)
    assert len(threads[0].started) == 3
    log = tmp_path / "apart" / "workers"
    assert {path.name for path in log.iterdir()} == {f"worker-{i}.log" for i in range(3)}, "weights are cleared away"


@pytest.mark.parametrize(
    "options",
    [
        ["algorithm={type: contrast}", "denoising.likelihood={type: contrast}"],
        ["algorithm={type: matching}", "denoising.likelihood={type: matching}", "rollout.micro_batch=8"],
        ["denoising.likelihood={branching: [2, 2], window: {type: sliding, size: 2, every: 1}}"],
    ],
    ids=["contrast", "matching", "trees"],
)
def test_other_decisions_of_images_pass_too(tmp_path, threads, options):
    plain = run(tmp_path / "plain", *options, "steps=2", base=IMAGES)
    alike(plain, run(tmp_path / "apart", *options, "steps=2", ONE, base=IMAGES))


def test_prompts_are_shared_in_order():
    assert shares(5, 2) == [(0, 2), (2, 5)] and shares(2, 3) == [(0, 1), (1, 2)] and shares(4, 1) == [(0, 4)]


def test_what_workers_counted_is_added_and_what_the_trainer_sees_too_counts_once():
    """Two workers truncate a prompt and two; the trainer, which encodes all of them again, has seen two so far."""
    made = object.__new__(WorkerPool)
    made.policy = SimpleNamespace(counts=lambda: {"truncated": 2.0, "own": 1.0})
    made.handles, made._counted, made._lock = [0, 1], {}, threading.Lock()
    counts = [{"truncated": 1.0}, {"truncated": 2.0, "theirs": 4.0}]
    made._ask = lambda handle, message, shared: {"result": handle, "counts": counts[handle]}
    assert made._distribute([Prompt("1", "?"), Prompt("2", "?")], 1, [7, 8], {"respond": True}) == [0, 1]
    assert made.counts() == {"truncated": 3.0, "own": 1.0, "theirs": 4.0}
    assert made.counts() == {"truncated": 2.0, "own": 1.0}


def test_likelihoods_of_every_micro_batch_are_those_of_its_own_rollouts():
    """Five rollouts, two at once; the policy finds the logarithm of each to be its number."""
    made = object.__new__(RolloutWorker)
    made.config = SimpleNamespace(engine=SimpleNamespace(micro_batch=2))
    made.policy = SimpleNamespace(
        module=None, replay=lambda rollouts, module: Replay(torch.tensor(rollouts.inputs).float()[:, None])
    )
    samples, mask = [Sample(Prompt("1", "?"))] * 5, torch.ones(5, 1).bool()
    found = made.likelihoods(Rollouts(samples, [10, 11, 12, 13, 14], torch.zeros(5).long(), mask))
    assert found.tolist() == [[10], [11], [12], [13], [14]]


# --- ahead of training ---


AHEAD = [(IMAGES, ["algorithm.minibatches=2", "denoising.guidance=1.5"]), (ROBOTS, PPO)]


@pytest.mark.parametrize("base, options", AHEAD, ids=["images", "robots"])
@pytest.mark.quick("images")
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
    trainer = make(tmp_path, "rollout.workers={count: 2, async_steps: 1}", base=IMAGES)
    images, policy = trainer.generator, trainer.policy
    prompts, seeds = [trainer.task.train[i] for i in range(2)], [11, 12, 13, 14]
    with images.generation():
        made = images.rollout(prompts, 2, seeds, step=0)
    with torch.no_grad():
        now = policy.replay(made, policy.module).logp
        for parameter in policy.module.parameters():
            parameter.add_(0.05)
        later = policy.replay(made, policy.module).logp
    assert made.group.tolist() == [0, 0, 1, 1] and [one.prompt for one in made.samples[1:3]] == prompts
    assert (made.behaviour_logp - now).abs().max() < 1e-6 < (made.behaviour_logp - later).abs().min()
    images.sync_weights()
    assert [path.name for path in images.exchange.path.glob("weights-*")] == ["weights-2"]  # the others are removed
    release(trainer)


# --- what goes wrong ---


@pytest.mark.parametrize(
    ("evaluations", "counts"),
    [
        ([], {1: 0, 2: 0, 3: 1}),
        (["evaluation.every=2"], {1: 0, 2: 1, 3: 0}),  # the row of the evaluation behind the second step tells it
    ],
)
def test_a_worker_that_is_lost_later_goes_on_with_the_weights_of_then(
    tmp_path, threads, monkeypatch, capsys, evaluations, counts
):
    plain = run(tmp_path / "plain", "steps=3", *evaluations, base=IMAGES)
    asked, ask = [], Handle.ask

    def losing(handle, message, seconds, shared=()):
        asked.append("rollout" in decode(message))
        if asked[-1] and sum(asked) == 2:
            raise Lost("it ended, saying \x1b[2J")
        return ask(handle, message, seconds, shared)

    monkeypatch.setattr(Handle, "ask", losing)
    alike(plain, run(tmp_path / "apart", "steps=3", *evaluations, ONE, base=IMAGES))
    assert "rollout worker 0: it ended, saying \\x1b[2J; restarting it" in capsys.readouterr().out  # escaped
    for name in ("generation/restarts", "generation/asked_again"):
        told = Counter()
        for row in metrics(tmp_path / "apart"):
            told[row["step"]] += row.get(name, 0) + row.get(f"evaluation/{name}", 0)
        assert told == counts, name
    assert len(threads[0].started) == 2


class OnlyHere(TaskSettings):
    """A task that workers can not build."""

    def build(self, seed):
        main = sys.modules["__main__"].__spec__
        if threading.current_thread() is not threading.main_thread() or (main and main.name == "mmrl.children.main"):
            raise ArithmeticError("not on this\nhost")
        return Images().build(seed)


def test_a_worker_that_raises_says_why_in_one_line(tmp_path, threads):
    with pytest.raises(UserError, match=r"^rollout worker 0: ArithmeticError: not on this host \(test_pool.py:\d+\)$"):
        run(tmp_path, ONE, "task.type=tests.workers.test_pool:OnlyHere", base=IMAGES)


def test_a_worker_that_is_silent_is_given_up(tmp_path, threads, monkeypatch):
    def silent(self, service):
        return Running(), Pair()

    monkeypatch.setattr(InThread, "__call__", silent)
    trainer = make(tmp_path, "rollout.workers={timeout: 0.2}", base=IMAGES)
    with pytest.raises(
        UserError, match=r"rollout worker 0 ended or did not answer 3 times .* rollout.workers.timeout=0.2 s"
    ):
        trainer.generator.sync_weights()
    release(trainer)


def test_weights_that_arrive_otherwise_are_named(tmp_path, threads, monkeypatch):
    trainer = make(tmp_path, ONE, base=IMAGES)
    write = pool.write_weights

    def wrongly(folder, named):
        write(folder, ((n, v.flip(0) if v.ndim == 1 and len(v.unique()) > 1 else v) for n, v in named))

    trainer.generator.sync_weights()
    with torch.no_grad():
        for parameter in trainer.policy.module.parameters():
            parameter.add_(torch.linspace(0, 1, parameter.numel()).view(parameter.shape))
    monkeypatch.setattr(pool, "write_weights", wrongly)
    with pytest.raises(UserError, match=r"rollout worker 0: \S+ differs from what was sent; set rollout.workers"):
        trainer.generator.sync_weights()
    release(trainer)


@pytest.mark.parametrize("changed", [False, True])
def test_a_policy_that_is_built_otherwise_each_time_is_refused(tmp_path, threads, changed):
    trainer = make(tmp_path, ONE, base=IMAGES)
    name, parameter = next(iter(trainer.policy.module.named_parameters()))
    parameter.requires_grad_(False)
    if not changed:
        assert trainer.generator.sync_weights()["time/synchronise"] > 0
        assert name in trainer.generator.frozen and name not in trainer.generator.current.checksums
    else:
        parameter.data.add_(1e-3)
        with pytest.raises(
            UserError, match=rf"rollout worker 0: {name}, .* differs from the training process's.* model.build"
        ):
            trainer.generator.sync_weights()
    release(trainer)


# --- what is refused ---


@pytest.mark.parametrize(
    "base, options, said",
    [
        (IMAGES, "rollout.workers.count=0", r"rollout.workers.count: .* greater than or equal to 1"),
        (IMAGES, "rollout.workers.async_steps=-1", r"rollout.workers.async_steps"),
        (IMAGES, "rollout.workers.first_device=0", r"rollout.workers.first_device"),
        (IMAGES, "rollout.generator=vllm_server", r"unknown key rollout.generator"),
        (TINY, "rollout.workers={}", r"unknown key rollout.workers"),
        (
            IMAGES,
            "rollout.workers.async_steps=1 algorithm={type: matching} denoising.likelihood={type: matching}",
            r"rollout.workers.async_steps=1 needs the log-probability of each .* type of the likelihood to chain",
        ),
        (
            IMAGES,
            "rollout.workers.async_steps=1 denoising.likelihood={old: sampled}",
            r"denoising.likelihood.old=sampled .* set old=replayed",
        ),
        (
            ROBOTS,
            f"rollout.workers.async_steps=1 {COOLING}",
            r"rollout.temperature follows a schedule, .* set async_steps to 0",
        ),
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
    with pytest.raises(UserError, match=rf"^rollout.workers.count=\d is more than the {most} prompts .* lower rollout"):
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
    with pytest.raises(UserError, match=r"rollout.workers.count=2 .* needs 6 GPUs, but this host has 5"):
        devices_of(two, 5)
    with pytest.raises(UserError, match=r"rollout.workers.first_device=1 is a GPU that a rank trains on"):
        devices_of(RolloutWorkers(first_device=1), 8)


def test_each_worker_of_all_ranks_has_a_log_of_its_own(tmp_path, monkeypatch):
    logs = []
    monkeypatch.setattr(pool, "launched", lambda settings, files: logs.extend(files) or [None] * len(files))
    config = load(IMAGES, [f"run_dir={tmp_path}", "rollout.workers.count=2"])
    for rank in range(2):
        ranks = SimpleNamespace(rank=rank, gather=lambda value: [value] * 2)
        WorkerPool(config, config.generator, None, ranks, builder="tests:nothing")
    assert [log.name for log in logs] == [f"worker-{number}.log" for number in range(4)]


def test_a_trainer_has_one_environment_where_workers_play(tmp_path):
    def rows(*options):
        config = load(ROBOTS, [f"run_dir={tmp_path}", *options])
        return len(build.build_policy(config, build.build_task(config)).sim)

    assert rows() == 16 and rows(ONE) == 1 and rows(ONE, "action.standardise=true") == 16
