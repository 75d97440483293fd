"""Controllers that follow a metric, by hand and through a trainer."""

import math

import pytest

from mmrl.errors import UserError
from mmrl.schedules.controllers import Proportional, Staircase
from tests.joints.parts import Table, close, job


def test_proportional():
    # 1 x (0.4 / 0.1)^0.5 = 2, at most 1.5; then 1.5 x (0.4 / 0.6)^0.5; then at least 1 / 1.5 of it.
    control = Proportional(start=1.0, metric="entropy", target=0.4, rate=0.5, most=0.5)
    found = []
    for measured in (0.1, 0.6, 40.0):
        control.update(1, {"entropy": measured})
        found.append(control.value)
    middle = 1.5 * math.sqrt(2 / 3)
    assert found == pytest.approx([1.5, middle, middle / 1.5])


def test_proportional_keeps_its_bounds_and_state():
    control = Proportional(start=1.0, metric="entropy", target=0.4, low=0.9, high=1.05)
    control.update(1, {"entropy": 1e-9})
    assert control.value == 1.05 and control.extremes == (0.9, 1.05)
    other = Proportional(start=1.0, metric="entropy", target=0.4)
    other.load(control.state())
    assert other.value == 1.05


TEMPERATURE = "rollout.temperature={type: %s, metric: entropy, start: 1, target: 0.4%s}"


def test_proportional_needs_no_bound_where_0_is_refused(tmp_path):
    """It never reaches 0, and so needs no `low`; one that does is refused by that name."""
    table = Table([[-1.0], [-1.0]])
    control = job(tmp_path / "fits", table, TEMPERATURE % ("proportional", "")).trainer.config.rollout.temperature
    for _ in range(99):
        control.update(1, {"entropy": 1e9})
    assert 0 < control.value < 1e-3
    for kind, options in (("additive", ", rate: 0.1"), ("proportional", ", low: -1")):
        with pytest.raises(UserError, match=r"rollout.temperature.* must be above 0 .*set `low`"):
            job(tmp_path / kind, table, TEMPERATURE % (kind, options))
    with pytest.raises(UserError, match=r"must be at most 1 .*set `high`"):
        job(tmp_path / "high", table, "algorithm.surrogate={type: clip, low: {type: additive, metric: entropy, "
            "start: 0.1, target: 1, rate: 0.1, high: 2}}")  # fmt: skip


def stairs(**options):
    return Staircase(values=(8, 16, 32), metric="cut", bound=0.5, **options)


def climbed(control, *measured):
    found = []
    for value in measured:
        control.update(1, {"cut": value})
        found.append(control.value)
    return found


def test_staircase():
    assert climbed(stairs(), 0.4, 0.5, 0.1, 0.9, 0.9) == [8, 16, 16, 32, 32]
    assert climbed(stairs(when="below"), 0.6, 0.5, 0.1) == [8, 16, 32]
    assert climbed(stairs(patience=2), 0.6, 0.4, 0.6, 0.6, 0.6, 0.6) == [8, 8, 8, 16, 16, 32]
    assert climbed(stairs(), math.nan) == [8]


def test_a_staircase_goes_on_where_it_was():
    control, other = stairs(patience=2), stairs(patience=2)
    climbed(control, 0.6, 0.6, 0.6)
    other.load(control.state())
    assert climbed(other, 0.6) == [32]


def test_a_staircase_names_a_metric_that_is_missing():
    with pytest.raises(UserError, match="metric 'cut' is not a metric of this job; choose one of loss"):
        stairs().update(1, {"loss": 1.0})


def test_controllers_act_by_their_keys(tmp_path):
    """The coefficient of an entropy term: the metric entropy is 0.5 at each step."""
    table = Table([[-1.0], [-1.0]], rewards=[1.0, 1.0], entropy=[[0.5], [0.5]])
    controls = {
        "{type: proportional, start: 1, metric: entropy, target: 2, rate: 0.5, most: 9}": [1, 2, 4],
        "{type: staircase, values: [1, 3, 7], metric: entropy, bound: 0.4}": [1, 3, 7],
    }
    for control, expected in controls.items():
        term = f"algorithm.terms=[{{type: entropy, coefficient: {control}}}]"
        made = job(tmp_path, table, "rollout.prompts=1", term, "steps=3", "optim.lr=1e-12")
        made.trainer.train()
        close([row["loss"] for row in made.trainer.run.rows], [-0.5 * value for value in expected])
