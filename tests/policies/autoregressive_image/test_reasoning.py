"""Text before codes in one model: what is drawn, how likely it is, what counts, and where the parts lie."""

from dataclasses import replace

import pytest
import torch

from mmrl.errors import UserError
from mmrl.rollouts import IMAGE, TEXT, Prompt, part_mask
from mmrl.tasks.image_generation.data import digits
from mmrl.tasks.image_generation.tiny import image_tokens
from tests.policies.autoregressive_image.test_policy import policy_of

PROMPTS = [Prompt("a", "draw a seven", answer=7), Prompt("b", "the number three in pencil", answer=3)]
LONGEST = 6


@pytest.fixture(scope="module", params=["codebook", "janus"])
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    build = image_tokens.build_autoregressive if request.param == "codebook" else image_tokens.build_janus
    build(str(folder), seed=0)
    return folder


def policy(folder, *, guidance=1.0, rollout=None, **more):
    drawing = {"guidance": guidance, **more.pop("drawing", {})}
    return policy_of(folder, drawing=drawing, rollout={"reasoning_length": LONGEST, **(rollout or {})}, **more)


def read(policy, ids):
    """[token, ...] what the model says behind each token, alone and with nothing kept."""
    row = ids[None]
    with torch.no_grad():
        return policy.writer.hidden(policy.module.model, row, torch.ones_like(row), use_cache=False)


def by_hand(policy, record, guidance, heat):
    """Log-probabilities of every word and every code, one call of the model for each of them."""
    model, writer, found = policy.module.model, policy.writer, []
    for t, word in enumerate(record.text):
        logits = writer.text_logits(model, read(policy, torch.cat([record.prompt, record.text[:t]])))[0, -1].double()
        logits[~policy.module.allowed] = -torch.inf
        found.append((logits / heat).log_softmax(-1)[word])
    told = torch.cat([record.prompt, record.text, torch.tensor(writer.between, dtype=torch.long)])
    untold = policy.prompts.encode("")
    if writer.between:  # Janus: padding in place of words, as many tokens
        kept = torch.tensor([int(i) in (policy.tokenizer.bos_token_id, *writer.between) for i in told])
        untold = torch.where(kept, told, policy.tokenizer.pad_token_id)
    for k, code in enumerate(record.tokens):
        rows = [read(policy, torch.cat([row, record.tokens[:k]])) for row in (told, untold)]
        c, u = (writer.image_logits(model, row)[0, -1].double() for row in rows)
        found.append(((u + guidance * (c - u)) / heat).log_softmax(-1)[code - writer.first])
    return torch.stack(found)


@pytest.mark.parametrize("guidance", [1.0, 2.5])
def test_replay_is_what_the_model_says_word_by_word_and_code_by_code(folder, guidance):
    made = policy(folder, guidance=guidance, rollout={"temperature": 0.8})
    batch = made.rollout(PROMPTS, 8, list(range(16)))
    order = sorted(range(16), key=lambda i: len(batch.inputs[i].text))
    batch = batch.select(torch.tensor([order[0], order[-1], 15]))
    now = made.replay(batch, made.module)
    assert len(batch.inputs[0].text) < len(batch.inputs[1].text), "or places are not tested"
    for i, record in enumerate(batch.inputs):
        expected = by_hand(made, record, guidance, 0.8)
        torch.testing.assert_close(now.logp[i][batch.mask[i]].double(), expected, rtol=0, atol=5e-4)
        alone = made.replay(batch.select(torch.tensor([i])), made.module)
        torch.testing.assert_close(alone.logp[0][batch.mask[i]], now.logp[i][batch.mask[i]], rtol=0, atol=5e-4)


@pytest.mark.parametrize("guidance", [1.0, 2.5])
def test_the_first_ratio_is_exactly_one(folder, guidance):
    made = policy(folder, guidance=guidance)
    batch = made.rollout(PROMPTS, 2, [1, 2, 3, 4])
    now = made.replay(batch, made.module)
    with torch.no_grad():
        assert torch.equal(now.logp, made.replay(batch, made.module).logp)
    assert now.logp.requires_grad and now.logp.shape == batch.mask.shape == (4, LONGEST + made.writer.tokens_per_image)


