"""What heads read of a cached prompt, and what the action expert reads of it, on numbers by hand."""

import torch
from torch import nn

from mmrl.policies.vla.backbones.backbone import Backbone, CachedPrefix
from mmrl.policies.vla.heads.layers import Expert

MASK = torch.tensor([[True, True, False], [True, True, True]])


def test_the_last_hidden_state_is_that_of_the_last_token():
    prefix = CachedPrefix(torch.arange(1.0, 7.0).view(2, 3, 1), MASK)
    assert prefix.last.tolist() == [[2.0], [6.0]]


def test_a_cached_prompt_has_no_padding_and_gets_it_back():
    backbone, prefix = Backbone(), CachedPrefix(torch.arange(1.0, 7.0).view(2, 3, 1), MASK)
    rows = backbone.cache_rows(prefix)
    assert [row.flatten().tolist() for row in rows] == [[1, 2], [4, 5, 6]]
    again = backbone.collate_cached(rows, torch.device("cpu"))
    assert again["hidden"].flatten().tolist() == [1, 2, 0, 4, 5, 6] and torch.equal(again["mask"], MASK)


def expert():
    torch.manual_seed(0)
    made = Expert(chunk=2, action_dim=1, state_dim=0, context_width=4, width=32, depth=1, learned=False)
    nn.init.normal_(made.leave.weight)
    return made


@torch.no_grad()
def velocities(made, context, mask):
    """Of a chunk of two equal actions."""
    return made(torch.ones(1, 2, 1), torch.tensor([0.5]), torch.zeros(1, 0), context, mask)[0][0, :, 0]


def test_equal_actions_of_a_chunk_are_told_apart_by_their_places():
    made, context = expert(), torch.ones(1, 3, 4)
    first, second = velocities(made, context, MASK[1:])
    assert abs(float(first - second)) > 1e-3
    nn.init.zeros_(made.places)
    first, second = velocities(made, context, MASK[1:])
    assert abs(float(first - second)) < 1e-6


def test_the_expert_does_not_attend_to_padding():
    made, context = expert(), torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(1))
    before = velocities(made, context, MASK[:1])
    context[0, 2] = 50.0  # padding
    torch.testing.assert_close(velocities(made, context, MASK[:1]), before)
    context[0, 1] += 1.0
    assert (velocities(made, context, MASK[:1]) - before).abs().max() > 1e-4
