"""A process that answers, and what its owner is told where it does not."""

import os
import signal
import socket
import sys
import threading

import numpy as np
import pytest

from mmrl.children.channel import Channel
from mmrl.children.child import Child, Lost, OnThisHost, Raised, Refused
from mmrl.children.frames import encode
from mmrl.children.listener import Listener, Pair, dial
from mmrl.children.main import Service, serve
from mmrl.errors import UserError
from tests.helpers.processes import gone

ECHO = f"{__name__}:Echo"


class Echo(Service):
    """Does what it is told."""

    def __init__(self, first):
        self.first, self.facts = first, {"first": first, "pid": os.getpid()}

    def answer(self, request):
        if isinstance(request, str):
            self.obey(request)
        return [self.first, request]

    def obey(self, request):
        if request == "refuse":
            raise UserError("I will not")
        if request == "raise":
            raise KeyError("nothing there")
        if request == "die":
            os._exit(3)
        if request == "hang":
            signal.pause()
        if request == "print":
            print("to nobody")
        if request == "object":
            self.first = object()

    def shared(self, request):
        return request if isinstance(request, list) else ()


class Standing:
    """A process that runs, whatever happens."""

    def poll(self):
        return None

    def wait(self, timeout=None):
        return None

    def kill(self):
        pass


def answering(function):
    """A child of which a thread plays the part."""
    pair = Pair()
    theirs = Channel(socket.socket(fileno=pair.theirs.detach()))
    threading.Thread(target=function, args=(theirs,), daemon=True).start()
    child = Child(ECHO, lambda service: (Standing(), pair), records=())
    child.start()
    return child


@pytest.fixture
def echo():
    child = answering(lambda channel: serve(channel, Echo, lambda: None))
    yield child
    child.stop()


def test_the_first_message_makes_it_and_the_others_are_answered(echo):
    assert echo.ask(encode({"a": 1}), 20)["first"] == {"a": 1}
    array = np.arange(3.0)
    first, came = echo.ask(encode(array), 20)
    assert first == {"a": 1} and came.tolist() == [0, 1, 2]
    assert echo.up and echo.starts == 1


def test_a_service_is_closed_once_nobody_listens():
    closed = threading.Event()

    class Closing(Echo):
        def close(self):
            closed.set()

    child = answering(lambda channel: serve(channel, Closing, lambda: None))
    assert child.ask(encode(1), 10)["first"] == 1 and not closed.is_set()
    child.stop()
    assert closed.wait(10)


def test_what_both_have_is_not_sent_again(echo):
    echo.ask(encode(0), 20)
    asked = [np.arange(3), np.arange(2)]
    assert echo.ask(encode(asked), 20, shared=asked)[1][1] is asked[1]


def test_refusals_and_faults_are_told_apart_and_cost_nothing(echo):
    echo.ask(encode(0), 20)
    with pytest.raises(Refused, match="^I will not$"):
        echo.ask(encode("refuse"), 20)
    with pytest.raises(Raised, match=r"^KeyError: 'nothing there' \(test_child.py:\d+\)$"):
        echo.ask(encode("raise"), 20)
    with pytest.raises(Raised, match="TypeError: a builtins.object"):
        echo.ask(encode("object"), 20)
    with pytest.raises(Refused):
        echo.ask(encode("refuse"), 20)


@pytest.mark.parametrize("answer", [b"nonsense", encode(5)[:-4], b"\0" * 8 + b"["])
def test_nonsense_is_as_an_end(answer):
    child = answering(lambda channel: (channel.receive(), channel.send(answer)))
    with pytest.raises(Lost, match="its connection ended|its process ended"):
        child.ask(encode(0), 20)
    child.stop()


def test_a_process_is_looked_after_until_it_ends(tmp_path, capfd):
    log = tmp_path / "here" / "log"
    child = Child(ECHO, OnThisHost(log=log))
    child.start()
    pid = child.ask(encode(0), 60)["pid"]
    assert pid == child.process.pid and os.getpgid(pid) == pid
    assert child.ask(encode("print"), 20) == [0, "print"]
    with pytest.raises(Lost, match="^its process ended with 3$") as lost:
        child.ask(encode("die"), 20)
    assert lost.value.code == 3
    child.stop()
    child.start()
    again = child.ask(encode(1), 60)["pid"]
    assert again != pid and child.starts == 2
    with pytest.raises(TimeoutError, match="^no answer in 0.5 s$"):
        child.ask(encode("hang"), 0.5)
    child.stop()
    assert gone([again]) and not child.up


def test_another_interpreter_sees_none_of_our_packages(tmp_path):
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\necho "path=$PYTHONPATH." >&2\nexec {sys.executable} -c "import sys; sys.exit(4)"\n')
    other.chmod(0o755)
    child = Child(ECHO, OnThisHost(python=str(other), log=tmp_path / "log"))
    child.start()
    with pytest.raises(Lost, match="ended with 4"):
        child.ask(encode(0), 20)
    assert (tmp_path / "log").read_text() == "path=.\n"
    child.stop()


def test_nobody_may_call_one_that_was_given_up():
    door = Listener("127.0.0.1")
    child = Child(ECHO, lambda service: (Standing(), door))
    child.start()
    socket.create_connection(door.address).close()
    child.stop()
    with pytest.raises(OSError):
        dial(*door.address, door.key)
