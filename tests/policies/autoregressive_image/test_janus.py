"""Models of transformers' Janus: their own codes and guidance, what is trained, files."""

import pytest
import torch
from transformers import AutoTokenizer, JanusForConditionalGeneration

from mmrl.errors import UserError
from mmrl.rollouts import Prompt
from mmrl.tasks.image_generation.tiny import image_tokens
from tests.policies.autoregressive_image.test_policy import policy_of

PROMPTS = [Prompt("a", "draw a seven", answer=7), Prompt("b", "the number three in pencil", answer=3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("janus")
    image_tokens.build_janus(str(folder), seed=0)
    return folder


def test_the_most_likely_codes_are_those_of_transformers_own_generation(folder):
    """With guidance, whose unconditional half is theirs."""
    made = policy_of(folder, drawing={"guidance": 3.0}, evaluation={"temperature": 0.0})
    sample = made.respond(PROMPTS[1:], [0])[0]
    model = JanusForConditionalGeneration.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.cat([made.prompts.encode(PROMPTS[1].text), torch.tensor([tokenizer.boi_token_id])])[None]
    model.generation_config.generation_kwargs = {"boi_token_id": tokenizer.boi_token_id}
    model.model.vision_model.config.num_image_tokens = 4
    codes = model.generate(
        ids, attention_mask=torch.ones_like(ids), generation_mode="image", guidance_scale=3.0, do_sample=False,
        use_cache=True,
    )  # fmt: skip
    expected = (model.decode_image_tokens(codes)[0].permute(2, 0, 1) + 1) / 2
    torch.testing.assert_close(sample.image, expected, rtol=0, atol=1e-5)


def test_images_become_codes_and_back(folder):
    made = policy_of(folder)
    tokens = made.writer.first + torch.tensor([[0, 23, 5, 7]])
    again = made.writer.tokens(made.module.model, made.writer.images(made.module.model, tokens))
    assert again.shape == (1, 4) and (again >= made.writer.first).all()
    many = made.writer.first + torch.arange(24).repeat(3)[: 4 * 17].view(17, 4)  # more than are decoded at once
    apart = torch.cat([made.writer.images(made.module.model, row[None]) for row in many])
    torch.testing.assert_close(made.writer.images(made.module.model, many), apart, rtol=0, atol=5e-5)
    with pytest.raises(
        UserError, match=r"images of \[3, 4, 4\] .channels, height, width. do not fit .* generates \[3, 8, 8\]"
    ):
        made.writer.tokens(made.module.model, torch.zeros(1, 3, 4, 4))


def test_what_reads_images_and_decodes_codes_is_not_trained(folder):
    for lora in (None, {"rank": 2, "alpha": 4}):
        made = policy_of(folder, lora=lora, rollout={"reasoning_length": 3})
        batch = made.rollout(PROMPTS, 1, [1, 2])
        made.replay(batch, made.module).logp.sum().backward()
        trained = {n for n, p in made.module.named_parameters() if p.requires_grad}
        grown = {n for n, p in made.module.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
        assert trained and not [n for n in trained if "vqmodel" in n or "vision_model" in n or ".aligner" in n]
        assert any("generation_head" in n for n in grown) and any("language_model" in n for n in grown)
        if lora is None:
            assert trained == grown


@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 4}])
def test_what_is_saved_loads_again(folder, tmp_path, lora):
    made = policy_of(folder, rollout={"reasoning_length": 3}, lora=lora)
    with torch.no_grad():
        for parameter in made.module.parameters():
            if parameter.requires_grad:
                parameter += 0.5 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    made.save(tmp_path, made.module.state_dict())
    again = policy_of(tmp_path, rollout={"reasoning_length": 3})
    one, other, before = (p.rollout(PROMPTS, 1, [5, 6]) for p in (made, again, policy_of(folder)))
    assert torch.equal(one.samples[1].image, other.samples[1].image)
    assert one.samples[1].response == other.samples[1].response
    assert not torch.equal(one.samples[1].image, before.samples[1].image)
    if lora is None:
        tokens = one.inputs[1].tokens - made.writer.first
        model = JanusForConditionalGeneration.from_pretrained(tmp_path).eval()
        with torch.no_grad():
            drawn = (model.model.vqmodel.decode(tokens[None])[0] + 1) / 2
        torch.testing.assert_close(drawn, one.samples[1].image, rtol=0, atol=1e-5)


def test_files_of_the_processor_are_kept(folder, tmp_path):
    (tmp_path / "in").mkdir()
    for file in folder.iterdir():
        (tmp_path / "in" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "in" / "processor_config.json").write_text('{"num_image_tokens": 4}')
    made = policy_of(tmp_path / "in")
    made.save(tmp_path / "out", made.module.state_dict())
    assert (tmp_path / "out" / "processor_config.json").read_text() == '{"num_image_tokens": 4}'


def test_a_tokenizer_without_a_beginning_of_images_is_refused(folder, tmp_path):
    made = policy_of(folder)
    made.save(tmp_path, made.module.state_dict())
    image_tokens.tiny.word_tokenizer(["draw"], 8).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="no boi_token, which begins an image"):
        policy_of(tmp_path)
