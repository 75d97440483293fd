"""Steps that are replayed a few at a time: the same numbers and gradients from less memory, from the key of a
configuration to the network, and under DeepSpeed."""

from dataclasses import replace

import pytest
import torch

from mmrl.config import load
from tests.helpers.saved import Saved
from tests.policies.diffusion.test_policy import draw, keeping, policy_of, remember, shift
from tests.whole_runs.parts import IMAGES, distance, final, make, release

pytestmark = pytest.mark.usefixtures("alone")
CASES = {
    "a chain": ("sd3", "chain", {"guidance": 3.0}),
    "a chain of noise": ("sd15", "chain", {}),
    "matching": ("sd3", "matching", {"draws": 3}),
    "contrast": ("flux", "contrast", {"draws": 3}),
}


def weighted(replay):
    """A number that no two decisions enter alike."""
    values = replay.logp if "matching" not in replay.extras else replay.extras["matching"].prediction
    return (values * torch.randn(values.shape, generator=torch.Generator().manual_seed(0))).sum()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick("a chain", "matching")
def test_parts_change_memory_only(load_family, case):
    name, likelihood, options = CASES[case]
    policy = policy_of(load_family(name), likelihood, **options)
    batch, network = draw(policy), policy.module
    found, kept = {}, {}
    for size in (None, 5, 1):  # of 12 rows: parts of 12; 5, 5 and 2; 1
        policy.denoiser.steps_at_once = size
        network.zero_grad()
        saved = Saved(network)
        with torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor):
            loss = weighted(policy.replay(batch, network))
        loss.backward()
        found[size] = {n: p.grad.clone() for n, p in network.named_parameters() if p.grad is not None}
        found[size]["loss"], kept[size] = loss.detach(), saved.bytes
    for size in (5, 1):
        assert found[size].keys() == found[None].keys()
        for key, want in found[None].items():
            torch.testing.assert_close(found[size][key], want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))
        assert kept[size] < 0.2 * kept[None], kept


def test_the_first_ratio_is_one_and_a_later_one_that_of_all_at_once(load_family):
    policy = policy_of(load_family("sd3"), guidance=3.0)
    policy.denoiser.steps_at_once = 5
    batch = remember(policy, draw(policy))
    assert not policy.replay(batch, policy.module).log_ratio.any()
    shift(policy.family)
    found = policy.replay(batch, policy.module).log_ratio
    policy.denoiser.steps_at_once = None
    whole = policy.replay(batch, policy.module).log_ratio
    assert found.abs().max() > 1e-3
    torch.testing.assert_close(found, whole, rtol=1e-3, atol=1e-4)


def test_what_the_sampler_said_is_split_with_its_steps(load_family):
    """Where rollouts hold predictions, they stand for the guided ones of the first replay, part by part."""
    policy = keeping(policy_of(load_family("sd3"), guidance=3.0))
    batch = draw(policy)
    recorded = torch.stack([record.prediction for record in batch.inputs])
    for size in (None, 5):
        policy.denoiser.steps_at_once = size
        torch.testing.assert_close(policy.replay(batch, policy.module).prediction, recorded, rtol=0, atol=1e-6)
    marked = replace(batch, inputs=[replace(r, prediction=r.prediction + i) for i, r in enumerate(batch.inputs)])
    gaps = (policy.replay(marked, policy.module).prediction - recorded).flatten(1).mean(1)
    torch.testing.assert_close(gaps.detach(), torch.arange(4.0))


def test_the_key_of_a_configuration_says_how_many_steps_are_replayed_at_once(tmp_path):
    trainer = make(tmp_path, "engine.steps_at_once=5", base=IMAGES)
    policy, sizes = trainer.policy, []
    predict = policy.family.predict
    policy.family.predict = lambda model, x, *rest: sizes.append(len(x)) or predict(model, x, *rest)
    batch = policy.rollout([trainer.task.train[0]], 4, list(range(4)))
    sizes.clear()
    policy.replay(batch, policy.module)
    assert sizes == [5, 5, 2]
    release(trainer)
    assert load(IMAGES, ["run_dir=r"]).engine.steps_at_once is None


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.quick("0", "3")
def test_training_by_parts_is_training(tmp_path, stage):
    """Three steps of two updates each, under every stage of ZeRO, against all at once."""
    trained = {}
    for name, keys in {"whole": [], "parts": ["engine.steps_at_once=5"]}.items():
        own = ["steps=3", "algorithm.minibatches=2", f"engine.zero_stage={stage}", *keys]
        trainer = make(tmp_path / name, *own, base=IMAGES)
        before = {n: p.detach().clone() for n, p in trainer.policy.module.named_parameters()}
        trainer.train()
        release(trainer)
        trained[name] = final(tmp_path / name)
    assert distance(trained["whole"], trained["parts"]) < 1e-5
    if stage < 3:  # under 3 a rank has no whole parameters before training
        assert distance(trained["whole"], before) > 1e-4
