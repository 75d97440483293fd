"""Converts published masked diffusion language models to checkpoints of the transformers classes with the same layers:
LLaDA and MMaDA to Llama, Dream to Qwen2, SDAR (and TraDo) to Qwen3. No code of the model's folder is run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from mmrl.errors import UserError
from mmrl.policies.vlm.loading import load_tokenizer

ModelConfig = dict[str, Any]  # the contents of a config.json
INDEX = "model.safetensors.index.json"
SHIFTED = "shifted_predictions"  # key of a converted config.json: the output at a position predicts the next token

# Names of weights inside a layer, LLaDA's to Llama's
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ff_norm": "post_attention_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}
# Names of weights outside layers
TOP_NAMES = {"wte": "model.embed_tokens", "ln_f": "model.norm", "ff_out": "lm_head"}
# Keys of LLaDA's configuration that Llama does not have, and the values with which both compute the same
REQUIRED_VALUES = {
    "block_type": ("llama",),
    "layer_norm_type": ("rms",),
    "activation_type": ("silu",),
    "rope": (True,),
    "alibi": (False,),
    "attention_layer_norm": (False,),
    "bias_for_layer_norm": (False, None),
    "scale_logits": (False,),
    "input_emb_norm": (False,),
    "clip_qkv": (None,),
    "block_group_size": (1,),
}
MASK_TOKENS = ("<|mdm_mask|>", "<|MASK|>", "<|mask|>", "[MASK]")  # looked for if config.json has no mask token
QWEN_KEYS = (  # keys of config.json that transformers' Qwen2 and Qwen3 read
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps"),
    *("tie_word_embeddings", "rope_theta", "rope_scaling", "attention_bias", "attention_dropout", "torch_dtype"),
    *("use_sliding_window", "sliding_window", "max_window_layers", "bos_token_id", "eos_token_id", "pad_token_id"),
)


@dataclass(frozen=True)
class Conversion:
    """Rules that convert models of one published type."""

    architecture: str  # the class of transformers with the same layers
    config: Callable[[ModelConfig], ModelConfig]  # converts the contents of config.json
    rename: Callable[[str], str]  # converts the name of a tensor
    shifted: bool = False  # the output at a position predicts the next token


def convert(folder: Path, out: Path) -> Path:
    """Converts the model in `folder` to a checkpoint that transformers loads without remote code, in the new folder
    `out`. Returns `out`.

    Raises UserError if the model is of another type, has parts that the transformers class does not compute, or has no
    safetensors weights, and if `out` exists.
    """
    model_config, conversion = _read_config(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(
            f"{folder} has no *.safetensors file; pickled weights (*.bin) are not read: save them as safetensors first"
        )
    if out.exists():
        raise UserError(f"--out={out} exists; name a folder that does not exist")
    out.mkdir(parents=True)
    shapes = _write_weights(files, out, conversion.rename)
    config = conversion.config(model_config)
    config |= {"architectures": [conversion.architecture], SHIFTED: conversion.shifted}
    config["vocab_size"] = shapes["model.embed_tokens.weight"][0]  # MMaDA has more embeddings than its config.json says
    config["tie_word_embeddings"] = "lm_head.weight" not in shapes
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    _write_tokenizer(folder, out, model_config)
    return out


def can_convert(folder: Path) -> bool:
    """Returns whether a folder holds a model of a type that `convert` converts."""
    try:
        return json.loads((folder / "config.json").read_text()).get("model_type") in CONVERSIONS
    except (OSError, ValueError):
        return False


def _read_config(folder: Path) -> tuple[ModelConfig, Conversion]:
    """Returns the contents of config.json, and the conversion of its model type. Raises UserError if the file cannot be
    read, or its model type cannot be converted."""
    try:
        values = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / 'config.json'} cannot be read: {error}") from None
    conversion = CONVERSIONS.get(values.get("model_type"))
    if conversion is None:
        raise UserError(
            f"{folder} holds a model of type {values.get('model_type')}, which cannot be converted; name one of type "
            f"{', '.join(CONVERSIONS)}"
        )
    return values, conversion


def _write_weights(files: list[Path], out: Path, rename: Callable[[str], str]) -> dict[str, tuple[int, ...]]:
    """Writes all safetensors files to `out` with renamed tensors, and an index if there are several. Returns the shapes
    of the tensors by their new names."""
    shapes: dict[str, tuple[int, ...]] = {}
    weight_map: dict[str, str] = {}
    for file in files:
        with safe_open(file, "pt") as source:
            tensors = {rename(key): source.get_tensor(key).contiguous() for key in source.keys()}  # noqa: SIM118
        target = out / ("model.safetensors" if len(files) == 1 else file.name)
        save_file(tensors, target, metadata={"format": "pt"})
        shapes |= {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        weight_map |= dict.fromkeys(tensors, target.name)
    if len(files) > 1:
        (out / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2) + "\n")
    return shapes


def _write_tokenizer(folder: Path, out: Path, values: ModelConfig) -> None:
    """Copies the files of the tokenizer to `out` without references to remote code, and sets its mask token. values:
    the contents of config.json. Raises UserError if no mask token is known."""
    skipped = (".safetensors", ".py", ".bin")
    for file in folder.iterdir():
        if file.is_file() and not file.name.endswith(skipped) and file.name not in ("config.json", INDEX):
            (out / file.name).write_bytes(file.read_bytes())
    settings = out / "tokenizer_config.json"
    if settings.is_file():
        tokenizer_config = json.loads(settings.read_text())
        tokenizer_config.pop("auto_map", None)
        if tokenizer_config.get("tokenizer_class") == "DreamTokenizer":
            tokenizer_config["tokenizer_class"] = "Qwen2Tokenizer"  # it has the same vocabulary and merges
        settings.write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    tokenizer = load_tokenizer(str(out))
    mask_id = values.get("mask_token_id")
    token = tokenizer.convert_ids_to_tokens(mask_id) if mask_id is not None else _mask_token(tokenizer.get_vocab())
    if token is None:
        raise UserError(
            f"{folder}: no mask token is known; set mask_token_id in its config.json, or add a token such as "
            f"{MASK_TOKENS[0]} to its tokenizer"
        )
    tokenizer.mask_token = token
    tokenizer.save_pretrained(out)


def _mask_token(vocabulary: Mapping[str, int]) -> str | None:
    """Returns the first of the usual mask tokens that is in the vocabulary, None if there is none."""
    return next((token for token in MASK_TOKENS if token in vocabulary), None)


def _llama_config(values: ModelConfig) -> ModelConfig:
    """Returns the Llama configuration of a LLaDA or MMaDA model. values: the contents of its config.json. Raises
    UserError for a setting with which the model computes something else than Llama."""
    for key, accepted in REQUIRED_VALUES.items():
        if key in values and values[key] not in accepted:
            expected = " or ".join(str(value) for value in accepted)
            raise UserError(
                f"config.json has {key}={values[key]}, which Llama does not compute; only models with {expected} are "
                "converted"
            )
    heads = values["n_heads"]
    return {
        "model_type": "llama",
        "hidden_size": values["d_model"],
        "intermediate_size": values.get("mlp_hidden_size") or values["mlp_ratio"] * values["d_model"],
        "num_hidden_layers": values["n_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": values.get("n_kv_heads") or (1 if values.get("multi_query_attention") else heads),
        "head_dim": values["d_model"] // heads,
        "hidden_act": "silu",
        "max_position_embeddings": values["max_sequence_length"],
        "initializer_range": values.get("init_std", 0.02),
        "rms_norm_eps": values.get("rms_norm_eps", 1e-5),
        "rope_theta": values.get("rope_theta", 10000.0),
        "attention_bias": bool(values.get("include_bias") or values.get("include_qkv_bias")),
        "mlp_bias": bool(values.get("include_bias")),
        "bos_token_id": values.get("bos_token_id"),
        "eos_token_id": values.get("eos_token_id"),
        "pad_token_id": values.get("pad_token_id"),
    }


def _llama_name(name: str) -> str:
    """Returns the name in Llama of a tensor of LLaDA. Raises UserError for a tensor that Llama does not have."""
    if match := re.fullmatch(r"(?:model\.)?transformer\.blocks\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, module, parameter = match.groups()
        if module in LAYER_NAMES:
            return f"model.layers.{layer}.{LAYER_NAMES[module]}.{parameter}"
    elif match := re.fullmatch(r"(?:model\.)?transformer\.(\w+)\.(weight|bias)", name):
        module, parameter = match.groups()
        if module in TOP_NAMES:
            return f"{TOP_NAMES[module]}.{parameter}"
    raise UserError(f"the weights have a tensor {name}, which Llama does not have, so the model cannot be converted")


def _qwen_config(model_type: str) -> Callable[[ModelConfig], ModelConfig]:
    """Returns a function that converts the contents of a config.json to a configuration of `model_type`, qwen2 or
    qwen3."""

    def config(values: ModelConfig) -> ModelConfig:
        """Returns the keys of Qwen in `values`, with the new model type."""
        return {"model_type": model_type} | {key: values[key] for key in QWEN_KEYS if key in values}

    return config


def _same_name(name: str) -> str:
    """Returns the name of a tensor unchanged."""
    return name


# By the `model_type` in config.json
CONVERSIONS = {
    "llada": Conversion("LlamaForCausalLM", _llama_config, _llama_name),
    "mmada": Conversion("LlamaForCausalLM", _llama_config, _llama_name),
    "Dream": Conversion("Qwen2ForCausalLM", _qwen_config("qwen2"), _same_name, shifted=True),
    "sdar": Conversion("Qwen3ForCausalLM", _qwen_config("qwen3"), _same_name),
}
