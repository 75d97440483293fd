"""A batch of requests to a server that answers badly, and what becomes of it."""

from __future__ import annotations

import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from mmrl.errors import UserError
from mmrl.generation.sampling import Sampling
from mmrl.generation.settings import VLLMServer
from mmrl.generation.vllm.engine import EngineOptions, Request
from mmrl.generation.vllm.servers import Servers
from tests.whole_runs.stand_in_server import END, SUPPRESSED, VOCABULARY, serving

PROMPTS, GROUP = 6, 2
SAMPLING = Sampling(suppressed=(SUPPRESSED,), vocabulary=VOCABULARY)


@dataclass(frozen=True)
class Outcome:
    """how: named (one line), corrected (all answers are right), accepted (some are not), raw (another exception) or
    hangs. asked: requests that the bad server got."""

    how: str
    words: str
    asked: int
    seconds: float


def requests() -> list[Request]:
    ids = [torch.tensor([i]) for i in range(PROMPTS)]
    return [Request(f"p{i}", [i], (), ids[i], 10 + 2 * i + k, 2) for i in range(PROMPTS) for k in range(GROUP)]


def right(answers) -> bool:
    return [answer.ids.tolist() for answer in answers] == [[int(r.ids[0]), r.seed] for r in requests()]


def tried(kind: str, *, beside_a_good_one: bool = False, timeout: float = 2.0, patience: float = 60.0) -> Outcome:
    """timeout: rollout.generator.timeout. patience: seconds after which it counts as hanging."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bad = stack.enter_context(serving(kind))
        others = [stack.enter_context(serving())] if beside_a_good_one else []
        addresses = [f"http://127.0.0.1:{server.server_port}" for server in (bad, *others)]
        made = Servers(
            folder,
            EngineOptions(context=16, settings=VLLMServer(addresses=addresses, timeout=timeout)),
            describe=lambda path: None,
            gather=lambda value: [value],
        )
        stack.callback(made.close)
        made.load([("a", torch.ones(2))])
        found: list[tuple[str, str]] = []
        work = threading.Thread(target=lambda: found.append(asked(made)), daemon=True)
        started = time.monotonic()
        work.start()
        work.join(patience)
        return Outcome(*(found or [("hangs", "")])[0], bad.asked, time.monotonic() - started)


def asked(made: Servers) -> tuple[str, str]:
    try:
        answers = made.generate(requests(), sampling=SAMPLING, eos=(END,))
    except UserError as error:
        words = str(error)
        return ("raw" if "\n" in words else "named"), words
    except Exception as error:  # what an attack looks for
        return "raw", repr(error)
    return ("corrected" if right(answers) else "accepted"), ""
