"""Checkpoints are whole or absent: rotation, full disks, torn folders, refusals."""

import errno
import json
import shutil
import threading
from collections import OrderedDict
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn

from mmrl import checkpoints
from mmrl.checkpoints import files, store
from mmrl.checkpoints.training import differences
from mmrl.checkpoints.writing import copied
from mmrl.errors import UserError
from tests.whole_runs.parts import Fixed, make, release, spread, train

pytestmark = pytest.mark.usefixtures("alone")
ORIGIN = {"step": 1, "digest": "", "config": {}}


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_rotation_keeps_the_newest_and_the_best_besides(tmp_path):
    marks = iter([0.5, 0.2, 0.9, 0.1, 0.3])

    class Graded(Fixed):
        def accuracy(self, samples):
            return torch.full([len(samples)], next(self.values) if self.values else 0.0)

    task = Graded(spread)
    task.values = None
    settings = ["steps=4", "checkpoint.every=1", "checkpoint.keep=2", "checkpoint.best=true", "evaluation.every=1"]
    trainer = make(tmp_path, *settings, task=task)
    evaluate, weights = trainer.evaluate, {}

    def graded():
        task.values = marks
        result = evaluate()
        task.values = None
        weights[trainer.step] = trainer.engine.state()["model.lm_head.weight"].clone()
        return result

    trainer.evaluate = graded
    trainer.train()
    release(trainer)
    assert names(tmp_path / "checkpoints") == ["step-000003", "step-000004"]
    assert trainer.best == pytest.approx(0.9)
    from safetensors.torch import load_file

    best = load_file(tmp_path / "best" / "model.safetensors")
    assert any(torch.equal(value, weights[3]) for value in best.values())
    assert not any(torch.equal(value, weights[4]) for value in best.values())


FULL, FAILED = OSError(errno.ENOSPC, "No space left on device"), RuntimeError("write failed")


@pytest.mark.parametrize(
    ("error", "background"),
    [
        (FULL, True),
        (FAILED, False),
        pytest.param(FULL, False, marks=pytest.mark.slow),
        pytest.param(FAILED, True, marks=pytest.mark.slow),
    ],
)
def test_a_full_disk_is_one_line_and_costs_nothing_saved(tmp_path, error, background, monkeypatch):
    trainer = make(tmp_path, "steps=2", "checkpoint.every=1", f"checkpoint.background={background}".lower())
    usual = torch.save

    def save(state, path):
        if "step-000002" in str(path):
            raise error
        usual(state, path)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", save)
        with pytest.raises(
            UserError, match="step-000002 could not be written.*earlier checkpoints are intact"
        ) as caught:
            trainer.train()
    release(trainer)
    assert "\n" not in str(caught.value)
    assert names(tmp_path / "checkpoints") == ["step-000001"]
    assert train(tmp_path, "steps=2", "checkpoint.every=1", resume=True).step == 2


@pytest.mark.parametrize("background", [True, False])
def test_who_writes_a_file_waits_for_the_disk(tmp_path, background, monkeypatch):
    """Otherwise the renaming would, and training with it. A disk may say only then that it is full."""
    trainer = make(tmp_path, "steps=2", "checkpoint.every=1", f"checkpoint.background={background}".lower())
    usual, waited = files.sync, []

    def sync(path):
        if "step-000001" in str(path):
            waited.append((path.name, "checkpoint" in threading.current_thread().name))
        if path.name == "rank-0.pt" and "step-000002" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        usual(path)

    with monkeypatch.context() as patched:
        patched.setattr(files, "sync", sync)
        with pytest.raises(UserError, match="step-000002 could not be written .*No space left"):
            trainer.train()
    release(trainer)
    written = {path.name for path in (tmp_path / "checkpoints" / "step-000001").rglob("*.pt")}
    assert len(written) >= 2 and {name for name, there in waited[: len(written)]} == written
    assert all(there == background for _, there in waited[: len(written)])
    assert {"trainer.json", "manifest.json"} < {name for name, _ in waited}
    assert names(tmp_path / "checkpoints") == ["step-000001"]


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    """The writer is held up at each of two files for a step; what it writes is of step 1."""
    arguments = ["steps=5", "checkpoint.keep=5", "checkpoint.best=false"]
    trainer = make(tmp_path, *arguments, "checkpoint.every=5", "checkpoint.background=true")
    usual, weights, written = torch.save, {}, threading.Event()
    may_write = {"model_states": threading.Event(), "rank-0": threading.Event()}

    def save(state, path):
        held = [event for name, event in may_write.items() if "step-000001" in str(path) and name in str(path)]
        assert all(event.wait(20) for event in held)
        usual(state, path)
        written.set()

    def seen(step, metrics):
        weights[step] = {name: value.clone() for name, value in trainer.engine.state().items()}
        if step == 1:
            trainer.save()
        if step == 2:
            may_write["model_states"].set()
            assert written.wait(20)
        if step == 4:
            assert not list((tmp_path / "checkpoints").glob("step-??????"))
            may_write["rank-0"].set()

    trainer.run.on_step = seen
    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", save)
        trainer.train()
    release(trainer)
    assert names(tmp_path / "checkpoints") == ["step-000001", "step-000005"]
    shutil.rmtree(tmp_path / "checkpoints" / "step-000005")
    again = make(tmp_path, *arguments, "checkpoint.every=5")
    again.resume()
    assert again.step == 1
    loaded = again.engine.state()
    assert all(torch.equal(value, weights[1][name]) for name, value in loaded.items())
    assert any(not torch.equal(value, weights[3][name]) for name, value in loaded.items())
    again.train()
    assert all(torch.equal(value, weights[5][name]) for name, value in again.engine.state().items())
    release(again)


