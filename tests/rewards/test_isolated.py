import os
import signal
import subprocess
import sys
import time

import pytest

from mmrl.rewards import RewardSet, RewardSpec, build
from mmrl.rollouts import Prompt, Sample


def sample(response, answer="7", **metadata):
    return Sample(Prompt("p", "question", answer=answer, metadata=metadata), response, 5, False, 100)


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
    if sample.response == "print":
        print("verifiers may print", flush=True)
    if sample.response == "pictures":
        return float(len(sample.prompt.images))
    return float(os.getpid())


@pytest.fixture
def reward():
    reward = build(f"{__name__}:obey", isolated=True, deadline_s=1.0)
    yield reward
    reward.close()


def test_hang_crash_and_error_cost_their_sample_only(reward):
    first = reward(sample("pid"))
    assert first not in (None, os.getpid())
    assert reward(sample("raise")) is None
    assert reward(sample("print")) == first  # one worker serves all, and printing does not break its replies
    assert reward(sample("pictures")) == 0

    start = time.monotonic()
    assert reward(sample("hang")) is None
    assert 1.0 <= time.monotonic() - start < 3.0
    with pytest.raises(ProcessLookupError):
        os.kill(int(first), 0)  # it was killed and reaped, not left behind

    second = reward(sample("pid"))
    assert second not in (None, first)
    assert reward(sample("exit")) is None
    assert reward(sample("pid")) not in (None, second)
    assert reward.failures == {"deadline": 1, "crash": 1, "error": 1}


def test_a_reward_that_cannot_be_built_is_refused_here():
    with pytest.raises(ValueError, match="did you mean"):
        build(f"{__name__}:oby", isolated=True)


def test_worker_ends_with_its_parent():
    script = (
        "from mmrl.rewards import build\nfrom mmrl.rollouts import Prompt, Sample\n"
        f"reward = build('{__name__}:obey', isolated=True)\n"
        "print(int(reward(Sample(Prompt('p', 'q'), 'pid', 1, False, 2))))"
    )
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.stderr == ""
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)


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
