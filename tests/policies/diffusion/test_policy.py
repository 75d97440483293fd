"""The diffusion policy over small networks and every tiny pipeline: what it draws, and how likely it finds that."""

import math
from dataclasses import replace

import pytest
import torch
from torch.distributions import Normal

from mmrl.config import validate
from mmrl.core.contrast import implicit_errors
from mmrl.core.ratios import aggregate_log_ratio
from mmrl.core.reduce import reduce
from mmrl.errors import UserError
from mmrl.policies.diffusion import trees
from mmrl.policies.diffusion.family import ConditionInputs
from mmrl.policies.diffusion.loading import load
from mmrl.policies.diffusion.policy import DiffusionPolicy
from mmrl.policies.diffusion.settings import Denoising, DenoisingDemonstrations, DiffusionModel, ImageLikelihood
from mmrl.policies.diffusion.small import SmallDiffusionConfig, SmallFamily, create, network
from mmrl.policies.settings import LoRA
from mmrl.rollouts import Prompt, Rollouts
from mmrl.samplers.chain import gaussian_noise
from mmrl.samplers.settings import DenoisingTransition
from mmrl.samplers.transitions import Coefficients
from mmrl.settings import SettingsError, make

CLASSES = ("sd3", "flux", "qwen_image", "sd15", "sdxl")
SMALL = ("mlp", "modulated_mlp", "transformer")
NOISE = {"flow_sde": 0.7, "dance_sde": 0.3, "cps": 0.6, "ddim": 0.8}
WORDS = ("red", "cat", "dog", "two")
PROMPTS = [Prompt("a", "red cat"), Prompt("b", "two dog"), Prompt("c", "cat")]
SEEDS = [11, 12, 13, 14, 15, 16]
RANDOM = {"type": "random", "size": 2}


def said(*texts):
    return [ConditionInputs(text) for text in texts]


