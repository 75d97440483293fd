"""Who calls in: only a process that knows the key, and nobody else keeps it waiting."""

import socket
import threading
from multiprocessing import AuthenticationError

import pytest

from mmrl.children import listener
from mmrl.children.listener import Listener, Pair, dial

SOON = 20.0  # seconds


def nothing():
    pass


@pytest.fixture
def door():
    made = Listener("127.0.0.1")
    yield made
    made.close()


def test_only_who_has_the_key_comes_in(door):
    silent, talker = (socket.create_connection(door.address) for _ in range(2))
    talker.sendall(b"0" * 64)
    with pytest.raises((AuthenticationError, EOFError, OSError)):
        dial(*door.address, "another key")
    with pytest.raises(TimeoutError, match="no process connected within 0.3 s"):
        door.accept(nothing, 0.3)
    callers = []
    thread = threading.Thread(target=lambda: callers.append(dial(*door.address, door.key)))
    thread.start()
    ours = door.accept(nothing, SOON)  # the silent one keeps nobody waiting
    thread.join()
    callers[0].send(b"here")
    assert ours.receive() == b"here" and ours.socket.getpeername() == callers[0].socket.getsockname()
    assert ours.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    for one in (silent, talker, ours, *callers):
        one.close()


def test_a_caller_is_not_taken_in_by_another_door(door):
    """It knows the key and asks for it too."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        found = []

        def answer():
            with other.accept()[0] as caller, socket.create_connection(door.address) as real:
                caller.sendall(real.recv(100))  # the real door's challenge
                real.sendall(caller.recv(100))
                caller.sendall(real.recv(100))  # it welcomes
                caller.recv(100)  # the caller's own challenge
                caller.sendall((7).to_bytes(4, "big") + b"welcome")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises((AuthenticationError, EOFError, OSError)):
            found.append(dial(*other.getsockname(), door.key))
        thread.join()
        assert not found


def test_one_that_will_not_come_is_not_awaited(door):
    def look():
        raise ConnectionResetError("its process ended")

    with pytest.raises(ConnectionError, match="its process ended"):
        door.accept(look, SOON)


def test_nobody_listens_behind_a_closed_door(door):
    door.close()
    with pytest.raises(OSError):
        socket.create_connection(door.address)


def test_keys_differ():
    one, other = Listener("127.0.0.1"), Listener("127.0.0.1")
    assert one.key != other.key and len(one.key) == 64
    one.close()
    other.close()


def test_a_process_of_this_host_has_its_end_already():
    pair = Pair()
    ours = pair.accept(nothing, 0.0)
    pair.theirs.sendall((2).to_bytes(8, "big") + b"hi")
    assert ours.receive() == b"hi"
    pair.close()
    assert pair.theirs.recv(1) == b""
    pair.theirs.close()


def test_strangers_are_sent_away_in_time_and_are_not_many(monkeypatch):
    monkeypatch.setattr(listener, "GREETING_S", 0.5)
    monkeypatch.setattr(listener, "MOST_GREETINGS", 3)
    made = Listener("127.0.0.1")
    strangers = [socket.create_connection(made.address) for _ in range(3)]
    for one in strangers:
        assert one.recv(100)  # the challenge
        one.settimeout(SOON)
    one_too_many = socket.create_connection(made.address)
    one_too_many.settimeout(SOON)
    assert one_too_many.recv(100) == b""  # sent away at once
    strangers[0].sendall((100).to_bytes(4, "big"))  # a byte now and then does not keep the place
    assert [one.recv(100) for one in strangers] == [b""] * 3
    callers = []
    thread = threading.Thread(target=lambda: callers.append(dial(*made.address, made.key)))
    thread.start()
    made.accept(nothing, SOON).close()
    thread.join()
    for one in (*strangers, one_too_many, *callers):
        one.close()
    made.close()


def test_an_error_of_accept_does_not_close_the_door(door, monkeypatch):
    """As where a process is out of file descriptors for a while."""
    errors = [OSError(24, "Too many open files")] * 3
    accept = socket.socket.accept

    def failing(one):
        if errors:
            raise errors.pop()
        return accept(one)

    monkeypatch.setattr(socket.socket, "accept", failing)
    callers = []
    # The first caller wakes the thread that waits in the real accept; the next ones find the errors.
    for _ in range(2):
        thread = threading.Thread(target=lambda: callers.append(dial(*door.address, door.key)))
        thread.start()
        door.accept(nothing, SOON).close()
        thread.join()
    assert errors == []
    for one in callers:
        one.close()
