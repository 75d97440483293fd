import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from mmrl.children.fork_server import ForkedProcess
from mmrl.children.frames import encode
from mmrl.children.limits import LINUX, Limits, clean_environment
from mmrl.errors import UserError
from mmrl.rewards import RewardSet, RewardSpec, build
from mmrl.rewards.compose import build_reward
from mmrl.rollouts import Prompt, Sample
from tests.helpers.processes import gone, running

pytestmark = pytest.mark.skipif(not LINUX, reason="only Linux ends what a verifier leaves behind")


SECRETS = ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "SSH_AUTH_SOCK", "STORE"]


def sample(response, answer="7", **prompt):
    return Sample(Prompt("p", "question", answer=answer, **prompt), response, 5, False, 100)


class Command:
    """An object whose pickle creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)

    def __float__(self):
        return 1.0


def leave_children(count, *, own_session, wait_s=1000):
    for _ in range(count):
        if os.fork() == 0:
            if own_session:
                os.setsid()
            time.sleep(wait_s)
            os._exit(0)


def obey(sample):
    """Does what the response says; runs in the worker."""
    word, _, rest = sample.response.partition(" ")
    if word == "hang":
        while True:
            pass
    if word == "crowd":
        leave_children(3, own_session=False)
        leave_children(3, own_session=True)
        if rest == "hang":
            signal.pause()
    if word == "children":
        leave_children(int(rest), own_session=True)
        time.sleep(2)
        return 1.0
    if word == "exit":
        os._exit(3)
    if word == "leave":
        sys.exit(3)
    if word == "interrupt":
        raise KeyboardInterrupt
    if word == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if word == "raise":
        raise KeyError("nothing there")
    if word == "end-fork-server":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)
    if word == "images":
        return float(len(sample.prompt.images))
    if word == "hog":
        return float(len(bytearray(3 << 30)) > 0)
    if word == "command":
        return Command(rest)
    if word == "value":
        return {"text": "seven", "list": [1.0], "complex": 1j, "huge": 10**400, "nan": float("nan")}[rest]
    if word == "environment":
        return float(rest in os.environ)
    if word == "limit":
        return float(resource.getrlimit(vars(resource)[rest])[1])
    if word == "slow":
        time.sleep(0.5)
    return float(os.getpid())


def obeying(**options):
    return build(f"{__name__}:obey", isolated=True, **{"deadline_s": 1.0, "workers": 1} | options)


def ask(reward, *responses):
    values = reward.score([sample(response) for response in responses])
    return values[0] if len(values) == 1 else values


@pytest.fixture(scope="module")
def reward():
    with pytest.MonkeyPatch.context() as patch:
        for name in (*SECRETS, "HARMLESS"):
            patch.setenv(name, "https://user:word@host" if name == "STORE" else "https://host")
        reward = obeying(limits=Limits(memory_gib=1.0))
        yield reward
        reward.close()


@pytest.fixture(autouse=True)
def no_failures_yet(request):
    if "reward" in request.fixturenames:
        request.getfixturevalue("reward").failures.causes.clear()


def nursery_of(reward):
    return reward._fork_server._running.process.pid


def family(pid):
    found = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout.split()
    parent = dict(zip(map(int, found[::2]), map(int, found[1::2]), strict=True))
    own, more = {pid}, {pid}
    while more := {child for child, of in parent.items() if of in own} - own:
        own |= more
    return own


def test_one_worker_serves_all_and_an_error_costs_its_sample(reward):
    first = ask(reward, "pid")
    assert first not in (None, os.getpid())
    assert ask(reward, "raise") is None
    assert ask(reward, "images") == 0
    assert ask(reward, "leave") is None and ask(reward, "interrupt") is None
    assert ask(reward, "value nan") is None and ask(reward, "value huge") is None
    assert ask(reward, "pid") == first
    assert reward.failures.causes == {"error": 3}


def test_a_hanging_verifier_is_killed_at_the_deadline(reward):
    first = ask(reward, "pid")
    start = time.monotonic()
    assert ask(reward, "hang") is None
    assert 1.0 <= time.monotonic() - start < 3.0
    assert gone([int(first)])
    start = time.monotonic()
    assert ask(reward, "pid") not in (None, first)
    assert time.monotonic() - start < 1.0  # the next worker is forked, not started from nothing
    assert reward.failures.causes == {"deadline": 1}


@pytest.mark.parametrize("how", ["exit", "segfault"])
def test_a_crash_costs_its_sample(reward, how):
    first = ask(reward, "pid")
    assert ask(reward, how) is None
    assert ask(reward, "pid") not in (None, first)
    assert reward.failures.causes == {"crash": 1}


@pytest.mark.slow
def test_a_timeout_may_count_as_the_lowest_score():
    rewards = RewardSet([RewardSpec(name=f"{__name__}:obey", isolated=True, deadline_s=0.5, on_timeout="lowest")])
    scores = rewards.score([sample("hang"), sample("raise"), sample("images")])[:, 0].tolist()
    assert scores[0] == scores[2] == 0 and scores[1] != scores[1]
    assert rewards.components[0].failures.causes == {"deadline": 1, "error": 1}
    rewards.components[0].close()
    assert build_reward(RewardSpec(name="box_giou", isolated=True, on_timeout="lowest")).failures.late == -1


@pytest.mark.parametrize(("option", "late"), [("lowest", 0.0), pytest.param("unscored", None, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_batch_that_hangs_costs_a_few_deadlines(option, late, caplog):
    """256 answers that hang, two workers, half a second each: 64 s if every one is tried, 2 s if seven are."""
    own = {"name": f"{__name__}:obey", "label": "own", "isolated": True, "deadline_s": 0.5}
    rewards = RewardSet([RewardSpec(**own, on_timeout=option, max_timeouts=7)])
    assert rewards.score([sample("images")]).tolist() == [[0.0]]  # its process has started
    start = time.monotonic()
    with caplog.at_level("WARNING", "mmrl"):
        scores = rewards.score([sample("pid"), *[sample("hang")] * 256])[:, 0].tolist()
    assert time.monotonic() - start < 10
    assert scores[0] > 0 and [None if s != s else s for s in scores[1:]] == [late] * 256
    causes = rewards.components[0].failures.causes
    assert 7 <= causes["deadline"] <= 8 and causes.total() == 256  # the other worker may be in its eighth
    told = [message for message in caplog.messages if "in one batch" in message]
    assert len(told) == 1 and told[0].startswith("reward own did not answer within 0.5 s, 7 times in one batch")
    assert not any("not tried number" in message for message in caplog.messages)
    assert rewards.score([sample("pid")])[0, 0] > 0  # the next batch is tried again
    rewards.components[0].close()


def test_how_many_may_hang_by_default():
    assert build_reward(RewardSpec(name="math")).failures.max_timeouts == 32
    assert build_reward(RewardSpec(name=f"{__name__}:obey")).failures.max_timeouts == 4
    assert build_reward(RewardSpec(name="math", max_timeouts=5)).failures.max_timeouts == 5


@pytest.mark.slow
def test_workers_score_at_once():
    reward = obeying(workers=3)
    ask(reward, "pid")
    start = time.monotonic()
    pids = ask(reward, *["slow"] * 6)
    assert time.monotonic() - start < 2.5 and len(set(pids)) == 3  # one after the other they need 3 s
    reward.close()


@pytest.mark.parametrize("how", ["crowd", "crowd hang"])
def test_what_a_verifier_starts_ends_with_its_answer(reward, how):
    ask(reward, "pid")
    ask(reward, how)
    assert len(family(nursery_of(reward))) <= 2  # the fork server and the worker, if there is one


def test_all_end_on_close(reward):
    worker = int(ask(reward, "pid"))
    everyone = family(nursery_of(reward))
    assert worker in everyone
    reward.close()
    assert not any(running(pid) for pid in everyone)
    assert ask(reward, "pid") not in (None, worker)


def test_a_verifier_that_kills_the_fork_server_costs_its_sample(reward):
    ask(reward, "pid")
    everyone = family(nursery_of(reward))
    assert ask(reward, "end-fork-server") is None
    assert ask(reward, "pid") is not None
    assert gone(everyone) and reward.failures.causes.total() == 1


def test_all_end_with_a_trainer_that_is_killed():
    """Also while a verifier hangs, with children in sessions of their own, and another worker is idle."""
    script = """
