"""What disks, kills and strangers do to a run directory: a run goes on from what is intact, and says what was not."""

import json
import os
import random
import shutil

import pytest
import torch

from mmrl import checkpoints
from mmrl.checkpoints import files
from mmrl.errors import UserError
from tests.whole_runs.parts import final, make, metrics, release, train

pytestmark = pytest.mark.usefixtures("alone")
RUN = ["steps=4", "checkpoint.every=1", "engine.zero_stage=1", "optim.ema=0.5"]
BEST = ["checkpoint.best=true", "evaluation.every=1"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, alone):
    """A run of four steps; what it holds after three is damaged by the tests."""
    folder = tmp_path_factory.mktemp("damage")
    trainer = make(folder / "run", *RUN, *BEST)
    save = trainer.save

    def save_and_keep():
        save()
        trainer.saver.finish()
        if trainer.step == 3:
            shutil.copytree(folder / "run", folder / "three")

    trainer.save = save_and_keep
    trainer.train()
    release(trainer)
    return folder


@pytest.fixture
def run(whole, tmp_path):
    """A run directory with checkpoints of steps 2 and 3."""
    shutil.copytree(whole / "three", tmp_path / "run")
    return tmp_path / "run"


def newest(run):
    return run / "checkpoints" / "step-000003"


def contents(checkpoint):
    return sorted(p for p in checkpoint.rglob("*") if p.is_file())


