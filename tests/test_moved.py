"""Former names of modules and classes: none works, each names the present one, and `mmrl convert` writes it."""

import importlib
import json

import pytest

from mmrl import moved
from mmrl.cli.main import main
from mmrl.settings import SettingsError, locate
from tests.helpers.command_line import ROOT
from tests.house.layout import modules as present

MODULES = present()
# Folders are called today as modules were; what was in those is told by the classes and by what is not there.
BOTH = {
    "mmrl.algorithms.baselines",
    "mmrl.algorithms.preference",
    "mmrl.algorithms.surrogates",
    "mmrl.cli",
    "mmrl.collection",
    "mmrl.evaluation",
    "mmrl.generation.vllm",
    "mmrl.policies.vla.heads",
    "mmrl.protocols",
    "mmrl.rewards.judges",
    "mmrl.sims.vector",
}
TABLES = json.loads((ROOT / "mmrl" / "moved.json").read_text())


def test_every_present_name_is_one():
    assert len(TABLES["modules"]) > 240 and len(TABLES["classes"]) > 130
    modules = {name for name in TABLES["modules"].values() if "," not in name}
    assert modules - MODULES.keys() == set()
    assert MODULES.keys() & TABLES["modules"].keys() <= BOTH
    for name in TABLES["classes"].values():
        module, _, member = name.partition(":")
        assert f"class {member}" in MODULES[module].read_text(), name


@pytest.mark.parametrize(
    "name", ["mmrl.needs", "mmrl.terms.old_kl", "mmrl.tasks.visual_qa.tiny_model", "mmrl.sims.vector.vector"]
)
def test_an_import_names_what_is_there_now(name):
    new = moved.current_name(name)
    with pytest.raises(ModuleNotFoundError) as error:
        importlib.import_module(name)
    assert str(error.value) == (f"{name} is {new} now" if new else f"No module named '{name}'")
    assert (new is None) == (name == "mmrl.sims.vector.vector")


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        ("mmrl.rollouts:Clip", "mmrl.rollouts has no Clip; it is mmrl.rollouts:Video now"),
        ("mmrl.algorithms.clips:LogClip", "mmrl.algorithms.clips is mmrl.algorithms.surrogates.clips now"),
        (
            "mmrl.algorithms.surrogates:Clip",
            "mmrl.algorithms.surrogates has no Clip; it is mmrl.algorithms.surrogates.surrogate:Clip now",
        ),
        (
            "mmrl.algorithms.grouped:NoScale",
            "mmrl.algorithms.grouped has no NoScale; it is mmrl.algorithms.scales.scale:NoScale now",
        ),
        ("mmrl.rollouts:Clap", "mmrl.rollouts has no Clap"),
    ],
)
def test_a_configuration_that_names_one_is_told(target, hint):
    with pytest.raises(SettingsError) as error:
        locate(target, "a.key")
    assert str(error.value) == f"a.key={target}: no such object ({hint}); expected package.module:name"


def test_so_is_a_module_of_the_user_s_own(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "former_class.py").write_text("from mmrl.schedules.schedule import Control\n")
    with pytest.raises(SettingsError, match=r"; it is mmrl\.schedules\.schedule:Schedule now\); expected"):
        locate("former_class:Mine", "a.key")
    (tmp_path / "former_module.py").write_text("from mmrl.controls import number\n")
    with pytest.raises(SettingsError, match=r"\(mmrl\.controls is mmrl\.schedules\.schedule now\); expected"):
        locate("former_module:Mine", "a.key")


def test_a_former_file_is_written_anew_comments_and_all(tmp_path, capsys):
    (tmp_path / "near.yaml").write_text("steps: 1\n")
    (tmp_path / "former.yaml").write_text(
        "# mine\nextends: visual_qa_digits.yaml\nmodel:\n  warm_start: near.yaml  # beside it\n"
        'task: {rewards: [{name: "mmrl.tasks.image_generation.checker:ShapesChecked"}, {name: "my:reward"}]}\n'
    )
    with pytest.raises(SystemExit) as ended:
        main(["convert", str(tmp_path / "former.yaml"), "--out", str(tmp_path / "now.yaml")])
    assert ended.value.code == 0 and "written to" in capsys.readouterr().out
    assert (tmp_path / "now.yaml").read_text() == (
        "# mine\nextends: visual_qa_digits\nmodel:\n  warm_start: near.yaml  # beside it\n"
        'task: {rewards: [{name: "mmrl.tasks.image_generation.rewards.checker:ShapesChecked"}, {name: "my:reward"}]}\n'
    )


@pytest.mark.parametrize(("text", "said"), [("- a\n", "expected a mapping"), ("a: [\n", "not valid YAML")])
def test_a_file_that_is_no_configuration_is_named(tmp_path, capsys, text, said):
    (tmp_path / "former.yaml").write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["convert", str(tmp_path / "former.yaml")])
    assert ended.value.code == 2 and said in capsys.readouterr().err
