"""The likelihood of the inverse task as a reward: read again by hand, and from the YAML key to the advantages."""

import math
from dataclasses import replace

import pytest
import torch

from mmrl.config import validate
from mmrl.errors import UserError
from mmrl.rollouts import Prompt
from mmrl.tasks.image_generation.tiny import image_tokens
from tests.joints.parts import Table, close
from tests.policies.autoregressive_image.test_policy import policy_of

PROMPTS = [Prompt("a", "draw a seven", answer=7), Prompt("b", "the number three in pencil", answer=3)]


@pytest.fixture(scope="module", params=["codebook", "janus"])
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    build = image_tokens.build_autoregressive if request.param == "codebook" else image_tokens.build_janus
    build(str(folder), seed=0)
    return folder


def by_hand(policy, record, sample):
    """The mean over the words of a prompt, one call of the model for each of them, nothing padded."""
    tokenizer, model = policy.tokenizer, policy.module.model
    told = tokenizer(sample.prompt.text, add_special_tokens=False).input_ids
    asked = tokenizer("draw a", add_special_tokens=False).input_ids
    found = []
    for t, word in enumerate(told):
        if policy.writer.between:
            start = [tokenizer.bos_token_id, tokenizer.boi_token_id]
            seen = [*start, *[tokenizer.convert_tokens_to_ids("<image>")] * 4, tokenizer.eoi_token_id]
            more = {"pixel_values": sample.image[None].clamp(0, 1) * 2 - 1}
        else:
            seen, more = record.tokens.tolist(), {}
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*seen, *asked, *told[:t]]]), **more).logits[0, -1]
        logits = logits[: policy.writer.first].double().masked_fill(~policy.module.allowed, -torch.inf)
        found.append(float(logits.log_softmax(-1)[word]))
    return sum(found) / len(found)


def test_it_is_what_the_model_says_word_by_word(folder):
    policy = policy_of(folder, drawing={"question": "draw a"}, rollout={"temperature": 0.5, "reasoning_length": 3})
    batch = policy.rollout(PROMPTS, 2, [1, 2, 3, 4])
    found = policy.prompt_logp(batch)
    expected = [by_hand(policy, *pair) for pair in zip(batch.inputs, batch.samples, strict=True)]
    close(found, expected, atol=5e-4)
    assert len({round(value, 5) for value in found.tolist()}) == 4  # every image says something else
    alone = policy.prompt_logp(batch.select(torch.tensor([2])))
    close(alone, found[2:3], atol=5e-4)


def test_a_prompt_without_words_is_named(folder):
    policy = policy_of(folder)
    batch = policy.rollout(PROMPTS[:1], 1, [1])
    silent = replace(batch, samples=[replace(batch.samples[0], prompt=Prompt("c", ""))])
    with pytest.raises(UserError, match="prompt c has no text"):
        policy.prompt_logp(silent)


def test_images_that_tell_their_prompt_earn_more(given):
    """Rewards 1, 0, 0 and 0.5 times -4, -1, -3: r = -1, -0.5, -1.5 of mean -1, in minibatches drawn by chance."""
    made = given(
        Table([[-1.0]] * 3, rewards=[1.0, 0.0, 0.0], inverse=[[-4.0], [-1.0], [-3.0]]),
        "rollout.prompts=1",
        "rollout.group_size=3",
        "algorithm.scale=none",
        "algorithm.transforms=[{type: inverse_likelihood, weight: 0.5}]",
        "algorithm.minibatches=3",
    )
    close(made.prepare().advantages, [[0], [0.5], [-0.5]])
    close(made.batch.reports["inverse/likelihood"], -8 / 3)
    unknown = made.table.rollouts()
    unknown.rewards[1] = math.nan
    close(made.prepare(unknown).advantages, [[0.25], [0], [-0.25]])


def test_every_rollout_has_its_own_however_groups_are_shuffled(given):
    """Of groups (-4, -1), (-3, -3.5) and (-2, -8), in minibatches whose groups come in a random order."""
    made = given(
        Table([[-1.0]] * 6, group=[0, 0, 1, 1, 2, 2], inverse=[[-4.0], [-1.0], [-3.0], [-3.5], [-2.0], [-8.0]]),
        "rollout.prompts=3",
        "rollout.group_size=2",
        "algorithm.scale=none",
        "algorithm.transforms=[inverse_likelihood]",
        "engine.micro_batch=2",
        "engine.balance=none",  # longest first would put them in one order
    )
    close(made.prepare().advantages, [[-1.5], [1.5], [0.25], [-0.25], [3.0], [-3.0]])
    assert [int(part.inputs[0]) for part in made.minibatches[0]] != [0, 2, 4]


def test_decisions_that_nobody_reads_again_are_refused():
    tree = {
        "run_dir": "unset",
        "model": {"type": "diffusion", "path": "x"},
        "task": {"type": "image_generation"},
        "algorithm": {"transforms": ["inverse_likelihood"]},
    }
    with pytest.raises(UserError, match="needs images that it can read again"):
        validate(tree, "test")
