"""What each part of a method changes is what it declares, alone and in company: on a real tiny model with a real
verifier, from the configuration to the gradient.

A step is observed at four places, in the order in which they come about: which rollouts there are, which decisions
count, what they are worth, and the gradient. A part leaves everything alone that comes before what it declares,
changes that, and nothing beside: with its rollouts, masks and advantages the same gradient is had without it.
"""

import copy
import json
import random
import subprocess
import tempfile
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mmrl import build
from mmrl.algorithms.baselines.baseline import Baseline
from mmrl.algorithms.reward_transforms.transform import Transform
from mmrl.algorithms.scales.components import Components
from mmrl.algorithms.scales.scale import Scale
from mmrl.algorithms.surrogates.surrogate import Surrogate
from mmrl.collection.extra_sources import ExtraSource
from mmrl.config import load
from mmrl.engine import Ranks
from mmrl.errors import UserError
from mmrl.preflight.quick import probe_quickly
from mmrl.prompts.sampler import PromptSampler
from mmrl.prompts.views import View
from mmrl.rewards import RewardSet, RewardSpec
from mmrl.rollouts import OBJECTIVE, DecisionColumn, Message, Prompt
from mmrl.settings import kind_of, option, plain
from mmrl.sims.turns.environment import Environment, Reply
from mmrl.sims.turns.settings import EnvironmentSettings
from mmrl.tasks.settings import TaskSettings
from mmrl.terms.term import Mask, Shaper, Term
from mmrl.trainer import Trainer
from mmrl.training.metrics import Metrics
from tests.company.test_composition import OPTIONS
from tests.policies.test_turns import favour_end
from tests.whole_runs.parts import IMAGES, ROBOTS, TINY, Fixed, Questions, gradient

HERE = "tests.company.test_declared"
PLACES = ("prompts", "mask", "advantages", "gradient")
KEYS = {
    Surrogate: "algorithm.surrogate={}",
    Baseline: "algorithm.baseline={}",
    Transform: "algorithm.transforms=[{}]",
    Scale: "algorithm.scale={}",
    Components: "algorithm.components={}",
    Term: "algorithm.terms=[{}]",
    Shaper: "algorithm.shaping=[{}]",
    Mask: "algorithm.masks=[{}]",
    View: "algorithm.terms=[{{type: kl, against: {{type: view, view: {}}}}}]",
    PromptSampler: "rollout.sampler={}",
    ExtraSource: "rollout.extras=[{}]",
}
USUAL = {"reinforce", "mean", "none", "sum", "permutation"}  # what the others are compared with
OWN = {
    "gated": "gates: [right]",
    "constrained": "prices: {brief: 0.3}",
    "projected": "auxiliary: brief",
    "bucket_std": "by: kind",
    "stratified": "by: length",
    "latent_values": "warm_up: 0",
    "skip_flat": "explore: 0.05",
    "band": "fact: reward/right, low: 0.4",
    "category_bandit": "by: kind",
    "task_quotas": "by: kind",
    "demonstrations": "prompts: 1",
    "self_imitation": "count: 2",
    "shuffled_patches": "patch: 8",
    "expert_labels": "prompts: 1",
    "likelihood": "of: own_positive",
    "segment_values": "every: 2",
    "long_wrong": "base: 2",
    "view_contrast": "view: {type: masked_patches}",
    "of_part": "part: text",
    "divergence_mask": "bound: 0.01",
    "self_corrections": "text: ' '",
    "sequence_mask": "bound: 0.001",
    "token_budget": "budget: 20",
    "covariance_clip": "share: 0.2, low: -5",
    "guided_prefixes": "count: 4",
    "small_advantages": "least: 0.3",
    "mastered": "probability: 0.001, entropy: 100",
    "rollback": "accuracy: 2",  # so that all groups fail
    "advantage_replay": "every: 1, least: 0.01",
    "section_credit": "sections: [{end: '1', weight: 2}]",
}
# What a part needs beside it, which its surroundings then have too.
AROUND = {
    **dict.fromkeys(("pass_at_k", "pass_at_k_analytic", "best_only", "win_rate"), "algorithm.baseline=none"),
    "modes": "algorithm.baseline=mean",
    # so that all of a group are wrong by chance
    **dict.fromkeys(("extra_rollouts", "guided_prefixes"), "rollout.group_size=2"),
    "replay_policy_gradient": "rollout.extras=[{type: advantage_replay, every: 1, least: 0.01}]",
    "long_wrong": "rollout.group_size=48",  # so that a right one is shorter than a wrong one by chance
    "shared_prefix": "rollout.temperature=0.2",  # so that responses of a group begin alike
    **dict.fromkeys(("prefix_mean", "subtree_advantages", "node_gains"), "rollout.extras=[branches]"),
    "self_corrections": "rollout.max_response_length=12",  # so that two responses and what joins them fit
}
AROUND_NOT = {"shared_prefix": ("images",)}  # they have no temperature
AROUND_NOT |= {"self_corrections": ("images", "actions")}  # they have no response
AROUND_NOT |= {"replay_policy_gradient": ("images", "actions")}  # they are not stored
AROUND_NOT |= dict.fromkeys(
    ("prefix_mean", "subtree_advantages", "node_gains"), ("images", "actions")
)  # they do not branch
FACTORS = {
    "dynamic sampling": ("rollout.dynamic_sampling={max_rounds: 2}",),
    "several minibatches": ("algorithm.minibatches=2",),
    "two epochs": ("algorithm.epochs=2",),
    "unscored rollouts": (),
    "turns": (f"task.environment={{type: '{HERE}:EchoSettings'}}",),
    "LoRA": ("model.lora={rank: 4, alpha: 8}",),
    "resume": (),
}
JUDGED = ("refused", "told", "declared")
BRIEF = {"self_corrections"}  # responses of random weights fill the limit, so that no pair would fit
STEPS = 3  # as many prompts are drawn as there are twice, so that some come again


