"""Responses that go on from a beginning: the prompt is read once, what they begin with behind it, and the next token is
as likely as after the whole row."""

from dataclasses import replace

import pytest
import torch

from mmrl.generation import transformers as generation
from mmrl.generation.transformers import Prefix
from tests.helpers.tiny_models import FAMILIES
from tests.policies.conftest import PROMPTS, loaded
from tests.policies.second import Copy
from tests.policies.test_turns import conversing


@pytest.fixture(params=FAMILIES)
def policy(request, folders):
    made = loaded(folders[request.param], max_response_length=9)
    if not made.runner.shares_prompts(training=False):
        pytest.skip("its prompts are not shared")
    return made


def whole(policy, row, ids):
    """The last hidden state after a prompt and these tokens, all read in one go."""
    grown = row.without_response().extended(ids, decided=True)
    inputs = policy.runner.collate([grown], padding_side="right")
    return policy.runner.core.base_model(**inputs, use_cache=False).last_hidden_state[0, -1]


@torch.no_grad()
def test_beginnings_of_several_lengths_are_read_behind_their_prompts(policy):
    rows = policy.tokens.encode(PROMPTS)
    drawn = torch.randint(5, 60, (4, 6), generator=torch.Generator().manual_seed(0))
    answered, begun = torch.tensor([0, 1, 1, 2]), [drawn[0, :4], drawn[1, :0], drawn[2, :1], drawn[3, :3]]
    prefix = Prefix(policy.runner.core, policy.runner.collate(rows, padding_side="left")).select(answered).begin(begun)
    expected = torch.stack([whole(policy, rows[i], ids) for i, ids in zip(answered.tolist(), begun, strict=True)])
    torch.testing.assert_close(prefix.last, expected, atol=2e-5, rtol=0)
    for column in (4, 5):  # and what follows them
        found = prefix.extend(drawn[:, column : column + 1], torch.ones(4, 1, dtype=torch.int64))[:, -1]
        begun = [torch.cat([ids, drawn[i, column : column + 1]]) for i, ids in enumerate(begun)]
        expected = torch.stack([whole(policy, rows[i], ids) for i, ids in zip(answered.tolist(), begun, strict=True)])
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def test_nothing_is_drawn_beyond_a_limit_and_equal_beginnings_are_read_once(policy, monkeypatch):
    """Three rows go on from two beginnings of one prompt, by 1, 2 and 4 tokens."""
    policy.tokens.eos = (10_000,)  # none of them ends
    row = policy.tokens.encode(PROMPTS)[0]
    begun = [row.extended(torch.tensor(ids), decided=True) for ids in ([5, 6], [5, 6], [7])]
    read, extended = [], []
    begin, extend = Prefix.begin, Prefix.extend
    monkeypatch.setattr(
        Prefix, "begin", lambda self, ids: (read.append([i.tolist() for i in ids]), begin(self, ids))[1]
    )
    monkeypatch.setattr(Prefix, "extend", lambda self, *rest: (extended.append(len(rest[0])), extend(self, *rest))[1])
    drawn = policy.runner.generate(begun, [1, 2, 3], policy.drafter.sampling, [1, 2, 4])
    assert [len(ids) for ids in drawn] == [1, 2, 4]
    assert read == [[[5, 6], [7]]] and extended == [2, 1, 1]
    assert generation.LEAVING == 8  # one of so few leaves at once
    alone = policy.runner.generate(begun[1:2], [2], policy.drafter.sampling, [2])
    assert torch.equal(alone[0], drawn[1])


def test_pictures_between_turns_are_read_with_what_came_before_them(folders, monkeypatch):
    """Two rows of equal tokens whose tools showed different pictures are two, each read whole."""
    policy = conversing(folders["qwen2_5_vl"], length=300, end=5.0)
    talks = policy.rollout(PROMPTS[1:2], 4, [1, 2, 3, 4])
    row = next(row for row in talks.inputs if row.observed_images)
    other = replace(row, observed_images=row.observed_images | {"pixel_values": -row.observed_images["pixel_values"]})
    last, begin = [], Prefix.begin

    def begun(self, ids):
        last.append(begin(self, ids).last.clone())
        return self

    monkeypatch.setattr(Prefix, "begin", begun)
    policy.runner.generate([row, other], [1, 1], policy.drafter.sampling, [1, 1])
    with torch.no_grad():
        inputs = [policy.runner.collate([each], padding_side="right") for each in (row, other)]
        whole_rows = [
            policy.runner.core.base_model(**each, use_cache=False).last_hidden_state[0, -1] for each in inputs
        ]
    assert (whole_rows[0] - whole_rows[1]).abs().max() > 1e-3
    torch.testing.assert_close(last[0], torch.stack(whole_rows), atol=2e-5, rtol=0)


def test_an_engine_did_not_sample_what_a_response_begins_with(folders):
    """Its log-probabilities are unknown there, so that a correction leaves these tokens alone; known after."""
    policy = loaded(folders["qwen2_5_vl"], max_response_length=9)
    policy.engine = Copy(policy, PROMPTS)
    rollouts = policy.rollout(PROMPTS, 1, [1, 2, 3])
    lengths = [min(2, len(rollouts.inputs[0].response)), 0, 1]
    again = policy.continue_from(rollouts, lengths, [4, 5, 6])
    for length, logp, mask in zip(lengths, again.behaviour_logp, again.mask, strict=True):
        assert logp[:length].isnan().all() and logp[length:][mask[length:]].isfinite().all()
    assert max(lengths) == 2
