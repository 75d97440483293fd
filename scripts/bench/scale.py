"""What mmrl's own coordination costs with 64 ranks, 16 vLLM servers, 1000 simulators and 100,000 prompts.

    python scripts/bench/scale.py
    python scripts/bench/scale.py --parts ranks,prompts --json build/scale.json

The code is the trainer's own; the work of models, GPUs and simulators is simulated. On the CPU, in two minutes. Parts:

ranks: ranks are threads in lock step, each with 8 prompts of 8 rollouts in a step: `Collector.next` with dynamic
sampling, GRPO's advantages from the values of all ranks, and the updates of prompt samplers. What ranks send each other
is written once and read by every rank, as over gloo, without the time of a network. Milliseconds of CPU time of one
rank in a step.
prompts: milliseconds of a prompt sampler to start, to choose 512 prompts, to get results of 512, to save its state.
engines: servers that answer over HTTP after 0.2 s, each with 32 requests of 8 responses, and take 0.5 s to read new
weights. CPU milliseconds of a request, seconds of a batch in addition to the 0.2, seconds until all have the weights.
simulators: environments in this process and in 16 processes that compute nothing, with images of 128 x 128;
milliseconds of a step of all environments.
balance: groups of 8 responses, 8 on each rank. Prompts have 300 tokens, responses 20 to 1024, log-normal (standard
deviation of the logarithm 0.8 between groups and 0.4 within). Tokens of the rank with most over the mean, before and
after `engine.balance=lengths` exchanges groups, as means over ten draws; the share of groups that are sent;
milliseconds until a rank knows who sends what.
padding: tokens of micro-batches of four, padded to the longest, over those that count, in the order of groups and with
similar lengths together.

`exponent` is the slope of log cost over log size between the two largest sizes: 0 means constant, 1 linear.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SAMPLERS = ("permutation", "success_weighted", "success_window", "skip_flat", "volatility")
SHARE, GROUP, LONGEST = 8, 8, 64  # prompts of a rank, rollouts of a prompt, tokens of a response
DRAWS = 10  # of lengths
DELAY, READING = 0.2, 0.5  # seconds of an engine, for a request and for new weights
Costs = dict[str, dict[int, float]]  # by name, by size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="ranks,balance,prompts,engines,simulators")
    parser.add_argument("--small", action="store_true", help="measure two small sizes only, to test the script")
    parser.add_argument(
        "--steps", type=int, default=3, help="measured steps of ranks; simulators are stepped ten times as often"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sizes: dict[str, tuple[int, ...]] = {
        "ranks": (4, 16, 64),
        "balance": (2, 8, 64),
        "prompts": (1000, 10_000, 100_000),
        "engines": (1, 4, 16),
        "simulators": (64, 256, 1024),
    }
    if options.small:
        sizes = {"ranks": (1, 4), "balance": (2, 4), "prompts": (1000, 4000), "engines": (1, 2), "simulators": (8, 16)}
    parts: dict[str, Callable[[Sequence[int], int], Costs]] = {
        "ranks": ranks, "balance": balance, "prompts": prompts, "engines": engines, "simulators": simulators
    }  # fmt: skip
    found = {}
    for name in options.parts.split(","):
        found[name] = parts[name](sizes[name], options.steps)
        print("\n".join(table(name, found[name], sizes[name])), flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=2))


def table(name: str, costs: Costs, sizes: Sequence[int]) -> list[str]:
    lines = [f"\n| {name} | " + " | ".join(map(str, sizes)) + " | exponent |", "| --- |" + " --- |" * (len(sizes) + 1)]
    for cost, by_size in costs.items():
        cells = " | ".join(f"{by_size[size]:.3g}" for size in sizes)
        lines.append(f"| {cost} | {cells} | {exponent(by_size):.2f} |")
    return lines


def exponent(by_size: dict[int, float]) -> float:
    """Between the two largest sizes; NaN where a cost is not above 0."""
    small, large = sorted(by_size)[-2:]
    if min(by_size[small], by_size[large]) <= 0:
        return math.nan
    return math.log(by_size[large] / by_size[small]) / math.log(large / small)


# --- ranks ---


class PretendPrompts:
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        from mmrl.rollouts import Prompt

        return Prompt(str(index), "?", answer="1")


class PretendTask:
    """Rewards are drawn from the prompt's number and the step, so that most groups differ and some do not."""

    reward_names, reward_weights = ["pretended"], [1.0]

    def __init__(self, size: int) -> None:
        self.train, self.evaluation = PretendPrompts(size), PretendPrompts(8)

    def score(self, samples: Sequence[Any], group: Any) -> Any:
        import torch

        draw = torch.Generator().manual_seed(int(group.sum()))
        return (torch.rand(len(samples), 1, generator=draw) < 0.3).float()

    def accuracy(self, samples: Sequence[Any]) -> Any:
        import torch

        return torch.tensor([float(int(sample.prompt.id) % 3 == 0) for sample in samples])