# --- named by the configuration ---


def right(sample):
    """Full marks by chance for two prompts in three, and never for the third: groups fail, succeed and differ."""
    return float(sum(map(ord, sample.response)) % 3 == 0) * solvable(sample)


def brief(sample):
    return solvable(sample) / (1 + len(sample.response))


def solvable(sample):
    held = sample.prompt.metadata
    return (sum(held["digits"]) if "digits" in held else held["seed"]) % 3 > 0


def right_or_none(sample):
    """As `right`, but a judge fails for one response in five."""
    return None if sum(map(ord, sample.response)) % 5 == 0 else right(sample)


def looked_right(sample):
    """As `right`, of an image or an episode: by what it looks like."""
    return float(number_of(sample) % 3 == 0) * solvable(sample)


def looked_brief(sample):
    return solvable(sample) / (1 + number_of(sample) % 7)


def looked_right_or_none(sample):
    return None if number_of(sample) % 5 == 0 else looked_right(sample)


def number_of(sample):
    """A number by chance, which a small change of the weights does not change often."""
    if sample.image is not None:
        return int(float(sample.image.double().mean()) * 1e4)
    return sample.episode.length + 100 * int(sample.episode.success)


class Drawings(TaskSettings):
    type: str = f"{HERE}:Drawings"
    rewards: list[RewardSpec] = option([], "of the images")

    def build(self, seed):
        rewards = RewardSet(self.rewards)
        task = Fixed(looked_right)
        task.reward_names, task.reward_weights = rewards.names, rewards.weights
        task.score = lambda samples, group=None: rewards.score(samples)
        names = ("zero", "one", "two", "three", "four", "five")
        metadata = [{"digits": [i], "kind": f"kind {i % 2}", "level": i} for i in range(6)]
        prompts = zip(names, metadata, strict=True)
        task.train = task.evaluation = Questions(
            Prompt(str(held["level"]), f"a handwritten {name}", metadata=held) for name, held in prompts
        )
        return task


class Idle(Term):
    """Declares a gradient that it has not."""

    def values(self, micro, replay):
        return replay.logp * 0, {}


class Sly(Shaper):
    """Declares advantages, and masks decisions."""

    def shape(self, advantages, batch):
        batch.rollouts.mask[:, 1] = False
        return advantages * 2


class Echo(Environment):
    def start(self, prompt):
        self.turns = 0
        return prompt.messages

    def step(self, response):
        self.turns += 1
        reward = len(response) / 10
        if self.turns == 2:
            return Reply(end=True, reward=reward)
        tool = "echo" if sum(map(ord, response)) % 4 == 0 else None  # one response in four calls one
        return Reply([Message("user", ("Why?",))], reward=reward, tool=tool)


