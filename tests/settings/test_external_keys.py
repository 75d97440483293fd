"""A key of another library is answered with ours."""

import json
import re

import pytest

from mmrl.config import load
from mmrl.errors import UserError
from tests.helpers.command_line import ROOT
from tests.house.test_pages import KEY, known  # noqa: F401  a fixture

TABLE = json.loads((ROOT / "mmrl" / "settings" / "external_keys.json").read_text())


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("rollout.num_generations=8", "num_generations of TRL is rollout.group_size here"),
        ("optim.learning_rate=1e-5", "learning_rate of transformers is optim.lr here"),
        ("algorithm.kl_coef=0.01", "kl_coef of verl is algorithm.terms=[{type: kl, coefficient: 0.001}] here"),
        ("rollout.max_completion_length=64", "max_completion_length of TRL is rollout.max_response_length here"),
        ("per_device_train_batch_size=4", "per_device_train_batch_size of TRL is engine.micro_batch here"),
    ],
)
def test_an_override_of_another_library(override, answer):
    with pytest.raises(UserError) as error:
        load("visual_qa_digits", [override])
    assert str(error.value).endswith(f"unknown key {override.partition('=')[0]}; {answer}")


def test_a_key_of_a_file(tmp_path):
    (tmp_path / "mine.yaml").write_text("extends: visual_qa_digits\nevaluation: {eval_steps: 5}\n")
    with pytest.raises(UserError, match="unknown key evaluation.eval_steps; eval_steps of transformers is eval"):
        load(tmp_path / "mine.yaml")


def test_our_own_keys_are_not_taken_for_theirs():
    with pytest.raises(UserError, match=r"unknown key rollout.group_siz; did you mean rollout.group_size\?"):
        load("visual_qa_digits", ["rollout.group_siz=4"])


def test_every_answer_names_keys_that_exist(known):  # noqa: F811
    assert len(TABLE) > 140
    for key, (library, ours, *_) in TABLE.items():
        assert library and ours, key
        words = " ".join(f"`{word}`" for word in re.split(r"[^a-z_.]+", ours))
        assert [name for name in KEY.findall(words) if name not in known] == [], key
