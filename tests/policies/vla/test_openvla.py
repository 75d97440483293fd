"""OpenVLA's and OpenVLA-OFT's checkpoints: files, names, arithmetic and decoding, against `tiny_openvla`."""

import io
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from mmrl.errors import UserError
from mmrl.policies.vla.backbones.openvla import (
    OpenVLAConfig,
    OpenVLAForActionPrediction,
    center_crop,
    resize_as_in_training,
)
from mmrl.policies.vla.heads.head import ActionSampling
from mmrl.policies.vla.statistics import load_statistics
from mmrl.policies.vlm import loading
from mmrl.protocols.critic import SharedCritic
from tests.policies.vla import tiny_openvla as reference
from tests.policies.vla.conftest import starts
from tests.whole_runs import workers

DECODINGS = ("autoregressive", "bidirectional")
STARTS, SEEDS = starts(0, 30), [1, 2, 3, 4]
CPU = torch.device("cpu")
ASKED = ["go from 0.00", "Go from the robot to 0.30"]  # of two lengths, with a capital
IMAGES = np.random.default_rng(0).integers(0, 256, (2, 5, 7, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("openvla")
    return folder, reference.write(folder)


@pytest.fixture(scope="module")
def openvla(make, checkpoint):
    def made(decoding="autoregressive", path=checkpoint[0], **options):
        own = {"bins": 256, "prompt": None, "proprioception": False, "decoding": decoding, **options}
        return make("parallel", str(path), **own)

    return made


def by_name(folder):
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def prompts(policy):
    """The two observations, read together and so padded."""
    backbone = policy.module.backbone
    rows = backbone.prepare(
        [IMAGES], [backbone.format_prompt(text) for text in ASKED], np.zeros((len(ASKED), 0), np.float32)
    )
    return rows, backbone.encode(backbone.collate(rows, CPU), every_layer=False)


def test_every_tensor_is_loaded_and_none_is_missing(openvla, checkpoint):
    state = openvla().module.backbone.model.state_dict()
    assert state.keys() == checkpoint[1].keys()
    assert all(torch.equal(state[name].double(), t) for name, t in checkpoint[1].items())


def test_names_are_those_of_the_published_files(checkpoint):
    vit, llama = "vision_backbone.{}featurizer.", "language_model.model."
    dino, siglip, layer = vit.format(""), vit.format("fused_"), llama + "layers.0."
    known = {dino + n for n in ("cls_token", "reg_token", "blocks.0.ls1.scale_factor", "norm.weight")}
    known |= {siglip + "attn_pool." + n for n in ("latent", "q.weight", "kv.weight", "proj.weight", "mlp.fc1.weight")}
    known |= {v + n for v in (dino, siglip) for n in ("pos_embed", "patch_embed.proj.weight", "blocks.0.attn.qkv.bias")}
    known |= {f"projector.fc{i}.{kind}" for i in (1, 2, 3) for kind in ("weight", "bias")}
    known |= {layer + f"self_attn.{n}_proj.weight" for n in "qkvo"} | {layer + "input_layernorm.weight"}
    known |= {layer + f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")}
    known |= {llama + "embed_tokens.weight", llama + "norm.weight", "language_model.lm_head.weight"}
    assert known <= checkpoint[1].keys()


def test_the_published_size():
    """The 7 B model of the paper, without memory: parameters, patches and width as published."""
    config = OpenVLAConfig(
        text_config={"vocab_size": 32064, "pad_token_id": 32000},
        timm_model_ids=["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
        timm_override_act_layers=[None, None],
        image_sizes=[224, 224],
    )
    with torch.device("meta"):
        model = OpenVLAForActionPrediction(config)
    assert sum(p.numel() for p in model.parameters()) == 7_541_237_184  # 15,082,474,368 bytes of bfloat16
    assert model.projector.fc1.weight.shape == (4 * 2176, 2176)
    with torch.device("meta"):
        patches = model.vision_backbone([torch.zeros(1, 2, 3, 224, 224)] * 2)
    assert patches.shape == (1, 2 * 256, 2176)


def test_the_middle_by_hand():
    """Half of each side of three pixels: between the first two, the second, between the last two."""
    row = np.array([0, 100, 200], np.uint8)
    image = np.stack([row, row + 20, row + 40])[..., None].repeat(3, 2)
    expected = [[60, 110, 160], [70, 120, 170], [80, 130, 180]]
    assert center_crop(image, 0.25)[..., 0].tolist() == expected
    assert center_crop(image, 1.0) is image


def test_the_middle_is_that_of_openvlas_evaluation():
    """Pixel by pixel in float64: 0.9 of the area, linear between neighbours, rounded as TensorFlow does."""
    image = np.random.default_rng(1).integers(0, 256, (14, 14, 3), dtype=np.uint8)
    side, most, exact = 0.9**0.5, 13, np.zeros((14, 14, 3))
    for y, x, c in np.ndindex(exact.shape):
        v, u = ((1 - side) / 2 * most + k * side for k in (y, x))
        near = [(i, j) for i in (int(v), int(v) + 1) for j in (int(u), int(u) + 1)]
        value = sum((1 - abs(v - i)) * (1 - abs(u - j)) * image[i, j, c] for i, j in near)
        exact[y, x, c] = value / 255 * 255.5
    clear = abs(exact - exact.round()) > 1e-3
    assert clear.mean() > 0.98 and (center_crop(image, 0.9)[clear] == np.floor(exact)[clear]).all()


def test_images_are_cropped_where_asked(openvla, make):
    whole, cropped = (openvla(center_crop=area).module.backbone for area in (1.0, 0.9))
    rows = [b.prepare([IMAGES], ASKED, np.zeros((2, 0), np.float32)) for b in (whole, cropped)]
    for one, other in zip(*rows, strict=True):
        kept = one.images[0].permute(1, 2, 0).numpy()
        assert (other.images[0].permute(1, 2, 0).numpy() == center_crop(kept, 0.9)).all()
        assert not torch.equal(one.images, other.images)
    with pytest.raises(UserError, match="action.center_crop=0.9 is for OpenVLA"):
        make("parallel", center_crop=0.9)


def lanczos(values, size):
    """values [n, ...] at `size` places: sinc(x) sinc(x / 3), as wide as the step from one place to the next."""
    n, step = len(values), len(values) / size
    found = []
    for place in range(size):
        x = (np.arange(n) + 0.5 - (place + 0.5) * step) / max(step, 1)
        weight = np.where(abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0)
        found.append(np.tensordot(weight / weight.sum(), values, 1))
    return np.stack(found)


def test_images_come_to_their_size_as_in_openvlas_evaluation():
    image = np.zeros((32, 32, 3), np.uint8)
    image[:, :, 0], image[8:20, 5:25, 1] = np.arange(32) * 8, 200
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=95)  # half the colours: the library's own choice
    seen = np.asarray(Image.open(file)).astype(float)
    exact = lanczos(lanczos(seen, 28).swapaxes(0, 1), 28).swapaxes(0, 1)
    made = resize_as_in_training(image, 28, 28)
    clear = abs(exact - np.floor(exact) - 0.5) > 1e-2
    assert clear.mean() > 0.9 and (made[clear] == exact.round().clip(0, 255)[clear]).all()
    assert exact.min() < -1 and exact.max() > 201  # it rings beyond what there was
    untouched = lanczos(lanczos(image.astype(float), 28).swapaxes(0, 1), 28).swapaxes(0, 1)
    assert (made != untouched.round().clip(0, 255)).mean() > 0.1


def test_the_key_says_how_images_come_to_their_size(openvla, make):
    backbone = openvla(resize="openvla", center_crop=0.9).module.backbone
    (row,) = backbone.prepare([IMAGES[:1]], ASKED[:1], np.zeros((1, 0), np.float32))
    wanted = center_crop(resize_as_in_training(IMAGES[0], reference.SIZE, reference.SIZE), 0.9)
    assert (row.images[0].permute(1, 2, 0).numpy() == wanted).all()
    with pytest.raises(UserError, match="action.resize=openvla is for OpenVLA, which"):
        make("parallel", resize="openvla")


def test_prompts_are_openvlas(openvla):
    rows, _ = prompts(openvla())
    # <s> In: What action should the robot take to go from 0.00? Out: and the lone space
    assert rows[0].ids.tolist() == [1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 29871]
    assert rows[1].ids.tolist() == [1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 7, 8, 10, 14, 15, 29871]


@pytest.mark.parametrize("names", [("tiny_dino", "tiny_siglip"), ("tiny_siglip",)])
def test_hidden_states_are_those_of_the_architecture(openvla, tmp_path, names):
    """The prompt, then known action tokens; a row of each length, in one padded batch."""
    weights = reference.write(tmp_path, names)
    policy = openvla(path=tmp_path)
    rows, reading = prompts(policy)
    columns = torch.tensor([[0, 255, 7, 100], [31, 8, 8, 254]])
    with torch.no_grad():
        found = policy.module.head._hidden_states(reading, torch.zeros(2, 1), columns)
    for i, row in enumerate(rows):
        before = reference.prompt(weights, IMAGES[i], row.ids)
        taken = weights["language_model.model.embed_tokens.weight"][columns[i, :3] + 31744]
        expected = reference.llama(weights, torch.cat([before, taken]), causal=True)[len(before) - 1 :]
        torch.testing.assert_close(found[i].double(), expected, rtol=1e-4, atol=1e-4)
        assert expected.std() > 0.1


WRIST = np.random.default_rng(9).integers(0, 256, (2, 6, 4, 3), dtype=np.uint8)


@pytest.mark.parametrize("decoding", DECODINGS)
def test_patches_of_several_cameras_follow_one_another(openvla, checkpoint, decoding):
    """As OpenVLA-OFT: all patches of the first camera, then those of the second, behind the first token."""
    weights, backbone = checkpoint[1], openvla(decoding).module.backbone
    asked = [backbone.format_prompt(text) for text in ASKED]
    rows = backbone.prepare([IMAGES, WRIST], asked, np.zeros((2, 0), np.float32))
    with torch.no_grad():
        found = backbone.encode(backbone.collate(rows, CPU), every_layer=False)
    for i, row in enumerate(rows):
        first, second = (reference.prompt(weights, images[i], row.ids) for images in (IMAGES, WRIST))
        patches = len(first) - len(row.ids)
        both = torch.cat([first[: 1 + patches], second[1:]])
        expected = reference.llama(weights, both, causal=decoding == "autoregressive")[-1]
        torch.testing.assert_close(found.last[i].double(), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match="and its 2 images have 22 tokens, more than rollout.max_prompt_length=20"):
        openvla(decoding, max_prompt_length=20).module.backbone.prepare([IMAGES[:1], WRIST[:1]], asked[:1], IMAGES)


def test_places_of_actions_are_those_of_oft(openvla, checkpoint):
    """Everything sees everything: the prompt, zeros in the actions' places, and an end token behind them; a token
    follows from what stands before its place."""
    weights = checkpoint[1]
    policy = openvla("bidirectional")
    rows, reading = prompts(policy)
    with torch.no_grad():
        found = policy.module.head._hidden_states(reading, torch.zeros(2, 1), None)
        alone = reading.last
    for i, row in enumerate(rows):
        before = reference.prompt(weights, IMAGES[i], row.ids)
        end = weights["language_model.model.embed_tokens.weight"][2:3]
        whole = torch.cat([before, before.new_zeros(4, reference.WIDTH), end])
        hidden = reference.llama(weights, whole, causal=False)
        torch.testing.assert_close(found[i].double(), hidden[len(before) - 1 : -2], rtol=1e-4, atol=1e-4)
        expected = reference.llama(weights, before, causal=False)[-1]
        torch.testing.assert_close(alone[i].double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("decoding", DECODINGS)
def test_greedy_actions_are_those_of_the_architecture(openvla, checkpoint, decoding):
    weights, policy = checkpoint[1], openvla(decoding)
    rows, reading = prompts(policy)
    with torch.no_grad():
        chosen = policy.module.head.act(reading, torch.zeros(2, 1), ActionSampling([0, 0], 0.0, False))
    table = weights["language_model.model.embed_tokens.weight"]
    for i, row in enumerate(rows):
        text = reference.prompt(weights, IMAGES[i], row.ids)
        start = len(text)
        if decoding == "bidirectional":
            whole = torch.cat([text, text.new_zeros(4, reference.WIDTH), table[2:3]])
            hidden = reference.llama(weights, whole, causal=False)[start - 1 : start + 3]
            ids = 31744 + reference.action_logits(weights, hidden).argmax(-1)
        else:
            for _ in range(4):
                best = 31744 + reference.action_logits(weights, reference.llama(weights, text, True)[-1]).argmax()
                text = torch.cat([text, table[best][None]])
            ids = torch.tensor([(table == e).all(1).nonzero().item() for e in text[start:]])
        assert policy.module.head.codec.ids(chosen["columns"][i]).tolist() == ids.tolist()
        edges = np.linspace(-1, 1, 256)
        bins = (32000 - ids.numpy() - 1).clip(0, 254)
        np.testing.assert_allclose(chosen["actions"][i, :, 0], (edges[bins] + edges[bins + 1]) / 2, atol=1e-6)


@pytest.mark.parametrize("decoding", DECODINGS)
def test_on_policy_ratio_is_exactly_one(openvla, decoding):
    policy = openvla(decoding, critic=SharedCritic())
    rollouts = policy.rollout(STARTS, 2, SEEDS)
    with torch.no_grad():
        old = policy.replay(rollouts, policy.module)
    now = policy.replay(replace(rollouts, old_logp=old.logp), policy.module)
    assert rollouts.mask.any() and torch.equal(now.logp, old.logp) and now.logp[rollouts.mask].isfinite().all()
    now.logp[rollouts.mask].sum().backward()
    moved = {n.split(".")[2] for n, p in policy.module.named_parameters() if p.grad is not None and p.grad.any()}
    assert {"vision_backbone", "projector", "language_model"} <= moved
    # The last block of a vision transformer and what pools its patches are in the file, but nothing comes of them.
    still = [n for n, p in policy.module.named_parameters() if p.grad is None and "critic" not in n]
    assert all("blocks.2." in n or "blocks.3." in n or "featurizer.norm" in n or "attn_pool" in n for n in still)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow), 2])
def test_what_sees_both_ways_trains_at_a_temperature(checkpoint, tmp_path, stage):
    """Decoding from left to right is trained over the small backbone, in tests/whole_runs/test_robots.py."""
    options = [
        *("model.build=null", f"model.path={checkpoint[0]}", "action.prompt=null", "action.proprioception=false"),
        *("action.head={type: token, decoding: bidirectional, level: action}", "rollout.temperature=0.7"),
        *("rollout.max_prompt_length=64", f"engine.zero_stage={stage}"),
    ]
    found = workers.head(tmp_path, *options)
    assert found["first"] == [0, 0] and min(found["second"]) > 0 and not found["still"]


@pytest.mark.parametrize("decoding", DECODINGS)
def test_padding_changes_nothing(openvla, decoding):
    policy = openvla(decoding)
    rows, _ = prompts(policy)
    backbone, head, columns = policy.module.backbone, policy.module.head, torch.tensor([[3, 200, 9, 90]])
    with torch.no_grad():
        alone = head._hidden_states(
            backbone.encode(backbone.collate(rows[:1], CPU), every_layer=False), torch.zeros(1, 1), columns
        )
        both = backbone.encode(backbone.collate(rows, CPU), every_layer=False)
        padded = head._hidden_states(both, torch.zeros(2, 1), columns.repeat(2, 1))
    torch.testing.assert_close(alone[0], padded[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("decoding", DECODINGS)
def test_saved_and_loaded_alike(openvla, checkpoint, tmp_path, decoding):
    policy = openvla(decoding)
    rollouts = policy.rollout(STARTS, 1, SEEDS[:2])
    policy.save(tmp_path, policy.module.state_dict())
    again = openvla(decoding, tmp_path)
    with torch.no_grad():
        assert torch.equal(policy.replay(rollouts, policy.module).logp, again.replay(rollouts, again.module).logp)
    saved, was = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path, checkpoint[0]))
    for key in set(was) - {"text_config", "torch_dtype"}:
        assert saved[key] == was[key], key
    assert {k: saved["text_config"][k] for k in reference.TEXT} == reference.TEXT
    weights = by_name(tmp_path)
    assert checkpoint[1].keys() <= weights.keys()
    statistics = load_statistics(str(tmp_path), "line", 1)
    assert statistics.to_robot(np.array([1.0])) == 0.5
    assert (tmp_path / "tokenizer.json").read_bytes() == (checkpoint[0] / "tokenizer.json").read_bytes()


def test_lora(openvla, tmp_path):
    base = openvla()
    rollouts = base.rollout(STARTS, 1, SEEDS[:2])
    policy = openvla(lora={"rank": 2, "alpha": 4.0, "targets": "all-linear"})
    trained = [n for n, p in policy.module.backbone.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    for part in ("vision_backbone.featurizer", "projector", "language_model"):
        assert any(part in name for name in trained), part
    assert not any("lm_head" in name for name in trained)
    with torch.no_grad():
        before = base.replay(rollouts, base.module).logp
        assert torch.equal(policy.replay(rollouts, policy.module).logp, before)  # B is 0
        for name, parameter in policy.module.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
        moved = policy.replay(rollouts, policy.module).logp
    assert not torch.equal(moved, before)
    policy.save(tmp_path, policy.module.state_dict())
    assert (tmp_path / "adapter_config.json").is_file() and not (tmp_path / "config.json").is_file()
    again = openvla(path=tmp_path)
    with torch.no_grad():
        assert torch.equal(again.replay(rollouts, again.module).logp, moved)


@pytest.mark.parametrize("part", ["vision", "connector", "language"])
def test_parts_are_frozen_by_name(openvla, part):
    policy = openvla(freeze=[part])
    where = {"vision": "vision_backbone.", "connector": "projector.", "language": "language_model."}
    for name, parameter in policy.module.backbone.model.named_parameters():
        assert parameter.requires_grad != name.startswith(where[part]), name
        assert name.startswith(where[loading.part_of(name)])


def test_other_heads_sit_on_it_too(make, checkpoint):
    policy = make("regression", str(checkpoint[0]))
    assert policy.rollout(STARTS, 1, SEEDS[:2]).mask.any()


def test_what_does_not_fit_is_named(openvla, make, checkpoint, tmp_path):
    def copy(name):
        return shutil.copytree(checkpoint[0], tmp_path / name)

    oft = copy("oft")
    (oft / "action_head--150000_checkpoint.pt").write_bytes(b"")
    with pytest.raises(
        UserError, match=r"holds action_head--150000_checkpoint\.pt, a pickle, which mmrl train never opens; convert"
    ):
        openvla(path=oft)
    pickled = copy("pickled")
    for file in pickled.glob("model*"):
        file.unlink()
    (pickled / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match="pickles are never opened"):
        openvla(path=pickled)
    for name, change, message in [
        ("less", lambda t: t.pop("projector.fc3.bias"), r"missing projector\.fc3\.bias"),
        ("more", lambda t: t.update({"projector.fc4.bias": torch.zeros(2)}), r"unexpected projector\.fc4\.bias"),
        ("other", lambda t: t.update({"projector.fc3.bias": torch.zeros(2)}), "mismatched .*projector.fc3.bias"),
    ]:
        folder, weights = copy(name), by_name(checkpoint[0])
        for file in folder.glob("model*"):
            file.unlink()
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UserError, match=message):
            openvla(path=folder)
    bare = copy("bare")
    (bare / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json is missing"):
        openvla(path=bare)
    with pytest.raises(UserError, match="decoding=bidirectional is for OpenVLA-OFT"):
        make("parallel", "small", decoding="bidirectional")
    with pytest.raises(UserError, match=r"model\.processor\.max_pixels"):
        openvla(processor={"max_pixels": 4})
    with pytest.raises(UserError, match="have 18 tokens, more than rollout.max_prompt_length=10"):
        openvla(max_prompt_length=10).rollout(STARTS[:1], 1, SEEDS[:1])
