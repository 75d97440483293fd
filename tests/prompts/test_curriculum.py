"""Samplers that learn from outcomes: what they prefer, worked out by hand, and that a state says all of it."""

import json
import math
from collections import Counter

import pytest

from mmrl.errors import UserError
from mmrl.prompts.curriculum import Rollback, SkipFlat, SuccessWeighted, SuccessWindow, Volatility
from mmrl.prompts.mixture import CategoryBandit, TaskQuotas
from mmrl.prompts.sampler import Outcome
from mmrl.rollouts import Prompt
from tests.joints.parts import GivenTask, GivenTaskSettings, Prompts, Table, job

KINDS = [Prompt(str(i), "?", metadata={"task": "ab"[i % 2]}) for i in range(10)]  # even: a, odd: b


def started(sampler, size=10, seed=3):
    sampler.inspect(KINDS[:size])
    sampler.start(size, seed)
    return sampler


def outcome(prompt, *rewards, accuracies=None):
    return Outcome(prompt, rewards, rewards if accuracies is None else accuracies)


MADE = {
    "success_weighted": SuccessWeighted,
    "success_window": SuccessWindow,
    "skip_flat": SkipFlat,
    "rollback": Rollback,
    "volatility": Volatility,
    "category_bandit": CategoryBandit,
    "task_quotas": TaskQuotas,
}


@pytest.mark.parametrize("name", MADE)
def test_a_state_goes_on_as_the_sampler_would(name):
    one, other = started(MADE[name]()), started(MADE[name]())
    told = [outcome(0, 1.0, 1.0), outcome(1, 0.0, 0.0), outcome(2, 0.0, 1.0), outcome(3, math.nan, math.nan)]
    for _ in range(3):
        one.draw(4)
        one.observe(told)
    state = json.loads(json.dumps(one.state()))
    other.load(state)
    changed = [outcome(0, 0.0, 1.0), outcome(1, 1.0, 1.0), outcome(2, 0.0, 0.0), outcome(3, 0.0, 1.0)]
    for _ in range(4):
        assert one.draw(5) == other.draw(5)
        one.observe(changed)  # others than before the state was saved, so that averages of before matter
        other.observe(changed)
    assert json.loads(json.dumps(one.state())) == json.loads(json.dumps(other.state()))
    assert state["drawn"] == json.loads(json.dumps(state))["drawn"]  # it did not follow later draws


