"""`mmrl push`: writes a hub repository with a run's weights and a model card, and uploads it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from mmrl.errors import UserError
from mmrl.report.html.page import number, paragraph
from mmrl.report.intervals import mean_interval
from mmrl.report.records import Row, RunRecord, read_run

# For each form of a model folder: the file by which it is recognised, the library, and the code that loads it.
FORMS = (
    (
        "adapter_config.json",
        "peft",
        "from peft import PeftModel\nfrom transformers import AutoModelForImageTextToText\n\n"
        "base = AutoModelForImageTextToText.from_pretrained({base!r})\n"
        "model = PeftModel.from_pretrained(base, {name!r})",
    ),
    (
        "pytorch_lora_weights.safetensors",
        "diffusers",
        "from diffusers import DiffusionPipeline\n\npipe = DiffusionPipeline.from_pretrained({base!r})\n"
        "pipe.load_lora_weights({name!r})",
    ),
    (
        "model_index.json",
        "diffusers",
        "from diffusers import DiffusionPipeline\n\npipe = DiffusionPipeline.from_pretrained({name!r})",
    ),
    (
        "config.json",
        "transformers",
        "from transformers import AutoModelForImageTextToText\n\n"
        "model = AutoModelForImageTextToText.from_pretrained({name!r})",
    ),
)
# Files of a run that document how its results were made; they are pushed beside the weights.
EVALUATIONS = "evaluations.jsonl"
EVIDENCE = ("config.yaml", "versions.json", EVALUATIONS)


def model_card(run: RunRecord, weights: Path, name: str) -> str:
    """Returns the README of a hub repository called `name` that holds `weights`, a folder of the run."""
    form = next((entry for entry in FORMS if (weights / entry[0]).is_file()), None)
    loading = "" if form is None else _loading(form[2].format(name=name, base=str(run.key("model.path"))))
    metadata = _metadata(run, None if form is None else form[1])
    results = [_results(run), _evaluations(run.folder / EVALUATIONS)]
    sections = [_title(run, weights, name), *results, _rewards(run), loading, _details(run)]
    return f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n\n" + "\n".join(filter(None, sections))


def _metadata(run: RunRecord, library: str | None) -> dict[str, Any]:
    """Returns the YAML metadata of a card, in the hub's terms. library: the package that loads the model."""
    metadata: dict[str, Any] = {"tags": ["mmrl", "reinforcement-learning", str(run.key("algorithm.type"))]}
    if library is not None:
        metadata["library_name"] = library
    base = run.key("model.path")
    if isinstance(base, str) and not Path(base).exists():
        metadata["base_model"] = base
    return metadata


def _title(run: RunRecord, weights: Path, name: str) -> str:
    return f"# {name.rpartition('/')[2]}\n\nThe weights of `{weights.name}/`. {paragraph(run)}\n"


def _results(run: RunRecord) -> str:
    """Returns a table of the held-out metrics before and after training; "" where nothing was evaluated."""
    if not run.evaluations:
        return ""
    first, last = run.evaluations[0], run.evaluations[-1]
    hidden = ("evaluation/response/", "evaluation/standard_error")  # the interval says the same as the standard error
    names = [name for name in last if name.startswith("evaluation/") and not name.startswith(hidden)]
    rows = [f"| {name.removeprefix('evaluation/')} | {_value(first, name)} | {_value(last, name)} |" for name in names]
    head = f"| held out | step {int(first['step'])} | step {int(last['step'])} |\n| --- | --- | --- |\n"
    return "## Results\n\nBrackets are 95 % intervals.\n\n" + head + "\n".join(rows) + "\n"


def _value(row: Row, name: str) -> str:
    """Returns a metric of an evaluation as text, the accuracy with its 95 % interval."""
    if name != "evaluation/accuracy" or not {name, "evaluation/n", "evaluation/standard_error"} <= row.keys():
        return number(row.get(name))
    low, high = mean_interval(row[name], row["evaluation/standard_error"], round(row["evaluation/n"]))
    return f"{row[name]:.3f} ({low:.3f} .. {high:.3f})"


