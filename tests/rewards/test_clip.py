"""Rewards of CLIP models on tiny random ones, written to disk in the formats that the real ones have."""

import json
import math

import open_clip
import pytest
import torch
from safetensors.torch import save_file
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

from mmrl.errors import UserError
from mmrl.rewards import RewardSet, RewardSpec, build
from mmrl.rewards.types import as_pil
from mmrl.rollouts import Prompt, Sample
from tests.joints.test_reward_gradient import climbed

TINY = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 16, "head_width": 8, "patch_size": 16},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}


def samples():
    draw = torch.Generator().manual_seed(0)
    sizes = [(3, 32, 32), (3, 48, 40), (1, 32, 32), (3, 32, 32)]
    texts = ["a red cat", "two dogs", "a red cat", "a dog on a very long walk " * 20]
    return [
        Sample(Prompt(f"p{n}", text), image=torch.rand(size, generator=draw) * 1.2 - 0.1)
        for n, (size, text) in enumerate(zip(sizes, texts, strict=True))
    ]


def cosine(a, b):
    return [
        torch.nn.functional.cosine_similarity(x, y, dim=0).item() for x, y in zip(a.double(), b.double(), strict=True)
    ]


@pytest.fixture(scope="module")
def open_clip_folder(tmp_path_factory):
    """A folder for local-dir:, the checkpoint in it also as a .pt as trainers leave it, and the model's name."""
    folder = tmp_path_factory.mktemp("open_clip")
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": TINY, "preprocess_cfg": {}}))
    (folder / "tiny-clip.json").write_text(json.dumps(TINY))
    open_clip.add_model_config(folder / "tiny-clip.json")
    torch.manual_seed(1)
    state = open_clip.create_model("tiny-clip").state_dict()
    for name in state:
        if "embedding" in name:
            state[name] = torch.randn_like(state[name])  # as they start, all texts are nearly alike
    save_file(state, folder / "open_clip_model.safetensors")
    torch.save({"state_dict": state, "epoch": 3}, folder / "checkpoint.pt")
    return folder


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    """A CLIPModel of transformers with a tokenizer of letters."""
    folder = tmp_path_factory.mktemp("clip")
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    tokenizer = CLIPTokenizer(vocab={piece: n for n, piece in enumerate(pieces)}, merges=[])
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    marks = {"bos_token_id": 52, "eos_token_id": 53, "pad_token_id": 53}
    config = CLIPConfig(
        text_config={**small, **marks, "vocab_size": 54, "max_position_embeddings": 20},
        vision_config={**small, "image_size": 32, "patch_size": 16},
        projection_dim=8,
        logit_scale_init_value=3.0,
        initializer_factor=10.0,
    )
    torch.manual_seed(2)
    CLIPModel(config).save_pretrained(folder)
    images = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    CLIPProcessor(images, tokenizer).save_pretrained(folder)
    return folder


def open_clip_cosines(folder):
    """One image and one text at a time."""
    model, prepare = open_clip.create_model_from_pretrained(f"local-dir:{folder}")
    tokenize = open_clip.get_tokenizer(f"local-dir:{folder}")
    with torch.no_grad():
        images = [model.eval().encode_image(prepare(as_pil(s.image))[None])[0] for s in samples()]
        texts = [model.encode_text(tokenize([s.prompt.text]))[0] for s in samples()]
    return cosine(torch.stack(images), torch.stack(texts))


def test_open_clip_similarity(open_clip_folder):
    expected = open_clip_cosines(open_clip_folder)
    assert max(expected) - min(expected) > 0.01
    by_folder = build("clip_similarity", {"model": f"local-dir:{open_clip_folder}"})
    assert by_folder.score(samples()) == pytest.approx(expected, abs=1e-5)
    assert by_folder.score(samples()[::-1]) == pytest.approx(expected[::-1], abs=1e-5)
    by_file = {"model": "tiny-clip", "pretrained": str(open_clip_folder / "checkpoint.pt")}
    parts = RewardSet([RewardSpec(name="clip_similarity", options=by_file, batch_size=3)])
    assert parts.score(samples()).flatten().tolist() == pytest.approx(expected, abs=1e-5)


def test_hpsv2_is_the_cosine_of_its_checkpoint(open_clip_folder):
    options = {"weights": str(open_clip_folder / "checkpoint.pt"), "model": "tiny-clip"}
    assert build("hpsv2", options).score(samples()) == pytest.approx(open_clip_cosines(open_clip_folder), abs=1e-5)