class PretendPolicy:
    def rollout(self, given: Sequence[Any], size: int, seeds: Sequence[int], *, step: int = 0) -> Any:
        import torch

        from mmrl.rollouts import Rollouts, Sample

        samples = [Sample(prompt, response="1", response_length=8) for prompt in given for _ in range(size)]
        mask = torch.arange(LONGEST) < torch.randint(1, LONGEST, (len(samples), 1))
        return Rollouts(samples=samples, inputs=list(samples), group=torch.zeros(len(samples)).long(), mask=mask)


class Meeting:
    """Where ranks that are threads send each other values, as messages."""

    def __init__(self, world: int) -> None:
        self.world, self.barrier = world, threading.Barrier(world)
        self.messages: list[Any] = [None] * world


class PretendRanks:
    waited = 0.0

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.world = meeting, rank, meeting.world
        self.bytes = 0

    def gather(self, value: Any) -> list[Any]:
        from mmrl.engine.packing import pack

        message = pack(value)
        return self.received([message] * self.world)

    def exchange(self, values: Sequence[Any], instead: str) -> list[Any]:
        from mmrl.engine.packing import pack

        return self.received([pack(value, instead) for value in values])

    def received(self, messages: list[Any]) -> list[Any]:
        """Returns what all ranks have for this one. messages: one a rank."""
        from mmrl.engine.packing import unpack

        self.meeting.messages[self.rank] = messages
        self.meeting.barrier.wait()
        arrived = [sent[self.rank] for sent in self.meeting.messages]
        self.bytes += sum(map(len, arrived))
        found = [unpack(message) for message in arrived]
        self.meeting.barrier.wait()
        return found

    def max(self, value: int) -> int:
        return max(self.gather(value))

    def mark(self, phase: str | None = None) -> None:
        pass


def ranks(sizes: Sequence[int], steps: int) -> Costs:
    import torch

    torch.set_num_threads(1)
    costs: Costs = defaultdict(dict)
    for world in sizes:
        for name, value in lockstep(world, steps).items():
            costs[name][world] = value
    return costs


def lockstep(world: int, steps: int) -> dict[str, float]:
    """Milliseconds of rank 0 a step, by phase, and KiB that it is told."""
    from mmrl.collection.collector import Collector
    from mmrl.config import configure
    from mmrl.protocols.batch import Batch
    from mmrl.training.metrics import Metrics

    rollout = {"prompts": SHARE * world, "group_size": GROUP, "dynamic_sampling": {}}
    algorithm = {"terms": [{"type": "kl", "coefficient": 0.01}]}
    config = configure({"run_dir": "none", "model": {"path": "none"}, "rollout": rollout, "algorithm": algorithm})
    meeting, spent = Meeting(world), defaultdict[str, float](float)
    failed: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            own: Any = PretendRanks(meeting, rank)
            policy: Any = PretendPolicy()
            task: Any = PretendTask(100_000)
            batches = Collector(config, policy, task, own, None)
            for step in range(steps + 1):  # the first one warms up
                metrics = Metrics(own)
                begun, told = time.thread_time(), own.bytes
                made = batches.next(step, metrics)
                collected = time.thread_time()
                batch = Batch(made, task.reward_names, task.reward_weights, gather=own.gather, rank=rank)
                config.algorithm.advantages(batch)
                advised = time.thread_time()
                batches.observe(batch)
                if rank == 0 and step:
                    spent["batches.next, ms"] += (collected - begun) * 1000 / steps
                    spent["advantages, ms"] += (advised - collected) * 1000 / steps
                    spent["samplers hear, ms"] += (time.thread_time() - advised) * 1000 / steps
                    spent["told by ranks, KiB"] += (own.bytes - told) / 1024 / steps
        except BaseException as error:
            failed.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return dict(spent)


