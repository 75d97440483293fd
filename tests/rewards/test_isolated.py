import os
import signal
import time

import pytest

from mmrl.rewards import RewardSet, RewardSpec, build
from mmrl.rollouts import Prompt, Sample


def sample(response, answer="7"):
    return Sample(Prompt("p", "question", answer=answer), response, 5, False, 100)


def obey(sample):
    """Does what the response says; runs in the worker."""
    if sample.response == "hang":
        while True:
            pass
    if sample.response == "exit":
        os._exit(3)
    if sample.response == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if sample.response == "raise":
        raise KeyError("nothing there")
    if sample.response == "pictures":
        return float(len(sample.prompt.images))
    return float(os.getpid())


@pytest.fixture(scope="module")
def reward():
    reward = build(f"{__name__}:obey", isolated=True, deadline_s=1.0)
    yield reward
    reward.close()


@pytest.fixture(autouse=True)
def no_failures_yet(request):
    if "reward" in request.fixturenames:
        reward = request.getfixturevalue("reward")
        reward.failures = dict.fromkeys(reward.failures, 0)


def ends(pid, within=3.0):
    """Whether the process is gone, reaped included, within so many seconds."""
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


def test_one_worker_serves_all_and_an_error_costs_its_sample(reward):
    first = reward(sample("pid"))
    assert first not in (None, os.getpid())
    assert reward(sample("raise")) is None
    assert reward(sample("pictures")) == 0
    assert reward(sample("pid")) == first
    assert reward.failures == {"deadline": 0, "crash": 0, "error": 1}


def test_a_hanging_verifier_is_killed_at_the_deadline(reward):
    first = reward(sample("pid"))
    start = time.monotonic()
    assert reward(sample("hang")) is None
    assert 1.0 <= time.monotonic() - start < 2.0
    assert ends(first)
    start = time.monotonic()
    assert reward(sample("pid")) not in (None, first)
    assert time.monotonic() - start < 1.0  # the next worker is forked, not started from nothing
    assert reward.failures == {"deadline": 1, "crash": 0, "error": 0}


@pytest.mark.parametrize("how", ["exit", "segfault"])
def test_a_crash_costs_its_sample(reward, how):
    first = reward(sample("pid"))
    assert reward(sample(how)) is None
    assert reward(sample("pid")) not in (None, first)
    assert reward.failures == {"deadline": 0, "crash": 1, "error": 0}


def test_processes_end_when_the_trainer_does(reward):
    worker = reward(sample("pid"))
    process, control = reward._nursery
    reward._worker[1].close()  # what the kernel does for a trainer that was killed
    control.close()
    assert process.wait(timeout=3.0) == 0
    assert ends(worker)
    reward._worker = None
    assert reward(sample("pid")) not in (None, worker)  # and a lost nursery is replaced
    worker, process = reward._worker[0], reward._nursery[0]
    reward.close()
    assert process.returncode is not None
    assert ends(worker)


def test_a_reward_that_cannot_be_built_is_refused_here():
    with pytest.raises(ValueError, match="did you mean"):
        build(f"{__name__}:oby", isolated=True)


def test_math_and_its_place_in_a_set():
    rewards = RewardSet([RewardSpec("math"), RewardSpec("exact_match")])
    cases = [
        (r"\boxed{\frac{1}{2}}", "0.5", 1),
        ("<answer>2x+1</answer>", "1+2x", 1),
        ("<answer>1/3</answer>", r"\frac{1}{3}", 1),
        (r"<think>\boxed{9}</think><answer>$\sqrt{8}$</answer>", r"2\sqrt{2}", 1),
        ("the answer is 14", "14", 1),
        ("13", "14", 0),
        ("<answer>2x-1</answer>", "1+2x", 0),
        ("I do not know", "3", 0),
        ("3", "", None),
    ]
    scores = rewards.score([sample(response, gold) for response, gold, _ in cases])
    assert [None if value != value else value for value in scores[:, 0].tolist()] == [value for *_, value in cases]
    rewards.components[0].close()
