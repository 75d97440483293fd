"""Whatever a run remembers from step to step goes on as it was: jobs that hold every class with a state, stopped and
resumed. A class that gets `state()` and is in none of these jobs fails a test."""

import ast
import copy
import importlib
from pathlib import Path

import pytest
import torch

from tests.whole_runs.parts import (
    IMAGES,
    ROBOTS,
    TINY,
    distance,
    final,
    make,
    metrics,
    release,
    spread,
    timeless,
)

pytestmark = pytest.mark.usefixtures("alone")
ROOT = Path(__file__).parents[2]
# Classes that are in none of the jobs below, and why.
EXCEPTED = {
    "PendingBatches": "its state is that of draws and rounds, which are restored",
    "Process": "what a server's process does now",
    "Draft": "of a response that is being written: restored with Pool",
    "ConversationDraft": "of a response that is being written: restored with Pool",
    "TabletopRow": "numbers of an observation",
    "LiberoScene": "numbers of an observation",
    "RewardStates": "a protocol",
    "SavingReward": "a protocol",
    "ExtraSource": "a base whose own state is empty",
    "Rounds": "a base whose own state is empty",
    "Schedule": "a base whose own state is empty",
    "Pool": "of vLLM: tests/collection/test_partial_rollouts.py",
    "PooledRounds": "of vLLM: tests/collection/test_partial_rollouts.py",
    "ExpertLabels": "tests/whole_runs/test_robot_demonstrations.py",
}
EVERY = {"Collector", "PromptDraws", "Engine"}  # in each job


class Falling:
    """A reward with a state: it falls with every response that it has seen, by what that is, so differently on each
    rank."""

    def __init__(self):
        self.seen = 0

    def __call__(self, sample):
        self.seen += 1 + round(6 * spread(sample))
        return spread(sample) - self.seen / 4000

    def state(self):
        return {"seen": self.seen}

    def load(self, state):
        self.seen = state["seen"]


def unscorable(sample):
    return None


def sampler(kind, **options):
    return f"rollout.sampler={{type: {kind}{''.join(f', {key}: {value}' for key, value in options.items())}}}"


