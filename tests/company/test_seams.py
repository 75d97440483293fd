"""What comes next, added from outside without touching a file of the package: a class each, on real tiny models."""

import io
import json
import shutil
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
from pydantic import PrivateAttr

from mmrl.algorithms.algorithm import RewardedAlgorithm
from mmrl.algorithms.grpo import GRPO
from mmrl.build import load_policy
from mmrl.collection.extra_sources import ExtraSource
from mmrl.protocols.abilities import ContinuingResponses, DecisionTexts, DifferentiableActions, Storing, TopK
from mmrl.protocols.measurement import CollectedMeasurement, PreparedMeasurement
from mmrl.protocols.requirements import Needs
from mmrl.rollouts import ALTERNATIVES, EXTRA, REPLAYED, Column, DecisionColumn
from mmrl.settings import option
from mmrl.tasks.visual_qa.tiny import model as tiny_model
from mmrl.terms.term import Shaper, Term
from mmrl.training.metrics import Metrics
from tests.joints.parts import Table, close, job
from tests.whole_runs.parts import ROBOTS, distance, final, make, metrics, release, timeless, train

pytestmark = pytest.mark.usefixtures("alone")
HERE = "tests.company.test_seams"


def goes_on_exactly(folder, options):
    """A run of four steps, and one of two that goes on for two more, which equals it; the metrics of its steps."""
    whole, parts = folder / "whole", folder / "parts"
    train(whole, *options)
    train(parts, *options, "steps=2", "checkpoint.every=2")
    train(parts, *options, "checkpoint.every=2", resume=True)
    rows, again = ([row for row in timeless(metrics(path)) if "loss" in row] for path in (whole, parts))
    assert len(rows) == 4 and again == rows
    assert distance(final(whole), final(parts)) == 0
    return rows


def prepared(trainer, step=0):
    """A step's rollouts, and its micro-batches as they are learned from."""
    made = Metrics(trainer.engine)
    rollouts = trainer.collector.next(step, made)
    shuffle = torch.Generator().manual_seed(0)
    minibatches, batch = trainer.preparation.minibatches(rollouts, step, shuffle, made)
    return batch, minibatches


# --- a teacher's log-probabilities ---


@cache
def teacher():
    """Another tiny model, of weights of its own."""
    return {}


@dataclass(frozen=True)
class TeacherLikelihoods(PreparedMeasurement[DecisionColumn]):
    """How likely a teacher finds the tokens of the student, [rollout, decision]."""

    seed: int
    cost: ClassVar[str] = "a forward pass of the teacher"
    name: ClassVar[str] = "teacher"

    def measure(self, rollouts, context):
        if self.seed not in teacher():
            teacher()[self.seed] = teacher_of(self.seed)
        policy = teacher()[self.seed]
        with torch.no_grad():
            parts = [policy.replay(rollouts.select(rows), policy.module).logp for rows in context.micro_batches]
        return DecisionColumn(torch.cat(parts)[torch.cat(context.micro_batches).argsort()])


def teacher_of(seed):
    import tempfile

    folder = tempfile.mkdtemp()
    tiny_model.build(folder, seed=seed)
    made = make(tempfile.mkdtemp())
    try:
        return load_policy(made.config, made.task, folder)
    finally:
        release(made)
        shutil.rmtree(folder)


class Distilled(Term):
    """The reverse KL to the teacher, of single samples: logp - teacher, with the gradient of the score function."""

    coefficient: float = option(1.0, "weight")

    @property
    def needs(self):
        return Needs(measurements=(TeacherLikelihoods(7),))

    def values(self, micro, replay):
        gap = replay.logp - micro.extras["teacher"].values.to(replay.logp)
        return self.coefficient * gap.detach() * replay.logp, {"own/gap": gap.detach()}


def test_a_student_comes_nearer_to_its_teacher(tmp_path):
    """Its rewards are worth nothing: what it learns is the teacher's."""
    options = ["steps=16", "optim.lr=0.003", "rollout.prompts=16", "rollout.max_response_length=4"]
    options += ["task.rewards=[{name: 'tests.whole_runs.parts:spread', weight: 0.0}]", "engine.micro_batch=64"]
    train(tmp_path, *options, f"algorithm={{type: grpo, surrogate: reinforce, terms: ['{HERE}:Distilled']}}")
    gaps = [row["own/gap"] for row in metrics(tmp_path) if "own/gap" in row]
    assert len(gaps) == 16 and sum(gaps[-4:]) < 0.7 * sum(gaps[:4]) and gaps[0] > 0


