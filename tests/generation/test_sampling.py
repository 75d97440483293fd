"""The sampling distribution: hand values, the sampler's frequencies, and where a response ends."""

import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from mmrl.generation import transformers as generation
from mmrl.generation.sampling import Sampling, add_gumbel_noise, shape_logits

INF = torch.inf
LOGITS = torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.05]]).log()


def probabilities(**options):
    keep = options.pop("keep", None)
    return shape_logits(LOGITS, Sampling(**options), keep=keep).softmax(-1)[0]


def same(got, want):
    torch.testing.assert_close(got, torch.tensor(want), atol=1e-6, rtol=0)


def test_defaults_change_nothing_but_the_precision():
    half = LOGITS.bfloat16()
    got = shape_logits(half, Sampling())
    assert got.dtype == torch.float32 and torch.equal(got, half.float())


def test_temperature():
    squared = [p * p for p in (0.5, 0.2, 0.15, 0.1, 0.05)]
    same(probabilities(temperature=0.5), [p / sum(squared) for p in squared])
    assert torch.equal(shape_logits(LOGITS, Sampling(temperature=0.0)), LOGITS)


def test_suppressed_tokens_are_impossible_and_the_rest_is_renormalised():
    same(probabilities(suppressed=(0, 3)), [0, 0.5, 0.375, 0, 0.125])


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({"top_k": 1}, [1, 0, 0, 0, 0]),
        ({"top_k": 2}, [5 / 7, 2 / 7, 0, 0, 0]),
        ({"top_k": 5}, [0.5, 0.2, 0.15, 0.1, 0.05]),
        ({"top_k": 50}, [0.5, 0.2, 0.15, 0.1, 0.05]),
        ({"top_p": 0.01}, [1, 0, 0, 0, 0]),
        ({"top_p": 0.49}, [1, 0, 0, 0, 0]),
        ({"top_p": 0.6}, [5 / 7, 2 / 7, 0, 0, 0]),  # the token that crosses the border is inside
        ({"top_p": 0.72}, [10 / 17, 4 / 17, 3 / 17, 0, 0]),
        ({"top_p": 0.99}, [0.5, 0.2, 0.15, 0.1, 0.05]),
        ({"top_p": 0.72, "top_k": 2}, [5 / 7, 2 / 7, 0, 0, 0]),
        ({"top_p": 0.4, "top_k": 2}, [1, 0, 0, 0, 0]),
        ({"top_p": 0.8, "top_k": 3}, [5 / 7, 2 / 7, 0, 0, 0]),  # of the best three the first two have 0.82
        ({"top_p": 0.75, "suppressed": (0,)}, [0, 4 / 9, 3 / 9, 2 / 9, 0]),  # of what is left: 0.4, 0.3, 0.2, 0.1
        ({"top_p": 0.75, "temperature": 0.5}, [1, 0, 0, 0, 0]),  # after the temperature: the first has 0.77
    ],
)
def test_truncation(options, want):
    same(probabilities(**options), [float(w) for w in want])


BOTH = [(20, 0.8), (5, 0.9), (2, 0.3), (1, 0.5), (50, 0.6), (0, 0.7), (7, 1.0)]


def rows_of_logits():
    return 3 * torch.randn(2000, 50, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("top_k", "top_p"), BOTH)
def test_both_together_are_what_vllm_makes_of_them(top_k, top_p):
    sampler = pytest.importorskip("vllm.v1.sample.ops.topk_topp_sampler")
    rows = rows_of_logits()
    k, p = torch.full((len(rows),), top_k or rows.shape[1]), torch.full((len(rows),), top_p)
    want = sampler.apply_top_k_top_p_pytorch(rows.clone(), k, p).log_softmax(-1)
    same_distribution(shape_logits(rows, Sampling(top_k=top_k, top_p=top_p)).log_softmax(-1), want)


@pytest.mark.parametrize(("top_k", "top_p"), BOTH)
def test_both_together_are_what_transformers_makes_of_them(top_k, top_p):
    rows = rows_of_logits()
    want = TopKLogitsWarper(top_k)(None, rows) if top_k else rows
    want = (TopPLogitsWarper(top_p)(None, want) if top_p < 1 else want).log_softmax(-1)
    same_distribution(shape_logits(rows, Sampling(top_k=top_k, top_p=top_p)).log_softmax(-1), want)


def same_distribution(got, want):
    assert torch.equal(got.isfinite(), want.isfinite())
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


def test_equals_of_the_last_of_the_best_stay_inside():
    """As in vLLM and transformers."""
    rows = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    assert shape_logits(rows, Sampling(top_k=2)).isfinite().tolist() == [[True, True, True, False]]


def test_truncation_is_by_row_and_by_value_not_by_place():
    rows = torch.stack([LOGITS[0], LOGITS[0].flip(0), torch.tensor([0.2, 0.5, 0.05, 0.15, 0.1]).log()])
    inside = shape_logits(rows, Sampling(top_k=3, top_p=0.69)).isfinite()
    assert inside.tolist() == [
        [True, True, False, False, False],
        [False, False, False, True, True],
        [True, True, False, False, False],
    ]


