"""A server of one reward over HTTP, for rewards of type `http`: a scorer in another environment or on another machine.

    python -m mmrl.rewards.services.server REWARD [--option key=value ...] [--host 127.0.0.1] --port N

It takes POST with application/json or application/x-npz (see `mmrl.rewards.services.http`) and answers JSON. There is
no authentication: serve only to machines that you trust.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from omegaconf import OmegaConf

from mmrl.errors import UserError
from mmrl.rewards.compose import RewardSet, RewardSpec
from mmrl.rewards.services.http import JSON, NPZ, decode

MAX_BYTES = 512 * 2**20  # of a request, packed and unpacked
_log = logging.getLogger(__name__)


class RewardServer(ThreadingHTTPServer):
    """An HTTP server of one reward. It listens at once; `serve_forever()` answers until `shutdown()`. It scores one
    request at a time.

    Errors are {"error": ...} with a status: 400 for a request that cannot be read, 411 without a length, 413 if it is
    too long, 415 for another content type, 422 for samples that the reward refuses, 500 for a fault of the server. A
    sample on which the reward fails gets null.
    """

    daemon_threads = True
    request_queue_size = 128  # all ranks may call at once

    def __init__(self, spec: RewardSpec, host: str, port: int, *, max_bytes: int = MAX_BYTES):
        self.rewards, self.max_bytes = RewardSet([spec]), max_bytes
        super().__init__((host, port), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: RewardServer
    timeout = 120  # seconds without data after which a connection is closed

    def do_GET(self) -> None:
        self._answer(200, {"reward": self.server.rewards.names[0]})

    def do_POST(self) -> None:
        status, answer = self._score()
        self._answer(status, answer)

    def _score(self) -> tuple[int, dict[str, Any]]:
        """Scores the samples of the request. Returns the status and the answer."""
        kind = self.headers.get_content_type()
        if kind not in (JSON, NPZ):
            return 415, {"error": f"the content type must be {JSON} or {NPZ}, not {kind}"}
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            return 411, {"error": "Content-Length is missing"}
        if int(length) > self.server.max_bytes:
            return 413, {"error": f"the request has {length} bytes; at most {self.server.max_bytes} are accepted"}
        body = self.rfile.read(int(length))
        try:
            samples, group = decode(body, "json" if kind == JSON else "npz", max_bytes=self.server.max_bytes)
        except Exception as error:  # any fault of a parser of bytes from the network
            return 400, {"error": f"{type(error).__name__}: {error}"}
        try:
            values = self.server.rewards.score(samples, group)[:, 0].tolist()
        except UserError as error:
            return 422, {"error": str(error)}
        except Exception as error:  # reported to the caller; the server continues
            _log.exception("the reward failed")
            return 500, {"error": repr(error)}
        answer: dict[str, Any] = {"scores": [None if math.isnan(value) else value for value in values]}
        spans = [sample.spans.get(self.server.rewards.names[0]) for sample in samples]
        if any(value is not None for value in spans):
            answer["spans"] = [value and {"of": value.unit, "values": list(value.values)} for value in spans]
        return 200, answer

    def _answer(self, status: int, answer: dict[str, Any]) -> None:
        """Sends an answer as JSON."""
        text = json.dumps(answer).encode()
        self.close_connection |= status != 200  # the unread rest of a refused request would be taken for the next one
        self.send_response(status)
        self.send_header("Content-Type", JSON)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *arguments: object) -> None:
        _log.debug(format, *arguments)


def serve(spec: RewardSpec, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Serves the reward until interrupted. Raises ValueError if the reward cannot be built, OSError for a port in
    use."""
    with RewardServer(spec, host, port) as server:
        print(f"serving {spec.name} at http://{host}:{server.server_port}", flush=True)
        server.serve_forever()


def main(arguments: list[str] | None = None) -> int:
    """Serves one reward over HTTP until Ctrl-C. Returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m mmrl.rewards.services.server", description="Serve one reward over HTTP."
    )
    parser.add_argument("reward", help="a name of the registry, package.module:function or package.module:Class")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="may be repeated")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parsed = parser.parse_args(arguments)
    options: Any = OmegaConf.to_container(OmegaConf.from_dotlist(parsed.option))
    try:
        serve(RewardSpec(name=parsed.reward, options=options), parsed.host, parsed.port)
    except (ValueError, OSError) as error:
        print(f"mmrl.rewards.services.server: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