def flip(path, place):
    """Turn one bit over."""
    data = bytearray(path.read_bytes())
    data[place // 8] ^= 1 << place % 8
    path.write_bytes(data)


def resumed(run, *overrides):
    """The step that a run resumes from, and what it says."""
    trainer, said = make(run, *RUN, *overrides), []
    trainer.run.line = said.append
    try:
        trainer.resume()
    finally:
        release(trainer)
    return trainer.step, said


# --- checksums ---


def test_a_checkpoint_knows_all_of_its_files(run):
    recorded = files.manifest(newest(run))
    assert {p.relative_to(newest(run)).as_posix() for p in contents(newest(run))} == {*recorded, files.MANIFEST}
    assert {"trainer.json", "rank-0.pt", "engine/mp_rank_00_model_states.pt"} < recorded.keys()
    assert files.find_damage(newest(run)) is None and not list(newest(run).rglob("*.py"))


def test_one_bit_anywhere_in_any_file_is_noticed(run):
    generator, checkpoint = random.Random(0), newest(run)
    for path in contents(checkpoint):
        bits = path.stat().st_size * 8
        for place in {0, bits - 1, *(generator.randrange(bits) for _ in range(25))}:
            flip(path, place)
            assert files.find_damage(checkpoint) is not None, (path, place)
            flip(path, place)
    assert files.find_damage(checkpoint) is None


NAMES = ["engine/mp_rank_00_model_states.pt", "rank-0.pt", "trainer.json", "manifest.json"]
DAMAGES = ["flipped", "deleted", "emptied", "halved", "zeros", "folder"]
# Each file once or twice, each kind at least once.
QUICK = [*zip(NAMES, DAMAGES, strict=False), ("trainer.json", "zeros"), ("manifest.json", "folder")]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow)
        for case in ((name, kind) for name in NAMES for kind in DAMAGES)
    ],
)
def test_a_damaged_file_falls_back_to_the_older_checkpoint(run, name, kind):
    path = newest(run) / name
    size = path.stat().st_size
    if kind == "flipped":
        flip(path, size * 4)
    else:
        path.unlink()
    if kind in ("emptied", "halved"):
        path.write_bytes(b"" if kind == "emptied" else b"x" * (size // 2))
    if kind == "zeros":
        path.write_bytes(bytes(size))
    if kind == "folder":
        path.mkdir()
    step, said = resumed(run)
    assert step == 2
    assert [line for line in said if "damaged" in line and name.split("/")[-1] in line] == said[:1]
    assert said[1] == f"resumed from {run / 'checkpoints' / 'step-000002'}"


def test_a_run_that_fell_back_ends_as_if_nothing_had_happened(run, whole):
    flip(newest(run) / "rank-0.pt", 9999)
    train(run, *RUN, resume=True)
    one, other = final(whole / "run"), final(run)
    assert one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
    assert [r["step"] for r in metrics(run) if "loss" in r] == [1, 2, 3, 4]
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-000003", "step-000004"]


def test_a_damaged_checkpoint_counts_for_nothing_when_old_ones_are_removed(run):
    """Else keep=1 would leave the damaged one, which is newer, and remove the good one."""
    flip(newest(run) / "rank-0.pt", 9999)
    newest(run).rename(run / "checkpoints" / "step-000009")
    train(run, *RUN, "steps=3", "checkpoint.keep=1", resume=True)
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-000003"]
    assert files.find_damage(newest(run)) is None


def test_strangers_among_the_checkpoints_are_passed_over(run):
    folder = run / "checkpoints"
    (folder / "step-backup").mkdir()
    (folder / "step-000009.pending").mkdir()
    (folder / "step-000010").write_text("a file")
    shutil.copytree(folder / "step-000002", folder / "my-copy")
    (folder / "step-000003" / "note.txt").write_text("looks good")
    assert resumed(run)[0] == 3


def test_a_million_steps_come_after_999999(tmp_path):
    for name in ("step-999999", "step-1000000", "step-000002", "step-000003.damaged", "step-4x", "mystep-5"):
        (tmp_path / name).mkdir()
    assert [files.step_of(p) for p in checkpoints.list_finished(tmp_path)] == [2, 999999, 1000000]


def test_nothing_intact_is_refused(run):
    for path in checkpoints.list_finished(run / "checkpoints"):
        (path / "trainer.json").unlink()
    with pytest.raises(UserError, match="no checkpoint in .* is intact"):
        resumed(run)


def test_what_a_kill_left_between_two_renames_is_put_right(run):
    (run / "final.pending").mkdir()
    (run / "best").rename(run / "best.replaced")
    (run / "checkpoints" / "step-000003").rename(run / "checkpoints" / "step-000003.replaced")
    shutil.copytree(run / "checkpoints" / "step-000002", run / "checkpoints" / "step-000002.replaced")
    (run / "mine.pending").mkdir()
    assert resumed(run)[0] == 3
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-000002", "step-000003"]
    assert files.find_damage(run / "best") is None and (run / "mine.pending").is_dir()
    assert not list(run.glob("*.replaced")) and not (run / "final.pending").exists()


# --- the log ---


@pytest.mark.parametrize(
    ("broken", "copied"),
    [(b"garbage\n", 1), (bytes(64) + b"\n", 1), (b"{}\n", 1), (b"\xff\xfe\n", 1), (b'"text"\n', 1), (b"", 0)],
)
def test_a_damaged_log_stops_nothing(run, broken, copied):
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    before = b"".join([lines[0], broken, *lines[1:]]) + b'{"step": 4, "lo'
    path.write_bytes(before)
    step, said = resumed(run)
    assert step == 3 and [r["step"] for r in metrics(run) if "loss" in r] == [1, 2, 3]
    assert len([line for line in said if "damaged lines are removed" in line]) == copied
    assert [p.read_bytes() for p in run.glob("*.damaged.jsonl")] == [before] * copied


def test_a_log_that_is_gone_stops_nothing(run):
    (run / "metrics.jsonl").unlink()
    (run / "config.yaml").write_bytes(b"\0" * 100)
    assert resumed(run)[0] == 3


# --- strangers' files ---


class Hostile:
    """What runs when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("zero_stage", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_pickle_in_a_checkpoint_does_not_run(tmp_path, zero_stage):
    run, ran = tmp_path / "run", tmp_path / "ran"
    stage = f"engine.zero_stage={zero_stage}"
    train(run, *RUN, stage, "steps=1")
    checkpoint = run / "checkpoints" / "step-000001"
    pickles = sorted(checkpoint.rglob("*.pt"))
    assert len(pickles) == (2 if zero_stage == 0 else 3)
    for path in pickles:
        kept = path.read_bytes()
        for zipped in (True, False):
            held = torch.load(path, weights_only=False)
            torch.save({**held, "stranger": Hostile(ran)}, path, _use_new_zipfile_serialization=zipped)
            torch.load(path, weights_only=False)
            assert ran.exists()  # it is a real one
            ran.unlink()
            (checkpoint / files.MANIFEST).unlink()
            files.write_manifest(checkpoint, {})  # who can write a pickle can write its checksum
            with pytest.raises(UserError, match="holds more than tensors and is not opened .*remove it") as caught:
                resumed(run, stage)
            assert not ran.exists() and "\n" not in str(caught.value)
            path.write_bytes(kept)


# --- weights that are not finite ---


@pytest.mark.parametrize("value", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.slow)])
def test_weights_that_are_not_finite_replace_nothing(tmp_path, value):
    trainer = make(tmp_path, *RUN, "checkpoint.keep=1", "steps=2", "evaluation.every=1", "checkpoint.best=true")
    trainer.train()
    before = {p: p.read_bytes() for folder in ("checkpoints", "best", "final") for p in contents(tmp_path / folder)}
    with torch.no_grad():
        next(p for p in trainer.policy.module.parameters() if p.requires_grad).view(-1)[-1] = value
    trainer.step = 3
    for write in (trainer.save, lambda: trainer.save_weights("final"), lambda: trainer.save_weights("best")):
        trainer.ema = None
        with pytest.raises(UserError, match="not written, because weights have become NaN or infinite.*are intact"):
            write()
    release(trainer)
    after = {p: p.read_bytes() for folder in ("checkpoints", "best", "final") for p in contents(tmp_path / folder)}
    assert before == after and any("step-000002" in str(p) for p in before)


# --- adapters ---


@pytest.mark.parametrize("zero_stage", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_of_adapters_only_what_is_trained_is_kept(tmp_path, zero_stage):
    settings = [*RUN, "steps=2", "model.lora={rank: 2}", f"engine.zero_stage={zero_stage}"]
    whole = train(tmp_path / "whole", *settings)
    checkpoint = tmp_path / "whole" / "checkpoints" / "step-000001"
    named = dict(whole.policy.module.named_parameters())
    held = torch.load(checkpoint / "engine" / "mp_rank_00_model_states.pt")["module"]
    assert {n for n in held if n in named} == {n for n, p in named.items() if p.requires_grad}
    assert len([n for n in named if n not in held]) > 50
    run = tmp_path / "run"
    shutil.copytree(checkpoint, run / "checkpoints" / "step-000001")
    again = dict(train(run, *settings, resume=True).policy.module.named_parameters())
    assert all(torch.equal(p, again[name]) for name, p in named.items())
    trainer = make(run, *settings)
    with torch.no_grad():
        next(p for p in trainer.policy.module.parameters() if not p.requires_grad).view(-1)[0] += 1
    with pytest.raises(
        UserError,
        match="was trained with other frozen weights than .*set model.path to the weights that the run began with",
    ):
        trainer.resume()
    release(trainer)


# --- what weights say of themselves ---


def test_weights_name_their_step_and_configuration(whole):
    origin = json.loads((whole / "run" / "final" / "run.json").read_text())
    assert origin["step"] == 4 and origin["config"]["optim"]["ema"] == 0.5 and len(origin["digest"]) == 64
    assert files.find_damage(whole / "run" / "final") is None
    mask = os.umask(0o022)
    os.umask(mask)
    assert {p.stat().st_mode & 0o777 for p in contents(whole / "run" / "final")} == {0o666 & ~mask}
