"""`mmrl check`: what a job's data, template, rewards, model and simulator do together, before anything is paid for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mmrl.build import build_policy, build_task
from mmrl.collection.checks import check_batch
from mmrl.config import Config, load
from mmrl.job import before_warm_start
from mmrl.policies.diffusion.policy import DiffusionPolicy
from mmrl.policies.tokenizers import Processor
from mmrl.policies.vlm.policy import VisionLanguagePolicy
from mmrl.policies.vlm.settings import VisionLanguageModel
from mmrl.preflight import Findings
from mmrl.preflight.generation import probe_cut, probe_own_rewards, probe_pairs
from mmrl.preflight.page import Row
from mmrl.preflight.prompts import probe_images, probe_overlap, sampled
from mmrl.preflight.questions import SHOWN, probe_questions
from mmrl.preflight.quick import probe_policy
from mmrl.preflight.robots import probe_robots
from mmrl.protocols.parts import Policy, Task
from mmrl.rollouts import Prompt
from mmrl.tasks.manipulation.settings import ManipulationSettings
from mmrl.tasks.manipulation.task import Manipulation
from mmrl.tasks.visual_qa.settings import VisualQASettings
from mmrl.tasks.visual_qa.task import VisualQA

SMALL = 1 << 29  # bytes of weights up to which the model itself is tried
WEIGHTS = (".safetensors", ".bin", ".pt", ".ckpt")


@dataclass
class JobCheck:
    """One check of a configuration. weights: whether to read the model's; None: where they are small. rows: prompts for
    a page."""

    name: str
    overrides: Sequence[str] = ()
    weights: bool | None = None
    findings: Findings = field(default_factory=Findings)
    rows: list[Row] = field(default_factory=list)

    def run(self) -> Findings:
        """Runs all probes. Nothing is raised: what goes wrong is an alarm."""
        with self.findings.guarded("configuration"):
            config = before_warm_start(load(self.name, list(self.overrides)))
            check_batch(config, 1)
            self._parts(config)
        return self.findings

    def _parts(self, config: Config) -> None:
        task: Task | None = None
        with self.findings.guarded("data"):
            task = build_task(config)
        if task is None:
            return
        prompts: list[Prompt] = []
        with self.findings.guarded("data"):
            prompts = self._prompts(config, task)
        policy: Policy | None = None
        with self.findings.guarded("model"):
            policy = self._policy(config, task)
        if isinstance(config.task, VisualQASettings) and isinstance(task, VisualQA):
            with self.findings.guarded("template"):
                processor = processor_of(config, policy)
                self.rows = probe_questions(config, config.task, task, prompts, processor, self.findings)
        elif isinstance(config.task, ManipulationSettings) and isinstance(task, Manipulation):
            probe_robots(config, config.task, task, policy, self.findings)
        if policy is not None:
            self._rollout(task, policy, prompts)

    def _prompts(self, config: Config, task: Task) -> list[Prompt]:
        """Probes a sample of prompts, and returns those to train on, or held-out ones where there are none."""
        train = [] if task.train is None else sampled(task.train)
        held_out = sampled(task.evaluation)
        sizes = f"{len(task.train or ())} prompts to train on, {len(task.evaluation)} held out"
        self.findings.facts.append(("data", f"{sizes}; read: {len(train)} and {len(held_out)}"))
        if not isinstance(config.task, ManipulationSettings) and not config.task.shows_held_out:
            self.findings.add(probe_overlap(train, held_out, "task.data.eval"))
        self.findings.add(probe_images(train))
        self.findings.add(probe_pairs(train))
        self.rows = [Row(prompt, prompt.text) for prompt in train[:SHOWN]]
        return train or held_out

    def _policy(self, config: Config, task: Task) -> Policy | None:
        """Builds the policy where its weights are small or --weights is set; else records that they were not read."""
        size = 0 if config.model.build is not None else weights_at(config.model.path)
        if self.weights or size is not None and size <= SMALL:
            return build_policy(config, task)
        path = f"model.path={config.model.path}"
        self.findings.unread.append(("model", f"the weights of {path}; mmrl check --weights reads them"))
        return None

    def _rollout(self, task: Task, policy: Policy, prompts: Sequence[Prompt]) -> None:
        """Samples two rollouts and scores them, so that rewards and the policy run once; adds what they show to the
        findings."""
        if isinstance(policy, DiffusionPolicy):
            with self.findings.guarded("data"):
                self.findings.add(probe_cut(prompts, policy.family.truncated_tokens))
            self.findings.add(probe_policy(policy))
            self.findings.facts += [("model", fact) for fact in policy.family.notes.differences]
        with self.findings.guarded("rollout"):
            samples = policy.respond(sampled(task.evaluation, 2), [1, 2])
            task.accuracy(samples)
            task.score(samples, torch.arange(len(samples)))
            self.findings.add(probe_own_rewards(samples, task.score, list(task.reward_names), "task.rewards"))


def processor_of(config: Config, policy: Policy | None) -> Processor | None:
    """Returns the processor of a vision-language model: the policy's, or that of a folder, without its weights."""
    if isinstance(policy, VisionLanguagePolicy):
        return policy.tokens.processor
    path = config.model.path
    if not isinstance(config.model, VisionLanguageModel) or path is None or not Path(path).is_dir():
        return None
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(path, **config.model.processor | {"trust_remote_code": False})


def weights_at(path: str | None) -> int | None:
    """Returns the bytes of the weights below a folder; None where there is no such folder."""
    folder = Path(path or "")
    if path is None or not folder.is_dir():
        return None
    return sum(file.stat().st_size for file in folder.rglob("*") if file.suffix in WEIGHTS)


def lines(findings: Findings) -> list[str]:
    """Returns what a check prints: a line for each alarm, then what was read and what was not."""
    rows: list[tuple[str, str, str]] = [(alarm.severity, alarm.part, alarm.text) for alarm in findings.alarms]
    rows += [("read", part, text) for part, text in findings.facts]
    rows += [("not read", part, text) for part, text in findings.unread]
    width = max((len(part) for _, part, _ in rows), default=0)
    count = len(findings.alarms)
    end = "no alarm" if not count else f"{count} alarm{'s' * (count > 1)}"
    return [*(f"{kind:<8}  {part:<{width}}  {text}" for kind, part, text in rows), end]
