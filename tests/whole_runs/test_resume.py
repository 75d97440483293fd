"""Runs that are stopped, killed or moved to a new process go on as if nothing had happened."""

import os
import resource
import signal
import time

import pytest
import torch

from mmrl import checkpoints
from mmrl.trainer import Trainer
from tests.whole_runs.parts import TINY, call, command, final, make, metrics, release, start, timeless, train, wait

EPOCH = [
    "steps=10",
    "task.data.train_size=20",
    "optim.schedule=linear",
    "evaluation.every=5",
    "optim.eps=1e-8",
    "engine.micro_batch=16",
]
KINDS = {
    "3-frozen": ["engine.zero_stage=3", "model.freeze=[vision]", "algorithm.minibatches=2"],
    "1-bfloat16": ["engine.zero_stage=1", "model.dtype=bfloat16"],
}
FURTHER = {"1": ["engine.zero_stage=1"], "3": ["engine.zero_stage=3"]}


def ten(folder, kinds):
    for name, options in kinds.items():
        train(folder / f"ten-{name}", *EPOCH, *options)


def five(folder, kinds):
    """Saves after five steps, where the epoch of 20 prompts ends, and does nothing after that."""
    for name, options in kinds.items():
        trainer = make(folder / f"five-{name}", *EPOCH, *options, "checkpoint.every=5")
        save = trainer.save

        def save_and_stop(trainer=trainer, save=save):
            save()
            trainer.saver.finish()
            raise KeyboardInterrupt

        trainer.save = save_and_stop
        try:
            trainer.train()
        except KeyboardInterrupt:
            assert trainer.step == 5
        release(trainer)


def five_more(folder, kinds):
    for name, options in kinds.items():
        torch.rand(7)  # the random state comes from the checkpoint
        train(folder / f"five-{name}", *EPOCH, *options, resume=True)


def stopped(path, kinds):
    first = [start(target, path, kinds, log=path / f"{target.__name__}.log") for target in (ten, five)]
    for processes, name in zip(first, ("ten", "five"), strict=True):
        log = path / f"{name}.log"
        assert wait(processes, log) == [0], log.read_text()[-3000:]
    assert not list(path.glob("five-*/final"))
    call(five_more, path, kinds, log=path / "more.log")
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return stopped(tmp_path_factory.mktemp("runs"), KINDS)


@pytest.fixture(scope="module")
def further(tmp_path_factory):
    return stopped(tmp_path_factory.mktemp("further"), FURTHER)


def are_equal(whole, halves):
    a, b = final(whole), final(halves)
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    rows = timeless(metrics(whole))
    assert rows == timeless(metrics(halves))
    assert [r["step"] for r in rows] == [1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10, 10]


@pytest.mark.parametrize("kind", KINDS)
def test_ten_steps_equal_five_and_five(runs, kind):
    are_equal(runs / f"ten-{kind}", runs / f"five-{kind}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", FURTHER)
def test_ten_steps_of_further_kinds_equal_five_and_five(further, kind):
    are_equal(further / f"ten-{kind}", further / f"five-{kind}")


RUN = ["train", str(TINY), "steps=40", "checkpoint.every=1", "task.data.train_size=20"]


def launch(folder, *more, ranks=1, target=None):
    arguments = [*RUN, f"run_dir={folder}", *more]
    return start(target or command, *arguments, log=folder.with_suffix(".log"), ranks=ranks)


def until(condition, processes, log, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert processes[0].is_alive() and time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.0005)


def pending(folder):
    return list((folder / "checkpoints").glob("step-*.pending"))