def transformers_embeddings(folder):
    model, processor = CLIPModel.from_pretrained(folder).eval(), CLIPProcessor.from_pretrained(folder)
    images, texts = [], []
    with torch.no_grad():
        for s in samples():
            inputs = processor(
                text=[s.prompt.text], images=[as_pil(s.image)], truncation=True, max_length=20, return_tensors="pt"
            )
            out = model(**inputs)
            images.append(out.image_embeds[0])
            texts.append(out.text_embeds[0])
    return torch.stack(images), torch.stack(texts)


def test_transformers_similarity_and_pickscore(clip_folder):
    expected = cosine(*transformers_embeddings(clip_folder))
    assert max(expected) - min(expected) > 0.01
    found = build("clip_similarity", {"model": str(clip_folder)}).score(samples())
    assert found == pytest.approx(expected, abs=1e-5)
    scaled = build("pickscore", {"model": str(clip_folder)}).score(samples())  # exp(3) is the temperature
    assert scaled == pytest.approx([math.exp(3) * value for value in expected], abs=1e-4)
    by_26 = build("pickscore", {"model": str(clip_folder), "processor": str(clip_folder), "scale": 26}).score(samples())
    assert by_26 == pytest.approx([math.exp(3) * value / 26 for value in expected], abs=1e-5)


def test_broken_images_leave_the_others_alone(clip_folder):
    reward = build("clip_similarity", {"model": str(clip_folder)})
    whole, broken = reward.score(samples()), samples()
    broken[1].image[0, 0, 0] = math.nan
    assert reward.score(broken) == [
        pytest.approx(whole[0], abs=1e-5), None, pytest.approx(whole[2], abs=1e-5), pytest.approx(whole[3], abs=1e-5)
    ]  # fmt: skip
    with pytest.raises(UserError, match="has no image"):
        reward.score([Sample(Prompt("p", "text"))])


def test_aesthetic_head(clip_folder, tmp_path):
    """LAION's first head is one layer, the improved one a stack of linear layers with dropout between them."""
    embeddings = torch.nn.functional.normalize(transformers_embeddings(clip_folder)[0].double(), dim=-1)
    torch.manual_seed(3)
    weight, bias = torch.randn(1, 8), torch.randn(1)
    torch.save({"weight": weight, "bias": bias}, tmp_path / "linear.pth")
    expected = (embeddings @ weight.double().T + bias).flatten().tolist()
    assert max(expected) - min(expected) > 0.01
    options = {"head": str(tmp_path / "linear.pth"), "model": str(clip_folder)}
    assert build("aesthetic", options).score(samples()) == pytest.approx(expected, abs=1e-5)

    first, second, third = torch.randn(12, 8), torch.randn(5, 12), torch.randn(1, 5)
    stack = {"layers.10.weight": third, "layers.0.weight": first, "layers.2.weight": second}  # 10 comes after 2
    stack |= {"layers.0.bias": torch.ones(12), "layers.2.bias": torch.zeros(5), "layers.10.bias": torch.ones(1)}
    save_file(stack, tmp_path / "stack.safetensors")
    expected = ((embeddings @ first.double().T + 1) @ second.double().T @ third.double().T + 1).flatten().tolist()
    found = build("aesthetic", options | {"head": str(tmp_path / "stack.safetensors")}).score(samples())
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    "state, words",
    [
        ({"weight": torch.zeros(1, 9), "bias": torch.zeros(1)}, "takes 9 features, but .* has embeddings of 8"),
        ({"weight": torch.zeros(2, 8), "bias": torch.zeros(2)}, "has 2 outputs, not one"),
        ({"other": torch.zeros(2)}, "not a chain"),
        ({"weight": torch.zeros(1, 8)}, "has no bias for weight"),
    ],
)
def test_heads_that_do_not_fit(clip_folder, tmp_path, state, words):
    torch.save(state, tmp_path / "head.pth")
    with pytest.raises(ValueError, match=f"reward 'aesthetic': head .*{words}"):
        build("aesthetic", {"head": str(tmp_path / "head.pth"), "model": str(clip_folder)})