# --- balance ---


def balance(sizes: Sequence[int], steps: int) -> Costs:
    import torch

    from mmrl.core.partition import sort_by_length
    from mmrl.training.balancing import imbalance, plan_moves, split_pieces

    torch.set_num_threads(1)
    costs: Costs = defaultdict(lambda: defaultdict(float))
    group, nowhere = torch.arange(SHARE).repeat_interleave(GROUP), torch.zeros(SHARE * GROUP, dtype=torch.bool)
    micro = list(torch.arange(SHARE * GROUP).split(4))

    def add(name: str, world: int, value: float) -> None:
        costs[name][world] += value / DRAWS

    for world in sizes:
        draw = torch.Generator().manual_seed(0)
        for _ in range(DRAWS):
            between = torch.randn(world, SHARE, 1, generator=draw) * 0.8 + 5.5
            within = torch.randn(world, SHARE, GROUP, generator=draw) * 0.4
            lengths = (between + within).exp().clamp(20, 1024).long().flatten(1) + 300
            told = [split_pieces(group, [micro], own, nowhere)[0] for own in lengths]
            begun = time.process_time()
            moves = plan_moves(told)
            add("who sends what, ms", world, (time.process_time() - begun) * 1000)
            before = [[(0, piece.cost) for piece in own] for own in told]
            after = [list(own) for own in before]
            for move in moves:
                after[move.target][move.slot] = before[move.source][move.number]
            add("heaviest rank over the mean, as drawn", world, imbalance(before))
            add("heaviest rank over the mean, balanced", world, imbalance(after))
            add("share of groups sent", world, len(moves) / (world * SHARE))
            add("padding, as drawn", world, padded(micro, lengths[0]))
            by_length = sort_by_length(micro, group, lengths[0])
            add("padding, similar lengths together", world, padded(by_length, lengths[0]))
    return costs


def padded(parts: Sequence[Any], length: Any) -> float:
    """Tokens of the micro-batches with their padding, over those without."""
    return float(sum(len(part) * length[part].max() for part in parts) / length.sum())


# --- prompts ---


