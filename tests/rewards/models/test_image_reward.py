"""ImageReward against a forward pass that is written here by the names of the published file."""

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Normalize, Resize, ToTensor
from transformers import BertTokenizerFast

from mmrl.rewards import RewardSet, RewardSpec, build
from mmrl.rollouts import Prompt, Sample

SIZE, PATCH, WIDTH, TEXT, DEPTH, HEADS = 32, 16, 128, 64, 2, 2
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "blue", "cat", "dog"]


def published(seed=0):
    """Tensors by the names of ImageReward.pt, tiny."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator) * 0.2

    state = {}

    def linear(name, out, into):
        state[f"{name}.weight"], state[f"{name}.bias"] = random(out, into), random(out)

    def norm(name, width):
        state[f"{name}.weight"], state[f"{name}.bias"] = 1 + random(width), random(width)

    v, t = "blip.visual_encoder.", "blip.text_encoder."
    state[v + "cls_token"] = random(1, 1, WIDTH)
    state[v + "pos_embed"] = random(1, (SIZE // PATCH) ** 2 + 1, WIDTH)
    state[v + "patch_embed.proj.weight"], state[v + "patch_embed.proj.bias"] = (
        random(WIDTH, 3, PATCH, PATCH),
        random(WIDTH),
    )
    norm(v + "norm", WIDTH)
    for i in range(DEPTH):
        block = f"{v}blocks.{i}."
        norm(block + "norm1", WIDTH)
        norm(block + "norm2", WIDTH)
        linear(block + "attn.qkv", 3 * WIDTH, WIDTH)
        linear(block + "attn.proj", WIDTH, WIDTH)
        linear(block + "mlp.fc1", 2 * WIDTH, WIDTH)
        linear(block + "mlp.fc2", WIDTH, 2 * WIDTH)
    state[t + "embeddings.position_ids"] = torch.arange(40)[None]
    state[t + "embeddings.word_embeddings.weight"] = random(len(WORDS) + 2, TEXT)
    state[t + "embeddings.position_embeddings.weight"] = random(40, TEXT)
    norm(t + "embeddings.LayerNorm", TEXT)
    for i in range(DEPTH):
        layer = f"{t}encoder.layer.{i}."
        for kind, width in (("attention", TEXT), ("crossattention", WIDTH)):
            linear(f"{layer}{kind}.self.query", TEXT, TEXT)
            linear(f"{layer}{kind}.self.key", TEXT, width)
            linear(f"{layer}{kind}.self.value", TEXT, width)
            linear(f"{layer}{kind}.output.dense", TEXT, TEXT)
            norm(f"{layer}{kind}.output.LayerNorm", TEXT)
        linear(layer + "intermediate.dense", 2 * TEXT, TEXT)
        linear(layer + "output.dense", TEXT, 2 * TEXT)
        norm(layer + "output.LayerNorm", TEXT)
    state["blip.vision_proj.weight"] = random(8, WIDTH)
    for i, (into, out) in {0: (TEXT, 12), 2: (12, 6), 4: (6, 4), 6: (4, 3), 7: (3, 1)}.items():
        linear(f"mlp.layers.{i}", out, into)
    return state


def attend(q, k, v, heads, mask=None):
    split = [x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v)]
    return F.scaled_dot_product_attention(*split, attn_mask=mask).transpose(1, 2).flatten(2)


def by_hand(state, pixels, tokens, mask):
    def linear(name, x):
        return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    def norm(name, x, eps):
        return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], eps)

    v, t = "blip.visual_encoder.", "blip.text_encoder."
    x = F.conv2d(pixels, state[v + "patch_embed.proj.weight"], state[v + "patch_embed.proj.bias"], stride=PATCH)
    x = (
        torch.cat([state[v + "cls_token"].expand(len(x), -1, -1), x.flatten(2).transpose(1, 2)], 1)
        + state[v + "pos_embed"]
    )
    for i in range(DEPTH):
        block = f"{v}blocks.{i}."
        q, k, value = linear(block + "attn.qkv", norm(block + "norm1", x, 1e-6)).chunk(3, -1)
        x = x + linear(block + "attn.proj", attend(q, k, value, HEADS))
        x = x + linear(block + "mlp.fc2", F.gelu(linear(block + "mlp.fc1", norm(block + "norm2", x, 1e-6))))
    seen = norm(v + "norm", x, 1e-6)
    h = F.embedding(tokens, state[t + "embeddings.word_embeddings.weight"])
    h = norm(t + "embeddings.LayerNorm", h + state[t + "embeddings.position_embeddings.weight"][: h.shape[1]], 1e-12)
    for i in range(DEPTH):
        layer = f"{t}encoder.layer.{i}."
        for kind, other in (("attention", None), ("crossattention", seen)):
            name = f"{layer}{kind}."
            source = h if other is None else other
            q, k, value = (
                linear(name + "self.query", h),
                linear(name + "self.key", source),
                linear(name + "self.value", source),
            )
            where = mask[:, None, None].bool() if other is None else None
            h = norm(
                name + "output.LayerNorm",
                h + linear(name + "output.dense", attend(q, k, value, TEXT // 64, where)),
                1e-12,
            )
        wide = F.gelu(linear(layer + "intermediate.dense", h))
        h = norm(layer + "output.LayerNorm", h + linear(layer + "output.dense", wide), 1e-12)
    h = h[:, 0]
    for i in (0, 2, 4, 6, 7):
        h = linear(f"mlp.layers.{i}", h)
    return (h.squeeze(-1) - 0.16717362830052426) / 1.0333394966054072


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("image_reward")
    (path / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizerFast(vocab=str(path / "vocab.txt"), vocab_file=str(path / "vocab.txt")).save_pretrained(path / "bert")
    torch.save(published(), path / "ImageReward.pt")
    return path


@pytest.fixture(scope="module")
def reward(folder):
    return build("image_reward", {"weights": str(folder / "ImageReward.pt"), "tokenizer": str(folder / "bert")})


def drawn(seed, height=48, width=40):
    return (torch.rand(3, height, width, generator=torch.Generator().manual_seed(seed)) * 255).round() / 255


def sample(text, image):
    return Sample(Prompt(text, text), image=image)


def test_scores_are_those_of_the_published_forward(reward, folder):
    texts = ["a red cat", "a blue dog", "a red cat"]
    images = [drawn(0), drawn(1), drawn(2, 32, 32)]
    transform = Compose([
        Resize(SIZE, interpolation=InterpolationMode.BICUBIC), CenterCrop(SIZE), ToTensor(),
        Normalize((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    ])  # fmt: skip
    pil = [Image.fromarray((image * 255).byte().permute(1, 2, 0).numpy()) for image in images]
    ids = [[2, *(WORDS.index(word) for word in text.split()), 3] for text in texts]
    tokens = torch.tensor([row + [0] * (35 - len(row)) for row in ids])
    expected = by_hand(published(), torch.stack([transform(image) for image in pil]), tokens, (tokens != 0).long())
    scores = torch.tensor(reward.score([sample(text, image) for text, image in zip(texts, images, strict=True)]))
    assert (scores - expected).abs().max() < 2e-4
    assert (expected[:, None] - expected[None]).abs().fill_diagonal_(1).min() > 1e-2  # each of them is another one


def test_it_has_the_gradient_of_its_score(reward):
    image, prompt = drawn(3, 32, 32), Prompt("p", "a red cat")
    x = image[None].clone().requires_grad_(True)
    score = reward.differentiable(x, [prompt])
    (gradient,) = torch.autograd.grad(score.sum(), x)
    assert score.item() == pytest.approx(reward.score([sample("a red cat", image)])[0], abs=1e-4)
    step = 0.1 * gradient.sign()[0]
    risen = reward.score([sample("a red cat", (image + step).clamp(0, 1))])[0]
    assert risen > score.item() and float(gradient.abs().max()) > 0


def test_through_a_set_and_not_of_what_is_no_image(folder):
    options = {"weights": str(folder / "ImageReward.pt"), "tokenizer": str(folder / "bert")}
    rewards = RewardSet([RewardSpec(name="image_reward", options=options)])
    scores = rewards.score([sample("a red cat", drawn(0)), sample("a red cat", drawn(0) * float("nan"))])
    assert scores[0].isfinite().all() and scores[1].isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("blip.visual_encoder.cls_token"), "no image encoder of BLIP"),
        (
            lambda s: s.pop("blip.text_encoder.encoder.layer.1.output.dense.bias"),
            "blip.text_encoder does not match BLIP",
        ),
        (lambda s: s.pop("mlp.layers.2.weight"), "not a chain of linear layers"),
        (lambda s: s.update({"blip.visual_encoder.extra": torch.ones(1)}), "extra"),
    ],
)
def test_another_layout_is_refused(folder, tmp_path, change, message):
    state = published()
    change(state)
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(ValueError, match=message):
        build("image_reward", {"weights": str(tmp_path / "w.pt"), "tokenizer": str(folder / "bert")})
    with pytest.raises(ValueError, match="there is no file"):
        build("image_reward", {"weights": str(tmp_path / "absent.pt")})