def _evaluations(file: Path) -> str:
    """Returns a table of what `mmrl eval` measured, one row for each accuracy; "" if there is no such file.

    Raises UserError if a line of the file is not JSON.
    """
    if not file.is_file():
        return ""
    rows = []
    for number_of_line, line in enumerate(file.read_text().splitlines(), start=1):
        try:
            measured = json.loads(line)
        except ValueError as error:
            raise UserError(f"{file}, line {number_of_line} is not JSON: {error}; remove the line") from None
        rows += [f"| `{' '.join(measured['command'])}` | {what} | {value} |" for what, value in _accuracies(measured)]
    head = "| command | measured | held out (95 % interval) |\n| --- | --- | --- |\n"
    return "## Evaluations\n\n" + head + "\n".join(rows) + "\n"


def _accuracies(measured: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the accuracies of a line of evaluations.jsonl: what was measured, and the value with its interval.

    measured: has `metrics` by name or, of robots, `found`: success rates by decoding, then by task.
    """
    if "evaluation/accuracy" in measured.get("metrics", {}):
        metrics = measured["metrics"]
        yield f"accuracy on {round(metrics['evaluation/n'])} prompts", _value(metrics, "evaluation/accuracy")
    for decoding, tasks in measured.get("found", {}).items():
        for task, rates in tasks.items():
            interval = f"({rates['low']:.3f} .. {rates['high']:.3f})"
            yield f"{task}, {decoding}, {rates['episodes']} episodes", f"{rates['success']:.3f} {interval}"


def _rewards(run: RunRecord) -> str:
    rewards = [entry for entry in run.key("task.rewards", []) if isinstance(entry, dict)]
    lines = [f"- `{entry.get('name')}`, weight {entry.get('weight', 1.0)}" for entry in rewards]
    return "## Rewards\n\n" + "\n".join(lines) + "\n" if lines else ""


def _loading(code: str) -> str:
    """Returns the section on loading. code: Python code that loads the model."""
    return f"## Loading\n\n```python\n{code}\n```\n"


def _details(run: RunRecord) -> str:
    """Returns the configuration and the versions, folded."""
    versions = "\n".join(f"{package} {version}" for package, version in run.versions.items())
    folded = (("Configuration", run.config_text.strip()), ("Versions", versions))
    return "\n".join(f"<details><summary>{head}</summary>\n\n```\n{text}\n```\n\n</details>\n" for head, text in folded)


def chosen_weights(run: RunRecord, best: bool) -> Path:
    """Returns the folder of a run's final or best weights. Raises UserError if there is none yet."""
    folder = run.folder / ("best" if best else "final")
    if not folder.is_dir():
        other = "" if best or not (run.folder / "best").is_dir() else "; add --best to push best/"
        raise UserError(f"{run.folder} has no {folder.name}/: {run.ending.sentence}{other}")
    return folder


def write_repository(run_directory: Path, name: str, folder: Path, *, best: bool = False) -> list[str]:
    """Writes the files of a hub repository into `folder`, and returns their names.

    best: the best weights instead of the final ones. Raises UserError if the run has no such weights, or the folder is
    not empty.
    """
    run = read_run(run_directory)
    weights = chosen_weights(run, best)
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"--folder={folder} is not empty; name a new folder")
    shutil.copytree(weights, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("manifest.json"))
    for evidence in EVIDENCE:
        if (run.folder / evidence).is_file():
            shutil.copyfile(run.folder / evidence, folder / f"run_{evidence}")
    (folder / "README.md").write_text(model_card(run, weights, name), encoding="utf-8")
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def upload(folder: Path, name: str, *, private: bool) -> str:
    """Uploads a repository folder to the Hugging Face hub, and returns its address.

    Raises UserError with the hub's message if it refuses.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    hub = HfApi()
    try:
        hub.create_repo(name, private=private, exist_ok=True)
        return str(hub.upload_folder(repo_id=name, folder_path=folder, commit_message="Weights trained with mmrl"))
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OSError) as error:
        raise UserError(f"{name} cannot be written to the hub: {' '.join(str(error).split())}") from None