# --- spans of text ---


@dataclass(frozen=True)
class Vowels(CollectedMeasurement[DecisionColumn]):
    """A judge's value of each token: the share of vowels in the text that it adds."""

    requires: ClassVar[type] = DecisionTexts
    cost: ClassVar[str] = "a judge"
    name: ClassVar[str] = "vowels"

    def measure(self, rollouts, context):
        found = torch.zeros(rollouts.mask.shape)
        for row, pieces in enumerate(context.policy.decision_texts(rollouts)):
            for place, piece in enumerate(pieces):
                found[row, place] = sum(letter in "aeiou" for letter in piece) / max(1, len(piece))
        return DecisionColumn(found)


class BySpan(Shaper):
    @property
    def needs(self):
        return Needs(measurements=(Vowels(),))

    def shape(self, advantages, batch):
        return advantages + batch.measured(Vowels()).values


def test_spans_of_a_text_reach_their_tokens(tmp_path):
    trainer = make(
        tmp_path,
        f"algorithm.shaping=['{HERE}:BySpan']",
        "task.rewards=[{name: 'tests.whole_runs.parts:spread', weight: 0.0}]",
    )
    batch, _ = prepared(trainer)
    pieces = trainer.policy.decision_texts(batch.rollouts)
    release(trainer)
    assert any(len(row) > 1 and row[0] != row[1] for row in pieces)
    for row, sample in zip(pieces, batch.rollouts.samples, strict=True):
        assert "".join(row) == sample.response
    first = pieces[0][0]
    share = sum(letter in "aeiou" for letter in first) / max(1, len(first))
    close(batch.rollouts.advantages[0, 0], share)


# --- a judge of observations ---


@dataclass(frozen=True)
class Brightness(CollectedMeasurement[Column]):
    """What a judge says of the frames of an episode: how bright the first one is."""

    needs_frames: ClassVar[bool] = True
    cost: ClassVar[str] = "a judge of films"
    name: ClassVar[str] = "brightness"

    def measure(self, rollouts, context):
        return Column(torch.tensor([float(sample.episode.frames[0].mean()) for sample in rollouts.samples]))


class ByBrightness(Shaper):
    @property
    def needs(self):
        return Needs(measurements=(Brightness(),))

    def shape(self, advantages, batch):
        return advantages + batch.measured(Brightness()).values[:, None]


def test_a_judge_sees_what_a_robot_saw(tmp_path):
    """The simulator's first frame is as bright as its seed says, modulo 256: another one for each prompt."""
    plain, judged = (
        make(tmp_path / name, *options, "algorithm.scale=none", "action.chunk=1", base=ROBOTS)
        for name, options in (("plain", []), ("judged", [f"algorithm.shaping=['{HERE}:ByBrightness']"]))
    )
    batches = [prepared(trainer)[0].rollouts for trainer in (plain, judged)]
    release(plain)
    release(judged)
    assert all(sample.episode.frames is None for sample in batches[0].samples)  # who does not ask has no film
    seeds = torch.tensor([float(sample.prompt.metadata["seed"] % 256) for sample in batches[1].samples])
    assert len(seeds.unique()) == 4
    close(batches[1].advantages[:, 0] - batches[0].advantages[:, 0], seeds, atol=1e-4)


# --- forks inside a group ---


class Forks(ExtraSource):
    """The first rollout of every group goes on anew from its middle, as one more member of the group."""

    _context: Any = PrivateAttr()

    @property
    def needs(self):
        return Needs(offers=frozenset({ContinuingResponses}))

    @property
    def rollouts(self):
        return 0

    @property
    def in_group(self):
        return 1

    def start(self, context):
        self._context = context

    def make(self, fresh):
        context = self._context
        rows = torch.tensor([(fresh.group == group).nonzero()[0].item() for group in fresh.group.unique()])
        lengths = fresh.mask[rows].sum(1) // 2
        made = context.policy.continue_from(fresh.select(rows), lengths.tolist(), [1000 + row for row in rows.tolist()])
        made.group, made.prompt = fresh.group[rows], fresh.prompt[rows]
        made.origin = torch.full((len(rows),), EXTRA)
        made.rewards = context.task.score(made.samples, made.group)
        made.accuracy = context.task.accuracy(made.samples)
        places = torch.arange(made.mask.shape[1])
        own = torch.arange(len(fresh), len(fresh) + len(rows))[:, None]
        made.nodes = torch.where(places < lengths[:, None], rows[:, None], own)
        return made