class EchoSettings(EnvironmentSettings):
    type: str = f"{HERE}:EchoSettings"

    @property
    def pays_turns(self):
        return True

    def make(self):
        return Echo()


# --- what is tried ---


@dataclass(frozen=True)
class Entry:
    base: type
    name: str
    world: str = "tokens"

    @property
    def kind(self):
        return kind_of(self.base, {"type": self.name})

    @property
    def written(self):
        options = OWN.get(self.name, OPTIONS.get(self.name, ""))
        return KEYS[self.base].format(f"{{type: {self.name}{', ' + options if options else ''}}}")

    @property
    def around(self):
        return [AROUND[self.name]] if self.name in AROUND and self.world not in AROUND_NOT.get(self.name, ()) else []


ENTRIES = [Entry(base, name) for base in KEYS for name in base.kinds if name not in USUAL]


def rows(entries, factors):
    """Two rows of the 8 x 7 orthogonal array for each entry, complements of one another: an entry meets each factor on
    and off, and over all entries each pair of factors meets in all four ways."""
    simplex = [[(bin(r & c).count("1") % 2) for c in range(1, 8)] for r in range(8)]
    for place, entry in enumerate(entries):
        row = simplex[place % 8]
        for chosen in (row, [1 - bit for bit in row]):
            yield entry, tuple(name for name, bit in zip(FACTORS, chosen, strict=True) if bit and name in factors)


def cells(entries, factors):
    return [(entry, ()) for entry in entries] + [cell for cell in rows(entries, factors) if cell[1]]


CELLS = cells(ENTRIES, FACTORS)
LOOKS = {
    "images": [f"task={{type: '{HERE}:Drawings'}}"],
    "actions": ["task.train_size=6"],
}
WORLDS = {"tokens": TINY, "images": IMAGES, "actions": ROBOTS}
# The mask that every job has by default keeps all of what has no such limit.
OTHERS = {
    world: [Entry(e.base, e.name, world) for e in ENTRIES if e.base is not View and e.name != "truncated"]
    for world in LOOKS
}
OTHER_CELLS = {world: cells(entries, FACTORS.keys() - {"turns"}) for world, entries in OTHERS.items()}
PARTS, SEEN = {}, {}


class Alone(Ranks):
    """One process without DeepSpeed, whose losses autograd may differentiate."""

    zero_stage, updates, lr, lr_factor = 0, 0, 0.0, 1.0

    def __init__(self, module):
        super().__init__()
        self.module = module

    def __call__(self, *arguments, **named):
        return self.module(*arguments, **named)


def settings(entry, factors, *, without):
    if entry.world in LOOKS:
        return settings_of_looks(entry, factors, without=without)
    score = "right_or_none" if "unscored rollouts" in factors else "right"
    rewards = f"task.rewards=[{{name: '{HERE}:{score}', label: right}}, {{name: '{HERE}:brief', label: brief}}]"
    options = [
        rewards,
        f"task.accuracy={{name: '{HERE}:right'}}",
        "task.data.train_size=6",
        "rollout.max_response_length=6",
        "engine.micro_batch=64",
    ]
    options += ["algorithm.surrogate=reinforce", "algorithm.scale=none", f"run_dir={Path(tempfile.gettempdir(), 'no')}"]
    options += entry.around + [option for factor in factors for option in FACTORS[factor]]
    if "turns" in factors:
        options += ["rollout.max_response_length=24", "task.environment.limits={max_turns: 2, turn_tokens: 6}"]
    return load(TINY, options if without else [*options, entry.written])


def settings_of_looks(entry, factors, *, without):
    score = "looked_right_or_none" if "unscored rollouts" in factors else "looked_right"
    rewards = f"task.rewards=[{{name: '{HERE}:{score}', label: right}}, {{name: '{HERE}:looked_brief', label: brief}}]"
    options = [*LOOKS[entry.world], rewards, "engine.micro_batch=64", "algorithm.surrogate={type: reinforce}"]
    options += ["algorithm.scale=none", f"run_dir={Path(tempfile.gettempdir(), 'no')}"]
    options += entry.around + [option for factor in factors for option in FACTORS[factor]]
    return load(WORLDS[entry.world], options if without else [*options, entry.written])


