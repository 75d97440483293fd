"""Reward models with a head on special tokens: a tiny Qwen2.5-VL in the published layout against its own forward."""

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from mmrl.errors import UserError
from mmrl.rewards import build
from mmrl.rollouts import Prompt, Sample
from tests.helpers.tiny_models import build as build_model

QUALITY, MOTION = "<|VQ_reward|>", "<|MQ_reward|>"
TEMPLATE = """{%- for turn in messages -%}{%- for part in turn.content -%}
{%- if part.type == 'text' -%}{{ part.text }}
{%- else -%}<|vision_start|><|{{ part.type }}_pad|><|vision_end|>{%- endif -%}{%- endfor -%}<|end|>{%- endfor -%}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, and weights as HPSv3 and VideoAlign publish them: names of transformers 4.45, two more tokens."""
    path = tmp_path_factory.mktemp("vlm_reward")
    build_model("qwen2_5_vl", path / "base")
    (path / "base/chat_template.jinja").write_text(TEMPLATE)
    state = load_file(path / "base/model.safetensors")
    generator = torch.Generator().manual_seed(1)
    old = {}
    for name, value in state.items():
        name = name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            value = torch.cat([value, torch.randn(2, value.shape[1], generator=generator) * 0.3])
        old[name] = value + 0.02 * torch.randn(value.shape, generator=generator)  # trained: it is not the base's

    def head(*shape):
        return torch.randn(*shape, generator=generator) * 0.3

    save_file(old | {"rm_head.weight": head(2, 64)}, path / "linear.safetensors")
    chain = {"rm_head.0.weight": head(8, 64), "rm_head.0.bias": head(8), "rm_head.3.weight": head(4, 8)}
    chain |= {"rm_head.3.bias": head(4), "rm_head.5.weight": head(2, 4), "rm_head.5.bias": head(2)}
    torch.save({"model": old | chain}, path / "chain.pth")
    two = {f"rm_heads.{h}.0.weight": head(1, 64) for h in ("head_0", "head_1")}
    save_file(old | two, path / "two.safetensors")
    (path / "one.txt").write_text(f"Rate it.\nPrompt: {{text_prompt}}\nQuality {QUALITY}")
    (path / "both.txt").write_text(f"Quality {QUALITY}\nmotion {MOTION} of {{text_prompt}}")
    (path / "edit.txt").write_text(f"Did it follow {{text_prompt}}? {QUALITY}")
    return path


@pytest.fixture(scope="module")
def trained(folder):
    """The trained model and its processor, put together by hand."""
    processor = AutoProcessor.from_pretrained(folder / "base")
    processor.tokenizer.add_tokens([QUALITY, MOTION], special_tokens=True)
    model = AutoModelForImageTextToText.from_pretrained(folder / "base", dtype=torch.float32)
    model.resize_token_embeddings(len(processor.tokenizer))
    state = load_file(folder / "linear.safetensors")
    new = {}
    for name, value in state.items():
        if not name.startswith("rm_head"):
            name = f"model.{name}" if name.startswith("visual.") else name.replace("model.", "model.language_model.", 1)
            new[name] = value
    model.load_state_dict(new)
    return model.eval(), processor


def hidden(trained, text, images, videos=None):
    """Hidden states [token, width] and ids of one conversation alone."""
    model, processor = trained
    parts = [{"type": "image"}] * len(images or []) + [{"type": "video"}] * len(videos or [])
    turn = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
    prompt = processor.apply_chat_template([turn], tokenize=False, add_generation_prompt=True)
    inputs = processor(text=[prompt], images=images, videos=videos, return_tensors="pt", do_sample_frames=False)
    with torch.no_grad():
        return model.model(**inputs).last_hidden_state[0], inputs["input_ids"][0]


def at(trained, states, token):
    values, ids = states
    return values[ids == trained[1].tokenizer.convert_tokens_to_ids(token)][0]


def pil(image):
    return Image.fromarray((image * 255).byte().permute(1, 2, 0).numpy())


def drawn(seed, *shape):
    return (torch.rand(*(shape or (3, 32, 32)), generator=torch.Generator().manual_seed(seed)) * 255).round() / 255


def options(folder, weights, instruction="one.txt", **more):
    return {
        "model": str(folder / "base"),
        "weights": str(folder / weights),
        "instruction": str(folder / instruction),
        "tokens": {QUALITY: 1.0, MOTION: 0.0} if instruction == "both.txt" else {QUALITY: 1.0},
    } | more


