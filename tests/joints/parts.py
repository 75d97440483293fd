"""Stand-ins with which a configuration can be followed to a number worked out by hand.

A `Table` holds what a policy would say of some rollouts. Everything between the configuration and the loss is the real
thing: the settings, `build`, `Trainer`, `Preparation`, `Collector`, algorithms, terms and schedules. The module's
weights are one number a decision, so that after an update `Job.gradient` is the derivative of the loss by every
decision.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mmrl import build
from mmrl.config import load, to_yaml
from mmrl.generation.settings import GeneratorSettings, TransformersGenerator
from mmrl.policies.settings import ModelSettings
from mmrl.policies.vlm.settings import TokenEngine
from mmrl.protocols.abilities import (
    Completing,
    ContinuingResponses,
    DecisionTexts,
    DiscreteDecisions,
    JoiningResponses,
    Latent,
    ScoringPrompts,
    Segmented,
    Storing,
)
from mmrl.protocols.batch import Batch
from mmrl.protocols.offers import OFFERS
from mmrl.protocols.requirements import Capabilities
from mmrl.report.run import Run
from mmrl.rewards import RewardSet
from mmrl.rewards.settings import RewardSpec
from mmrl.rollouts import Episode, MatchingTargets, Prompt, Replay, Rollouts, Sample, Steps
from mmrl.schedules.schedule import Schedule, number
from mmrl.settings import Section, option
from mmrl.tasks.settings import TaskSettings
from mmrl.trainer import Trainer
from mmrl.training.metrics import Metrics

GIVEN = Path(__file__).parent / "given.yaml"
GARBAGE = -7.0  # what stands where a decision does not count


class Table:
    """What there is to know of some rollouts, one row each.

    logp: [rollout][decision], of any lengths. rewards: [rollout] or [rollout][component]. The others are of the shape
    of logp where the field of `Replay` is, and one number or mapping a rollout where it is one of the sample.
    """

    def __init__(
        self,
        logp,
        *,
        group=None,
        rewards=None,
        truncated=None,
        accuracy=None,
        metadata=None,
        responses=None,
        pieces=None,
        **columns,
    ):
        self.mask = torch.tensor([[t < len(row) for t in range(max(map(len, logp)))] for row in logp])
        self.group = torch.tensor([0] * len(logp) if group is None else group)
        rewards = torch.tensor([0.0] * len(logp) if rewards is None else rewards)
        self.rewards = rewards if rewards.dim() == 2 else rewards[:, None]
        self.accuracy = self.rewards[:, 0] if accuracy is None else torch.tensor(accuracy)
        self.truncated = truncated or [False] * len(logp)
        self.metadata = metadata or [{}] * len(logp)
        self.responses = responses or [str(row) for row in range(len(logp))]  # by which the task finds a row again
        self.pieces = pieces  # of text, by decision
        self.columns = {name: self.padded(values) for name, values in {"logp": logp, **columns}.items()}

    def padded(self, values):
        """[rollout, decision, ...], with garbage where no decision counts."""
        width = self.mask.shape[1]
        return torch.stack([torch.tensor([*row, *[GARBAGE] * (width - len(row))]) for row in values])

    def sample(self, row, prompt=None):
        prompt = replace(prompt or Prompt(str(int(self.group[row])), "?"), metadata=self.metadata[row])
        episode = Episode("go", success=True, success_at_end=True, length=1, reward=0.0)
        return Sample(prompt, response=self.responses[row], truncated=self.truncated[row], episode=episode)

    def rollouts(self, rows=None):
        """Scored rollouts, as `Collector.next` gives them."""
        rows = list(range(len(self.group))) if rows is None else rows
        return Rollouts(
            samples=[self.sample(row) for row in rows],
            inputs=list(rows),
            group=self.group[rows],
            mask=self.mask[rows],
            rewards=self.rewards[rows],
            accuracy=self.accuracy[rows],
            prompt=self.group[rows],
        )


# --- named by the configuration ---


class GivenSampling(Section):
    temperature: Schedule = number(1.0, "of rollouts", gt=0)
    generator: GeneratorSettings = option(TransformersGenerator(), "who samples")

    @property
    def producer(self):
        return self.generator


class GivenEvaluation(Section):
    temperature: float = option(0.0, "of evaluation", ge=0)


class GivenModel(ModelSettings):
    """Its decisions support everything but a tree."""

    type: str = "tests.joints.parts:GivenModel"
    longest: int = option(10, "decisions of the longest rollout")

    @classmethod
    def sections(cls, tree, collects):
        own = {"evaluation": GivenEvaluation, "engine": TokenEngine}
        return own | ({} if collects == "demonstrations" else {"rollout": GivenSampling})

    def capabilities(self, config):
        abilities = {
            Completing,
            ContinuingResponses,
            ScoringPrompts,
            Latent,
            DiscreteDecisions,
            JoiningResponses,
            Segmented,
            DecisionTexts,
            Storing,
        }
        offers = frozenset({*OFFERS, *abilities} - {"nodes"})
        return Capabilities("model.type=given", offers, groups=("critic",))

    def load(self, config, task, path):
        return GivenPolicy(config)


class GivenTaskSettings(TaskSettings):
    type: str = "tests.joints.parts:GivenTaskSettings"
    names: list[str] = option(["mark"], "of the rewards")
    weights: list[float] = option([1.0], "of the rewards")
    rewards: list[RewardSpec] = option([], "real rewards, in the place of the table's")

    def build(self, seed):
        return GivenTask(self)


# --- the parts ---


class GivenWeights(torch.nn.Module):
    """What is added to the columns of the table, by decision."""

    def __init__(self):
        super().__init__()
        for name in ("logp", "entropy", "view", "value", "prediction"):
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(16, 8)))

    def forward(self, rows):
        return {name: values[rows] for name, values in self.named_parameters()}


@dataclass
class Sampled:
    """A call of the policy. weights: the first number of `logp` that it was made with."""

    what: str
    seeds: list
    temperature: float | None = None
    weights: float | None = None


class GivenPolicy:
    def __init__(self, config):
        self.module, self.table, self.max_decisions = GivenWeights(), None, config.model.longest
        self.evaluation_temperature = config.evaluation.temperature
        self.temperature = vars(config.rollout).get("temperature")
        self.calls, self.asked = [], 0  # everything that was sampled; prompts of rollouts
        self.sampled_by = None  # a generator that holds weights of its own

    @property
    def weights(self):
        """The first number of `logp`, by which a call tells with which weights it was made."""
        return self.module.logp[0, 0].item()

    def rollout(self, prompts, group_size, seeds, *, step, temperature=None):
        """The first prompt that is ever drawn gets the table's first group, and so on, over and over."""
        weights = self.weights if self.sampled_by is None else self.sampled_by.weights
        heat = self.temperature.value if temperature is None else temperature
        self.calls.append(Sampled("rollout", list(seeds), heat, weights))
        rows, groups = [], self.table.group.unique().tolist()
        for _ in prompts:
            own = (self.table.group == groups[self.asked % len(groups)]).nonzero().flatten().tolist()
            rows += own[:group_size]
            self.asked += 1
        each = [prompt for prompt in prompts for _ in range(group_size)]
        samples = [self.table.sample(row, prompt) for row, prompt in zip(rows, each, strict=True)]
        return replace(self._unscored(rows), samples=samples)

    def respond(self, prompts, seeds):
        self.calls.append(Sampled("respond", list(seeds), self.evaluation_temperature, self.weights))
        return [self.table.sample(int(prompt.id) % len(self.table.group), prompt) for prompt in prompts]

    def demonstrate(self, prompts, seeds):
        """The rows of the table's last group, whatever the prompts."""
        self.calls.append(Sampled("demonstrate", [int(p.id) for p in prompts]))
        last = (self.table.group == self.table.group.max()).nonzero().flatten().tolist()
        return self._unscored((last * len(prompts))[: len(prompts)])

    def continue_from(self, rollouts, lengths, seeds):
        """`continues` says which row a row becomes, by its place and how much of it is kept: they take turns."""
        self.calls.append(Sampled("continued", list(seeds)))
        places = list(zip(rollouts.inputs, lengths, strict=True))
        rows = [self.continues[place][places[:i].count(place)] for i, place in enumerate(places)]
        return self._unscored(rows)

    def join_responses(self, first, second, text):
        """`recombines` says which row two rows become."""
        self.calls.append(Sampled("recombined", [text]))
        rows = [self.recombines[pair] for pair in zip(first.inputs, second.inputs, strict=True)]
        limit = [replace(self.table.sample(row), max_response_length=3, response_length=len(str(row))) for row in rows]
        return replace(self._unscored(rows), samples=limit)

    def complete_steps(self, rollouts, *, ends=False):
        raise AssertionError("a table has no chains; a test gives what they lead to")

    def lengths(self, rollouts):
        """Decisions, and none of a prompt."""
        return self.table.mask[torch.tensor(rollouts.inputs)].sum(1)

    def serialize(self, rollouts):
        return [{"row": row} for row in rollouts.inputs]

    def deserialize(self, prompts, states):
        rows = [state["row"] for state in states]
        samples = [self.table.sample(row, prompt) for row, prompt in zip(rows, prompts, strict=True)]
        return replace(self._unscored(rows), samples=samples)

    def _unscored(self, rows):
        return replace(self.table.rollouts(rows), rewards=None, accuracy=None, prompt=None)

    def view(self, rollouts, change):
        """A changed prompt is known by its text."""
        changed = {change(sample.prompt).text for sample in rollouts.samples}
        assert changed == {""}, "the view of these tests takes all words away"
        return replace(rollouts, inputs=[("view", row) for row in rollouts.inputs])

    def replay(self, rollouts, model, *, reference=False):
        seen = [isinstance(row, tuple) for row in rollouts.inputs]
        rows = torch.tensor([row[1] if isinstance(row, tuple) else row for row in rollouts.inputs])
        columns, width = self.table.columns, self.table.mask.shape[1]
        moved = {name: values[:, :width] for name, values in model(rows).items()}
        given = {name: values[rows] for name, values in columns.items()}
        if all(seen):
            return Replay(given["view"] + moved["view"])
        found = Replay(given["logp"] + moved["logp"])
        if "entropy" in given:
            found.entropy = given["entropy"] + moved["entropy"]
        if "value" in given:
            found.value = given["value"] + moved["value"]
        if "old_cross_entropy" in given:
            found.extras["old_cross_entropy"] = given["old_cross_entropy"] + moved["entropy"]
        if "log_ratio" in given:
            found.log_ratio = given["log_ratio"] + moved["logp"]
        for name in ("square_sum", "std"):
            if name in given:
                vars(found)[name] = given[name]
        found.extras |= {name: given[name] for name in ("segments", "policy_steps") if name in given}
        if "prediction" in given:  # as a denoiser: mean and distance to others are those of the prediction
            now = given["prediction"] + moved["prediction"]
            found.prediction = now.detach()[..., None]
            self._compare(found, now, rollouts)
        return found

    def _compare(self, found, now, rollouts):
        """Gaussian steps of width std (1 without one) around the prediction, and samples that it should match."""
        std = torch.ones_like(now) if found.std is None else found.std
        old = now.detach() if rollouts.old_prediction is None else rollouts.old_prediction[..., 0]
        found.divergence = (now - old).square() / (2 * std.square())
        if rollouts.ref_prediction is not None:
            apart = (now - rollouts.ref_prediction[..., 0]).square()
            found.reference_kl, found.extras["reference_error"] = apart / (2 * std.square()), apart
        found.extras["matching"] = MatchingTargets(
            noisy=torch.ones_like(now)[..., None],  # 1 = (1 - sigma) data + sigma noise
            prediction=now[..., None],
            old=old[..., None],
            data=torch.zeros_like(now)[..., None],
            sigma=torch.full_like(now, 0.5),
            signal=torch.full_like(now, 0.5),
            noise_space=False,
        )

    def segments(self, rollouts):
        return self.table.columns["segments"][torch.tensor(rollouts.inputs)].long()

    def decision_texts(self, rollouts):
        """What the table has as `pieces`, a text a decision."""
        return [self.table.pieces[row] for row in rollouts.inputs]

    def decision_ids(self, rollouts):
        return self.table.columns["numbers"][torch.tensor(rollouts.inputs)].long()

    def prompt_logp(self, rollouts):
        """What the table has as `inverse` of the first decision; else 0."""
        given = self.table.columns.get("inverse", torch.zeros(len(self.table.group), 1))
        return given[torch.tensor(rollouts.inputs), 0]

    def latents(self, rollouts):
        """What the table has as `latents`, [rollout, decision, number]; else the decision's number."""
        if "latents" in self.table.columns:
            return self.table.columns["latents"][torch.tensor(rollouts.inputs)]
        return torch.arange(self.table.mask.shape[1]).float().repeat(len(rollouts), 1)[..., None]

    def set_engine(self, engine):
        pass

    def counts(self):
        return {}

    def save(self, folder, state):
        folder.mkdir(parents=True)
        torch.save(state, folder / "weights.pt")


