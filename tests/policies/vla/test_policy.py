"""Vision-language-action policies: what they do in a simulator, and how likely they find it."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributions import Laplace, Normal

from mmrl.config import validate
from mmrl.errors import UserError
from mmrl.policies.vla.heads.head import ActionSampling, extend
from mmrl.report.settings import Log
from mmrl.rollouts import Rollouts
from mmrl.samplers.transitions import coefficients
from mmrl.settings import SettingsError
from mmrl.sims import build
from tests.helpers.saved import Saved
from tests.policies.vla.conftest import CHUNK, KINDS, LEVELS, starts

STARTS = starts(0, 30, 70)
SEEDS = [11, 12, 13, 14, 15, 16]
TOKENS = ("parallel", "autoregressive")


def stir(policy, amount=0.3):
    """Fresh heads end in zeros; likelihoods shall depend on everything."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in policy.module.named_parameters():
            if not name.startswith("backbone."):
                parameter += amount * torch.randn(parameter.shape, generator=generator)
    return policy


@pytest.fixture(scope="module")
def played(make):
    """Each kind's policy and its rollouts: three groups of two."""
    found = {}

    def get(kind, backbone="small", **options):
        key = (kind, backbone, *sorted(options.items()))
        if key not in found:
            policy = stir(make(kind, backbone, **options))
            found[key] = policy, policy.rollout(STARTS, 2, SEEDS)
        return found[key]

    return get


def levels(kind):
    return (None,) if kind.startswith(("flow", "invertible")) else LEVELS


def at(level):
    """Options of a head; flows and what is like them have no levels."""
    return {} if level is None else {"level": level}


CASES = [(kind, backbone, level) for kind in KINDS for backbone in ("small", "qwen") for level in levels(kind)]


# What a level adds up does not depend on who reads.
QUICK = [case for case in CASES if case[1] != "qwen" or case[2] == levels(case[0])[0]]


@pytest.mark.parametrize(
    ("kind", "backbone", "level"), [c if c in QUICK else pytest.param(*c, marks=pytest.mark.slow) for c in CASES]
)
def test_on_policy_ratio_is_exactly_one(played, kind, backbone, level):
    policy, rollouts = played(kind, backbone, **at(level))
    with torch.no_grad():
        old = policy.replay(rollouts, policy.module)
    rollouts = replace(rollouts, old_logp=old.logp, old_prediction=old.prediction)
    now = policy.replay(rollouts, policy.module)
    ratio = now.logp - old.logp if now.log_ratio is None else now.log_ratio
    assert rollouts.mask.any() and torch.equal(ratio, torch.zeros_like(ratio))
    assert now.logp.shape == rollouts.mask.shape and now.logp[rollouts.mask].isfinite().all()
    assert rollouts.mask.shape[1] % policy.module.head.decisions == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_log_ratio_is_that_of_the_likelihoods(played, make, kind):
    """After a change of the weights: log-ratio against the difference of log-likelihoods."""
    policy, rollouts = played(kind)
    with torch.no_grad():
        old = policy.replay(rollouts, policy.module)
    moved = make(kind)
    moved.module.load_state_dict(policy.module.state_dict())
    stir(moved, 0.01)
    rollouts = replace(rollouts, old_logp=old.logp, old_prediction=old.prediction)
    now = moved.replay(rollouts, moved.module)
    difference = (now.logp - old.logp)[rollouts.mask]
    assert difference.abs().min() > 0
    if now.log_ratio is not None:
        torch.testing.assert_close(now.log_ratio[rollouts.mask], difference, rtol=2e-3, atol=2e-6)


