"""Measurements from outside: taken once a step for those that list them, beside the rollouts or before the updates."""

import inspect
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar, Protocol

import pytest
import torch
from PIL import Image

from mmrl.build import check_abilities
from mmrl.cli.methods import DECISIONS, features_by_decision
from mmrl.errors import UserError
from mmrl.generation.sampling import Sampling
from mmrl.measurements.action_values import ActionValues
from mmrl.measurements.chains import Completions
from mmrl.measurements.implicit import ImplicitRewards
from mmrl.measurements.noise_values import NoiseQValues
from mmrl.measurements.q_values import QLearner, QValues, Transitions
from mmrl.measurements.teachers import PathTeacher, ReferenceTeacher, TaggedTeachers
from mmrl.policies.vlm.responses.teachers import suppress
from mmrl.policies.vlm.scorer import TokenScorer
from mmrl.prompts.counterfactual_views import Mirrored
from mmrl.prompts.views import View
from mmrl.protocols.abilities import AdvantageLabelling, Completing
from mmrl.protocols.auxiliary import AuxiliaryModules
from mmrl.protocols.measurement import CollectedMeasurement, PreparedContext, PreparedMeasurement
from mmrl.protocols.requirements import Capabilities, Needs, check, merge_needs
from mmrl.protocols.teachers import Taught, TaughtTokens
from mmrl.rollouts import Column, DecisionColumn, Prompt, Replay, Rollouts, Sample, get_alternatives
from mmrl.samplers.chain import derive_seed
from mmrl.settings import SettingsError, locate
from mmrl.terms.term import Shaper, Term
from tests.joints.parts import Table, close

HERE = "tests.joints.test_measurements"
HELD = {  # what a policy holds rather than does
    Taught: "teachers",
    TaughtTokens: "teachers",
    AdvantageLabelling: "advantage_labels",
}
POLICIES = {  # what the kinds of decision are made by
    "text token": "mmrl.policies.vlm.policy:VisionLanguagePolicy",
    "masked token": "mmrl.policies.discrete_diffusion.policy:DiscreteDiffusionPolicy",
    "code of an image": "mmrl.policies.autoregressive_image.policy:ImageTokenPolicy",
    "denoising step": "mmrl.policies.diffusion.policy:DiffusionPolicy",
    "action token": "mmrl.policies.vla.policy:VisionLanguageActionPolicy",
}
TAKEN = []


@dataclass(frozen=True)
class Length(CollectedMeasurement[Column]):
    """How long a response is, times a factor."""

    factor: float = 1.0
    cost: ClassVar[str] = "counting"

    @property
    def name(self):
        return f"length {self.factor}"

    def measure(self, rollouts, context):
        TAKEN.append((self.name, len(rollouts), context.step, context.group_size))
        return Column(self.factor * rollouts.mask.sum(1).float())


@dataclass(frozen=True)
class Unlikely(PreparedMeasurement[DecisionColumn]):
    """The log-likelihoods under a prompt without words."""

    cost: ClassVar[str] = "a forward pass"
    name: ClassVar[str] = "unlikely"

    def measure(self, rollouts, context):
        TAKEN.append((self.name, len(rollouts), context.step, context.group_size))
        return DecisionColumn(
            context.replayed(context.policy.view(rollouts, lambda prompt: Prompt(prompt.id, "")), "logp")
        )


class ByLength(Shaper):
    factor: float = 1.0

    @property
    def needs(self):
        return Needs(measurements=(Length(self.factor),))

    def shape(self, advantages, batch):
        return advantages + batch.measured(Length(self.factor)).values[:, None]


class Away(Term):
    @property
    def needs(self):
        return Needs(measurements=(Unlikely(),))

    def values(self, micro, replay):
        return replay.logp * micro.extras["unlikely"].values, {}


@dataclass(frozen=True)
class Chained(Length):
    requires: ClassVar[type] = Completing


def lengths(given, *shaping, sampling_policy="null"):
    table = Table(
        [[-1.0, -2.0, -0.5], [-1.0], [-1.0, -2.0], [-3.0]], group=[0, 0, 1, 1], rewards=[1.0, 1.0, 0.0, 0.0],
        view=[[-4.0, -5.0, -6.0], [-7.0, 0, 0], [-8.0, -9.0, 0], [-2.0, 0, 0]],
    )  # fmt: skip
    TAKEN.clear()
    options = [f"algorithm.shaping=[{', '.join(shaping)}]", f"algorithm.sampling_policy={sampling_policy}"]
    return given(table, *options, "algorithm.terms=['" + HERE + ":Away']")


