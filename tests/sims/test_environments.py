"""One conversation as the environment's side keeps it; and environments in processes of their own, of which one that
misbehaves costs its own conversation."""

import os
import time
from typing import ClassVar

import pytest

from mmrl.children import fork_server
from mmrl.children.limits import LINUX, Limits
from mmrl.engine import Interruption
from mmrl.errors import UserError
from mmrl.rollouts import Prompt
from mmrl.sims.turns import processes as turn_processes
from mmrl.sims.turns.dialogue import Dialogue, Fault
from mmrl.sims.turns.processes import Processes
from mmrl.sims.turns.settings import Isolation, TurnLimits
from mmrl.sims.turns.timed import TimedEnvironment, TimedEnvironments
from tests.helpers.processes import gone
from tests.sims.hostile_turns import HostileSettings, Impossible

DEADLINE = 3.0
needs_linux = pytest.mark.skipif(not LINUX, reason="limits of processes are Linux's")


@pytest.fixture(scope="module")
def processes():
    isolation = Isolation(deadline_s=DEADLINE, limits=Limits(memory_gib=1.0))
    made = Processes(HostileSettings(), isolation)
    yield made
    made.close()


def dialogue(make, text="go on", **limits):
    return Dialogue(make(), Prompt("p", text), TurnLimits(**limits))


@pytest.fixture(params=["here", "apart"])
def make(request, processes):
    return HostileSettings().make if request.param == "here" else processes.make


def test_a_conversation_is_recorded_turn_by_turn(make):
    talk = dialogue(make)
    assert [m.text for m in talk.prompt.messages] == ["go on"]
    assert [m.text for m in talk.answer("one")] == ["word 1"]
    assert [m.text for m in talk.answer("two")] == ["word 2"]
    assert talk.end is None and talk.answer("three") == ()
    record = talk.record
    assert (record.end, record.problem) == ("environment", "")
    assert [(t.response, t.reward, t.tool, t.error) for t in record.turns] == [
        ("one", 0.5, "t", "e"),
        ("two", 0.5, "t", "e"),
        ("three", 1.0, None, None),
    ]
    assert record.turns[0].facts == {"n": [1, "a"]} and record.turns[2].observation == ()


def test_the_last_turn_that_is_allowed_ends_the_conversation(make):
    talk = dialogue(make, max_turns=2)
    talk.answer("one")
    assert talk.answer("two") == () and talk.record.end == "turns"
    assert talk.record.turns[1].reward == 0.5  # it was answered, and the answer is not read


@pytest.mark.parametrize(
    ("order", "told"),
    [
        ("raise", "KeyError: 'no such thing'"),
        ("nothing", ""),
        ("silent", "must return a list of Message"),
        ("part", "a part that is neither text, an image nor a video"),
        ("empty image", "a part that is neither text, an image nor a video"),
        ("text", "5000 characters, more than limits.max_text=4000"),
        ("pixels", "9000000 pixels, more than limits.max_pixels=4000000"),
        ("images", "20 images, more than limits.max_images=16"),
    ],
)
def test_what_an_environment_does_wrong_costs_its_conversation(make, order, told):
    talk = dialogue(make)
    talk.answer("one")
    assert talk.answer(order) == ()
    assert talk.record.end == "lost" and told in talk.record.problem
    assert [turn.response for turn in talk.record.turns] == ["one", order]
    again = dialogue(make)
    assert again.answer("one") and again.end is None
    again.finish("turns")


def test_a_reward_that_is_no_number_costs_its_conversation(make):
    talk = dialogue(make)
    talk.answer("nan")
    assert talk.record.end == "lost" and talk.record.turns[0].reward == 0.0


def test_a_beginning_that_raises_costs_its_conversation(make):
    talk = dialogue(make, "raise")
    assert talk.end == "lost" and "KeyError" in talk.problem and talk.record.turns == ()


@needs_linux
@pytest.mark.parametrize(
    ("order", "told"),
    [
        ("hang", f"no answer within task.environment.isolated.deadline_s={DEADLINE:g} s"),
        ("children", "no answer within"),
        ("exit", "its process ended"),
        ("memory", "MemoryError"),
        ("flood", "limits.max_text=4000"),
    ],
)
def test_a_process_that_hangs_or_ends_costs_its_conversation(processes, order, told):
    other = dialogue(processes.make)
    other.answer("one")
    talk = dialogue(processes.make)
    started = time.monotonic()
    assert talk.answer(order) == () and talk.end == "lost"
    assert told in talk.problem and time.monotonic() - started < DEADLINE + 10
    assert [m.text for m in other.answer("two")] == ["word 2"]
    other.finish("turns")


def test_a_worker_plays_one_conversation_after_the_other(processes):
    pids = set()
    for _ in range(3):
        talk = dialogue(processes.make)
        for word in ("one", "two", "three"):
            talk.answer(word)
        pids.add(talk.record.turns[-1].facts["pid"])
    assert len(pids) == 1


