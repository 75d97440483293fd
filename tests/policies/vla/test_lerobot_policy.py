"""Policies that LeRobot wrote, played, scored and trained here: what they do must be what LeRobot says they do."""

import importlib.util
import json
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributions import Normal

from mmrl.errors import UserError
from mmrl.policies.vla import backbones
from mmrl.policies.vla.loading import open_policy
from mmrl.policies.vla.settings import Actions, TaughtActions, VisionLanguageActionModel
from mmrl.samplers.chain import INITIAL, derive_seed, gaussian_noise
from mmrl.samplers.transitions import coefficients
from mmrl.schedules.schedule import constant
from mmrl.settings import make
from mmrl.sims import Observation, build
from tests.policies.vla.conftest import starts, taught

installed = importlib.util.find_spec("lerobot") is not None
lerobot = pytest.mark.skipif(not installed, reason="lerobot is not installed")
KINDS = ["smolvla", "pi0", "pi05"]
CHUNK, STEPS = 4, 5
STARTS, SEEDS = starts(0, 30, 70), [11, 12, 13, 14, 15, 16]
FLOW = {"type": "flow", "steps": STEPS, "evaluation_steps": STEPS}
LIKELIHOODS = {
    "one step": {"type": "chain", "window": {"type": "random", "size": 1}},
    "all steps": {"type": "chain"},
    "matching": {"type": "matching"},
}


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request, tmp_path_factory):
    from tests.policies.vla import tiny_lerobot

    with tiny_lerobot.written(tmp_path_factory.mktemp("lerobot") / request.param, request.param) as folder:
        yield folder


def load(
    folder,
    likelihood="all steps",
    *,
    simulator="tests.sims.line_simulator:Line",
    head=None,
    action=None,
    supervised=False,
    **model,
):
    """head: its section; action: options of the section around it; the rest are of the model."""
    own = {**FLOW, "likelihood": LIKELIHOODS[likelihood]} if head is None else head
    tree = {"head": taught(own) if supervised else own, "chunk": CHUNK, **(action or {})}
    return open_policy(
        str(folder),
        make(VisionLanguageActionModel, model),
        make(TaughtActions if supervised else Actions, tree),
        build(simulator, 4),
        critic=None,
        seed=0,
        max_prompt_length=1024,
        temperature=constant(1.0),
        evaluation_temperature=0.0,
    )


@pytest.fixture(scope="module")
def theirs(checkpoint):
    """The policy and its two processors as LeRobot loads them."""
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    policy = get_policy_class(checkpoint.name).from_pretrained(checkpoint)
    return policy, *make_pre_post_processors(policy.config, str(checkpoint))


def images(policy, batch):
    """A list of tensors and one of masks."""
    return (policy.prepare_images if policy.name == "smolvla" else policy._preprocess_images)(batch)


def told(policy, batch):
    """What the policy's state is to its model, if it is not a word: a list of tensors."""
    return [] if policy.name == "pi05" else [policy.prepare_state(batch)]


def lerobots_error(policy, before, batch, chosen):
    """The mean of LeRobot's losses of the executed actions at the noises and levels of `chosen`."""
    errors = []
    for sigma, noise in zip(chosen["sigma"], chosen["noise"], strict=True):
        made = before(dict(batch))
        words = made["observation.language.tokens"], made["observation.language.attention_mask"]
        rest = *told(policy, made), policy.prepare_action(made), noise[None], sigma[None]
        with torch.no_grad():
            losses = policy.model(*images(policy, made), *words, *rest)
        errors.append(losses[0, :CHUNK, :1].mean().item())
    return sum(errors) / len(errors)


def shown(observation, rows):
    """A batch as LeRobot's evaluation hands it over."""
    return {
        "observation.images.top": torch.from_numpy(observation.images[rows]).permute(0, 3, 1, 2) / 255,
        "observation.state": torch.from_numpy(observation.state[rows]),
        "task": [observation.instructions[i] for i in rows],
    }


@lerobot
def test_without_noise_it_acts_as_lerobot_does(checkpoint, theirs):
    """To the robot's units: from images, state and words through both libraries, with the same first noise."""
    policy, before, after = theirs
    ours = load(checkpoint)
    observation = ours.sim.reset([0, 10, 30], ["go"] * 3)
    noise = gaussian_noise([derive_seed(seed, 0) for seed in (5, 6, 7)], INITIAL, ours.module.head.latent)
    expected = after(policy.predict_action_chunk(before(shown(observation, [0, 1, 2])), noise=noise))
    ours.sim.simulator.received.clear()
    ours.respond(starts(0, 10, 30), [5, 6, 7])
    for row in range(3):
        moved = torch.tensor([action for r, action in ours.sim.simulator.received if r == row][:CHUNK])
        assert len(moved) > 1 and expected[row].std() > 0.01
        torch.testing.assert_close(moved.float(), expected[row, : len(moved), 0], rtol=1e-5, atol=1e-6)


