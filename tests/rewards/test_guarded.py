import logging
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from mmrl.errors import UserError, describe_error
from mmrl.rewards import RewardSet, RewardSpec
from mmrl.rewards.services.failures import Failure, Failures
from mmrl.rewards.types import to_scores
from mmrl.rollouts import Prompt, Sample
from mmrl.runtime import timed_calls

HERE = "tests.rewards.hostile"
BY_WORD, BATCH, LAZY = f"{HERE}:by_word", f"{HERE}:Batch", f"{HERE}:Lazy"


def samples(*words):
    return [Sample(Prompt(f"p{i}", "question"), word) for i, word in enumerate(words)]


def scores(*words, group=None, name=BY_WORD, **options):
    rewards = RewardSet([RewardSpec(name=name, label="own", deadline_s=0.5, **options)])
    values = rewards.score(samples(*words), group)[:, 0].tolist()
    return [None if math.isnan(value) else value for value in values], rewards.components[0]


def test_a_fault_costs_its_sample_and_is_told_by_reward_and_prompt(caplog):
    with caplog.at_level(logging.WARNING, "mmrl"):
        values, own = scores("good", "raise", "exit", "interrupt", "huge", "good")
    assert values == [1, None, None, None, None, 1]
    assert own.failures.causes == {"error": 3} and own.failures.prompts == {"p1": 1, "p2": 1, "p3": 1}
    assert len(caplog.messages) == 1  # the first of its cause
    assert caplog.messages[0].startswith("reward own failed on prompt p1: KeyError: 'nothing there' (hostile.py:")


def test_ten_and_a_hundred_failures_are_told_again(caplog):
    failures = Failures("own")
    with caplog.at_level(logging.WARNING, "mmrl"):
        for one in samples(*["x"] * 120):
            failures.record(one, Failure("error", "no"))
    assert [message.split("(error: ")[1].split(" ")[0] for message in caplog.messages] == ["1", "10", "100"]


def test_calls_that_timed_out_in_the_batch_before_do_not_count():
    failures = Failures("own", max_timeouts=2)
    failures.start_batch()
    for _ in range(2):
        assert failures.skipped() is None
        failures.record_timeout(1.0)
    assert failures.skipped() == Failure("not tried", "too many calls of this batch timed out before (max_timeouts)")
    failures.start_batch()
    failures.record_timeout(1.0)
    assert failures.skipped() is None


@pytest.mark.parametrize("word", ["spin", "sleep"])
def test_what_takes_too_long_costs_its_sample(word):
    start = time.monotonic()
    values, own = scores("good", word, "good")
    assert values == [1, None, 1] and own.failures.causes == {"deadline": 1}
    assert 0.5 <= time.monotonic() - start < 5
    assert scores(word, "good", on_timeout="lowest")[0] == [0, 1]


def test_a_thread_that_spins_ends_and_one_that_cannot_be_ended_is_left(monkeypatch):
    monkeypatch.setattr(timed_calls, "MAX_STUCK", 1)
    _, own = scores("spin", "spin", "spin")
    assert not own._calls._stuck and own.failures.causes == {"deadline": 3}
    with pytest.raises(UserError, match="reward 'own': 2 of its calls passed the deadline of .* set isolated: true"):
        scores("stubborn", "stubborn", "good")


@pytest.mark.parametrize("name", [BY_WORD, BATCH])
def test_what_is_left_of_a_batch_that_hangs_is_not_tried(name):
    """Two of ten calls are tried; then also those that would have answered count as what hung does."""
    rewards = RewardSet(
        [RewardSpec(name=name, deadline_s=0.5, max_timeouts=2, on_timeout="lowest", **batches_of_one(name))]
    )
    start = time.monotonic()
    values = rewards.score(samples("good", *["spin"] * 8, "good"))[:, 0].tolist()
    assert values == [1] + [0] * 9 and time.monotonic() - start < 4
    assert rewards.components[0].failures.causes == {"deadline": 2, "not tried": 7}
    assert rewards.score(samples("good"))[0, 0] == 1


