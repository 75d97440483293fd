"""Estimates of a masked response's likelihood against the exact one, by enumeration: kinds one_step, coupled, elbo and
trace, as settings OneStep, Coupled, ELBO and Trace."""

import itertools
import math

import pytest
import torch

from mmrl.errors import UserError
from mmrl.policies.discrete_diffusion import likelihoods
from tests.policies.discrete_diffusion.parts import Exact, forget_end, given, policy_of

KINDS = {
    "one_step": {"type": "one_step", "prompt_mask": 0.3},
    "coupled": {"type": "coupled", "pairs": 2},
    "elbo": {"type": "elbo", "draws": 2},
    "trace": {"type": "trace", "shrink": 2},
}
RESPONSE = [8, 13, 10]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("masked")


@pytest.fixture
def made(folder):
    return lambda kind, **more: forget_end(policy_of(folder, unmasking={"likelihood": kind, "order": "random"}, **more))


def estimates(policy, count, response=RESPONSE):
    """[count] log-likelihoods of one response by seeds."""
    with torch.no_grad():
        return policy.replay(given(policy, [response] * count), policy.module).logp.sum(1).double()


def near(values, expected, errors=4.0):
    """Whether the mean of draws is what it should be, within so many standard errors."""
    error = float(values.std() / len(values) ** 0.5)
    assert error > 0 and abs(float(values.mean()) - expected) < errors * error, (values.mean(), expected, error)


def test_the_elbo_is_met_on_average_and_its_variance_falls_with_stratified_draws(made):
    policy = made({"type": "elbo", "draws": 1})
    exact = Exact(policy, 3)
    bound, whole = exact.elbo(RESPONSE), exact.logp(RESPONSE)
    assert bound < whole - 0.01  # else nothing could tell them apart
    variances = {}
    for draws in (1, 3, 6):
        found = estimates(made({"type": "elbo", "draws": draws}), 1200)
        near(found, bound)
        variances[draws] = float(found.var())
    # Independent draws would give a third and a sixth; a level each gives less.
    assert variances[3] < 0.8 * variances[1] / 3 and variances[6] < 0.8 * variances[1] / 6


def test_one_step_is_the_product_of_what_is_said_of_each_place_alone(made):
    policy = made({"type": "one_step", "prompt_mask": 0.0})
    exact = Exact(policy, 3)
    by_hand = exact.table([None] * 3)[range(3), RESPONSE]
    with torch.no_grad():
        found = policy.replay(given(policy, [RESPONSE]), policy.module).logp[0]
    torch.testing.assert_close(found.double(), by_hand, rtol=0, atol=2e-5)
    assert abs(float(by_hand.sum()) - exact.logp(RESPONSE)) > 0.05  # the bias that it has


def test_hidden_tokens_of_the_prompt_are_those_of_the_seed():
    found = torch.cat([likelihoods.one_step(seed, 50, 3, 0.15).prompt_masked for seed in range(200)])
    assert abs(float(found.float().mean()) - 0.15) < 0.012  # three standard errors of 10000
    again = likelihoods.one_step(7, 50, 3, 0.15).prompt_masked
    assert torch.equal(again, found[7:8]) and not torch.equal(found[7], found[8])


def test_hidden_tokens_reach_the_model(made):
    plain, hidden = (estimates(made({"type": "one_step", "prompt_mask": p}), 8) for p in (0.0, 0.5))
    assert float(plain.std()) < 1e-6 < 0.01 < float(hidden.std())


@pytest.mark.parametrize("pairs", [1, 2])
def test_coupled_divides_scores_by_the_chance_of_their_mask(made, pairs):
    """DiffuCoder's coupled_grpo.py: (p0 + p1 / t or p2 / (1 - t)) / 2, by position; more pairs are averaged."""
    policy = made({"type": "coupled", "pairs": pairs, "levels": [0.25, 0.25]})
    exact = Exact(policy, 3)
    for seed in range(6):
        states = likelihoods.coupled(seed, 3, pairs, (0.25, 0.25))
        expected = [float(exact.table([None] * 3)[k, RESPONSE[k]]) / 2 for k in range(3)]
        for pair in range(pairs):
            first, second = states.masked[1 + 2 * pair], states.masked[2 + 2 * pair]
            assert torch.equal(first, ~second) and states.masked[0].all()
            for k in range(3):
                one, chance = (first, 0.25) if first[k] else (second, 0.75)
                written = [None if one[j] else RESPONSE[j] for j in range(3)]
                expected[k] += float(exact.table(written)[k, RESPONSE[k]]) / chance / (2 * pairs)
        with torch.no_grad():
            found = policy.replay(given(policy, [RESPONSE], seeds=[seed]), policy.module).logp[0]
        assert found.tolist() == pytest.approx(expected, abs=5e-5)


def test_coupled_shares_lie_between_its_levels():
    empty = torch.stack([likelihoods.coupled(seed, 400, 1, (0.2, 0.4)).masked[1] for seed in range(60)])
    shares = empty.float().mean(1)
    assert 0.12 < shares.min() < 0.26 and 0.34 < shares.max() < 0.48


def test_levels_are_drawn_alike_and_one_in_each_part():
    count = torch.stack([likelihoods.elbo(seed, 4, 4).masked.sum(1) for seed in range(50)])
    assert torch.equal(count, torch.arange(1, 5).expand(50, 4))
    single = torch.cat([likelihoods.elbo(seed, 4, 1).masked.sum(1) for seed in range(2000)])
    assert (torch.bincount(single, minlength=5)[1:] / 2000 - 0.25).abs().max() < 0.04
    states = likelihoods.elbo(3, 5, 2)
    for empty, weight in zip(states.masked, states.weight, strict=True):
        torch.testing.assert_close(weight, empty * 5 / (2 * empty.sum()))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3)))[:3])
