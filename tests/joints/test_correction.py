"""What decisions weigh that another engine sampled."""

import math

import pytest

from mmrl.errors import UserError
from mmrl.training.metrics import Metrics
from tests.joints.parts import Table, close

# pi_old / pi_generator of every decision. Advantages 1 and -1, and a first ratio of 1: the value is -A w, the gradient
# too.
WEIGHTS = [[0.5, 1.5, 4.0], [1.0, 3.0]]


def sampled(given, correction, *overrides, weights=WEIGHTS):
    table = Table([[-1.0, -1.0, -1.0], [-1.0, -1.0]], rewards=[2.0, 0.0])
    generator = f"rollout.generator={{type: vllm_colocated, correction: {{max_gap: 9, {correction}}}}}"
    made = given(table, "rollout.prompts=1", "algorithm.scale=none", generator, *overrides)
    rollouts = table.rollouts()
    behaviour = [[-1.0 - math.log(w) if w > 0 else math.nan for w in row] for row in weights]
    rollouts.behaviour_logp = table.padded(behaviour)
    made.prepare(rollouts)
    return made


def check(made, first, second):
    close(made.learn(), (-sum(first) + sum(second)) / 5)
    close(made.gradient() * 5, [[-w for w in first], [*second, 0.0]], atol=1e-5)


CASES = {
    "the default: tokens, at most 2": ("", [0.5, 1.5, 2.0], [1.0, 2.0]),
    "cap": ("weight: {cap: 3.5}", [0.5, 1.5, 3.5], [1.0, 3.0]),
    "none": ("weight: null", [1.0, 1.0, 1.0], [1.0, 1.0]),
    "of the whole response": ("weight: {level: sequence, cap: 2.5}", [2.5] * 3, [2.5] * 2),  # 3 and 3
    "geometric": ("weight: {level: geometric}", [3 ** (1 / 3)] * 3, [3**0.5] * 2),
    "reject": ("weight: null, reject: {low: 0.4, high: 2}", [1.0, 1.0, 0.0], [1.0, 0.0]),
    "reject below": ("weight: null, reject: {low: 0.6, high: 9}", [0.0, 1.0, 1.0], [1.0, 1.0]),
    "reject by default bounds": ("weight: null, reject: {}", [1.0, 1.0, 0.0], [1.0, 0.0]),
    "reject responses": ("weight: null, reject: {level: geometric, low: 0.5, high: 1.5}", [1.0] * 3, [0.0] * 2),
    "both": ("weight: {cap: 9}, reject: {low: 0.6, high: 3.5}", [0.0, 1.5, 0.0], [1.0, 3.0]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("surrogate", ["clip", "reinforce"])
def test_weights(given, case, surrogate):
    correction, first, second = CASES[case]
    check(sampled(given, correction, f"algorithm.surrogate={surrogate}"), first, second)


def test_the_weight_is_of_the_old_policy_whatever_the_present_one_is(given):
    made = sampled(given, "", "algorithm.epochs=2", "algorithm.surrogate=reinforce")
    made.move(logp=[[0.7, -0.7, 0.7], [0.7, 0.7]])
    check(made, [0.5, 1.5, 2.0], [1.0, 2.0])


def test_what_no_generator_made_weighs_1(given):
    check(sampled(given, "", weights=[[0.5, 1.5, 4.0], [0, 0]]), [0.5, 1.5, 2.0], [1.0, 1.0])


def test_metrics_and_the_limit_of_the_gap(given):
    made = sampled(given, "", weights=[[0.5, 1.0, 4.0], [1.0, 1.0]])
    made.learn()
    values = made.metrics.result()
    gap = (math.log(2) + math.log(4)) / 5
    close(values["correction/logp_gap"], gap)
    close(values["correction/clipped"], 1 / 5)
    made.trainer.judge_generator(values)
    # Weights 0.5, 1, 4, 1, 1: mean 1.5, mean square 19.25 / 5.
    close(values["correction/effective_sample_size"], 1.5**2 / 3.85)
    assert "correction/weight_squared" not in values
    for limit, stops in ((gap - 0.01, True), (gap + 0.01, False)):
        made = sampled(
            given, "", f"rollout.generator.correction.max_gap={limit}", weights=[[0.5, 1.0, 4.0], [1.0, 1.0]]
        )
        made.learn()
        values = made.metrics.result()
        if stops:
            with pytest.raises(UserError, match="rollout.generator.correction.max_gap"):
                made.trainer.judge_generator(values)
        else:
            made.trainer.judge_generator(values)


def test_without_a_generator_there_is_no_correction(given):
    table = Table([[-1.0], [-1.0]], rewards=[2.0, 0.0])
    made = given(table, "rollout.prompts=1")
    made.prepare()
    made.metrics = Metrics(made.trainer.engine)
    made.learn()
    assert not any(name.startswith("correction/") for name in made.metrics.result())
