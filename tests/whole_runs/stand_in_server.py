"""`python -m tests.whole_runs.stand_in_server HOST PORT [KIND]`: what mmrl asks of vLLM's server, answered after a
tenth of a second by the prompt's token and the seed; or, of a kind of KINDS, answered badly."""

import contextlib
import json
import os
import sys
import threading
import time
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from mmrl.children.processes import end_with_parent
from mmrl.generation.weight_sync.checksums import checksum
from mmrl.generation.weight_sync.nccl import BroadcastTimeout, Receiver
from mmrl.generation.weight_sync.receiver import read_folder

VOCABULARY, SUPPRESSED, END = 1000, 7, 999  # that requests of tests have
DELAY = 0.1  # seconds


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    version, folder, kind, key = "none", None, "", None
    asked = 0  # requests for responses
    receiver, tensors = None, None  # of weights that are broadcast

    def handle_error(self, request, client_address):  # a client that has gone
        pass


def first(content, **changed):
    """The answer with its first response changed."""
    content["choices"][0] |= changed
    return content


def logp(value):
    return {"logprobs": {"content": [{"logprob": value}, {"logprob": -0.5}]}}


def listed(values):
    return {"logprobs": {"content": [{"logprob": value} for value in values]}}


# What becomes of a right answer: another one, or bytes, or a status and bytes.
KINDS = {
    "status 500": lambda c: (500, b'{"error": "it broke"}'),
    "broken JSON": lambda c: json.dumps(c).encode()[:-9],
    "no choices": lambda c: {},
    "other weights": lambda c: first(c, weight_versions=[{"version": "other"}]),
    "too few responses": lambda c: c | {"choices": c["choices"][:-1]},
    "too many responses": lambda c: c | {"choices": 2 * c["choices"]},
    "log-probability NaN": lambda c: first(c, **logp(float("nan"))),
    "log-probability positive": lambda c: first(c, **logp(0.7)),
    "fewer log-probabilities than tokens": lambda c: first(c, **listed([-0.5])),
    "token -7": lambda c: first(c, token_ids=[-7, 3]),
    "token 99999999": lambda c: first(c, token_ids=[99999999, 3]),
    "5000 tokens": lambda c: first(c, token_ids=[3] * 5000, **listed([-0.5] * 5000)),
    "no tokens": lambda c: first(c, token_ids=[], **listed([])),
    "HTML": lambda c: b"<html>Welcome</html>",
    "a list": lambda c: [c],
    "status 400": lambda c: (400, b'{"error": "too long"}'),
    "status 404": lambda c: (404, b"not found"),
    # not in the first table
    "log-probability infinite": lambda c: first(c, **logp(float("-inf"))),
    "log-probability a text": lambda c: first(c, **logp("-0.5")),
    "log-probabilities null": lambda c: first(c, logprobs=None),
    "tokens as texts": lambda c: first(c, token_ids=["3", "4"]),
    "tokens as fractions": lambda c: first(c, token_ids=[3.0, 4.5]),
    "a token of 400 digits": lambda c: first(c, token_ids=[10**400, 3]),
    "a placeholder": lambda c: first(c, token_ids=[3, SUPPRESSED]),
    "goes on after the end": lambda c: first(c, token_ids=[END, 3]),
    "stops without the end": lambda c: first(c, token_ids=[3], **listed([-0.5])),
    "no versions": lambda c: first(c, weight_versions=None),
    "two versions": lambda c: first(c, weight_versions=[*c["choices"][0]["weight_versions"], {"version": "other"}]),
    "experts that are none": lambda c: first(c, routed_experts="AAAA"),
    "another prompt": lambda c: c | {"prompt_token_ids": [1, 2, 3]},
    "no prompt": lambda c: c | {"prompt_token_ids": None},
    "a choice that is a number": lambda c: c | {"choices": [5]},
    "JSON 100,000 deep": lambda c: b"[" * 100_000,
    "a redirect": lambda c: (302, b""),
    "status 401": lambda c: (401, b'{"error": "Unauthorized"}'),
    "status 503": lambda c: (503, b""),
}
ON_THE_WIRE = ("closed connections", "hangs", "a byte now and then", "half an answer")
FIRST_TABLE = [*list(KINDS)[:17], *ON_THE_WIRE[:2]]