def test_a_fork_is_compared_where_it_differs(tmp_path):
    """The group's rewards are 1 and 0, its fork's 0. The first decision of rows 0 and 2 is one, worth a half: against 0
    that is 1/4 and -1/4; later it is each for itself, 1, 0 and 0, of mean 1/3."""
    table = Table([[-1.0, -1.0], [-2.0, -2.0], [-1.0, -3.0]], group=[0, 0, 1], rewards=[1.0, 0.0, 0.0])
    made = job(tmp_path, table, f"rollout.extras=['{HERE}:Forks']", "algorithm.scale=none", "rollout.prompts=1")
    made.trainer.policy.continues = {(0, 1): [2]}
    rollouts = made.next()
    assert rollouts.nodes.tolist() == [[0, 0], [1, 1], [0, 2]] and rollouts.group.tolist() == [0, 0, 0]
    made.prepare(rollouts)
    close(rollouts.advantages, [[0.25, 2 / 3], [-0.25, -1 / 3], [0.25, -1 / 3]])
    made.close()


def test_forks_train(tmp_path):
    train(tmp_path, f"rollout.extras=['{HERE}:Forks']", "engine.micro_batch=10")
    rows = [row for row in metrics(tmp_path) if "loss" in row]
    assert len(rows) == 4 and all(row["grad_norm"] > 0 and row["updates_skipped"] == 0 for row in rows)


# --- a second trained module ---


class Critic(torch.nn.Module):
    """How much a response of so many tokens will earn."""

    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(1, 1)

    def forward(self, length):
        return self.line(length / 4)[:, 0]


class Learned(Shaper):
    """A network that learns what responses of a length earn, in place of the group's mean."""

    @property
    def needs(self):
        return Needs()

    def shape(self, advantages, batch):
        lengths, earned = batch.column("length").float()[:, None], batch.combined_rewards()
        critic = batch.modules.get(self.key, Critic, lr=0.05)
        expected = critic.predict(lengths)
        for _ in range(20):
            critic.update((critic.module(lengths) - earned).square().mean())
        errors = {"before": expected, "after": critic.predict(lengths)}
        batch.report({f"own/{name}": float((found - earned).square().mean()) for name, found in errors.items()})
        return batch.local(earned - expected)[:, None].expand(advantages.shape)


def test_a_second_network_learns_and_goes_on_from_a_checkpoint(tmp_path):
    rows = goes_on_exactly(tmp_path, [f"algorithm.shaping=['{HERE}:Learned']"])
    assert all(row["own/after"] < row["own/before"] for row in rows)


# --- a distribution's top k at replay ---


@dataclass(frozen=True)
class Alternatives(PreparedMeasurement[DecisionColumn]):
    """The likeliest tokens of every decision before the updates, [rollout, decision, k]."""

    requires: ClassVar[type] = TopK
    cost: ClassVar[str] = "a forward pass"
    name: ClassVar[str] = ALTERNATIVES.name

    def measure(self, rollouts, context):
        return DecisionColumn(context.policy.top_k(rollouts, context.policy.module, 40))


class Sharpened(Term):
    """The likeliest tokens of a decision shall be likely."""

    @property
    def needs(self):
        return Needs(measurements=(Alternatives(),))

    def values(self, micro, replay):
        covered = ALTERNATIVES.of(replay).exp().sum(-1)
        return -covered, {"own/covered": covered.detach()}


def test_the_likeliest_tokens_of_a_decision_have_a_gradient(tmp_path):
    options = ["steps=6", "optim.lr=0.01", "task.rewards=[{name: random}]", f"algorithm.terms=['{HERE}:Sharpened']"]
    trainer = make(tmp_path, *options)
    _, minibatches = prepared(trainer)
    micro = minibatches[0][0]
    replay = trainer.policy.replay(micro, trainer.policy.module)
    said, numbers = ALTERNATIVES.of(replay), trainer.policy.decision_ids(micro)
    best = micro.extras[ALTERNATIVES.name].values
    assert said.requires_grad and said.shape == best.shape == (*micro.mask.shape, 40)
    known = said.detach()[micro.mask]
    assert (known.diff(dim=1) <= 1e-6).all()  # best first
    assert (known.exp().sum(1) <= 1 + 1e-5).all() and (known < 0).all()
    same = best == numbers[..., None]  # where the token itself is among them, it is as likely as it is
    assert same[micro.mask].any()
    close(said.detach()[same], replay.logp.detach()[..., None].expand(said.shape)[same], atol=1e-5)
    release(trainer)
    train(tmp_path / "run", *options)
    covered = [row["own/covered"] for row in metrics(tmp_path / "run") if "own/covered" in row]
    assert covered[-1] > covered[0] + 0.02