def prompts(sizes: Sequence[int], steps: int) -> Costs:
    from mmrl.prompts.sampler import Outcome, PromptSampler
    from mmrl.settings import kind_of

    costs: Costs = defaultdict(dict)
    for size in sizes:
        for name in SAMPLERS:
            sampler: PromptSampler = kind_of(PromptSampler, name, ("sampler",)).model_validate({"type": name})  # type: ignore[type-abstract]

            def timed(what: str, work: Callable[..., Any], *given: Any, name: str = name, size: int = size) -> Any:
                begun = time.process_time()
                made = work(*given)
                costs[f"{name}: {what}"][size] = (time.process_time() - begun) * 1000
                return made

            timed("start", sampler.start, size, 0)
            for _ in range(max(2, size // 5120)):  # a tenth of an epoch, so that much is remembered
                drawn = sampler.draw(512)
                sampler.observe([Outcome(i, (0.0, 1.0), (float(i % 2), 1.0)) for i in drawn])
            drawn = timed("draw", sampler.draw, 512)
            heard = [Outcome(i, (0.0, 1.0), (float(i % 2), 1.0)) for i in drawn]
            timed("observe", sampler.observe, heard)
            timed("state", lambda one: json.dumps(one.state()), sampler)
    return costs


# --- engines ---

PROMPT = list(range(300))


class Engine(ThreadingHTTPServer):
    daemon_threads, request_queue_size, version = True, 1024, "none"


class Handler(BaseHTTPRequestHandler):
    server: Engine
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(json.dumps({"weight_version": self.server.version}).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path.endswith("generate"):
            time.sleep(DELAY)
            self.answer(answer(self.server.version))
        elif self.path == "/collective_rpc":
            time.sleep(READING)
            self.answer(b'{"results": [null]}')
        else:
            if self.path == "/update_weight_version":
                self.server.version = json.loads(body)["new_version"]
            self.answer(b"{}")

    def answer(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


def answer(version: str) -> bytes:
    logprobs = {"content": [{"logprob": -0.5}] * LONGEST}
    choice = {"token_ids": [5] * LONGEST, "logprobs": logprobs, "weight_versions": [{"version": version}]}
    return json.dumps({"prompt_token_ids": PROMPT, "choices": [choice] * GROUP}).encode()


def serve(count: int, told: Any) -> None:
    """So many engines in this process."""
    servers = [Engine(("127.0.0.1", 0), Handler) for _ in range(count)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    told.send([server.server_address[1] for server in servers])
    told.recv()


def engines(sizes: Sequence[int], steps: int) -> Costs:
    import torch

    from mmrl.generation.sampling import Sampling
    from mmrl.generation.settings import VLLMServer
    from mmrl.generation.vllm.engine import EngineOptions, Request
    from mmrl.generation.vllm.servers import Servers

    costs: Costs = defaultdict(dict)
    context = multiprocessing.get_context("spawn")
    for count in sizes:
        here, there = context.Pipe()
        process = context.Process(target=serve, args=(count, there), daemon=True)
        process.start()
        addresses = [f"http://127.0.0.1:{port}" for port in here.recv()]
        options = EngineOptions(context=1024, settings=VLLMServer(addresses=addresses))
        with tempfile.TemporaryDirectory() as folder:
            servers = Servers(Path(folder), options, describe=lambda _: None, gather=lambda value: [value])
            begun = time.perf_counter()
            servers.load([("weight", torch.zeros(4))])
            costs["weights to all, s"][count] = time.perf_counter() - begun
            request = Request("0", PROMPT, (), torch.tensor(PROMPT), 0, LONGEST, GROUP)
            asked = [request] * (32 * count)
            servers.generate(asked[: 2 * count], sampling=Sampling(), eos=(9,))  # connections are made
            begun, spent = time.perf_counter(), time.process_time()
            for _ in range(steps):
                servers.generate(asked, sampling=Sampling(), eos=(9,))
            costs["a request, ms of processor"][count] = (time.process_time() - spent) * 1000 / steps / len(asked)
            costs["a batch beyond its 0.2 s, s"][count] = (time.perf_counter() - begun) / steps - DELAY
            servers.close()
        here.send(None)
        process.join()
    return costs


# --- simulators ---


def simulators(sizes: Sequence[int], steps: int) -> Costs:
    import numpy as np

    from mmrl import sims
    from mmrl.policies.vla.episodes import EpisodeRecord
    from mmrl.rollouts import Prompt

    sys.path.append(str(HERE))
    os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(HERE)])
    costs: Costs = defaultdict(dict)
    for count in sizes:
        for workers in (0, min(16, count)):
            looks, where = 10 * steps, "in this process" if not workers else "in 16 processes"
            made = {"length": 4 * looks, "image": 128}
            with sims.build("pretend_simulator:PretendSimulator", count, made, workers=workers) as sim:
                records = [EpisodeRecord(Prompt(str(row), "?"), samples_latents=False) for row in range(count)]

                def act(observation: Any, rows: Any) -> tuple[Any, Any]:
                    return [np.zeros((len(sim), 4, 7))], None

                def tell(rows: Any, moved: list[Any], kept: Any, records: list[EpisodeRecord] = records) -> None:
                    for step in moved:
                        for row in rows:
                            records[row].add_step(step, row, film=False)

                sim.reset(list(range(count)), ["pretend"] * count)
                begun, spent = time.perf_counter(), time.process_time()
                sims.play(sim, act, tell)
                costs[f"a look {where}, ms"][count] = (time.perf_counter() - begun) * 1000 / looks
                costs[f"of it processor of the coordinator, {where}, ms"][count] = (
                    (time.process_time() - spent) * 1000 / looks
                )
    return costs


if __name__ == "__main__":
    main()
