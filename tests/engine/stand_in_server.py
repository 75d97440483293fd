"""`python -m tests.engine.stand_in_server HOST PORT`: what mmrl asks of vLLM's server, answered after a tenth of
a second by the prompt's token and the seed."""

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from mmrl.placement import end_with_parent


class Server(ThreadingHTTPServer):
    daemon_threads = True
    version = "none"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        self.answer({"weight_version": self.server.version})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or "null")
        if self.path == "/update_weight_version":
            self.server.version = body["new_version"]
        self.answer(self.generated(body) if self.path.endswith("generate") else {})

    def generated(self, body):
        version = [{"version": self.server.version}]
        time.sleep(0.1)
        ids, wanted = body["token_ids"], body["sampling_params"]
        seeds = range(wanted["seed"], wanted["seed"] + wanted["n"])
        logprobs = {"content": [{"logprob": -0.5}] * 2}
        choices = [{"token_ids": [ids[0], seed], "logprobs": logprobs, "weight_versions": version} for seed in seeds]
        return {"prompt_token_ids": ids, "choices": choices}

    def answer(self, content):
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        pass


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    Server((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