# --- successor values ---


@dataclass(frozen=True)
class Successors(PreparedMeasurement[DecisionColumn]):
    """What the critic expects after each token, [rollout, decision]; 0 after the last."""

    cost: ClassVar[str] = "a forward pass of the critic"
    name: ClassVar[str] = "successors"

    def measure(self, rollouts, context):
        value = context.replayed(rollouts, "value").cpu().where(rollouts.mask, 0.0)
        return DecisionColumn(torch.cat([value[:, 1:], torch.zeros(len(value), 1)], 1))


class OneStep(Shaper):
    """r_t + V(s_{t+1}) - V(s_t), the reward coming with the last token."""

    @property
    def needs(self):
        return Needs(offers=frozenset({"critic"}), measurements=(Successors(),))

    def shape(self, advantages, batch):
        rollouts = batch.rollouts
        last = rollouts.mask & (rollouts.mask.cumsum(1) == rollouts.mask.sum(1, keepdim=True))
        reward = batch.local(batch.combined_rewards())[:, None].where(last, 0.0)
        values = rollouts.extras["steps"].values
        return (reward + batch.measured(Successors()).values - values).where(rollouts.mask, 0.0)


def test_values_of_what_follows_a_decision(tmp_path):
    """Values are 1, 2, 4 and 3, 5; rewards 10 and 20."""
    table = Table([[-1.0, -1.0, -1.0], [-1.0, -1.0]], group=[0, 0], rewards=[10.0, 20.0], value=[[1, 2, 4], [3, 5]])
    made = job(
        tmp_path,
        table,
        "algorithm.type=ppo",
        "rollout.prompts=1",
        "rollout.group_size=2",
        f"algorithm.shaping=['{HERE}:OneStep']",
    )
    rollouts = made.prepare()
    close(rollouts.advantages, [[1, 2, 6], [2, 15, 0]])
    made.close()


# --- a ring of what this rank saw ---


class Ring(ExtraSource):
    """The last rollouts of this rank alone, which come again without a part in their groups."""

    size: int = option(8, "rollouts that are kept", ge=1)
    _context: Any = PrivateAttr()
    _kept: list = PrivateAttr(default_factory=list)

    @property
    def needs(self):
        return Needs(offers=frozenset({Storing}), statistics=frozenset({"logp"}))

    @property
    def rollouts(self):
        return 4

    def start(self, context):
        self._context, self._kept = context, []

    def make(self, fresh):
        count = self.rollouts // self._context.rank_and_world[1]
        chosen = (self._kept or [self._row(fresh, row) for row in range(count)])[-count:]
        prompts = [self._context.prompts[row["prompt"]] for row in chosen]
        made = self._context.policy.deserialize(prompts, [row["state"] for row in chosen])
        made.group = -1 - torch.arange(count) - count * self._context.rank_and_world[0]
        made.prompt = torch.tensor([row["prompt"] for row in chosen])
        made.origin = torch.full((count,), REPLAYED)
        made.rewards = torch.full((count, fresh.rewards.shape[1]), torch.nan)
        return made

    def _row(self, rollouts, row):
        one = rollouts.select(torch.tensor([row]))
        return {"prompt": int(one.prompt[0]), "state": self._context.policy.serialize(one)[0]}

    def observe(self, batch):
        own = (batch.rollouts.origin != REPLAYED).nonzero().flatten().tolist()
        self._kept = [*self._kept, *(self._row(batch.rollouts, row) for row in own)][-self.size :]

    def rank_state(self):
        return {"kept": self._kept}

    def load_rank(self, state):
        self._kept = state["kept"]


def test_a_ring_belongs_to_its_rank(tmp_path):
    kept = []
    for rank in (0, 1):
        table = Table([[-1.0 - rank]] * 4, group=[0, 0, 1, 1], rewards=[1.0, 0.0, 1.0, 0.0])
        made = job(tmp_path / str(rank), table, f"rollout.extras=['{HERE}:Ring']", world=2, rank=rank)
        rollouts = made.next()
        made.prepare(rollouts)
        made.trainer.collector.observe(made.batch)
        shared, own = made.trainer.collector.state()
        assert shared["extras"] == [{}] and len(own["extras"][0]["kept"]) == 2
        buffer = io.BytesIO()
        torch.save(own, buffer)
        buffer.seek(0)
        made.trainer.collector.load(json.loads(json.dumps(shared)), torch.load(buffer, weights_only=True))
        kept.append([row["prompt"] for row in made.trainer.collector.extras.sources[0]._kept])
        made.close()
    assert kept[0] != kept[1]