def test_what_is_measured_reaches_its_part(given):
    """Rewards are equal in each group: all that an advantage has is its length, once plain and once tripled."""
    own = f"'{HERE}:ByLength'"
    made = lengths(given, own, own, f"{{type: {own}, factor: 3}}")
    rollouts = made.next(step=2)
    assert TAKEN == [("length 1.0", 4, 2, 2), ("length 3.0", 4, 2, 2)]  # equal ones once
    made.prepare(rollouts, step=2)
    assert TAKEN[2:] == [("unlikely", 4, 2, 2)]
    close(rollouts.advantages[:, 0], [15.0, 5.0, 10.0, 5.0])
    close(rollouts.extras["unlikely"].values, [[-4, -5, -6], [-7, 0, 0], [-8, -9, 0], [-2, 0, 0]])


def test_others_than_the_rollouts_are_seen_by_the_policy_that_made_them(given):
    """The present weights have moved, those that sample are still where the run began."""
    own = lengths(given, sampling_policy="{slope: 0, most: 0}")
    own.move(view=[[0.5, 0.5, 0.5], [0.5], [0.5, 0.5], [0.5]])
    close(own.prepare().extras["unlikely"].values[:, 0], [-4, -7, -8, -2])


class OfStep(View):
    """A prompt without words, which notes the steps that it was made for."""

    type: str = f"{HERE}:OfStep"

    def at(self, step):
        TAKEN.append(step)
        return self

    def change(self, prompt):
        return Prompt(prompt.id, "")


@pytest.mark.parametrize("gradient", ["true", "false"])
def test_a_view_is_that_of_the_step(given, gradient):
    TAKEN.clear()
    term = f'{{type: kl, against: {{type: view, gradient: {gradient}, view: "{HERE}:OfStep"}}}}'
    made = given(Table([[-1.0], [-1.0]], view=[[-2.0], [-2.0]]), "rollout.prompts=1", f"algorithm.terms=[{term}]")
    made.trainer.step = 3
    made.prepare(step=3)
    made.learn()
    assert set(TAKEN) == {3}


def test_nothing_is_measured_that_no_part_lists(given):
    made = given(Table([[-1.0]] * 4, group=[0, 0, 1, 1], rewards=[1.0, 0.0, 1.0, 0.0]))
    TAKEN.clear()
    rollouts = made.next()
    made.prepare(rollouts)
    assert TAKEN == [] and rollouts.extras == {}


def test_needs_are_put_together_without_doubles():
    one, other = Needs(measurements=(Length(), Unlikely())), Needs(measurements=(Length(2.0), Length()))
    whole = merge_needs([one, other])
    assert whole.measurements == (Length(), Unlikely(), Length(2.0))
    assert whole.collected == [Length(), Length(2.0)] and whole.prepared == [Unlikely()]
    assert Needs(measurements=(Chained(),)).required == {Completing}
    assert Needs(measurements=(Completions(),)).required == {Completing, "separate_chains"}


def test_what_a_measurement_requires_is_asked_of_the_decisions():
    asked, policy = [("algorithm.shaping.0", Needs(measurements=(Completions(),)))], Capabilities("model.type=own")
    refused = (
        "^algorithm.shaping.0 needs chains that can be completed .* which model.type=own does not have; change one"
    )
    with pytest.raises(SettingsError, match=refused):
        check(asked, policy)
    with pytest.raises(SettingsError, match="needs a separate denoising chain for each rollout"):
        check(asked, Capabilities("model.type=own", frozenset({Completing})))
    check(asked, Capabilities("model.type=own", frozenset({Completing, "separate_chains"})))


@pytest.mark.parametrize("decision", POLICIES)
def test_settings_offer_what_their_policy_has(decision):
    """The abilities that a kind of decision offers are methods of its policy."""
    policy, offered = (
        locate(POLICIES[decision], "policy"),
        [kind for kind in features_by_decision()[decision] if type(kind) is not str],
    )
    assert decision in DECISIONS and offered
    source = inspect.getsource(policy.__init__)
    assert [kind for kind in offered if kind in HELD and f"self.{HELD[kind]} = " not in source] == []
    assert [kind for kind in offered if kind not in HELD and not isinstance(policy, kind)] == []


def test_a_policy_that_lacks_what_its_settings_offer_is_refused(given):
    made = lengths(given)

    class Poor:
        pass

    lacking = "Poor lacks complete_steps of Completing, which its settings offer"
    with pytest.raises(UserError, match=f"^model.type=tests.joints.parts:GivenModel: {lacking}$"):
        check_abilities(made.trainer.config, Poor())


class Unknown(Protocol):
    def unknown(self): ...


@dataclass(frozen=True)
class Undeclared(Length):
    requires: ClassVar[type] = Unknown


class ByUndeclared(ByLength):
    @property
    def needs(self):
        return Needs(measurements=(Undeclared(),))


class Forgetful(ByLength):
    @property
    def needs(self):
        return Needs()


