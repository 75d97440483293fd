"""Planted misconfigurations and controls: each writes its files, and a configuration that is read or is the fault."""

from collections import Counter

import pytest

from mmrl.config import load
from mmrl.errors import UserError
from tests.checks.misconfigurations.cases import CONTROLS, EVERY, PLANTED
from tests.checks.misconfigurations.parts import Case, Written, named_by, row


def test_there_are_sixty_of_three_kinds_of_user():
    assert Counter(case.user for case in PLANTED) == {"questions": 26, "generation": 16, "robots": 18}
    assert {case.user for case in CONTROLS} == {"questions", "generation", "robots"} and len(CONTROLS) >= 10
    assert len({case.name for case in EVERY}) == len(EVERY)


def test_at_least_half_are_after_public_threads():
    public = [case for case in PLANTED if case.source != "own"]
    assert 2 * len(public) >= len(PLANTED)
    assert all(case.source.startswith("https://github.com/") for case in public)


def test_a_case_says_what_has_to_be_named_and_a_control_nothing():
    assert all(case.must_name and case.severity in ("refused", "warned") for case in PLANTED)
    assert not any(case.must_name or case.severity != "sound" for case in CONTROLS)


@pytest.mark.parametrize("case", EVERY, ids=lambda case: f"{case.user}-{case.name}")
def test_it_writes_its_files_and_its_configuration_is_read_unless_the_fault_is_there(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    config, overrides = case.write(tmp_path)
    assert config.parent == tmp_path and config.is_file()
    if case.in_config:
        with pytest.raises(UserError):
            load(config, [*overrides])
    else:
        load(config, [*overrides])


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("train.jsonl, line 1: field 'answer' is empty", True),
        ("train:1 has no answer", True),
        ("train.jsonl, line 12: field 'answer' is empty", False),
        ("line 1 is fine\nfield 'answer' is empty", False),
    ],
)
def test_a_line_names_a_row_and_not_another_of_which_it_is_the_beginning(message, named):
    case = Case("of_one_row", "questions", lambda folder: Written(folder), ("answer", row(1)))
    assert named_by(case, message) == named
