"""What the tests of engine and trainer share: a tiny run, and processes that start without importing torch again."""

from __future__ import annotations

import atexit
import copy
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import zlib
from dataclasses import replace
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import mmrl.policies.vlm.policy  # noqa: F401  (imported once, in the server that workers are forked from)
from mmrl import build
from mmrl.cli import main as cli
from mmrl.config import Config, load, to_yaml
from mmrl.engine.launcher import ANY_PORT
from mmrl.report.run import Run
from mmrl.rollouts import Prompt, Rollouts
from mmrl.tasks.settings import TaskSettings
from mmrl.tasks.visual_qa.tiny import model as tiny_model
from mmrl.trainer import Trainer

HERE = Path(__file__).parent
TINY = HERE / "tiny.yaml"
IMAGES = HERE / "tiny_images.yaml"
ROBOTS = HERE / "tiny_robots.yaml"
MODEL = "MMRL_TESTS_MODEL"


# --- named by configurations ---


@cache
def model_folder() -> str:
    folder = os.environ.get(MODEL)
    if folder is None:
        folder = os.environ[MODEL] = tempfile.mkdtemp(prefix="mmrl-tests-")
        atexit.register(shutil.rmtree, folder)
        tiny_model.build(folder, seed=0)
    return folder


def build_model(folder: str, seed: int) -> None:
    shutil.copytree(model_folder(), folder, dirs_exist_ok=True)


def build_untied(folder: str, seed: int) -> None:
    """A model whose output matrix is not that of its words."""
    shutil.copytree(model_folder(), folder, dirs_exist_ok=True)
    weights, told = Path(folder, "model.safetensors"), Path(folder, "config.json")
    config, state = json.loads(told.read_text()), load_file(weights)
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = False
    told.write_text(json.dumps(config))
    words = next(value for name, value in state.items() if name.endswith("embed_tokens.weight"))
    drawn = torch.randn(words.shape, generator=torch.Generator().manual_seed(seed))
    # By hand: where there are several ranks, transformers writes on the first only.
    save_file(state | {"lm_head.weight": 0.02 * drawn}, weights, metadata={"format": "pt"})


def build_robot(folder: str, seed: int) -> None:
    """It starts from arbitrary weights, so that its episodes differ in length and outcome."""
    from mmrl.policies.vla.backbones import small  # here, so that other jobs need not wait for it

    small.create(folder, small.SmallActionConfig(("go", "from"), bins=8, width=32, channels=(4, 8, 8)), seed)


def spread(sample) -> float:
    """A reward that an untrained model gets in all sizes."""
    return zlib.crc32(sample.response.encode()) % 7 / 6


class Questions(list):
    """A list of prompts is a source."""


class Fixed:
    """A task whose rewards `mark(sample)` gives."""

    reward_names = ["mark"]
    reward_weights = [1.0]

    def __init__(self, mark, image=True, size=64):
        image = (Image.new("RGB", (24, 8)),) if image else ()
        self.train = self.evaluation = Questions(Prompt(str(i), f"Where is the {i}?", image) for i in range(size))
        self.mark = mark

    def score(self, samples, group=None):
        return torch.tensor([[float(self.mark(s))] for s in samples])

    def accuracy(self, samples):
        return self.score(samples)[:, 0]

    def measures(self, samples, group):
        return {}


class BlindOnRankOne(TaskSettings):
    def build(self, seed):
        return Fixed(spread, image=os.environ["RANK"] != "1")


class BrokenOnRankOne(TaskSettings):
    def build(self, seed):
        def mark(sample):
            if os.environ["RANK"] == "1":
                raise RuntimeError("no reward today")
            return spread(sample)

        return Fixed(mark)


class Steady(TaskSettings):
    def build(self, seed):
        return Fixed(spread)