from tests.rewards.test_isolated import ask, obeying
reward = obeying(deadline_s=60.0, workers=2)
ask(reward, "slow", "slow")
ask(reward, "crowd hang")
"""
    trainer = subprocess.Popen([sys.executable, "-c", script])
    everyone = awaited(trainer.pid, 10)
    trainer.kill()
    trainer.wait()
    assert gone(everyone)


@pytest.mark.slow
def test_all_end_with_a_trainer_that_is_killed_while_the_reward_is_built(tmp_path):
    """A reward that hangs then does not listen to anybody."""
    script = f"""
from mmrl.rewards.services.isolated import IsolatedReward
from tests.rewards.test_isolated import sample
options = {{"mark": {str(tmp_path / "building")!r}}}
IsolatedReward("tests.rewards.hostile:HangsWhenBuilt", options, 1.0).score([sample("")])
"""
    trainer = subprocess.Popen([sys.executable, "-c", script])
    everyone = awaited(trainer.pid, 2)
    end = time.monotonic() + 60
    while not (tmp_path / "building").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert (tmp_path / "building").exists()
    trainer.kill()
    trainer.wait()
    assert gone(everyone)


def awaited(pid, at_least, within=60):
    end = time.monotonic() + within
    while len(everyone := family(pid)) < at_least and time.monotonic() < end:
        time.sleep(0.05)
    assert len(everyone) >= at_least
    return everyone


def test_hard_limits_reach_the_worker(reward):
    """What binds root too is tried below."""
    space, cpu, core, tasks = ask(reward, *(f"limit RLIMIT_{name}" for name in ("AS", "CPU", "CORE", "NPROC")))
    assert 1 << 30 < space < 100 << 30 and 600 <= cpu <= 700 and core == 0 and 65 <= tasks < 100_000


def test_processes_are_limited_for_root_too(caplog):
    """Twenty children in sessions of their own are allowed, forty are not; nobody waits for the deadline."""
    reward = obeying(limits=Limits(processes=30), deadline_s=20.0)
    assert ask(reward, "children 20") == 1.0
    before, start = family(nursery_of(reward)), time.monotonic()
    with caplog.at_level("WARNING", "mmrl"):
        assert ask(reward, "children 40") is None
    assert time.monotonic() - start < 10 and reward.failures.causes.total() == 1
    if os.geteuid() == 0:  # an ordinary user's fortieth child is refused by the kernel
        assert "more than limits.processes=30" in caplog.text and reward.failures.causes == {"crash": 1}
        assert len(family(nursery_of(reward)) & before) == 1  # only the fork server is left
    assert ask(reward, "pid") is not None
    reward.close()


def test_memory_is_limited(reward):
    first = ask(reward, "pid")
    assert ask(reward, "hog") is None
    assert ask(reward, "pid") == first  # it was a MemoryError, after which the worker goes on
    assert reward.failures.causes == {"error": 1}


def test_cpu_time_is_limited_and_a_worker_retires_before(tmp_path):
    reward = obeying(limits=Limits(cpu_s=1.0), deadline_s=120.0)
    start = time.monotonic()
    assert ask(reward, "hang") is None
    assert time.monotonic() - start < 100 and reward.failures.causes == {"crash": 1}
    reward.close()
    assert Limits(cpu_s=1e-6).spent() and not Limits(cpu_s=1e6).spent()


def test_no_credential_reaches_a_worker(reward):
    assert not {*SECRETS} & clean_environment().keys() and "HARMLESS" in clean_environment()
    seen = ask(reward, *(f"environment {name}" for name in [*SECRETS, "HARMLESS", "PATH"]))
    assert seen == [0] * len(SECRETS) + [1, 1]


def test_nothing_that_a_worker_sends_is_unpickled(reward, tmp_path):
    assert ask(reward, f"command {tmp_path / 'made'}") == 1.0
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("value", ["text", "list", "complex"])
def test_a_value_that_is_no_number_ends_the_run(reward, value):
    with pytest.raises(UserError, match="expected one number for each sample"):
        ask(reward, f"value {value}")
    assert ask(reward, "pid") is not None


def test_a_reward_that_cannot_be_built_is_refused_here():
    with pytest.raises(ValueError, match="did you mean"):
        build(f"{__name__}:oby", isolated=True)
    for wrong, words in (
        ({"workers": 0}, "workers must be at least 1"),
        ({"isolated": False, "workers": 2}, "need is"),
    ):
        with pytest.raises(ValueError, match=words):
            build("math", **{"isolated": True} | wrong)


ENDING = """
import subprocess
from mmrl.children.limits import end_descendants
sleeping = [subprocess.Popen(["sleep", "100"]) for _ in range(3)]
end_descendants(keep={sleeping[2].pid})
print([one.poll() is None for one in sleeping])
sleeping[2].kill()
"""


def test_killing_descendants_spares_those_to_keep():
    """In a process of its own: this one has children of other tests, such as the fork server of multiprocessing."""
    ended = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[False, False, True]"


def test_an_answer_to_another_question_is_none():
    """A worker that writes two answers would otherwise score the next sample by the second."""
    dismissed = []
    fork_server = SimpleNamespace(records=(), terminate=dismissed.append)
    for number, expected in ((1, {"number": 1, "score": 0.5}), (0, None), (2, None)):
        channel = SimpleNamespace(ask=lambda *_, number=number: encode({"number": number, "score": 0.5}))
        worker = ForkedProcess(fork_server, 1, channel)
        if expected is not None:
            assert worker.call("first", 1.0) == expected and dismissed == []
            continue
        with pytest.raises(ConnectionError, match="the answer belongs to another request"):
            worker.call("first", 1.0)
        assert dismissed.pop() is worker


def test_math_and_its_place_in_a_set():
    rewards = RewardSet([RewardSpec(name="math"), RewardSpec(name="exact_match")])
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