def loss_and_gradient(policy, rollouts):
    policy.module.zero_grad()
    replay = policy.replay(rollouts, policy.module)
    terms = replay.logp if replay.log_ratio is None else replay.log_ratio.exp() + replay.logp
    loss = terms[rollouts.mask].sum() + (0 if replay.entropy is None else replay.entropy[rollouts.mask].sum())
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in policy.module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("kind", "level"), [(kind, level) for kind in KINDS for level in levels(kind)])
def test_garbage_after_the_end_changes_nothing(played, kind, level):
    policy, rollouts = played(kind, **at(level))
    cut = [look for episode in rollouts.inputs for look in episode if not look.valid.all()]
    assert cut
    spoilt = []
    for episode in rollouts.inputs:
        looks = []
        for look in episode:
            chosen, over = {k: v.clone() for k, v in look.sampled.items()}, ~look.valid
            if kind in TOKENS:
                chosen["columns"].view(CHUNK, -1)[over] = 7 - chosen["columns"].view(CHUNK, -1)[over]
            if "x_next" in chosen:
                chosen["x_next"][:, over] = 99.0
            if kind.startswith(("regression", "bridge", "gaussian", "latent", "residual", "horizons")):
                chosen["actions"][over] = 99.0
            if kind == "latent":
                chosen["latents"][int(chosen["count"]) :] = 99.0
            looks.append(replace(look, sampled=chosen))
        spoilt.append(looks)
    loss, gradient = loss_and_gradient(policy, rollouts)
    other, changed = loss_and_gradient(policy, replace(rollouts, inputs=spoilt))
    assert torch.equal(loss, other) and gradient.keys() == changed.keys()
    for name, value in gradient.items():
        assert torch.equal(value, changed[name]), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick("autoregressive", "flow", "latent")
def test_micro_batches_add_up(played, kind):
    policy, rollouts = played(kind)
    whole, gradient = loss_and_gradient(policy, rollouts)
    parts = [loss_and_gradient(policy, rollouts.select(torch.tensor(rows))) for rows in ([4, 0], [1], [5, 3, 2])]
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole, rtol=1e-5, atol=1e-5)
    for name, value in gradient.items():
        added = sum(part[name] for _, part in parts if name in part)
        torch.testing.assert_close(added, value, rtol=1e-3, atol=1e-4 * float(value.abs().max()) + 1e-7)


@pytest.mark.parametrize("backbone", ["small", "qwen"])
@pytest.mark.parametrize("kind", TOKENS)
def test_greedy_tokens_are_the_likeliest_under_replay(make, kind, backbone):
    """Replaying any other token at a place must find it less likely: a shift by one place would not."""
    policy = stir(make(kind, backbone, temperature=0.0))
    rollouts = policy.rollout(STARTS[:1], 1, [1])
    with torch.no_grad():
        best = policy.replay(rollouts, policy.module).logp[0]
        look = rollouts.inputs[0][0]
        for place in range(int(look.valid.sum())):
            for token in set(range(8)) - {int(look.sampled["columns"][place])}:
                columns = look.sampled["columns"].clone()
                columns[place] = token
                other = replace(rollouts, inputs=[[replace(look, sampled={**look.sampled, "columns": columns})]])
                other.mask = rollouts.mask[:, :CHUNK]
                assert policy.replay(other, policy.module).logp[0, place] < best[place]


@pytest.mark.parametrize("kind", TOKENS)
def test_token_likelihoods_are_those_of_the_sampler(make, kind):
    """Frequencies of the first token over many draws against exp(logp)."""
    policy = stir(make(kind, rows=64))
    counts = torch.zeros(8)
    for part in range(24):
        drawn = policy.rollout(starts(0), 64, [100 * part + i for i in range(64)])
        first = torch.stack([episode[0].sampled["columns"][0] for episode in drawn.inputs])
        counts += torch.bincount(first, minlength=8)
    look, n = drawn.inputs[0][0], counts.sum()
    tokens = [look.sampled["columns"].clone() for _ in range(8)]
    for token, columns in enumerate(tokens):
        columns[0] = token
    shown = [[replace(look, sampled={**look.sampled, "columns": c})] for c in tokens]
    each = replace(drawn.select(torch.arange(8)), inputs=shown)
    each.mask = each.mask[:, :CHUNK]
    with torch.no_grad():
        expected = policy.replay(each, policy.module).logp[:, 0].exp()
    assert expected.sum().item() == pytest.approx(1, abs=1e-5)
    error = (expected * (1 - expected) / n).sqrt()
    assert ((counts / n - expected).abs() < 4.5 * error + 1e-3).all()


