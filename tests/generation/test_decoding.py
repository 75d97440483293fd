"""Decoding: keys and values that stay where they are, heads that share them, and a model that is left as it was."""

from types import SimpleNamespace

import pytest
import torch
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from mmrl.generation.decoding import SHARED_HEADS, GrowingLayer, decoding, shared_heads


def states(tokens, *, rows=2, seed=0):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, tokens, 4, generator=random), torch.randn(rows, 3, tokens, 4, generator=random)


def test_a_layer_holds_what_transformers_own_does():
    mine, theirs = GrowingLayer(20), DynamicLayer()
    for seed, tokens in enumerate((5, 1, 1, 2, 1)):
        for found, expected in zip(
            mine.update(*states(tokens, seed=seed)), theirs.update(*states(tokens, seed=seed)), strict=True
        ):
            assert torch.equal(found, expected)
    rows = torch.tensor([1, 1, 0])
    for layer in (mine, theirs):
        layer.batch_select_indices(rows)
    for seed in (7, 8):
        more = states(1, rows=3, seed=seed)
        for found, expected in zip(mine.update(*more), theirs.update(*more), strict=True):
            assert torch.equal(found, expected)
    assert mine.get_seq_length() == theirs.get_seq_length() == 12


def test_a_token_moves_the_others_only_when_the_memory_is_full():
    layer, places = GrowingLayer(40), []
    for step in range(36):
        keys, _ = layer.update(*states(5 if step == 0 else 1, seed=step))
        places.append((keys.data_ptr(), keys.stride(1) // 4))
    assert [room for _, room in dict.fromkeys(places)] == [
        10,
        22,
        40,
    ]  # 2 x 5, 2 x 11, and the longest instead of 2 x 23
    assert layer.get_seq_length() == 40


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(("heads", "tokens"), [(6, 1), (3, 1), (6, 4)], ids=["shared", "own", "several tokens"])
def test_heads_that_share_are_not_repeated_and_say_the_same(heads, tokens, masked, monkeypatch):
    random = torch.Generator().manual_seed(1)
    query = torch.randn(2, heads, tokens, 4, generator=random)
    key, value = states(9)
    mask = torch.rand(2, 1, tokens, 9, generator=random) > 0.3 if masked else None
    module = SimpleNamespace(num_key_value_groups=heads // 3, is_causal=True)
    expected, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.7)
    sizes, usual = [], torch.nn.functional.scaled_dot_product_attention

    def watched(query, key, value, **options):
        sizes.append((query.shape[1], key.shape[1]))
        return usual(query, key, value, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    found, _ = shared_heads(module, query, key, value, mask, scaling=0.7)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    assert sizes[0][0] == (3 if tokens == 1 else 6)


@pytest.mark.parametrize(("usual", "inside"), [("sdpa", SHARED_HEADS), ("eager", "eager")])
def test_the_model_computes_as_before_afterwards_also_after_an_error(usual, inside):
    config = SimpleNamespace(_attn_implementation=usual)
    with pytest.raises(ZeroDivisionError), decoding(config):
        assert config._attn_implementation == inside
        raise ZeroDivisionError
    assert config._attn_implementation == usual