def test_parts_and_what_counts(folder):
    made = policy(folder)
    batch = made.rollout(PROMPTS, 4, list(range(8)))
    assert made.max_decisions == LONGEST + made.writer.tokens_per_image
    for i, (record, sample) in enumerate(zip(batch.inputs, batch.samples, strict=True)):
        count, end = len(record.text), made.tokenizer.eos_token_id
        assert batch.mask[i].tolist() == [t < count or t >= LONGEST for t in range(made.max_decisions)]
        assert (record.text[:-1] != end).all() and sample.truncated == bool(record.text[-1] != end)
        assert not sample.truncated or count == LONGEST
        assert sample.response == made.tokenizer.decode(record.text, skip_special_tokens=True)
        assert (sample.response_length, sample.max_response_length) == (count, LONGEST)
        assert made.module.allowed[record.text].all() and not made.module.allowed[made.tokenizer.bos_token_id]
        assert (record.tokens >= made.writer.first).all()
    assert part_mask(batch, TEXT)[0].tolist() == [True] * LONGEST + [False] * made.writer.tokens_per_image
    assert torch.equal(part_mask(batch, IMAGE), ~part_mask(batch, TEXT))
    assert torch.equal(made.replay(batch, made.module).extras["segments"], part_mask(batch, IMAGE).long())
    numbers = made.decision_ids(batch)
    assert numbers[0][: len(batch.inputs[0].text)].tolist() == batch.inputs[0].text.tolist()
    assert (numbers[~batch.mask] == -1).all() and torch.equal(numbers[:, LONGEST:][2], batch.inputs[2].tokens)
    assert torch.equal(batch.select(torch.tensor([3, 1])).extras["parts"].values, batch.extras["parts"].values[:2])


def test_text_and_image_depend_on_the_seed_alone(folder):
    made = policy(folder)
    whole, alone = made.rollout(PROMPTS, 3, [1, 2, 3, 4, 5, 6]), made.rollout(PROMPTS[1:], 1, [6])
    assert torch.equal(whole.inputs[5].text, alone.inputs[0].text)
    assert torch.equal(whole.inputs[5].tokens, alone.inputs[0].tokens)
    made.sampler.lockstep = True  # as under ZeRO-3, where no rank stops early
    again = made.rollout(PROMPTS[1:], 1, [6])
    assert torch.equal(again.inputs[0].text, alone.inputs[0].text)


def test_first_words_are_drawn_as_likely_as_they_are(folder):
    made = policy(folder, guidance=2.0, rollout={"temperature": 0.5, "reasoning_length": 1})
    batch = made.rollout(PROMPTS[:1], 500, list(range(500)))
    logits = made.writer.text_logits(made.module.model, read(made, batch.inputs[0].prompt))[0, -1]
    chance = (logits.masked_fill(~made.module.allowed, -torch.inf) / 0.5).softmax(-1)
    share = torch.bincount(torch.stack([r.text[0] for r in batch.inputs]), minlength=len(chance)) / 500
    assert ((share - chance).abs() < 4.5 * (chance * (1 - chance) / 500).sqrt() + 1e-3).all()
    greedy = policy(folder, evaluation={"temperature": 0.0})
    one, other = (greedy.respond(PROMPTS[:1], [seed])[0] for seed in (1, 2))
    assert one.response == other.response and torch.equal(one.image, other.image)


def test_the_most_likely_codes_are_those_behind_the_text(folder):
    made = policy(folder, guidance=2.0)
    record = made.sampler.sample(PROMPTS[1:], [3], 0.0, 2.0)[0]
    told = torch.cat([record.prompt, record.text, torch.tensor(made.writer.between, dtype=torch.long)])
    untold = made.writer.unconditional(made.prompts.encode(""), told, made.tokenizer)
    c, u = (made.writer.image_logits(made.module.model, read(made, row))[0, -1] for row in (told, untold))
    plain = made.writer.image_logits(made.module.model, read(made, record.prompt))[0, -1]
    assert int((u + 2 * (c - u)).argmax()) == int(record.tokens[0]) - made.writer.first
    assert (c - plain).abs().max() > 1e-2  # the text says something