@pytest.mark.quick("order1")
def test_a_trace_is_exact_for_its_order(made, order):
    """Of every response, so that they are a distribution; and those of all orders together are the likelihood."""
    policy = made("trace", length=3)
    exact = Exact(policy, 3)
    steps = [order.index(place) for place in range(3)]
    letters = [i for i in range(16) if i not in policy.layout.vocabulary.suppressed.tolist()]
    responses = [list(r) for r in itertools.product(letters, repeat=3)]
    with torch.no_grad():
        rows = given(policy, responses, [steps] * len(responses))
        found = policy.replay(rows, policy.module).logp.sum(1).double()
    assert float(found.exp().sum()) == pytest.approx(1, abs=1e-4)
    chosen = range(0, len(responses), 97)
    by_hand = [exact.by_order(responses[i], order) for i in chosen]
    torch.testing.assert_close(found[list(chosen)], torch.tensor(by_hand).double(), rtol=0, atol=5e-5)


def test_a_shrunk_trace_merges_steps(made):
    """Two of three steps are one state: the first two places are asked about together."""
    policy = made({"type": "trace", "shrink": 2})
    exact = Exact(policy, 3)
    rows = given(policy, [RESPONSE], [[2, 0, 1]])
    with torch.no_grad():
        found = policy.replay(rows, policy.module).logp[0].double()
    first, then = exact.table([None] * 3), exact.table([None, *RESPONSE[1:]])
    expected = torch.stack([then[0, 8], first[1, 13], first[2, 10]])
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def test_shrink_merges_steps_that_filled_a_position():
    """Steps 0, 1, 3, 4, 8, 9 in pairs; those between were not needed (rl_llada.py, collapse_k_unique)."""
    states = likelihoods.trace(torch.tensor([8, 0, 3, 9, 1, 4]), 12, 2)
    assert states.weight.argmax(0).tolist() == [2, 0, 1, 2, 0, 1] and states.weight.sum(0).tolist() == [1.0] * 6
    assert states.masked[1].tolist() == [True, False, True, True, False, True]


def test_what_is_drawn_has_the_likelihood_that_enumeration_gives(made):
    policy = made("trace", length=2)
    exact, count = Exact(policy, 2), 4000
    drawn = policy.rollout([given(policy, [[5, 6]]).samples[0].prompt], count, list(range(count)))
    found = torch.stack([record.response for record in drawn.inputs])
    letters = [i for i in range(16) if i not in policy.layout.vocabulary.suppressed.tolist()]
    chances = {pair: math.exp(exact.logp(pair)) for pair in itertools.product(letters, repeat=2)}
    assert sum(chances.values()) == pytest.approx(1, abs=1e-6)
    likely = sorted(chances, key=chances.get)[-5:]
    for pair in likely:
        share = float((found == torch.tensor(pair)).all(1).float().mean())
        assert abs(share - chances[pair]) < 4 * math.sqrt(chances[pair] / count), (pair, share, chances[pair])


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_ratio_is_exactly_one_and_all_policies_see_the_same_states(made, kind):
    policy = made(KINDS[kind], length=5)
    batch = policy.rollout([given(policy, [[4] * 5]).samples[0].prompt], 6, list(range(6)))
    now = policy.replay(batch, policy.module)
    with torch.no_grad():
        old = policy.replay(batch, policy.module)
        reference = policy.replay(batch, policy.module, reference=True)
    assert now.logp.requires_grad and torch.equal(now.logp, old.logp) and torch.equal(now.logp, reference.logp)
    single = policy.replay(batch.select(torch.tensor([3])), policy.module).logp
    torch.testing.assert_close(single[0], now.logp[3], rtol=0, atol=1e-5)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter += 0.05
    assert not torch.equal(policy.replay(batch, policy.module).logp, old.logp)


@pytest.mark.parametrize("kind", KINDS)
def test_entropy_is_a_mean_over_states_with_the_weights_of_the_likelihood(made, kind):
    """Of a model that says the same everywhere it is the logarithm of the number of tokens, squares their inverse."""
    policy = made(KINDS[kind])
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.zero_()
    letters = 16 - len(policy.layout.vocabulary.suppressed)
    found = policy.replay(given(policy, [RESPONSE]), policy.module)
    weight = policy.scoring_states(given(policy, [RESPONSE]).inputs[0]).weight.sum(0)
    torch.testing.assert_close(found.logp[0], -math.log(letters) * weight, rtol=1e-5, atol=0)
    asked = weight > 0
    torch.testing.assert_close(found.entropy[0][asked], torch.full((int(asked.sum()),), math.log(letters)))
    torch.testing.assert_close(found.square_sum[0][asked], torch.full((int(asked.sum()),), 1 / letters))


def test_wrong_options_are_one_line(folder):
    for unmasking, line in (
        ({"likelihood": {"type": "coupled", "levels": [0.8, 0.2]}}, r"levels=\[0.8, 0.2\] must be two numbers between"),
        ({"likelihood": {"type": "elbo", "pairs": 2}}, "unknown key unmasking.likelihood.pairs"),
        (
            {"steps": 4},
            "unmasking.steps=4 does not fit rollout.response_length=3 positions in 1 block; set unmasking.steps to a "
            "number from 1 to 3",
        ),
        ({"steps": 1, "block": 2}, "positions in 2 blocks; set unmasking.steps to a number from 2 to 3"),
    ):
        with pytest.raises(UserError, match=line):
            policy_of(folder, unmasking=unmasking, build=False)