@lerobot
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_on_policy_ratio_is_exactly_one(checkpoint, likelihood):
    policy = load(checkpoint, likelihood)
    rollouts = policy.rollout(STARTS, 2, SEEDS)
    with torch.no_grad():
        old = policy.replay(rollouts, policy.module)
    now = policy.replay(replace(rollouts, old_logp=old.logp, old_prediction=old.prediction), policy.module)
    assert now.log_ratio.requires_grad and torch.equal(now.log_ratio, torch.zeros_like(now.log_ratio))
    assert rollouts.mask.any() and torch.equal(now.logp, old.logp) and old.logp[rollouts.mask].std() > 0


@lerobot
def test_replay_of_all_steps_is_lerobots_step_by_step(checkpoint, theirs):
    """Likelihoods of one look under torch's normal, the velocity of each step asked of LeRobot's model on its own."""
    policy, before, _ = theirs
    ours = load(checkpoint)
    rollouts = ours.rollout(starts(0, 1, 2), 1, SEEDS[:3])
    with torch.no_grad():
        found = ours.replay(rollouts, ours.module).logp
    observation, model = ours.sim.reset([0, 1, 2], ["go"] * 3), policy.model
    batch = before(shown(observation, [0, 1, 2]))
    views, there = images(policy, batch)
    words = batch["observation.language.tokens"], batch["observation.language.attention_mask"]
    sigmas, velocities = torch.linspace(1, 0, STEPS + 1), []
    looks = [episode[0] for episode in rollouts.inputs]

    def recorded(x_t, timestep, **context):
        velocities.append(usual(x_t=at[len(velocities)], timestep=timestep, **context))
        return velocities[-1]

    usual, at = model.denoise_step, torch.stack([look.sampled["x"] for look in looks], 1)
    at = torch.cat([at, at[-1:]])  # the last step is not a decision
    model.denoise_step = recorded
    with torch.no_grad():
        model.sample_actions(views, there, *words, *told(policy, batch), noise=at[0])
    del model.denoise_step
    whole = [row for row in range(3) if looks[row].valid.all()]
    assert whole and looks[0].sampled["points"].tolist() == list(range(STEPS - 1))
    for row in whole:
        look = looks[row]
        for k in range(STEPS - 1):
            a_x, a_v, std = coefficients("flow_sde", sigmas[k], sigmas[k + 1], noise=0.7, sigma_second=sigmas[1])
            mean = (a_x * look.sampled["x"][k] + a_v * velocities[k][row])[:CHUNK, :1]
            expected = Normal(mean.double(), std.double()).log_prob(look.sampled["x_next"][k, :CHUNK, :1].double())
            assert found[row, k].item() == pytest.approx(expected.mean().item(), abs=1e-4)


@lerobot
def test_the_flow_matching_error_is_lerobots_loss(checkpoint, theirs):
    """Of a demonstrated chunk: statistics, padding and the error at the same noise and time."""
    policy, before, _ = theirs
    ours = load(checkpoint, supervised=True)
    seen = Observation(np.full((1, 2, 2, 3), 90, np.uint8), np.full((1, 1), 0.3, np.float32), ["go from 0.30"])
    actions = np.array([[0.3], [0.2], [-0.1], [0.0]], np.float32)
    prompt = replace(STARTS[0], metadata={"observation": seen, "actions": actions})
    shows = ours.demonstrate([prompt], [1])
    with torch.no_grad():
        found = -ours.replay(shows, ours.module).logp.item()
    chosen = shows.inputs[0][0].sampled
    whole = torch.from_numpy(np.concatenate([actions, actions[-1:], actions[-1:]]))
    expected = lerobots_error(policy, before, {**shown(seen, [0]), "action": whole[None]}, chosen)
    assert found == pytest.approx(expected, rel=1e-4)


@lerobot
def test_heads_for_words_are_not_trained(checkpoint):
    trained = {n for n, p in load(checkpoint).module.named_parameters() if p.requires_grad}
    assert not any("lm_head" in name for name in trained)
    assert any("embed_tokens" in name for name in trained) == (checkpoint.name != "smolvla")


@lerobot
def test_the_prefix_is_read_once(checkpoint, monkeypatch):
    """A look reads it once for all denoising steps; replay once, with one pass of the expert for all looks."""
    policy = load(checkpoint)
    model, calls = policy.module.backbone.policy.model, []

    def counted(name):
        usual = getattr(model, name)
        monkeypatch.setattr(model, name, lambda *a, **k: calls.append(name) or usual(*a, **k))

    counted("embed_prefix")
    counted("denoise_step")
    rollouts = policy.rollout(STARTS[:1], 2, SEEDS[:2])
    looks = max(len(episode) for episode in rollouts.inputs)
    assert calls == ["embed_prefix", *["denoise_step"] * STEPS] * looks
    calls.clear()
    policy.replay(rollouts, policy.module)
    assert calls == ["embed_prefix", "denoise_step"]


