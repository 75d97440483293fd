"""Likelihoods of traces at less cost: step_merge (StepMerge) and any_order (AnyOrder), against the model itself."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from mmrl.algorithms.algorithm import Algorithm
from mmrl.errors import UserError
from mmrl.policies.discrete_diffusion.likelihoods import elbo, step_merge
from mmrl.rollouts import Prompt
from mmrl.settings import choose
from tests.policies.discrete_diffusion.parts import PROMPT, Exact, forget_end, given, policy_of

RESPONSE = [8, 13, 10]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("traces")


@pytest.fixture
def made(folder):
    return lambda kind, **more: forget_end(policy_of(folder, unmasking={"likelihood": kind, "order": "random"}, **more))


def replayed(policy, responses, steps, **more):
    with torch.no_grad():
        return policy.replay(given(policy, responses, steps, **more), policy.module).logp.double()


def test_segments_are_as_equal_as_can_be():
    steps = torch.tensor([4, 0, 3, 1, 2])
    for segments, expected in ((1, [0] * 5), (2, [1, 0, 1, 0, 1]), (3, [2, 0, 2, 1, 1]), (5, [4, 0, 3, 1, 2])):
        states = step_merge(steps, 5, segments)
        assert states.weight.argmax(0).tolist() == expected and states.weight.sum(0).tolist() == [1.0] * 5
        assert all(states.masked[e, k] for k, e in enumerate(expected))
    assert len(step_merge(steps, 5, 9).weight) == 5  # no more than there are steps
    for last, segments in itertools.product((4, 7, 12), (2, 3, 4)):
        sizes = step_merge(torch.arange(last), last, segments).weight.sum(1)
        assert sizes.max() - sizes.min() <= 1


def test_merged_steps_are_asked_about_together(made):
    """Three steps in two segments: the first alone, then the last two from one state."""
    policy = made({"type": "step_merge", "segments": 2})
    exact = Exact(policy, 3)
    first, then = exact.table([None] * 3), exact.table([None, RESPONSE[1], None])
    expected = torch.stack([then[0, 8], first[1, 13], then[2, 10]])
    found = replayed(policy, [RESPONSE], [[2, 0, 1]])[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def test_a_segment_for_every_step_is_the_trace(made):
    merged, trace = made({"type": "step_merge", "segments": 3}), made("trace")
    one, other = (replayed(policy, [RESPONSE], [[2, 0, 1]]) for policy in (merged, trace))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def alone(policy, response, order, place):
    """[vocabulary] of one place's mask token, from no more tokens than it may see: the prompt and what `order` [place]
    put before it, in that order, each of which is read with those before it alone."""
    before = sorted((k for k in range(len(response)) if order[k] < order[place]), key=lambda k: order[k])
    prompt = policy.layout.encode(PROMPT)
    ids = torch.cat([prompt, torch.tensor([*(response[k] for k in before), policy.layout.vocabulary.mask])])
    n = len(prompt)
    positions = torch.tensor([*range(n), *(n + k for k in before), n + place])
    seen = torch.tril(torch.ones(len(ids), len(ids), dtype=torch.bool))
    seen[:n, :n] = True
    model = policy.module.model
    logits = model(input_ids=ids[None], attention_mask=seen[None, None], position_ids=positions[None]).logits[0, -1]
    logits = logits.double()
    logits[policy.layout.vocabulary.suppressed] = -torch.inf
    return logits.log_softmax(-1)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 2, 0]])
def test_one_pass_is_what_decoding_place_by_place_in_this_order_says(made, order):
    policy = made("any_order")
    with torch.no_grad():
        expected = torch.stack([alone(policy, RESPONSE, order, k)[RESPONSE[k]] for k in range(3)])
    found = replayed(policy, [RESPONSE], [order])[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def test_one_pass_is_a_distribution_of_responses(made):
    policy = made("any_order", length=2)
    letters = [i for i in range(16) if i not in policy.layout.vocabulary.suppressed.tolist()]
    pairs = [list(pair) for pair in itertools.product(letters, repeat=2)]
    for order in ([0, 1], [1, 0]):
        found = replayed(policy, pairs, [order] * len(pairs)).sum(1)
        assert float(found.exp().sum()) == pytest.approx(1, abs=1e-4)


def test_places_of_one_step_do_not_see_each_other(made):
    policy = made("any_order")
    one, other = replayed(policy, [[8, 13, 10], [8, 5, 10]], [[0, 0, 1]] * 2)
    assert one[0] == other[0] and one[2] != other[2]


def test_padding_changes_nothing_of_one_pass(made):
    policy = made("any_order")
    batch = policy.rollout([PROMPT, Prompt("long", "99+99=", answer="198")], 1, [1, 2])
    with torch.no_grad():
        whole = policy.replay(batch, policy.module).logp
        first = policy.replay(batch.select(torch.tensor([0])), policy.module).logp
    torch.testing.assert_close(whole[:1], first, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["any_order", {"type": "step_merge", "segments": 2}])
def test_the_first_ratio_is_exactly_one(made, kind):
    policy = made(kind, length=5)
    batch = policy.rollout([PROMPT], 6, list(range(6)))
    now = policy.replay(batch, policy.module)
    with torch.no_grad():
        assert torch.equal(now.logp, policy.replay(batch, policy.module).logp)
        for parameter in policy.module.parameters():
            parameter += 0.05
    assert now.logp.requires_grad and not torch.equal(policy.replay(batch, policy.module).logp, now.logp)


def test_antithetic_states_complete_each_other_and_meet_the_same_bound(made):
    """Every place is asked about in one of a pair, and one place in both; on average that is the bound."""
    for seed in range(30):
        states = elbo(seed, 5, 4, antithetic=True)
        first, second = states.masked[0::2], states.masked[1::2]
        assert (first | second).all() and ((first & second).sum(1) == 1).all()
        torch.testing.assert_close(states.weight, states.masked * 5 / (4 * states.masked.sum(1, keepdim=True)))
        low, high = first.sum(1).tolist()
        assert low <= 3 <= high  # the pairs share out the levels
    counts = torch.cat([elbo(seed, 4, 2, antithetic=True).masked.sum(1) for seed in range(2000)])
    assert (torch.bincount(counts, minlength=5)[1:] / 4000 - 0.25).abs().max() < 0.04
    policy = made({"type": "elbo", "draws": 2, "antithetic": True})
    found = replayed(policy, [RESPONSE] * 1200, None).sum(1)
    error = float(found.std() / 1200**0.5)
    assert abs(float(found.mean()) - Exact(policy, 3).elbo(RESPONSE)) < 4 * error
    with pytest.raises(UserError, match="draws=3 is odd, but antithetic=true makes pairs"):
        made({"type": "elbo", "draws": 3, "antithetic": True})


@pytest.mark.parametrize("kind", ["preference", "offline_preference"])
def test_preferences_are_of_bounds_with_the_same_states_for_both_policies(folder, kind):
    """LLaDA 1.5's VRPO: the log-ratios of DPO are differences of bounds, which share levels and masks."""
    offline = kind == "offline_preference"
    unmasking = {"draws": 2} if offline else {"likelihood": {"type": "elbo", "draws": 2}}
    algorithm = {"type": kind, "beta": 0.5, **({"level": "sequence"} if offline else {})}
    policy = policy_of(folder, length=4, algorithm=algorithm, unmasking=unmasking)
    pair = [replace(PROMPT, metadata={"demonstration": text}) for text in ("31", "30")]
    batch = policy.demonstrate(pair, [5, 5])
    one, other = (policy.scoring_states(record).masked for record in batch.inputs)
    assert torch.equal(one, other)
    batch.advantages = torch.tensor([[1.0], [-1.0]]).expand(2, 4)
    with torch.no_grad():
        batch.ref_logp = policy.replay(batch, policy.module, reference=True).logp
        learner = choose(Algorithm, algorithm)
        rows = torch.tensor([0]), torch.tensor([1])
        loss, _ = learner.group_loss(*rows, batch, policy.replay(batch, policy.module))
        assert float(loss) == pytest.approx(math.log(2), abs=1e-6)
        for parameter in policy.module.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        now = policy.replay(batch, policy.module)
        loss, _ = learner.group_loss(*rows, batch, now)
    apart = ((now.logp - batch.ref_logp) * batch.mask).sum(1)
    margin = 0.5 * float(apart[0] - apart[1])
    assert abs(margin) > 1e-3 and float(loss) == pytest.approx(math.log1p(math.exp(-margin)), abs=1e-5)


def test_a_model_that_answers_at_the_place_before_is_refused(folder):
    with pytest.raises(UserError, match=r"unmasking.likelihood=any_order .* model.shifted=true"):
        policy_of(folder, unmasking={"likelihood": "any_order"}, shifted=True)