def small(kind="mlp", *, seed=0, **config):
    settings = SmallDiffusionConfig(words=WORDS, network=kind, width=32, depth=2, max_words=4, **config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = network(settings)
        for parameter in module.parameters():  # a fresh transformer says 0
            torch.nn.init.normal_(parameter, std=0.2)
    return SmallFamily(settings, module)


@pytest.fixture
def family_of(shared_family):
    return lambda name, **options: small(name) if name in SMALL else shared_family(name, **options)


def policy_of(family, likelihood="chain", *, transition=None, supervised=False, **settings):
    """`settings` are keys of the section or of its likelihood."""
    settings = {"resolution": None if isinstance(family, SmallFamily) else 16, **settings}
    if supervised:
        return DiffusionPolicy(family, make(DenoisingDemonstrations, settings))
    transition = transition or ("ddim" if family.space == "noise" else "flow_sde")
    own = {"type": transition, "noise": NOISE[transition]} if isinstance(transition, str) else transition
    tree = {"type": likelihood, **({"transition": own} if likelihood == "chain" else {})}
    tree |= {name: settings.pop(name) for name in list(settings) if name not in Denoising.model_fields}
    return DiffusionPolicy(family, make(Denoising, {"steps": 4, "likelihood": tree, **settings}))


def keeping(policy):
    """Its rollouts hold what the network said."""
    policy.denoiser.keep_predictions = True
    return policy


def draw(policy, prompts=PROMPTS[:2], group_size=2, seeds=None, **more) -> Rollouts:
    return policy.rollout(prompts, group_size, seeds or SEEDS[: len(prompts) * group_size], **more)


def remember(policy, batch):
    """What the trainer does before the first update."""
    with torch.no_grad():
        old = policy.replay(batch, policy.module)
    batch.old_logp, batch.old_prediction = old.logp, old.prediction
    return batch


def shift(family, size=0.05, seed=5):
    """Move the trained weights as an update would."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in family.module.parameters():
            p += size * torch.randn(p.shape, generator=random)


def steps_by_hand(kind, noise, s, after, second):
    """(a_x, a_v, std) of the issue's formulas, for Python numbers."""
    dt = after - s
    if kind == "ddim":
        ab, ab_after = 1 - s**2, 1 - after**2
        std = noise * math.sqrt((1 - ab_after) / (1 - ab) * (1 - ab / ab_after))
        a_x = math.sqrt(ab_after / ab)
        return a_x, math.sqrt(1 - ab_after - std**2) - a_x * s, std
    if kind == "cps":
        std = after * math.sin(noise * math.pi / 2)
        q = math.sqrt(after**2 - std**2)
        return 1 - after + q, -s * (1 - after) + (1 - s) * q, std
    g = noise if kind == "dance_sde" else noise * math.sqrt(s / (1 - (second if s == 1 else s)))
    return 1 + g**2 * dt / (2 * s), (1 + g**2 * (1 - s) / (2 * s)) * dt, g * math.sqrt(-dt)


CASES = [
    *((name, kind) for name in (*SMALL, "sd3", "flux", "qwen_image") for kind in ("flow_sde", "dance_sde", "cps")),
    ("sd15", "ddim"),
    ("sdxl", "ddim"),
]


class TestOnPolicy:
    """Before the first update every ratio is exactly 1: old predictions come from a replay without gradient of the same
    micro-batch."""

    @pytest.mark.parametrize("options", [{}, {"guidance": 3.0, "window": RANDOM}], ids=["plain", "guided"])
    @pytest.mark.parametrize(("name", "kind"), CASES)
    def test_chains(self, name, kind, options, family_of):
        policy = policy_of(family_of(name), transition=kind, **options)
        batch = remember(policy, draw(policy))
        now = policy.replay(batch, policy.module)
        assert now.log_ratio.shape == batch.mask.shape == (4, 2 if options else 3)
        assert now.log_ratio.requires_grad and not now.log_ratio.any() and not now.divergence.any()
        assert torch.equal(now.logp, batch.old_logp)
        fresh = policy.replay(replace(batch, old_prediction=None), policy.module)
        assert not fresh.log_ratio.any()

    @pytest.mark.parametrize("window", [{"type": "all"}, RANDOM], ids=["all", "window"])
    @pytest.mark.parametrize("name", ["mlp", "sd3", "sd15"])
    def test_what_was_kept_is_what_a_replay_says(self, name, window, family_of):
        policy = keeping(policy_of(family_of(name), guidance=3.0, window=window))
        batch = draw(policy)
        kept, replayed = policy.recorded_replay(batch), remember(policy, batch)
        torch.testing.assert_close(kept.prediction, replayed.old_prediction, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(kept.logp, replayed.old_logp, atol=2e-5, rtol=1e-5)
        assert kept.logp.shape == batch.mask.shape and not kept.logp.requires_grad

    @pytest.mark.parametrize("interval", [(0.0, 1.0), (0.0, 0.8)], ids=["always", "below"])
    @pytest.mark.parametrize("name", ["mlp", "sd3"])
    def test_the_first_update_needs_half_of_guidance(self, name, interval, family_of):
        """What was kept stands for the value, to the last bit; the gradient is that of both halves."""
        policy = policy_of(family_of(name), guidance=3.0, guidance_interval=interval)
        batch, found, calls = draw(keeping(policy)), [], []
        hook = policy.module.register_forward_pre_hook(lambda *_: calls.append(1))
        for keep in (False, True):
            policy.denoiser.keep_predictions = keep
            policy.module.zero_grad()
            replay = policy.replay(batch, policy.module)
            (replay.log_ratio * torch.tensor([1.0, -2.0, 0.5, 3.0])[:, None]).sum().backward()
            found.append((replay, [p.grad.clone() for p in policy.module.parameters() if p.grad is not None]))
        hook.remove()
        (plain, expected), (half, gradients) = found
        assert len(calls) == 2 + 1
        assert torch.equal(half.prediction, policy.recorded_replay(batch).prediction) and not half.log_ratio.any()
        torch.testing.assert_close(half.prediction, plain.prediction, atol=2e-5, rtol=1e-5)
        assert max(float(g.abs().max()) for g in expected) > 1e-3
        for one, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-3)

    def test_what_was_kept_is_not_used_when_weights_or_prompts_may_have_changed(self, family_of):
        family = small()
        policy = keeping(policy_of(family, guidance=3.0))
        batch = remember(policy, draw(policy))
        shift(family)
        assert float(policy.replay(batch, policy.module).log_ratio.abs().min()) > 1e-6  # an old policy is known
        with torch.no_grad():  # another policy's pass
            passed = policy.replay(replace(batch, old_prediction=None), policy.module)
        assert float((passed.prediction - policy.recorded_replay(batch).prediction).abs().max()) > 1e-3
        other = policy.view(batch, lambda prompt: replace(prompt, text="two"))
        assert all(record.prediction is None for record in other.inputs)
        assert policy.replay(other, policy.module).logp.requires_grad

    def test_nothing_is_kept_unless_it_is_asked_for(self):
        policy = policy_of(small())
        batch = draw(policy)
        assert policy.recorded_replay(batch) is None and batch.inputs[0].prediction is None
        assert keeping(policy_of(small(), "contrast")).recorded_replay(batch) is None

    @pytest.mark.parametrize("guidance", [1.0, 3.0])
    @pytest.mark.parametrize("likelihood", ["matching", "contrast"])
    @pytest.mark.parametrize("name", [*SMALL, *CLASSES])
    def test_final_images(self, name, likelihood, guidance, family_of):
        policy = policy_of(family_of(name), likelihood, guidance=guidance, draws=2)
        batch = remember(policy, draw(policy))
        now = policy.replay(batch, policy.module)
        assert now.log_ratio.shape == (4, 2) and not now.log_ratio.any()
        assert torch.equal(now.logp, batch.old_logp)
        if likelihood == "contrast":
            errors = implicit_errors(now.extras["matching"], 0.3)
            assert torch.equal(*errors)
            policy.module.zero_grad()  # which other tests of the family have left
            sum(errors).sum().backward()  # r = 1/2
            assert not any(p.grad.any() for p in policy.module.parameters() if p.grad is not None)


class TestChains:
    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    @pytest.mark.parametrize(("name", "kind"), [c for c in CASES if c[0] in ("mlp", "sd3", "sd15")])
    def test_replay_is_the_density_of_what_was_drawn(self, name, kind, reduction, family_of):
        """In float64, from the stored latents and one forward a step; and the step is the one the seed draws."""
        family = family_of(name)
        policy = policy_of(family, transition=kind, guidance=2.0, reduction=reduction)
        batch = draw(policy)
        with torch.no_grad():
            now = policy.replay(batch, policy.module)
        grid = family.grid(4, policy.shape)
        sigmas = grid.sigmas.double().tolist()
        for i, one in enumerate(batch.inputs):
            assert torch.equal(one.x[0], gaussian_noise([one.seed], -1, policy.shape)[0])
            for t, point in enumerate(one.points.tolist()):
                with torch.no_grad():
                    c, u = (
                        family.predict(
                            family.module, one.x[t : t + 1], grid.times[point : point + 1], family.encode(said(w)), 3.5
                        )
                        for w in (one.text, "")
                    )
                v = (u + 2.0 * (c - u))[0]
                torch.testing.assert_close(now.prediction[i, t], v, atol=2e-5, rtol=2e-5)
                a_x, a_v, std = steps_by_hand(kind, NOISE[kind], sigmas[point], sigmas[point + 1], sigmas[1])
                mean = a_x * one.x[t].double() + a_v * now.prediction[i, t].double()
                logp = Normal(mean, std).log_prob(one.x_next[t].double())
                if kind == "cps":  # Flow-CPS, as published
                    logp = -(one.x_next[t].double() - mean).square()
                logp = logp.mean() if reduction == "mean" else logp.sum()
                assert float(now.logp[i, t]) == pytest.approx(float(logp), rel=1e-4, abs=1e-4)
                assert float(now.std[i, t]) == pytest.approx(std, rel=1e-5)
                drawn = mean + std * gaussian_noise([one.seed], point, policy.shape)[0].double()
                torch.testing.assert_close(one.x_next[t].double(), drawn, atol=2e-5, rtol=2e-5)

    def test_the_score_of_cps_is_an_option(self):
        """The log-ratio of the density is 1 / (2 std^2) times that of the squared error, the default; what GRPO-Guard
        normalises is a density's."""
        family = small()
        found = {}
        for options in ({}, {"logp": "density"}):
            policy = policy_of(family, transition={"type": "cps", "noise": 0.6, **options})
            batch = remember(policy, draw(policy))
            offset = torch.full((1,), 0.3)
            found[bool(options)] = policy.replay(batch, lambda *a, offset=offset: family.module(*a) + offset)
            assert ("step_density" in policy.denoising.likelihood.offers) == bool(options)
        squared, density = found[False], found[True]
        torch.testing.assert_close(density.log_ratio, squared.log_ratio / (2 * squared.std.square()))
        torch.testing.assert_close(density.divergence, squared.divergence)

    def test_a_window_belongs_to_a_group(self):
        policy = policy_of(small(), steps=10, window={"type": "random", "size": 1})
        prompts = [Prompt(str(i), "cat") for i in range(12)]
        points = torch.stack([d.points for d in draw(policy, prompts, 3, list(range(36))).inputs]).view(12, 3)
        assert bool((points == points[:, :1]).all()) and len(points[:, 0].unique()) > 3

    def test_a_sliding_window_moves_with_the_step(self):
        policy = policy_of(small(), steps=6, window={"type": "sliding", "size": 2, "every": 1})
        found = [draw(policy, step=step).inputs[0].points.tolist() for step in (0, 1, 2, 3, 4)]
        assert found == [[0, 1], [1, 2], [2, 3], [3, 4], [0, 1]]

    @pytest.mark.parametrize(
        "options", [{}, {"window": RANDOM, "tail": {"type": "dpm++", "steps": 2}}, {"branching": (2,)}]
    )
    def test_rollouts_do_not_depend_on_the_rest_of_the_batch(self, options):
        policy = policy_of(small("transformer"), steps=6, guidance=2.0, guidance_interval=(0.2, 0.7), **options)
        whole = draw(policy, PROMPTS, 2, SEEDS)
        for g in range(3):
            alone = draw(policy, PROMPTS[g : g + 1], 2, SEEDS[2 * g : 2 * g + 2])
            for a, b in zip(whole.inputs[2 * g : 2 * g + 2], alone.inputs, strict=True):
                assert a.points.equal(b.points) and a.seed == b.seed
                torch.testing.assert_close((a.data, a.x, a.x_next), (b.data, b.x, b.x_next), atol=1e-5, rtol=1e-5)

    def test_images_differ_between_seeds_and_are_the_decoded_latents(self):
        policy = policy_of(small())
        batch = draw(policy, [PROMPTS[0]] * 3)
        images = torch.stack([s.image for s in batch.samples]).flatten(1)
        assert float(torch.cdist(images, images).fill_diagonal_(9).min()) > 0.5
        assert torch.equal(batch.samples[3].image, batch.inputs[3].data / 2 + 0.5)
        assert batch.group.tolist() == [0, 0, 1, 1, 2, 2]

    @pytest.mark.parametrize("kind", ["std", "inverse_dt"])
    def test_step_weights_have_mean_one_over_the_usable_steps(self, kind):
        family = small(shift=3.0)
        policy = policy_of(family, steps=6, step_weight=kind)
        weight = policy.replay(draw(policy), policy.module).weight
        assert weight.shape == (4, 5)
        assert weight.mean(1).tolist() == pytest.approx([1.0] * 4)
        sigmas = family.grid(6, policy.shape).sigmas
        shape = policy.sampler.std if kind == "std" else -1 / sigmas.diff()
        torch.testing.assert_close(weight[0] / weight[0, 0], shape[:5] / shape[0])
        windowed = policy_of(family, steps=6, step_weight=kind, window=RANDOM)
        batch = draw(windowed)
        found = windowed.replay(batch, windowed.module).weight
        for row, one in enumerate(batch.inputs):
            torch.testing.assert_close(found[row], weight[0, one.points])


class TestHalfPrecision:
    @pytest.mark.parametrize("name", [*SMALL, "sd3"])
    def test_ratios(self, name, shared_family):
        """Exactly 1 in the micro-batch of the old predictions. In micro-batches of one row the gap was 0 here too, for
        a clip range of 1e-4; other matrix products may round otherwise."""
        family = small(name) if name in SMALL else shared_family(name, dtype="bfloat16")
        family.module.bfloat16()
        policy = policy_of(family, guidance=2.0)
        batch = remember(policy, draw(policy))
        now = policy.replay(batch, policy.module)
        assert now.prediction.dtype == batch.inputs[0].x.dtype == torch.float32
        assert not now.log_ratio.any()
        with torch.no_grad():
            rows = [policy.replay(batch.select(torch.tensor([i])), policy.module).log_ratio for i in range(4)]
        gap = float((torch.cat(rows).exp() - 1).abs().max())
        assert gap < 2e-5

    def test_weights_are_loaded_in_the_asked_dtype(self, tmp_path):
        create(tmp_path, SmallDiffusionConfig(words=WORDS), seed=0)
        family = load(str(tmp_path), DiffusionModel(dtype="bfloat16"))
        assert {p.dtype for p in family.module.parameters()} == {torch.bfloat16}
        policy = policy_of(family)
        batch = draw(policy)
        assert policy.replay(batch, policy.module).prediction.dtype == torch.float32


class TestEvaluation:
    def test_takes_its_own_steps_and_no_noise(self):
        calls = []
        family = small()
        family.module.register_forward_hook(lambda *a: calls.append(1))
        policy = policy_of(family, evaluation_steps=7, tail={"type": "ode", "steps": 2}, window=RANDOM)
        one = policy.respond(PROMPTS[:2], [1, 2])
        assert len(calls) == 7
        x = gaussian_noise([2], -1, policy.shape)
        for s, after in zip(torch.linspace(1, 0, 8), torch.linspace(1, 0, 8)[1:], strict=False):
            with torch.no_grad():
                x = x + (after - s) * family.predict(family.module, x, s[None], family.encode(said("two dog")), None)
        torch.testing.assert_close(one[1].image, (x / 2 + 0.5)[0], atol=1e-5, rtol=1e-5)

    def test_has_its_own_guidance(self):
        family = small()
        own = policy_of(family, guidance=1.0, evaluation_guidance=4.0).respond(PROMPTS, [1, 2, 3])
        same = policy_of(family, guidance=4.0).respond(PROMPTS, [1, 2, 3])
        none = policy_of(family).respond(PROMPTS, [1, 2, 3])
        assert torch.equal(own[2].image, same[2].image) and not torch.equal(own[2].image, none[2].image)


def test_a_text_is_encoded_once_while_it_is_kept():
    family, asked = small(), []
    encode = family.encode
    family.encode = lambda new, shape: asked.append([one.text for one in new]) or encode(new)
    policy = policy_of(family, guidance=2.0, prompt_cache=3)
    policy.replay(draw(policy), policy.module)
    assert sorted(sum(asked, [])) == ["", "red cat", "two dog"]
    asked.clear()
    policy.network.conditions.encode(said("red cat"), policy.shape)
    policy.network.conditions.encode(
        said("cat"), policy.shape
    )  # the fourth: the one that was asked for longest ago goes
    policy.network.conditions.encode(said("red cat", "cat"), policy.shape)
    assert asked == [["cat"]]
    found = policy.network.conditions.encode(
        said("red", "dog", "two", "cat", "red"), policy.shape
    )  # more than are kept
    assert all(
        torch.equal(f["words"], encode(said(t))[0]["words"])
        for f, t in zip(found, ["red", "dog", "two", "cat", "red"], strict=True)
    )


class TestTrees:
    def tree(self, branching, group_size, **options):
        policy = policy_of(small(), steps=6, branching=branching, **options)
        return policy, draw(policy, PROMPTS[:2], group_size, list(range(2 * group_size)))

    def test_leaves_share_their_chain_up_to_the_branch(self):
        policy, batch = self.tree((2, 3), 6, window=RANDOM)
        assert batch.nodes.tolist() == [[leaf // 3, leaf] for leaf in range(6)] * 2
        assert batch.mask.all()
        # Two nodes of three leaves, then six of one: 1/3 and 1, of mean 2/3.
        weight = policy.replay(batch, policy.module).weight
        torch.testing.assert_close(weight, torch.tensor([[0.5, 1.5]]).expand(12, 2))
        for g in range(2):
            leaves = batch.inputs[6 * g : 6 * g + 6]
            assert len({tuple(d.points.tolist()) for d in leaves}) == 1
            for i, one in enumerate(leaves):
                for j, other in enumerate(leaves):
                    assert torch.equal(one.x[0], other.x[0])  # one prefix
                    assert torch.equal(one.x_next[0], other.x_next[0]) == (i // 3 == j // 3)
                    assert torch.equal(one.x[1], one.x_next[0])
                    assert torch.equal(one.data, other.data) == (i == j)
        assert not torch.equal(batch.inputs[0].x[0], batch.inputs[6].x[0])

    def test_the_prefix_and_the_tail_are_deterministic(self):
        policy, batch = self.tree((3,), 3, window={"type": "random", "size": 1})
        plain = policy_of(policy.family, steps=6, window={"type": "random", "size": 1})
        chains = draw(plain, PROMPTS[:2], 1, [0, 3])  # the same roots
        for g in range(2):
            assert torch.equal(chains.inputs[g].points, batch.inputs[3 * g].points)
            torch.testing.assert_close(chains.inputs[g].x, batch.inputs[3 * g].x)
        assert batch.mask.all() and batch.nodes.flatten().tolist() == [0, 1, 2] * 2

    def test_later_steps_of_the_window_have_one_child(self):
        policy, batch = self.tree((4,), 4, window={"type": "random", "size": 3})
        assert batch.mask.all() and batch.nodes.tolist() == [[leaf] * 3 for leaf in range(4)] * 2
        one, other = batch.inputs[:2]
        assert torch.equal(one.x[0], other.x[0]) and not torch.equal(one.x_next, other.x_next)

    def test_decisions_of_a_tree_are_replayed_like_any(self):
        policy, batch = self.tree((2, 2), 4, window=RANDOM)
        remember(policy, batch)
        assert not policy.replay(batch, policy.module).log_ratio.any()
        for one in batch.inputs:
            a_x, a_v, std = (c.view(-1, 1, 1, 1) for c in policy.sampler.stochastic_coefficients(one.points))
            v = batch.old_prediction[batch.inputs.index(one)]
            noise = (one.x_next - a_x * one.x - a_v * v) / std
            assert float(noise.std()) == pytest.approx(1, abs=0.3)

    def share_of_nodes(self, mode, level="decision"):
        """What each node of a tree [2, 2] has in the loss, from the gradient of the reduction."""
        weight = trees.decision_weights((2, 2), 2).expand(4, 2)
        ratio = torch.zeros(4, 2, requires_grad=True)
        mask = torch.ones(4, 2, dtype=torch.bool)
        values = aggregate_log_ratio(ratio, mask, level=level) * weight
        reduce(values, mask, mode=mode, length=4).backward()
        first = ratio.grad[:, 0].view(2, 2).sum(1)  # two leaves share a node
        return torch.cat([first, ratio.grad[:, 1]])

    @pytest.mark.parametrize(
        ("mode", "share"),
        [("token_mean", 1 / 6), ("sequence_mean", 1 / 6), ("sequence_sum", 1 / 3), ("constant", 1 / 12)],
    )
    def test_every_node_has_the_same_share_in_the_loss(self, mode, share):
        """Two nodes and then four: 1/6 each, as of six decisions; sequence_sum has 2 decisions a rollout, and constant
        divides that by the length of 4."""
        torch.testing.assert_close(self.share_of_nodes(mode), torch.full((6,), share))

    def test_the_ratio_of_a_sequence_is_that_of_its_whole_chain(self):
        """Leaves with log-ratios (.4, .2) and (.4, .1) have .3 and .25, though the first decision is one."""
        found = aggregate_log_ratio(
            torch.tensor([[0.4, 0.2], [0.4, 0.1]]), torch.ones(2, 2, dtype=torch.bool), level="sequence"
        )
        torch.testing.assert_close(found[:, 0], torch.tensor([0.3, 0.25]))

    def test_weights_of_steps_and_of_nodes_multiply(self):
        policy, batch = self.tree((2, 2), 4, window=RANDOM, step_weight="std")
        plain = policy_of(policy.family, steps=6, window=RANDOM, step_weight="std")
        own = policy.replay(batch, policy.module).weight
        steps = plain.replay(replace(batch, nodes=None), plain.module).weight
        torch.testing.assert_close(own, steps * torch.tensor([2 / 3, 4 / 3]))


class TestFinalImages:
    @pytest.mark.parametrize("weight", ["one", "sigma", "sigma_squared"])
    def test_matching_by_brute_force(self, weight):
        """Levels and noises come from the seeds, whatever micro-batch an image is in, and are the same twice."""
        family = small(shift=2.0)
        policy = policy_of(family, "matching", draws=3, weight=weight, guidance=5.0)
        batch, seen = draw(policy), []

        def model(x, time, words):
            seen.append((x, time))
            return family.module(x, time, words)

        logp = policy.replay(batch, model).logp
        policy.replay(batch.select(torch.tensor([3, 1])), model)
        x, s = seen[0][0].view(4, 3, 1, 8, 8), seen[0][1].view(4, 3)
        assert torch.equal(seen[1][0].view(2, 3, 1, 8, 8), x[[3, 1]]) and torch.equal(seen[1][1].view(2, 3), s[[3, 1]])
        third = torch.tensor([0.02, 0.34, 0.66, 0.98]) * 2 / (1 + torch.tensor([0.02, 0.34, 0.66, 0.98]))
        assert bool(((s > third[:3]) & (s < third[1:])).all())  # stratified, then shifted
        for i, one in enumerate(batch.inputs):
            for j in range(3):
                noise = gaussian_noise([one.seed], -2 - j, policy.shape).double()
                level = float(s[i, j])
                noisy = (1 - level) * one.data[None].double() + level * noise
                torch.testing.assert_close(x[i, j][None].double(), noisy, atol=1e-5, rtol=1e-5)
                words = torch.stack([c["words"] for c in family.encode([one.condition_inputs])])
                v = family.module(x[i, j][None], s[i, j][None], words).double()
                w = {"one": 1, "sigma": level, "sigma_squared": level**2}[weight]
                expected = -w * (v - (noise - one.data[None].double())).square().mean()
                assert float(logp[i, j].detach()) == pytest.approx(float(expected.detach()), rel=1e-4)

    def test_a_group_may_share_its_levels_and_noises(self):
        for shared in (False, True):
            policy = policy_of(small(), "matching", draws=2, shared=shared)
            batch, seen = draw(policy), []
            policy.replay(batch, lambda x, time, words, seen=seen: seen.append((x, time)) or x)
            data = torch.stack([one.data for one in batch.inputs])[:, None]
            x, s = seen[0][0].view(4, 2, 1, 8, 8), seen[0][1].view(4, 2)
            noise = (x - (1 - s)[..., None, None, None] * data) / s[..., None, None, None]
            for one, other, alike in ((0, 1, shared), (2, 3, shared), (0, 2, False)):
                assert torch.equal(s[one], s[other]) == alike
                assert torch.allclose(noise[one], noise[other], atol=1e-3) == alike

    @pytest.mark.parametrize("likelihood", ["matching", "contrast"])
    def test_off_policy(self, likelihood):
        """The log-ratio equals logp - old_logp; the implicit policies are b and -b times the move away from the old."""
        family = small()
        options = {"weight": "sigma"} if likelihood == "matching" else {}
        policy = policy_of(family, likelihood, draws=2, **options)
        batch = remember(policy, draw(policy))
        old = batch.old_prediction
        shift(family)
        seen = []
        now = policy.replay(batch, lambda *a: seen.append(a) or family.module(*a))
        assert float(now.log_ratio.abs().min()) > 1e-4
        torch.testing.assert_close(now.log_ratio, now.logp - batch.old_logp, atol=1e-5, rtol=1e-4)
        if likelihood == "contrast":
            x, s = seen[0][0].view(4, 2, 1, 8, 8), seen[0][1].view(4, 2, 1, 1, 1)
            data = torch.stack([d.data for d in batch.inputs])[:, None]
            for error, b in zip(implicit_errors(now.extras["matching"], 0.4), (0.4, -0.4), strict=True):
                away = (x - s * (old + b * (now.prediction - old)) - data).flatten(2)
                expected = away.square().mean(2) / away.abs().mean(2)
                torch.testing.assert_close(error, expected, atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize("towards_noise", [1.0, 3.0])
    def test_the_elbo_weights_levels_by_their_signal_to_noise(self, towards_noise):
        """A model that is off by 1 everywhere, of images that are 0: the mean over levels is the integral of
        (1 - s) / s, log s - s, over the levels drawn."""
        family = small(shift=towards_noise)
        policy = policy_of(family, supervised=True, weight="elbo", draws=4000)
        gray = Prompt("gray", "cat", metadata={"target": torch.full((1, 8, 8), 0.5)})
        batch = policy.demonstrate([gray], [3])
        logp = policy.replay(batch, lambda x, t, words: x / t.view(-1, 1, 1, 1) + 1).logp
        low, high = (towards_noise * u / (1 + (towards_noise - 1) * u) for u in (0.02, 0.98))
        expected = (math.log(high) - high - math.log(low) + low) / 0.96
        assert float(-logp.mean()) == pytest.approx(expected, rel=2e-3)

    def test_a_share_of_demonstrations_lose_their_prompt(self):
        policy = policy_of(small(), supervised=True, prompt_dropout=0.3, draws=1)
        target = {"target": torch.rand(1, 8, 8)}
        prompts = [Prompt(str(i), "red cat", metadata=target) for i in range(500)]
        batch = policy.demonstrate(prompts, list(range(500)))
        texts = [d.text for d in batch.inputs]
        assert set(texts) == {"", "red cat"} and 0.22 < texts.count("") / 500 < 0.38
        assert policy.demonstrate(prompts[7:9], [7, 8]).inputs[1].text == texts[8]
        torch.testing.assert_close(batch.inputs[0].data, target["target"] * 2 - 1)
        assert policy.replay(batch, policy.module).logp.shape == (500, 1)
        with pytest.raises(UserError, match="prompt b has no image to learn from"):
            policy.demonstrate([prompts[0], PROMPTS[1]], [1, 2])


class Halved(DenoisingTransition):
    """A transition of one's own: Euler's mean and half of the next noise level."""

    type: str = "tests.policies.diffusion.test_policy:Halved"

    def coefficients(self, sigma, sigma_next, sigma_second):
        dt = sigma_next - sigma
        return Coefficients(torch.ones_like(dt), dt, sigma_next / 2)


class Unheard(ImageLikelihood):
    type: str = "tests.policies.diffusion.test_policy:Unheard"

    @property
    def offers(self):
        return frozenset()


def test_a_transition_of_ones_own_is_drawn_and_replayed():
    family = small()
    policy = policy_of(family, transition={"type": "tests.policies.diffusion.test_policy:Halved"})
    batch = remember(policy, draw(policy))
    now = policy.replay(batch, policy.module)
    assert not now.log_ratio.any() and batch.inputs[0].points.tolist() == [0, 1, 2]
    sigmas = family.grid(4, policy.shape).sigmas
    for t in range(3):
        one, v = batch.inputs[1], now.prediction[1, t]
        known = Normal((one.x[t] + (sigmas[t + 1] - sigmas[t]) * v).double(), float(sigmas[t + 1]) / 2)
        assert float(now.logp[1, t].detach()) == pytest.approx(float(known.log_prob(one.x_next[t]).mean()), rel=1e-4)
        noise = (one.x_next[t] - known.mean) / known.stddev
        torch.testing.assert_close(noise.float(), gaussian_noise([one.seed], t, policy.shape)[0], rtol=1e-4, atol=1e-4)


class TestReference:
    @pytest.mark.parametrize("likelihood", ["chain", "matching"])
    def test_divergence_by_brute_force(self, likelihood):
        """Both the squared distance of the predictions and, of a step, the exact KL."""
        family = small()
        policy = policy_of(family, likelihood, **({} if likelihood == "chain" else {"draws": 3}))
        batch = draw(policy)
        with torch.no_grad():
            before = policy.replay(batch, policy.module)
        assert before.reference_kl is None and "reference_error" not in before.extras
        shift(family)
        batch.ref_prediction = before.prediction
        now = policy.replay(batch, policy.module)
        apart = (now.prediction.double() - before.prediction.double()).square().flatten(2).mean(2)
        torch.testing.assert_close(now.extras["reference_error"].double(), apart, atol=1e-7, rtol=1e-4)
        assert now.extras["reference_error"].requires_grad and float(apart.min()) > 0
        if likelihood == "matching":
            assert now.reference_kl is None
            return
        points = batch.inputs[0].points.tolist()
        sigmas = family.grid(4, policy.shape).sigmas.double().tolist()
        hand = [steps_by_hand("flow_sde", 0.7, sigmas[p], sigmas[p + 1], sigmas[1]) for p in points]
        apart = apart * torch.tensor([a_v**2 / (2 * std**2) for _, a_v, std in hand])
        torch.testing.assert_close(now.reference_kl.double(), apart, atol=1e-7, rtol=1e-4)
        assert now.reference_kl.requires_grad

    def test_the_divergence_from_the_old_policy_has_a_gradient(self):
        """GRPO-Guard's ratio needs it: d KL / d v = a_v^2 (v - old) / std^2 over the number of elements."""
        family = small()
        policy = policy_of(family)
        batch = remember(policy, draw(policy))
        offset = torch.nn.Parameter(torch.full((1,), 0.3))
        now = policy.replay(batch, lambda *a: family.module(*a) + offset)
        (found,) = torch.autograd.grad(now.divergence[0].sum(), offset)
        sigmas = family.grid(4, policy.shape).sigmas.double().tolist()
        hand = [steps_by_hand("flow_sde", 0.7, sigmas[p], sigmas[p + 1], sigmas[1]) for p in range(3)]
        assert float(found) == pytest.approx(sum(a_v**2 * 0.3 / std**2 for _, a_v, std in hand), rel=1e-3)


class TestViews:
    def test_the_same_images_under_another_prompt(self):
        policy = policy_of(small())
        batch = remember(policy, draw(policy))
        other = policy.view(batch, lambda prompt: replace(prompt, text=prompt.text.replace("cat", "dog")))
        assert [s.prompt.text for s in other.samples] == ["red dog"] * 2 + ["two dog"] * 2
        assert [s.prompt.text for s in batch.samples] == ["red cat"] * 2 + ["two dog"] * 2
        assert other.old_prediction is None and batch.old_prediction is not None
        with torch.no_grad():
            own, viewed = (policy.replay(b, policy.module).logp for b in (batch, other))
        assert torch.equal(own[2:], viewed[2:]) and float((own[:2] - viewed[:2]).abs().min()) > 1e-6
        made = replace(
            batch,
            inputs=[replace(r, condition_inputs=ConditionInputs("red dog")) for r in batch.inputs],
            old_prediction=None,
        )
        assert torch.equal(policy.replay(made, policy.module).logp[:2], viewed[:2])


class TestBadInput:
    @pytest.mark.parametrize(
        ("name", "settings", "match"),
        [
            (
                "mlp",
                {"transition": "ddim"},
                "denoising.likelihood.transition.type=ddim does not fit a model that predicts velocity; set it to "
                "flow_sde or",
            ),
            (
                "sd15",
                {"transition": "flow_sde"},
                "transition.type=flow_sde does not fit a model that predicts noise; set it to ddim",
            ),
            (
                "mlp",
                {"window": {"last": 9}},
                "denoising.likelihood: window.last=9, but the chain has only 4 steps",
            ),
            ("sdxl", {"window": {"last": 4}}, "denoising.likelihood: the window reaches step 3, which has std 0"),
            (
                "mlp",
                {"transition": {"type": "flow_sde", "noise": 0.0}},
                "denoising.likelihood: no step of this chain has noise: raise transition.noise",
            ),
            ("mlp", {"window": {"type": "random", "size": 9}}, "likelihood: a window of 9 steps does not fit"),
            ("mlp", {"resolution": 16}, "denoising.resolution=16, but the model at model.path generates 8 x 8 pixels"),
            ("mlp", {"chunks": (2, 2)}, r"likelihood.chunks=\[2, 2\] covers 4 steps, but the window has 3"),
            (
                "mlp",
                {"branching": (2,) * 4},
                r"likelihood.branching=\[2, 2, 2, 2\] covers 4 steps, but the window has 3",
            ),
            ("sd15", {"likelihood": "matching", "weight": "elbo"}, "denoising.likelihood.weight=elbo"),
            ("sd15", {"supervised": True, "weight": "elbo"}, "denoising.weight=elbo"),
            (
                "mlp",
                {"likelihood": "tests.policies.diffusion.test_policy:Unheard"},
                "Unheard is not a subclass of ImageChain, ImageMatching, ImageContrast",
            ),
        ],
    )
    def test_of_the_policy(self, name, settings, match, family_of):
        with pytest.raises(UserError, match=match) as error:
            policy_of(family_of(name), **settings)
        assert "\n" not in str(error.value)

    def test_of_trees(self):
        with pytest.raises(UserError, match="makes trees of 4 leaves, but rollout.group_size=3"):
            draw(policy_of(small(), branching=(2, 2)), PROMPTS[:1], 3, list(range(3)))

    @pytest.mark.parametrize(
        ("likelihood", "settings"),
        [
            ("chain", {"tail": {"type": "ode", "steps": 0}}),
            ("chain", {"steps": 0}),
            ("chain", {"branching": (0,)}),
            ("matching", {"draw_range": (0.0, 1.0)}),
            ("contrast", {"weight": "sigma"}),
            ("matching", {"transition": "cps"}),
        ],
    )
    def test_of_the_settings(self, likelihood, settings):
        known = {name: value for name, value in settings.items() if name in Denoising.model_fields}
        rest = {name: value for name, value in settings.items() if name not in known}
        with pytest.raises(SettingsError, match=next(iter(settings))):
            make(Denoising, {"likelihood": {"type": likelihood, **rest}, **known})

    def test_of_prompts(self):
        policy = policy_of(small())
        with pytest.raises(
            UserError, match="the model at model.path does not know the word 'blue'; it knows red cat dog two"
        ):
            draw(policy, [Prompt("x", "blue cat")])
        with pytest.raises(UserError, match="has 5 words, more than the 4"):
            draw(policy, [Prompt("x", "cat cat cat cat cat")])

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"lora": LoRA(rank=4)}, "model.lora is for"),
            ({"attention": "eager"}, "model.attention is for"),
            ({"activation_checkpointing": True}, "model.activation_checkpointing is for"),
        ],
    )
    def test_of_a_small_models_options(self, options, match, tmp_path):
        create(tmp_path, SmallDiffusionConfig(words=WORDS), seed=0)
        with pytest.raises(UserError, match=match):
            load(str(tmp_path), DiffusionModel(**options))


class TestPerceptrons:
    @pytest.mark.parametrize("kind", ["mlp", "modulated_mlp"])
    @pytest.mark.parametrize("ordered", [False, True])
    def test_the_order_of_words_counts_where_asked(self, kind, ordered):
        family = small(kind, ordered=ordered)
        x, time = torch.randn(1, 1, 8, 8).expand(3, -1, -1, -1), torch.full((3,), 0.5)
        one, turned, other = family.predict(
            family.module, x, time, family.encode(said("red cat", "cat red", "dog")), None
        )
        assert torch.allclose(one, turned, atol=1e-5) is not ordered
        assert not torch.allclose(one, other, atol=1e-2)

    def test_a_block_is_scaled_and_shifted_by_hand(self):
        """1 and 3 have mean 2 and deviation 1: -1 and 1 once normalised."""
        module = network(SmallDiffusionConfig(words=WORDS, network="modulated_mlp", width=2, depth=1, max_words=4))
        by = torch.tensor([[0.5, 1.0, 4.0, 0.0]])  # scales, then shifts
        assert torch.allclose(module.modulated(torch.tensor([[1.0, 3.0]]), by), torch.tensor([[2.5, 2.0]]), atol=1e-4)

    def test_a_fresh_modulated_network_that_predicts_data_draws_grey(self):
        """It predicts 0, whatever the prompt: the velocity is x / sigma, of sigma no less than 0.05."""
        module = network(
            SmallDiffusionConfig(words=WORDS, network="modulated_mlp", width=8, max_words=4, predicts="data")
        )
        x, words = torch.randn(2, 1, 8, 8), torch.ones(2, 4, dtype=torch.long)
        made = module(x, torch.tensor([0.5, 0.01]), words)
        assert torch.allclose(made, x / torch.tensor([0.5, 0.05]).view(2, 1, 1, 1))


@pytest.mark.parametrize(
    ("algorithm", "likelihood", "expected"),
    [
        ("stepwise_preference", {"type": "matching", "draws": 2}, True),
        ("stepwise_preference", {"type": "matching", "draws": 2, "shared": False}, False),
        ("matching", {"type": "matching", "draws": 2}, False),
        ("matching", {"type": "matching", "draws": 2, "shared": True}, True),
    ],
)
def test_preferences_share_levels_and_noises_by_default(tmp_path, algorithm, likelihood, expected):
    """Diffusion-DPO's train.py draws one time and one noise for the two of a pair; others draw their own."""
    create(tmp_path, SmallDiffusionConfig(words=WORDS), seed=0)
    tree = {
        "run_dir": "unset",
        "model": {"type": "diffusion", "path": str(tmp_path)},
        "task": {"type": "image_generation", "data": {"type": "digits"}},
        "algorithm": {"type": algorithm},
        "denoising": {"steps": 4, "likelihood": likelihood},
    }
    config = validate(tree, "test")
    policy, seen = config.model.load(config, None, str(tmp_path)), []
    batch = policy.rollout(PROMPTS[:2], 2, SEEDS[:4], step=0)
    policy.replay(batch, lambda x, time, words: seen.append(time) or x)
    levels = seen[0].view(4, 2)
    assert torch.equal(levels[0], levels[1]) == torch.equal(levels[2], levels[3]) == expected
    assert not torch.equal(levels[0], levels[2])


def test_the_end_of_a_step_is_completed_as_the_beginning_of_the_next():
    policy = policy_of(small())
    rollouts = policy.rollout(PROMPTS, 2, SEEDS, step=0)
    count = rollouts.mask.shape[1]
    before, after = ([sample.image for sample in policy.complete_steps(rollouts, ends=ends)] for ends in (False, True))
    for row, sample in enumerate(rollouts.samples):
        first = row * count
        expected = [*before[first + 1 : first + count], sample.image]
        torch.testing.assert_close(torch.stack(after[first : first + count]), torch.stack(expected), atol=1e-5, rtol=0)
        assert (before[first] - before[first + 1]).abs().max() > 1e-3
