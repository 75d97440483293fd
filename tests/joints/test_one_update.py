"""What becomes of parts in a job of one update a step, where all ratios are 1: what they say of it is so, and is told
before the start."""

import pytest

from mmrl.algorithms.surrogates.surrogate import Surrogate
from mmrl.cli.methods import describe_methods
from mmrl.config import configure, load
from mmrl.preflight.quick import probe_decay, probe_quickly, probe_set_distances, probe_unscaled_steps
from mmrl.settings import choose, kind_of
from mmrl.terms.losses.kl import OtherPolicy
from mmrl.terms.term import Term
from tests.joints.parts import Table, close

# Groups of two; unequal lengths, rewards and likelihoods. Denoising steps and tokens at once.
TABLE = {
    "group": [0, 0, 1, 1],
    "rewards": [1.0, 0.0, 0.2, 0.5],
    "entropy": [[0.5, 0.7], [1.1], [0.9, 0.2, 0.4], [0.3, 0.6]],
    "prediction": [[0.5, -0.7], [0.1], [0.9, 0.2, -0.4], [0.3, 0.6]],
    "view": [[-1.0, -1.0], [-1.0], [-1.0, -1.0, -1.0], [-1.0, -1.0]],
}
LOGP = [[-0.5, -2.0], [-1.0], [-0.1, -3.0, -0.7], [-1.5, -0.2]]
OPTIONS = {
    "divergence_mask": "bound: 0.1",
    "sequence_mask": "bound: 0.1",
    "teacher_ratio": "teacher: {view: no_text}",
}
JOB = ["rollout.prompts=2", "rollout.group_size=2", "algorithm.reduce=sequence_mean"]


def written(name):
    return f"{{type: {name}{', ' + OPTIONS[name] if name in OPTIONS else ''}}}"


def started(given, *options):
    return given(Table(LOGP, **TABLE), *JOB, *options)


def gradient(given, *options):
    made = started(given, *options)
    made.prepare()
    made.learn()
    return made.gradient()


def alarms(made):
    return [alarm.text for alarm in probe_quickly(made.trainer.config, made.trainer.task)]


@pytest.mark.parametrize("name", [name for name in Surrogate.kinds if name not in ("reinforce", "by_part")])
def test_a_surrogate_says_whether_its_gradient_is_that_of_reinforce(given, name):
    """Whether it is, is computed: at the default of one update a step, from unequal advantages of both signs."""
    own, plain = (gradient(given, f"algorithm.surrogate={written(kind)}") for kind in (name, "reinforce"))
    assert plain.abs().max() > 0.05
    same = bool((own - plain).abs().max() < 1e-6)
    assert same == kind_of(Surrogate, name).at_one_update.startswith(
        "the ratio is 1 and the gradient is that of reinforce"
    )
    told = alarms(started(given, f"algorithm.surrogate={written(name)}"))
    assert len(told) == same
    assert all(text.startswith(f"algorithm.surrogate={name} with one update per step: the ratio is 1") for text in told)
    assert ("at one update: the ratio is 1" in "\n".join(describe_methods(name))) == same


@pytest.mark.parametrize(
    "term", ["{type: kl, against: old}", "{type: kl, against: old, estimator: k2}", "likelihood_drop"]
)
def test_a_term_that_says_so_has_no_gradient(given, term):
    own, none = (gradient(given, f"algorithm.terms=[{terms}]") for terms in (term, ""))
    close(own, none)
    told = alarms(started(given, f"algorithm.terms=[{term}]"))
    assert len(told) == 1 and told[0].startswith("algorithm.terms.0 (") and " with one update per step: " in told[0]
    assert told[0].endswith("set algorithm.minibatches or algorithm.epochs above 1")


@pytest.mark.parametrize(
    "term", ["{type: likelihood, of: own_positive}", "{type: kl, against: {type: view, view: {type: no_text}}}"]
)
def test_a_term_that_does_not_say_so_has_one(given, term):
    own, none = (gradient(given, f"algorithm.terms=[{terms}]") for terms in (term, ""))
    assert (own - none).abs().max() > 1e-3
    assert alarms(started(given, f"algorithm.terms=[{term}]")) == []


TOLD = [
    ("algorithm.surrogate=clip", 1),
    ("algorithm.surrogate={high: 0.3}", 1),
    ("algorithm.surrogate=reinforce", 0),
    ("algorithm.target_kl=0.1", 1),
    ("algorithm.reduce=token_mean", 0),  # nobody chose the clip
    ("algorithm.terms=[{type: of_part, part: text, term: {type: kl, against: old}}]", 1),
    ("algorithm.terms=[{type: kl, against: old, weighting: {type: covariance, share: 0.3}}]", 1),
    ("algorithm.terms=[{type: kl, weighting: {type: covariance, share: 0.3}}]", 0),
    ("algorithm.surrogate={type: by_part, text: clip, image: group_expectation}", 1),
    ("algorithm.surrogate={type: by_part, text: reinforce, image: reinforce}", 0),
]
MOVES = [
    "algorithm.epochs=2",
    "algorithm.minibatches=2",
    "algorithm.sampling_policy={slope: 0.1}",
    "rollout.extras=[success_replay]",
]


@pytest.mark.parametrize(("options", "count"), [([], 1), (["algorithm.epochs=2"], 0)])
def test_a_clip_of_values_that_have_not_moved_is_told(given, options, count):
    table = Table(LOGP, **TABLE, value=[[0.1] * len(row) for row in LOGP])
    made = given(table, *JOB[:1], "rollout.group_size=1", "algorithm={type: ppo, value_clip: 0.2}", *options)
    told = [text for text in alarms(made) if text.startswith("algorithm.value_clip with one update per step")]
    assert len(told) == count


