"""Real HTTP servers on a thread of the test, with scripted answers."""

import json
import socket
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Scripted(ThreadingHTTPServer):
    """Answers request i with script[i], the last one for all further: a function (handler, body) -> (status, bytes)."""

    daemon_threads = True

    def __init__(self, script):
        self.script, self.requests, self.lock = script, [], threading.Lock()
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with self.server.lock:
            number = len(self.server.requests)
            self.server.requests.append((self.path, dict(self.headers), body))
        act = self.server.script[min(number, len(self.server.script) - 1)]
        try:
            status, text = act(self, body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client gave up, which is what a test of deadlines wants

    def log_message(self, *arguments):
        pass


def says(status, answer):
    """An answer at once; JSON unless it is bytes."""
    text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    return lambda handler, body: (status, text)


def sleeps(seconds):
    def act(handler, body):
        time.sleep(seconds)
        return 200, b"{}"

    return act


def hangs_up(handler, body):
    handler.connection.close()
    raise ConnectionResetError


def trickles(handler, body):
    """A byte every 50 ms for five seconds: no single wait is long."""
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    for _ in range(100):
        handler.wfile.write(b" ")
        time.sleep(0.05)
    raise ConnectionResetError


@contextmanager
def running(server):
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def scripted(*script):
    return running(Scripted(script))


DRIPS = {
    "status line": (b"", b"H"),
    "header": (b"HTTP/1.1 200 OK\r\nX: ", b"a"),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"X: a\r\n"),
    "100 Continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "chunk extension": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;", b"a"),
    "trailers": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"X: a\r\n"),
    "body": (b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b"a"),
}


@contextmanager
def dripping(part):
    """The address of a server that begins an answer and then sends a little more of that part, without end."""
    begin, more = DRIPS[part]
    ended = threading.Event()

    def drip():
        caller, _ = server.accept()
        with caller, suppress(OSError):
            caller.recv(1 << 16)
            caller.sendall(begin)
            while not ended.wait(0.02):
                caller.sendall(more)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=drip, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            ended.set()
