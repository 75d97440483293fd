"""Recipes by name, where their runs go, and what they say of other recipes."""

from pathlib import Path

import pytest

from mmrl.config import load
from mmrl.errors import UserError
from mmrl.settings import plain, recipes
from tests.helpers.command_line import ROOT

RUN = "threads: 1\n"


def test_every_recipe_has_a_name_of_its_own():
    assert len(recipes.shipped()) == len(list((ROOT / "configs").rglob("*.yaml"))) > 90


@pytest.mark.parametrize(
    ("path", "folder"),
    [
        ("configs/vlm/visual_qa_digits.yaml", "runs/vlm/visual_qa_digits"),
        ("/elsewhere/configs/warm_starts/vla/arm.yaml", "runs/warm_starts/vla/arm"),
        ("arm.yaml", "runs/arm"),
        ("/elsewhere/mine/arm.yaml", "runs/arm"),
    ],
)
def test_a_run_goes_where_its_recipe_lies(path, folder, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert recipes.run_dir(Path(path)) == folder


def test_a_recipe_is_loaded_by_its_name_and_what_is_given_wins(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    named = load("image_digits_nft")
    assert named == load(recipes.shipped()["image_digits_nft"]) and named.run_dir == "runs/digits/image_digits_nft"
    assert load("image_digits_nft", ["run_dir=here"]).run_dir == "here"
    (tmp_path / "own.yaml").write_text("extends: image_digits_nft\nsteps: 3\n")
    own = load("own.yaml")
    assert (own.run_dir, own.steps) == ("runs/own", 3)
    assert plain(own) | {"run_dir": 0, "steps": 0} == plain(named) | {"run_dir": 0, "steps": 0}
    (tmp_path / "image_digits_nft").write_text(RUN)  # a file of that name comes first
    with pytest.raises(AssertionError):
        assert load("image_digits_nft").algorithm == named.algorithm


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        (
            "configs/visual_qa_digits_random_reward.yaml",
            "; the control of a recipe is a command: mmrl control visual_qa_digits",
        ),
        ("configs/visual_qa_digits.yaml", "; the recipe of that name is {root}/configs/vlm/visual_qa_digits.yaml"),
        ("nowhere/visual_qa_digits", "; the recipe of that name is {root}/configs/vlm/visual_qa_digits.yaml"),
        ("visual_qa_digit", "; did you mean the recipe visual_qa_digits?"),
        ("nothing.yaml", ""),
    ],
)
def test_what_is_not_there_names_what_is(name, hint, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        load(name)
    shown = recipes.shipped()["visual_qa_digits"].parents[2]
    assert str(error.value) == f"no configuration file {name}" + hint.format(root=shown)


def test_a_warm_start_is_seen_from_the_file_that_names_it(monkeypatch, tmp_path):
    """Also where a file of another folder extends that one, and by its name alone."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "first.yaml").write_text(RUN)
    (tmp_path / "base" / "second.yaml").write_text("model: {warm_start: first.yaml}\n")
    (tmp_path / "third.yaml").write_text("extends: base/second.yaml\n")
    assert load(tmp_path / "third.yaml").model.warm_start == str(tmp_path / "base" / "first.yaml")
    other = load(tmp_path / "third.yaml", ["model.warm_start=third.yaml"])  # as seen from the recipe
    assert other.model.warm_start == str(tmp_path / "third.yaml")
    whole = load(tmp_path / "third.yaml", ["model={type: vision_language, warm_start: third.yaml}"])
    assert whole.model.warm_start == str(tmp_path / "third.yaml")
    (tmp_path / "third.yaml").write_text("model: {warm_start: '${oc.env:BASE_OF_THIRD}'}\n")
    for name in ("base/first.yaml", str(tmp_path / "base" / "first.yaml")):
        monkeypatch.setenv("BASE_OF_THIRD", name)
        assert load(tmp_path / "third.yaml").model.warm_start == str(tmp_path / "base" / "first.yaml")
    name = "visual_qa_digits_warm_start"
    (tmp_path / "third.yaml").write_text(f"model: {{warm_start: {name}}}\n")
    assert load(tmp_path / "third.yaml").model.warm_start == name
    (tmp_path / name).write_text(RUN)  # a file of that name comes first
    assert load(tmp_path / "third.yaml").model.warm_start == str(tmp_path / name)