class Prompts(list):
    """A source of as many prompts."""

    def __init__(self, count, metadata=None):
        metadata = metadata or [{"level": 0, "kind": 0}] * count
        super().__init__(Prompt(str(i), "Which?", metadata=metadata[i % len(metadata)]) for i in range(count))


class GivenTask:
    def __init__(self, settings):
        self.settings, self.table = settings, None
        real = RewardSet(settings.rewards) if settings.rewards else None
        self.real = real
        self.reward_names = settings.names if real is None else list(real.names)
        self.reward_weights = settings.weights if real is None else list(real.weights)
        self.train = self.evaluation = Prompts(8)

    def _rows(self, samples):
        return [self.table.responses.index(sample.response) for sample in samples]

    def score(self, samples, group=None):
        return self.table.rewards[self._rows(samples)] if self.real is None else self.real.score(samples, group)

    def accuracy(self, samples):
        return self.table.accuracy[self._rows(samples)]

    def measures(self, samples, group):
        return {}


class Ledger:
    """In the place of the engine: one of `world` ranks that all hold the same. It steps down the gradient, `lr` times,
    and keeps it."""

    zero_stage = 0
    waited = 0.0

    def __init__(self, module, lr, world=1, rank=0):
        self.module, self.lr, self.world, self.rank = module, lr, world, rank
        self.gradients, self.losses, self.loss = [], [], 0.0  # of all updates, and of the one that is being made
        self.resets = []  # the number of updates before each reset of the optimizer

    def __call__(self, rows):
        return self.module(rows)

    def sum(self, value):
        return value * self.world

    def max(self, value):
        return int(value)

    def gather(self, value):
        return [value] * self.world

    def barrier(self):
        pass

    def mark(self, phase=None):
        pass

    def finite(self):
        return True

    def backward(self, loss):
        self.loss += float(loss.detach())
        loss.backward()

    def step(self):
        self.losses.append(self.loss)
        self.loss = 0.0
        found = {}
        with torch.no_grad():
            for name, p in self.module.named_parameters():
                found[name] = torch.zeros_like(p) if p.grad is None else p.grad.clone()
                p -= self.lr * found[name]
                p.grad = None
        self.gradients.append(found)
        norm = torch.stack([g.square().sum() for g in found.values()]).sum().sqrt()
        return bool(norm.isfinite()), float(norm)

    def reset_optimizer(self):
        self.resets.append(len(self.losses))

    def state(self):
        return dict(self.module.state_dict())


