"""What test_turns.py runs in processes of its own: training over turns, on ranks and beside vLLM."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from mmrl.rollouts import Message, Prompt
from mmrl.settings import option
from mmrl.sims.turns.environment import Environment, Reply
from mmrl.sims.turns.settings import EnvironmentSettings, TurnLimits
from mmrl.tasks.settings import TaskSettings
from tests.whole_runs.parts import Fixed, Questions, make, release, spread
from tests.whole_runs.vllm_workers import responses

TURNS = 3


def image(seed: int) -> Image.Image:
    """24 x 8 pixels that follow from a number."""
    generator = torch.Generator().manual_seed(seed)
    return Image.fromarray(torch.randint(0, 256, (8, 24, 3), generator=generator, dtype=torch.uint8).numpy())


class Look(Environment):
    """Answers each response with an image that follows from it, and a text; ends after so many turns."""

    def start(self, prompt: Prompt) -> list[Message]:
        self.turn = 0
        return [Message("user", (image(zlib.crc32(prompt.text.encode())), prompt.text))]

    def step(self, response: str) -> Reply:
        self.turn += 1
        seen = zlib.crc32(response.encode())
        shown = Message("user", (f"Turn {self.turn}: ", image(seen), "What is there?"))
        return Reply([shown], end=self.turn == TURNS, reward=seen % 5 / 4)


class LookSettings(EnvironmentSettings):
    type: str = "tests.whole_runs.turn_workers:LookSettings"
    limits: TurnLimits = option(TurnLimits(max_turns=TURNS, turn_tokens=5, max_images=TURNS), "of a conversation")

    def make(self) -> Environment:
        return Look()


class Talks(TaskSettings):
    """Prompts of several lengths; what is said last earns."""

    environment: EnvironmentSettings = option(LookSettings(), "what answers")

    def build(self, seed: int) -> Any:
        task: Any = Fixed(spread)
        task.train = task.evaluation = Questions(Prompt(str(i), f"Where is the {i}?" * (1 + i % 3)) for i in range(64))
        task.environment = self.environment
        return task


TALKS = [
    "task={type: tests.whole_runs.turn_workers:Talks}",
    "rollout.max_response_length=160",
    "optim.schedule=linear",
    "steps=3",
]
COLOCATED = ["rollout.generator=vllm_colocated", "rollout.generator.cache_gib=0.1"]
SERVER = ["rollout.generator=vllm_server", "rollout.generator.cache_gib=0.1"]
PARTIAL = ["rollout.generator.partial={oversample: 2, segment: 3, max_staleness: 1}", "rollout.micro_batch=null"]


def with_ends(trainer: Any) -> Any:
    """Many tokens end a response, so that those of an untrained model differ in length."""
    trainer.policy.tokens.eos = trainer.policy.drafter.conversations.eos = tuple(range(0, 340, 5))
    return trainer


def run(folder: Path, *options: str, resume: bool = False) -> None:
    trainer = with_ends(make(folder, *TALKS, *options))
    if resume:
        trainer.resume()
    trainer.train()
    release(trainer)


def ranks(folder: Path, name: str, stages: list[int]) -> None:
    for stage in stages:
        run(folder / f"{name}-{stage}", f"engine.zero_stage={stage}", "engine.micro_batch=5")


def beside(folder: Path) -> None:
    """Likelihoods of one batch by vLLM and by a plain forward of each conversation, greedy conversations by both, and
    in segments."""
    trainer = with_ends(make(folder / "beside", *TALKS, *COLOCATED))
    policy, generator, engine = trainer.policy, trainer.generator, trainer.generator.engine
    prompts = [trainer.task.train[i] for i in range(6)]
    generator.sync_weights()
    with generator.generation():
        sampled = policy.rollout(prompts, 2, range(12))
        greedy = policy.rollout(prompts, 1, range(6), temperature=0.0)
        drafts = policy.draft(prompts, 1, range(6), temperature=0.0)
        while any(not draft.finished(policy.eos) for draft in drafts):
            policy.extend(engine, drafts, 2)
    policy.engine = None
    plain = policy.rollout(prompts, 1, range(6), temperature=0.0)
    gaps, model = [], policy.module.model
    for row, tokens in enumerate(sampled.inputs):
        with torch.no_grad():
            logits = model(**policy.runner.collate([tokens], padding_side="right")).logits[
                0, len(tokens.prompt) - 1 : -1
            ]
        logits[:, list(policy.tokens.suppressed)] = -torch.inf
        logp = logits.log_softmax(-1)[torch.arange(len(tokens.response)), tokens.response]
        said = sampled.behaviour_logp[row, : len(logp)]
        gaps += (logp - said)[tokens.decision_mask].abs().tolist()
        assert (said[~tokens.decision_mask] == 0).all()
    found = {
        "gaps": gaps,
        "turns": [len(s.conversation.turns) for s in sampled.samples],
        "images": [sum(len(m.images) for t in s.conversation.turns for m in t.observation) for s in sampled.samples],
        "greedy": responses(greedy),
        "plain": responses(plain),
        "segments": responses(policy.complete(drafts, 1)),
    }
    policy.engine = engine
    release(trainer)
    (folder / "beside.json").write_text(json.dumps(found))
