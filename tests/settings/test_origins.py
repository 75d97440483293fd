"""Weights of second models: a folder, a hub name, or a recipe that is run first."""

import pytest
import yaml

from mmrl import job
from mmrl.cli.check import JobCheck
from mmrl.config import load
from mmrl.errors import UserError
from mmrl.settings import recipes
from mmrl.settings.origins import RecipeNotRun, WeightsOrigin


@pytest.mark.parametrize(
    ("keys", "folder"),
    [
        ({"path": "org/model"}, "org/model"),
        ({"recipe": "image_digits_weak_base"}, "runs/warm_starts/digits/image_digits_weak_base/final"),
    ],
)
def test_weights_are_where_the_path_or_the_recipe_says(keys, folder):
    assert WeightsOrigin(**keys).folder == folder


@pytest.mark.parametrize(
    ("keys", "message"), [({}, "set path \\(a folder"), ({"path": "a", "recipe": "b"}, "not both")]
)
def test_there_is_one_origin(keys, message):
    with pytest.raises(ValueError, match=message):
        WeightsOrigin(**keys)


def test_weights_of_a_recipe_exist_once_it_has_been_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    origin = WeightsOrigin(recipe="image_digits_weak_base")
    with pytest.raises(RecipeNotRun, match="run it first: mmrl train image_digits_weak_base"):
        origin.existing()
    (tmp_path / origin.folder).mkdir(parents=True)
    assert origin.existing() == origin.folder


@pytest.mark.parametrize(
    ("recipe", "first"),
    [
        (
            "prompt_rewriting_digits",
            [("model.warm_start", "prompt_rewriting_digits_warm_start"), ("task.generator", "image_digits_weak_base")],
        ),
        (
            "image_digits_rewritten",
            [("model.warm_start", "image_digits_weak_base"), ("model.writer", "prompt_rewriting_digits_warm_start")],
        ),
    ],
)
def test_a_job_runs_the_recipes_of_all_its_models_first(recipe, first, tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(job, "finish_run", lambda key, path: ran.append((key.removesuffix(".recipe"), path)))
    job.run_warm_start(load(recipe, [f"run_dir={tmp_path}"]))
    assert [(key, path.rpartition("/")[2].removesuffix(".yaml")) for key, path in ran] == first


def test_a_check_notes_what_a_recipe_has_still_to_leave(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    findings = JobCheck("prompt_rewriting_digits", ["model.warm_start=null", "model.build=x:y"]).run()
    note = "recipe=image_digits_weak_base has not been run; run it first: mmrl train image_digits_weak_base"
    assert findings.skipped == [("data", note)] and findings.alarms == []


def test_no_shipped_recipe_names_a_folder_that_another_run_leaves():
    def texts(value):
        if isinstance(value, dict):
            return [text for item in value.values() for text in texts(item)]
        if isinstance(value, list):
            return [text for item in value for text in texts(item)]
        return [value] if isinstance(value, str) else []

    named = {name: texts(yaml.safe_load(path.read_text())) for name, path in recipes.shipped().items()}
    assert [name for name, values in named.items() if any(value.startswith("runs/") for value in values)] == []


def test_a_folder_without_a_model_is_named_by_the_key_of_the_second_model(tmp_path):
    from mmrl.build import build_task

    config = load("prompt_rewriting_digits", ["model.warm_start=null", "model.build=x:y", f"run_dir={tmp_path}"])
    missing = config.task.model_copy(
        update={"generator": config.task.generator.model_copy(update={"recipe": None, "path": str(tmp_path / "none")})}
    )
    with pytest.raises(UserError, match=r"^task\.generator\.path="):
        build_task(config.model_copy(update={"task": missing}))
