"""A data file that changed is noticed when a run goes on: one line names the key, the file and what to do."""

import os
import time

import pytest

from mmrl.checkpoints import data
from mmrl.checkpoints.data import check_data, data_files, fingerprint, record
from mmrl.errors import UserError


def tree(folder, changed="refuse", **section):
    kinds = {"train": str(folder / "train.jsonl"), "eval": str(folder / "eval.jsonl"), "type": "files"} | section
    return {"task": {"data": kinds}, "checkpoint": {"changed_data": changed}}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.jsonl").write_text("one\ntwo\n")
    (tmp_path / "eval.jsonl").write_text("three\n")
    record(tmp_path, tree(tmp_path))
    return tmp_path


def test_files_of_the_task_are_known_by_their_keys(folder):
    (folder / "files").mkdir()
    (folder / "set").mkdir()
    config = tree(folder, image_root=str(folder), problem_field="train.jsonl", name="nobody/there")
    config["task"]["demonstrations"] = {"type": "lerobot", "path": str(folder / "set")}
    assert data_files(config) == {
        "task.data.train": folder / "train.jsonl",
        "task.data.eval": folder / "eval.jsonl",
        "task.demonstrations.path": folder / "set",
    }


def test_a_task_that_is_its_kind_alone_has_no_files(tmp_path):
    config = {"task": "package.module:Mine", "checkpoint": {"changed_data": "refuse"}}
    record(tmp_path, config)
    check_data(tmp_path, config)
    assert data_files(config) == {}


def test_a_file_that_lost_a_row_is_named(folder):
    check_data(folder, tree(folder))
    (folder / "train.jsonl").write_text("one\n")
    with pytest.raises(UserError) as error:
        check_data(folder, tree(folder))
    line = str(error.value)
    assert line.startswith(
        f"task.data.train={folder / 'train.jsonl'} has changed since run_dir={folder} began (8 bytes "
    )
    assert "then, 4 now" in line and line.endswith("or set checkpoint.changed_data=accept") and "\n" not in line


def test_one_that_was_copied_is_the_same_and_one_of_equal_size_is_not(folder):
    later = time.time_ns() + 10**9
    os.utime(folder / "train.jsonl", ns=(later, later))
    check_data(folder, tree(folder))
    (folder / "train.jsonl").write_text("one\ntwO\n")
    with pytest.raises(UserError, match="8 bytes then, 8 now"):
        check_data(folder, tree(folder))


def test_to_go_on_deliberately_is_said_once_and_recorded(folder, caplog):
    (folder / "eval.jsonl").write_text("four\n")
    accepting = tree(folder, "accept")
    check_data(folder, accepting)
    assert "eval.jsonl has changed since" in caplog.text and "the run continues" in caplog.text
    record(folder, accepting)
    check_data(folder, tree(folder))


def test_a_folder_is_its_listing(folder):
    config = tree(folder, path=str(folder / "set"))
    (folder / "set" / "meta").mkdir(parents=True)
    (folder / "set" / "meta" / "info.json").write_text("{}")
    record(folder, config)
    check_data(folder, config)
    (folder / "set" / "more.mp4").write_bytes(b"1")
    with pytest.raises(UserError, match=r"task.data.path=.*set has changed .*2 bytes then, 3 now"):
        check_data(folder, config)


def test_of_a_large_file_blocks_are_read_up_to_its_end(folder, monkeypatch):
    monkeypatch.setattr(data, "MAX_FULL_READ", 100)
    monkeypatch.setattr(data, "BLOCK", 4)
    monkeypatch.setattr(data, "BLOCKS", 8)
    path = folder / "large"
    path.write_bytes(bytes(200))
    before = fingerprint(path)["sha256"]
    for position, seen in ((0, True), (199, True), (10, False)):
        path.write_bytes(bytes(position) + b"x" + bytes(199 - position))
        assert (fingerprint(path)["sha256"] != before) == seen, position


def test_a_run_without_a_record_goes_on_and_what_is_unchanged_is_not_read_again(folder, monkeypatch):
    monkeypatch.setattr(data, "fingerprint", lambda path: pytest.fail("read again"))
    record(folder, tree(folder))
    (folder / "data.json").unlink()
    check_data(folder, tree(folder))
    (folder / "data.json").write_text("[")
    check_data(folder, tree(folder))