@pytest.mark.parametrize("name", MADE)
def test_another_seed_is_another_order_and_the_same_seed_the_same(name):
    drawn = [started(MADE[name](), seed=seed).draw(8) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(type(index) is int and 0 <= index < 10 for index in drawn[0])


@pytest.mark.parametrize("name", MADE)
def test_more_can_be_drawn_than_there_are(name):
    assert len(started(MADE[name](), size=4).draw(11)) == 11


# --- weights by success ---


def test_success_weighted():
    sampler = started(SuccessWeighted(floor=0.1, decay=0.5, prior=0.5))
    sampler.observe([outcome(0, 1.0, 1.0), outcome(1, 0.0, 0.0)])
    sampler.observe([outcome(1, 1.0, 0.0, accuracies=(1.0, 1.0))])  # 0, then half of the way to 1: accuracy counts
    assert sampler.weights()[:3] == pytest.approx([0.1, 0.6, 0.6])
    sampler = started(SuccessWeighted(floor=0.1, favour="uncertain"))
    sampler.observe([outcome(0, 1.0, 1.0), outcome(1, 1.0, 0.0, 0.0, 0.0)])
    assert sampler.weights()[:3] == pytest.approx([0.1, 0.85, 1.1])


def test_the_weights_are_followed():
    # Prompts 0 to 8 are solved and have 0.05; the last one has 1.05: 1.05 / 1.5 of the draws.
    sampler = started(SuccessWeighted(floor=0.05, decay=1))
    sampler.observe([outcome(i, 1.0) for i in range(9)] + [outcome(9, 0.0)])
    counts = Counter(index for _ in range(2000) for index in sampler.draw(1))
    assert counts[9] / 2000 == pytest.approx(0.7, abs=0.04)


def test_a_draw_holds_every_prompt_once_while_there_are_enough():
    sampler = started(SuccessWeighted())
    sampler.observe([outcome(0, 0.0)] + [outcome(i, 1.0) for i in range(1, 10)])
    assert sorted(sampler.draw(10)) == list(range(10))


# --- windows ---


def test_success_window():
    sampler = started(SuccessWindow(recheck=3, decay=1), size=4)
    assert sorted(sampler.draw(4)) == [0, 1, 2, 3]  # nothing is known
    sampler.observe([outcome(0, 1.0, 1.0), outcome(1, 0.0, 0.0), outcome(2, 0.0, 1.0), outcome(3, math.nan)])
    assert sorted(sampler.draw(2)) == [2, 3]  # the second round
    assert sorted(sampler.draw(4)) == [0, 1, 2, 3]  # the third one
    assert sorted(sampler.draw(2)) == [2, 3]


def test_a_window_that_leaves_nobody_does_not_hang():
    sampler = started(SuccessWindow(recheck=1000), size=3)
    sampler.observe([outcome(i, 1.0, 1.0) for i in range(3)])
    assert len(sampler.draw(5)) == 5


# --- skipping ---


def test_skip_flat():
    sampler = started(SkipFlat(explore=0.5), size=2)
    for _ in range(3):
        sampler.observe([outcome(0, 1.0, 1.0)])
    counts = Counter(sampler.draw(3600))  # of nine draws eight are of prompt 1: 1/8 against 1
    assert counts[0] / counts[1] == pytest.approx(1 / 8, abs=0.03)
    sampler.observe([outcome(0, 1.0, 0.0)])  # it teaches again
    assert Counter(sampler.draw(100))[0] == 50


def test_when_all_are_flat_somebody_is_drawn():
    sampler = started(SkipFlat(explore=0.01), size=2)
    for _ in range(200):
        sampler.observe([outcome(0, 1.0, 1.0), outcome(1, 0.0, 0.0)])
    assert len(sampler.draw(3)) == 3


# --- volatility ---


def test_volatility():
    # Prompt 0 varies with a std of 1/2, prompt 1 by 0, the others were never seen: c sqrt(log 3 / 1) against
    # 0.5 + c sqrt(log 3 / 2).
    told = [outcome(0, 0.0, 1.0), outcome(1, 1.0, 1.0)]
    for c, first in ((0.1, 0), (3.0, 2)):
        sampler = started(Volatility(c=c), size=3)
        sampler.observe(told)
        assert sampler.draw(3)[0] == first and sampler.draw(3)[2] == 1


def test_a_group_without_two_scores_is_no_visit_and_has_no_spread():
    sampler = started(Volatility(), size=3)
    sampler.observe([outcome(0, 1.0, math.nan), outcome(1, math.nan, math.nan), outcome(2, 0.0, 1.0, math.nan)])
    state = sampler.state()
    assert state["visits"] == {"2": 1} and state["spread"] == {"2": 0.5}


# --- categories ---


def test_category_bandit():
    # Category a: deviations 1/2 in each group; b: none. Q = 0.5 x 0.5 and 0; softmax(Q / 0.25) = 0.731, 0.269.
    sampler = started(CategoryBandit(temperature=0.25, rate=0.5))
    sampler.observe([outcome(0, 0.0, 1.0), outcome(2, 1.0, 0.0), outcome(1, 1.0, 1.0)])
    assert sampler.state()["values"] == {"a": 0.25, "b": 0.0}
    counts = Counter("ab"[index % 2] for _ in range(300) for index in sampler.draw(10))
    assert counts["a"] / 3000 == pytest.approx(0.731, abs=0.03)


def test_members_of_a_category_come_in_turn():
    sampler = started(CategoryBandit())
    drawn = [index for _ in range(20) for index in sampler.draw(5)]
    evens = [index for index in drawn if index % 2 == 0]
    assert all(sorted(evens[i : i + 5]) == [0, 2, 4, 6, 8] for i in range(0, len(evens) - 4, 5))


def test_task_quotas():
    sampler = started(TaskQuotas(rate=2, decay=0.5))
    assert Counter(index % 2 for index in sampler.draw(6)) == {0: 3, 1: 3}
    sampler.observe([outcome(0, 0.5, 0.5), outcome(1, 0.5, 0.5)])  # losses of 1/2 each, nothing gained
    assert sampler.shares == {"a": 0.5, "b": 0.5}
    # a gets to 1: its loss to (0.5 + 0.001) / 2, a gain of log(0.5 / 0.2505); b stays. w = -+ 2 x 0.5 x gain / 2.
    sampler.observe([outcome(0, 1.0, 1.0), outcome(1, 0.5, 0.5)])
    gain = math.log(0.5 / 0.2505)
    values = sampler.state()["values"]
    assert values["a"] == pytest.approx(-gain / 2) and values["b"] == pytest.approx(gain / 2)
    share = 1 / (1 + math.exp(gain))  # of a: 0.3338
    assert sampler.shares["a"] == pytest.approx(share)
    assert Counter(index % 2 for index in sampler.draw(6)) == {0: 2, 1: 4}


def test_no_task_is_left_out():
    sampler = started(TaskQuotas(least=0.2))
    sampler.load(sampler.state() | {"values": {"a": -50.0, "b": 0.0}})
    assert sampler.shares["a"] == pytest.approx(0.2 / 1.2)


def test_a_category_that_prompts_do_not_have():
    with pytest.raises(UserError, match="rollout.sampler.by=kind: prompt '0' has no such metadata; it has task"):
        started(CategoryBandit(by="kind"))


# --- prompts that return ---


def test_failed_prompts_return_before_new_ones():
    sampler, plain = started(Rollback(share=0.5, times=2)), started(Rollback())
    order = plain.draw(30)
    assert sampler.draw(4) == order[:4]
    failed, right = outcome(order[1], 0.0, 0.0), outcome(order[0], 0.0, 1.0)
    sampler.observe([right, failed, outcome(order[2], 0.0, 0.9), outcome(order[3], 0.0, 0.0), outcome(9, math.nan)])
    assert sampler.draw(4) == [order[1], order[2], order[4], order[5]]  # at most half of the four
    sampler.observe([failed, outcome(order[2], 1.0, 0.0)])
    assert sampler.draw(4) == [order[3], order[1], order[6], order[7]]
    sampler.observe([failed])  # the third time in a row: it waits for its epoch
    assert sampler.draw(4) == order[8:12]
    sampler.observe([failed, failed])  # and counts anew; it returns once
    assert sampler.draw(4) == [order[1], *order[12:15]]


def test_a_state_says_who_waits_and_how_often_each_returned():
    one, other = started(Rollback(share=1.0, times=1)), started(Rollback(share=1.0, times=1))
    one.observe([outcome(7, 0.0), outcome(3, 0.0)])
    assert one.draw(1) == [7]  # prompt 3 waits
    other.load(json.loads(json.dumps(one.state())))
    other.observe([outcome(7, 0.0)])  # it has returned once already
    assert other.draw(2) == [3, started(Rollback()).draw(1)[0]]


def test_how_right_a_response_must_be_and_what_is_not_known():
    sampler = started(Rollback(accuracy=0.5, share=1.0))
    sampler.observe([outcome(4, 0.0, 0.5), outcome(5, 0.4, 0.0), outcome(6, math.nan, math.nan)])
    assert sampler.draw(3)[0] == 5 and sampler._waiting == []
    sampler = started(Rollback(share=0.5))
    sampler.observe([outcome(5, 0.0), outcome(6, 0.0)])
    assert sampler.draw(1) == [5]  # a half of one is rounded up


# --- in a job ---


@pytest.mark.parametrize("name", MADE)
def test_by_its_key_in_a_job(given_job, name):
    """The trainer's own path: it shows the sampler its prompts, draws, and tells it what became of them."""
    by = ", by: level" if name in ("category_bandit", "task_quotas") else ""
    rewards = [1.0, 1.0, 0.0, 0.0 if name == "rollback" else 1.0]
    table = Table([[-1.0]] * 4, group=[0, 0, 1, 1], rewards=rewards)
    made = given_job(table, f"rollout.sampler={{type: {name}{by}}}", "steps=3")
    draws = made.trainer.collector.draws
    made.trainer.train()
    state = draws.sampler.state()
    told = {"volatility": "visits", "rollback": "returns", "category_bandit": "values", "task_quotas": "losses"}.get(
        name, "rates"
    )
    assert state[told] and draws.drawn == 6
    assert json.loads(json.dumps(state)) == state


@pytest.fixture
def given_job(tmp_path):
    def made(table, *overrides):
        return job(tmp_path, table, 'task={type: "tests.prompts.test_curriculum:Levels"}', *overrides)

    return made


class LevelTask(GivenTask):
    """Its prompts have a level."""

    def __init__(self, settings):
        super().__init__(settings)
        self.train = Prompts(8, [{"level": 0}, {"level": 1}])


class Levels(GivenTaskSettings):
    type: str = "tests.prompts.test_curriculum:Levels"

    def build(self, seed):
        return LevelTask(self)