def test_an_ability_without_a_sentence_is_refused_by_its_name(given):
    with pytest.raises(UserError, match=r"algorithm.shaping.0 .*needs Unknown, which model.type=given does not have"):
        lengths(given, f"'{HERE}:ByUndeclared'")


def test_what_was_not_listed_was_not_measured(given):
    made = lengths(given, f"'{HERE}:Forgetful'")
    with pytest.raises(KeyError, match=r"length 1.0 has not been measured; list it in Needs.measurements"):
        made.prepare(made.next())


def test_what_is_known_of_decisions_is_blank_in_all_of_its_dimensions(given):
    made = lengths(given)
    known = DecisionColumn(torch.ones(4, 3, 5))
    blank = known.blank(made.table.rollouts([1]))
    assert blank.values.shape == (1, 3, 5) and not blank.values.any()
    assert DecisionColumn.concat([known, blank]).values.shape == (5, 3, 5)


class LeftPixel:
    """A teacher whose likeliest token is the left pixel of the picture that it sees, and the next one after it; token k
    has log p = -(k + 1) pixel."""

    module = None

    def seen(self, rollouts):
        return torch.tensor([sample.prompt.images[0].getpixel((0, 0)) for sample in rollouts.samples])[:, None, None]

    def top_k(self, rollouts, model, count):
        return (self.seen(rollouts) + torch.arange(count)).expand(*rollouts.mask.shape, count)

    def replay(self, rollouts, model):
        listed = get_alternatives(rollouts)
        return Replay(torch.zeros(rollouts.mask.shape), extras={"alternatives": -(listed + 1.0) * self.seen(rollouts)})


@pytest.mark.parametrize("count", [2, None])
def test_a_teacher_under_a_view_sees_a_prompt_that_is_changed_once(count):
    """Pictures with pixels 3 and 5, mirrored; twice, they would be as before."""
    picture = Image.new("L", (2, 1))
    picture.putdata([3, 5])
    prompt = Prompt("1", "Which?", images=(picture,))
    rollouts = Rollouts([Sample(prompt)] * 2, [0, 1], torch.tensor([0, 0]), torch.ones(2, 1, dtype=torch.bool))

    def view(viewed, change):
        return replace(viewed, samples=[replace(sample, prompt=change(sample.prompt)) for sample in viewed.samples])

    teachers = SimpleNamespace(policy=lambda folder, guidance: LeftPixel(), vocabulary=lambda: torch.arange(3))
    policy = SimpleNamespace(teachers=teachers, view=view)
    context = SimpleNamespace(policy=policy, step=0, micro_batches=[torch.tensor([1]), torch.tensor([0])])
    listed = PathTeacher(path="folder", view=Mirrored()).choices(rollouts, context, count)
    tokens = [5, 6] if count else [0, 1, 2]
    assert listed.values.tolist() == [[tokens]] * 2
    close(listed.logp, [[[-(token + 1.0) * 5 for token in tokens]]] * 2)


def test_a_teacher_gives_no_probability_to_what_the_student_cannot_sample():
    """Of six tokens the student suppresses one; the teacher's output matrix is padded to eight rows."""
    model = torch.nn.Module()
    head = torch.nn.Linear(2, 8, bias=False)
    vars(model).update(get_base_model=lambda: model, get_output_embeddings=lambda: head)
    scorer = TokenScorer(model, Sampling(), chunk=4)
    suppress(scorer, SimpleNamespace(tokenizer=range(6), suppressed=(1, 9)))
    assert scorer.suppressed.tolist() == list(scorer.sampling.suppressed) == [1, 6, 7]


def test_an_unknown_outcome_has_no_share_in_the_mean_loss():
    """Logits of 1 and 2 for a right and a wrong response; that of 3 is unknown and that of 4 is masked, so the mean is
    over two."""
    mask = torch.tensor([[True], [True], [True], [False]])
    rollouts = Rollouts([Sample(Prompt("1", "?"))] * 4, [0, 1, 2, 3], torch.zeros(4).long(), mask)
    rollouts.accuracy, rollouts.ref_logp = torch.tensor([1.0, 0.0, math.nan, 1.0]), torch.zeros(4, 1)
    logits, losses = torch.tensor([[1.0], [2.0], [3.0], [4.0]]), []
    policy = SimpleNamespace(replay=lambda micro, module: Replay(logits[micro.inputs]))
    module = SimpleNamespace(module=None, descend=lambda given, total: losses.extend(given))
    context = SimpleNamespace(
        policy=policy,
        modules=SimpleNamespace(get=lambda name, make, lr: module),
        micro_batches=[torch.tensor([0, 2]), torch.tensor([3, 1])],
        sum=lambda count: count,
    )
    scores = ImplicitRewards("accuracy", 1.0, 0.01, "after").measure(rollouts, context).values
    close(torch.stack(losses), [math.log1p(math.exp(-1)) / 2, math.log1p(math.exp(2)) / 2])
    close(scores, logits.where(mask, 0))


