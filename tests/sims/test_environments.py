"""One conversation as the environment's side keeps it; and environments in processes of their own, of which one that
misbehaves costs its own conversation."""

import time

import pytest

from mmrl.children.limits import LINUX, Limits
from mmrl.errors import UserError
from mmrl.rollouts import Prompt
from mmrl.sims.turns.dialogue import Dialogue
from mmrl.sims.turns.processes import Processes
from mmrl.sims.turns.settings import Isolation, TurnLimits
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
        ("silent", "no messages"),
        ("part", "a part that is no text, no image and no video"),
        ("empty image", "a part that is no text, no image and no video"),
        ("text", "5000 characters; limits.max_text=4000"),
        ("pixels", "9000000 pixels in observations; limits.max_pixels=4000000"),
        ("images", "20 images in observations; limits.max_images=16"),
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
        ("hang", f"no answer in {DEADLINE:g} s; task.environment.isolated.deadline_s"),
        ("children", "no answer in"),
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
def test_workers_end_with_their_owner():
    made = Processes(HostileSettings(), Isolation())
    talk = dialogue(made.make)
    for word in ("one", "two", "three"):
        talk.answer(word)
    made.close()
    assert gone([talk.record.turns[-1].facts["pid"]])


def test_an_environment_that_can_not_be_made_is_said_at_once():
    made = Processes(Impossible(), Isolation())
    with pytest.raises(UserError, match="task.environment: it needs a licence"):
        made.make().start(Prompt("p", "go on"))
    made.close()
