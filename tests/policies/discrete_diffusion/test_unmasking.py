"""Which places are filled in which step: the schedule, and the orders confidence, entropy, random and left_to_right."""

import pytest
import torch

from mmrl.policies.discrete_diffusion.schedule import UnmaskingStep, schedule
from mmrl.policies.discrete_diffusion.settings import Confidence, LeftToRight, LowEntropy, RandomOrder
from tests.policies.discrete_diffusion.parts import PROMPT, Exact, forget_end, policy_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("masked")


def test_a_schedule_fills_every_place_once():
    assert schedule(3) == [UnmaskingStep(0, 3, 1)] * 3
    assert schedule(5, 2) == [UnmaskingStep(0, 5, 3), UnmaskingStep(0, 5, 2)]
    assert schedule(5, 3, 3) == [UnmaskingStep(0, 3, 2), UnmaskingStep(0, 3, 1), UnmaskingStep(3, 5, 2)]
    for length, steps, block in ((7, 7, 2), (9, 4, 3), (8, 8, 1), (6, 1, None)):
        found = schedule(length, steps, block)
        assert len(found) == steps and sum(step.number for step in found) == length
        assert all(step.number > 0 for step in found)


def test_orders_by_hand():
    chosen, entropy = torch.tensor([[-0.1, -2.0, -1.0]]), torch.tensor([[1.5, 0.2, 0.7]])
    chance = torch.tensor([[0.3, 0.1, 0.9]])
    found = {
        order.type: order.scores(chosen, entropy, chance).argsort(descending=True)[0].tolist()
        for order in (Confidence(), LowEntropy(), RandomOrder(), LeftToRight())
    }
    assert found == {
        "confidence": [0, 2, 1],
        "entropy": [1, 2, 0],
        "random": [2, 0, 1],
        "left_to_right": [0, 1, 2],
    }


def test_the_surest_place_is_filled_first_from_what_was_written_before(folder):
    """Step by step by hand, for the most likely tokens."""
    policy = forget_end(policy_of(folder, length=4))
    policy.evaluation_temperature = 0.0
    policy.respond([PROMPT], [0])
    record = policy._sample([policy.layout.encode(PROMPT)], [0], 0.0)[0]
    exact, written = Exact(policy, 4), [None] * 4
    for number in range(4):
        table = exact.table(written)
        best, token = table.max(-1)
        best[[k for k in range(4) if written[k] is not None]] = -torch.inf
        place = int(best.argmax())
        assert record.steps[place] == number and record.response[place] == token[place]
        written[place] = int(token[place])
    assert policy.layout.vocabulary.mask not in record.response


def test_blocks_are_filled_one_after_the_other(folder):
    policy = policy_of(folder, length=6, unmasking={"block": 2, "steps": 6, "order": "random"})
    for record in policy.rollout([PROMPT], 8, list(range(8))).inputs:
        assert record.steps.view(3, 2).sort(1).values.tolist() == [[0, 1], [2, 3], [4, 5]]
    together = policy_of(folder, length=6, unmasking={"steps": 2, "order": "left_to_right"})
    assert together.rollout([PROMPT], 1, [0]).inputs[0].steps.tolist() == [0, 0, 0, 1, 1, 1]


def test_a_response_depends_on_its_seed_alone(folder):
    policy = policy_of(folder, length=5)
    longer = type(PROMPT)("other", "99+99=", answer="198")
    both = policy.rollout([PROMPT, longer], 2, [11, 12, 13, 14]).inputs
    alone = policy.rollout([PROMPT], 1, [12]).inputs[0]
    assert torch.equal(alone.response, both[1].response) and torch.equal(alone.steps, both[1].steps)
    assert len({tuple(policy.rollout([PROMPT], 1, [s]).inputs[0].response.tolist()) for s in range(8)}) > 4