@pytest.mark.parametrize(
    "name, options, words",
    [
        ("clip_similarity", {"model": "no/such/folder"}, "CLIP model 'no/such/folder'"),
        ("clip_similarity", {"model": "ViT-B-32"}, "no such folder; for a model of open_clip set pretrained"),
        ("clip_similarity", {"model": "local-dir:/no/such"}, "open_clip cannot load model 'local-dir:/no/such'"),
        ("clip_similarity", {"model": "local-dir:absent"}, "open_clip cannot load model 'local-dir:absent'"),
        ("clip_similarity", {"model": "ViT-B-33", "pretrained": "openai"}, "open_clip cannot load model 'ViT-B-33'"),
        ("clip_similarity", {"model": "ViT-B-32", "pretrained": "no-such-tag"}, "no-such-tag"),
        ("hpsv2", {"weights": "no-such-file.pt"}, "no-such-file.pt"),
        ("hpsv2", {}, "needs option weights"),
        ("pickscore", {"model": "no/such/folder"}, "no/such/folder"),
        ("pickscore", {"model": "x", "scale": 0}, "scale must be positive"),
        ("aesthetic", {"head": "no-such-head.pth"}, "no file no-such-head.pth"),
        ("clip_similarity", {"model": "x", "pretraind": "y"}, "did you mean 'pretrained'"),
    ],
)
def test_bad_options(name, options, words, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=f"reward '{name}'.*{words}") as caught:
        build(name, options)
    assert "\n" not in str(caught.value)


def test_a_model_without_weights_is_refused(open_clip_folder, tmp_path):
    """open_clip itself would go on with random ones."""
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": TINY}))
    with pytest.raises(ValueError, match="reward 'clip_similarity': open_clip cannot load model"):
        build("clip_similarity", {"model": f"local-dir:{tmp_path}"})


def differentiable_rewards(open_clip_folder, clip_folder, head):
    torch.manual_seed(3)
    torch.save({"weight": torch.randn(1, 8), "bias": torch.randn(1)}, head)
    return {
        "clip_similarity": build("clip_similarity", {"model": str(clip_folder)}),
        "pickscore": build("pickscore", {"model": str(clip_folder), "scale": 26}),
        "hpsv2": build("hpsv2", {"weights": str(open_clip_folder / "checkpoint.pt"), "model": "tiny-clip"}),
        "aesthetic": build("aesthetic", {"head": str(head), "model": str(clip_folder)}),
    }


@pytest.mark.parametrize("name", ["clip_similarity", "pickscore", "hpsv2", "aesthetic"])
def test_scores_have_the_gradient_of_their_image(open_clip_folder, clip_folder, tmp_path, name):
    """Values equal the scores of 8-bit images: to 1e-5 without resizing, and to 0.02 with it, whose pixels PIL rounds
    once more; gradients equal finite differences by single levels of eight bits."""
    reward = differentiable_rewards(open_clip_folder, clip_folder, tmp_path / "head.pth")[name]
    draw = torch.Generator().manual_seed(4)
    for size, tolerance in (((3, 32, 32), 1e-5), ((1, 32, 32), 1e-5), ((3, 48, 40), 0.02), ((3, 20, 26), 0.02)):
        images = torch.rand(2, *size, generator=draw) * 1.2 - 0.1
        prompts = [Prompt("a", "a red cat"), Prompt("b", "two dogs")]
        found = reward.differentiable(images, prompts)
        expected = reward.score([Sample(p, image=i) for p, i in zip(prompts, images, strict=True)])
        assert found.tolist() == pytest.approx(expected, abs=tolerance)

    levels = torch.randint(100, 150, (1, 3, 32, 32), generator=draw).float()  # of eight bits: nothing is rounded
    image = (levels / 255).requires_grad_()
    (gradient,) = torch.autograd.grad(reward.differentiable(image, prompts[:1]).sum(), image)

    def moved(by):
        return float(reward.differentiable((levels + by * gradient.sign()) / 255, prompts[:1]).sum())

    slope = (8 * (moved(1) - moved(-1)) - (moved(2) - moved(-2))) / 12  # of the fourth order
    assert slope == pytest.approx(float(gradient.abs().sum()) / 255, rel=0.02) and slope > 1e-4
    resized = torch.rand(1, 3, 48, 40, generator=draw).requires_grad_()
    (through,) = torch.autograd.grad(reward.differentiable(resized, prompts[:1]).sum(), resized)
    assert torch.isfinite(through).all() and float(through.abs().max()) > 0


def test_a_reward_gradient_with_clip_improves_its_score(clip_folder, tmp_path):
    scores = climbed(tmp_path, {"name": "clip_similarity", "options": {"model": str(clip_folder)}})
    assert scores[-1] > scores[0] + 0.05
