"""Tiny random vision-language models with their processors, built from configs: nothing is downloaded.

`build(family, path)` writes a model of some 0.2M fp32 parameters that `AutoProcessor` and `AutoModelForImageTextToText`
load from `path`. Images of 16 to 64 pixels cost a few tokens each.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CLIPImageProcessor,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessor,
    Gemma3Processor,
    Gemma4AudioFeatureExtractor,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4ImageProcessor,
    Gemma4Processor,
    Gemma4VideoProcessor,
    GenerationConfig,
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Glm4vImageProcessor,
    Glm4vProcessor,
    Glm4vVideoProcessor,
    Glm46VConfig,
    Glm46VForConditionalGeneration,
    GotOcr2ImageProcessor,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessor,
    Idefics3Processor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVideoProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    LlavaProcessor,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralImageProcessor,
    PixtralProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

PAD, EOS, START = "<|endoftext|>", "<|im_end|>", "<|im_start|>"
VOCAB, TILE, INIT = 512, 32, 0.1

# ChatML; `image` is what the family's processor expands. Assistant turns are closed by the end-of-turn token.
TEMPLATE = """\
{%- for message in messages -%}
{{- start + message['role'] + '\n' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}{{- image -}}{%- elif part['type'] == 'text' -%}{{- part['text'] -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- eos + '\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- start + 'assistant\n' -}}{%- endif -%}
"""

WORDS = """zero one two three four five six seven eight nine ten eleven twelve twenty thirty hundred
system user assistant What digit number is shown in the image? Which is the largest? left right first second sum
How many images are there? Answer with one number. The answer is <think> </think> <answer> </answer> \\boxed{}"""


def tokenizer(special: list[str], eos: str = EOS, **named: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most VOCAB entries trained on small numbers; `named` become attributes (`image_token`)."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    every = list(dict.fromkeys([PAD, START, eos, *special]))
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=every,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sums = [f"{a} + {b} = {a + b}. The sum of {a} and {b} is {a + b}." for a in range(10) for b in range(10)]
    bpe.train_from_iterator([WORDS] * 20 + sums, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=eos,
        extra_special_tokens=named | {"turn_token": START} if named else [t for t in every if t not in (PAD, eos)],
        padding_side="right",
        clean_up_tokenization_spaces=False,
    )


def template(image: str, eos: str = EOS) -> str:
    names = f"{{%- set start, image, eos = '{START}', '{image}', '{eos}' -%}}\n"
    return names + TEMPLATE


def text_config(tok: PreTrainedTokenizerFast, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tok),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": INIT,
        "bos_token_id": None,
        "eos_token_id": tok.eos_token_id,
        "pad_token_id": tok.pad_token_id,
        **more,
    }


def vision_config(**more: Any) -> dict[str, Any]:
    return {"hidden_size": 32, "intermediate_size": 64, "patch_size": 8, "initializer_range": INIT, **more}


def ids(tok: PreTrainedTokenizerFast, **tokens: str) -> dict[str, int]:
    return {name: tok.convert_tokens_to_ids(token) for name, token in tokens.items()}


Built = tuple[PreTrainedModel, ProcessorMixin]


def qwen(config: type, model: type, processor: type, video: type, text: dict, vision: dict, *, tied: bool) -> Built:
    """Patches of 8 pixels merged 2 x 2: one token for 16 x 16 pixels, at most 16 tokens per image."""
    names = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    tok = tokenizer(list(names.values()))
    sizes = {"patch_size": 8, "temporal_patch_size": 2, "merge_size": 2}
    pixels = {"size": {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}}
    cfg = config(
        text_config=text_config(tok, **text),
        vision_config=vision_config(depth=2, num_heads=2, out_hidden_size=64, **vision),
        tie_word_embeddings=tied,
        **ids(tok, **names),
    )
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    return model(cfg), processor(
        Qwen2VLImageProcessor(**sizes, **pixels), tok, video(**sizes, **pixels), chat_template=template(image)
    )


def qwen2_5_vl() -> Built:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    return qwen(
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLVideoProcessor,
        {"rope_parameters": rope},
        {"window_size": 32, "fullatt_block_indexes": [1]},
        tied=False,
    )


def qwen3_vl() -> Built:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    return qwen(
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
        {"rope_parameters": rope, "head_dim": 16},
        {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
        tied=True,
    )


def qwen3_vl_moe() -> Built:
    """Two of eight experts a token, in every layer. vLLM on a CPU has kernels for heads of 32."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    experts["norm_topk_prob"] = True  # as published; transformers always does so, vLLM reads it
    return qwen(
        Qwen3VLMoeConfig,
        Qwen3VLMoeForConditionalGeneration,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
        {"rope_parameters": rope, "head_dim": 32, **experts},
        {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
        tied=False,
    )


def idefics3() -> Built:
    """Every image becomes 2 or 4 tiles and a global view, of 4 tokens each."""
    eos, image = "<end_of_utterance>", "<image>"
    cells = [f"<row_{row}_col_{col}>" for row in (1, 2) for col in (1, 2)]
    tok = tokenizer([image, "<fake_token_around_image>", "<global-img>", *cells], eos)
    cfg = Idefics3Config(
        text_config=text_config(tok, model_type="llama"),
        vision_config=vision_config(num_hidden_layers=2, num_attention_heads=2, image_size=TILE),
        scale_factor=2,
        tie_word_embeddings=False,
        pad_token_id=tok.pad_token_id,
        **ids(tok, image_token_id=image),
    )
    pixels = Idefics3ImageProcessor(size={"longest_edge": 2 * TILE}, max_image_size={"longest_edge": TILE})
    processor = Idefics3Processor(pixels, tok, image_seq_len=4, chat_template=template(image, eos))
    return Idefics3ForConditionalGeneration(cfg), processor


def llava_onevision() -> Built:
    """A base view of 4 tokens and up to two tiles of 4, whose padding is cut and whose rows end in a newline token."""
    image, video, grid = "<image>", "<video>", [[TILE, TILE], [TILE, 2 * TILE], [2 * TILE, TILE]]
    tok = tokenizer([image, video])
    cfg = LlavaOnevisionConfig(
        text_config=text_config(tok, model_type="qwen2"),
        vision_config=vision_config(
            model_type="siglip_vision_model",
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=TILE,
            vision_use_head=False,
        )
        | {"patch_size": 16},
        image_grid_pinpoints=grid,
        tie_word_embeddings=False,
        **ids(tok, image_token_index=image, video_token_index=video),
    )
    size = {"height": TILE, "width": TILE}
    processor = LlavaOnevisionProcessor(
        LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=grid),
        tok,
        LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=4,
        vision_feature_select_strategy="full",
        chat_template=template(image),
    )
    return LlavaOnevisionForConditionalGeneration(cfg), processor


def internvl() -> Built:
    """One or two tiles of 4 tokens, with a thumbnail where there are two."""
    named = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    tok = tokenizer(list(named.values()), **named)
    cfg = InternVLConfig(
        text_config=text_config(tok, model_type="qwen2"),
        vision_config=vision_config(num_hidden_layers=2, num_attention_heads=2, image_size=TILE),
        image_seq_length=4,
        downsample_ratio=0.5,
        tie_word_embeddings=True,
        **ids(tok, image_token_id="<IMG_CONTEXT>"),
    )
    size = {"height": TILE, "width": TILE}
    processor = InternVLProcessor(
        GotOcr2ImageProcessor(size=size, crop_to_patches=True, max_patches=2),
        tok,
        InternVLVideoProcessor(size=size),
        image_seq_length=4,
        chat_template=template("<IMG_CONTEXT>"),
    )
    return InternVLForConditionalGeneration(cfg), processor


def gemma3() -> Built:
    """Every image becomes 4 tokens, which see each other; the embeddings are scaled by the root of their width."""
    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tok = tokenizer(list(named.values()), **named)
    cfg = Gemma3Config(
        text_config=text_config(tok, head_dim=16, query_pre_attn_scalar=16, sliding_window=64),
        vision_config=vision_config(num_hidden_layers=2, num_attention_heads=2, image_size=TILE, vision_use_head=False),
        mm_tokens_per_image=4,
        initializer_range=INIT,
        **ids(tok, boi_token_index="<start_of_image>", eoi_token_index="<end_of_image>"),
        **ids(tok, image_token_index="<image_soft_token>"),
    )
    pixels = Gemma3ImageProcessor(size={"height": TILE, "width": TILE})
    processor = Gemma3Processor(pixels, tok, chat_template=template("<start_of_image>"), image_seq_length=4)
    model = Gemma3ForConditionalGeneration(cfg)
    # transformers starts it at 0, where norms of features make gradients a thousand times larger
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=INIT)
    return model, processor


def llava() -> Built:
    """CLIP and Llama; every image becomes 16 tokens."""
    tok = tokenizer(["<image>"])
    cfg = LlavaConfig(
        text_config=text_config(tok, model_type="llama"),
        vision_config=vision_config(
            model_type="clip_vision_model", num_hidden_layers=3, num_attention_heads=2, image_size=TILE
        ),
        image_seq_length=16,
        tie_word_embeddings=False,
        **ids(tok, image_token_index="<image>"),
    )
    size = {"height": TILE, "width": TILE}
    pixels = CLIPImageProcessor(size={"shortest_edge": TILE}, crop_size=size)
    strategy: dict[str, Any] = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    processor = LlavaProcessor(pixels, tok, patch_size=8, chat_template=template("<image>"), **strategy)
    return LlavaForConditionalGeneration(cfg), processor


def qwen3_5() -> Built:
    """One layer of linear attention, whose state has no positions, and one of full attention."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    linear = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2}
    layers = {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4}
    return qwen(
        Qwen3_5Config,
        Qwen3_5ForConditionalGeneration,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
        {"rope_parameters": rope | {"partial_rotary_factor": 1.0}, "head_dim": 16, **linear, **layers},
        {"num_position_embeddings": 64},
        tied=False,
    )


def glm4v(config: type = Glm4vConfig, model: type = Glm4vForConditionalGeneration) -> Built:
    """Patches of 8 pixels merged 2 x 2, as Qwen's."""
    names = {
        "image_token_id": "<|image|>",
        "video_token_id": "<|video|>",
        "image_start_token_id": "<|begin_of_image|>",
        "image_end_token_id": "<|end_of_image|>",
        "video_start_token_id": "<|begin_of_video|>",
        "video_end_token_id": "<|end_of_video|>",
    }
    tok = tokenizer(list(names.values()))
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
    vision = {"depth": 2, "num_heads": 2, "out_hidden_size": 64, "image_size": TILE}
    cfg = config(
        text_config=text_config(tok, model_type="glm4v_text", rope_parameters=rope),
        vision_config=vision_config(model_type="glm4v_vision", **vision),
        **ids(tok, **names),
    )
    sizes = {"patch_size": 8, "temporal_patch_size": 2, "merge_size": 2}
    pixels = {"size": {"shortest_edge": 2 * 16 * 16, "longest_edge": 2 * 64 * 64}}
    image = "<|begin_of_image|><|image|><|end_of_image|>"
    processor = Glm4vProcessor(
        Glm4vImageProcessor(**sizes, **pixels),
        tok,
        Glm4vVideoProcessor(**sizes, **pixels),
        chat_template=template(image),
    )
    return model(cfg), processor


def glm46v() -> Built:
    return glm4v(Glm46VConfig, Glm46VForConditionalGeneration)


def mistral3() -> Built:
    """Pixtral and Mistral: patches of 8 pixels merged 2 x 2, a token that ends each row and one that ends the image."""
    tok = tokenizer(["[IMG]", "[IMG_BREAK]", "[IMG_END]"])
    cfg = Mistral3Config(
        text_config=text_config(tok, model_type="mistral", head_dim=16),
        vision_config=vision_config(
            model_type="pixtral", num_hidden_layers=2, num_attention_heads=2, image_size=2 * TILE, head_dim=16
        ),
        spatial_merge_size=2,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
        **ids(tok, image_token_index="[IMG]"),
    )
    pixels = PixtralImageProcessor(size={"longest_edge": 2 * TILE}, patch_size={"height": 16, "width": 16})
    processor = PixtralProcessor(pixels, tok, patch_size=8, spatial_merge_size=2, chat_template=template("[IMG]"))
    return Mistral3ForConditionalGeneration(cfg), processor


MAKERS: dict[str, Callable[[], Built]] = {
    maker.__name__: maker for maker in (qwen2_5_vl, qwen3_vl, qwen3_vl_moe, idefics3, llava_onevision, internvl)
}
FAMILIES = tuple(MAKERS)


# Further ones, which pass `mmrl check --model` and have no test of their own beside.
def llava_next() -> Built:
    """CLIP and Llama; a base view of 16 tokens and up to two tiles, whose rows end in a newline token."""
    grid = [[TILE, TILE], [TILE, 2 * TILE], [2 * TILE, TILE]]
    tok = tokenizer(["<image>"])
    cfg = LlavaNextConfig(
        text_config=text_config(tok, model_type="llama"),
        vision_config=vision_config(
            model_type="clip_vision_model", num_hidden_layers=3, num_attention_heads=2, image_size=TILE
        ),
        image_grid_pinpoints=grid,
        image_seq_length=16,
        tie_word_embeddings=False,
        **ids(tok, image_token_index="<image>"),
    )
    size = {"height": TILE, "width": TILE}
    pixels = LlavaNextImageProcessor(size={"shortest_edge": TILE}, crop_size=size, image_grid_pinpoints=grid)
    strategy: dict[str, Any] = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    processor = LlavaNextProcessor(pixels, tok, patch_size=8, chat_template=template("<image>"), **strategy)
    return LlavaNextForConditionalGeneration(cfg), processor


def gemma4() -> Built:
    """Images of their own sides, up to 70 tokens of 2 x 2 patches each; layers with embeddings of their own."""
    named = {
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "image_token": "<|image|>",
        "audio_token": "<|audio|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
    }
    tok = tokenizer([*named.values(), "<|video|>"], **named)
    tok.add_special_tokens({"extra_special_tokens": ["<|video|>"]}, replace_extra_special_tokens=False)
    cfg = Gemma4Config(
        text_config=text_config(
            tok,
            head_dim=16,
            global_head_dim=32,
            sliding_window=64,
            layer_types=["sliding_attention", "full_attention"],
            vocab_size_per_layer_input=len(tok),
            hidden_size_per_layer_input=8,
        ),
        vision_config=vision_config(
            num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=16, pooling_kernel_size=2
        )
        | {"patch_size": 8, "position_embedding_size": 256},
        initializer_range=INIT,
        **ids(tok, boi_token_id="<|image>", eoi_token_id="<image|>", image_token_id="<|image|>"),
        **ids(tok, video_token_id="<|video|>", audio_token_id="<|audio|>", boa_token_id="<|audio>"),
        **ids(tok, eoa_token_index="<audio|>"),
    )
    sizes = {"patch_size": 8, "pooling_kernel_size": 2, "max_soft_tokens": 70}
    processor = Gemma4Processor(
        Gemma4AudioFeatureExtractor(),
        Gemma4ImageProcessor(**sizes),
        tok,
        Gemma4VideoProcessor(**sizes),
        chat_template=template("<|image|>"),
        image_seq_length=70,
    )
    return Gemma4ForConditionalGeneration(cfg), processor


CHECKED: dict[str, Callable[[], Built]] = {
    maker.__name__: maker for maker in (gemma3, gemma4, llava, llava_next, qwen3_5, glm4v, glm46v, mistral3)
}


def build(family: str, path: Path, *, seed: int = 0) -> Path:
    """Write the family's model and processor to `path`; the same seed gives the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, processor = (MAKERS | CHECKED)[family]()
    tok = processor.tokenizer
    model.generation_config = GenerationConfig(eos_token_id=tok.eos_token_id, pad_token_id=tok.pad_token_id)
    model.float().save_pretrained(path)
    processor.save_pretrained(path)
    return Path(path)


build_experts = partial(build, "qwen3_vl_moe")  # named by configurations
