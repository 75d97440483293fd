"""Numbers that change while a run goes on: every kind by hand, its bounds, and how it goes on after a checkpoint."""

import math

import pytest

from mmrl.errors import UserError
from mmrl.schedules.schedule import Schedule, Schedules, constant, number
from mmrl.settings import Choice, Section, SettingsError, choose, make, plain


def control(tree):
    return choose(Schedule, tree, ("k",))


def followed(made, measured, metric="kl"):
    """Its values after each of the measured numbers."""
    found = []
    for step, value in enumerate(measured, 1):
        made.update(step, {metric: value, "other": 1e9})
        found.append(made.value)
    return found


def scheduled(made, steps):
    found = [made.value]
    for step in range(1, steps + 1):
        made.update(step, {})
        found.append(made.value)
    return found


def goes_on(tree, first, then):
    """A control that is loaded from the state of another gives what that one gives next."""
    one, other = control(tree), control(tree)
    followed(one, first)
    other.load(one.state())
    assert other.value == one.value
    found = followed(other, then)
    assert found == followed(one, then)
    return found


# --- schedules ---


@pytest.mark.parametrize("written", [3, 0.5, {"type": "constant", "number": 0.5}])
def test_a_number_is_a_constant(written):
    made = control(written)
    value = written["number"] if isinstance(written, dict) else written
    assert made.type == "constant" and scheduled(made, 2) == [value] * 3
    assert made.extremes == (value, value) and made.state() == {} and plain(made) == value


def test_a_straight_line_by_hand():
    made = control({"type": "linear", "start": 1.0, "end": 3.0, "steps": 4})
    assert scheduled(made, 6) == [1, 1.5, 2, 2.5, 3, 3, 3]
    assert made.extremes == (1, 3) and made.state() == {"step": 6}


def test_half_a_cosine_by_hand():
    made = control({"type": "cosine", "start": 2.0, "end": 0.0, "steps": 4})
    root = 0.5**0.5
    assert scheduled(made, 5) == pytest.approx([2, 1 + root, 1, 1 - root, 0, 0])
    assert made.extremes == (0, 2)


def test_stages_by_hand():
    made = control({"type": "stages", "starts": [0, 2, 3], "values": [5.0, 1.0, 2.0]})
    assert scheduled(made, 4) == [5, 5, 1, 2, 2]
    assert made.extremes == (1, 5)


@pytest.mark.parametrize(
    "tree",
    [
        {"type": "linear", "start": 1.0, "end": 3.0, "steps": 4},
        {"type": "cosine", "start": 1.0, "end": 3.0, "steps": 4},
        {"type": "stages", "starts": [0, 2], "values": [5.0, 1.0]},
    ],
    ids=lambda tree: tree["type"],
)
def test_a_schedule_goes_on_where_it_was(tree):
    one, other = control(tree), control(tree)
    scheduled(one, 3)
    assert other.value != one.value
    other.load(one.state())
    assert other.value == one.value
    one.update(4, {})
    other.update(4, {})
    assert other.value == one.value


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            {"type": "stages", "starts": [1, 2], "values": [1.0, 2.0]},
            "k: starts must begin with 0 and increase, got [1, 2]",
        ),
        (
            {"type": "stages", "starts": [0, 2, 2], "values": [1.0, 2.0, 3.0]},
            "k: starts must begin with 0 and increase",
        ),
        ({"type": "stages", "starts": [], "values": []}, "k: starts must begin with 0 and increase, got []"),
        ({"type": "stages", "starts": [0, 2], "values": [1.0]}, "k: starts has 2 entries and values has 1"),
        ({"type": "linear", "start": 1.0, "end": 0.0, "steps": 0}, "k.steps: "),
        ({"type": "linear", "start": 1.0, "steps": 4}, "k.end: Field required"),
        ({"type": "cosin", "start": 1.0, "end": 0.0, "steps": 3}, "k.type=cosin is unknown (did you mean cosine?)"),
        ({"type": "linear", "start": 1.0, "end": 0.0, "step": 3}, "unknown key k.step; did you mean k.steps?"),
        ({"type": "adaptive", "start": 0.0, "metric": "kl", "target": 1.0}, "k.start: "),
        ({"type": "adaptive", "start": 1.0, "metric": "kl", "target": 0.0}, "k.target: "),
        ({"type": "additive", "start": 1.0, "metric": "kl", "target": 0.0, "rate": 0}, "k.rate: "),
        ({"type": "multiplier", "metric": "kl", "target": 0.0, "k_p": -1}, "k.k_p: "),
        (True, "k: expected one of constant, linear, cosine"),
        ("fast", "k.type=fast is unknown"),
    ],
)
def test_a_control_that_can_not_be_is_refused_by_its_key(tree, message):
    with pytest.raises(SettingsError) as error:
        control(tree)
    assert str(error.value).startswith(message)


