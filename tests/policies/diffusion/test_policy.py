"""The diffusion policy over small networks and every tiny pipeline: what it draws, and how likely it finds that."""

from dataclasses import replace

import pytest
import torch

from mmrl.policies.diffusion import DiffusionPolicy
from mmrl.policies.diffusion.small import SmallConfig, SmallFamily, network
from mmrl.rollouts import Prompt, Rollouts
from mmrl.samplers.settings import Denoising
from mmrl.samplers.windows import Window

CLASSES = ("sd3", "flux", "qwen_image", "sd15", "sdxl")
SMALL = ("mlp", "transformer")
NOISE = {"flow_sde": 0.7, "dance_sde": 0.3, "cps": 0.6, "ddim": 0.8}
WORDS = ("red", "cat", "dog", "two")
PROMPTS = [Prompt("a", "red cat"), Prompt("b", "two dog"), Prompt("c", "cat")]
SEEDS = [11, 12, 13, 14, 15, 16]
RANDOM = Window("random", size=2)


def small(kind="mlp", *, seed=0, reference=False, **config):
    settings = SmallConfig(words=WORDS, network=kind, width=32, depth=2, max_words=4, **config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = network(settings)
        for parameter in module.parameters():  # a fresh transformer says 0
            torch.nn.init.normal_(parameter, std=0.2)
    return SmallFamily(settings, module, reference=reference)


@pytest.fixture
def family_of(shared_family):
    return lambda name, **options: small(name) if name in SMALL else shared_family(name, **options)


def policy_of(family, *, kl="exact", supervised=False, **settings):
    resolution = None if isinstance(family, SmallFamily) else 16
    transition = settings.pop("transition", "ddim" if family.space == "noise" else "flow_sde")
    options = {"steps": 4, "transition": transition, "noise": NOISE[transition], "resolution": resolution}
    return DiffusionPolicy(family, Denoising(**options | settings), kl=kl, supervised=supervised)


def draw(policy, prompts=PROMPTS[:2], group_size=2, seeds=None, **more) -> Rollouts:
    return policy.rollout(prompts, group_size, seeds or SEEDS[: len(prompts) * group_size], **more)


def remember(policy, batch):
    """What the trainer does before the first update."""
    with torch.no_grad():
        old = policy.replay(batch, policy.module)
    batch.old_logp, batch.old_prediction = old.logp, old.prediction
    return batch


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

    @pytest.mark.parametrize("guidance", [1.0, 3.0])
    @pytest.mark.parametrize("likelihood", ["matching", "contrast"])
    @pytest.mark.parametrize("name", [*SMALL, *CLASSES])
    def test_final_pictures(self, name, likelihood, guidance, family_of):
        policy = policy_of(family_of(name), likelihood=likelihood, guidance=guidance, draws=2, strength=0.3)
        batch = remember(policy, draw(policy))
        now = policy.replay(batch, policy.module)
        assert now.log_ratio.shape == (4, 2) and not now.log_ratio.any()
        assert torch.equal(now.logp, batch.old_logp)
        if likelihood == "contrast":
            assert torch.equal(*now.errors)
            sum(now.errors).sum().backward()  # r = 1/2
            assert not any(p.grad.any() for p in policy.module.parameters() if p.grad is not None)
