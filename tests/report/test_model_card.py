"""A run as a repository of a hub: its card says what was reached and how to load it, its weights load again."""

import json

import huggingface_hub
import pytest
import yaml

from mmrl.cli.main import main
from mmrl.errors import UserError
from mmrl.report.model_card import upload, write_repository

CONFIG = """run_dir: runs/mine
seed: 3
steps: 20
model: {type: vision_language, path: org/base-model}
task:
  type: visual_qa
  rewards:
  - {name: exact_match, weight: 2.0}
algorithm: {type: grpo}
"""
FILES = ["README.md", "config.json", "model.safetensors", "run_config.yaml", "run_versions.json"]
ROWS = [
    {"step": 0, "time": 10.0, "evaluation/accuracy": 0.25, "evaluation/standard_error": 0.02, "evaluation/n": 9.0},
    {"step": 20, "time": 70.0, "loss": 1.0},
    {"step": 20, "time": 71.0, "evaluation/accuracy": 1.0, "evaluation/standard_error": 0.0, "evaluation/n": 8.0},
]
COMMAND = ["mmrl", "eval", "runs/mine", "seed=4"]


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "mine"
    (folder / "final").mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "versions.json").write_text(json.dumps({"mmrl": "0.1.0", "torch": "2.13.0"}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "end.json").write_text(json.dumps({"state": "finished", "sentence": "It reached its end, step 20."}))
    for name in ("config.json", "model.safetensors", "manifest.json"):
        (folder / "final" / name).write_text(name)
    return folder


def ends_well(*arguments):
    with pytest.raises(SystemExit) as ending:
        main(["push", *map(str, arguments)])
    return ending.value.code == 0


def card(folder):
    _, head, body = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(head), body


def test_a_card_holds_what_hubs_and_readers_look_for(run, tmp_path):
    names = write_repository(run, "me/reader", tmp_path / "out")
    assert names == FILES
    assert (tmp_path / "out/model.safetensors").read_text() == "model.safetensors"
    head, body = card(tmp_path / "out")
    assert head == {
        "tags": ["mmrl", "reinforcement-learning", "grpo"],
        "library_name": "transformers",
        "base_model": "org/base-model",
    }
    assert body.startswith(
        "\n# reader\n\nThe weights of `final/`. mine trains a vision-language model (org/base-model)"
    )
    # 0.25 is a mean of 9 scores, +- 2.306 * 0.02 (Student's t); all 8 of 8 are right, Wilson: 8 / (8 + 1.96^2)
    table = "| held out | step 0 | step 20 |\n| --- | --- | --- |\n"
    table += "| accuracy | 0.250 (0.204 .. 0.296) | 1.000 (0.676 .. 1.000) |\n| n | 9 | 8 |\n\n## Rewards"
    assert table in body and "## Evaluations" not in body
    assert "- `exact_match`, weight 2.0" in body and "torch 2.13.0" in body and "seed: 3" in body
    assert "model = AutoModelForImageTextToText.from_pretrained('me/reader')" in body


def test_evaluations_of_prompts_and_of_episodes_have_intervals(run, tmp_path):
    rates = {"success": 0.5, "low": 0.3, "high": 0.72, "episodes": 16}
    lines = [
        {"command": COMMAND, "protocol": {}, "metrics": {**ROWS[0], "evaluation/unscored": 0.0}},
        {"command": COMMAND[:3], "protocol": {}, "found": {"greedy": {"lift": rates}, "sampled": {"push": rates}}},
    ]
    (run / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_repository(run, "me/reader", tmp_path / "out")
    table = card(tmp_path / "out")[1].partition("## Evaluations\n\n")[2].partition("\n\n")[0].splitlines()
    assert table == [
        "| command | measured | held out (95 % interval) |",
        "| --- | --- | --- |",
        "| `mmrl eval runs/mine seed=4` | accuracy on 9 prompts | 0.250 (0.204 .. 0.296) |",
        "| `mmrl eval runs/mine` | lift, greedy, 16 episodes | 0.500 (0.300 .. 0.720) |",
        "| `mmrl eval runs/mine` | push, sampled, 16 episodes | 0.500 (0.300 .. 0.720) |",
    ]
    (run / "evaluations.jsonl").write_text(json.dumps(lines[0]) + "\n{")
    with pytest.raises(UserError, match="evaluations.jsonl, line 2 is not JSON: Expecting .*; remove the line"):
        write_repository(run, "me/reader", tmp_path / "damaged")


@pytest.mark.parametrize(
    ("file", "library", "line"),
    [
        ("model_index.json", "diffusers", "pipe = DiffusionPipeline.from_pretrained('me/reader')"),
        ("pytorch_lora_weights.safetensors", "diffusers", "pipe.load_lora_weights('me/reader')"),
        ("adapter_config.json", "peft", "model = PeftModel.from_pretrained(base, 'me/reader')"),
    ],
)
def test_the_library_is_read_from_the_folder(run, tmp_path, file, library, line):
    (run / "final" / file).write_text("{}")
    write_repository(run, "me/reader", tmp_path / "out")
    head, body = card(tmp_path / "out")
    code = body.partition("```python\n")[2].partition("\n```")[0]
    assert head["library_name"] == library and code.startswith(f"from {library} import ") and code.endswith(line)
    compile(code, file, "exec")
    if "lora" in file or "adapter" in file:  # they are added to their base
        assert ".from_pretrained('org/base-model')\n" in code


def test_a_base_in_a_folder_of_this_machine_is_no_base_of_a_hub(run, tmp_path):
    (run / "config.yaml").write_text(CONFIG.replace("org/base-model", str(tmp_path)))
    write_repository(run, "me/reader", tmp_path / "out")
    assert "base_model" not in card(tmp_path / "out")[0]


def test_best_weights_and_what_is_refused(run, tmp_path):
    (run / "best").mkdir()
    (run / "best/config.json").write_text("best")
    write_repository(run, "me/reader", tmp_path / "out", best=True)
    assert (tmp_path / "out/config.json").read_text() == "best"
    with pytest.raises(UserError, match="out is not empty; name a new folder"):
        write_repository(run, "me/reader", tmp_path / "out")
    for file in (run / "final").iterdir():
        file.unlink()
    (run / "final").rmdir()
    with pytest.raises(UserError, match=r"mine has no final/: It reached its end, step 20.; add --best to push best/"):
        write_repository(run, "me/reader", tmp_path / "other")


def test_the_command_writes_a_folder_and_uploads_without_one(run, tmp_path, monkeypatch, capsys):
    assert ends_well(run, "me/reader", "--folder", tmp_path / "out")
    assert "5 files written to" in capsys.readouterr().out
    sent = {}

    class Hub:
        def create_repo(self, name, *, private, exist_ok):
            sent.update(name=name, private=private, exist_ok=exist_ok)

        def upload_folder(self, *, repo_id, folder_path, commit_message):
            sent["files"] = sorted(path.name for path in folder_path.iterdir())
            return f"https://hub/{repo_id}"

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    assert ends_well(run, "me/reader")
    assert sent.pop("files") == [
        "README.md",
        "config.json",
        "model.safetensors",
        "run_config.yaml",
        "run_versions.json",
    ]
    assert sent == {"name": "me/reader", "private": True, "exist_ok": True}
    assert "uploaded: https://hub/me/reader" in capsys.readouterr().out


def test_a_name_that_the_hub_does_not_take_is_one_line(tmp_path):
    with pytest.raises(UserError, match="^not/a/name cannot be written to the hub: Repo id must"):
        upload(tmp_path, "not/a/name", private=True)
