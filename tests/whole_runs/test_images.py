"""Image runs: what ranks, micro-batches, averages, resuming and every option of the loss do to the weights."""

import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mmrl.config import load
from mmrl.errors import UserError
from mmrl.measurements.segments import SegmentIds
from mmrl.policies.diffusion.policy import DiffusionPolicy
from mmrl.runtime.seeds import rollout_seeds
from tests.whole_runs import parts, workers
from tests.whole_runs.parts import (
    IMAGES,
    Images,
    call,
    distance,
    final,
    make,
    metrics,
    release,
    timeless,
    train,
    under,
)

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    call(workers.images, folder, "one", log=folder / "one.log")
    call(workers.images, folder, "two", log=folder / "two.log", ranks=2)
    return folder


def test_images_depend_on_their_prompt_and_seed_not_on_the_rank(ranks):
    whole = torch.load(ranks / "one-0.pt")
    parts = [torch.load(ranks / f"two-{rank}.pt") for rank in (0, 1)]
    assert torch.equal(whole["group"], torch.cat([part["group"] for part in parts]))
    torch.testing.assert_close(whole["images"], torch.cat([part["images"] for part in parts]), rtol=0, atol=1e-5)


def test_no_image_repeats(ranks):
    images = torch.cat([torch.load(ranks / f"two-{rank}.pt")["images"] for rank in (0, 1)]).flatten(1)
    gaps = torch.cdist(images, images) + torch.eye(len(images)) * 1e9
    assert float(gaps.min()) > 0.1


def test_two_ranks_train_as_one(ranks):
    assert distance(final(ranks / "one"), final(ranks / "two")) < 1e-5
    losses = [[r["loss"] for r in metrics(ranks / name) if "loss" in r] for name in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)  # on-policy: 0 but for rounding
    norms = [[r["grad_norm"] for r in metrics(ranks / name) if "loss" in r] for name in ("one", "two")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4) and min(norms[0]) > 1e-4


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["optim.ema=0.9", "algorithm.epochs=2", "algorithm.minibatches=2"], id="ema"),
        pytest.param(
            ["denoising.likelihood={type: contrast}", "algorithm={type: contrast, sampling_policy: {slope: 0.2}}"],
            id="sampling policy",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_four_steps_equal_two_and_two(tmp_path, options):
    train(tmp_path / "whole", *options, base=IMAGES)
    train(tmp_path / "parts", *options, "steps=2", "checkpoint.every=2", base=IMAGES)
    train(tmp_path / "parts", *options, "checkpoint.every=2", resume=True, base=IMAGES)
    assert distance(final(tmp_path / "whole"), final(tmp_path / "parts")) == 0
    rows = [[r for r in timeless(metrics(tmp_path / n)) if "loss" in r] for n in ("whole", "parts")]
    assert json.dumps(rows[0]) == json.dumps(rows[1])


def test_scoring_in_the_background_changes_nothing(tmp_path):
    """Also with rewards slow enough that two micro-batches wait for them."""

    def slow():
        task = Images().build(0)
        mark = task.mark
        task.mark = lambda sample: time.sleep(0.01) or mark(sample)
        return task

    options = ["steps=2", "rollout.micro_batch=4"]
    train(tmp_path / "at once", *options, base=IMAGES)
    train(tmp_path / "later", *options, "rollout.score_in_background=true", task=slow(), base=IMAGES)
    assert distance(final(tmp_path / "at once"), final(tmp_path / "later")) == 0


def test_a_reward_that_fails_in_the_background_ends_the_run(tmp_path):
    task = Images().build(0)
    task.score = lambda samples, group: (_ for _ in ()).throw(UserError("reward server: no answer"))
    trainer = make(tmp_path, "rollout.micro_batch=4", "rollout.score_in_background=true", task=task, base=IMAGES)
    with pytest.raises(UserError, match="no answer"):
        trainer.train()
    release(trainer)


def test_the_average_is_what_is_evaluated_and_kept(tmp_path):
    trainer = make(tmp_path, "optim.ema=0.9", "steps=3", base=IMAGES)
    seen = []
    trainer.task.accuracy = lambda samples: seen.append(samples[0].image) or torch.zeros(len(samples))
    trainer.train()
    live = {n: p.detach().clone() for n, p in trainer.policy.module.named_parameters()}
    kept = final(tmp_path)
    assert distance(kept, live) > 1e-5
    prompts, before = [trainer.task.evaluation[0]], seen[-1]
    with trainer.ema.applied():
        again = trainer.policy.respond(prompts, rollout_seeds(trainer.config.seed + 1, [0], 1))
    torch.testing.assert_close(again[0].image, before, rtol=0, atol=1e-5)
    release(trainer)


def kl(coefficient):
    return f"algorithm.terms=[{{type: kl, coefficient: {coefficient}, estimator: exact}}]"


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    made = make(tmp_path_factory.mktemp("run"), kl(0.1), base=IMAGES)
    yield made
    release(made)


@pytest.fixture(scope="module")
def batch(trainer):
    """Rollouts of an earlier policy and a reference that differ from what is replayed now."""
    made = trainer.policy.rollout([trainer.task.train[i] for i in range(2)], 4, list(range(8)), step=0)
    generator = torch.Generator().manual_seed(0)
    made.advantages = torch.randn(8, generator=generator)[:, None].expand(made.mask.shape)
    with torch.no_grad():
        now = trainer.policy.replay(made, trainer.policy.module)
    made.old_logp = now.logp
    made.old_prediction = now.prediction + 0.05 * torch.randn(now.prediction.shape, generator=generator)
    made.ref_prediction = now.prediction + 0.3 * torch.randn(now.prediction.shape, generator=generator)
    return made


def gradient(trainer, batch, *overrides):
    """The gradient of one batch under a changed configuration, flat."""
    config = load(IMAGES, ["run_dir=r", *overrides])
    probe = under(trainer, config)
    probe.policy = DiffusionPolicy(trainer.policy.family, config.section("denoising"))
    context = SimpleNamespace(policy=probe.policy)
    measured = {one.name: one.measure(batch, context) for one in config.needs.prepared if isinstance(one, SegmentIds)}
    return parts.gradient(probe, replace(batch, extras={**batch.extras, **measured}))


def apart(a, b):
    return float((a - b).norm() / a.norm())


@pytest.mark.parametrize(
    "change",
    [
        ["algorithm.ratio=normalised"],
        ["algorithm.surrogate={type: divergence_mask, bound: 1e-5}"],
        ["algorithm.surrogate={type: cispo, low: 1e-3, high: 1e-3}"],
        ["algorithm.surrogate={type: reinforce}"],
        ["algorithm.level=sequence"],
        ["algorithm.level=segment", "denoising.likelihood.chunks=[1,2]"],
        ["algorithm.surrogate={low: 1e-2, high: 1e-2}"],
        ["denoising.likelihood.step_weight=std"],
        ["denoising.likelihood.reduction=sum"],
        [kl(0.1)],
    ],
    ids=lambda change: change[0],
)
def test_each_option_of_the_loss_changes_the_gradient(trainer, batch, change):
    assert apart(gradient(trainer, batch), gradient(trainer, batch, *change)) > 1e-3


def test_the_kl_term_grows_in_proportion(trainer, batch):
    none, one, two = (gradient(trainer, batch, kl(coefficient)) for coefficient in (0, 0.1, 0.2))
    torch.testing.assert_close(none, gradient(trainer, batch))
    torch.testing.assert_close(two - none, 2 * (one - none), atol=1e-6, rtol=1e-3)