def test_each_observation_has_noise_of_its_own_however_few_are_encoded_at_once():
    """Five observations, of which two are encoded at once."""
    asked = []

    def denoise_prior(observations, seeds):
        asked.extend(zip(observations, seeds, strict=True))
        return SimpleNamespace(**dict.fromkeys(("observations", "noise", "chunks"), torch.zeros(len(seeds), 1)))

    head = SimpleNamespace(encoding_sizes=(1, 1), noise_size=1, denoise_prior=denoise_prior)
    context = SimpleNamespace(policy=SimpleNamespace(off_policy=head), micro_batches=[torch.arange(2)])
    by_noise, by_actions = NoiseQValues(values=None, updates=1)._pairs(list("abcde"), 7, context)
    assert asked == [(observation, derive_seed(7, i)) for i, observation in enumerate("abcde")]
    assert by_noise.shape == by_actions.shape == (5, 2)


def test_each_step_samples_actions_with_noise_of_its_own():
    """Two recorded steps in groups of their own, in the first training step and in the third, of a run with seed 3."""
    asked = []

    def resample(micro, rows, seeds, logp):
        asked.append(seeds)
        return SimpleNamespace(observations=torch.zeros(len(rows), 1), chunks=torch.ones(len(rows), 1), logp=None)

    def networks(modules, inputs, seed):
        return SimpleNamespace(module=SimpleNamespace(fixed=lambda pairs: pairs.double().T))

    values = SimpleNamespace(temperature=0.0, q_networks=networks, entropy_temperature=lambda modules: None)
    sample = Sample(Prompt("1", "?", metadata={"tail": None}))
    micro = Rollouts([sample] * 2, [0, 1], torch.tensor([-5, -6]), torch.ones(2, 1).bool())
    policy = SimpleNamespace(off_policy=SimpleNamespace(resample=resample))
    for step in (0, 2):
        context = SimpleNamespace(policy=policy, modules=None, seed=3, step=step)
        found = ActionValues(values, "mean").measure(micro, context)
        close(found.q, [0.5, 0.5])
    assert asked == [[derive_seed(derive_seed(derive_seed(3, step), 0), group) for group in (5, 6)] for step in (0, 2)]


def test_a_tag_that_is_a_number_selects_its_teacher():
    """Levels 3, none and 4; the keys of `by_tag` are texts."""
    levels: list[dict] = [{"level": 3}, {}, {"level": 4}]
    samples = [Sample(Prompt(str(i), "?", metadata=metadata)) for i, metadata in enumerate(levels)]
    rollouts = Rollouts(samples, [0, 1, 2], torch.zeros(3).long(), torch.ones(3, 1).bool())
    context = replace(PreparedContext(*[None] * 11), micro_batches=[torch.tensor([2, 1]), torch.tensor([0])])
    teacher = TaggedTeachers(tag="level", by_tag={"3": ReferenceTeacher(), "4": ReferenceTeacher()})
    found = [
        (mask.tolist(), [rows.tolist() for rows in own.micro_batches])
        for _, mask, own in teacher._split(rollouts, context)
    ]
    assert found == [([True, False, False], [[0]]), ([False, False, True], [[2]])]


def test_estimates_of_q_are_those_before_the_last_update_of_a_step():
    """Two updates in one training step are one in each of two: the estimates are those of the second."""
    numbers, ones = torch.arange(8.0).view(4, 2) / 8, torch.ones(4, dtype=torch.float64)
    transitions = Transitions(
        numbers,
        numbers.flip(0)[:, :1],
        reward=torch.tensor([1.0, 0.0, 2.0, 0.0]).double(),
        discount=ones / 2,
        terminated=torch.tensor([False, True, False, False]),
        known=ones.bool(),
        next_observation=numbers + 1,
        copies=ones.long(),
    )

    def estimates(updates, steps):
        values = QValues(0.5, 1.0, members=2, width=4, lr=0.1, tau=0.5, updates=updates, expectile=0.8)
        policy = SimpleNamespace(off_policy=None)
        context = SimpleNamespace(policy=policy, modules=AuxiliaryModules(), seed=0, step=0, sum=lambda value: value)
        return [QLearner(values, context)._update(transitions, transitions.pairs[:2]) for _ in range(steps)]

    ((both, proposed),), ((first, _), (second, proposed_then)) = estimates(2, 1), estimates(1, 2)
    close(both, second)
    close(proposed, proposed_then)
    assert (both - first)[:, 0].abs().max() > 1e-3
