"""Signals that end a run in order."""

import os
import signal

import pytest

from mmrl.engine import Interruption

NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@pytest.fixture
def handlers():
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_schedulers_signal_is_noted_and_does_no_harm_when_it_comes_again(handlers, number):
    with Interruption() as interruption:
        os.kill(os.getpid(), number)
    assert interruption.signum == number
    os.kill(os.getpid(), number)  # while the process ends; by default this would change how it ends
    assert signal.getsignal(signal.SIGINT) is handlers[signal.SIGINT]


def test_without_a_signal_all_is_as_before(handlers):
    with Interruption() as interruption:
        assert signal.getsignal(signal.SIGUSR1) == interruption._note
    assert {number: signal.getsignal(number) for number in NUMBERS} == handlers
