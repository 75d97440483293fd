"""How long one waits for the other, and by what it is known to live."""

import socket
import threading
import time

import pytest
import torch

from mmrl.children.channel import Channel, Patience
from mmrl.children.frames import decode, encode


@pytest.fixture
def ends():
    pair = [Channel(one) for one in socket.socketpair()]
    yield pair
    for one in pair:
        one.close()


def later(seconds, function, *arguments):
    timer = threading.Timer(seconds, function, arguments)
    timer.start()
    return timer


def test_frames_are_eight_bytes_of_length_and_the_bytes(ends):
    ours, theirs = ends
    ours.send(b"one")
    ours.send()
    assert theirs.socket.recv(100) == bytes([0, 0, 0, 0, 0, 0, 0, 3]) + b"one" + bytes(8)


def test_large_messages_pass(ends):
    ours, theirs = ends
    message = encode(torch.arange(1 << 20))
    sender = threading.Thread(target=ours.send, args=(message,))
    sender.start()
    assert torch.equal(decode(theirs.receive()), torch.arange(1 << 20))
    sender.join()


def test_an_answer_that_is_too_late_is_given_up(ends):
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="^no answer in 0.3 s$"):
        ends[0].ask(b"question", Patience(0.3))
    assert 0.3 <= time.monotonic() - began < 3
    assert ends[1].receive() == b"question"


def test_signs_of_life_are_no_answer_and_keep_it_awaited(ends):
    ours, theirs = ends
    timers = [later(0.3 * k, theirs.send) for k in (1, 2, 3)]
    timers.append(later(1.2, theirs.send, b"answer"))
    assert ours.receive(Patience(20, silent_s=0.8)) == b"answer"
    with pytest.raises(TimeoutError, match="^no heartbeat in 0.2 s$"):
        ours.receive(Patience(20, silent_s=0.2))
    for timer in timers:
        timer.join()


def test_one_that_only_gives_signs_of_life_is_too_late_all_the_same(ends):
    ours, theirs = ends
    timers = [later(0.1 * k, theirs.send) for k in range(1, 8)]
    with pytest.raises(TimeoutError, match="no answer in 0.4 s"):
        ours.receive(Patience(0.4, silent_s=0.3))
    for timer in timers:
        timer.join()


def test_an_answer_that_drips_is_too_late_too(ends):
    ours, theirs = ends
    theirs.socket.sendall((100).to_bytes(8, "big"))
    timers = [later(0.1 * k, theirs.socket.sendall, b"x") for k in range(1, 10)]
    with pytest.raises(TimeoutError, match="no answer in 0.5 s"):
        ours.receive(Patience(0.5))
    for timer in timers:
        timer.join()


def test_who_does_not_read_is_too_late(ends):
    with pytest.raises(TimeoutError):
        ends[0].ask(bytes(1 << 24), Patience(20, silent_s=0.3))


def test_an_answer_of_too_many_bytes_is_refused_before_it_is_read(ends):
    ours, theirs = ends
    theirs.socket.sendall((1 << 40).to_bytes(8, "big"))
    with pytest.raises(ValueError, match="the answer has 1099511627776 bytes"):
        ours.receive(Patience(20), max_bytes=100)
    theirs.send(b"x" * 100)
    assert len(ours.receive(Patience(20), max_bytes=100)) == 100


def test_an_end_is_noticed_and_so_is_what_looking_finds(ends):
    ours, theirs = ends
    looks = []

    def look():
        looks.append(None)
        if len(looks) == 2:
            raise ConnectionResetError("its process ended")

    began = time.monotonic()
    with pytest.raises(ConnectionError, match="its process ended"):
        ours.receive(Patience(20, poll=look))
    assert 1.0 <= time.monotonic() - began < 5
    theirs.close()
    with pytest.raises(ConnectionError, match="the other process closed the connection"):
        ours.receive()


def test_who_sets_no_limit_waits(ends):
    ours, theirs = ends
    later(0.2, theirs.send, b"answer")
    assert ours.ask(b"question", Patience()) == b"answer" and theirs.receive() == b"question"