ADAPTIVE = "{type: adaptive, start: 0.1, metric: response/length, target: 2.0}"
MULTIPLIER = "{type: multiplier, metric: response/length, target: 2.0, high: 1.0}"
NEAR = "task.train_size=6"  # the line starts before its goal, so that outcomes differ and there is something to learn
BAND = "{type: band, start: 0.1, metric: response/length, low: 5, high: 9, factor: 1.5, most: 2.0}"
JOBS = {
    "samplers and memories": (
        TINY,
        [
            sampler("volatility"),
            "rollout.temperature={type: linear, start: 1.0, end: 0.5, steps: 4}",
            "rollout.max_response_length={type: stages, starts: [0, 1], values: [3, 4]}",
            "algorithm.baseline={type: running}",
            "optim.ema=0.9",
            "guards=[{metric: response/length, low: 3.5, action: {type: lower_lr}}]",
            f"algorithm.terms=[{{type: kl, coefficient: {ADAPTIVE}}}]",
            "task.rewards=[{name: 'tests.checkpoints.test_every_state:Falling'}]",
        ],
        {
            "Volatility",
            "SuccessTrackingSampler",
            "Linear",
            "Stages",
            "Follower",
            "Schedules",
            "Guards",
            "EMA",
            "RewardSet",
        },
    ),
    "replays": (
        TINY,
        [
            sampler("success_window", low=0.0, high=1.0),
            "rollout.extras=[{type: success_replay, accuracy: 0.1}, {type: self_imitation, count: 2, accuracy: 0.1}]",
            "task.accuracy={name: 'tests.whole_runs.parts:spread'}",
            "algorithm.baseline={type: running}",
            "algorithm.terms=[{type: likelihood, coefficient: 0.1, of: replayed}, {type: kl, coefficient: "
            + BAND
            + "}]",
        ],
        {"SuccessWindow", "ExtraRolloutSources", "ReplaySource", "SelfImitation", "Band"},
    ),
    "demonstrations": (
        TINY,
        [
            sampler("task_quotas", by="kind"),
            "rollout.extras=[{type: demonstrations, prompts: 2}]",
            f"algorithm.terms=[{{type: likelihood, coefficient: 0.1}}, {{type: kl, coefficient: {MULTIPLIER}}}]",
            "rollout.temperature={type: staircase, values: [1.0, 0.8, 0.6], metric: response/length, bound: 1.0}",
        ],
        {"CategorySampler", "TaskQuotas", "ExtraRolloutSources", "DemonstrationSource", "Multiplier", "Staircase"},
    ),
    "passed over": (
        TINY,
        [
            sampler("skip_flat"),
            "algorithm.terms=[{type: kl, coefficient: 0.1, against: {type: ema, decay: 0.5}}]",
            "algorithm.transforms=[{type: history}]",
        ],
        {"SkipFlat", "Snapshot"},
    ),
    "returned prompts": (
        TINY,
        [
            sampler("rollback"),
            "rollout.extras=[{type: advantage_replay, every: 1, count: 4, least: 0.5}]",
            "algorithm.terms=[{type: replay_policy_gradient}]",
            "task.accuracy={name: 'tests.whole_runs.parts:spread'}",
        ],
        {"Rollback", "AdvantageReplay", "ExtraRolloutSources"},
    ),
    "nothing scored": (
        TINY,
        [
            "task.rewards=[{name: 'tests.checkpoints.test_every_state:unscorable'}]",
            "rollout.extras=[{type: demonstrations, prompts: 2}]",
            "rollout.max_unscored_steps=5",
            "evaluation.max_unscored=1",
            "algorithm.terms=[{type: likelihood, coefficient: 0.1}]",
        ],
        {"ExtraRolloutSources", "DemonstrationSource", "UnscoredMonitor", "ZeroGradientMonitor"},
    ),
    "images": (
        IMAGES,
        [
            "algorithm.shaping=[{type: latent_values, warm_up: 1}]",
            "denoising.likelihood.transition={type: flow_sde, noise: 0.7}",
        ],
        {"Permutation", "AuxiliaryModule", "AuxiliaryModules"},
    ),
    "actions": (
        ROBOTS,
        [
            NEAR,
            sampler("category_bandit", by="kind"),
            "optim.ema=0.9",
            "algorithm.baseline={type: running}",
            "rollout.extras=[{type: stored_steps, steps: 4}]",
            "algorithm.terms=[{type: likelihood, of: replayed}]",
        ],
        {"CategorySampler", "EMA", "ExtraRolloutSources", "StepRing"},
    ),
    "actions with a critic": (
        ROBOTS,
        [NEAR, "algorithm={type: ppo, critic: separate}", "optim.groups={critic: {lr: 3e-3}}", "engine.zero_stage=0"],
        {"Permutation"},
    ),
}


def stopped(folder, base, options):
    """Trains two of four steps and saves."""
    trainer = make(folder, *options, "checkpoint.every=2", base=base)
    save = trainer.save

    def save_and_stop():
        save()
        trainer.saver.finish()
        raise KeyboardInterrupt

    trainer.save = save_and_stop
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    release(trainer)


def remembered(trainer):
    """Everything that a checkpoint would hold of a trainer besides weights."""
    return copy.deepcopy(
        {
            "batches": trainer.collector.state(),
            "controls": trainer.controls.state(),
            "guards": trainer.guards.state(),
            "lr": trainer.engine.lr_factor,
            "monitors": [trainer.unscored_monitor.state(), trainer.zero_gradient_monitor.state()],
            "memory": trainer.preparation.memory,
            "modules": trainer.preparation.modules.state(),
            "averages": {name: one.state() for name, one in trainer._copies().items()},
            "rewards": trainer._reward_states(),
        }
    )


def differences(one, other, where=""):
    """Where two nested states differ, to the bit."""
    if isinstance(one, torch.Tensor):
        return [] if isinstance(other, torch.Tensor) and torch.equal(one, other) else [where]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        one, other = dict(enumerate(one)), dict(enumerate(other))
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return [where]
        return [place for key in one for place in differences(one[key], other[key], f"{where}.{key}")]
    same = one == other or (one != one and other != other)
    return [] if same else [f"{where}: {one!r} and {other!r}"]


def classes():
    """The classes of the package with a method `state` of their own, by name: module, and whether they have `load`."""
    found = {}
    for folder in ("mmrl", "tasks", "sims"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if any(parent.is_symlink() for parent in path.parents):  # of a checkout that maps packages by links
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef) and "state" in (own := methods(node)):
                    parts = path.relative_to(ROOT).with_suffix("").parts
                    module = ".".join(parts if parts[0] == "mmrl" else ("mmrl", *parts))
                    found[node.name] = module, "load" in own
    return found


