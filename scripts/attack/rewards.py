"""Attacks rewards: built-in rewards by long responses, the run by rewards that fail, the machine by what they start.

    python scripts/attack/rewards.py [--part]

It takes three minutes on two cores, with --part one. It needs no network.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import hostile_rewards
from table import Table

from mmrl.children.limits import Limits
from mmrl.errors import UserError
from mmrl.rewards import RewardSet, RewardSpec, build
from mmrl.rollouts import Prompt, Sample

SECONDS = 0.2  # of CPU time that a verifier may take for a response
DEADLINE_S = 1.0
WAIT_S = 300.0  # until a trainer has started on a busy machine
NO_STRAYS = ("ps -eo", "/runtime/watchdog.py")  # commands that are not counted
LONG = {
    "tags": "<answer>" * 20_000,
    "answers": "<answer>x</answer>" * 20_000,
    "thoughts": "<think>" + "</think><answer>" * 20_000 + "</answer>x",
    "digits": "1" * 160_000 + "x",
    "commas": "1" + "," * 160_000 + "x",
    "points": "." * 160_000 + "x",
    "exponents": "1e" * 80_000,
    "box of digits": "[" + "1" * 160_000,
    "box of spaces": "[" + " " * 160_000,
    "boxes": "[1," * 50_000,
    "boxed": "\\boxed{" * 20_000,
    "braces": "\\boxed{" + "{}" * 80_000,
    "letters": "B " * 80_000,
    "marks": "(" * 160_000 + "x",
    "quotes": "“" * 160_000,
}
VERIFIERS = ("exact_match", "numeric", "box_iou", "box_giou", "multiple_choice", "think_answer", "answer_tag")
TOWERS = [
    "9**9**9**9**9",
    "2^{2^{2^{2^{2^{2}}}}}",
    "(10**10)!",
    "100000!!!!",
    "(" * 3000 + "1" + ")" * 3000,
    "1" * 200_000,
    r"\frac{1}{" * 400 + "2" + "}" * 400,
    r"\sqrt{" * 300 + "2" + "}" * 300,
    "+".join(f"x^{n}" for n in range(3000)),
    r"\int_0^{10^9} e^{x^{x^x}} dx",
    r"\sum_{n=1}^{10^9} \frac{1}{n^n}",
    r"\binom{10^8}{10^7}",
    "__import__('os').system('true')",
    r"\begin{pmatrix}" + r"1&2\\" * 3000 + r"\end{pmatrix}",
    "{" + ",".join(map(str, range(20_000))) + "}",
    "1e999999999",
    "x=" * 2000,
    "sin(" * 500 + "x" + ")" * 500,
    "(x+y+z)^{500}",
    "\x00" * 1000,
]
BODIES = {
    "deep": b'{"scores": ' + b"[" * 200_000,
    "no JSON": b"<html>",
    "list": b"[1.0]",
    "empty": b"",
    "no scores": b"{}",
    "too many": b'{"scores": [1, 1, 1]}',
    "too few": b'{"scores": []}',
    "text": b'{"scores": ["x"]}',
    "digits": b'{"scores": [' + b"9" * 5000 + b"]}",
}
ODD_BODIES = {
    "huge": b'{"scores": [1e999]}',
    "integer": b'{"scores": [' + b"9" * 400 + b"]}",
    "nan": b'{"scores": [NaN]}',
}


def sample(response: str, answer: str | None = "7") -> Sample:
    return Sample(Prompt("p", "question", answer=answer), response)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", action="store_true", help="try fewer cases of each kind")
    part = parser.parse_args().part
    logging.getLogger("mmrl").addHandler(logging.NullHandler())
    table = Table("rewards")
    verifiers(table)
    in_process(table)
    batches(table)
    isolated(table, part)
    expressions(table, part)
    killed_trainers(table, 1 if part else 3)
    servers(table)
    return table.finish()


def verifiers(table: Table) -> None:
    for name in VERIFIERS:
        reward = build(name)
        for kind, text in LONG.items():
            gold = "[1, 1, 2, 2]" if "box" in name else "A"

            def attempt(text=text, gold=gold, reward=reward) -> str:
                start = time.process_time()
                reward(sample(text, gold))
                return "in time" if time.process_time() - start < SECONDS else f"{time.process_time() - start:.1f} s"

            table.case(f"responses of 160 kB to {len(VERIFIERS)} verifiers", f"{name} {kind}", attempt, "in time")


def outcome(rewards: RewardSet, *words: str) -> str:
    """The last of the samples is a good one."""
    try:
        scores = rewards.score([sample(word) for word in (*words, "good")])[:, 0].tolist()
    except UserError:
        return "named"
    if scores[-1] != 1.0:
        return "the next sample was lost too"
    return "cost its sample" if all(map(math.isnan, scores[:-1])) else "gave a value"


def in_process(table: Table) -> None:
    for word in hostile_rewards.IN_PROCESS:
        rewards = RewardSet([RewardSpec(name="hostile_rewards:in_process", deadline_s=DEADLINE_S)])
        row = "own rewards in the trainer's process"
        table.case(row, word, lambda word=word, rewards=rewards: outcome(rewards, word), "cost its sample")
    for word in hostile_rewards.NO_NUMBERS:
        rewards = RewardSet([RewardSpec(name="hostile_rewards:in_process")])
        table.case(
            "own rewards that give no number", word, lambda word=word, rewards=rewards: outcome(rewards, word), "named"
        )


def batches(table: Table) -> None:
    for word in hostile_rewards.IN_PROCESS.keys() - {"spin", "sleep"}:
        rewards = RewardSet([RewardSpec(name="hostile_rewards:Batch", deadline_s=DEADLINE_S)])

        def attempt(rewards=rewards, word=word) -> str:
            scores = rewards.score([sample(text) for text in ("good", word, "good", "good")])[:, 0].tolist()
            return "cost its sample" if [s == 1.0 for s in scores] == [True, False, True, True] else str(scores)

        table.case("own batched rewards, one bad sample of four", word, attempt, "cost its sample")


@contextmanager
def workers(count: int = 1) -> Iterator[RewardSet]:
    spec = RewardSpec(name="hostile_rewards:isolated", isolated=True, deadline_s=DEADLINE_S, workers=count)
    rewards = RewardSet([spec])
    yield rewards
    rewards.components[0].close()


def isolated(table: Table, part: bool) -> None:
    os.environ |= {name: "not to be seen" for name in ("A_TOKEN", "API_KEY", "MY_SECRET", "DB_PASSWORD", "SSH_AUTH")}
    with workers() as rewards, tempfile.TemporaryDirectory() as folder:
        words = list(hostile_rewards.ISOLATED)
        for word in words[::3] if part else words:
            table.case("isolated rewards", word, lambda word=word: outcome(rewards, word), "cost its sample")
            table.case("processes left after each", word, lambda: strays(rewards, 2), "none")
        for word in hostile_rewards.VALUES:
            table.case("isolated, odd but right", word, lambda word=word: outcome(rewards, word), "gave a value")
        for word in hostile_rewards.NO_NUMBERS:
            table.case("isolated, no number", word, lambda word=word: outcome(rewards, word), "named")
        seen = lambda: f"{int(rewards.score([sample('secrets')])[0, 0])} seen"  # noqa: E731
        table.case("credentials in the environment", "5 of them", seen, "0 seen")
        path = Path(folder) / "made"

        def command() -> str:
            rewards.score([sample(f"command:{path}")])
            return "its command ran here" if path.exists() else "nothing ran"

        table.case("an answer whose pickle is a command", "", command, "nothing ran")
    table.case("processes left after close()", "", lambda: strays(None, 0), "none")


def strays(rewards: RewardSet | None, allowed: int) -> str:
    end = time.monotonic() + 5
    while (found := len(family(os.getpid())) - 1 - allowed) > 0 and time.monotonic() < end:
        time.sleep(0.05)
    return "none" if found <= 0 else f"{found} left"


def family(pid: int) -> set[int]:
    """A process and all that descend from it, or did until their parent ended; its watchdog is no stray."""
    words = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    lines = [line.split(maxsplit=2) for line in words.splitlines()]
    parent = {int(pid): int(of) for pid, of, *args in lines if not any(w in "".join(args) for w in NO_STRAYS)}
    own, more = {pid}, {pid}
    while more := {child for child, of in parent.items() if of in own} - own:
        own |= more
    return own


def expressions(table: Table, part: bool) -> None:
    rewards = RewardSet([RewardSpec(name="math", deadline_s=5.0, workers=2)])
    rewards.score([sample("7"), sample("7")])  # the first answers wait for the processes to start
    for text in TOWERS[::4] if part else TOWERS:

        def attempt(text=text) -> str:
            start = time.monotonic()
            scores = rewards.score([sample(text, "7"), sample("7", "7")])[:, 0].tolist()
            if scores[1] != 1.0 or time.monotonic() - start > 20:
                return f"{scores}, {time.monotonic() - start:.1f} s"
            return "unscored" if math.isnan(scores[0]) else f"scored {scores[0]:g}"

        table.case("hostile expressions to math", text[:20], attempt, "unscored", "scored 0")
    rewards.components[0].close()


def killed_trainers(table: Table, times: int) -> None:
    """With a verifier that hangs and has children in sessions of their own."""
    script = "import rewards; rewards.hang()"
    for number in range(times):

        def attempt() -> str:
            trainer = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parent)
            end = time.monotonic() + WAIT_S
            while len(family(trainer.pid)) < 23 and time.monotonic() < end:
                time.sleep(0.1)
            everyone = family(trainer.pid)
            trainer.send_signal(signal.SIGKILL)
            trainer.wait()
            time.sleep(3)
            left = [pid for pid in everyone if alive(pid)]
            return f"{len(left)} of {len(everyone) - 1} left" if left or len(everyone) < 23 else "none left after 3 s"

        table.case("kill -9 of a trainer", str(number), attempt, "none left after 3 s")


def hang() -> None:
    spec = RewardSpec(name="hostile_rewards:isolated", isolated=True, deadline_s=100, limits=Limits(processes=100))
    RewardSet([spec]).score([sample("20 children and a hang")])


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def servers(table: Table) -> None:
    class Handler(BaseHTTPRequestHandler):
        body = b""

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(self.body)))
            self.end_headers()
            self.wfile.write(self.body)

        def log_message(self, format: str, *arguments: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        rewards = RewardSet([RewardSpec(name="http", options={"url": url, "retries": 0, "deadline_s": 5})])
        for kind, body in (BODIES | ODD_BODIES).items():

            def attempt(body=body) -> str:
                Handler.body = body
                try:
                    return "unscored" if rewards.score([sample("good")]).isnan().all() else "scored"
                except UserError as error:
                    return "named" if "\n" not in str(error) else "named in several lines"

            table.case("answers of a reward server", kind, attempt, "unscored" if kind in ODD_BODIES else "named")
        server.shutdown()


if __name__ == "__main__":
    sys.exit(main())