@lerobot
def test_a_frozen_prefix_is_not_read_again(checkpoint, monkeypatch):
    whole, kept = load(checkpoint), load(checkpoint, freeze=["vision", "connector", "language"])
    assert kept.caches_prefixes and not whole.caches_prefixes
    expected, found = (p.rollout(STARTS, 2, SEEDS) for p in (whole, kept))
    monkeypatch.setattr(kept.module.backbone, "encode", None)
    one, other = (p.replay(r, p.module) for p, r in ((whole, expected), (kept, found)))
    torch.testing.assert_close(one.logp, other.logp, rtol=1e-4, atol=1e-5)
    gradients = []
    for policy, replay in ((whole, one), (kept, other)):
        replay.logp.sum().backward()
        gradients.append({n: p.grad for n, p in policy.module.named_parameters() if p.grad is not None})
    name = "backbone.policy.model.{}.weight".format
    assert name("action_out_proj") in gradients[1] and len(gradients[0]) > len(gradients[1])
    assert (name("state_proj") in gradients[1]) == (checkpoint.name == "pi0")  # SmolVLA has the state in its prefix
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(gradient, gradients[0][name], rtol=1e-3, atol=1e-5)


@lerobot
def test_a_prefix_is_the_same_alone_padded_and_kept(checkpoint):
    backbone, cpu = load(checkpoint).module.backbone, torch.device("cpu")
    images = np.random.default_rng(0).integers(0, 256, (2, 2, 2, 3), np.uint8)
    rows = backbone.prepare([images], ["go from 0.30", "go"], np.array([[0.1], [0.3]], np.float32))
    generator = torch.Generator().manual_seed(0)
    x, sigma = torch.randn(2, *load(checkpoint).module.head.latent, generator=generator), torch.tensor([0.9, 0.4])
    with torch.no_grad():
        both = backbone.encode(backbone.collate(rows, cpu), every_layer=False)
        again = backbone.cached_prefix(backbone.collate_cached(backbone.cache_rows(both), cpu))
        alone = backbone.encode(backbone.collate(rows[1:], cpu), every_layer=False)
        expected = backbone.velocity(both, x, sigma)
        torch.testing.assert_close(backbone.velocity(again, x, sigma), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(backbone.velocity(alone, x[1:], sigma[1:]), expected[1:], rtol=1e-4, atol=1e-5)
    for other in (again.last[1], alone.last[0]):
        torch.testing.assert_close(other, both.last[1], rtol=1e-4, atol=1e-5)
    assert both.mask.sum(1).tolist() == again.mask.sum(1).tolist() and (both.last[0] - both.last[1]).abs().max() > 0.1


@lerobot
def test_actions_that_are_never_executed_change_nothing(checkpoint):
    """Those behind the chunk, and numbers that the robot does not have."""
    policy = load(checkpoint)
    rollouts = policy.rollout(STARTS, 1, SEEDS[:3])
    cut = [look for episode in rollouts.inputs for look in episode if not look.valid.all()]
    assert cut

    def spoil(look):
        chosen = {name: value.clone() for name, value in look.sampled.items()}
        chosen["x_next"][:, CHUNK:], chosen["x_next"][..., 1:] = 99.0, 99.0
        chosen["x_next"][:, :CHUNK][:, ~look.valid] = 99.0
        return replace(look, sampled=chosen)

    spoilt = replace(rollouts, inputs=[[spoil(look) for look in episode] for episode in rollouts.inputs])
    found = []
    for batch in (rollouts, spoilt):
        policy.module.zero_grad()
        replay = policy.replay(batch, policy.module)
        (replay.log_ratio.exp() + replay.logp)[batch.mask].sum().backward()
        found.append([replay.logp.detach(), *(p.grad for p in policy.module.parameters() if p.grad is not None)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@lerobot
def test_a_run_trains_it_and_lerobot_loads_what_it_saved(checkpoint, tmp_path, alone, theirs):
    from tests.whole_runs.parts import ROBOTS, metrics, train

    options = [
        "action.head.type=flow",
        "action.chunk=4",
        "model.build=null",
        f"model.path={checkpoint}",
        "steps=2",
        "task.train_size=30",
    ]
    train(tmp_path, *options, "action.head.steps=3", "action.head.evaluation_steps=3", "optim.lr=1e-3", base=ROBOTS)
    rows = [row for row in metrics(tmp_path) if "loss" in row]
    assert len(rows) == 2 and all(row["updates_skipped"] == 0 for row in rows)
    before, after = (load_file(f / "model.safetensors") for f in (checkpoint, tmp_path / "final"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    still = ".vlm." if checkpoint.name == "smolvla" else "nothing"  # as LeRobot's default has it
    assert changed and all(still not in name for name in changed)
    assert {"model.action_in_proj.weight", "model.action_out_proj.weight"} <= changed
    assert ("model.state_proj.weight" in changed) == (checkpoint.name != "pi05")  # which has its state in words
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    policy = get_policy_class(checkpoint.name).from_pretrained(tmp_path / "final", strict=True)
    assert all(torch.equal(tensor, after[name]) for name, tensor in policy.state_dict().items() if name in after)
    made = make_pre_post_processors(policy.config, str(tmp_path / "final"))
    values = torch.tensor([[0.3]])
    assert torch.equal(made[1](values), theirs[2](values))
    assert (tmp_path / "final/config.json").read_bytes() == (checkpoint / "config.json").read_bytes()
    again = load(tmp_path / "final", action={"chunk": 2})
    assert torch.equal(again.module.backbone.policy.model.action_in_proj.weight, after["model.action_in_proj.weight"])


@lerobot
def test_what_does_not_fit_is_refused(checkpoint, tmp_path):
    for options, message in [
        ({"head": {"type": "token"}}, "action.head.type=token.*head.type=flow"),
        ({"action": {"chunk": 7}}, "action.chunk=7, but the LeRobot policy plans 6"),
        ({"head": {**FLOW, "likelihood": "learned"}}, "likelihood.type=learned is not supported by this model"),
        ({"action": {"statistics": "x.json"}}, "action.statistics"),
        ({"simulator": "tabletop"}, "policy's action has 1 numbers, but the simulator's"),
        ({"lora": {"rank": 1, "targets": ["nothing"]}}, r"model.lora.targets=\['nothing'\] matches no linear layer"),
    ]:
        with pytest.raises(UserError, match=message):
            load(checkpoint, **options)
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    tensors = load_file(broken / "model.safetensors")
    for kind, change in {
        "missing model.action_in_proj.bias": lambda t: t.pop("model.action_in_proj.bias"),
        "unexpected model.more": lambda t: t.update({"model.more": torch.zeros(1)}),
        "mismatched model.action_in_proj.bias": lambda t: t.update({"model.action_in_proj.bias": torch.zeros(1)}),
    }.items():
        found = dict(tensors)
        change(found)
        save_file(found, broken / "model.safetensors")
        with pytest.raises(UserError, match=kind):
            load(broken)
    (broken / "policy_preprocessor.json").unlink()
    with pytest.raises(UserError, match="policy_preprocessor.json is missing"):
        load(broken)


def described(folder, **config):
    """A folder with nothing but the description of a LeRobot policy."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"output_features": {}, **config}))
    return folder


def test_another_kind_of_policy_is_refused_by_name(tmp_path):
    with pytest.raises(UserError, match="LeRobot policy of type act; only smolvla, pi0 and pi05"):
        load(described(tmp_path / "act", type="act"))


def test_without_lerobot_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "mmrl.policies.vla.backbones.lerobot", raising=False)
    monkeypatch.delattr(backbones, "lerobot", raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == "lerobot"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lerobot", None)
    with pytest.raises(UserError, match=r"is a LeRobot policy: .*lerobot.*scripts/lerobot.txt"):
        load(described(tmp_path / "smolvla", type="smolvla"))


@lerobot
def test_its_noise_can_be_steered(checkpoint, theirs):
    """From the noise that a head of its own draws it acts as LeRobot does; and that head alone learns."""
    policy, before, after = theirs
    base = {"type": "flow", "evaluation_steps": STEPS}
    ours = load(checkpoint, head={"type": "steered", "width": 8, "layers": 1, "last_gain": 0.5, "base": base})
    rollouts = ours.rollout(starts(0, 30), 2, [11, 12, 13, 14])
    steps = [episode[0] for episode in rollouts.inputs]
    observation = ours.sim.reset([0, 0, 30, 30], ["go"] * 4)
    noise = torch.stack([step.sampled["noise"] for step in steps])
    assert noise.shape[1:] == ours.module.head.base.latent
    expected = policy.predict_action_chunk(before(shown(observation, [0, 1, 2, 3])), noise=noise)
    chunks = torch.stack([step.sampled["actions"] for step in steps])
    torch.testing.assert_close(chunks, expected[:, :CHUNK, :1], rtol=1e-4, atol=1e-5)
    assert chunks.std() > 0.01
    replay = ours.replay(rollouts, ours.module)
    replay.logp[rollouts.mask].sum().backward()
    learning = {name for name, p in ours.module.named_parameters() if p.grad is not None and p.grad.any()}
    assert learning == {name for name, p in ours.module.named_parameters() if p.requires_grad}
    assert all(name.startswith("head.noise.") for name in learning)
