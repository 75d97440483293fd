"""Places that are filled at once where the model is sure (unmasking.threshold), and the reward tokens_per_forward."""

import pytest
import torch

from mmrl.errors import UserError
from mmrl.rewards import RewardSet
from mmrl.rewards.settings import RewardSpec
from tests.policies.discrete_diffusion.parts import PROMPT, Exact, forget_end, policy_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("threshold")


def drawn(policy, temperature=0.0):
    return policy._sample([policy.layout.encode(PROMPT)], [0], temperature)[0]


def test_all_places_that_are_likely_enough_are_filled_at_once(folder):
    """Step by step by hand, for the most likely tokens: the surest place, and all above the threshold."""
    table = Exact(forget_end(policy_of(folder, length=4)), 4).table([None] * 4).exp().max(-1).values
    threshold = float(table.sort().values[1:3].mean())  # two of four are above it
    policy = forget_end(policy_of(folder, length=4, unmasking={"threshold": threshold}))
    record, exact, written = drawn(policy), Exact(policy, 4), [None] * 4
    for number in range(4):
        chance, token = exact.table(written).exp().max(-1)
        opened = torch.tensor([k is None for k in written])
        if not opened.any():
            break
        now = opened & (chance >= threshold)
        now[chance.where(opened, -1.0).argmax()] = True
        for place in now.nonzero().flatten().tolist():
            assert record.steps[place] == number and record.response[place] == token[place]
            written[place] = int(token[place])
    assert not any(k is None for k in written) and record.steps.max() < 3
    assert (
        policy.layout.sample(PROMPT, record, torch.ones(4, dtype=torch.bool), policy._forwards).forwards
        == int(record.steps.max()) + 1
    )


def test_blocks_wait_for_one_another_and_what_is_done_stays(folder):
    policy = forget_end(policy_of(folder, length=6, unmasking={"threshold": 1e-9, "block": 2}))
    batch = policy.rollout([PROMPT], 6, list(range(6)))
    assert {tuple(record.steps.tolist()) for record in batch.inputs} == {(0, 0, 2, 2, 4, 4)}
    assert [sample.forwards for sample in batch.samples] == [3] * 6
    never = forget_end(policy_of(folder, length=6, unmasking={"threshold": 1.0, "block": 2}, build=False))
    assert [sample.forwards for sample in never.rollout([PROMPT], 2, [1, 2]).samples] == [6, 6]


def test_a_trace_with_fewer_steps_is_replayed_as_it_was_drawn(folder):
    policy = forget_end(policy_of(folder, length=3, unmasking={"threshold": 1e-9, "likelihood": "trace"}))
    batch = policy.rollout([PROMPT], 4, [1, 2, 3, 4])
    with torch.no_grad():
        found = policy.replay(batch, policy.module).logp.double()
        assert torch.equal(found, policy.replay(batch, policy.module).logp.double())
    at_once = Exact(policy, 3).table([None] * 3)
    expected = torch.stack([at_once[range(3), record.response.tolist()] for record in batch.inputs])
    torch.testing.assert_close(found, expected, rtol=0, atol=3e-5)


def test_tokens_per_forward_is_a_reward_of_speed(folder):
    reward = RewardSet([RewardSpec(name="tokens_per_forward")])
    fast = policy_of(folder, length=4, unmasking={"threshold": 1e-9}).rollout([PROMPT], 2, [1, 2])
    slow = policy_of(folder, length=4).rollout([PROMPT], 2, [1, 2])
    for batch, forwards in ((fast, 1), (slow, 4)):
        lengths = [sample.response_length / forwards for sample in batch.samples]
        assert reward.score(batch.samples, batch.group)[:, 0].tolist() == lengths
    noisy = policy_of(folder, length=4, type="uniform_diffusion", noising={"steps": 2}).rollout([PROMPT], 1, [1])
    assert noisy.samples[0].forwards == 2


def test_a_threshold_is_a_probability(folder):
    with pytest.raises(UserError, match="unmasking.threshold"):
        policy_of(folder, unmasking={"threshold": 1.5})
