"""SECURITY.md: each attack names a test or a script that is there, and what runs where is what the code decides."""

import re

import pytest

from mmrl.children.listener import GREETING_S, MOST_GREETINGS
from mmrl.rewards.compose import BATCH_S, SAMPLE_S
from mmrl.rewards.registry import CONSTRUCTION_S, DEADLINE_S, ISOLATED
from mmrl.rewards.services.http import HttpReward
from mmrl.sims.turns.settings import EnvironmentSettings, Isolation
from tests.house.layout import ROOT

PAGE = (ROOT / "SECURITY.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, flags=re.M | re.S))


def rows(section: str) -> list[list[str]]:
    """Cells of the rows of a section's table, without its two heads."""
    lines = [line for line in SECTIONS[section].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


ATTACKS = rows("What was tried")


def test_there_are_many_attacks_and_none_is_told_twice():
    assert len(ATTACKS) >= 40 and len({row[0] for row in ATTACKS}) == len(ATTACKS)
    assert all(len(row) == 3 and all(row) for row in ATTACKS)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda row: row[0])
def test_what_repeats_an_attack_is_there(attack):
    file, _, test = attack[2].strip("`").partition("::")
    text = (ROOT / file).read_text()
    if test:
        assert re.search(rf"^ *def {test}\(", text, flags=re.M)
    else:
        assert (
            file.startswith("scripts/attack/") and f"python {file}" in (ROOT / "scripts/attack/README.md").read_text()
        )


def test_what_runs_where_is_as_the_code_decides():
    table = {row[0]: row for row in rows("What runs where")}
    apart = {
        name for row in table.values() if "processes of its own" in row[1] for name in re.findall("`(.+?)`", row[0])
    }
    assert apart == {*ISOLATED, "isolated"}
    assert f"a warning after {CONSTRUCTION_S:g} s (simulator: after `task.deadline_s`); after ten times" in PAGE
    environment = EnvironmentSettings.model_fields["deadline_s"].default
    assert EnvironmentSettings.model_fields["isolated"].default is None
    assert table["a reward function of yours"][2] == f"{SAMPLE_S:g} s a call, {BATCH_S:g} s a batch"
    assert table["an environment of conversations, and its tools"][2] == f"{environment:g} s a start or step"
    assert table["the reward `math`"][2] == f"{DEADLINE_S:g} s a sample"
    isolated = f"{DEADLINE_S:g} s a sample (reward), {Isolation().deadline_s:g} s a step (environment)"
    assert table["a reward or environment with `isolated`"][2] == isolated
    assert (
        table["the reward `http`, and judges behind a server"][2]
        == f"{HttpReward(url='http://x').deadline_s:g} s a request"
    )


def test_limits_of_strangers_are_those_of_the_code():
    text = " ".join(SECTIONS["What is opened"].split())
    assert f"sent away after {GREETING_S:g} seconds, and more than {MOST_GREETINGS} at once" in text
