"""LoRA of LeRobot policies: adapters alone learn, and the folders are those that LeRobot itself reads and writes."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mmrl.errors import UserError
from mmrl.samplers.chain import INITIAL, derive_seed, gaussian_noise
from tests.policies.vla.test_lerobot_policy import CHUNK, KINDS, SEEDS, STARTS, lerobot, load, shown, starts

LORA = {"rank": 2, "alpha": 8.0}
PARTS = ["vision", "connector", "language"]
EXPERT = {"smolvla": ".lm_expert.", "pi0": ".gemma_expert.", "pi05": ".gemma_expert."}


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request, tmp_path_factory):
    from tests.policies.vla import tiny_lerobot

    with tiny_lerobot.written(tmp_path_factory.mktemp("lora") / request.param, request.param) as folder:
        yield folder


def moved(policy):
    """The policy with adapters that do something, drawn by their order, so that those of two policies are equal."""
    with torch.no_grad():
        for i, (name, parameter) in enumerate(sorted(policy.named_parameters())):
            if "lora_" in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(i))
    return policy


def adapters(policy):
    return {n for n, p in policy.module.named_parameters() if p.requires_grad}


def lerobots(folder):
    """The folder's policy, base and adapters, and its processors, by the way of lerobot-eval and lerobot-train."""
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.policies.factory import make_policy, make_pre_post_processors

    from tests.policies.vla.tiny_lerobot import STATISTICS

    config = PreTrainedConfig.from_pretrained(folder)
    config.pretrained_path = folder
    one = {"dtype": "float32", "shape": (1,), "names": None}
    image = {"dtype": "image", "shape": (2, 2, 3), "names": ["height", "width", "channels"]}
    features = {"observation.images.top": image, "observation.state": one, "action": one}
    policy = make_policy(config, ds_meta=SimpleNamespace(features=features, stats=STATISTICS))
    return policy, *make_pre_post_processors(config, str(folder))


def assert_equal_actions(ours, theirs):
    """Of three starts, in the robot's units, from images, words and state through both libraries. Returns theirs."""
    policy, before, after = theirs
    observation = ours.sim.reset([0, 10, 30], ["go"] * 3)
    noise = gaussian_noise([derive_seed(seed, 0) for seed in (5, 6, 7)], INITIAL, ours.module.head.latent)
    with torch.no_grad():
        expected = after(policy.predict_action_chunk(before(shown(observation, [0, 1, 2])), noise=noise))
    ours.sim.simulator.received.clear()
    ours.respond(starts(0, 10, 30), [5, 6, 7])
    moves = [[action for r, action in ours.sim.simulator.received if r == row][:CHUNK] for row in range(3)]
    assert all(moves) and sum(map(len, moves)) > 4 and expected.std() > 0.01
    for row, found in enumerate(moves):  # an episode may end inside its chunk
        torch.testing.assert_close(torch.tensor(found).float(), expected[row, : len(found), 0], rtol=1e-4, atol=1e-5)
    return expected


@lerobot
def test_adapters_alone_learn_and_change_nothing_at_first(checkpoint):
    base, policy = load(checkpoint), load(checkpoint, lora=LORA)
    trained = adapters(policy)
    assert trained and all("lora_" in name for name in trained) and not any("lm_head" in name for name in trained)
    for part in (EXPERT[checkpoint.name], ".action_in_proj.", ".action_out_proj."):
        assert any(part in name for name in trained), part
    assert any(".state_proj." in name for name in trained) == (checkpoint.name != "pi05")  # which has it in words
    own = {".vision_tower.": True, ".multi_modal_projector.": True, ".language_model.": True, ".vlm.": False}
    for part, there in own.items():  # a SmolVLA trains its expert only, as its config.json says
        assert any(part in name for name in trained) == (there and checkpoint.name != "smolvla"), part
    rollouts = base.rollout(STARTS, 2, SEEDS)
    with torch.no_grad():
        old = base.replay(rollouts, base.module)
    found = policy.replay(replace(rollouts, old_logp=old.logp, old_prediction=old.prediction), policy.module)
    assert torch.equal(found.logp, old.logp) and not found.log_ratio.any()  # the second factors are 0
    found.logp[rollouts.mask].sum().backward()
    learned = {n for n, p in policy.module.named_parameters() if p.grad is not None}
    assert learned <= trained
    assert {n.split(".")[-4] for n in learned if "lora_B" in n} >= {"action_in_proj", "action_out_proj", "q_proj"}
    assert all(
        p.grad.any() for n, p in policy.module.named_parameters() if n in learned and ".action_out_proj.lora_B" in n
    )


@lerobot
def test_frozen_parts_have_no_adapters_and_are_read_once(checkpoint):
    policy = load(checkpoint, lora=LORA, freeze=PARTS)
    names = {n for n, _ in policy.module.named_parameters() if "lora_" in n}
    assert policy.caches_prefixes and names == adapters(policy)
    assert any(EXPERT[checkpoint.name] in n for n in names)
    assert not any(part in n for part in (".vlm.", ".paligemma.") for n in names)
    assert any(".state_proj." in n for n in names) == (checkpoint.name == "pi0")
    named = load(checkpoint, lora={**LORA, "targets": ["q_proj", "action_out_proj"]}, freeze=PARTS)
    assert {n.split(".")[-4] for n in adapters(named)} == {"q_proj", "action_out_proj"}
    assert {n for n in adapters(named) if ".q_proj." in n} == {n for n in names if ".q_proj." in n}