def test_a_chain_of_layers_on_one_token(folder, trained):
    """As HPSv3: two numbers, of which the first is the mean; rows of other lengths change nothing."""
    reward = build("vlm_reward", options(folder, "chain.pth"))
    prompts, images = ["a cat", "the largest of seven numbers in the image"], [drawn(0), drawn(1, 3, 48, 32)]
    state = torch.load(folder / "chain.pth", weights_only=True)["model"]
    expected = []
    for text, image in zip(prompts, images, strict=True):
        h = at(trained, hidden(trained, f"Rate it.\nPrompt: {text}\nQuality {QUALITY}", [pil(image)]), QUALITY)
        for i in (0, 3, 5):
            h = h.relu() if i else h
            h = state[f"rm_head.{i}.weight"] @ h + state[f"rm_head.{i}.bias"]
        expected.append(float(h[0]))
    samples = [Sample(Prompt(t, t), image=image) for t, image in zip(prompts, images, strict=True)]
    assert reward.score(samples) == pytest.approx(expected, abs=1e-4) and abs(expected[0] - expected[1]) > 1e-3
    lost = Sample(Prompt("p", "a cat"), image=drawn(0) / 0)
    assert reward.score([lost, samples[0]]) == [None, pytest.approx(expected[0], abs=1e-4)]


def test_two_tokens_of_a_video_with_their_normal_values(folder, trained):
    """As VideoAlign: the i-th number belongs to the i-th token."""
    video = drawn(2, 4, 3, 32, 32)
    normal = {QUALITY: [0.5, 2.0], MOTION: [-1.0, 0.5]}
    reward = build(
        "vlm_reward",
        options(folder, "linear.safetensors", "both.txt", normal=normal, tokens={QUALITY: 1.0, MOTION: 3.0}),
    )
    weight = load_file(folder / "linear.safetensors")["rm_head.weight"]
    states = hidden(trained, f"Quality {QUALITY}\nmotion {MOTION} of a dog", None, [[pil(frame) for frame in video]])
    quality, motion = float(weight[0] @ at(trained, states, QUALITY)), float(weight[1] @ at(trained, states, MOTION))
    expected = (quality - 0.5) / 2 + 3 * (motion + 1) / 0.5
    assert reward.score([Sample(Prompt("p", "a dog"), frames=video)]) == [pytest.approx(expected, abs=1e-4)]


def test_source_and_result_under_two_instructions(folder, trained):
    """As EditReward: the mean over heads, each with its own text."""
    instruction = {"head_0": str(folder / "one.txt"), "head_1": str(folder / "edit.txt")}
    reward = build("vlm_reward", options(folder, "two.safetensors") | {"instruction": instruction, "source": True})
    source, result = drawn(3), drawn(4)
    state = load_file(folder / "two.safetensors")
    texts = (f"Rate it.\nPrompt: a hat\nQuality {QUALITY}", f"Did it follow a hat? {QUALITY}")
    both = [at(trained, hidden(trained, text, [pil(source), pil(result)]), QUALITY) for text in texts]
    expected = sum(float(state[f"rm_heads.head_{i}.0.weight"][0] @ h) for i, h in enumerate(both)) / 2
    sample = Sample(Prompt("p", "a hat", images=(pil(source),)), image=result)
    assert reward.score([sample]) == [pytest.approx(expected, abs=1e-4)]
    with pytest.raises(UserError, match="'p' has no image, which source: true needs"):
        reward.score([Sample(Prompt("p", "a hat"), image=result)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": "absent.safetensors"}, "there is no file"),
        ({"instruction": "absent.txt"}, "there is no file"),
        ({"tokens": {MOTION: 1.0}}, "must contain <|MQ_reward|>".replace("|", r"\|")),
        ({"tokens": {}}, "mapping of special tokens to weights"),
        ({"normal": {QUALITY: [0.0, 0.0]}}, "std above 0"),
        ({"normal": {MOTION: [0.0, 1.0]}}, "is not one of the tokens"),
        ({"instruction": {"head_7": "one.txt"}}, "not a chain of linear layers"),
    ],
)
def test_what_does_not_fit_is_refused(folder, change, message):
    for key in ("weights", "instruction"):
        value = change.get(key)
        if isinstance(value, str):
            change = change | {key: str(folder / value)}
        elif value is not None:
            change = change | {key: {name: str(folder / path) for name, path in value.items()}}
    with pytest.raises(ValueError, match=message):
        build("vlm_reward", options(folder, "linear.safetensors") | change)


def test_weights_that_are_not_the_whole_model_are_refused(folder, tmp_path):
    state = load_file(folder / "linear.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match="weights do not fit the model"):
        build("vlm_reward", options(folder, "linear.safetensors") | {"weights": str(tmp_path / "w.safetensors")})
    head = {name: value for name, value in state.items() if name.startswith("rm_head")}
    save_file(head, tmp_path / "head.safetensors")
    with pytest.raises(ValueError, match="the model lacks embeddings of the reward tokens"):
        build("vlm_reward", options(folder, "linear.safetensors") | {"weights": str(tmp_path / "head.safetensors")})
