"""Methods of the catalogue on a real model under DeepSpeed: they train, and what they remember is in checkpoints. Those
that remember most on every run, all with `-m slow`."""

import math

import pytest
import torch

from tests.whole_runs.parts import call, final, make, metrics, release, timeless, train

SPREAD = 'task.rewards=[{name: "tests.whole_runs.parts:spread"}]'
BASE = ["steps=4", "task.data.train_size=20", "checkpoint.every=2", SPREAD]
# What holds something from step to step, or asks for a pass of its own.
KINDS = {
    "remembers": [
        "rollout.group_size=2",
        "algorithm={baseline: {type: running, half_life: 2}, scale: batch_std, "
        "terms: [{type: kl, against: {type: ema, decay: 0.5}}], surrogate: {type: ratio_variance, price: "
        "{type: multiplier, metric: surrogate/variance, target: 1.0e-6, k_i: 100}}, epochs: 2}",
        "rollout.sampler=volatility",
    ],
}
FURTHER = {
    "looks": [
        "algorithm={baseline: greedy, scale: none, shaping: [{type: view_information, view: blank}, set_diversity, "
        "{type: entropy, sure: {}, bonus: clarity, centred: true}], masks: [{type: token_budget, budget: 20}], terms: "
        "[{type: likelihood, of: all}, {type: likelihood, of: all, under: blank}, "
        "{type: kl, against: {type: view, view: blank}}], surrogate: {type: boundary_chance}, epochs: 2}",
        "rollout.sampler=success_weighted",
    ],
    "pairs": [
        "algorithm={type: mixed_preference, terms: [{type: likelihood_drop}, {type: kl, against: old}], epochs: 2}",
        "engine.micro_batch=16",
        "rollout.sampler=skip_flat",
    ],
    "groups": [
        "algorithm={transforms: [{type: pass_at_k, k: 2}], baseline: none, scale: none, level: sequence, "
        "surrogate: group_expectation, shaping: [self_process, {type: stratified, by: truncated}], "
        "terms: [{type: kl, weighting: difficulty}, {type: kl, against: old, coefficient: 1, estimator: absolute, "
        "weighting: {type: covariance, share: 0.2}}]}",
        "rollout.sampler=success_window",
    ],
}


def whole(folder, kinds):
    for name, options in kinds.items():
        train(folder / f"whole-{name}", *BASE, *options)


def halves(folder, kinds):
    """Stopped after two of four steps, and gone on with."""
    for name, options in kinds.items():
        trainer = make(folder / f"halves-{name}", *BASE, *options)
        save = trainer.save

        def save_and_stop(trainer=trainer, save=save):
            save()
            raise KeyboardInterrupt

        trainer.save = save_and_stop
        try:
            trainer.train()
        except KeyboardInterrupt:
            assert trainer.step == 2
        release(trainer)
    for name, options in kinds.items():
        torch.rand(7)
        train(folder / f"halves-{name}", *BASE, *options, resume=True)


def run_all(path, kinds):
    for target in (whole, halves):
        call(target, path, kinds, log=path / f"{target.__name__}.log", timeout=240)
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return run_all(tmp_path_factory.mktemp("catalogue"), KINDS)


@pytest.fixture(scope="module")
def further(tmp_path_factory):
    return run_all(tmp_path_factory.mktemp("further"), FURTHER)


def goes_on_exactly(runs, name):
    a, b = final(runs / f"whole-{name}"), final(runs / f"halves-{name}")
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    rows = timeless(metrics(runs / f"whole-{name}"))
    assert rows == timeless(metrics(runs / f"halves-{name}"))
    steps = [row for row in rows if "loss" in row]
    assert len(steps) == 4 and all(math.isfinite(row["loss"]) for row in steps)
    assert all(row["updates_skipped"] == 0 and row["grad_norm"] > 0 for row in steps)


@pytest.mark.parametrize("name", KINDS)
def test_a_run_that_is_stopped_goes_on_exactly(runs, name):
    goes_on_exactly(runs, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", FURTHER)
def test_a_run_of_further_methods_goes_on_exactly(further, name):
    goes_on_exactly(further, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", FURTHER)
def test_the_first_ratio_is_exactly_one(further, name):
    """Where nothing was updated before: rollouts are on policy, whatever passes were made besides."""
    rows = [row for row in metrics(further / f"whole-{name}") if "loss" in row]
    gaps = [row["surrogate/ratio_gap_max"] for row in rows if "surrogate/ratio_gap_max" in row]
    if name == "groups":
        assert gaps == [0.0] * 4
    elif name == "pairs":
        assert gaps == []
    else:
        assert all(gap > 0 for gap in gaps)  # of the second epoch
