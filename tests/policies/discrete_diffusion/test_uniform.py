"""Uniform discrete diffusion (model.type=uniform_diffusion): what is drawn and what is replayed, against the model
itself by enumeration."""

import math

import pytest
import torch

from mmrl.errors import UserError
from mmrl.policies.discrete_diffusion.uniform import noised
from mmrl.rollouts import Prompt
from tests.policies.discrete_diffusion.parts import PROMPT, Exact, forget_end, given, policy_of

RESPONSE = [8, 13, 10]
UNIFORM = {"type": "uniform_diffusion"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("uniform")


@pytest.fixture
def made(folder):
    return lambda noising=None, **more: forget_end(policy_of(folder, noising=noising or {}, **UNIFORM, **more))


def replayed(policy, response=RESPONSE, seed=7):
    with torch.no_grad():
        return policy.replay(given(policy, [response], seeds=[seed]), policy.module)


def by_hand(policy, states, response=RESPONSE):
    """[state, place] log-likelihoods of the response in noised states, straight from the transformers model."""
    exact, found = Exact(policy, len(response)), []
    for s in range(len(states.masked)):
        noise = policy.allowed[(states.noise[s] * len(policy.allowed)).long()].tolist()
        written = [n if e else r for n, e, r in zip(noise, states.masked[s].tolist(), response, strict=True)]
        found.append(exact.table(written)[range(len(response)), response])
    return torch.stack(found)


@pytest.mark.parametrize(("draws", "levels"), [(1, [0, 0]), (1, [1, 1]), (3, [0, 1]), (2, [0.4, 0.6])])
def test_a_token_is_asked_about_in_states_noised_from_the_finished_response(made, draws, levels):
    policy = made({"draws": draws, "levels": levels})
    states = noised(7, 3, draws, levels)
    expected = by_hand(policy, states).mean(0)
    found = replayed(policy)
    torch.testing.assert_close(found.logp[0].double(), expected, rtol=0, atol=3e-5)
    assert (found.entropy > 0).all() and (found.square_sum <= 1).all()


def test_without_noise_the_model_sees_the_response_itself(made):
    policy = made({"draws": 1, "levels": [0, 0]})
    expected = Exact(policy, 3).table(RESPONSE)[range(3), RESPONSE]
    torch.testing.assert_close(replayed(policy).logp[0].double(), expected, rtol=0, atol=3e-5)


def test_levels_are_met_and_stratified():
    share = torch.stack([noised(seed, 400, 2, (0.2, 0.6)).masked.float().mean(1) for seed in range(60)])
    assert 0.12 < share[:, 0].min() < 0.28 and 0.32 < share[:, 0].max() < 0.48
    assert 0.33 < share[:, 1].min() < 0.47 and 0.53 < share[:, 1].max() < 0.68
    assert torch.equal(noised(3, 5, 2, (0, 1)).weight, torch.full((2, 5), 0.5))
    one, again, other = noised(3, 50, 1, (0, 1)), noised(3, 50, 1, (0, 1)), noised(4, 50, 1, (0, 1))
    assert torch.equal(one.noise, again.noise) and not torch.equal(one.noise, other.noise)
    drawn = torch.Generator().manual_seed(3)  # as the response was: it begins with the numbers of its first tokens
    first, places, noise = (torch.rand(shape, generator=drawn) for shape in ((1,), (1, 50), (1, 50)))
    assert not torch.equal(one.masked, places < first) and not torch.equal(one.noise, noise)


def test_noise_is_made_of_all_tokens_that_may_be_drawn_and_of_no_others(made):
    policy = made()
    numbers = torch.arange(0, 1, 1 / 64)
    found = policy._random_tokens(numbers)
    assert set(found.tolist()) == set(range(16)) - set(policy.layout.vocabulary.suppressed.tolist())
    counts = torch.bincount(found, minlength=16)[policy.allowed]
    assert counts.max() - counts.min() <= 1
    # The tokenizer's mask token stands in no state, and is not needed.
    assert (
        policy.layout.tokenizer.mask_token_id in policy.layout.vocabulary.suppressed
        and policy.layout.vocabulary.mask == -1
    )


def test_what_is_drawn_has_the_chances_of_the_chain(made):
    """Of one token in two steps: half are drawn once from what the noise means, the others twice."""
    policy, count = made({"steps": 2}, length=1), 4000
    table = 1.5 * torch.randn(16, 16, generator=torch.Generator().manual_seed(1))  # what a token that is seen means
    table[:, policy.layout.vocabulary.suppressed] = -torch.inf
    policy.module.logits = lambda ids, there, row, column: table[ids[row, column]]
    chances = table.softmax(-1)[policy.allowed]  # [seen, vocabulary]
    once = chances.mean(0)
    expected = 0.5 * once + 0.5 * (once[policy.allowed, None] * chances).sum(0)
    rows = policy.rollout([PROMPT], count, list(range(count))).inputs
    share = torch.bincount(torch.stack([r.response[0] for r in rows]), minlength=16) / count
    assert ((share - expected).abs() < 4.5 * (expected * (1 - expected) / count).sqrt() + 1e-9).all()
    assert (once - expected).abs().max() > 0.02  # one step would have been seen


def test_more_of_a_response_is_written_in_each_step(made):
    """Of a model that is sure of a token, the share that has become it is 1/4, 2/4, 3/4 and 4/4."""
    policy = made({"steps": 4}, length=24)
    shares, token = [], 9

    def sure(ids, there, row, column):
        shares.append(float((ids[row, column] == token).float().mean()))
        return torch.full((len(row), 16), -1e4).index_fill(1, torch.tensor([token]), 0.0)

    policy.module.logits = sure
    found = policy.rollout([PROMPT], 60, list(range(60))).inputs
    assert all((record.response == token).all() for record in found)
    noise = 1 / len(policy.allowed)
    for turn, share in enumerate(shares):
        assert abs(share - (turn / 4 + (1 - turn / 4) * noise)) < 0.04, (turn, share)


def test_the_first_ratio_is_exactly_one_and_all_policies_see_the_same_states(made):
    policy = made(length=5)
    batch = policy.rollout([PROMPT], 6, list(range(6)))
    now = policy.replay(batch, policy.module)
    with torch.no_grad():
        old = policy.replay(batch, policy.module)
        reference = policy.replay(batch, policy.module, reference=True)
    assert now.logp.requires_grad and torch.equal(now.logp, old.logp) and torch.equal(now.logp, reference.logp)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter += 0.05
    assert not torch.equal(policy.replay(batch, policy.module).logp, old.logp)


def test_a_response_depends_on_its_seed_alone(made):
    policy = made(length=5)
    both = policy.rollout([PROMPT, Prompt("other", "99+99=", answer="198")], 2, [11, 12, 13, 14]).inputs
    alone = policy.rollout([PROMPT], 1, [12]).inputs[0]
    assert torch.equal(alone.response, both[1].response)
    assert len({tuple(policy.rollout([PROMPT], 1, [s]).inputs[0].response.tolist()) for s in range(8)}) > 4


def test_temperature_is_replayed(made):
    policy = made({"draws": 1, "levels": [1, 1]}, rollout={"temperature": 2.0})
    states = noised(7, 3, 1, (1, 1))
    noise = policy._random_tokens(states.noise[0]).tolist()
    expected = (Exact(policy, 3).table(noise) / 2).log_softmax(-1)[range(3), RESPONSE]
    torch.testing.assert_close(replayed(policy).logp[0].double(), expected, rtol=0, atol=3e-5)


def test_demonstrations_have_other_states_for_every_seed(folder):
    policy = policy_of(folder, length=4, algorithm="supervised", noising={"draws": 2}, **UNIFORM)
    batch = policy.demonstrate([PROMPT] * 20, list(range(20)))
    assert batch.samples[0].response == "31" and batch.mask[0].tolist() == [True, True, True, False]
    states = [policy.scoring_states(record) for record in batch.inputs]
    assert states[0].masked.shape == (2, 4) and len({tuple(s.masked.flatten().tolist()) for s in states}) > 10
    found = policy.replay(batch, policy.module).logp
    assert found.shape == (20, 4) and bool((found < 0).all())
    assert math.isclose(float(states[0].weight.sum()), 4, rel_tol=1e-6)


def test_images_are_written_as_codes(tmp_path):
    from mmrl.tasks.image_generation.data.digits import DigitPromptSource
    from mmrl.tasks.image_generation.tiny import image_tokens

    image_tokens.build_masked(str(tmp_path), seed=0)
    policy = policy_of(tmp_path, length=16, build=False, perturbed=0.0, **UNIFORM)
    batch = policy.rollout([DigitPromptSource(size=10, seed=0)[3]], 2, [1, 2])
    assert batch.mask.all() and batch.samples[0].image.shape == (1, 8, 8)
    assert len(policy.allowed) == image_tokens.CODEBOOK_SIZE


def test_wrong_options_are_one_line(folder):
    for noising, line in (
        ({"levels": [0.8, 0.2]}, "must be two numbers from 0 to 1, the smaller one first"),
        ({"steps": 0}, "noising.steps"),
        ({"order": "random"}, "unknown key noising.order"),
    ):
        with pytest.raises(UserError, match=line):
            policy_of(folder, noising=noising, build=False, **UNIFORM)
    with pytest.raises(UserError, match="unknown key unmasking"):
        policy_of(folder, unmasking={"steps": 3}, build=False, **UNIFORM)
    with pytest.raises(UserError, match="which model.type=uniform_diffusion does not read"):
        policy_of(folder, **UNIFORM).layout.encode(Prompt("p", "1+1=", messages=("x",)))