def batches_of_one(name):
    return {"batch_size": 1} if name == BATCH else {}


def test_own_rewards_share_one_thread():
    before = threading.active_count()
    scores(*["good"] * 50)
    assert threading.active_count() <= before + 1


def test_a_user_error_ends_the_run():
    with pytest.raises(UserError, match="reward 'own': the server is down"):
        scores("good", "user error")
    for word in ("seven", "list"):
        with pytest.raises(UserError, match="reward 'own': expected one number for each sample"):
            scores("good", word)


@pytest.mark.parametrize("name", [BATCH, LAZY])
def test_of_a_batch_only_what_raises_by_itself_is_lost(name):
    values, own = scores(*["good"] * 5, "raise", "good", "good", "exit", name=name)
    assert values == [1] * 5 + [None, 1, 1, None]
    assert own.failures.causes == {"error": 2} and own.failures.prompts.keys() == {"p5", "p8"}


def test_batches_are_halved_only_where_they_raise():
    _, own = scores(*["good"] * 8, name=BATCH)
    assert own.reward.calls == [8]
    _, own = scores("raise", *["good"] * 7, name=BATCH)
    assert own.reward.calls == [8, 4, 2, 1, 1, 2, 4]


def test_a_batch_that_takes_too_long_is_lost_and_so_is_a_group_that_raises():
    values, own = scores("good", "sleep", "good", name=BATCH)
    assert values == [None] * 3 and own.failures.causes == {"deadline": 3}
    group = torch.tensor([0, 0, 1, 1])
    values, own = scores("good", "raise", "good", "good", name=BATCH, options={"scope": "group"}, group=group)
    assert values == [None, None, 1, 1] and own.reward.calls == [2, 2]


def test_a_wrong_number_of_values_ends_the_run():
    with pytest.raises(UserError, match="reward 'own': it returned 1 values for 2 samples"):
        scores("too few", "good", name=BATCH)


def test_an_error_without_a_text_is_told_in_one_line():
    class Awkward(Exception):
        def __str__(self):
            raise RuntimeError

    assert describe_error(Awkward()) == "Awkward: (its text raises RuntimeError)"
    assert describe_error(ValueError("a\nb \ud83d" + "x" * 999)).startswith("ValueError: a b \\ud83d")
    assert (
        len(describe_error(ValueError("x" * 999)).splitlines()) == 1
        and len(describe_error(ValueError("x" * 999))) <= 300
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [(True, 1.0), (False, 0.0), (np.float32(0.5), 0.5), (np.array([0.5]), 0.5), (torch.tensor([[0.5]]), 0.5), (2, 2.0)],
)
def test_what_counts_as_a_number(value, expected):
    assert to_scores([value, None], 2) == [expected, None]


@pytest.mark.parametrize("value", ["0.5", b"1", np.array([1, 2]), torch.ones(2), [0.5], {}, 1j])
def test_what_counts_as_none(value):
    """A text that reads as a number is a mistake of the reward, such as an answer in place of its score."""
    with pytest.raises(UserError, match="expected one number for each sample"):
        to_scores([value], 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("late", ["0", "1"])
def test_a_fork_of_a_reward_ends_with_the_run(late):
    """A trainer whose reward forks, and which is killed then: also before the fork has come to itself."""
    trainer = subprocess.Popen([sys.executable, "-c", FORKS, late], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    with trainer.stdout:
        fork = int(trainer.stdout.readline())
        assert Path(f"/proc/{fork}").exists()
        trainer.kill()
        trainer.wait()
        end = time.monotonic() + 20
        while Path(f"/proc/{fork}").exists() and time.monotonic() < end:
            time.sleep(0.05)
    assert not Path(f"/proc/{fork}").exists()


FORKS = """
import os, sys, time

os.register_at_fork(after_in_child=lambda: time.sleep(float(sys.argv[1])))  # before all others

from mmrl.runtime.timed_calls import CallingThread

def reward(sample):
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
    return pid

print(CallingThread().call(reward, None, 60.0), flush=True)
time.sleep(600)
"""
