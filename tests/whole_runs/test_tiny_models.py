"""The tiny models are small, load offline and behave alone as in a padded batch that mixes images and plain text."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.helpers.tiny_models import FAMILIES, build

SEQUENCE = {"input_ids", "attention_mask", "mm_token_type_ids"}
SIZES = [[(40, 24), (16, 56)], [], [(48, 48)]]  # the images of three prompts


def encode(processor, sizes, question):
    random = np.random.default_rng(len(sizes))
    images = [Image.fromarray(random.integers(0, 256, (h, w, 3), dtype=np.uint8)) for w, h in sizes]
    parts = [{"type": "image"} for _ in images] + [{"type": "text", "text": question}]
    messages = [{"role": "system", "content": "Answer."}, {"role": "user", "content": parts}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return dict(processor(text=[text], return_tensors="pt", **({"images": images} if images else {})))


def stack(tensors):
    """Concatenate on dim 0 after zero-padding the trailing dims to the largest."""
    shape = [max(sizes) for sizes in zip(*(t.shape[1:] for t in tensors), strict=True)]
    out = tensors[0].new_zeros(sum(len(t) for t in tensors), *shape)
    start = 0
    for t in tensors:
        out[(slice(start, start + len(t)), *map(slice, t.shape[1:]))] = t
        start += len(t)
    return out


def collate(rows, side, pad):
    length = max(row["input_ids"].shape[1] for row in rows)
    batch = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        tensors = [row[key] for row in rows if key in row]
        if key in SEQUENCE:
            gaps = [length - t.shape[1] for t in tensors]
            value = pad if key == "input_ids" else 0
            ends = [(gap, 0) if side == "left" else (0, gap) for gap in gaps]
            tensors = [torch.nn.functional.pad(t, end, value=value) for t, end in zip(tensors, ends, strict=True)]
        batch[key] = stack(tensors)
    return batch


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request, tmp_path_factory):
    torch.set_num_threads(1)
    path = build(request.param, tmp_path_factory.mktemp("tiny") / request.param)
    model = AutoModelForImageTextToText.from_pretrained(path).eval()
    processor = AutoProcessor.from_pretrained(path)
    rows = [encode(processor, sizes, "What digit is it?" * (i + 1)) for i, sizes in enumerate(SIZES)]
    return model, processor, rows


def test_small_with_distinct_special_tokens(loaded):
    model, processor, _ = loaded
    tok = processor.tokenizer
    assert sum(p.numel() for p in model.parameters()) < 500_000
    assert model.dtype == torch.float32 and len(tok) <= 512 and len(tok) == model.get_input_embeddings().weight.shape[0]
    assert tok.pad_token_id != tok.eos_token_id
    assert model.generation_config.eos_token_id == tok.eos_token_id
    assert model.generation_config.pad_token_id == tok.pad_token_id
    text = "What is 12 + 30? é"
    assert tok.decode(tok(text).input_ids) == text
    assert processor.image_token_id == model.config.image_token_id
    assert tok("5" + tok.eos_token).input_ids[-1] == tok.eos_token_id


def test_conversation_round_trips_through_the_template(loaded):
    _, processor, _ = loaded
    turns = [("user", "one"), ("assistant", "1"), ("user", "two")]
    messages = [{"role": role, "content": content} for role, content in turns]
    prompt = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    end = processor.tokenizer.eos_token
    assert prompt == "".join(f"<|im_start|>{r}\n{c}{end}\n" for r, c in turns) + "<|im_start|>assistant\n"


@pytest.mark.parametrize("side", ["right", "left"])
@torch.no_grad()
def test_padded_mixed_batch_equals_rows_alone(loaded, side):
    model, processor, rows = loaded
    batch = collate(rows, side, processor.tokenizer.pad_token_id)
    logits = model(**batch).logits
    for row, got, mask in zip(rows, logits, batch["attention_mask"].bool(), strict=True):
        torch.testing.assert_close(got[mask], model(**row).logits[0], atol=1e-4, rtol=0)


@torch.no_grad()
def test_head_on_hidden_states_gives_the_logits_and_images_matter(loaded):
    model, _, rows = loaded
    hidden = model.model(**rows[2]).last_hidden_state
    logits = model(**rows[2]).logits
    torch.testing.assert_close(model.lm_head(hidden), logits, atol=1e-6, rtol=0)
    other = rows[2] | {"pixel_values": -rows[2]["pixel_values"]}
    assert (model(**other).logits[0, -1] - logits[0, -1]).abs().max() > 1e-2


@torch.no_grad()
def test_left_padded_generation_replays_right_padded(loaded):
    """Prompts batched on the left are sampled; prompt + response batched on the right gives the same logits."""
    model, processor, rows = loaded
    pad, new = processor.tokenizer.pad_token_id, 4
    batch = collate(rows, "left", pad)
    torch.manual_seed(0)
    never = [[i] for i in {*processor.tokenizer.all_special_ids, *processor.tokenizer.added_tokens_decoder}]
    out = model.generate(
        **batch,
        max_new_tokens=new,
        do_sample=True,
        bad_words_ids=never,
        return_dict_in_generate=True,
        output_logits=True,
    )
    response = out.sequences[:, batch["input_ids"].shape[1] :]
    sampled = torch.stack(out.logits, 1)
    assert response.shape == (len(rows), new)
    whole = []
    for row, tokens in zip(rows, response, strict=True):
        more = {"input_ids": tokens[None], "attention_mask": torch.ones(1, new, dtype=torch.long)}
        more["mm_token_type_ids"] = torch.zeros(1, new, dtype=torch.long)
        whole.append({k: torch.cat([v, more[k]], 1) if k in SEQUENCE else v for k, v in row.items()})
    replay = model(**collate(whole, "right", pad)).logits
    for i, row in enumerate(rows):
        start = row["input_ids"].shape[1] - 1
        torch.testing.assert_close(replay[i, start : start + new], sampled[i], atol=1e-4, rtol=0)
    # plain text after images: nothing of the earlier batch may linger in the model
    alone = model.generate(**rows[1], max_new_tokens=new, do_sample=False)
    model.generate(**rows[0], max_new_tokens=new, do_sample=False)
    assert torch.equal(alone, model.generate(**rows[1], max_new_tokens=new, do_sample=False))


def test_seed_decides_the_weights(tmp_path):
    first, same, other = (
        AutoModelForImageTextToText.from_pretrained(build(FAMILIES[0], tmp_path / name, seed=seed)).lm_head.weight
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert torch.equal(first, same) and not torch.equal(first, other)
