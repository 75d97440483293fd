"""What a part says that it needs is checked where it says it, and what it lacks is named where it reads it."""

import pytest
import torch

from mmrl.protocols.checks import noting_columns
from mmrl.protocols.requirements import Needs, Reference
from mmrl.rollouts import Prompt, Replay, Rollouts, Sample
from mmrl.settings import SettingsError

WRONG = [
    ({"reference": True}, r"Needs\(reference=True\): write Needs\(reference=Reference\(\)\).* micro.ref_logp"),
    ({"statistics": {"entropy"}}, r"Needs\(statistics=\{'entropy'\}\): write it as frozenset\(\{...\}\)"),
    ({"statistics": frozenset({"entropi"})}, "unknown 'entropi'; there are entropy, logp, square_sum"),
    ({"measurements": [1]}, r"Needs\(measurements=\[1\]\): write it as a tuple"),
    ({"measurements": (Reference,)}, "Reference.* is not an object of a class that inherits from CollectedMeasurement"),
]


@pytest.mark.parametrize(("given", "message"), WRONG)
def test_needs_of_a_wrong_type_are_refused_by_name(given, message):
    with pytest.raises(SettingsError, match=message):
        Needs(**given)


def test_a_reference_is_needed_by_its_class():
    assert Needs(reference=Reference()).reference == Reference()


def test_an_error_of_a_part_names_the_part_and_the_columns_that_there_are():
    micro = Rollouts([Sample(Prompt("id", "?"))], [None], torch.zeros(1, dtype=torch.long), torch.ones(1, 2).bool())
    replay = Replay(logp=torch.zeros(1, 2))
    with pytest.raises(TypeError) as raised, noting_columns("algorithm.terms.0 (a:B)", micro=micro, replay=replay):
        replay.logp - micro.ref_logp
    (note,) = raised.value.__notes__
    assert note == (
        "raised in algorithm.terms.0 (a:B). micro has samples, inputs, group, mask, extras; replay has logp, extras. "
        "Other columns are None unless the part's needs ask for them: Needs(reference=Reference()) gives ref_logp, "
        'Needs(statistics=frozenset({"entropy"})) gives old_entropy'
    )


def test_a_reference_that_is_reset_or_follows_the_policy_moves():
    assert [Reference(**options).moves for options in ({}, {"resets": {5}}, {"decays": {0.9}})] == [False, True, True]