# --- controllers ---


def test_an_adaptive_coefficient_by_hand():
    tree = {"type": "adaptive", "start": 0.1, "metric": "kl", "target": 6.0, "rate": 0.1}
    # far above: the error is clipped to 0.2, so 0.1 (1 + 0.1 x 0.2) = 0.102; on target: unchanged; 5.4 / 6 - 1 = -0.1
    assert followed(control(tree), [60.0, 6.0, 5.4]) == pytest.approx([0.102, 0.102, 0.102 * 0.99])
    assert goes_on(tree, [60.0, 6.0, 5.4], [0.0]) == pytest.approx([0.102 * 0.99 * 0.98])


def test_an_additive_coefficient_by_hand():
    tree = {"type": "additive", "start": 0.0, "metric": "kl", "target": 0.3, "rate": 0.25, "high": 0.6}
    # below the target it grows, up to its bound; on target it stays; above it shrinks, down to 0
    assert followed(control(tree), [0.1, 0.2, 0.1, 0.3, 0.4, 0.5, 0.5]) == pytest.approx(
        [0.25, 0.5, 0.6, 0.6, 0.35, 0.1, 0.0]
    )
    assert goes_on(tree, [0.1, 0.2], [0.4]) == pytest.approx([0.25])


def test_a_multiplier_by_hand():
    """Limit 1, measured 2, 1.5, 0.25, 1: violations 1, 0.5, -0.75, 0; their sum, not below 0: 1, 1.5, 0.75, 0.75; their
    growth from 0 on: 1, 0, 0, 0.75."""
    tree = {"type": "multiplier", "metric": "kl", "target": 1.0, "k_p": 2.0, "k_i": 10.0, "k_d": 100.0}
    assert followed(control(tree), [2, 1.5, 0.25, 1]) == pytest.approx([2 + 10 + 100, 1 + 15, 7.5 - 1.5, 7.5 + 75])
    assert goes_on(tree, [2, 1.5, 0.25], [1]) == pytest.approx([82.5])
    ascent = {"type": "multiplier", "metric": "kl", "target": 1.0, "k_i": 0.5, "start": 0.25, "high": 0.7}
    assert followed(control(ascent), [1.4, 3.0, -9.0]) == pytest.approx([0.45, 0.7, 0.25])


def test_what_is_not_finite_moves_nothing():
    made = control({"type": "additive", "start": 0.5, "metric": "kl", "target": 0.3, "rate": 0.25})
    assert followed(made, [math.nan, math.inf, 0.1]) == [0.5, 0.5, 0.75]


def test_a_controller_without_its_metric_names_those_there_are():
    tree = {"coefficient": {"type": "additive", "start": 0, "metric": "entropi", "target": 0.3, "rate": 0.25}}
    controls = Schedules(make(Bounded, tree))
    with pytest.raises(
        UserError, match="^coefficient: metric 'entropi' is not a metric of this job; choose one of entropy, loss$"
    ):
        controls.update(1, {"loss": 1.0, "entropy": 2.0, "time/step": 3.0, "control/coefficient": 0.0})


# --- bounds ---


