"""Tiny models in the published layouts of LLaDA, MMaDA, Dream and SDAR, converted, against a forward written here that
reads the published tensors."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from mmrl.errors import UserError
from mmrl.policies.discrete_diffusion.checkpoint_conversion import convert
from mmrl.tasks.text_sums import tiny_model
from tests.helpers.command_line import mmrl
from tests.policies.discrete_diffusion.parts import PROMPT, policy_of

AUTO = {"AutoConfig": "configuration.Config", "AutoModel": "modeling.Model"}
WIDTH, INNER, LAYERS, HEADS, LENGTH, THETA, EPS = 32, 48, 2, 4, 64, 500.0, 1e-5
LLADA = {
    "model_type": "llada", "architectures": ["LLaDAModelLM"], "auto_map": AUTO, "d_model": WIDTH, "n_layers": LAYERS,
    "n_heads": HEADS, "n_kv_heads": HEADS, "mlp_hidden_size": INNER, "mlp_ratio": 4, "vocab_size": 20,
    "embedding_size": 20, "max_sequence_length": LENGTH, "rms_norm_eps": EPS, "rope_theta": THETA, "mask_token_id": 1,
    "weight_tying": False, "include_bias": False, "include_qkv_bias": False, "activation_type": "silu",
    "block_type": "llama", "layer_norm_type": "rms", "attention_layer_norm": False, "bias_for_layer_norm": False,
    "rope": True, "alibi": False, "scale_logits": False, "input_emb_norm": False, "block_group_size": 1,
    "multi_query_attention": None, "init_std": 0.02,
}  # fmt: skip
QWEN = {
    "auto_map": AUTO, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": 2, "hidden_act": "silu", "max_position_embeddings": LENGTH,
    "rms_norm_eps": EPS, "rope_theta": THETA, "tie_word_embeddings": False, "use_sliding_window": False,
}  # fmt: skip
CONFIGS = {
    "llada": LLADA,
    "mmada": {**LLADA, "model_type": "mmada", "vocab_size": 12, "n_kv_heads": 2, "codebook_size": 4},
    "Dream": {**QWEN, "model_type": "Dream", "architectures": ["DreamModel"], "mask_token_id": 1},
    "sdar": {**QWEN, "model_type": "sdar", "architectures": ["SDARForCausalLM"], "head_dim": 16, "block_size": 4},
}
OF_LLADA = {
    "q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "attn_out", "gate": "ff_proj", "up": "up_proj", "down": "ff_out",
    "first": "attn_norm", "second": "ff_norm",
}  # fmt: skip
OF_QWEN = {
    **{part: f"self_attn.{part}_proj" for part in "qkvo"},
    **{part: f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    "first": "input_layernorm", "second": "post_attention_layernorm",
}  # fmt: skip


def names(kind):
    """The published names: of a part of a layer, and of embedding, last norm and output."""
    if kind in ("llada", "mmada"):
        above = "model.transformer."
        return lambda i, part: f"{above}blocks.{i}.{OF_LLADA[part]}", (f"{above}wte", f"{above}ln_f", f"{above}ff_out")
    return lambda i, part: f"model.layers.{i}.{OF_QWEN[part]}", ("model.embed_tokens", "model.norm", "lm_head")


def sizes(kind):
    config = CONFIGS[kind]
    return config.get("head_dim", WIDTH // HEADS), config.get("n_kv_heads") or config["num_key_value_heads"]


def write(folder, kind, *, files=1):
    """A folder as it is published, with random weights; returns its tensors."""
    of, (embedding, norm, output) = names(kind)
    head, kv = sizes(kind)
    tokenizer = tiny_model.build_tokenizer()
    shapes = {f"{embedding}.weight": (len(tokenizer), WIDTH), f"{norm}.weight": (WIDTH,)}
    shapes[f"{output}.weight"] = (len(tokenizer), WIDTH)
    for i in range(LAYERS):
        wide = {"q": HEADS * head, "k": kv * head, "v": kv * head}
        shapes |= {f"{of(i, part)}.weight": (rows, WIDTH) for part, rows in wide.items()}
        if kind == "Dream":
            shapes |= {f"{of(i, part)}.bias": (rows,) for part, rows in wide.items()}
        shapes |= {f"{of(i, 'o')}.weight": (WIDTH, HEADS * head), f"{of(i, 'down')}.weight": (WIDTH, INNER)}
        shapes |= {f"{of(i, part)}.weight": (INNER, WIDTH) for part in ("gate", "up")}
        shapes |= {f"{of(i, part)}.weight": (WIDTH,) for part in ("first", "second")}
        if kind == "sdar":
            shapes |= {f"model.layers.{i}.self_attn.{part}_norm.weight": (head,) for part in "qk"}
    random = torch.Generator().manual_seed(3)
    tensors = {name: 0.3 * torch.randn(shape, generator=random) for name, shape in shapes.items()}
    folder.mkdir()
    for number in range(files):
        part = {name: tensor for i, (name, tensor) in enumerate(tensors.items()) if i % files == number}
        save_file(part, folder / f"model-{number + 1:05}-of-{files:05}.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIGS[kind]))
    tokenizer.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("mask_token")
    if kind == "Dream":
        settings["auto_map"] = {"AutoTokenizer": ["tokenization.Tokenizer", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "modeling.py").write_text("raise RuntimeError('code of a model was run')")
    (folder / "configuration.py").write_text("raise RuntimeError('code of a model was run')")
    return tensors


def rms(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def rotated(x):
    """Rotary positions of x [head, token, number]: pairs are number i and i + half."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[1])[:, None] / THETA ** (torch.arange(half) / half)
    one, two = x[..., :half], x[..., half:]
    return torch.cat([one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()], -1)


