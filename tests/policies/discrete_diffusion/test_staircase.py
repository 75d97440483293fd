"""Models that are read by blocks: one row with a staircase of attention equals a forward of its own for every block."""

import itertools

import pytest
import torch

from mmrl.errors import UserError
from mmrl.policies.discrete_diffusion.likelihoods import block_attention, staircase
from mmrl.rollouts import Prompt
from tests.policies.discrete_diffusion.parts import PROMPT, forget_end, given, policy_of

RESPONSE = [8, 13, 10, 5, 9]
BLOCKS = torch.tensor([0, 0, 0, 1, 1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("blocks")


def made(folder, *, block=3, length=5, draws=2, **more):
    unmasking = {"block": block, "causal_blocks": True, "likelihood": {"type": "staircase", "draws": draws}}
    return forget_end(policy_of(folder, length=length, unmasking=unmasking | more.pop("unmasking", {}), **more))


def alone(policy, prompt, blocks):
    """[place, word] log-probabilities in the last of some blocks of ids (None: empty), which nothing stands behind: a
    forward of its own, in which each block sees the prompt, those before it and itself."""
    ids = [policy.layout.vocabulary.mask if i is None else i for block in blocks for i in block]
    number = torch.tensor([b for b, block in enumerate(blocks) for _ in block])
    n, count = len(prompt), len(prompt) + len(ids)
    seen = torch.zeros(count, count, dtype=torch.bool)
    seen[:, :n] = True
    seen[n:, n:] = number[:, None] >= number[None]
    with torch.no_grad():
        logits = policy.module.model(
            input_ids=torch.cat([prompt, torch.tensor(ids)])[None],
            attention_mask=seen[None, None],
            position_ids=torch.arange(count)[None],
        ).logits[0, -len(blocks[-1]) :]
    logits = logits.double()
    logits[:, policy.layout.vocabulary.suppressed] = -torch.inf
    return logits.log_softmax(-1)


def test_the_staircase_by_hand():
    """A prompt of one token, a response of blocks of one and two places, its copy, and a padding token."""
    seen, positions = block_attention(1, torch.tensor([0, 1, 1]), 8, noised=True)
    rows = ["10000000", "11000000", "11110000", "11110000", "10001000", "11000110", "11000110", "00000001"]
    assert seen.int().tolist() == [[int(mark) for mark in row] for row in rows]
    assert positions.tolist() == [0, 1, 2, 3, 1, 2, 3, 0]
    plain, places = block_attention(1, torch.tensor([0, 1, 1]), 4, noised=False)
    assert torch.equal(plain, seen[:4, :4]) and places.tolist() == [0, 1, 2, 3]


def test_every_block_has_empty_places_of_its_own():
    for seed in range(20):
        states = staircase(seed, BLOCKS, 3)
        for block, size in ((0, 3), (1, 2)):
            empty, weight = states.masked[:, block == BLOCKS], states.weight[:, block == BLOCKS]
            count = empty.sum(1, keepdim=True)
            assert (count >= 1).all()
            torch.testing.assert_close(weight, empty * size / (3 * count))
    counts = torch.cat([staircase(seed, BLOCKS, 4).masked[:, :3].sum(1) for seed in range(800)])
    assert (torch.bincount(counts, minlength=4)[1:] / 3200 - 1 / 3).abs().max() < 0.04  # 1, 2 or 3 of three, alike
    assert torch.equal(staircase(3, BLOCKS, 2).masked, staircase(3, BLOCKS, 2).masked)


def test_one_row_equals_a_forward_for_every_block(folder):
    policy = made(folder)
    batch = given(policy, [RESPONSE, RESPONSE[::-1]], seeds=[4, 7])
    with torch.no_grad():
        found = policy.replay(batch, policy.module).logp.double()
    assert policy.blocks.tolist() == BLOCKS.tolist()
    for row, record in enumerate(batch.inputs):
        states, expected = staircase(record.seed, BLOCKS, 2), torch.zeros(5).double()
        answer = record.response.tolist()
        for empty, weight in zip(states.masked, states.weight, strict=True):
            shown = [None if e else i for i, e in zip(answer, empty, strict=True)]
            for blocks, places in (([shown[:3]], range(3)), ([answer[:3], shown[3:]], range(3, 5))):
                table = alone(policy, record.prompt, blocks)
                for k, place in enumerate(places):
                    expected[place] += weight[place] * (table[k, answer[place]] if empty[place] else 0.0)
        torch.testing.assert_close(found[row], expected, rtol=0, atol=2e-5)


def test_blocks_of_one_place_are_the_likelihood_itself(folder):
    """Then the bound is none: responses of two places sum to one, and are drawn as often as they are likely."""
    policy = made(folder, block=1, length=2, draws=1)
    letters = [i for i in range(16) if i not in policy.layout.vocabulary.suppressed.tolist()]
    pairs = [list(pair) for pair in itertools.product(letters, repeat=2)]
    with torch.no_grad():
        chance = policy.replay(given(policy, pairs), policy.module).logp.double().sum(1).exp()
    assert float(chance.sum()) == pytest.approx(1, abs=1e-4)
    drawn = policy.rollout([PROMPT], 1500, list(range(1500)))
    share = torch.zeros(len(pairs))
    for record in drawn.inputs:
        share[pairs.index(record.response.tolist())] += 1 / 1500
    assert ((share - chance).abs() < 4.5 * (chance * (1 - chance) / 1500).sqrt() + 2e-3).all()


def test_what_is_drawn_does_not_see_what_stands_behind(folder):
    """Of the first block, in a response with more of them, the model says what it says where nothing follows."""
    long = made(folder, length=6)
    prompt, empty = long.layout.encode(PROMPT), torch.full((1, 6), long.layout.vocabulary.mask)
    ids, there, positions = long._partial_inputs([prompt], empty)
    column = torch.arange(3) + len(prompt)
    with torch.no_grad():
        first = long.module.logits(ids, there, torch.zeros(3, dtype=torch.long), column, positions).double()
    expected = alone(long, prompt, [[None] * 3])
    torch.testing.assert_close(first.log_softmax(-1), expected, rtol=0, atol=2e-5)
    assert (long.rollout([PROMPT], 1, [5]).inputs[0].steps[:3] < 3).all()


def test_the_first_ratio_is_exactly_one_and_padding_changes_nothing(folder):
    policy = made(folder, length=6)
    batch = policy.rollout([PROMPT, Prompt("long", "99+99=", answer="198")], 2, [1, 2, 3, 4])
    now = policy.replay(batch, policy.module)
    with torch.no_grad():
        assert torch.equal(now.logp, policy.replay(batch, policy.module).logp)
        alone_ = policy.replay(batch.select(torch.tensor([1])), policy.module).logp
    torch.testing.assert_close(now.logp[1:2].detach(), alone_, rtol=0, atol=2e-5)
    assert now.logp.requires_grad


def test_demonstrations_are_learned_by_blocks(folder):
    unmasking = {"block": 3, "causal_blocks": True, "draws": 2}
    policy = policy_of(folder, length=5, algorithm="supervised", unmasking=unmasking)
    batch = policy.demonstrate([PROMPT], [3])
    assert policy.scoring_states(batch.inputs[0]).blocks.tolist() == BLOCKS.tolist()
    assert policy.replay(batch, policy.module).logp.isfinite().all()


def test_what_does_not_go_together_is_one_line(tmp_path):
    """Before any model is looked for."""
    for unmasking, options, line in (
        ({"likelihood": "staircase", "block": 3}, {}, "staircase is for block diffusion models; set"),
        (
            {"likelihood": "staircase", "causal_blocks": True},
            {},
            "needs the length of a block; set unmasking.block",
        ),
        (
            {"likelihood": "trace", "block": 3, "causal_blocks": True},
            {},
            "likelihood=trace scores a response with attention to all",
        ),
        (
            {"likelihood": "staircase", "block": 3, "causal_blocks": True},
            {"shifted": True},
            "scores a token in its own block, but with model.shifted=true",
        ),
    ):
        with pytest.raises(UserError, match=line):
            policy_of(tmp_path / "nothing", build=False, length=6, unmasking=unmasking, **options)