def test_codes_read_the_text_before_them(folder):
    made = policy(folder)
    batch = made.rollout(PROMPTS, 1, [1, 2])
    first = batch.inputs[0]
    word = made.tokenizer.convert_tokens_to_ids("pencil")
    changed = replace(first, text=torch.cat([torch.tensor([word]), first.text[1:]]))
    assert not torch.equal(changed.text, first.text)
    logp = made.replay(batch, made.module).logp
    other = made.replay(replace(batch, inputs=[changed, batch.inputs[1]]), made.module).logp
    assert (logp[0, LONGEST:] - other[0, LONGEST:]).abs().max() > 1e-3


def test_demonstrations_are_texts_and_images(folder):
    made = policy(folder, algorithm="supervised", drawing={"prompt_dropout": 0.5})
    source = digits.DigitPromptSource(size=20, seed=0, reasoning=True, wrong_share=0.5)
    prompts = [source[i] for i in range(20)]
    if made.writer.between:  # the tiny Janus draws in three colours
        prompts = [replace(p, metadata=p.metadata | {"target": p.metadata["target"].repeat(3, 1, 1)}) for p in prompts]
    batch = made.demonstrate(prompts, list(range(20)))
    assert [s.response for s in batch.samples] == [p.metadata["reasoning"] for p in prompts]
    shown = digits._digits()[1][prompts[3].metadata["image"]]
    assert batch.samples[3].response == f"the digit {digits.NAMES[shown]}" and not batch.samples[3].truncated
    assert batch.mask[:, :LONGEST].sum(1).tolist() == [4] * 20  # three words and the end
    empty = made.prompts.encode("")
    assert 4 < sum(torch.equal(record.prompt, empty) for record in batch.inputs) < 16
    torch.testing.assert_close(
        made.replay(batch, made.module).logp[2][batch.mask[2]].double(), by_hand(made, batch.inputs[2], 1.0, 1.0),
        rtol=0, atol=5e-4,
    )  # fmt: skip
    with pytest.raises(UserError, match=r"has no text to learn from; set its metadata\['reasoning'\]"):
        made.demonstrate([replace(prompts[0], metadata={"target": prompts[0].metadata["target"]})], [0])
    long = replace(prompts[0], metadata=prompts[0].metadata | {"reasoning": "a a a a a a"})
    with pytest.raises(UserError, match="has 6 tokens and an end token, more than rollout.reasoning_length=6"):
        made.demonstrate([long], [0])
    odd = replace(prompts[0], metadata=prompts[0].metadata | {"reasoning": "zebra"})
    with pytest.raises(UserError, match="that the policy never samples"):
        made.demonstrate([odd], [0])


def test_a_template_asks_for_the_prompt(folder):
    made = policy(folder, drawing={"template": "draw {} in pencil"})
    batch = made.rollout(PROMPTS[:1], 1, [0])
    assert torch.equal(batch.inputs[0].prompt, made.prompts.encode("draw draw a seven in pencil"))
    with pytest.raises(UserError, match=r"must have {} exactly once"):
        policy(folder, drawing={"template": "draw it"})


def test_layers_recompute_in_training_alone(folder):
    made = policy(folder, activation_checkpointing=True)
    plain = policy(folder)
    batch, same = (p.rollout(PROMPTS, 1, [1, 2]) for p in (made, plain))
    assert torch.equal(batch.inputs[1].tokens, same.inputs[1].tokens)
    seen = []
    layer = next(m for m in made.module.modules() if type(m).__name__ == "LlamaDecoderLayer")
    layer.register_forward_hook(lambda *_: seen.append(1))
    made.replay(batch, made.module).logp.sum().backward()
    assert made.module.model.is_gradient_checkpointing and layer.training and not layer.self_attn.training