def test_a_kept_token_stays_possible():
    same(probabilities(top_k=2, keep=torch.tensor([4])), [0.5 / 0.75, 0.2 / 0.75, 0, 0, 0.05 / 0.75])
    same(probabilities(top_k=2, keep=torch.tensor([1])), [5 / 7, 2 / 7, 0, 0, 0])
    same(probabilities(top_p=0.3, keep=torch.tensor([2])), [0.5 / 0.65, 0, 0.15 / 0.65, 0, 0])


def test_the_input_is_left_alone_and_gradients_pass():
    logits = LOGITS.clone().requires_grad_()
    shape_logits(logits, Sampling(0.5, top_k=3, suppressed=(1,))).softmax(-1)[0, 0].backward()
    assert torch.equal(logits.detach(), LOGITS)
    assert logits.grad.sign().tolist() == [[1, 0, -1, -1, 0]]


def chi_square(counts, p):
    expected = p * counts.sum()
    assert (counts[p == 0] == 0).all()
    return (((counts - expected) ** 2)[p > 0] / expected[p > 0]).sum()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.6, top_k=4, suppressed=(1,)), Sampling(top_p=0.8)])
def test_draws_follow_the_distribution(sampling):
    logits = shape_logits(torch.tensor([[1.0, 2.0, -1.0, 0.0, 0.5, -3.0]]), sampling)
    n = 20_000
    rows = add_gumbel_noise(logits.expand(n, -1), [torch.Generator().manual_seed(seed) for seed in range(n)]).argmax(-1)
    one = torch.Generator().manual_seed(7)
    steps = torch.cat([add_gumbel_noise(logits.expand(100, -1), [one] * 100).argmax(-1) for _ in range(n // 100)])
    for sampled in (rows, steps):  # over seeds, and along one stream
        counts = sampled.bincount(minlength=6).double()
        assert chi_square(counts, logits[0].double().softmax(-1)) < 25  # 5 degrees of freedom: p = 1e-4
        assert chi_square(counts, torch.full((6,), 1 / 6).double().where(logits[0].isfinite(), 0.0)) > 25


def test_a_draw_depends_on_its_own_generator_only():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))

    def seeded(*seeds):
        return [torch.Generator().manual_seed(s) for s in seeds]

    want = add_gumbel_noise(logits, seeded(5, 6, 7, 8))
    assert torch.equal(add_gumbel_noise(logits[2:3], seeded(7)), want[2:3])
    assert torch.equal(add_gumbel_noise(logits.flip(0), seeded(8, 7, 6, 5)), want.flip(0))
    assert not torch.equal(add_gumbel_noise(logits, seeded(5, 6, 7, 9))[3], want[3])


def test_a_zero_of_the_generator_is_neither_sure_nor_nan(monkeypatch):
    zeros = torch.tensor([0, 2])
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda row, generator: row.fill_(1.0).index_fill_(0, zeros, 0.0))
    got = add_gumbel_noise(torch.tensor([[-INF, 40.0, 0.0]]), [torch.Generator()])
    assert got[0, 0] == -INF and not got.isnan().any() and got.argmax() == 1


class Scripted:
    """Stands for a model: puts all mass on a given next token, and shows what `generate` was called with."""

    def __init__(self, script):
        self.script = torch.tensor(script)

    def generate(self, input_ids, attention_mask, generation_config, logits_processor, synced_gpus):
        self.config = generation_config
        ids = input_ids
        for step in range(generation_config.max_new_tokens):
            scores = torch.full((len(ids), 10), -50.0).scatter(1, self.script[:, step : step + 1], 50.0)
            ids = torch.cat([ids, logits_processor(ids, scores).argmax(-1, keepdim=True)], 1)
        return ids


def test_generate_cuts_after_the_first_end_token():
    model = Scripted([[4, 5, 1, 0, 0], [4, 2, 1, 5, 2], [1, 0, 0, 0, 0], [4, 5, 6, 7, 8]])
    inputs = {"input_ids": torch.full((4, 3), 9), "attention_mask": torch.ones(4, 3, dtype=torch.int64)}
    options = {"eos": (1, 2), "pad": 0, "max_new_tokens": 5}
    for temperature in (0.0, 1.0):
        got = generation.generate(model, inputs, sampling=Sampling(temperature), seeds=[1, 2, 3, 4], **options)
        assert [r.tolist() for r in got] == [[4, 5, 1], [4, 2], [1], [4, 5, 6, 7, 8]]
    config = model.config
    assert (config.eos_token_id, config.pad_token_id, config.max_new_tokens) == ([1, 2], 0, 5)
    assert not config.do_sample and config.use_cache


def test_greedy_needs_no_noise():
    processor = generation._Draw(Sampling(temperature=0.0, suppressed=(0,)), [1], torch.device("cpu"))
    got = processor(None, LOGITS)
    assert got[0, 0] == -INF and torch.equal(got[0, 1:], LOGITS[0, 1:])