@cache
def held(folder):
    """Checksums of what lies in it, as an engine would have it."""
    return sums(read_folder(Path(folder)))


def sums(weights):
    found = {name: checksum(value) for name, value in weights}
    return {name: [own.value, own.count, own.state] for name, own in found.items()}


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer({"weight_version": self.server.version})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or "null")
        if self.server.key and self.headers.get("authorization") != f"Bearer {self.server.key}":
            self.answer((401, b'{"error": "Unauthorized"}'))
        elif self.path.endswith("generate"):
            self.generate(body)
        elif self.path == "/collective_rpc":
            self.call(body["method"], body["kwargs"])
        else:
            if self.path == "/update_weight_version":
                self.server.version = body["new_version"]
            self.answer(b"Success: done.", "text/plain")  # as vLLM does for adapters

    def call(self, method, arguments):
        if method == "standing":
            self.server.receiver = self.server.receiver or Receiver()
            self.answer({"results": [self.server.receiver.standing()]})
        elif method == "receive_broadcast":
            self.receive(**arguments)
        elif method == "receive_folder":
            self.server.folder = arguments["folder"]
            held.cache_clear()
            self.answer({"results": [None]})
        else:
            tensors = self.server.tensors if self.server.folder is None else held(self.server.folder)
            self.answer({"results": [{"tensors": tensors, "blank": [], "misplaced": []}]})

    def receive(self, rendezvous, first, base):
        """As `Arrival.receive_broadcast`."""
        if self.server.kind == "takes part in no broadcast":
            time.sleep(3600)
        receiver = self.server.receiver
        try:
            receiver.join(rendezvous, first)
            self.server.tensors = sums(receiver.weights(base))
        except (RuntimeError, BroadcastTimeout) as error:
            receiver.leave()
            self.answer((500, json.dumps({"error": str(error)}).encode()))
        else:
            receiver.base = base
            self.answer({"results": [None]})

    def generate(self, body):
        self.server.asked += 1
        content, kind = self.generated(body), self.server.kind
        if kind == "closed connections":
            self.close_connection = True
        elif kind == "hangs":
            time.sleep(3600)
        elif kind == "a byte now and then":
            self.send_response(200)
            self.send_header("content-length", "1000")
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(1000):
                    self.wfile.write(b" ")
                    time.sleep(0.2)  # each comes in time
        elif kind == "half an answer":
            self.send_response(200)
            self.send_header("content-length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices": [')
            self.close_connection = True
        else:
            self.answer(KINDS[kind](content) if kind else content)

    def generated(self, body):
        version = [{"version": self.server.version}]
        time.sleep(DELAY)
        ids, wanted = body["token_ids"], body["sampling_params"]
        seeds = range(wanted["seed"], wanted["seed"] + wanted["n"])
        logprobs = {"content": [{"logprob": -0.5}] * 2}
        choices = [{"token_ids": [ids[0], seed], "logprobs": logprobs, "weight_versions": version} for seed in seeds]
        return {"prompt_token_ids": ids, "choices": choices}

    def answer(self, content, kind="application/json"):
        status, data = content if isinstance(content, tuple) else (200, content)
        data = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.send_header("location", "/elsewhere")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        pass


@contextlib.contextmanager
def serving(kind="", key=None):
    """One in this process."""
    with Server(("127.0.0.1", 0), Handler) as server:
        server.kind, server.key = kind, key
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    server = Server((sys.argv[1], int(sys.argv[2])), Handler)
    server.kind, server.key = "".join(sys.argv[3:]), os.environ.get("VLLM_API_KEY")
    server.serve_forever()