class UnevenPrompts(TaskSettings):
    """As `Steady`, with prompts of which every fourth is long."""

    def build(self, seed):
        task = Fixed(spread)
        long = [replace(prompt, text=prompt.text + " now" * (0, 2, 5, 16)[int(prompt.id) % 4]) for prompt in task.train]
        task.train = task.evaluation = Questions(long)
        return task


class DiesOnce(TaskSettings):
    """As `Steady`, but rank 1 is killed in its second step, unless it was before."""

    def build(self, seed):
        marked = []

        def mark(sample):
            marked.append(sample)
            seen = Path(os.environ["MMRL_TESTS_DIED"])
            if os.environ["RANK"] == "1" and len(marked) == 20 and not seen.exists():
                seen.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return spread(sample)

        return Fixed(mark)


def sleep_until_signalled():
    """Sleeps for ever in short pieces: a signal that comes just before a long one begins is handled only after it."""
    while True:
        time.sleep(0.1)


class Sleeps(TaskSettings):
    """A reward that takes for ever."""

    def build(self, seed):
        def mark(sample):
            print("asleep", flush=True)
            sleep_until_signalled()

        return Fixed(mark)


class SleepsOnRankOne(TaskSettings):
    """As `Steady`, but from its second step on rank 1 takes for ever."""

    def build(self, seed):
        marked = []

        def mark(sample):
            marked.append(sample)
            if os.environ["RANK"] == "1" and len(marked) > 16:  # each is marked twice, for reward and accuracy
                sleep_until_signalled()
            return spread(sample)

        return Fixed(mark)


class NeverThere(TaskSettings):
    """One rank never has its task, so the others wait for it."""

    rank: int = 0

    def build(self, seed):
        if os.environ["RANK"] == str(self.rank):
            sleep_until_signalled()
        return Fixed(spread)


class SlowOnRankOne(TaskSettings):
    def build(self, seed):
        def mark(sample):
            time.sleep(0.05 if os.environ["RANK"] == "1" else 0)
            return spread(sample)

        return Fixed(mark)


class SleepsFirst(TaskSettings):
    """A task that takes for ever to build."""

    def build(self, seed):
        print("asleep", flush=True)
        sleep_until_signalled()


class Images(TaskSettings):
    """Digits asked for, and a reward that images of an untrained model get in all sizes: their brightness."""

    def build(self, seed):
        task = Fixed(lambda sample: float(sample.image.mean()))
        texts = [f"a handwritten {name}" for name in ("zero", "one", "two", "three", "four", "five", "six", "seven")]
        task.train = task.evaluation = Questions(Prompt(str(i), text) for i, text in enumerate(texts))
        return task


# --- runs ---


def make(folder, *overrides, task=None, base=TINY) -> Trainer:
    """What `mmrl train` builds before it trains."""
    config = load(base, [f"run_dir={folder}", *overrides])
    torch.manual_seed(config.seed)
    task = task or build.build_task(config)
    policy = build.build_policy(config, task)
    engine = build.build_engine(config, policy)
    run = Run(Path(folder), to_yaml(config), writes=engine.rank == 0)
    return Trainer(config, policy, task, engine, run, build.build_generator(config, policy, task, engine))


def under(trainer: Trainer, config: Config) -> Trainer:
    """The trainer as it would be under another configuration. Its losses know no engine: they are for autograd."""
    probe = copy.copy(trainer)
    probe.config, probe.algorithm, probe.needs = config, config.algorithm, config.needs
    probe.engine = trainer.policy.module
    return probe


def gradient(trainer: Trainer, batch: Rollouts) -> torch.Tensor:
    """The gradient of the losses of one batch, flat."""
    parts, _ = trainer.losses(batch, trainer.algorithm.denominators(batch))
    trained = [p for p in trainer.policy.module.parameters() if p.requires_grad]
    found = torch.autograd.grad(torch.stack(list(parts.values())).sum(), trained, allow_unused=True)
    return torch.cat([g.flatten() for g in found if g is not None])


