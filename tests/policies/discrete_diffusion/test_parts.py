"""One masked model for text and images (MMaDA): what is drawn where, how likely it is, and masks of all densities."""

from dataclasses import replace

import pytest
import torch

from mmrl.config import validate
from mmrl.errors import UserError
from mmrl.policies.discrete_diffusion.likelihoods import spread
from mmrl.policies.discrete_diffusion.schedule import in_parts, schedule
from mmrl.rollouts import IMAGE, TEXT, Prompt, part_mask
from mmrl.tasks.image_generation.data import digits
from mmrl.tasks.image_generation.tiny import image_tokens
from tests.policies.discrete_diffusion.parts import policy_of

PROMPTS = [Prompt("a", "draw a seven", answer=7), Prompt("b", "the number three in pencil", answer=3)]
LONGEST, PLACES = 6, 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("codes")
    image_tokens.build_masked(str(folder), seed=0)
    return folder


def policy(folder, *, unmasking=None, rollout=None, **more):
    own = {"steps": 4, "reasoning_steps": 3, **(unmasking or {})}
    return policy_of(
        folder, length=PLACES, build=False, perturbed=0.1, rollout={"reasoning_length": LONGEST, **(rollout or {})},
        unmasking=own, **more,
    )  # fmt: skip


def said(policy, prompt, written):
    """[place, word] float64 log-probabilities, straight from the model; None stands for an empty place."""
    ids = [policy.layout.vocabulary.mask if i is None else int(i) for i in written]
    with torch.no_grad():
        row = torch.cat([prompt, torch.tensor(ids)])[None]
        logits = policy.module.model(input_ids=row).logits[0, -len(ids) :].double()
    codes = torch.arange(logits.shape[1]) >= policy.layout.codebook.first
    words = torch.ones_like(codes)
    words[policy.layout.vocabulary.suppressed] = False
    assert not bool((codes & words).any()) and bool(words.any())
    may = torch.stack([words] * LONGEST + [codes] * PLACES)
    return logits.masked_fill(~may, -torch.inf).log_softmax(-1)


def test_text_and_codes_have_places_of_their_own(folder):
    made = policy(folder)
    batch = made.rollout(PROMPTS, 12, list(range(24)))
    assert made.max_decisions == LONGEST + PLACES
    end = made.layout.vocabulary.end
    for i, (record, sample) in enumerate(zip(batch.inputs, batch.samples, strict=True)):
        text, codes = record.response[:LONGEST], record.response[LONGEST:]
        assert (
            not torch.isin(text, made.layout.vocabulary.suppressed).any()
            and (codes >= made.layout.codebook.first).all()
        )
        assert record.steps[:LONGEST].max() < 3 <= record.steps[LONGEST:].min()  # text is finished first
        count = int((text == end).nonzero()[0]) + 1 if (text == end).any() else LONGEST
        assert batch.mask[i].tolist() == [t < count or t >= LONGEST for t in range(LONGEST + PLACES)]
        assert torch.equal(sample.image, made.layout.codebook.decode(codes[None])[0])
        assert sample.response == made.layout.tokenizer.decode(text[:count], skip_special_tokens=True)
        assert (sample.response_length, sample.max_response_length) == (count, LONGEST)
        assert sample.truncated == (not bool((text == end).any()))
    assert len({int(batch.mask[i, :LONGEST].sum()) for i in range(24)}) > 1, "or ends are not tested"
    assert part_mask(batch, TEXT)[0].tolist() == [True] * LONGEST + [False] * PLACES
    assert torch.equal(part_mask(batch, IMAGE), ~part_mask(batch, TEXT))
    assert torch.equal(made.replay(batch, made.module).extras["segments"], part_mask(batch, IMAGE).long())
    alone = made.rollout(PROMPTS[1:], 1, [18])
    assert torch.equal(alone.inputs[0].response, batch.inputs[18].response)  # of its seed alone
    kept = batch.select(torch.tensor([3, 1])).extras["parts"].values
    assert torch.equal(kept, batch.extras["parts"].values[:2])


def test_the_trace_is_what_the_model_says_of_every_place(folder):
    made = policy(folder, unmasking={"likelihood": "trace"}, rollout={"temperature": 0.8})
    batch = made.rollout(PROMPTS, 1, [1, 2])
    now = made.replay(batch, made.module)
    for i, record in enumerate(batch.inputs):
        for step in range(7):
            written = [int(t) if s < step else None for t, s in zip(record.response, record.steps, strict=True)]
            table = (said(made, record.prompt, written) / 0.8).log_softmax(-1)
            for place in (record.steps == step).nonzero().flatten().tolist():
                expected = float(table[place, record.response[place]])
                assert float(now.logp[i, place]) == pytest.approx(expected, abs=2e-4)


LIKELIHOODS = ("trace", "elbo", "spread", "one_step", "any_order")


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_the_first_ratio_is_exactly_one(folder, likelihood):
    made = policy(folder, unmasking={"likelihood": likelihood})
    batch = made.rollout(PROMPTS, 2, [1, 2, 3, 4])
    now = made.replay(batch, made.module)
    with torch.no_grad():
        assert torch.equal(now.logp, made.replay(batch, made.module).logp)
        alone = made.replay(batch.select(torch.tensor([2])), made.module).logp
    assert now.logp.isfinite().all() and now.logp.requires_grad
    torch.testing.assert_close(alone, now.logp[2:3].detach(), rtol=0, atol=2e-5)


# --- masks of all densities ---


