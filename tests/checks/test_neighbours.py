"""Thirty misconfigurations beside the sixty: `mmrl check` names each in one line, by key or row."""

import pytest

from mmrl.cli.check import JobCheck
from tests.checks.misconfigurations.cases import EVERY
from tests.checks.misconfigurations.neighbours import NEIGHBOURS
from tests.checks.misconfigurations.parts import named_by


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in NEIGHBOURS])
def test_a_misconfiguration_is_named(case, tmp_path, monkeypatch):
    made = case.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    report = JobCheck(str(made.config), made.overrides).run()
    text = "\n".join(alarm.text for alarm in report.alarms)
    assert named_by(case, text), text


def test_thirty_are_planted_and_have_names_of_their_own():
    names = {case.name for case in NEIGHBOURS}
    assert len(names) == len(NEIGHBOURS) == 30 and not names & {case.name for case in EVERY}