def release(trainer: Trainer) -> None:
    """Ends the engine, not the process group: the next one in this process uses it again."""
    trainer.run.close()
    trainer.engine._engine.destroy()  # first: under ZeRO-3 it asks the process group, which vLLM ends with its engine
    if trainer.generator is not None:
        trainer.generator.close()


def train(folder, *overrides, task=None, resume=False, base=TINY) -> SimpleNamespace:
    """A whole run; its metrics, and the weights it wrote (on rank 0)."""
    trainer = make(folder, *overrides, task=task, base=base)
    if resume:
        trainer.resume()
    trainer.train()
    release(trainer)
    return trainer


def final(folder) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "final" / "model.safetensors")


def metrics(folder) -> list[dict]:
    """The rows of a run, which may still be writing one."""
    whole, _, _ = (Path(folder) / "metrics.jsonl").read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def timeless(rows: list[dict]) -> list[dict]:
    return [{k: v for k, v in r.items() if not k.startswith(("time", "throughput", "memory"))} for r in rows]


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[k].double() - other[k].double()).abs().max()) for k in one)


# --- processes ---


def server() -> multiprocessing.context.ForkServerContext:
    """The server that processes are forked from, with what they need imported; begun by whoever asks first."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "tests.whole_runs.workers"])
    forkserver.ensure_running()
    return context


def free_port() -> int:
    """A free port below those that the system gives out by itself, so that no other process takes it in between."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def start(target, *arguments, log: Path, ranks: int = 1) -> list[multiprocessing.Process]:
    """New processes, one a rank, that run target(*arguments); what they print goes to `log`."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    model_folder()
    context = server()
    port = ANY_PORT if ranks == 1 else str(free_port())
    group = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, MODEL: model_folder()}
    processes = []
    for rank in range(ranks):
        env = {**group, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(context.Process(target=_run, args=(target, arguments, env, log), daemon=True))
        processes[-1].start()
    return processes


def errors_told(said: str) -> list[str]:
    """The errors among what processes print, but for the line of a watchdog on one that was killed."""
    return [line for line in said.splitlines() if line.startswith("mmrl: ") and " is not complete: " not in line]


def wait(processes, log: Path, timeout: float = 120) -> list[int]:
    """Exit codes. Fails if a process does not end in time."""
    deadline = time.monotonic() + timeout
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    late = [p for p in processes if p.is_alive()]
    for process in late:
        process.kill()
    assert not late, f"{len(late)} of {len(processes)} processes hung\n{log.read_text()[-3000:]}"
    return [p.exitcode for p in processes]


def call(target, *arguments, log: Path, ranks: int = 1, timeout: float = 120) -> None:
    codes = wait(start(target, *arguments, log=log, ranks=ranks), log, timeout)
    assert codes == [0] * ranks, log.read_text()[-3000:]


def command(*arguments: str) -> None:
    """`mmrl ...` in a worker, which Ctrl-C ends also where a script in the background runs the tests."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main(list(arguments))


def _run(target, arguments, env, log):
    os.environ.update(env)
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    code = 0
    try:
        target(*arguments)
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def ratio_gaps(trainer):
    """Largest gaps of the ratio from 1 by step and update, two updates a step; they are filled in while it trains.

    They say something of a step's first update only where there are two epochs (algorithm.epochs=2): in a single epoch
    the first minibatch needs no pass of its own, and is compared with itself.
    """
    usual, gaps = trainer.losses, {}

    def losses(micro, totals):
        assert micro.old_logp is not None, "the ratio would be 1 whatever the policy said when it was asked"
        parts, stats = usual(micro, totals)
        gap = float(stats["surrogate/ratio_gap"][micro.mask].max()) if micro.mask.any() else 0.0
        update = trainer.step, trainer.engine.updates % 2
        gaps[update] = max(gap, gaps.get(update, 0.0))
        return parts, stats

    trainer.losses = losses
    return gaps