class Log(Run):
    """It keeps the metrics of every step, and of every evaluation."""

    def log(self, step, metrics):
        kept = "rows" if "time/step" in metrics else "evaluations"
        vars(self).setdefault(kept, []).append(metrics)


@dataclass
class Job:
    """A trainer whose policy, task and engine give and take the numbers of a table."""

    trainer: Trainer
    table: Table
    minibatches: list | None = None
    batch: Batch | None = None
    metrics: Metrics | None = None

    @property
    def module(self):
        return self.trainer.policy.module

    def move(self, **columns):
        """Sets weights, that is, what is added to columns of the table: [rollout][decision]."""
        for name, values in columns.items():
            values = self.table.padded(values).where(self.table.mask, 0.0)
            with torch.no_grad():
                vars(self.module)["_parameters"][name].zero_()[: values.shape[0], : values.shape[1]] = values
        return self

    def prepare(self, rollouts=None, step=0):
        """As the trainer does before the updates of a step. Returns the rollouts, with what became known of them."""
        rollouts = self.table.rollouts() if rollouts is None else rollouts
        self.metrics = Metrics(self.trainer.engine)
        shuffle = torch.Generator().manual_seed(0)
        self.minibatches, self.batch = self.trainer.preparation.minibatches(rollouts, step, shuffle, self.metrics)
        return rollouts

    def learn(self, minibatch=0):
        """One update on what was prepared. Returns its loss."""
        self.trainer.update(self.minibatches[minibatch], self.metrics)
        return self.trainer.engine.losses[-1]

    def gradient(self, name="logp", update=-1):
        """Of an update, [rollout][decision], in the shape of the table."""
        shape = self.table.mask.shape
        return self.trainer.engine.gradients[update][name][: shape[0], : shape[1]]

    def next(self, step=0):
        """The rollouts of a step, as the trainer gets them."""
        self.metrics = Metrics(self.trainer.engine)
        return self.trainer.collector.next(step, self.metrics)

    def close(self):
        self.trainer.run.close()


def job(folder, table, *overrides, world=1, rank=0, generator=None):
    """The trainer of the configuration given.yaml with these overrides."""
    config = load(GIVEN, [f"run_dir={folder}", *overrides])
    task = build.build_task(config)
    policy = build.build_policy(config, task)
    policy.table = task.table = table
    engine = Ledger(policy.module, config.optim.lr, world, rank)
    return Job(
        Trainer(config, policy, task, engine, Log(Path(folder), to_yaml(config), writes=False), generator), table
    )


def steps(table, **columns):
    """The record that a critic needs: one step a decision."""
    filled = {name: table.padded(values) for name, values in columns.items()}
    blank = torch.zeros(table.mask.shape)
    filled = {"values": blank, "rewards": blank, "bootstrap": blank, "terminated": blank, **filled}
    filled["terminated"] = filled["terminated"] == 1
    return Steps(mask=table.mask, **filled)


def close(found, expected, atol=2e-6):
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), atol=atol, rtol=0, check_dtype=False)
