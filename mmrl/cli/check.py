"""`mmrl check`: tests a job's data, chat template, rewards, model and simulator together, before training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mmrl.build import build_policy, build_task
from mmrl.collection.checks import check_batch
from mmrl.config import Config, load
from mmrl.errors import printable
from mmrl.job import before_warm_start
from mmrl.policies.diffusion.policy import DiffusionPolicy
from mmrl.policies.tokenizers import Processor
from mmrl.policies.vlm.policy import VisionLanguagePolicy
from mmrl.policies.vlm.settings import VisionLanguageModel
from mmrl.preflight import CheckReport
from mmrl.preflight.generation import probe_own_rewards, probe_pairs, probe_truncation
from mmrl.preflight.page import Row
from mmrl.preflight.prompts import probe_images, probe_overlap, sample_prompts
from mmrl.preflight.questions import ROWS_ON_PAGE, probe_questions
from mmrl.preflight.quick import probe_policy
from mmrl.preflight.robots import probe_robots
from mmrl.protocols.parts import Policy, Task
from mmrl.rollouts import Prompt
from mmrl.tasks.manipulation.settings import ManipulationSettings
from mmrl.tasks.manipulation.task import Manipulation
from mmrl.tasks.visual_qa.settings import VisualQASettings
from mmrl.tasks.visual_qa.task import VisualQA

SMALL_MODEL = 1 << 29  # bytes of weights up to which the model is loaded without --weights
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".ckpt")


@dataclass
class JobCheck:
    """The check of one configuration.

    name: its path, or the name of a recipe. weights: whether to load the model's weights; None: if they are small.
    report: the result. rows: prompts for the HTML page.
    """

    name: str
    overrides: Sequence[str] = ()
    weights: bool | None = None
    report: CheckReport = field(default_factory=CheckReport)
    rows: list[Row] = field(default_factory=list)

    def run(self) -> CheckReport:
        """Runs all probes and returns the report. Nothing is raised: every error becomes an alarm."""
        with self.report.catch_errors("configuration"):
            config = before_warm_start(load(self.name, list(self.overrides)))
            check_batch(config, 1)
            self._check_parts(config)
        return self.report

    def _check_parts(self, config: Config) -> None:
        """Builds task, prompts and policy, one after another, and checks each. What cannot be built becomes an alarm,
        and checks that need it are left out."""
        task: Task | None = None
        with self.report.catch_errors("data"):
            task = build_task(config)
        if task is None:
            return
        prompts: list[Prompt] = []
        with self.report.catch_errors("data"):
            prompts = self._check_prompts(config, task)
        policy: Policy | None = None
        with self.report.catch_errors("model"):
            policy = self._policy(config, task)
        if isinstance(config.task, VisualQASettings) and isinstance(task, VisualQA):
            with self.report.catch_errors("template"):
                processor = processor_of(config, policy)
                self.rows = probe_questions(config, config.task, task, prompts, processor, self.report)
        elif isinstance(config.task, ManipulationSettings) and isinstance(task, Manipulation):
            probe_robots(config, config.task, task, policy, self.report)
        if policy is not None:
            self._check_rollout(task, policy, prompts)

    def _check_prompts(self, config: Config, task: Task) -> list[Prompt]:
        """Probes a sample of prompts. Returns the training prompts of the sample, or the held-out ones if the job has
        none."""
        train = [] if task.train is None else sample_prompts(task.train)
        held_out = sample_prompts(task.evaluation)
        sizes = f"{len(task.train or ())} prompts to train on, {len(task.evaluation)} held out"
        self.report.inspected.append(("data", f"{sizes}; read: {len(train)} and {len(held_out)}"))
        if not isinstance(config.task, ManipulationSettings) and not config.task.shows_held_out:
            self.report.add(probe_overlap(train, held_out, "task.data.eval"))
        self.report.add(probe_images(train))
        self.report.add(probe_pairs(train))
        self.rows = [Row(prompt, prompt.text) for prompt in train[:ROWS_ON_PAGE]]
        return train or held_out

    def _policy(self, config: Config, task: Task) -> Policy | None:
        """Builds the policy if its weights are small or --weights is set. Otherwise notes that they were not read, and
        returns None."""
        # a model that a function builds has no weights to read
        size = 0 if config.model.build is not None else weight_bytes(config.model.path)
        if self.weights or size is not None and size <= SMALL_MODEL:
            return build_policy(config, task)
        path, hint = config.model.path, "add --weights to read them"
        weights = "a model: model.path is not set" if path is None else f"the weights of model.path={path}; {hint}"
        self.report.skipped.append(("model", weights))
        return None

    def _check_rollout(self, task: Task, policy: Policy, prompts: Sequence[Prompt]) -> None:
        """Samples two rollouts and scores them, so that the policy and the rewards run once, and adds alarms about
        them."""
        if isinstance(policy, DiffusionPolicy):
            with self.report.catch_errors("data"):
                self.report.add(probe_truncation(prompts, policy.family.truncated_tokens))
            self.report.add(probe_policy(policy))
            self.report.inspected += [("model", remark) for remark in policy.family.notes.differences]
        with self.report.catch_errors("rollout"):
            samples = policy.respond(sample_prompts(task.evaluation, 2), [1, 2])
            task.accuracy(samples)
            task.score(samples, torch.arange(len(samples)))
            self.report.add(probe_own_rewards(samples, task.score, list(task.reward_names), "task.rewards"))


def processor_of(config: Config, policy: Policy | None) -> Processor | None:
    """Returns the processor of a vision-language model: the policy's, or else the one in the folder model.path; None if
    there is neither."""
    if isinstance(policy, VisionLanguagePolicy):
        return policy.tokens.processor
    path = config.model.path
    if not isinstance(config.model, VisionLanguageModel) or path is None or not Path(path).is_dir():
        return None
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(path, **config.model.processor | {"trust_remote_code": False})


def weight_bytes(path: str | None) -> int | None:
    """Returns the size in bytes of all weight files below a folder; None if there is no such folder."""
    folder = Path(path or "")
    if path is None or not folder.is_dir():
        return None
    return sum(file.stat().st_size for file in folder.rglob("*") if file.suffix in WEIGHT_SUFFIXES)


def report_lines(report: CheckReport) -> list[str]:
    """Returns the lines that `mmrl check` prints: alarms, then what was inspected and skipped, then their number.
    Control characters, such as those of a prompt's id, are escaped."""
    rows: list[tuple[str, str, str]] = [(alarm.severity, alarm.part, alarm.text) for alarm in report.alarms]
    rows += [("read", part, text) for part, text in report.inspected]
    rows += [("not read", part, text) for part, text in report.skipped]
    width = max((len(part) for _, part, _ in rows), default=0)
    count = len(report.alarms)
    summary = "no alarm" if not count else f"{count} alarm{'s' * (count > 1)}"
    return [*(printable(f"{word:<8}  {part:<{width}}  {text}") for word, part, text in rows), summary]