def test_a_ring_trains_and_goes_on_exactly(tmp_path):
    rows = goes_on_exactly(tmp_path, [f"rollout.extras=['{HERE}:Ring']", "engine.micro_batch=10"])
    assert all(row["grad_norm"] > 0 for row in rows)


# --- gradients through actions ---


class Towards(RewardedAlgorithm):
    """Actions go down the gradient of a cost that is differentiable: their squared distance from a target."""

    target: float = option(0.5, "of every number of an action")
    _policy: Any = PrivateAttr(None)

    @property
    def base_needs(self):
        return Needs(offers=frozenset({DifferentiableActions}))

    def start(self, policy, engine):
        self._policy = policy

    def advantages(self, batch):
        return torch.zeros(len(batch.rollouts))

    def loss(self, micro, replay):
        raise NotImplementedError

    def objective(self, micro, replay, over):
        away = (self._policy.actions(micro) - self.target).square().mean()
        return away, {"own/away": away.detach().expand(micro.mask.shape)}


def test_a_cost_of_actions_is_climbed_down(tmp_path):
    options = [
        "steps=8",
        "optim.lr=0.01",
        f"algorithm={{type: '{HERE}:Towards'}}",
        "action.head={type: gaussian, width: 16, layers: 1}",
    ]
    train(tmp_path, *options, base=ROBOTS)
    away = [row["own/away"] for row in metrics(tmp_path) if "own/away" in row]
    assert len(away) == 8 and away[-1] < 0.5 * away[0]


# --- a label in the prompt ---


class Labelled(GRPO):
    """Responses are learned as answers to prompts that say whether they are good."""

    _policy: Any = PrivateAttr(None)

    def start(self, policy, engine):
        self._policy = policy

    def prepare(self, batch):
        super().prepare(batch)
        rollouts = batch.rollouts
        good = (rollouts.advantages.sum(1) > 0).tolist()
        labelled = [
            replace(sample, prompt=replace(sample.prompt, text=f"{sample.prompt.text} {'two' if well else 'one'}"))
            for sample, well in zip(rollouts.samples, good, strict=True)
        ]
        rollouts.inputs = self._policy.view(replace(rollouts, samples=labelled), lambda prompt: prompt).inputs
        batch.report({"own/good": sum(good) / len(good)})


def test_a_label_stands_in_the_prompt_that_is_learned_from(tmp_path):
    options = [f"algorithm={{type: '{HERE}:Labelled'}}", "algorithm.surrogate=reinforce"]
    plain, labelled = make(tmp_path / "plain"), make(tmp_path / "labelled", *options)
    before, _ = prepared(plain)
    batch, minibatches = prepared(labelled)
    good = batch.rollouts.advantages.sum(1) > 0
    assert 0 < good.sum() < len(good)
    texts = [labelled.policy.tokens.tokenizer.decode(row.prompt) for row in batch.rollouts.inputs]
    assert [("two" in text, "one" in text) for text in texts] == [(bool(well), not bool(well)) for well in good]
    one, other = before.rollouts.inputs[0], batch.rollouts.inputs[0]
    assert torch.equal(one.response, other.response) and len(other.prompt) > len(one.prompt)
    learned = [len(row.prompt) for part in minibatches for micro in part for row in micro.inputs]
    assert sorted(learned) == sorted(len(row.prompt) for row in batch.rollouts.inputs)
    release(plain)
    release(labelled)
    train(tmp_path / "run", *options)
    rows = [row for row in metrics(tmp_path / "run") if "loss" in row]
    assert len(rows) == 4 and all(row["grad_norm"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("algorithm.shaping=['{}:BySpan']", "needs responses whose text is known decision by decision"),
        ("algorithm.terms=['{}:Sharpened']", "needs the likeliest alternatives to each of its decisions"),
        ("rollout.extras=['{}:Forks']", "needs responses that can be resampled from a decision on"),
    ],
)
def test_what_a_policy_can_not_do_is_refused_before_it_is_loaded(tmp_path, part, message):
    from mmrl.config import load
    from mmrl.errors import UserError

    with pytest.raises(UserError, match=message):
        load(ROBOTS, [f"run_dir={tmp_path}", part.format(HERE)])
