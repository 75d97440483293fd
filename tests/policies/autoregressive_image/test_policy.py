"""Language models that write images as codes: what is drawn, how likely it is, guidance, files."""

from dataclasses import replace

import pytest
import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from mmrl.config import validate
from mmrl.errors import UserError
from mmrl.policies import codebook
from mmrl.rollouts import Prompt
from mmrl.tasks.image_generation.data import digits
from mmrl.tasks.image_generation.tiny import image_tokens

PROMPTS = [Prompt("a", "draw a seven", answer=7), Prompt("b", "the number three in pencil", answer=3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("codes")
    image_tokens.build_autoregressive(str(folder), seed=0)
    return folder


def policy_of(folder, *, drawing=None, algorithm="grpo", rollout=None, evaluation=None, **model):
    tree = {
        "run_dir": "unset",
        "model": {"type": "autoregressive_image", "path": str(folder), **model},
        "task": {"type": "image_generation"},
        "algorithm": {"type": algorithm},
        "rollout": rollout or {},
        "drawing": drawing or {},
        "evaluation": evaluation or {},
    }
    config = validate(tree, "test")
    return config.model.load(config, None, str(folder))


def by_hand(policy, record, guidance):
    """[place, code] logits of one image, one call of the model for each place, nothing padded and nothing kept."""
    model, first, count = policy.module.model, policy.writer.first, policy.writer.count
    rows = []
    for place in range(policy.writer.tokens_per_image):
        found = []
        for prompt in (record.prompt, policy.prompts.encode(policy.drawing.negative_prompt)):
            with torch.no_grad():
                read = torch.cat([prompt, record.tokens[:place]])[None]
                found.append(model(input_ids=read).logits[0, -1, first : first + count].double())
        told, untold = found
        rows.append(untold + guidance * (told - untold) if guidance != 1 else told)
    return torch.stack(rows)


@pytest.mark.parametrize("guidance", [1.0, 2.5])
def test_replay_is_what_the_model_says_code_by_code(folder, guidance):
    policy = policy_of(folder, drawing={"guidance": guidance}, rollout={"temperature": 0.7})
    batch = policy.rollout(PROMPTS, 2, [1, 2, 3, 4])
    now = policy.replay(batch, policy.module)
    for i in (0, 3):
        record = batch.inputs[i]
        logp = (by_hand(policy, record, guidance) / 0.7).log_softmax(-1)
        expected = logp[range(16), record.tokens - policy.writer.first]
        torch.testing.assert_close(now.logp[i].double(), expected, rtol=0, atol=3e-4)
        torch.testing.assert_close(now.entropy[i].double(), -(logp.exp() * logp).sum(-1), rtol=0, atol=3e-4)


@pytest.mark.parametrize("guidance", [1.0, 2.5])
def test_the_first_ratio_is_exactly_one(folder, guidance):
    policy = policy_of(folder, drawing={"guidance": guidance})
    batch = policy.rollout(PROMPTS, 2, [1, 2, 3, 4])
    now = policy.replay(batch, policy.module)
    with torch.no_grad():
        assert torch.equal(now.logp, policy.replay(batch, policy.module).logp)
    assert now.logp.requires_grad and now.logp.shape == batch.mask.shape == (4, 16)


@pytest.mark.parametrize("guidance", [1.0, 2.5])
def test_sampling_is_the_guided_distribution_at_its_temperature(folder, guidance):
    """First codes of many rollouts against the model's own probabilities; the most likely code at temperature 0."""
    policy = policy_of(folder, drawing={"guidance": guidance}, rollout={"temperature": 0.5})
    batch = policy.rollout(PROMPTS[:1], 3000, list(range(3000)))
    chance = (by_hand(policy, batch.inputs[0], guidance)[0] / 0.5).softmax(-1)
    first = torch.stack([record.tokens[0] for record in batch.inputs]) - policy.writer.first
    share = torch.bincount(first, minlength=128) / 3000
    error = (chance * (1 - chance) / 3000).sqrt()
    assert ((share - chance).abs() < 4.5 * error + 1e-3).all()
    greedy = policy_of(
        folder, drawing={"guidance": 1.0, "evaluation_guidance": guidance}, evaluation={"temperature": 0.0}
    )
    one, other = (greedy.respond(PROMPTS[:1], [seed])[0].image for seed in (1, 2))
    assert torch.equal(one, other)
    record = replace(batch.inputs[0], tokens=greedy.writer.codebook.encode(one[None])[0])
    assert torch.equal(by_hand(greedy, record, guidance).argmax(-1), record.tokens - greedy.writer.first)


def test_guidance_changes_what_is_said(folder):
    logp = []
    for guidance in (1.0, 1.5):
        policy = policy_of(folder, drawing={"guidance": guidance})
        batch = policy_of(folder).rollout(PROMPTS, 1, [1, 2])
        logp.append(policy.replay(batch, policy.module).logp)
    assert (logp[0] - logp[1]).abs().max() > 1e-2


def test_an_image_depends_on_its_seed_alone(folder):
    policy = policy_of(folder)
    whole, alone = policy.rollout(PROMPTS, 2, [1, 2, 3, 4]), policy.rollout(PROMPTS[1:], 1, [4])
    assert torch.equal(whole.inputs[3].tokens, alone.inputs[0].tokens)
    assert not torch.equal(whole.inputs[2].tokens, whole.inputs[3].tokens)


def test_an_error_while_sampling_leaves_activation_checkpointing_on(folder, monkeypatch):
    policy = policy_of(folder)
    layer = next(m for m in policy.module.modules() if isinstance(m, GradientCheckpointingLayer))
    switched = []

    def fails(*_, **__):
        switched.append(layer.training)
        raise ZeroDivisionError

    monkeypatch.setattr(policy.module, "hidden", fails)
    with pytest.raises(ZeroDivisionError):
        policy.rollout(PROMPTS, 1, [1, 2])
    assert switched == [False] and layer.training


def test_demonstrations_are_images_as_codes_some_without_their_prompt(folder):
    policy = policy_of(folder, algorithm="supervised", drawing={"prompt_dropout": 0.5, "guidance": 3.0})
    source = digits.DigitPromptSource(size=40, seed=0)
    prompts = [source[i] for i in range(40)]
    made = policy.demonstrate(prompts, list(range(40)))
    empty = policy.prompts.encode("")
    dropped = sum(torch.equal(record.prompt, empty) for record in made.inputs)
    assert 8 < dropped < 32
    target = torch.stack([p.metadata["target"] for p in prompts])
    drawn = torch.stack([sample.image for sample in made.samples])
    assert (drawn - target).square().mean() < 0.02  # what 128 codes lose
    unguided = policy_of(folder).replay(made, policy.module).logp
    assert torch.equal(policy.replay(made, policy.module).logp, unguided)
    with pytest.raises(UserError, match="has no image to learn from"):
        policy.demonstrate(PROMPTS, [0, 1])


def test_a_view_is_the_same_image_under_another_prompt(folder):
    policy = policy_of(folder)
    batch = policy.rollout(PROMPTS, 1, [1, 2])
    viewed = policy.view(batch, lambda prompt: replace(prompt, text="draw a one"))
    assert torch.equal(viewed.inputs[0].prompt, policy.prompts.encode("draw a one"))
    assert torch.equal(policy.decision_ids(viewed), policy.decision_ids(batch))


def test_codes_and_images_by_hand():
    patches = torch.tensor([0.0, 1.0]).view(2, 1, 1, 1).expand(2, 1, 2, 2).clone()
    codes = codebook.Codebook(patches, rows=1, columns=3, first=10)
    image = torch.cat([torch.zeros(1, 2, 2), torch.ones(1, 2, 2), torch.full((1, 2, 2), 0.9)], 2)
    assert codes.size == (1, 2, 6) and codes.encode(image[None]).tolist() == [[10, 11, 11]]
    assert torch.equal(
        codes.decode(torch.tensor([[11, 10, 10]]))[0], torch.cat([torch.ones(1, 2, 2), torch.zeros(1, 2, 4)], 2)
    )
    assert codes.non_code_tokens(14).tolist() == [*range(10), 12, 13]
    with pytest.raises(UserError, match=r"codes are tokens 10 to 11, but the model in its folder has 11 tokens"):
        codes.non_code_tokens(11)
    with pytest.raises(UserError, match=r"\[1, 4, 4\] .* do not fit the model's codebook, which is for \[1, 2, 6\]"):
        codes.encode(torch.zeros(1, 1, 4, 4))


def test_what_is_saved_loads_again(folder, tmp_path):
    policy = policy_of(folder)
    policy.save(tmp_path, policy.module.state_dict())
    again = policy_of(tmp_path)
    one, other = (p.rollout(PROMPTS, 1, [5, 6]) for p in (policy, again))
    assert torch.equal(one.samples[1].image, other.samples[1].image)


def test_what_does_not_fit_is_one_line(folder, tmp_path):
    policy = policy_of(folder)
    policy.save(tmp_path, policy.module.state_dict())
    with pytest.raises(UserError, match="has 5 tokens, but needs from 1 to rollout.max_prompt_length=3"):
        policy_of(folder, rollout={"max_prompt_length": 3}).rollout(PROMPTS[:1], 1, [0])
    codebook.write(tmp_path, replace(policy.writer.codebook, first=policy.writer.first + 5))
    with pytest.raises(UserError, match="use the codebook that the model was trained with"):
        policy_of(tmp_path)
    (tmp_path / "codebook.safetensors").unlink()
    with pytest.raises(UserError, match=r"has no codebook.safetensors"):
        policy_of(tmp_path)


def test_every_word_of_a_prompt_is_read(folder):
    policy = policy_of(folder)
    assert (
        len({tuple(policy.prompts.encode(text).tolist()) for text in ("draw a seven", "draw a one", "draw a 7", "")})
        == 4
    )