@needs_linux
@pytest.mark.parametrize(
    ("order", "problem"), [("raise", "KeyError"), ("hang", "did not end in 0.5 s"), ("exit", "ended")]
)
def test_a_close_that_fails_costs_nobody_else(processes, monkeypatch, order, problem):
    """The conversation before has its result; the next one gets a process that is well."""
    monkeypatch.setattr(turn_processes, "CLOSE_S", 0.5)
    for _ in range(2):
        talk = dialogue(processes.make)
        talk.answer(f"at close: {order}")
        talk.finish("turns")
        assert talk.record.end == "turns" and problem in talk.record.problem
        after = dialogue(processes.make)
        assert [m.text for m in after.answer("one")] == ["word 1"]
        after.finish("turns")
        assert after.record.problem == ""


class Here(HostileSettings):
    type: str = "tests.sims.test_environments:Here"
    deadline_s: float = 0.3


def test_an_environment_in_this_process_has_a_time_limit():
    """It costs its conversation; another one of the same thread goes on, and nothing is asked of it again."""
    environments = TimedEnvironments(Here())
    other = dialogue(environments.make)
    other.answer("one")
    talk = dialogue(environments.make)
    started = time.monotonic()
    assert talk.answer("hang") == () and talk.end == "lost" and time.monotonic() - started < 10
    assert talk.problem == "no answer within task.environment.deadline_s=0.3 s"
    assert [m.text for m in other.answer("two")] == ["word 2"]
    late = dialogue(environments.make, "hang")
    assert late.end == "lost" and late.problem == talk.problem


class Sometimes(HostileSettings):
    """Environments of which those with these numbers cannot be constructed."""

    type: str = "tests.sims.test_environments:Sometimes"
    deadline_s: float = 0.3
    hang: tuple[int, ...] = ()
    wrong: tuple[int, ...] = ()
    made: ClassVar[list[None]] = []

    def make(self):
        self.made.append(None)
        if len(self.made) in self.hang:
            time.sleep(60)
        if len(self.made) in self.wrong:
            raise OSError("no port")
        return super().make()


LATE = "it cannot be constructed: no answer within task.environment.deadline_s=0.3 s"


@pytest.mark.parametrize(
    ("options", "told"), [({"hang": (1,)}, LATE), ({"wrong": (1,)}, "it cannot be constructed: OSError: no port")]
)
def test_a_first_environment_that_cannot_be_constructed_ends_the_run(options, told):
    Sometimes.made.clear()
    with pytest.raises(UserError) as raised:
        TimedEnvironments(Sometimes(**options)).make()
    assert str(raised.value).startswith(f"task.environment: {told}")
    assert str(raised.value).endswith("correct its __init__, or raise task.environment.deadline_s if it needs longer")


def test_a_later_one_loses_its_rollout():
    Sometimes.made.clear()
    environments = TimedEnvironments(Sometimes(hang=(2,), wrong=(3,)))
    first, second, third, fourth = (dialogue(environments.make) for _ in range(4))
    assert (second.end, second.problem) == ("lost", LATE)
    assert third.end == "lost" and third.problem.startswith("it cannot be constructed: OSError: no port")
    assert [m.text for talk in (first, fourth) for m in talk.answer("one")] == ["word 1", "word 1"]


def test_one_that_hung_is_not_asked_again():
    """Its thread may be in the middle of a call: another one, close() too, would meet it half changed."""
    asked = []

    class Hanging(Impossible):
        def step(self, response):
            asked.append(response)
            time.sleep(60)

        def close(self):
            asked.append("close")

    one = TimedEnvironment(Hanging(), TimedEnvironments(Here()))
    with pytest.raises(Fault, match=r"no answer within task\.environment\.deadline_s=0.3 s"):
        one.step("first")
    with pytest.raises(Fault, match="it was not called again"):
        one.step("second")
    one.close()
    assert asked == ["first"]


def test_an_exit_in_this_process_costs_its_conversation():
    """Where a run goes on, os._exit raises, and the environment is lost as one that raises."""
    environments = TimedEnvironments(HostileSettings())
    with Interruption():
        talk = dialogue(environments.make)
        assert talk.answer("exit") == () and "os._exit(3) was called in the training process" in talk.problem
        assert os.fork() or os._exit(7)  # a copy of this process may end
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
    assert os._exit.__module__ == "posix"


@needs_linux
def test_workers_end_with_their_owner():
    made = Processes(HostileSettings(), Isolation())
    talk = dialogue(made.make)
    for word in ("one", "two", "three"):
        talk.answer(word)
    made.close()
    assert gone([talk.record.turns[-1].facts["pid"]])


class NeverReady(HostileSettings):
    type: str = "tests.sims.test_environments:NeverReady"

    def make(self):
        time.sleep(1000)


def test_an_isolated_one_whose_constructor_hangs_is_said_with_its_key(monkeypatch):
    monkeypatch.setattr(fork_server, "START_S", 0.5)
    made = Processes(NeverReady(), Isolation())
    with pytest.raises(UserError, match=r"^task\.environment: it was not ready within 0\.5 s in a process of its own;"):
        made.make().start(Prompt("p", "go on"))
    made.close()


def test_an_environment_that_can_not_be_made_is_said_at_once():
    made = Processes(Impossible(), Isolation())
    with pytest.raises(UserError, match="task.environment: it needs a licence"):
        made.make().start(Prompt("p", "go on"))
    made.close()