MOMENTS = ["weights", "training", *(pytest.param(m, marks=pytest.mark.slow) for m in ("created", "optimizer", "state"))]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_goes_on_from_its_newest_finished_checkpoint(tmp_path, moment):
    run = tmp_path / "run"
    log = run.with_suffix(".log")
    processes = launch(run)
    folder = run / "checkpoints"
    until(lambda: len(checkpoints.list_finished(folder)) >= 2, processes, log)
    written = {
        "created": lambda: pending(run),
        "weights": lambda: any(list(p.glob("engine/mp_rank*")) for p in pending(run)),
        "optimizer": lambda: any(list(p.glob("rank-0.pt")) for p in pending(run)),
        "state": lambda: any((p / "trainer.json").exists() for p in pending(run)),
        "training": lambda: not pending(run),
    }
    if moment != "training":
        until(lambda: not pending(run), processes, log)
    until(written[moment], processes, log)
    os.kill(processes[0].pid, signal.SIGKILL)
    assert wait(processes, log) == [-signal.SIGKILL]
    newest = int(checkpoints.list_finished(folder)[-1].name.removeprefix("step-"))
    assert newest >= 2
    left = pending(run)
    steps = newest + 2
    processes = launch(run, f"steps={steps}")
    assert wait(processes, log) == [0], log.read_text()[-3000:]
    assert f"resumed from {folder}/step-{newest:06d}" in log.read_text().replace("\n", "")
    assert [r["step"] for r in metrics(run) if "loss" in r] == list(range(1, steps + 1))
    assert not pending(run) or pending(run) == left
    assert checkpoints.list_finished(folder)[-1].name == f"step-{steps:06d}"


@pytest.mark.slow
def test_sigterm_saves_and_the_run_goes_on(tmp_path):
    run = tmp_path / "run"
    log = run.with_suffix(".log")
    processes = launch(run, "checkpoint.every=0", ranks=2)
    until(lambda: (run / "metrics.jsonl").exists() and len(metrics(run)) >= 2, processes, log)
    os.kill(processes[1].pid, signal.SIGTERM)  # one rank's signal stops all
    assert wait(processes, log) == [143, 143], log.read_text()[-3000:]
    (saved,) = checkpoints.list_finished(run / "checkpoints")
    assert not (run / "final").exists()  # it did not reach its end
    step = int(saved.name.removeprefix("step-"))
    assert step >= 2 and [r["step"] for r in metrics(run)] == list(range(1, step + 1))
    processes = launch(run, "checkpoint.every=0", f"steps={step + 1}", ranks=2)
    assert wait(processes, log) == [0, 0], log.read_text()[-3000:]
    assert [r["step"] for r in metrics(run) if "loss" in r] == list(range(1, step + 2))


def small_files(limited, *arguments):
    """On rank `limited` no file may grow beyond 1 MiB, less than weights or optimizer state need, from step 3 on."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    usual = Trainer.save

    def save(self):
        if self.step == 3 and self.engine.rank == limited:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        usual(self)

    Trainer.save = save
    command(*arguments)


@pytest.mark.parametrize(
    ("ranks", "limited"), [(2, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 0), (2, 0)))]
)
def test_a_disk_that_is_full_ends_the_run_with_one_line(tmp_path, ranks, limited):
    run = tmp_path / "run"
    log = run.with_suffix(".log")
    arguments = [limited, *RUN, f"run_dir={run}", "engine.zero_stage=1"]
    processes = start(small_files, *arguments, log=log, ranks=ranks)
    assert wait(processes, log, 60) == [2] * ranks, log.read_text()[-3000:]
    text = log.read_text()  # of all ranks, whose lines may meet within one
    told = text.split("mmrl: ")[1:]
    assert len(told) == ranks and all("could not be written" in one.splitlines()[0] for one in told), text[-2000:]
    assert "Traceback" not in text
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-000001", "step-000002"]


def test_an_error_on_one_rank_ends_all(tmp_path):
    run = tmp_path / "run"
    processes = launch(run, "task={type: tests.whole_runs.parts:BrokenOnRankOne}", ranks=2)
    log = run.with_suffix(".log")
    deadline = time.monotonic() + 60
    while processes[1].is_alive() and time.monotonic() < deadline:
        time.sleep(0.1)
    code = processes[1].exitcode
    for process in processes:  # the launcher does this once one has ended
        process.kill()
    wait(processes, log)
    assert code == 1, log.read_text()[-3000:]
    assert "no reward today" in log.read_text()