@pytest.mark.parametrize(("free", "background"), [(1.9, False), (2.1, True)])
def test_auto_writes_in_the_background_where_twice_the_copy_fits(tmp_path, monkeypatch, free, background):
    trainer = make(tmp_path, "steps=1")
    needed = sum(p.numel() for p in trainer.policy.module.parameters() if p.requires_grad) * 16
    assert trainer.engine.saved_bytes == needed  # fp32: weights, and the optimizer's with two moments
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free * needed))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    begin, seen = checkpoints.store.begin, []
    record = lambda *a, background: (seen.append(background), begin(*a, background=background))[1]  # noqa: E731
    monkeypatch.setattr(checkpoints.store, "begin", record)
    trainer.save()
    trainer.saver.finish()
    release(trainer)
    assert seen == [background]


def test_a_lone_rank_finishes_its_checkpoint_when_training_ends_by_an_error(tmp_path):
    trainer = make(tmp_path, "steps=3", "checkpoint.every=1", "checkpoint.background=true")

    def fails(step, metrics):
        if step == 2:
            raise KeyError("mine")

    trainer.run.on_step = fails
    with pytest.raises(KeyError, match="mine"):
        trainer.train()
    release(trainer)
    assert names(tmp_path / "checkpoints") == ["step-000001"]


def test_a_copy_shares_memory_as_the_original_does():
    base = torch.arange(12.0)
    tree = {"a": base.view(3, 4).T, "b": [base[2:], (1, "x")], "c": OrderedDict(d=nn.Parameter(torch.ones(2)))}
    copy = copied(tree, {})
    assert torch.equal(copy["a"], tree["a"]) and copy["a"].stride() == (1, 4)
    assert type(copy["c"]) is OrderedDict and copy["b"][1] == (1, "x")
    base.zero_()
    assert copy["a"].sum() == 66 and copy["b"][0].sum() == 65
    copy["a"].zero_()
    assert copy["b"][0].sum() == 0  # one storage still


def test_a_full_disk_while_weights_are_written_keeps_those_before(tmp_path):
    trainer = make(tmp_path, "steps=1")
    checkpoints.save_weights(tmp_path / "best", trainer.policy, trainer.engine, ORIGIN)
    before = {p.name: p.read_bytes() for p in (tmp_path / "best").iterdir()}
    usual = trainer.policy.save

    def save(folder, state):
        usual(folder, state)
        raise OSError(errno.ENOSPC, "No space left on device")

    trainer.policy.save = save
    with pytest.raises(UserError, match="best could not be written .*No space left"):
        checkpoints.save_weights(tmp_path / "best", trainer.policy, trainer.engine, ORIGIN)
    release(trainer)
    assert {p.name: p.read_bytes() for p in (tmp_path / "best").iterdir()} == before
    assert not list(tmp_path.glob("*.pending"))


def test_weights_are_never_absent_while_they_are_replaced(tmp_path, monkeypatch):
    """Killed between any two file operations, either the old or the new weights can be found under their name."""
    trainer = make(tmp_path, "steps=1")
    best = tmp_path / "best"
    checkpoints.save_weights(best, trainer.policy, trainer.engine, ORIGIN)
    commit, seen = files.commit, []
    monkeypatch.setattr(files, "commit", lambda *paths: (seen.append((best / "config.json").exists()), commit(*paths)))
    checkpoints.save_weights(best, trainer.policy, trainer.engine, ORIGIN)
    release(trainer)
    assert seen == [True]
    assert names(tmp_path).count("best") == 1 and not [n for n in names(tmp_path) if n.startswith("best.")]


