"""Conversion of published masked-diffusion language models to the transformers classes whose layers they have: LLaDA
and MMaDA to Llama, Dream to Qwen2, SDAR (and TraDo) to Qwen3. Files are read as data, and no code of a folder runs."""

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

Values = dict[str, Any]  # of a config.json
INDEX = "model.safetensors.index.json"
SHIFTED = "shifted_predictions"  # key of a converted config.json: a position predicts the token at the next

# LLaDA's names inside a block, and Llama's inside a layer
BLOCK = {
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
WHOLE = {"wte": "model.embed_tokens", "ln_f": "model.norm", "ff_out": "lm_head"}
# What a Llama does not compute, by the key of LLaDA's configuration, and the values without it
WITHOUT = {
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
MASKS = ("<|mdm_mask|>", "<|MASK|>", "<|mask|>", "[MASK]")  # in tokenizers whose config.json has no mask token
OF_QWEN = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps"),
    *("tie_word_embeddings", "rope_theta", "rope_scaling", "attention_bias", "attention_dropout", "torch_dtype"),
    *("use_sliding_window", "sliding_window", "max_window_layers", "bos_token_id", "eos_token_id", "pad_token_id"),
)


@dataclass(frozen=True)
class Published:
    """A published kind of model. architecture: the class of transformers with its layers; config: returns its
    config.json; name: returns a tensor's name there. shifted: a position predicts the token at the next."""

    architecture: str
    config: Callable[[Values], Values]
    name: Callable[[str], str]
    shifted: bool = False


def convert(folder: Path, out: Path) -> Path:
    """Writes the model in `folder` to `out` as transformers reads it without remote code. Returns `out`. Raises
    UserError for another kind of model, for one with parts that its class does not compute, for weights that are not
    safetensors, and where `out` exists."""
    values, kind = _read(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(
            f"{folder} has no *.safetensors; pickled weights (*.bin) are not read, save them as safetensors"
        )
    if out.exists():
        raise UserError(f"{out} exists; name a folder that does not with --out")
    out.mkdir(parents=True)
    shapes = _write_weights(files, out, kind.name)
    config = kind.config(values) | {"architectures": [kind.architecture], SHIFTED: kind.shifted}
    config["vocab_size"] = shapes["model.embed_tokens.weight"][0]  # MMaDA's is larger than its config.json says
    config["tie_word_embeddings"] = "lm_head.weight" not in shapes
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    _write_tokenizer(folder, out, values)
    return out


def is_published(folder: Path) -> bool:
    """Returns whether a folder holds a model that `convert` reads."""
    try:
        return json.loads((folder / "config.json").read_text()).get("model_type") in KINDS
    except (OSError, ValueError):
        return False


def _read(folder: Path) -> tuple[Values, Published]:
    """Returns the contents of config.json, and the kind of model that it names."""
    try:
        values = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: config.json can not be read: {error}") from None
    kind = KINDS.get(values.get("model_type"))
    if kind is None:
        raise UserError(f"{folder} holds a {values.get('model_type')} model; those converted are {', '.join(KINDS)}")
    return values, kind


def _write_weights(files: list[Path], out: Path, name: Callable[[str], str]) -> dict[str, tuple[int, ...]]:
    """Writes every file with the tensors' new names, and the index of several. Returns the tensors' shapes."""
    shapes: dict[str, tuple[int, ...]] = {}
    weight_map: dict[str, str] = {}
    for file in files:
        with safe_open(file, "pt") as source:
            tensors = {name(key): source.get_tensor(key).contiguous() for key in source.keys()}  # noqa: SIM118
        target = out / ("model.safetensors" if len(files) == 1 else file.name)
        save_file(tensors, target, metadata={"format": "pt"})
        shapes |= {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        weight_map |= dict.fromkeys(tensors, target.name)
    if len(files) > 1:
        (out / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2) + "\n")
    return shapes


def _write_tokenizer(folder: Path, out: Path, values: Values) -> None:
    """Copies the tokenizer's files without names of remote code, and saves it with its mask token."""
    skipped = (".safetensors", ".py", ".bin")
    for file in folder.iterdir():
        if file.is_file() and not file.name.endswith(skipped) and file.name not in ("config.json", INDEX):
            (out / file.name).write_bytes(file.read_bytes())
    settings = out / "tokenizer_config.json"
    if settings.is_file():
        read = json.loads(settings.read_text())
        read.pop("auto_map", None)
        if read.get("tokenizer_class") == "DreamTokenizer":
            read["tokenizer_class"] = "Qwen2Tokenizer"  # whose vocabulary and merges it has
        settings.write_text(json.dumps(read, indent=2) + "\n")
    tokenizer = load_tokenizer(str(out))
    number = values.get("mask_token_id")
    token = tokenizer.convert_ids_to_tokens(number) if number is not None else _mask_token(tokenizer.get_vocab())
    if token is None:
        raise UserError(f"{folder}: neither mask_token_id in config.json nor a token such as {MASKS[0]} is there")
    tokenizer.mask_token = token
    tokenizer.save_pretrained(out)


def _mask_token(vocabulary: Mapping[str, int]) -> str | None:
    return next((token for token in MASKS if token in vocabulary), None)


def _llama(values: Values) -> Values:
    """Returns Llama's configuration of a LLaDA or MMaDA model. Raises UserError for what a Llama does not compute."""
    for key, plain in WITHOUT.items():
        if key in values and values[key] not in plain:
            raise UserError(f"config.json has {key}={values[key]}, which a Llama does not compute")
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


def _of_llada(name: str) -> str:
    """Returns Llama's name of a tensor. Raises UserError for one that a Llama has not."""
    if match := re.fullmatch(r"(?:model\.)?transformer\.blocks\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, part, kind = match.groups()
        if part in BLOCK:
            return f"model.layers.{layer}.{BLOCK[part]}.{kind}"
    elif match := re.fullmatch(r"(?:model\.)?transformer\.(\w+)\.(weight|bias)", name):
        part, kind = match.groups()
        if part in WHOLE:
            return f"{WHOLE[part]}.{kind}"
    raise UserError(f"the tensor {name} does not belong to a Llama")


def _qwen(model_type: str) -> Callable[[Values], Values]:
    def config(values: Values) -> Values:
        return {"model_type": model_type} | {key: values[key] for key in OF_QWEN if key in values}

    return config


def _same(name: str) -> str:
    return name


KINDS = {
    "llada": Published("LlamaForCausalLM", _llama, _of_llada),
    "mmada": Published("LlamaForCausalLM", _llama, _of_llada),
    "Dream": Published("Qwen2ForCausalLM", _qwen("qwen2"), _same, shifted=True),
    "sdar": Published("Qwen3ForCausalLM", _qwen("qwen3"), _same),
}
