"""What the reasoning names of a report's findings, by value, from its name in a configuration."""

import math

import pytest

from mmrl.rewards import RewardSet
from mmrl.rewards.settings import RewardSpec
from mmrl.rollouts import Prompt, Sample

REPORT = {"findings": ["pleural effusion", ["cardiomegaly", "enlarged heart"]], "absent": ["pneumothorax", "mass"]}


def scored(response, metadata=REPORT, **options):
    made = RewardSet([RewardSpec(name="findings_named", options=options)])
    prompt = Prompt("p", "What is it?", answer="A", metadata=metadata)
    (value,) = made.score([Sample(prompt, response=response)])[:, 0].tolist()
    return value


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think>A pleural effusion; an enlarged heart.</think><answer>A</answer>", 1.0),
        ("<think>A Pleural\n  Effusion.</think><answer>A</answer>", 0.5),
        ("<think>Cardiomegaly, enlarged heart</think>", 0.5),  # one finding in two ways
        ("<think>pleural effusions</think>", 0.0),  # another word
        ("<think>nothing</think> pleural effusion", 0.0),  # said after the reasoning
        ("pleural effusion", 0.0),
        ("<think>pleural effusion", 0.5),  # cut off
    ],
)
def test_the_share_of_findings_that_are_named(response, expected):
    assert scored(response) == expected


def test_what_is_invented_counts_against_it():
    """One of two, beside one that is not there: 1 / 3; beside two 1 / 4."""
    assert scored("<think>pleural effusion, a mass</think>", absent="absent") == pytest.approx(1 / 3)
    assert scored("<think>pleural effusion, mass, pneumothorax</think>", absent="absent") == 0.25
    assert scored("<think>pleural effusion, a massive one</think>", absent="absent") == 0.5
    assert scored("<think>pleural effusion, a mass</think>") == 0.5


LUNG = {"findings": ["edema", "effusion"]}
DENIALS = [
    ("No edema. No effusion.", 0),
    ("No edema or effusion.", 0),
    ("No edema, effusion or mass", 0),
    ("no evidence of pulmonary edema; there is an effusion", 1),
    ("no edema, but an effusion", 1),
    ("No edema, an effusion is seen.", 1),
    ("Edema without effusion", 1),
    ("An effusion, without signs of edema", 1),
    ("The lung is free of edema and effusion", 0),
    ("Edema was ruled out; effusion is absent", 0),
    ("We can rule out edema. An effusion remains.", 1),
    ("negative for edema", 0),
    ("edema is not seen, effusion is", 1),
    ("Neither edema nor effusion", 0),
    ("I don't see edema", 0),
    ("edema: none, effusion: present", 1),
    ("absence of edema", 0),
    ("Edema cannot be ruled out", 1),
    ("not only edema, but an effusion", 2),
    ("There is no doubt: edema and effusion", 2),
    ("No change in the effusion", 1),
    ("The heart is not enlarged. Edema and effusion.", 2),
    ("No edema on the left. Edema on the right.", 1),
    ("Edema and effusion are present", 2),
]


@pytest.mark.parametrize(("thought", "named"), DENIALS)
def test_what_is_denied_is_not_named(thought, named):
    assert scored(f"<think>{thought}</think>", metadata=LUNG) == named / 2


def test_a_denied_finding_that_is_absent_is_not_invented():
    thought = "A pleural effusion and cardiomegaly; no pneumothorax, and a mass is not seen"
    assert scored(f"<think>{thought}</think>", absent="absent") == 1.0


def test_the_whole_response_may_count():
    assert scored("cardiomegaly", everywhere=True) == 0.5


def test_a_prompt_without_findings_is_not_scored():
    assert math.isnan(scored("<think>cardiomegaly</think>", metadata={}))