def test_a_torn_checkpoint_is_never_loaded(tmp_path):
    train(tmp_path, "steps=2", "checkpoint.every=1")
    folder = tmp_path / "checkpoints"
    shutil.move(folder / "step-000002", folder / "step-000002.pending")
    (folder / "step-000002.pending" / "trainer.json").unlink()
    assert [p.name for p in checkpoints.list_finished(folder)] == ["step-000001"]
    trainer = make(tmp_path, "steps=2", "checkpoint.every=1")
    trainer.resume()
    assert trainer.step == 1
    trainer.train()
    release(trainer)
    assert names(folder) == ["step-000001", "step-000002"]


def test_resume_refuses_what_it_can_not_continue(tmp_path):
    trainer = make(tmp_path, "steps=1", "checkpoint.resume=true")
    with pytest.raises(UserError, match="has no finished checkpoint"):
        trainer.resume()
    trainer.config = trainer.config.model_copy(
        update={"checkpoint": trainer.config.checkpoint.model_copy(update={"every": 1})}
    )
    trainer.train()
    release(trainer)
    for override, key in [
        ("optim.eps=2e-3", "optim.eps is 0.002"),
        ("seed=1", "seed is 1"),
        ("task.data.train_size=65", "task.data.train_size is 65"),
        ("algorithm.surrogate.high=0.1", "algorithm.surrogate.high is 0.1"),
    ]:
        trainer = make(tmp_path, override)
        with pytest.raises(UserError, match=f"changed configuration: {key} but .*step-000001 was trained with"):
            trainer.resume()
        release(trainer)
    trainer = make(tmp_path, "steps=3", "checkpoint.keep=5", "evaluation.prompts=2")  # these may change
    trainer.resume()
    assert trainer.step == 1
    release(trainer)


def test_a_run_that_is_older_than_the_choice_of_optimizers_goes_on():
    older, now = {"optim": {"lr": 0.1}}, {"optim": {"type": "adamw", "lr": 0.1}}
    assert differences(older, now, set()) == {}
    assert differences(older, {"optim": {"type": "sgd", "lr": 0.1}}, set()) == {"optim.type": ("adamw", "sgd")}
    added = {"algorithm": {"terms": [{"type": "kl"}]}}
    assert differences({}, added, set()) == {"algorithm.terms": (None, [{"type": "kl"}])}
    assert differences(added, {}, set()) == {"algorithm.terms": ([{"type": "kl"}], None)}


def test_each_rank_restores_its_own_state(tmp_path):
    """Two ranks with two states; the layout is that of the run that wrote them."""
    layout = {"ranks": 2, "zero_stage": 0, "frozen": "x"}
    (tmp_path / "trainer.json").write_text(json.dumps({"step": 1, "layout": layout}))
    before, states = torch.get_rng_state(), []
    for rank in range(2):
        torch.manual_seed(rank)
        states.append(torch.get_rng_state())
        torch.save({"random": states[-1], "own": {"rank": rank}}, tmp_path / f"rank-{rank}.pt")
    try:
        for rank in range(2):
            engine = SimpleNamespace(rank=rank, world=2, zero_stage=0, frozen_digest="x", load=lambda *given: None)
            assert store.load(tmp_path, engine)["rank"] == rank
            assert torch.equal(torch.get_rng_state(), states[rank])
    finally:
        torch.set_rng_state(before)


def test_unfinished_groups_are_dealt_oldest_first():
    """Two ranks had the groups 7, 3 and 5, each with two drafts; three ranks go on with 3, 5 and 7."""
    pools = [
        {"positions": [7, 3], "prompts": [70, 30], "drafts": ["7a", "7b", "3a", "3b"]},
        {"positions": [5], "prompts": [50], "drafts": ["5a", "5b"]},
    ]
    shares = [store.dealt(pools, rank, 3) for rank in range(3)]
    assert [share["positions"] for share in shares] == [[3], [5], [7]]
    assert [share["prompts"] for share in shares] == [[30], [50], [70]]
    assert [share["drafts"] for share in shares] == [["3a", "3b"], ["5a", "5b"], ["7a", "7b"]]
    assert store.dealt(pools, 1, 2)["positions"] == [5] and store.dealt(pools, 0, 2)["positions"] == [3, 7]