@pytest.mark.parametrize(("option", "count"), TOLD)
def test_a_part_that_is_chosen_and_does_nothing_is_told(given, option, count):
    assert len(alarms(started(given, option))) == count


@pytest.mark.parametrize("move", MOVES)
def test_where_ratios_move_nothing_is_told(given, move):
    chosen = ["algorithm.surrogate=clip", "algorithm.terms=[{type: kl, against: old}]", "algorithm.target_kl=0.1"]
    assert alarms(started(given, *chosen)) and alarms(started(given, *chosen, move)) == []


def test_a_part_within_another_is_the_one_that_is_told(given):
    told = alarms(started(given, "algorithm.surrogate={type: by_part, text: soft, image: reinforce}"))
    assert "text: the ratio is 1 and the gradient is that of reinforce, whatever tau; it acts" in told[0]
    assert "image" not in told[0]


def test_the_other_policy_of_kl_says_it_in_its_description():
    assert "at one update: the ratio is 1: the divergence is 0" in "\n".join(describe_methods("old"))
    assert [name for name in OtherPolicy.kinds if kind_of(OtherPolicy, name).at_one_update] == ["old"]
    assert [name for name in Term.kinds if kind_of(Term, name).at_one_update] == ["likelihood_drop"]
    assert choose(Term, {"type": "kl", "against": "old"}).note_at_one_update


# --- a lambda by length ---

DECAY = "algorithm={type: ppo, lam: {type: by_length, scale: %s}}"


@pytest.mark.parametrize(
    ("length", "scale", "told"), [(20, 0.05, True), (21, 0.05, False), (8, 0.125, True), (8, 0.2, False)]
)
def test_a_lambda_that_is_0_for_the_longest_response_is_told(length, scale, told):
    """1 - 1 / (scale x length) of VAPO is 0 up to 1 / scale tokens."""
    options = [f"rollout.max_response_length={length}", DECAY % scale]
    found = [alarm.text for alarm in probe_decay(configure({"run_dir": "unset"}, options))]
    assert len(found) == told
    assert all(f"has {length} steps (rollout.max_response_length)" in text for text in found)
    assert all(f"algorithm.lam.scale above {1 / length:.3g}" in text for text in found)


@pytest.mark.parametrize(("horizon", "chunk", "told"), [(40, 2, True), (41, 2, False)])
def test_steps_of_a_robot_are_chunks(horizon, chunk, told):
    options = ["model.type=vision_language_action", f"action.horizon={horizon}", f"action.chunk={chunk}", DECAY % 0.05]
    found = [alarm.text for alarm in probe_decay(configure({"run_dir": "unset"}, options))]
    assert len(found) == told and all("has 20 steps (action.horizon)" in text for text in found)


def test_another_lambda_is_not_told():
    for algorithm in ("{type: ppo, lam: 0}", "grpo"):
        options = ["rollout.max_response_length=8", f"algorithm={algorithm}"]
        assert list(probe_decay(configure({"run_dir": "unset"}, options))) == []


# --- bounds that stop nothing although a step has several updates, and rewards of too few images ---

CPS = ["run_dir=unset", "algorithm.epochs=2", "denoising.likelihood.transition.logp=squared_error"]
ACTIONS = ["run_dir=unset", "algorithm.epochs=2", "algorithm.surrogate={low: 1e-5, high: 0.2}"]
FLOW = "action.head={type: flow, likelihood: {type: chain, transition: {type: cps}}}"


def test_bounds_that_stop_no_unscaled_step_are_told():
    (found,) = probe_unscaled_steps(load("image_digits_cps", CPS))
    assert found.severity == "warned"
    assert found.text == (
        "denoising.likelihood.transition.logp=squared_error gives log-ratios that are 2 std^2 times those of a "
        "density, so that algorithm.surrogate's bounds low=0.001 and high=0.001 stop hardly any step; set both to "
        "1e-5 as flow_grpo does, or denoising.likelihood.transition.logp=density"
    )
    (found,) = probe_unscaled_steps(load("manipulation_tabletop_flow", [*ACTIONS, FLOW]))
    assert found.text.startswith("action.head.likelihood.transition.logp=squared_error gives log-ratios")
    assert "bounds low=1e-05 and high=0.2 stop" in found.text


@pytest.mark.parametrize(
    "change",
    [
        "algorithm.minibatches=1",  # with one epoch: told as one update a step
        "algorithm.surrogate={low: 1e-5, high: 1e-5}",
        "algorithm.surrogate=reinforce",
        "denoising.likelihood.transition.logp=density",
        "denoising.likelihood.transition=flow_sde",
        "algorithm={type: contrast, epochs: 2}",
    ],
)
def test_other_bounds_are_not_told(change):
    once = ["algorithm.epochs=1"] if "minibatches" in change else []
    likelihood = ["denoising.likelihood={type: contrast}"] if "contrast" in change else []
    assert list(probe_unscaled_steps(load("image_digits_cps", [*CPS, change, *once, *likelihood]))) == []


def test_a_set_of_few_images_is_told():
    reward = "task.rewards=[{name: set_distance, options: {features: 'a:b', reference: 'a:c'}}]"
    (found,) = probe_set_distances(load("image_digits_perceptron", ["run_dir=unset", reward, "rollout.prompts=3"]))
    assert "set_distance is computed from the 36 images of a step" in found.text
    for options in ([reward, "rollout.prompts=84"], []):
        assert list(probe_set_distances(load("image_digits_perceptron", ["run_dir=unset", *options]))) == []
