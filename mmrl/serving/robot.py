"""An endpoint of openpi's protocol for robot policies: msgpack over a websocket, an observation in, a chunk of actions
out.

The server first sends a map with the cameras and sizes that the policy was trained on. It samples at the temperature of
evaluation; the seed of a chunk is its index in the connection.
"""

from __future__ import annotations

import hmac
import logging
import threading
import time
from http import HTTPStatus
from typing import Any

import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection
from websockets.sync.server import serve as listen

from mmrl.errors import UserError
from mmrl.samplers.chain import derive_seed
from mmrl.serving.arrays import pack, unpack
from mmrl.serving.observations import ActingPolicy, BadObservation, RobotReader

MAX_BYTES = 64 << 20  # of a message
_log = logging.getLogger(__name__)


class RobotServer:
    """Serves `policy` under the name `model` until `shutdown`.

    key: the `api_key` that clients have to send; None: no key is needed. Raises OSError if the server cannot listen at
    the address.
    """

    def __init__(self, policy: ActingPolicy, model: str, *, host: str, port: int, key: str | None = None) -> None:
        self.policy, self.model, self.key = policy, model, key
        self.reader = RobotReader(policy)
        self._policy_lock = threading.Lock()
        self._server = listen(
            self._serve_connection,
            host,
            port,
            process_request=self._refuse,
            compression=None,  # as in openpi: on a local network compression costs more time than it saves
            max_size=MAX_BYTES,
        )

    @property
    def port(self) -> int:
        return self._server.socket.getsockname()[1]

    def serve_forever(self) -> None:
        self._server.serve_forever()

    def shutdown(self) -> None:
        self._server.shutdown()

    def infer(self, data: str | bytes, message_index: int) -> dict[str, Any]:
        """Answers a message with "actions" [chunk, action] in the robot's units.

        data: the message. message_index: its index in the connection, the seed. Raises BadObservation if the message or
        the observation in it is invalid.
        """
        if isinstance(data, str):
            raise BadObservation("a message must be msgpack, not text")
        try:
            tree = unpack(data)
        except ValueError as error:
            raise BadObservation(f"the message cannot be read: {error}") from None
        observation = self.reader.read(tree)
        started = time.monotonic()
        with self._policy_lock:
            try:
                seeds = [derive_seed(0, message_index)]
                actions = self.policy.act(observation, seeds, self.policy.evaluation_temperature)[0]
            except UserError as error:
                raise BadObservation(str(error)) from None
        if not np.isfinite(actions).all():
            raise BadObservation("the policy's actions are not finite, so they are not sent to the robot")
        return {"actions": actions, "server_timing": {"infer_ms": (time.monotonic() - started) * 1000}}

    def _refuse(self, connection: ServerConnection, request: Request) -> Response | None:
        """Returns an HTTP error for a web page or a client without the key, 200 for /healthz, and None to accept the
        connection."""
        if request.headers.get("Origin") is not None:
            return connection.respond(
                HTTPStatus.FORBIDDEN, "requests of web pages (with an Origin header) are not answered\n"
            )
        if request.path == "/healthz":
            return connection.respond(HTTPStatus.OK, "OK\n")
        header = request.headers.get("Authorization", "").encode()
        if self.key is not None and not hmac.compare_digest(header, f"Api-Key {self.key}".encode()):
            return connection.respond(HTTPStatus.UNAUTHORIZED, "the key is missing or wrong: api_key=KEY\n")
        return None

    def _serve_connection(self, connection: ServerConnection) -> None:
        """Answers the messages of a connection until it is closed."""
        try:
            connection.send(pack({"model": self.model, **self.reader.describe()}))
            for message_index, data in enumerate(connection):
                connection.send(self._answer(data, message_index))
        except ConnectionClosed:  # without a closing handshake, as when a robot is switched off
            _log.debug("a connection broke off")

    def _answer(self, data: str | bytes, message_index: int) -> str | bytes:
        """Returns the msgpack answer to a message, or a string, which clients read as an error."""
        try:
            return pack(self.infer(data, message_index))
        except BadObservation as error:
            return str(error)
        except Exception as error:  # the client gets the error, and the server continues
            _log.exception("the request failed")
            return repr(error)


def serve(policy: ActingPolicy, model: str, *, host: str, port: int, key: str | None) -> None:
    """Serves a robot policy until Ctrl-C, see `RobotServer`. Raises UserError if the address is in use or not this
    machine's."""
    try:
        server = RobotServer(policy, model, host=host, port=port, key=key)
    except OSError as error:
        raise UserError(f"cannot listen at {host}:{port}: {error}; choose another --host or --port") from None
    print(f"ws://{host}:{server.port} serves {model!r} to openpi's clients; Ctrl-C ends it", flush=True)
    server.serve_forever()
