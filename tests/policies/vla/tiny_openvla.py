"""A tiny checkpoint in OpenVLA's published format, written without mmrl, and what its architecture computes."""

import json

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from timm import create_model
from timm.models import register_model
from timm.models.vision_transformer import VisionTransformer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM

WORDS = ["In:", "What", "action", "should", "the", "robot", "take", "to", "go", "from", "0.00?", "0.30?", "Out:"]
MEANS, STDS = [[0.485, 0.456, 0.406], [0.5, 0.5, 0.5]], [[0.229, 0.224, 0.225], [0.5, 0.5, 0.5]]
SIZE, PATCH, HEADS, LAYERS, WIDTH = 16, 8, 2, 2, 32
STATISTICS = {"line": {"action": {"q01": [-0.5], "q99": [0.5], "mask": [True]}, "num_trajectories": 3}}


@register_model
def tiny_dino(pretrained=False, pretrained_cfg=None, pretrained_cfg_overlay=None, cache_dir=None, **kwargs):
    shape = {"embed_dim": 24, "depth": 3, "num_heads": HEADS}
    prefix = {"init_values": 1e-5, "reg_tokens": 4, "no_embed_class": True}
    return VisionTransformer(patch_size=PATCH, **shape, **prefix, **kwargs)


@register_model
def tiny_siglip(pretrained=False, pretrained_cfg=None, pretrained_cfg_overlay=None, cache_dir=None, **kwargs):
    shape = {"embed_dim": 16, "depth": 4, "num_heads": HEADS}
    return VisionTransformer(patch_size=PATCH, **shape, class_token=False, global_pool="map", **kwargs)


def tensors(names, seed=0):
    """Under OpenVLA's names; random, so that every one of them matters."""
    text = LlamaConfig(**TEXT)
    found = {"language_model." + name: t for name, t in LlamaForCausalLM(text).state_dict().items()}
    width = 0
    for place, name in zip(("featurizer", "fused_featurizer"), names, strict=False):
        vit = create_model(name, num_classes=0, img_size=SIZE)
        width += vit.embed_dim
        for key, t in vit.state_dict().items():
            found[f"vision_backbone.{place}.{key.replace('.gamma', '.scale_factor')}"] = t
    sizes = [width, 4 * width, WIDTH, WIDTH] if len(names) == 2 else [width, WIDTH, WIDTH]
    for i, (before, after) in enumerate(zip(sizes, sizes[1:], strict=False), 1):
        found[f"projector.fc{i}.weight"], found[f"projector.fc{i}.bias"] = (
            torch.empty(after, before),
            torch.empty(after),
        )
    generator = torch.Generator().manual_seed(seed)
    noise = {name: torch.randn(t.shape, generator=generator) for name, t in found.items()}
    return {
        name: 1 + 0.3 * t if "norm" in name and "weight" in name else t * (0.5 if t.dim() < 2 else t.shape[-1] ** -0.5)
        for name, t in noise.items()
    }


TEXT = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "pad_token_id": 32000,
    "vocab_size": 32064,
}


def tokenizer():
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["<unk>", "<s>", "</s>", *WORDS])}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