def test_levels_are_spread_from_a_drawn_start():
    for seed in range(20):
        states = spread(seed, 5000, 4)
        level = states.empty.float().mean(1).sort().values
        assert (level.diff() - 0.25).abs().max() < 0.04 and level[0] < 0.27  # four levels, a quarter apart
    starts = [float(spread(seed, 5000, 1).empty.float().mean()) for seed in range(200)]
    assert abs(sum(starts) / 200 - 0.5) < 0.08 and min(starts) < 0.1 and max(starts) > 0.9
    assert all(spread(seed, 3, 1).empty.any() for seed in range(100))  # there is always something to ask about
    few = spread(3, 7, 3)
    assert torch.equal(few.weight > 0, few.empty) and few.prompt_empty is None
    asked = few.empty.any(0)
    torch.testing.assert_close(few.weight.sum(0), asked.float())
    assert all(len({float(w) for w in column if w > 0}) <= 1 for column in few.weight.T)
    assert not torch.equal(few.empty, spread(4, 7, 3).empty) and torch.equal(few.empty, spread(3, 7, 3).empty)


def test_a_place_is_as_likely_as_it_is_in_the_states_that_empty_it(folder):
    made = policy(folder, unmasking={"likelihood": {"type": "spread", "draws": 3}})
    batch = made.rollout(PROMPTS, 1, [5, 6])
    with torch.no_grad():
        now = made.replay(batch, made.module)
    for i, record in enumerate(batch.inputs):
        empty = spread(record.seed, LONGEST + PLACES, 3).empty
        found = torch.zeros(LONGEST + PLACES).double()
        for state in empty:
            written = [None if e else int(t) for t, e in zip(record.response, state, strict=True)]
            table = said(made, record.prompt, written)  # the prompt is in sight
            found += table.gather(1, record.response[:, None])[:, 0].where(state, 0.0)
        expected = found / empty.sum(0).clamp(min=1)
        torch.testing.assert_close(now.logp[i].double(), expected, rtol=0, atol=2e-4)
        assert bool((empty.sum(0) == 0).any()) == bool((now.logp[i] == 0).any())


# --- schedules, demonstrations, what can not be ---


def test_the_schedule_of_codes_follows_that_of_text():
    assert in_parts(0, 4, None, 2, None) == schedule(4, 2)
    found = in_parts(3, 4, 2, 2, None)
    assert [tuple(step) for step in found] == [(0, 3, 2), (0, 3, 1), (3, 7, 2), (3, 7, 2)]
    assert [tuple(step) for step in in_parts(2, 4, None, 2, 2)] == [(0, 2, 1), (0, 2, 1), (2, 4, 2), (4, 6, 2)]
    with pytest.raises(ValueError, match="unmasking.reasoning_steps=4 do not fill rollout.reasoning_length=3"):
        in_parts(3, 4, 4, 2, None)


def test_demonstrations_are_texts_and_images(folder):
    made = policy(folder, algorithm="supervised")
    source = digits.DigitPromptSource(size=20, seed=0, reasoning=True, careless=0.5)
    prompts = [source[i] for i in range(20)]
    batch = made.demonstrate(prompts, list(range(20)))
    assert [s.response for s in batch.samples] == [p.metadata["reasoning"] for p in prompts]
    assert batch.mask[:, :LONGEST].sum(1).tolist() == [4] * 20 and batch.mask[:, LONGEST:].all()
    assert (batch.samples[3].image - prompts[3].metadata["target"]).square().mean() < 0.05
    tail = torch.stack([record.response[3:LONGEST] for record in batch.inputs])
    assert (tail == made.layout.vocabulary.end).all()
    assert made.replay(batch, made.module).logp.isfinite().all()
    with pytest.raises(UserError, match=r"has no text to learn from: metadata\['reasoning'\]"):
        made.demonstrate([replace(prompts[0], metadata={"target": prompts[0].metadata["target"]})], [0])
    long = replace(prompts[0], metadata=prompts[0].metadata | {"reasoning": "a a a a a a a"})
    with pytest.raises(UserError, match="has 7 tokens, more than rollout.reasoning_length=6"):
        made.demonstrate([long], [0])


def tree(**more):
    return {
        "run_dir": "x",
        "model": {"type": "discrete_diffusion", "path": "nothing"},
        "task": {"type": "image_generation"},
        **more,
    }


def test_what_can_not_be_is_one_line(folder, tmp_path):
    """What needs no model is said before it is looked for."""
    with pytest.raises(UserError, match="unmasking.reasoning_steps=3 fills text before the tokens of an image; set"):
        validate(tree(unmasking={"reasoning_steps": 3}), "test")
    with pytest.raises(UserError, match="unmasking.reasoning_steps=9 do not fill rollout.reasoning_length=6"):
        validate(tree(rollout={"reasoning_length": 6}, unmasking={"reasoning_steps": 9}), "test")
    with pytest.raises(UserError, match=r"needs responses in parts, text before an image \("):
        validate(tree(algorithm={"surrogate": {"type": "by_part"}}), "test")
    validate(tree(rollout={"reasoning_length": 6}, algorithm={"surrogate": {"type": "by_part"}}), "test")
    uniform = tree(rollout={"reasoning_length": 6})
    uniform["model"]["type"] = "uniform_diffusion"
    with pytest.raises(UserError, match="unknown key rollout.reasoning_length"):
        validate(uniform, "test")
    with pytest.raises(UserError, match="rollout.reasoning_length=6 writes text before .* has no codebook"):
        policy_of(tmp_path, rollout={"reasoning_length": 6})
    with pytest.raises(
        UserError, match="rollout.response_length=16 with rollout.reasoning_length=20 before it leaves no room"
    ):
        policy(folder, rollout={"reasoning_length": 20}, unmasking={"reasoning_steps": 5})
