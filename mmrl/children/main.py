"""`python -m mmrl.children.main SERVICE DESCRIPTOR`, or SERVICE HOST PORT: the process of a
`mmrl.children.child.Child`.

It builds the service from its first message, then answers one message after the other. While it works it sends a sign
of life every second, by which it also notices that the connection is closed. It ends with the process that started it,
also if that crashes.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from mmrl.children.channel import Channel
from mmrl.children.frames import decode, encode
from mmrl.children.listener import KEY, dial
from mmrl.children.processes import end_group, end_with_parent, leave_signals_to_parent
from mmrl.errors import UserError, describe_error
from mmrl.runtime.logging import quieten_environment

BEAT_S = 1.0  # seconds between two signs of life


class Service(ABC):
    """A service that a child process runs. It is built from the first message. facts: the answer to that message."""

    facts: object = None

    @abstractmethod
    def answer(self, request: Any) -> object:
        """Returns the answer to a request, a value that `mmrl.children.frames.encode` takes."""

    def shared(self, request: Any) -> Sequence[Any]:
        """Returns the objects of the request that the answer may name instead of repeating them."""
        return ()

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Frees the resources of the service; called when the channel is closed."""


def serve(channel: Channel, make: Callable[[Any], Service], abandoned: Callable[[], None]) -> None:
    """Answers requests until the other process closes the channel. make: builds the service from the first request.
    abandoned: called if the channel is closed while an answer is computed."""
    busy, services = threading.Event(), list[Service]()
    threading.Thread(target=_beat, args=(channel, busy, abandoned), daemon=True).start()
    with suppress(ConnectionError):
        while True:
            request = decode(channel.receive())
            busy.set()
            answer = _answer(services, make, request)
            busy.clear()
            channel.send(answer)
    for service in services:
        service.close()


def _answer(services: list[Service], make: Callable[[Any], Service], request: object) -> bytes:
    """Returns the encoded answer to a request: the service's answer, "refused" for UserError, "raised" for any other
    error. The first request builds the service."""
    try:
        if not services:
            services.append(make(request))
            return encode({"answer": services[0].facts})
        return encode({"answer": services[0].answer(request)}, services[0].shared(request))
    except UserError as error:
        return encode({"refused": str(error)})
    except Exception as error:  # any fault of a policy, a task or a simulator
        return encode({"raised": describe_error(error)})


def _beat(channel: Channel, busy: threading.Event, abandoned: Callable[[], None]) -> None:
    """Sends signs of life while an answer is computed. Calls `abandoned` when the other process has closed the
    channel."""
    with suppress(OSError):
        while busy.wait():
            time.sleep(BEAT_S)
            if busy.is_set():
                channel.send()
    abandoned()


def main() -> None:
    """Runs a service (module:name) on an inherited socket, or on a connection to HOST PORT; ends with its parent."""
    quieten_environment()
    leave_signals_to_parent()
    threading.Thread(target=end_with_parent, daemon=True).start()
    service, *address = sys.argv[1:]
    module, _, name = service.partition(":")
    if len(address) == 1:
        channel = Channel(socket.socket(fileno=int(address[0])))
    else:
        channel = dial(address[0], int(address[1]), os.environ.pop(KEY))
    end = partial(end_group, 0)  # ends this process with all processes that it started
    serve(channel, vars(importlib.import_module(module))[name], end)
    end()


if __name__ == "__main__":
    main()