def write(folder, names=("tiny_dino", "tiny_siglip")):
    n, first = len(names), 2 - len(names)  # one alone is SigLIP's
    config = {
        "architectures": ["OpenVLAForActionPrediction"],
        "auto_map": {"AutoConfig": "configuration_prismatic.OpenVLAConfig"},
        "arch_specifier": "no-align+fused-gelu-mlp",
        "hf_llm_id": "meta-llama/Llama-2-7b-hf",
        "image_resize_strategy": "resize-naive",
        "image_sizes": [SIZE] * n,
        "llm_backbone_id": "llama2-7b-pure",
        "llm_max_length": 2048,
        "model_type": "openvla",
        "n_action_bins": 256,
        "norm_stats": STATISTICS,
        "output_projector_states": False,
        "pad_to_multiple_of": 64,
        "pad_token_id": 32000,
        "text_config": TEXT,
        "timm_model_ids": list(names),
        "timm_override_act_layers": [None] * n,
        "torch_dtype": "float32",
        "use_fused_vision_backbone": n == 2,
        "vision_backbone_id": "dinosiglip-vit-so-224px",
    }
    preprocessor = {
        "image_resize_strategy": "resize-naive",
        "input_sizes": [[3, SIZE, SIZE]] * n,
        "interpolations": ["bicubic"] * n,
        "means": MEANS[first:],
        "stds": STDS[first:],
        "use_fused_vision_backbone": n == 2,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    (folder / "dataset_statistics.json").write_text(json.dumps(STATISTICS))
    tokenizer().save(str(folder / "tokenizer.json"))
    made = tensors(names)
    keys = sorted(made)  # in two files, as large ones are
    parts = {f"model-0000{i + 1}-of-00002.safetensors": keys[i::2] for i in range(2)}
    for file, part in parts.items():
        save_file({key: made[key] for key in part}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {key: file for file, part in parts.items() for key in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return {name: t.double() for name, t in made.items()}


def attend(q, k, v, seen=None):
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return (scores if seen is None else scores.masked_fill(~seen, -torch.inf)).softmax(-1) @ v


def heads(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(0, 1)


def vit(w, place, image, depth):
    """image [3, SIZE, SIZE] -> patches [patch, width] as they come out of the last block but one."""
    p = {k.removeprefix(f"vision_backbone.{place}."): v for k, v in w.items() if f".{place}." in k}

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], p[name + ".weight"], p[name + ".bias"], 1e-6)

    def linear(x, name):
        return x @ p[name + ".weight"].T + p[name + ".bias"]

    x = F.conv2d(image[None], p["patch_embed.proj.weight"], p["patch_embed.proj.bias"], stride=PATCH)[0]
    x = x.flatten(1).T + p["pos_embed"][0]
    prefix = [p[name][0] for name in ("cls_token", "reg_token") if name in p]
    x = torch.cat([*prefix, x])
    for i in range(depth - 1):
        b = f"blocks.{i}."
        q, k, v = (heads(part) for part in linear(norm(x, b + "norm1"), b + "attn.qkv").chunk(3, -1))
        a = linear(attend(q, k, v).transpose(0, 1).flatten(1), b + "attn.proj")
        x = x + a * p.get(b + "ls1.scale_factor", 1)
        m = linear(F.gelu(linear(norm(x, b + "norm2"), b + "mlp.fc1")), b + "mlp.fc2")
        x = x + m * p.get(b + "ls2.scale_factor", 1)
    return x[sum(len(part) for part in prefix) :]


def project(w, patches):
    last = 3 if "projector.fc3.weight" in w else 2
    for i in range(1, last + 1):
        patches = patches @ w[f"projector.fc{i}.weight"].T + w[f"projector.fc{i}.bias"]
        patches = F.gelu(patches) if i < last else patches
    return patches


def llama(w, x, causal):
    """Embeddings [token, WIDTH] -> the last layer, normalised."""
    length, half = len(x), WIDTH // HEADS // 2
    angle = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = (torch.cat([part, part], 1) for part in (angle.cos(), angle.sin()))
    seen = torch.ones(length, length, dtype=torch.bool)
    seen = seen.tril() if causal else seen

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w[name]

    def turned(x):
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    for i in range(LAYERS):
        b = f"language_model.model.layers.{i}."
        h = norm(x, b + "input_layernorm.weight")
        q, k, v = (heads(h @ w[f"{b}self_attn.{name}_proj.weight"].T) for name in "qkv")
        a = attend(turned(q), turned(k), v, seen).transpose(0, 1).flatten(1)
        x = x + a @ w[b + "self_attn.o_proj.weight"].T
        h = norm(x, b + "post_attention_layernorm.weight")
        gate, up = (h @ w[f"{b}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ w[b + "mlp.down_proj.weight"].T
    return norm(x, "language_model.model.norm.weight")


def prompt(w, image, ids):
    """image [height, width, 3] uint8 and all ids of the prompt -> embeddings with the patches behind the first."""
    fused = any(".fused_featurizer." in name for name in w)
    resized = np.asarray(Image.fromarray(image).resize((SIZE, SIZE), Image.Resampling.BICUBIC))
    pixels = torch.from_numpy(resized.copy()).double() / 255
    normed = [((pixels - torch.tensor(m)) / torch.tensor(s)).permute(2, 0, 1) for m, s in zip(MEANS, STDS, strict=True)]
    kinds = [("featurizer", 3, 0), ("fused_featurizer", 4, 1)] if fused else [("featurizer", 4, 1)]
    patches = torch.cat([vit(w, place, normed[which], depth) for place, depth, which in kinds], 1)
    words = w["language_model.model.embed_tokens.weight"][ids]
    return torch.cat([words[:1], project(w, patches), words[1:]])


def action_logits(w, hidden):
    return hidden @ w["language_model.lm_head.weight"][31744:32000].T