def made(config, factors, brief=False):
    """A trainer of a policy that all configurations of these factors share, and that has moved since the trainer took
    it for its reference."""
    around = tuple(factor for factor in ("turns", "LoRA") if factor in factors)
    key = (
        around,
        config.needs.critic is not None,
        repr(vars(config.rollout).get("temperature")),
        config.model.type,
        brief,
    )
    task = build.build_task(config)
    if key not in PARTS:
        torch.manual_seed(0)
        policy = build.build_policy(config, task)
        if brief:
            favour_end(policy, 3.0)
        PARTS[key] = policy, [p.detach().clone() for p in trained(policy)]
    policy, start = PARTS[key]
    move(policy, start, 0.0)
    run = SimpleNamespace(folder=Path(config.run_dir), line=lambda text: None, writes=False)
    trainer = Trainer(config, policy, task, Alone(policy.module), run)
    move(policy, start, 0.02)
    return trainer


def trained(policy):
    return [p for p in policy.module.parameters() if p.requires_grad]


def move(policy, start, size):
    """Sets the weights to `start` and noise of that size, the same each time."""
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for values, before in zip(trained(policy), start, strict=True):
            values.copy_(before + size * torch.randn(before.shape, generator=noise))


@dataclass
class Observed:
    prompts: list
    mask: torch.Tensor
    advantages: torch.Tensor
    gradient: torch.Tensor
    minibatches: list


def observed(trainer, step):
    trainer.step = step
    rollouts = trainer.collector.next(step, metrics := Metrics(trainer.engine))
    shuffle = torch.Generator().manual_seed(step)
    minibatches, batch = trainer.preparation.minibatches(rollouts, step, shuffle, metrics)
    trainer.collector.observe(batch)
    rollouts = batch.rollouts
    mask = rollouts.mask
    if OBJECTIVE in rollouts.extras:
        mask = mask & rollouts.extra(OBJECTIVE, DecisionColumn).values.bool()
    prompts = [
        (s.prompt.id, s.response or shown(s), bool(kept))
        for s, kept in zip(rollouts.samples, kept_of(rollouts), strict=True)
    ]
    return Observed(prompts, mask, rollouts.advantages.where(mask, 0), moved(trainer, minibatches), minibatches)


def shown(sample):
    """What there is of an image or an episode, to rounding."""
    if sample.image is not None:
        return round(float(sample.image.mean()), 4)
    return 0 if sample.episode is None else (sample.episode.length, sample.episode.success)


def kept_of(rollouts):
    return [True] * len(rollouts) if rollouts.filler is None else (~rollouts.filler).tolist()


def moved(trainer, minibatches):
    """The gradients of a step's minibatches, at weights that move on with each of its updates."""
    start, found = [p.detach().clone() for p in trained(trainer.policy)], []
    for update, minibatch in enumerate(minibatches * trainer.algorithm.epochs):
        move(trainer.policy, start, 0.01 * update)
        found += [gradient(trainer, micro) for micro in minibatch]
    move(trainer.policy, start, 0.0)
    return torch.stack(found)


def alike(one, other):
    if isinstance(one, list):
        return one == other
    return one.shape == other.shape and torch.allclose(one, other, atol=1e-7, rtol=1e-4)


# --- the judgement ---


def judged(entry, factors):
    """refused, told, declared, or what is wrong."""
    brief = entry.name in BRIEF
    around = settings(entry, factors, without=True)
    try:
        config = settings(entry, factors, without=False)
        with_it = made(config, factors, brief)
    except UserError as error:
        return "refused" if "\n" not in str(error) else f"refused in several lines: {error}"
    without = surroundings(around, factors, brief)
    return compared(entry, with_it, *without, picks=picks(entry, factors)) or (
        resumed(config, factors, with_it, brief) if "resume" in factors else "declared"
    )


def surroundings(config, factors, brief):
    """The trainer without the part, and its steps; the same for all parts with equal surroundings."""
    key = repr(plain(config)) + str(brief)
    if key not in SEEN:
        trainer = made(config, factors, brief)
        SEEN[key] = trainer, [observed(trainer, step) for step in range(STEPS)]
    return SEEN[key]


def picks(entry, factors):
    """Whether a part decides by what it does which groups dynamic sampling keeps: a way to combine rewards says which
    of them vary (`Components.varied`)."""
    return entry.base is Components and "dynamic sampling" in factors