@pytest.mark.parametrize("kind", ["parallel", "regression"])
def test_levels_are_sums(played, kind):
    logps = {}
    for level in LEVELS:
        policy, rollouts = played(kind, **at(level))
        with torch.no_grad():
            logps[level] = policy.replay(rollouts, policy.module).logp
    looks = len(STARTS) * 2, -1
    by_chunk = logps["action"].view(*looks, CHUNK).sum(-1)
    torch.testing.assert_close(logps["chunk"], by_chunk)
    torch.testing.assert_close(logps["token"].view(*looks, CHUNK, 1).sum(-1).flatten(1), logps["action"])


def test_laplace_is_torchs(played):
    policy, rollouts = played("regression")
    head = policy.module.head
    with torch.no_grad():
        replay = policy.replay(rollouts, policy.module)
        look = rollouts.inputs[1][0]
        reading = policy.module.encode(policy.module.backbone.collate([look.observation], policy.device))
        median = head.median(reading, look.state[None])[0]
    expected = Laplace(median.double(), head.log_scale.detach().double().exp())
    known = expected.log_prob(look.sampled["actions"].double()).flatten()
    torch.testing.assert_close(replay.logp[1, :CHUNK], known.float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(replay.entropy[1, :CHUNK], expected.entropy().flatten().float())


def test_laplace_noise_has_the_scale_it_is_scored_with(make):
    policy = make("regression", rows=64, scale=0.2)
    drawn = [policy.rollout(starts(0), 64, list(range(64 * part, 64 * part + 64))) for part in range(8)]
    actions = torch.stack([episode[0].sampled["actions"] for part in drawn for episode in part.inputs])
    spread = (actions - actions.median(0).values).abs().mean()
    assert spread.item() == pytest.approx(0.2, rel=0.05)


def velocity(policy, look, x, sigma):
    reading = policy.module.encode(policy.module.backbone.collate([look.observation], policy.device))
    with torch.no_grad():
        return policy.module.head.expert(x[None], torch.tensor([sigma]), look.state[None], reading.hidden, reading.mask)


def test_flow_likelihood_is_a_normal_of_the_sampler(played):
    policy, rollouts = played("flow, all steps")
    look = rollouts.inputs[0][0]
    assert look.valid.all() and look.sampled["points"].tolist() == [0, 1, 2]
    sigmas = torch.linspace(1, 0, 5)
    for j, k in enumerate([0, 1, 2]):
        a_x, a_v, std = coefficients("cps", sigmas[k], sigmas[k + 1], noise=0.7)
        v, _ = velocity(policy, look, look.sampled["x"][j], float(sigmas[k]))
        mean = a_x * look.sampled["x"][j] + a_v * v[0]
        expected = Normal(mean.double(), std.double()).log_prob(look.sampled["x_next"][j].double()).mean()
        with torch.no_grad():
            found = policy.replay(rollouts, policy.module).logp[0, j]
        assert found.item() == pytest.approx(expected.item(), abs=1e-4)


def test_learned_spread_is_a_normal_of_the_network(played):
    policy, rollouts = played("flow, learned")
    look = rollouts.inputs[0][0]
    chain, sigmas, total = look.sampled["chain"], torch.linspace(1, 0, 5), 0.0
    assert torch.equal(chain[-1], look.sampled["actions"])
    for k in range(4):
        v, wide = velocity(policy, look, chain[k], float(sigmas[k]))
        std = 0.08 * (0.16 / 0.08) ** ((wide[0].double() + 1) / 2)
        normal = Normal((chain[k] - 0.25 * v[0]).double(), std)
        assert float(std.min()) >= 0.08 and float(std.max()) <= 0.16
        total += normal.log_prob(chain[k + 1].double()).mean().item() / 4
    with torch.no_grad():
        assert policy.replay(rollouts, policy.module).logp[0, 0].item() == pytest.approx(total, abs=1e-4)


def test_matching_likelihood_by_hand(played):
    policy, rollouts = played("flow, matching")
    look = rollouts.inputs[0][0]
    errors = []
    for sigma, noise in zip(look.sampled["sigma"], look.sampled["noise"], strict=True):
        data = look.sampled["actions"]
        v, _ = velocity(policy, look, (1 - sigma) * data + sigma * noise, float(sigma))
        errors.append((v[0] - (noise - data)).double().square().mean())
    with torch.no_grad():
        found = policy.replay(rollouts, policy.module).logp[0, 0]
    assert found.item() == pytest.approx(-torch.stack(errors).mean().item(), rel=1e-4)


@pytest.mark.parametrize("kind", ["flow", "flow, matching"])
def test_a_frozen_backbone_is_read_once(make, played, kind):
    policy = stir(make(kind, "qwen", freeze=["vision", "connector", "language"]))
    other, rollouts = played(kind, "qwen")
    kept = policy.rollout(STARTS, 2, SEEDS)
    assert policy.caches_prefixes and not other.caches_prefixes
    assert kept.inputs[0][0].observation.dim() == 2  # the last layer, in place of images and words
    with torch.no_grad():
        a, b = policy.replay(kept, policy.module).logp, other.replay(rollouts, other.module).logp
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    loss_and_gradient(policy, kept)
    grads = {n for n, p in policy.module.named_parameters() if p.grad is not None}
    assert grads and all(name.startswith("head.") for name in grads)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick("autoregressive", "flow")
def test_an_episode_depends_on_its_seeds_alone(make, played, kind):
    """Not on the rows of the simulator, nor on what is played beside it."""
    policy, rollouts = played(kind)
    alone = stir(make(kind, rows=1)).rollout(STARTS[1:2], 2, SEEDS[2:4])
    few = stir(make(kind, rows=2)).rollout(STARTS, 2, SEEDS)
    for found, rows in ((alone, slice(2, 4)), (few, slice(0, 6))):
        for mine, theirs in zip(found.inputs, rollouts.inputs[rows], strict=True):
            assert len(mine) == len(theirs)
            for a, b in zip(mine, theirs, strict=True):
                torch.testing.assert_close(a.sampled["actions"], b.sampled["actions"], rtol=1e-4, atol=1e-5)
                assert torch.equal(a.valid, b.valid)
        lengths = [[sample.episode.length for sample in part] for part in (found.samples, rollouts.samples[rows])]
        assert lengths[0] == lengths[1]


def test_a_group_shares_its_window_in_whichever_rows_it_is_played(make):
    many, few = (stir(make("flow", rows=rows)).rollout(STARTS, 2, SEEDS) for rows in (6, 2))
    points = [[episode[0].sampled["points"].tolist() for episode in found.inputs] for found in (many, few)]
    assert points[0] == points[1] and points[0][::2] == points[0][1::2]
    assert len({str(point) for point in points[0]}) > 1


def test_playing_in_turns_changes_no_episode(make):
    """Two workers, one moving while the policy acts for the other."""
    whole = stir(make("regression", critic=True, scale=0.5))
    turns = stir(
        make("regression", critic=True, scale=0.5, sim=build("tests.sims.line_simulator:Line", 4, workers=2, turns=2))
    )
    a, b = (policy.rollout(STARTS, 2, SEEDS) for policy in (whole, turns))
    turns.sim.close()
    assert torch.equal(a.mask, b.mask) and len({s.episode.length for s in a.samples}) > 1
    for one, other in zip(a.inputs, b.inputs, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            torch.testing.assert_close(mine.sampled["actions"], theirs.sampled["actions"], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(mine.state, theirs.state, rtol=1e-4, atol=1e-5)
    for name in ("values", "rewards", "bootstrap"):
        one, other = (vars(batch.extras["steps"])[name] for batch in (a, b))
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert [s.episode.success for s in a.samples] == [s.episode.success for s in b.samples]


def test_an_episode_is_recorded(played):
    policy, rollouts = played("regression")
    for sample, looks in zip(rollouts.samples, rollouts.inputs, strict=True):
        moves = torch.cat([look.sampled["actions"][look.valid] for look in looks]).clamp(-1, 1)
        position = sample.prompt.metadata["seed"] / 100 + moves.sum().item()
        assert sample.episode.length == len(moves) <= 6
        assert sample.episode.success == sample.episode.success_at_end == (position >= 1)
        assert looks[-1].valid.sum() == (len(moves) - 1) % CHUNK + 1


def test_statistics_scale_what_the_robot_gets(make, tmp_path):
    (tmp_path / "stats.json").write_text('{"line": {"action": {"q01": [-0.1], "q99": [0.3]}}}')
    policy = make("regression", statistics=str(tmp_path / "stats.json"))
    rollouts = policy.rollout(STARTS[:1], 1, [3])
    drawn = torch.cat([look.sampled["actions"][look.valid] for look in rollouts.inputs[0]]).clamp(-1, 1)
    received = [action for _, action in policy.sim.simulator.received]
    np.testing.assert_allclose(received, (drawn[:, 0].numpy() + 1) / 2 * 0.4 - 0.1, atol=1e-6)


def test_the_critic_sees_each_look_and_what_is_behind_each_end(make):
    policy = stir(make("regression", critic=True, scale=0.5))
    rollouts = policy.rollout(starts(0, 30, 97), 2, SEEDS)
    ended = torch.tensor([s.episode.success for s in rollouts.samples])
    assert ended.any() and not ended.all()
    steps = rollouts.extras["steps"]
    last = steps.mask.sum(1) - 1
    rows = torch.arange(6)
    assert torch.equal(steps.terminated[rows, last], ended)
    assert steps.terminated.sum() == ended.sum()
    bootstrapped = steps.bootstrap != 0
    assert (bootstrapped.sum(1) == 1).all() and bootstrapped[rows, last].all()
    with torch.no_grad():
        replay = policy.replay(rollouts, policy.module)
    known = steps.mask
    torch.testing.assert_close(replay.value[known], steps.values[known], rtol=1e-4, atol=1e-5)
    for b, sample in enumerate(rollouts.samples):
        assert steps.rewards[b].sum().item() == pytest.approx(sample.episode.reward, abs=1e-4)


def test_a_lost_episode_does_not_count(make):
    policy = make("regression", simulator={"unstartable": [30]})
    with pytest.warns(RuntimeWarning, match="lost its episode"):
        rollouts = policy.rollout(STARTS, 2, SEEDS)
    lost = torch.tensor([s.episode.lost for s in rollouts.samples])
    assert lost.tolist() == [False, False, True, True, False, False]
    assert not rollouts.mask[lost].any() and rollouts.mask[~lost].any(1).all()
    only = policy.replay(rollouts.select(lost), policy.module)
    assert only.logp.shape == rollouts.mask[lost].shape
    others = policy.replay(rollouts.select(~lost), policy.module)
    assert [name for name, value in vars(only).items() if value is None] == [
        name for name, value in vars(others).items() if value is None
    ]
    only.logp.sum().backward()
    none = policy.by_step(rollouts.select(lost))
    said = policy.replay(none, policy.module)
    assert len(none) == 0 and said.logp.shape == said.extras["policy_steps"].shape == none.mask.shape
    parts = Rollouts.concat([rollouts.select(lost), rollouts.select(~lost)])
    assert len(parts) == 6


@pytest.mark.parametrize("kind", [*TOKENS, "flow", "bridge"])
@pytest.mark.parametrize("backbone", ["small", "qwen"])
@pytest.mark.quick("small-autoregressive", "small-flow")
def test_saved_and_loaded_alike(make, played, tmp_path, kind, backbone):
    policy, rollouts = played(kind, backbone)
    policy.save(tmp_path / "final", policy.module.state_dict())
    again = make(kind, str(tmp_path / "final"))
    with torch.no_grad():
        a, b = policy.replay(rollouts, policy.module), again.replay(rollouts, again.module)
    assert torch.equal(a.logp, b.logp)
    with pytest.raises(UserError, match="action.chunk=3, but .* was trained with 4"):
        make(kind, str(tmp_path / "final"), chunk=3)
    assert make(kind, str(tmp_path / "final"), critic=True).module.critic is not None


@pytest.mark.slow
def test_demonstrated_actions_are_the_likeliest_when_learnt(make):
    """A few steps of supervised learning raise the likelihood of what was shown, and greedy decoding then shows it."""
    from mmrl.sims import Observation

    for kind in ("parallel", "regression", "flow"):
        policy = make(kind, supervised=True)
        shown = np.array([[0.6], [-0.6], [0.2], [0.9]], np.float32)
        seen = Observation(np.full((1, 2, 2, 3), 9, np.uint8), np.zeros((1, 1), np.float32), ["go from 0.00"])
        prompt = replace(STARTS[0], metadata={"observation": seen, "actions": shown})
        optimizer = torch.optim.Adam(policy.module.parameters(), lr=1e-2)
        for step in range(150):
            batch = policy.demonstrate([prompt] * 4, [4 * step + i for i in range(4)])
            loss = -policy.replay(batch, policy.module).logp[batch.mask].mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        reading = policy.module.encode(policy.collate(policy.prepare(seen)))
        made = policy.module.head.act(reading, torch.zeros(1, 1), ActionSampling([0], 0.0, False))["actions"][0]
        assert (made - torch.from_numpy(shown)).abs().max() < 0.2, kind


def test_a_short_demonstration_is_masked(make):
    from mmrl.sims import Observation

    policy = make("parallel", supervised=True)
    seen = Observation(np.zeros((1, 2, 2, 3), np.uint8), np.zeros((1, 1), np.float32), ["go"])
    prompt = replace(STARTS[0], metadata={"observation": seen, "actions": np.zeros((3, 1), np.float32)})
    assert policy.demonstrate([prompt], [1]).mask.tolist() == [[True, True, True, False]]
    with pytest.raises(UserError, match="needs task.demonstrations"):
        policy.demonstrate(STARTS[:1], [1])


def test_the_prompt_may_be_continued_in_pieces(make):
    """The autoregressive head reads one token at a time; the transformer must see the same as in one piece."""
    for backbone in ("small", "qwen"):
        module = make("regression", backbone).module
        seen = module.backbone.prepare(
            [np.zeros((2, 32, 32, 3), np.uint8)], ["go from there", "go"], np.zeros((2, 1), np.float32)
        )
        tokens = torch.randn(2, 3, module.backbone.width, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            whole = extend(module.encode(module.backbone.collate(seen, torch.device("cpu"))), tokens)
            reading = module.encode(module.backbone.collate(seen, torch.device("cpu")))
            pieces = torch.cat([extend(reading, tokens[:, i : i + 1]) for i in range(3)], 1)
            alone = module.encode(module.backbone.collate(seen[1:], torch.device("cpu")))
            short = extend(alone, tokens[1:])
        torch.testing.assert_close(pieces, whole, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(short, whole[1:], rtol=1e-4, atol=1e-5)  # padding changes nothing


def test_a_group_starts_equal_bit_for_bit(make):
    sim = build("tabletop", 4, {"image_size": 32})
    observation = sim.reset([5, 5, 6, 5], ["reach"] * 4)
    assert (observation.images[0] == observation.images[[1, 3]]).all()
    assert (observation.state[0] == observation.state[[1, 3]]).all()
    assert (observation.images[0] != observation.images[2]).any()
    sim.close()


def test_impossible_settings_are_named(make):
    with pytest.raises(UserError, match="action.head.bins=5000"):
        make("parallel", bins=5000)
    with pytest.raises(SettingsError, match="unknown key head.likelihood"):
        make("regression", likelihood="learned")
    with pytest.raises(SettingsError, match="unknown key head.level"):
        make("flow", level="chunk")
    with pytest.raises(SettingsError, match="must hold {instruction}"):
        make("parallel", prompt="go")
    with pytest.raises(UserError, match="action.head.likelihood: a window of 9 steps does not fit"):
        make("flow", likelihood={"type": "chain", "window": {"type": "random", "size": 9}})
    assert math.isclose(make("flow").module.head.sampler.transition.noise, 0.7)
    with pytest.raises(UserError, match="transition.type=ddim is for models that predict noise"):
        make("flow", likelihood={"type": "chain", "transition": "ddim"})
    with pytest.raises(UserError, match="views of prompts are not for model.type=vision_language_action"):
        make("parallel").view(None, lambda prompt: prompt)


def test_the_log_ratio_counts_executed_actions_only(played, make):
    """By hand, after a change of the weights: m (2 r - m) / (2 std^2) over executed actions, over the chunk's size."""
    policy, rollouts = played("flow, all steps")
    with torch.no_grad():
        old = policy.replay(rollouts, policy.module)
    moved = make("flow, all steps")
    moved.module.load_state_dict(policy.module.state_dict())
    stir(moved, 0.05)
    looks = [(b, s, look) for b, episode in enumerate(rollouts.inputs) for s, look in enumerate(episode)]
    b, s, look = next(found for found in looks if not found[2].valid.all())
    sigmas = torch.linspace(1, 0, 5)
    with torch.no_grad():
        found = moved.replay(replace(rollouts, old_prediction=old.prediction), moved.module).log_ratio[b, 3 * s :]
    for k in range(3):
        a_x, a_v, std = coefficients("cps", sigmas[k], sigmas[k + 1], noise=0.7)
        x, x_next = look.sampled["x"][k], look.sampled["x_next"][k]
        before, now = (velocity(p, look, x, float(sigmas[k]))[0][0].double() for p in (policy, moved))
        m, residual = a_v * (now - before), x_next - (a_x * x + a_v * before)
        terms = m * (2 * residual - m) / (2 * std.double() ** 2)
        assert found[k].item() == pytest.approx(terms[look.valid].sum().item() / CHUNK, rel=1e-3, abs=1e-7)


def test_learned_noise_has_the_spread_it_is_scored_with(make):
    policy = stir(make("flow, learned", rows=64))
    drawn = [policy.rollout(starts(0), 64, list(range(64 * part, 64 * part + 64))) for part in range(4)]
    looks = [episode[0] for part in drawn for episode in part.inputs]
    reading = policy.module.encode(policy.module.backbone.collate([look.observation for look in looks], policy.device))
    chain, state = torch.stack([look.sampled["chain"] for look in looks]), torch.stack([look.state for look in looks])
    for k in range(4):
        with torch.no_grad():
            point = torch.full((len(looks),), k)
            head = policy.module.head
            rows = torch.arange(len(looks))
            mean, std = head._learned_step(head.likelihood, reading, state, chain[:, k], point, rows)
        assert ((chain[:, k + 1] - mean) / std).std().item() == pytest.approx(1, abs=0.06)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick("flow", "autoregressive", "regression")
def test_looks_in_parts_change_memory_only(played, kind):
    policy, rollouts = played(kind, critic=True)
    torch.manual_seed(0)
    weight = torch.randn(rollouts.mask.shape)  # so that no two decisions can be taken for one another
    found, kept = {}, {}
    network = policy.module
    assert sum(map(len, rollouts.inputs)) >= 6
    for size in (None, 3, 1):
        policy.steps_at_once = size
        network.zero_grad()
        saved = Saved(network)
        with torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor):
            replay = policy.replay(rollouts, network)
        (replay.logp * weight)[rollouts.mask].sum().backward()
        with torch.no_grad():
            old = policy.replay(rollouts, network)
        assert torch.equal(old.logp, replay.logp.detach())  # so that the first ratio is exactly 1
        grads = {n: p.grad.clone() for n, p in network.named_parameters() if p.grad is not None}
        found[size], kept[size] = {"": replay.logp.detach(), "value": replay.value.detach(), **grads}, saved.bytes
    policy.steps_at_once = None
    for size in (3, 1):
        assert found[size].keys() == found[None].keys()
        for name, want in found[None].items():
            torch.testing.assert_close(found[size][name], want, rtol=1e-3, atol=1e-4)
        assert kept[size] < 0.5 * kept[None], kept  # what goes in and comes out


TREE = {
    "run_dir": "unset",
    "model": {"type": "vision_language_action"},
    "task": {"type": "manipulation"},
    "action": {"chunk": CHUNK, "prompt": "{instruction}", "head": {**KINDS["parallel"]}, "horizon": 12},
}


class Line:
    """A task that is nothing but its simulator."""

    simulator_rows = 4
    watched = False

    def make_simulator(self, rows):
        return build("tests.sims.line_simulator:Line", rows, None)


def test_the_key_of_a_configuration_says_how_many_looks_are_replayed_at_once(backbones):
    for keys, parts in (({}, [4]), ({"steps_at_once": 3}, [3, 1])):
        config = validate({**TREE, "engine": {"micro_batch": 2, **keys}}, "test")
        policy = config.model.load(config, Line(), str(backbones["small"]))
        rollouts, sizes = policy.rollout(starts(0, 10, 20), 1, SEEDS[:3]), []
        looks = sum(map(len, rollouts.inputs))
        policy.module.head.score = lambda *given, sizes=sizes, score=policy.module.head.score: (
            sizes.append(len(given[3])) or score(*given)
        )
        policy.replay(rollouts, policy.module)
        assert looks == 4 and sizes == parts


def test_rollouts_that_a_table_shows_are_filmed_and_play_as_others_do(make):
    """Step 4 has a table of three samples, that is, two groups of two; images are those of the looks."""
    log = Log(samples_every=4, samples=3)
    made = {}
    for film in (False, True):
        policy = stir(make("parallel", critic=True, film=film, log=log))
        for step in (2, 3):
            made[film, step] = policy.rollout(STARTS, 2, SEEDS, step=step)
    for step in (2, 3):
        plain, num_filmed = made[False, step], made[True, step]
        assert [replace(s.episode, frames=None) for s in num_filmed.samples] == [s.episode for s in plain.samples]
        assert torch.equal(plain.mask, num_filmed.mask)
        assert torch.equal(plain.extras["steps"].rewards, num_filmed.extras["steps"].rewards)
        looks = zip(sum(plain.inputs, []), sum(num_filmed.inputs, []), strict=True)
        assert all(torch.equal(a.sampled[name], b.sampled[name]) for a, b in looks for name in a.sampled)
    assert all(s.episode.frames is None for key in made if key != (True, 3) for s in made[key].samples)
    samples, looks = made[True, 3].samples, made[True, 3].inputs
    counts = [None if s.episode.frames is None else len(s.episode.frames) for s in samples]
    assert counts == [len(own) + 1 for own in looks[:4]] + [None, None]


def test_images_of_every_episode_are_kept_for_a_task_that_looks_at_them(backbones):
    """Of every look while training, of every action while evaluating; what happens in the episodes stays the same."""
    config, made = validate(TREE, "test"), {}
    for watched in (False, True):
        task = Line()
        task.watched = watched
        policy = config.model.load(config, task, str(backbones["small"]))
        played = policy.rollout(starts(0, 10, 20), 2, SEEDS[:6], step=1)
        made[watched] = played, policy.respond(starts(0, 10, 20), SEEDS[:3])
    (plain, unseen), (num_filmed, seen) = made[False], made[True]
    assert [replace(s.episode, frames=None) for s in num_filmed.samples] == [s.episode for s in plain.samples]
    for one, other in zip(seen, unseen, strict=True):  # rewards are summed in another order
        assert replace(one.episode, frames=None, reward=0) == replace(other.episode, reward=0)
        assert one.episode.reward == pytest.approx(other.episode.reward)
    assert [len(s.episode.frames) for s in num_filmed.samples] == [len(looks) + 1 for looks in num_filmed.inputs]
    assert [len(s.episode.frames) for s in seen] == [s.episode.length + 1 for s in seen]
    assert all(s.episode.frames is None for s in [*plain.samples, *unseen])


def test_of_many_episodes_the_first_are_filmed_wherever_they_are_played(make):
    """Four rows play twelve episodes in three parts; five samples are three groups of two."""
    policy = make("parallel", film=True, log=Log(samples_every=1, samples=5))
    made = policy.rollout(starts(*range(0, 60, 10)), 2, list(range(12)))
    assert [s.episode.frames is not None for s in made.samples] == [True] * 6 + [False] * 6