@lerobot
def test_a_new_one_has_its_rank_and_scale(checkpoint, tmp_path):
    policy = load(checkpoint, lora={"rank": 4, "alpha": 6.0})
    layer = policy.module.backbone.unwrapped.model.action_out_proj
    assert layer.lora_A["default"].weight.shape[0] == 4 and layer.scaling["default"] == 6 / 4
    x = torch.ones(1, layer.in_features)
    with torch.no_grad():
        before = layer(x)
        moved(policy.module)
        added = layer(x) - before
    first, second = (part["default"].weight for part in (layer.lora_A, layer.lora_B))
    torch.testing.assert_close(added, 1.5 * x @ first.T @ second.T)


@lerobot
@pytest.mark.parametrize("parts", [[], PARTS], ids=["whole", "expert"])
def test_what_is_saved_acts_the_same_in_lerobot(checkpoint, tmp_path, parts):
    policy = load(checkpoint, lora=LORA, freeze=parts)
    moved(policy.module)
    rollouts = policy.rollout(STARTS, 2, SEEDS)
    with torch.no_grad():
        old = policy.replay(rollouts, policy.module)
        unmoved = load(checkpoint, freeze=parts)
        assert not torch.allclose(unmoved.replay(rollouts, unmoved.module).logp, old.logp, atol=1e-2)
    now = policy.replay(replace(rollouts, old_logp=old.logp, old_prediction=old.prediction), policy.module)
    assert now.log_ratio.requires_grad and torch.equal(now.log_ratio, torch.zeros_like(now.log_ratio))
    policy.save(tmp_path, policy.module.state_dict())
    assert not (tmp_path / "model.safetensors").exists()
    told, base = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path, checkpoint))
    assert told == {**base, "use_peft": True}
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == str(checkpoint)
    theirs = lerobots(tmp_path)
    adapted = assert_equal_actions(policy, theirs)
    merged = theirs[0].merge_and_unload()
    torch.testing.assert_close(assert_equal_actions(policy, (merged, *theirs[1:])), adapted, rtol=1e-4, atol=1e-5)
    again = load(tmp_path, freeze=parts)
    assert adapters(again) == adapters(policy) and again.caches_prefixes == policy.caches_prefixes
    with torch.no_grad():
        assert torch.equal(again.replay(rollouts, again.module).logp, old.logp)
    frozen = load(tmp_path, freeze=PARTS)
    assert frozen.caches_prefixes and adapters(frozen)
    assert adapters(frozen) == {n for n in adapters(policy) if ".vlm." not in n and ".paligemma." not in n} - {
        n for n in adapters(policy) if ".state_proj." in n and checkpoint.name == "smolvla"
    }
    again.save(tmp_path / "again", again.module.state_dict())
    for name in ("config.json", "adapter_model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / name).read_bytes(), name
    one, other = (json.loads((folder / "adapter_config.json").read_text()) for folder in (tmp_path, tmp_path / "again"))
    assert {**one, "target_modules": set(one["target_modules"])} == {
        **other,
        "target_modules": set(other["target_modules"]),  # peft writes a set
    }


@lerobot
def test_a_lora_by_lerobot_trains_on(checkpoint, tmp_path):
    """Written as LeRobot's trainer does; with LeRobot's own choice of layers."""
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    config = PreTrainedConfig.from_pretrained(checkpoint)
    config.pretrained_path, config.load_vlm_weights = checkpoint, False
    plain = get_policy_class(checkpoint.name).from_pretrained(checkpoint, config=config)
    theirs = moved(plain.wrap_with_peft(peft_cli_overrides={"method_type": "LORA", "r": 4}))
    theirs.save_pretrained(tmp_path)
    theirs.config.save_pretrained(tmp_path)
    processors = make_pre_post_processors(config, str(checkpoint))
    for processor in processors:
        processor.save_pretrained(tmp_path)
    ours = load(tmp_path)
    assert_equal_actions(ours, (theirs, *processors))
    assert {n.split(".")[-4] for n in adapters(ours)} >= {"q_proj", "v_proj", "action_in_proj"}
    assert all("lora_" in name for name in adapters(ours))


@lerobot
def test_an_adapter_that_is_not_there_is_named(checkpoint, tmp_path):
    policy = load(checkpoint, lora=LORA)
    policy.save(tmp_path, policy.module.state_dict())
    config = tmp_path / "adapter_config.json"
    told = json.loads(config.read_text())
    config.write_text(json.dumps({**told, "base_model_name_or_path": str(tmp_path)}))
    with pytest.raises(UserError, match=r"LeRobot policy, but .*model\.safetensors is missing"):
        load(tmp_path)
    config.unlink()
    with pytest.raises(UserError, match=r"config\.json has use_peft=true, but adapter_config\.json is missing"):
        load(tmp_path)