class Bounded(Section):
    coefficient: Schedule = number(0.1, "at least 0", ge=0)
    width: Schedule = number(0.2, "between both", gt=0, lt=1)
    most: Schedule = number(1, "a length", le=4)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"coefficient": -1}, "coefficient: must be at least 0 (got -1)"),
        ({"width": 0}, "width: must be above 0 (got 0)"),
        ({"width": 1}, "width: must be below 1 (got 1)"),
        ({"most": 4.5}, "most: must be at most 4 (got 4.5)"),
        ({"coefficient": {"type": "linear", "start": 1, "end": -0.5, "steps": 3}}, "coefficient: must be at least 0"),
        ({"width": {"type": "stages", "starts": [0, 3], "values": [0.5, 1.0]}}, "width: must be below 1 (got 1)"),
        (
            {"width": {"type": "additive", "start": 0.5, "metric": "m", "target": 1, "rate": 0.1}},
            "width: must be above 0 (got 0)",  # where it may go unless low is set
        ),
        (
            {"most": {"type": "additive", "start": 0.5, "metric": "m", "target": 1, "rate": 0.1, "high": 5}},
            "most: must be at most 4 (got 5)",
        ),
        (
            {"width": {"type": "additive", "start": 0.5, "metric": "m", "target": 1, "rate": 0.1, "low": 0.1}},
            "width: must be below 1 (got inf)",  # likewise, unless high is set
        ),
        ({"most": {"type": "multiplier", "metric": "m", "target": 1}}, "most: must be at most 4 (got inf)"),
    ],
)
def test_no_value_that_a_control_can_take_is_out_of_bounds(tree, message):
    with pytest.raises(SettingsError) as error:
        make(Bounded, tree)
    assert str(error.value).startswith(message)


def test_values_at_their_bounds_are_taken():
    free = {"type": "adaptive", "start": 0.5, "metric": "m", "target": 1}
    assert make(Bounded, {"coefficient": free}).coefficient.extremes == (0, math.inf)
    made = make(Bounded, {"coefficient": 0, "width": 0.99, "most": 4})
    assert (made.coefficient.value, made.width.value, made.most.value) == (0, 0.99, 4)
    tree = {
        "width": {"type": "additive", "start": 0.5, "metric": "m", "target": 1, "rate": 0.1, "low": 0.1, "high": 0.9}
    }
    assert make(Bounded, tree).width.extremes == (0.1, 0.9)


# --- all of a job ---


class Part(Choice):
    kinds = {"part": "tests.schedules.test_schedule:Part"}
    type: str = "part"
    inner: Schedule = number(0.5, "of the part")


class Whole(Section):
    fixed: Schedule = number(1.0, "a constant")
    parts: list[Part] = []
    by_name: dict[str, Part] = {}


def test_controls_are_found_by_their_keys_and_go_on_together():
    moving = {"type": "linear", "start": 0.0, "end": 1.0, "steps": 4}
    following = {"type": "additive", "start": 0.0, "metric": "kl", "target": 1.0, "rate": 0.25}
    tree = {"parts": [{"inner": 3}, {"inner": moving}], "by_name": {"a": {"inner": following}}}
    one, other = Schedules(make(Whole, tree)), Schedules(make(Whole, tree))
    assert one.values() == {"control/parts.1.inner": 0.0, "control/by_name.a.inner": 0.0}
    one.update(1, {"kl": 0.5})
    assert one.values() == {"control/parts.1.inner": 0.25, "control/by_name.a.inner": 0.25}
    other.load(one.state())
    assert other.values() == one.values()
    for controls in (one, other):
        controls.update(2, {"kl": 1.5})
    assert one.values() == other.values() == {"control/parts.1.inner": 0.5, "control/by_name.a.inner": 0.0}


def test_a_default_that_moves_nowhere_is_shared_without_harm():
    """Two jobs in one process: a control that one of them moves leaves the default of the other as it is."""
    moved = make(Whole, {"fixed": {"type": "linear", "start": 0.0, "end": 1.0, "steps": 2}})
    Schedules(moved).update(2, {})
    assert moved.fixed.value == 1.0 and make(Whole, {}).fixed == constant(1.0)