def forward(kind, tensors, ids):
    """Logits [token, vocabulary] of ids [token], every token seeing all."""
    of, (embedding, norm, output) = names(kind)
    head, kv = sizes(kind)
    x = tensors[f"{embedding}.weight"][ids]
    for i in range(LAYERS):

        def linear(part, value, i=i):
            return F.linear(value, tensors[f"{of(i, part)}.weight"], tensors.get(f"{of(i, part)}.bias"))

        normed = rms(x, tensors[f"{of(i, 'first')}.weight"])
        q, k, v = (linear(part, normed).view(len(ids), -1, head).transpose(0, 1) for part in "qkv")
        if kind == "sdar":
            q, k = (
                rms(value, tensors[f"model.layers.{i}.self_attn.{part}_norm.weight"])
                for part, value in (("q", q), ("k", k))
            )
        q, k = rotated(q), rotated(k).repeat_interleave(HEADS // kv, 0)
        seen = (q @ k.transpose(1, 2) / head**0.5).softmax(-1) @ v.repeat_interleave(HEADS // kv, 0)
        x = x + linear("o", seen.transpose(0, 1).reshape(len(ids), -1))
        normed = rms(x, tensors[f"{of(i, 'second')}.weight"])
        x = x + linear("down", F.silu(linear("gate", normed)) * linear("up", normed))
    return F.linear(rms(x, tensors[f"{norm}.weight"]), tensors[f"{output}.weight"])


@pytest.mark.parametrize(("kind", "files"), [("llada", 1), ("mmada", 3), ("Dream", 2), ("sdar", 1)])
def test_a_converted_model_says_what_the_published_one_does(tmp_path, kind, files):
    tensors = write(tmp_path / "published", kind, files=files)
    if kind == "sdar":  # its config.json names no mask token
        rename(tmp_path / "published" / "tokenizer.json", "<mask>", "<|MASK|>")
    out = convert(tmp_path / "published", tmp_path / "converted")
    policy = policy_of(out, build=False, perturbed=0.0)
    scorer, vocabulary = policy.module, policy.layout.vocabulary
    assert vocabulary.mask == 1 and scorer.causal and scorer.shifted == (kind == "Dream")
    ids = torch.tensor([7, 9, 4, 1, 1, 12, 1])
    columns = torch.arange(1, 7)
    with torch.no_grad():
        found = scorer.logits(ids[None], torch.ones(1, 7, dtype=torch.bool), torch.zeros(6, dtype=torch.long), columns)
    expected = forward(kind, tensors, ids)[columns - int(kind == "Dream")]
    allowed = torch.ones(expected.shape[1], dtype=torch.bool)
    allowed[vocabulary.suppressed] = False
    torch.testing.assert_close(found[:, allowed], expected[:, allowed], rtol=1e-4, atol=1e-4)
    assert expected.std() > 0.3 and allowed.sum() > 8
    rollouts = policy.rollout([PROMPT], 2, [1, 2])
    assert torch.isfinite(policy.replay(rollouts, policy.module).logp).all()


def rename(file, before, after):
    file.write_text(file.read_text().replace(json.dumps(before), json.dumps(after)))


def test_a_published_folder_is_never_run_and_the_command_is_named(tmp_path):
    write(tmp_path / "llada", "llada")
    with pytest.raises(UserError, match=f"type llada with code of its own .* mmrl convert {tmp_path / 'llada'} --out"):
        policy_of(tmp_path / "llada", build=False)
    done = mmrl(tmp_path, "convert", str(tmp_path / "llada"))
    assert done.code == 0, done.err
    assert f"model.path={tmp_path / 'llada-transformers'}" in done.out
    written = json.loads((tmp_path / "llada-transformers" / "config.json").read_text())
    assert "auto_map" not in written and written["architectures"] == ["LlamaForCausalLM"]
    assert not list((tmp_path / "llada-transformers").glob("*.py"))
    assert "model.layers.1.mlp.down_proj.weight" in load_file(tmp_path / "llada-transformers" / "model.safetensors")


def test_what_is_not_converted_is_one_line(tmp_path):
    write(tmp_path / "a", "llada")
    values = json.loads((tmp_path / "a" / "config.json").read_text())
    for change, line in (
        ({"scale_logits": True}, "scale_logits=True, which Llama does not compute"),
        ({"model_type": "other"}, "holds a model of type other, which cannot be converted"),
        ({"mask_token_id": None}, "no mask token is known; set mask_token_id"),
    ):
        (tmp_path / "a" / "config.json").write_text(json.dumps(values | change))
        with pytest.raises(UserError, match=line):
            convert(tmp_path / "a", tmp_path / f"out-{len(line)}")
    (tmp_path / "a" / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match="--out=.* exists; name a folder that does not exist"):
        convert(tmp_path / "a", tmp_path / "a")
    (tmp_path / "a" / "model-00001-of-00001.safetensors").rename(tmp_path / "a" / "pytorch_model.bin")
    with pytest.raises(UserError, match="pickled weights"):
        convert(tmp_path / "a", tmp_path / "c")


def test_a_shifted_model_is_not_read_at_the_position_itself(tmp_path):
    write(tmp_path / "dream", "Dream")
    out = convert(tmp_path / "dream", tmp_path / "out")
    with pytest.raises(UserError, match=f"model.path={out}: unmasking.likelihood=any_order"):
        policy_of(out, build=False, unmasking={"likelihood": "any_order"})
