"""Input that can not be used: one line that says what to change, exit code 2, and the run directory stays as it was."""

import hashlib
import json
import subprocess
import sys

import pytest
from PIL import Image
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from mmrl.checkpoints import files
from mmrl.config import load
from mmrl.settings import plain
from mmrl.tasks.visual_qa.tiny import model as tiny_model
from tests.helpers.command_line import GRPO, ROOT, TINY, WARM_START, Result, mmrl


@pytest.fixture
def run(tmp_path):
    """A run directory in which something precious lies, but no run."""
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "notes.txt").write_text("precious")
    return folder


@pytest.fixture
def refused(run, tmp_path):
    """What a command says that must be refused with `run` left as it was."""

    def refuse(*arguments, command="train", writes=False, **environment):
        before = contents(run)
        first = [command, WARM_START] if command == "train" else [command, tmp_path / "model", WARM_START]
        result = mmrl(tmp_path, *first, *TINY, f"run_dir={run}", *arguments, **environment)
        after = contents(run)
        assert before.items() <= after.items()
        if not writes:
            assert after == before
        return one_line(result)

    return refuse


def contents(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def one_line(result: Result) -> str:
    assert result.code == 2, result
    assert len(result.err.splitlines()) == 1, result.err
    assert result.err.startswith("mmrl: ") and "Traceback" not in result.out + result.err
    return result.err.strip()


def test_the_real_command_line_refuses_a_misspelt_key(tmp_path):
    command = [sys.executable, "-m", "mmrl", "train", WARM_START, "rollout.promts=3", f"run_dir={tmp_path / 'run'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    message = one_line(Result(done.returncode, done.stdout, done.stderr))
    assert "unknown key rollout.promts; did you mean rollout.prompts?" in message
    assert not (tmp_path / "run").exists()


def test_the_real_command_line_ends_in_order_after_a_late_error(tmp_path):
    """The engine runs by then: its threads must neither hide the message nor change the exit code."""
    command = [sys.executable, "-m", "mmrl", "train", WARM_START, *TINY, f"run_dir={tmp_path / 'run'}"]
    done = subprocess.run(
        [*command, "rollout.max_prompt_length=3"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    message = one_line(Result(done.returncode, done.stdout, done.stderr))
    assert "prompt digits-heldout-0-0 has" in message and "rollout.max_prompt_length=3" in message


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["optim.lrr=1"], "optim.lrr; did you mean optim.lr?"),
        (["steps"], "override 'steps'"),
        ([*GRPO, "rollout.group_size=1"], "rollout.group_size=1"),
        ([*GRPO, "algorithm.minibatches=5"], "algorithm.minibatches=5"),
        (["task.type=visual_q"], "task.type=visual_q is unknown (did you mean visual_qa?); use one of visual_qa"),
        (["task.type=mmrl.tasks.visual_qa:bild"], "task.type=mmrl.tasks.visual_qa:bild"),
        (["task.type=:build"], "task.type=:build"),
        (["task.type=mmrl.rewards.settings:RewardSpec"], "does not inherit from mmrl.tasks.settings:TaskSettings"),
        (["task.typ=x"], "unknown key task.typ; did you mean task.type?"),
        (["task.data.train_sizes=1"], "unknown key task.data.train_sizes; did you mean task.data.train_size?"),
        (["task.data.cells=9"], "cells must be"),
        (["task.rewards=[{name: exact_mach}]"], "unknown reward 'exact_mach' (did you mean 'exact_match'?)"),
        (["task.rewards=[{name: exact_match, wait: 2}]"], "wait"),
        (["model.build=null"], "model.path is not set"),
        (["model.build=null", "model.path=./nowhere"], "model.path=./nowhere: there is no such folder; a name on the"),
        (["model.build=null", "model.path=runs/a/final"], "model.path=runs/a/final: there is no such folder"),
        (  # before the data set is downloaded
            [
                "task.data={type: huggingface, name: user/questions, train_split: a, eval_split: b}",
                "model.build=null",
                "model.path=/nowhere",
            ],
            "model.path=/nowhere: there is no such folder",
        ),
        (["model.build=tasks.visual_qa.tiny_model:bild"], "model.build=tasks.visual_qa.tiny_model:bild"),
        (["model.freeze=[vision, connector, language]"], "model.freeze leaves no parameter to train"),
        ([*GRPO, "algorithm.surrogate.cap=2"], "unknown key algorithm.surrogate.cap; valid keys: type, low, high"),
        ([*GRPO, "algorithm.surrogate=divergence_mask"], "algorithm.surrogate.bound: Field required"),
        ([*GRPO, "algorithm.surrogate=tests.cli.test_bad_input:contents"], "does not inherit from"),
        ([*GRPO, "algorithm.type=tests.cli.test_bad_input:Nowhere"], "tests.cli.test_bad_input has no Nowhere"),
        (["algorithm.type=contrast"], "algorithm.type=contrast needs decisions that are errors"),
        (["checkpoint.resume=true"], "checkpoint.resume=true"),
        (["model.lora.targets=[nowhere]"], "nowhere"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_refused_before_anything_is_written(refused, arguments, named):
    assert named in refused(*arguments)


def test_prompts_that_ranks_can_not_share(refused):
    message = refused(WORLD_SIZE="3", RANK="0")
    assert "rollout.prompts=8" in message and "3 ranks" in message


def test_a_configuration_file_that_is_not_there(tmp_path):
    assert "none.yaml" in one_line(mmrl(tmp_path, "train", tmp_path / "none.yaml"))


# --- questions of one's own ---


def questions(tmp_path, *lines):
    Image.new("RGB", (16, 16)).save(tmp_path / "good.png")
    (tmp_path / "torn.png").write_bytes((tmp_path / "good.png").read_bytes()[:20])
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    return path


def row(**fields):
    return json.dumps({"images": ["good.png"], "problem": "<image>What?", "answer": "1"} | fields)


def own_data(tmp_path, train, evaluation=None, **options):
    """A configuration whose task reads files; the recipe's own keys of digits do not belong there."""
    data = {"type": "files", "train": str(train), "eval": str(evaluation or train)} | options
    path = tmp_path / "own.yaml"
    config = {"task": {"data": data}, "model": {"build": "mmrl.tasks.visual_qa.tiny.model:build"}, "steps": 2}
    config |= {"rollout": {"prompts": 2, "group_size": 2, "max_response_length": 4}, "run_dir": str(tmp_path / "run")}
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ("{not json", "line 3: not JSON"),
        (json.dumps({"images": ["good.png"], "problem": "<image>What?"}), "line 3: field 'answer' is missing"),
        (row(answer=" "), "line 3: field 'answer' is empty"),
        (row(images=["torn.png"]), "line 3: field 'images', image 0: cannot read"),
        (row(images=["absent.png"]), "absent.png"),
        (row(problem="<image><image>What?"), "line 3: field 'problem' has 2 <image> markers"),
        ("[1, 2]", "line 3: a row must be an object"),
    ],
)
def test_a_row_that_can_not_be_used_is_named(run, tmp_path, bad, named):
    path, before = questions(tmp_path, row(), "", bad, row()), contents(run)
    message = one_line(mmrl(tmp_path, "train", own_data(tmp_path, path)))
    assert f"{path}: 1 of 3 rows cannot be used" in message and f"{path}, line 3: " in message and named in message
    assert contents(run) == before


def test_rows_within_the_allowed_share_are_left_out(tmp_path):
    path = questions(tmp_path, row(), "{not json", row(), row())
    result = mmrl(tmp_path, "train", own_data(tmp_path, path, max_bad_share=0.25), "threads=1", "steps=1")
    assert result.code == 0
    assert f"{path}: 1 of 4 rows cannot be used and are left out:" in result.out
    assert f"{path}, line 2: not JSON" in result.out


def test_files_that_are_not_there_or_not_questions(tmp_path):
    good, other = questions(tmp_path, row()), tmp_path / "questions.csv"
    other.write_text("a,b\n")
    for path in (tmp_path / "absent.jsonl", other):
        assert str(path) in one_line(mmrl(tmp_path, "train", own_data(tmp_path, path, good)))
    config = own_data(tmp_path, good)
    assert "task.data" in one_line(mmrl(tmp_path, "train", config, "task.data.train=null"))


# --- models ---


def test_a_model_that_does_not_read_images(refused, tmp_path):
    config = Qwen2Config(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "text")
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "text")
    message = refused("model.build=null", f"model.path={tmp_path / 'text'}")
    assert f"model.path={tmp_path / 'text'} is a model of type qwen2" in message


@pytest.mark.parametrize("missing", ["", "config.json", "model.safetensors", "processor_config.json"])
def test_a_model_folder_that_is_not_whole(refused, tmp_path, missing):
    if missing:
        tiny_model.build(tmp_path / "model")
        (tmp_path / "model" / missing).unlink()
    assert str(tmp_path / "model") in refused("model.build=null", f"model.path={tmp_path / 'model'}")


@pytest.mark.parametrize("command", ["eval", "sample"])
def test_eval_and_sample_refuse_alike(refused, tmp_path, command):
    assert str(tmp_path / "model") in refused(command=command)
    tiny_model.build(tmp_path / "model")
    assert "rollout.max_prompt_length=3" in refused("rollout.max_prompt_length=3", command=command)
    assert sorted(tmp_path.glob("model/*.html")) == [] and not (tmp_path / "model" / "evaluation.json").exists()


# --- run directories ---


def test_a_run_is_not_overwritten(refused, run):
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    message = refused()
    assert f"run_dir={run} holds a run whose config.yaml cannot be read; name another run_dir" in message
    message = refused("checkpoint.resume=false")
    assert f"run_dir={run}" in message and "checkpoint.resume=auto" in message


def test_a_run_that_failed_at_its_first_prompt_can_be_started_again(refused, run, tmp_path):
    assert "rollout.max_prompt_length=3" in refused("rollout.max_prompt_length=3", writes=True)
    result = mmrl(tmp_path, "train", WARM_START, *TINY, f"run_dir={run}", "steps=1", "evaluation.before=false")
    assert (result.code, result.err) == (0, "")


def test_resume_with_a_changed_configuration_changes_nothing(refused, run):
    saved = load(WARM_START, [*TINY, f"run_dir={run}"])
    step = run / "checkpoints" / "step-000001"
    step.mkdir()
    (step / "trainer.json").write_text(json.dumps({"step": 1, "config": plain(saved)}))
    files.write_manifest(step, {})
    (run / "config.yaml").write_text("the old one")
    message = refused("checkpoint.resume=true", "optim.eps=0.5")
    assert "optim.eps is 0.5" in message and "1e-08" in message and str(step) in message


def test_a_run_dir_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("precious")
    result = mmrl(tmp_path, "train", WARM_START, *TINY, f"run_dir={tmp_path / 'file'}")
    assert f"run_dir={tmp_path / 'file'}" in one_line(result)
    assert (tmp_path / "file").read_text() == "precious"