def methods(node):
    """The names of a class's methods; a property `state` is what something is in, not what it is restored from."""
    return {child.name for child in node.body if isinstance(child, ast.FunctionDef) and not child.decorator_list}


@pytest.fixture
def restored(monkeypatch):
    """The names of classes whose state was restored, and held something."""
    names = set()
    for name, (module, loads) in classes().items():
        if not loads or name in EXCEPTED:
            continue
        kind = vars(importlib.import_module(module))[name]
        original = vars(kind)["load"]

        def load(self, *state, original=original, name=name, **options):
            if any(state):
                names.add(name)
            return original(self, *state, **options)

        monkeypatch.setattr(kind, "load", load)
    return names


@pytest.mark.parametrize("name", JOBS)
def test_a_job_goes_on_with_all_that_it_remembers(tmp_path, restored, name):
    base, options, holds = JOBS[name]
    whole = make(tmp_path / "whole", *options, base=base)
    start = {key: value.clone() for key, value in whole.engine.state().items()}
    whole.train()
    expected = remembered(whole)
    assert distance(start, whole.engine.state()) > 1e-3  # it learns something
    release(whole)
    stopped(tmp_path / "halves", base, options)
    torch.rand(5)
    halves = make(tmp_path / "halves", *options, base=base)
    fresh = remembered(halves)
    halves.resume()
    assert halves.step == 2
    assert differences(fresh, remembered(halves))  # there was something to restore
    halves.train()
    assert not (EVERY | holds) - restored  # a module that is built when it is first used is restored then
    found = remembered(halves)
    release(halves)
    assert differences(expected, found) == []
    assert timeless(metrics(tmp_path / "whole")) == timeless(metrics(tmp_path / "halves"))
    a, b = final(tmp_path / "whole"), final(tmp_path / "halves")
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


MOVED = [
    ("samplers and memories", 2),
    ("replays", 1),
    ("actions with a critic", 1),
    pytest.param("samplers and memories", 3, marks=pytest.mark.slow),
    pytest.param("images", 1, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "stage"), MOVED)
def test_a_job_goes_on_under_another_zero_stage(tmp_path, name, stage):
    """Rounding apart: each stage sums in an order of its own. One step behind the checkpoint, before it has grown."""
    base, options, _ = JOBS[name]
    options = [*options, "steps=3"]
    other = [*options, f"engine.zero_stage={stage}"]
    before = make(tmp_path / "probe", *options, base=base)
    assert before.engine.zero_stage != stage
    release(before)
    whole = make(tmp_path / "whole", *options, base=base)
    whole.train()
    release(whole)
    stopped(tmp_path / "halves", base, options)
    halves = make(tmp_path / "halves", *other, base=base)
    halves.resume()
    halves.train()
    release(halves)
    assert distance(final(tmp_path / "whole"), final(tmp_path / "halves")) < 1e-5
    assert halves.preparation.memory.keys() == whole.preparation.memory.keys()


def test_going_back_restores_weights_and_averages_and_leaves_the_rest(tmp_path):
    base, options, _ = JOBS["samplers and memories"]
    trainer = make(tmp_path, *options, "checkpoint.every=2", base=base)
    kept = {}

    def kept_weights(save=trainer.save):
        save()
        kept["weights"] = trainer.engine.state()
        kept["averages"] = copy.deepcopy({name: one.state() for name, one in trainer._copies().items()})

    trainer.save = kept_weights
    trainer.train()
    release(trainer)
    again = make(tmp_path, *options, "checkpoint.every=2", "steps=6", base=base)
    again.resume()
    before = remembered(again)
    with torch.no_grad():
        for parameter in again.policy.module.parameters():
            parameter.add_(1.0)
    again.ema.update()
    assert differences(kept["averages"], {name: one.state() for name, one in again._copies().items()}) != []
    again.go_back()
    after = remembered(again)
    assert differences(kept["weights"], again.engine.state()) == []
    assert differences(kept["averages"], after.pop("averages")) == [] and before.pop("averages")
    assert differences(before, after) == []
    release(again)


def test_every_class_with_a_state_is_in_a_job():
    held = EVERY.union(*(holds for _, _, holds in JOBS.values()))
    assert set(classes()) == held | set(EXCEPTED) and not held & set(EXCEPTED)
