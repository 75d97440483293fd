"""What TensorBoard is told of a run, and what is said where a tracker is missing."""

import errno
import importlib.util
import io
import sys
import threading
import time
import types

import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter

from mmrl.config import load
from mmrl.errors import UserError
from mmrl.job import check_start
from mmrl.report.run import Run
from mmrl.report.settings import Log
from mmrl.rollouts import Prompt, Sample
from tests.joints.parts import GIVEN


def begun(folder, config_yaml="seed: 1\n", **log):
    return Run(folder / "run", config_yaml, writes=True, log=Log(**log))


def board(run):
    return EventAccumulator(str(run.folder / "tensorboard")).Reload()


def test_without_being_asked_for_nothing_but_the_file_is_written(tmp_path):
    run = begun(tmp_path)
    run.log(1, {"loss": 0.5})
    run.close()
    assert not (run.folder / "tensorboard").exists()


def test_tensorboard_has_metrics_and_forgets_steps_that_are_made_again(tmp_path):
    run = begun(tmp_path, tensorboard=True)
    for step in range(1, 4):
        run.log(step, {"loss": 0.5 / step})
    run.drop_after(1)
    run.log(2, {"loss": 9.0})
    run.close()
    assert [(event.step, event.value) for event in board(run).Scalars("loss")] == [(1, 0.5), (2, 9.0)]


def test_tensorboard_has_images_texts_and_hyperparameters(tmp_path):
    config = "seed: 7\noptim: {lr: 0.001, betas: [0.9, 0.99]}\nterms: [{type: kl}]\n"
    run = begun(tmp_path, config, tensorboard=True)
    drawn = [
        Sample(Prompt(str(i), "a | b\nc", answer="<1>"), "said", image=torch.full((3, 8, 8), 0.5)) for i in range(3)
    ]
    run.samples("evaluation", 5, drawn, {"accuracy": [0.25, 0.5, 1.0]})
    asked = [Sample(Prompt("q", "what?", (Image.new("RGB", (9, 9), "red"),)), "it")]
    run.samples("train", 6, asked, {})
    run.close()
    found = board(run)
    sheet = Image.open(io.BytesIO(found.Images("samples/evaluation")[0].encoded_image_string))
    assert found.Images("samples/evaluation")[0].step == 5 and sheet.size == (3 * 50, 50)
    assert sheet.getpixel((10, 10)) == (128, 128, 128)
    shown = Image.open(io.BytesIO(found.Images("samples/train")[0].encoded_image_string))
    assert found.Images("samples/train")[0].step == 6 and shown.getpixel((10, 10)) == (255, 0, 0)
    text = found.Tensors("samples/evaluation/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text.splitlines()[0] == "| prompt | answer | response | accuracy |"
    assert text.splitlines()[2] == "| a &#124; b c | &lt;1&gt; | said | 0.25 |" and len(text.splitlines()) == 2 + 3
    assert "lr: 0.001" in found.Tensors("configuration/text_summary")[0].tensor_proto.string_val[0].decode()
    session = found.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"optim.lr" in session and b"terms.0.type" in session and b"[0.9, 0.99]" in session
    assert b"evaluation/accuracy" in found.summary_metadata["_hparams_/experiment"].plugin_data.content


class Recorded:
    """Stands for a client of another library: what it was asked, in order."""

    def __init__(self, answers=None):
        self.calls, self.answers = [], answers or {}

    def __getattr__(self, name):
        def call(*arguments, **options):
            self.calls.append((name, arguments, options))
            return self.answers.get(name)

        return call


def test_trackio_gets_the_configuration_and_each_step(tmp_path, monkeypatch):
    run = Recorded()
    library = Recorded({"init": run})
    monkeypatch.setitem(sys.modules, "trackio", library)
    tracked = begun(tmp_path, "seed: 7\noptim: {lr: 0.001}\n", trackio="mine")
    tracked.log(3, {"loss": 0.5})
    tracked.close()
    given = {"name": "run", "config": {"seed": 7, "optim.lr": 0.001}, "resume": "allow", "embed": False}
    assert library.calls == [("init", (), {"project": "mine", **given})]
    assert run.calls == [("log", ({"loss": 0.5},), {"step": 3}), ("finish", (), {})]


def test_mlflow_makes_a_run_once_and_goes_on_with_it(tmp_path, monkeypatch):
    created = types.SimpleNamespace(info=types.SimpleNamespace(run_id="abc"))
    client = Recorded({"create_experiment": "5", "create_run": created})
    entities = types.SimpleNamespace(Param=lambda *values: values, Metric=lambda *values: (*values[:2], values[3]))
    monkeypatch.setitem(sys.modules, "mlflow", types.SimpleNamespace(MlflowClient=lambda: client))
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    tracked = begun(tmp_path, "seed: 7\nnames: [" + ", ".join(f"n{i}" for i in range(120)) + "]\n", mlflow="mine")
    tracked.log(3, {"loss": 0.5})
    tracked.close()
    names = [name for name, _, _ in client.calls]
    assert names == ["get_experiment_by_name", "create_experiment", "create_run", *["log_batch"] * 2, "set_terminated"]
    (_, parameters, values), (_, logged, metrics) = client.calls[3], client.calls[4]
    assert parameters == logged == ("abc",) and ("seed", "7") in values["params"]
    assert all(len(value) <= 500 for _, value in values["params"])
    assert metrics == {"metrics": [("loss", 0.5, 3)]}
    client.calls.clear()
    again = begun(tmp_path, "seed: 7\n", mlflow="mine")
    again.log(4, {"loss": 0.25})
    again.close()
    assert [name for name, _, _ in client.calls] == ["log_batch", "set_terminated"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("log.trackio=mine", r"log.trackio=mine: trackio is not installed; pip install -e '.\[trackio\]'"),
        ("log.mlflow=mine", r"log.mlflow=mine: mlflow is not installed; .*, or set log.mlflow=null"),
        (
            "log.tensorboard=true",
            r"log.tensorboard=true: tensorboard is not installed; pip install -e '.\[tensorboard\]'",
        ),
        (
            "log.wandb=mine",
            r"log.wandb=mine: wandb is not installed; pip install -e '.\[wandb\]', or set log.wandb=null",
        ),
    ],
)
def test_what_is_missing_is_said_before_anything_slow(tmp_path, monkeypatch, override, message):
    without, asked = (load(GIVEN, [f"run_dir={tmp_path}/run", *more]) for more in ([], [override]))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_start(without)
    with pytest.raises(UserError, match=message):
        check_start(asked)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_disk_that_is_full_for_tensorboard_alone_is_one_line(tmp_path, monkeypatch):
    """Its thread says nothing, and what it met is raised where the run logs; errors of other threads are printed."""
    printed = []
    monkeypatch.setattr(threading, "excepthook", lambda failed: printed.append(str(failed.exc_value)))
    run = Run(tmp_path, "a: 1\n", writes=True, log=Log(tensorboard=True))

    def full(writer, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RecordWriter, "write", full)
    with pytest.raises(UserError, match=r"run_dir=.* cannot be written: .*No space left") as caught:
        for step in range(1000):
            run.log(step, {"loss": 1.0})
            time.sleep(0.01)
    assert "\n" not in str(caught.value) and printed == []
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    assert printed == ["division by zero"]
    run.close()
