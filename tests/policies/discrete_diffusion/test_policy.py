"""Masked diffusion models as policies: what they read and write, from folders and back."""

import json
from dataclasses import replace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import (
    AutoModelForMaskedLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from mmrl.errors import UserError
from mmrl.policies.discrete_diffusion.settings import Trace
from mmrl.rollouts import Prompt
from mmrl.tasks.image_generation.data.digits import DigitPromptSource
from mmrl.tasks.image_generation.tiny import image_tokens
from mmrl.tasks.text_sums import tiny_model
from tests.policies.discrete_diffusion.parts import PROMPT, Exact, policy_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("masked")


def qwen(folder):
    """A causal model with the tokenizer of the sums."""
    tokenizer = tiny_model.build_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer) + 3, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def modern(folder):
    tokenizer = tiny_model.build_tokenizer()
    config = ModernBertConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32, pad_token_id=0, global_attn_every_n_layers=1, reference_compile=False,
    )  # fmt: skip
    torch.manual_seed(0)
    ModernBertForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


BUILDERS = {"bert": None, "qwen2": qwen, "modernbert": modern}


@pytest.mark.parametrize("kind", BUILDERS)
def test_every_class_reads_what_stands_behind_a_place_and_writes_what_it_can(kind, tmp_path):
    if BUILDERS[kind]:
        BUILDERS[kind](tmp_path)
    policy = policy_of(tmp_path, length=4, build=BUILDERS[kind] is None)
    batch = policy.rollout([PROMPT], 6, list(range(6)))
    written = torch.stack([record.response for record in batch.inputs])
    assert not torch.isin(written, policy.layout.vocabulary.suppressed).any()
    now = policy.replay(batch, policy.module)
    with torch.no_grad():
        assert torch.equal(now.logp, policy.replay(batch, policy.module).logp)
    # With the last place known, what is said of the first one changes.
    record = replace(batch.inputs[0], steps=torch.tensor([1, 0, 0, 0]))
    policy.likelihood = Trace()
    first = []
    for last in (4, 9):
        changed = replace(record, response=torch.cat([record.response[:3], torch.tensor([last])]))
        with torch.no_grad():
            first.append(policy.replay(replace(batch, inputs=[changed] * 6), policy.module).logp[0, 0])
    assert first[0] != first[1]


def test_a_shifted_model_says_a_token_at_the_place_before(tmp_path):
    qwen(tmp_path)
    plain, shifted = (policy_of(tmp_path, build=False, shifted=on) for on in (False, True))
    ids = torch.arange(2, 12)[None]
    there, row = torch.ones_like(ids, dtype=torch.bool), torch.zeros(3, dtype=torch.long)
    places = torch.tensor([4, 5, 6])
    with torch.no_grad():
        torch.testing.assert_close(
            plain.module.logits(ids, there, row, places - 1), shifted.module.logits(ids, there, row, places)
        )


def test_padding_changes_nothing(folder):
    policy = policy_of(folder, length=4)
    long = Prompt("long", "99+99=", answer="198")
    batch = policy.rollout([PROMPT, long], 1, [1, 2])
    with torch.no_grad():
        whole = policy.replay(batch, policy.module).logp
        alone = policy.replay(batch.select(torch.tensor([0])), policy.module).logp
    torch.testing.assert_close(whole[:1], alone, rtol=0, atol=1e-5)


def test_what_stands_behind_the_end_does_not_count(folder):
    policy = policy_of(folder, length=4)
    end = policy.layout.vocabulary.end
    records = policy.rollout([PROMPT], 3, [1, 2, 3]).inputs
    responses = [[4, end, 5, end], [4, 5, 6, 7], [end, 4, 4, 4]]
    records = [replace(r, response=torch.tensor(x)) for r, x in zip(records, responses, strict=True)]
    made = policy.layout.rollouts([PROMPT] * 3, records, 3, policy._forwards)
    assert made.mask.tolist() == [[True, True, False, False], [True] * 4, [True, False, False, False]]
    assert [s.response for s in made.samples] == ["0", "0123", ""]
    assert [s.response_length for s in made.samples] == [2, 4, 1]
    assert [s.truncated for s in made.samples] == [False, True, False]
    assert policy.decision_ids(made)[0].tolist() == [4, end, -1, -1]


def test_demonstrations_are_scored_by_the_bound_with_other_states_for_every_seed(folder):
    policy = policy_of(folder, length=4, algorithm="supervised", unmasking={"draws": 2})
    made = policy.demonstrate([PROMPT, PROMPT], [1, 2])
    end = policy.layout.vocabulary.end
    assert made.inputs[0].response.tolist() == [*policy.layout.tokenizer("31").input_ids, end, end]
    assert made.mask[0].tolist() == [True, True, True, False]
    empty = [policy.scoring_states(record).masked for record in made.inputs]
    assert empty[0].shape == (2, 4)
    many = [policy.scoring_states(r).masked for r in policy.demonstrate([PROMPT] * 20, list(range(20))).inputs]
    assert len({tuple(e.flatten().tolist()) for e in many}) > 10
    with pytest.raises(UserError, match="has 6 tokens, more than rollout.response_length=4"):
        policy.demonstrate([Prompt("p", "1+1=", answer="123456")], [0])
    with pytest.raises(UserError, match="that the policy never samples"):
        policy.demonstrate([Prompt("p", "1+1=", answer="x")], [0])


