"""An endpoint of openpi's protocol for a policy that acts: msgpack over a websocket, an observation in, a chunk out.

A connection begins with a map that says what the policy was trained on. The n-th chunk of a connection is the n-th of
an episode of an evaluation with seed 0, at the temperature of evaluation.
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
from mmrl.serving.arrays import packed, unpacked
from mmrl.serving.observations import ActingPolicy, BadObservation, RobotReader

MAX_BYTES = 64 << 20  # of a message
_log = logging.getLogger(__name__)


class RobotServer:
    """Serves `policy` under the name `model` until `shutdown`. key: clients have to send it as `api_key`; None: anybody
    who reaches the address is answered. Raises OSError for an address that can not be listened at."""

    def __init__(self, policy: ActingPolicy, model: str, *, host: str, port: int, key: str | None = None) -> None:
        self.policy, self.model, self.key = policy, model, key
        self.reader = RobotReader(policy)
        self._one_at_a_time = threading.Lock()
        self._server = listen(
            self._converse,
            host,
            port,
            process_request=self._refused,
            compression=None,  # as openpi's: images of a local network are sent as they are
            max_size=MAX_BYTES,
        )

    @property
    def port(self) -> int:
        return self._server.socket.getsockname()[1]

    def serve_forever(self) -> None:
        self._server.serve_forever()

    def shutdown(self) -> None:
        self._server.shutdown()

    def infer(self, data: str | bytes, number: int) -> dict[str, Any]:
        """Returns the answer to the message `data`, the `number`-th of its connection, with "actions" [chunk, action]
        in the robot's units. Raises BadObservation."""
        if isinstance(data, str):
            raise BadObservation("a message is msgpack, not text")
        try:
            tree = unpacked(data)
        except ValueError as error:
            raise BadObservation(f"the message can not be read: {error}") from None
        observation = self.reader.read(tree)
        began = time.monotonic()
        with self._one_at_a_time:
            try:
                actions = self.policy.act(observation, [derive_seed(0, number)], self.policy.evaluation_temperature)[0]
            except UserError as error:
                raise BadObservation(str(error)) from None
        if not np.isfinite(actions).all():
            raise BadObservation("the policy's actions are not finite; nothing is sent to the robot")
        return {"actions": actions, "server_timing": {"infer_ms": (time.monotonic() - began) * 1000}}

    def _refused(self, connection: ServerConnection, request: Request) -> Response | None:
        """Returns the refusal of a connection: of a page of a browser, and of a caller without the key."""
        if request.headers.get("Origin") is not None:
            return connection.respond(HTTPStatus.FORBIDDEN, "pages of browsers are not answered\n")
        if request.path == "/healthz":
            return connection.respond(HTTPStatus.OK, "OK\n")
        sent = request.headers.get("Authorization", "").encode()
        if self.key is not None and not hmac.compare_digest(sent, f"Api-Key {self.key}".encode()):
            return connection.respond(HTTPStatus.UNAUTHORIZED, "the key is missing or wrong: api_key=KEY\n")
        return None

    def _converse(self, connection: ServerConnection) -> None:
        try:
            connection.send(packed({"model": self.model, **self.reader.describe()}))
            for number, data in enumerate(connection):
                connection.send(self._answer(data, number))
        except ConnectionClosed:  # without a farewell, as robots do that are switched off
            _log.debug("a connection broke off")

    def _answer(self, data: str | bytes, number: int) -> str | bytes:
        """Returns an answer, or a string, which clients take for an error."""
        try:
            return packed(self.infer(data, number))
        except BadObservation as error:
            return str(error)
        except Exception as error:  # it is reported to the caller, and the server goes on
            _log.exception("the request failed")
            return repr(error)


def serve(policy: ActingPolicy, model: str, *, host: str, port: int, key: str | None) -> None:
    """Serves a policy until Ctrl-C. Raises UserError for an address that is in use or not this machine's."""
    try:
        server = RobotServer(policy, model, host=host, port=port, key=key)
    except OSError as error:
        raise UserError(f"{host}:{port} can not be listened at: {error}") from None
    print(f"ws://{host}:{server.port} answers openpi's clients as {model!r}; Ctrl-C ends it", flush=True)
    server.serve_forever()
