import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from mmrl.tasks.visual_qa.data.digits import DigitsSource
from mmrl.tasks.visual_qa.tiny.model import build


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    build(path, seed=0)
    return path


@pytest.fixture(scope="module")
def processor(folder):
    return AutoProcessor.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(folder):
    return AutoModelForImageTextToText.from_pretrained(folder).eval()


def encode(processor, prompts):
    messages = [
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": prompt.text}]}] for prompt in prompts
    ]
    texts = [processor.apply_chat_template(message, add_generation_prompt=True) for message in messages]
    return processor(text=texts, images=[list(prompt.images) for prompt in prompts], return_tensors="pt", padding=True)


def test_one_image_token_a_cell_and_no_resizing(processor):
    prompts = list(DigitsSource(size=10, seed=0))
    inputs = encode(processor, prompts)
    image_token = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert (inputs["input_ids"] == image_token).sum(1).tolist() == [3] * 10
    assert inputs["image_grid_thw"].tolist() == [[1, 1, 3]] * 10
    patches = inputs["pixel_values"].reshape(10, 3, 3, 2, 8, 8)  # image, cell, channel, time, height, width
    image = torch.frombuffer(bytearray(prompts[0].images[0].tobytes()), dtype=torch.uint8).reshape(8, 24, 3)
    red = (image[:, 8:16, 0] / 255 - processor.image_processor.image_mean[0]) / processor.image_processor.image_std[0]
    torch.testing.assert_close(patches[0, 1, 0, 0], red)


def test_tokenizer_knows_every_question_and_splits_digits(processor):
    tokenizer = processor.tokenizer
    assert len(tokenizer) <= 512
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    for prompt in DigitsSource("heldout", size=200, seed=5):
        for text in (prompt.text, prompt.answer):
            assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
        assert len(tokenizer(prompt.text)["input_ids"]) <= 9
        assert len(tokenizer(prompt.answer)["input_ids"]) == (len(prompt.answer) if prompt.answer.isdigit() else 1)
    text = "é <answer>14</answer>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_model_is_small_ties_its_head_and_sees_the_image(processor, model):
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight
    inputs = encode(processor, list(DigitsSource(size=2, seed=0)))
    with torch.no_grad():
        seen = model(**inputs).logits
        other = model(**(inputs | {"pixel_values": inputs["pixel_values"].flip(0)})).logits
    assert torch.isfinite(seen).all()
    assert not torch.equal(seen, other)


def test_generation_stops_at_the_end_of_turn(processor, model):
    assert model.generation_config.eos_token_id == processor.tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == processor.tokenizer.pad_token_id
    inputs = encode(processor, list(DigitsSource(size=4, seed=0)))
    out = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert out.shape[0] == 4 and out.shape[1] <= inputs["input_ids"].shape[1] + 4


def test_weights_depend_on_the_seed_alone(folder, tmp_path):
    before = torch.get_rng_state()
    build(tmp_path / "same", seed=0)
    build(tmp_path / "other", seed=1)
    assert torch.equal(before, torch.get_rng_state())
    weights = [(path / "model.safetensors").read_bytes() for path in (folder, tmp_path / "same", tmp_path / "other")]
    assert weights[0] == weights[1] != weights[2]