def test_a_view_is_the_same_response_to_another_prompt(folder):
    policy = policy_of(folder)
    batch = policy.rollout([PROMPT], 2, [1, 2])
    viewed = policy.view(batch, lambda prompt: replace(prompt, text="9+9="))
    assert torch.equal(viewed.inputs[1].response, batch.inputs[1].response)
    assert torch.equal(viewed.inputs[1].prompt, policy.layout.encode(Prompt("", "9+9=")))


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_what_is_saved_loads_in_transformers_and_here(folder, tmp_path, lora):
    policy = policy_of(folder, **({} if lora is None else {"lora": lora}))
    policy.save(tmp_path, policy.module.state_dict())
    again = policy_of(tmp_path, build=False, perturbed=0.0)
    one, other = (p.rollout([PROMPT], 4, [1, 2, 3, 4]) for p in (policy, again))
    assert [r.response.tolist() for r in one.inputs] == [r.response.tolist() for r in other.inputs]
    if lora is None:
        assert type(AutoModelForMaskedLM.from_pretrained(tmp_path)).__name__ == "BertForMaskedLM"
        assert load_file(tmp_path / "model.safetensors")
    else:
        assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 2


def test_what_does_not_fit_is_one_line(folder, tmp_path):
    with pytest.raises(UserError, match="leaves no room for a prompt in the context of .*, 32 tokens"):
        policy_of(folder, length=32)
    with pytest.raises(UserError, match=r"model.mask_token=<hole> is not in the vocabulary"):
        policy_of(folder, mask_token="<hole>", build=False)
    with pytest.raises(UserError, match="has images, videos or several messages, which"):
        policy_of(folder).layout.encode(Prompt("p", "1+1=", (Image.new("RGB", (2, 2)),)))
    with pytest.raises(UserError, match="prompt p has 0 tokens"):
        policy_of(folder).layout.encode(Prompt("p", ""))
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    with pytest.raises(UserError, match="is a model of type clip, which does not write text"):
        policy_of(tmp_path, build=False)


def test_images_are_written_as_codes(tmp_path):
    image_tokens.build_masked(str(tmp_path), seed=0)
    policy = policy_of(tmp_path, length=16, build=False, perturbed=0.0)
    prompt = DigitPromptSource(size=10, seed=0)[3]
    made = policy.rollout([prompt], 2, [1, 2])
    assert made.mask.all() and made.samples[0].image.shape == (1, 8, 8)
    assert torch.equal(policy.layout.codebook.encode(made.samples[1].image[None])[0], made.inputs[1].response)
    with torch.no_grad():
        assert torch.equal(policy.replay(made, policy.module).logp, policy.replay(made, policy.module).logp)
    shown = policy_of(tmp_path, length=16, build=False, algorithm="supervised").demonstrate([prompt], [0])
    assert (shown.samples[0].image - prompt.metadata["target"]).square().mean() < 0.05
    policy.save(tmp_path / "again", policy.module.state_dict())
    assert policy_of(tmp_path / "again", length=16, build=False).layout.codebook.tokens_per_image == 16
    with pytest.raises(UserError, match="generates images of 16 tokens; set it to 16"):
        policy_of(tmp_path, length=4, build=False)


def test_temperatures_reach_what_is_drawn_and_what_is_replayed(folder):
    """Of rollouts in the distribution and its likelihood; of evaluation in the distribution alone."""
    hot, cold = (policy_of(folder, length=1, rollout={"temperature": t}) for t in (2.0, 0.5))
    exact = Exact(hot, 1)
    logits = exact.table([None])[0]
    for policy, heat in ((hot, 2.0), (cold, 0.5)):
        batch = policy.rollout([PROMPT], 2000, list(range(2000)))
        token = torch.stack([record.response[0] for record in batch.inputs])
        chance = (logits / heat).softmax(-1)
        share = torch.bincount(token, minlength=len(chance)) / 2000
        assert ((share - chance).abs() < 4.5 * (chance * (1 - chance) / 2000).sqrt() + 1e-3).all()
        policy.likelihood = Trace()
        with torch.no_grad():
            found = policy.replay(batch, policy.module).logp[:, 0].double()
        torch.testing.assert_close(found, chance.log()[token], rtol=0, atol=1e-4)
    assert {s.response for s in hot.respond([PROMPT] * 9, list(range(9)))} == {
        hot.layout.tokenizer.decode(logits.argmax(-1), skip_special_tokens=True)
    }