def compared(entry, with_it, without, steps, picks=False):
    """What is wrong with the first steps of two trainers; told: that it does nothing was said; empty: nothing."""
    declared, changed = entry.kind.changes, set()
    first = min(map(PLACES.index, declared - {"metric"}), default=len(PLACES))
    for step, other in enumerate(steps):
        one = observed(with_it, step)
        differ = {place for place in PLACES if not alike(getattr(one, place), getattr(other, place))}
        changed |= differ
        if picks and "prompts" in differ:
            return ""
        if early := [place for place in PLACES[:first] if place in differ]:
            return f"changes {', '.join(early)} and declares {', '.join(sorted(declared))}"
        if "gradient" not in declared and not alike(one.gradient, moved(without, one.minibatches)):
            return "has a gradient of its own that it does not declare"
        if "prompts" in differ and "prompts" not in declared:
            break  # from here on they are different runs
    if missing := (declared & set(PLACES)) - changed:
        said = [alarm.text for alarm in probe_quickly(with_it.config, with_it.task)]
        return (
            "told"
            if any(" with one update per step: " in text or " with rollout.dynamic_sampling: " in text for text in said)
            else f"does not change {', '.join(missing)}"
        )
    return ""


def resumed(config, factors, trainer, brief):
    """Goes on with the state of a trainer that has made its steps; both make the same step."""
    shared, of_rank = trainer.collector.state()
    other = made(config, factors, brief)
    other.collector.load(json.loads(json.dumps(shared)), copy.deepcopy(of_rank))
    other.preparation.memory = json.loads(json.dumps(trainer.preparation.memory))
    other.preparation.modules.load(trainer.preparation.modules.state())
    one, two = observed(trainer, STEPS), observed(other, STEPS)
    differ = [place for place in PLACES if not alike(getattr(one, place), getattr(two, place))]
    return f"does not resume: {', '.join(differ)}" if differ else "declared"


# --- the tests ---


def drawn(count, of=None):
    """Cells of this commit: others in the next."""
    counted = subprocess.run(["git", "rev-list", "--count", "HEAD"], cwd=TINY.parent, capture_output=True, text=True)
    return random.Random(int(counted.stdout or 0)).sample(of or CELLS, count)


def marked(cells):
    for entry, factors in cells:
        name = f"{entry.base.__name__}-{entry.name}-{'+'.join(factors) or 'alone'}"
        yield pytest.param(entry, factors, id=name if entry.world == "tokens" else f"{entry.world}-{name}")


@pytest.mark.parametrize(("entry", "factors"), marked(drawn(2)))
def test_a_drawn_part_changes_what_it_declares(entry, factors):
    assert judged(entry, factors) in JUDGED


@pytest.mark.parametrize(("entry", "factors"), marked(one for of in OTHER_CELLS.values() for one in drawn(1, of)))
def test_a_drawn_part_changes_what_it_declares_of_images_and_actions(entry, factors):
    assert judged(entry, factors) in JUDGED


@pytest.mark.slow
@pytest.mark.parametrize(("entry", "factors"), marked(cell for of in OTHER_CELLS.values() for cell in of))
def test_a_part_changes_what_it_declares_of_images_and_actions(entry, factors):
    assert judged(entry, factors) in JUDGED


@pytest.mark.slow
@pytest.mark.parametrize(("entry", "factors"), marked(CELLS))
def test_a_part_changes_what_it_declares(entry, factors):
    assert judged(entry, factors) in JUDGED


@pytest.mark.parametrize(
    ("base", "name", "verdict"),
    [(Term, "Idle", "does not change gradient"), (Shaper, "Sly", "changes mask and declares advantages")],
)
def test_a_part_that_declares_something_else_is_found_out(base, name, verdict):
    assert judged(Entry(base, f"{HERE}:{name}"), ()) == verdict


def test_every_part_meets_every_factor_and_factors_meet_in_all_ways():
    company = CELLS[len(ENTRIES) :]
    for entry in ENTRIES:
        met = [set(factors) for other, factors in CELLS if other == entry]
        assert all({factor in factors for factors in met} == {True, False} for factor in FACTORS)
    for one, other in combinations(FACTORS, 2):
        assert {(one in factors, other in factors) for _, factors in company} == set(product((True, False), repeat=2))
