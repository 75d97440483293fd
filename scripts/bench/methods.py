"""Every method that applies to a task, with several seeds: its gain over plain GRPO, and its cost.

    .venv/bin/python scripts/bench/methods.py [--task digits|zoom|reach] [--steps 60] [--seeds 3] [--only PATTERN]
        [--runs FOLDER] [--list] [KEY=VALUE ...]

--task: questions about digits as in the quickstart, the same with a zoom tool over several turns, or an arm that
reaches. --only: methods whose title or name matches this regular expression; plain GRPO and random rewards are always
measured. --list: prints what would be measured, and which methods do not apply and why. KEY=VALUE: further overrides of
every run. Runs that exist in --runs with the same configuration are not repeated. All start from the same weights, with
one thread.

Prints a Markdown table. Accuracy is held-out accuracy as the recipe evaluates it (success rate of reach), the mean over
the seeds. The gain is the mean over the seeds of the difference to plain GRPO with the same seed, with a 95 % interval
by Student's t over these differences. The cost is the CPU time of a run with its evaluations, relative to plain GRPO.
Libraries are imported once, in the process from which the runs are forked. With so few steps on so small a task the
numbers say what a method does there, not what it gains elsewhere.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch  # noqa: F401  (so that the runs that are forked need not)
import transformers  # noqa: F401

from mmrl.cli import main as cli
from mmrl.cli.methods import decisions_of, methods, needs_of
from mmrl.config import load
from mmrl.errors import UserError
from mmrl.protocols.requirements import Needs
from mmrl.settings import plain

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench import recipes  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SPENT = "processor_seconds.txt"
PLAIN, RANDOM = "plain GRPO", "random rewards"
# Where a method stands in the configuration, by the title of its kind; {} is the method itself.
PLACES = {
    "algorithm": "algorithm={}",
    "surrogate": "algorithm.surrogate={}",
    "baseline": "algorithm.baseline={}",
    "transform of rewards": "algorithm.transforms=[{}]",
    "score of ranks": "algorithm.transforms=[{{type: rank, score: {}}}]",
    "scale of advantages": "algorithm.scale={}",
    "components": "algorithm.components={}",
    "loss term": "algorithm.terms=[{}]",
    "advantage shaper": "algorithm.shaping=[{}]",
    "mask": "algorithm.masks=[{}]",
    "prompt sampler": "rollout.sampler={}",
    "source": "rollout.extras=[{}]",
    "other policy of kl": "algorithm.terms=[{{type: kl, against: {}}}]",
    "weighting of kl": "algorithm.terms=[{{type: kl, coefficient: 0.001, weighting: {}}}]",
    "bonus by entropy": "algorithm.shaping=[{{type: entropy, bonus: {}}}]",
    "lambda of estimates": "algorithm={{type: ppo, gamma: 1, value_lam: 1, lam: {}}}",
}
# What a method must be given.
OPTIONS = {
    "band": "fact: length, high: 3",
    "action_proposals": "steps: 8",
    "best_of_group": "count: 4",
    "bucket_std": "by: kind",
    "category_bandit": "by: kind",
    "covariance_clip": "low: 0, high: 5",
    "demonstrations": "prompts: 32",
    "distillation": "teacher: {path: TEACHER}",
    "teacher_ratio": "teacher: {path: TEACHER}",
    "divergence_mask": "bound: 0.1",
    "expert_labels": "prompts: 32, episodes: 8",
    "pass_at_k": "k: 4",
    "pass_at_k_analytic": "k: 4",
    "quantile_bucket_std": "count: 4",
    "self_imitation": "count: 32",
    "segment_values": "every: 1",
    "sequence_mask": "bound: 0.3",
    "stored_steps": "steps: 32",
    "stratified": "by: length",
    "section_credit": "sections: [{end: ' ', weight: 2}]",
    "task_quotas": "by: kind",
    "token_budget": "budget: 400",
    "view_contrast": "view: blank",
    "view_information": "view: blank",
    "view": "view: blank",
}
# What goes with a method.
BESIDE = {
    "demonstrations": ["algorithm.terms=[likelihood]"],
    "action_proposals": ["algorithm.terms=[q_policy_gradient]"],
    "prefix_mean": ["rollout.extras=[branches]"],
    "subtree_advantages": ["rollout.extras=[branches]"],
    "stored_steps": ["algorithm.terms=[{type: likelihood, of: replayed}]"],
    "self_imitation": ["algorithm.terms=[{type: likelihood, of: replayed}]"],
    "guided": ["rollout.extras=[guided_groups]"],
    "self_corrections": ["rollout.max_response_length=48"],
    "likelihood": ["algorithm.terms=[{type: likelihood, of: positive}]"],
    "ema": ["algorithm.terms=[{type: kl, coefficient: 0.1, against: ema}]"],
    "covariance": [
        "algorithm.terms=[{type: kl, coefficient: 1, against: old, estimator: absolute, weighting: covariance}]"
    ],
    "clarity": ["algorithm.shaping=[{type: entropy, sure: {}, bonus: clarity, centred: true}]"],
}
# Several terms that are one method together.
TOGETHER = {
    "loss term: likelihood of all, also under a view": [
        "algorithm.terms=[{type: likelihood, of: all, coefficient: 0.03}, "
        "{type: likelihood, of: all, coefficient: 0.03, under: blank}]"
    ],
    "loss term: likelihood by doubt": [
        "algorithm.terms=[{type: likelihood, coefficient: 0.5, doubt: -1}, "
        "{type: likelihood, of: own_positive, doubt: 1}]",
        "rollout.extras=[guided_groups]",
    ],
}
# What plain GRPO is made of, and what is the same with one reward.
SAME = (
    *("grpo", "clip", "permutation", "mean", "group_std", "sum", "normalise_each"),
    *("reference", "doubt", "constant", "win_rate"),
)


@dataclass(frozen=True)
class Task:
    """recipe: names a file of configs/, and with `_warm_start` the one that its base is made by. decision: what its
    policy decides. evaluation: overrides of every run. few: has few prompts, so that they come again."""

    recipe: str
    decision: str
    evaluation: tuple[str, ...] = ("evaluation.prompts=1000",)
    few: str = "task.data.train_size=256"


TASKS = {
    "digits": Task("visual_qa_digits", "text token"),
    "zoom": Task("visual_qa_zoom", "text token"),
    "reach": Task("manipulation_tabletop", "action token", ("evaluation.prompts=200",), "task.train_size=256"),
}


@dataclass(frozen=True)
class Setting:
    """What a method and the plain GRPO that it is compared with have in common."""

    name: str
    overrides: tuple[str, ...]


USUAL = Setting("", ())
# Ratios are 1 where a step has one update: what is done to them shows with several.
SEVERAL = Setting("4 updates a step", ("algorithm.minibatches=4",))
FEW = "256 prompts"  # what remembers prompts needs some that come again
REMEMBERING = ("running", "success_replay", "self_imitation")


@dataclass(frozen=True)
class Arm:
    """A method, and the overrides that turn it on. refused: why it does not apply here."""

    name: str
    overrides: tuple[str, ...] = ()
    setting: Setting = USUAL
    refused: str = ""

    @property
    def label(self) -> str:
        return ", ".join(filter(None, (self.name, self.setting.name)))

    @property
    def folder(self) -> str:
        return re.sub(r"\W+", "_", self.label)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=TASKS, default="digits")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--runs", type=Path, default=ROOT / "build/methods")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    task = TASKS[options.task]
    shared = [f"steps={options.steps}", "evaluation.every=0", *task.evaluation, "threads=1", "log.samples_every=0"]
    bench = Bench(task, options.runs / options.task, options.seeds, [*shared, *options.overrides])
    arms = [bench.tried(arm) for arm in catalogue(task) if re.search(options.only, arm.name)]
    if options.list:
        for arm in arms:
            print(f"{arm.name}: {arm.refused or ' '.join(arm.overrides)}")
        return
    wanted = [arm for arm in arms if not arm.refused]
    plains = [Arm(PLAIN, setting=setting) for setting in dict.fromkeys((USUAL, *(arm.setting for arm in wanted)))]
    print("| method | accuracy | gain over plain GRPO, 95 % | cost |\n| --- | --- | --- | --- |", flush=True)
    random = Arm(RANDOM, ("task.rewards=[{name: random}]",))
    for arm in [*plains, random, *wanted]:
        print(bench.row(arm), flush=True)
    for arm in arms:
        if arm.refused:
            print(f"\nNot here: {arm.name} ({arm.refused})")


def catalogue(task: Task) -> list[Arm]:
    """Every method that stands somewhere in the configuration, with its defaults where it has them all."""
    found = []
    for base, name, kind in methods():
        if base.title not in PLACES or name in SAME:
            continue
        needs = needs_of(kind)
        refused = "" if needs is None or may_do(needs, task) else f"its decision is never {task.decision}"
        own = f"{{type: {name}{', ' + OPTIONS[name] if name in OPTIONS else ''}}}"
        remembers = base.title == "prompt sampler" or name in REMEMBERING
        setting = SEVERAL if base.title == "surrogate" else Setting(FEW, (task.few,)) if remembers else USUAL
        overrides = [PLACES[base.title].format(own), *BESIDE.get(name, [])]
        found.append(Arm(f"{base.title}: {name}", tuple(overrides), setting, refused))
    return [*found, *(Arm(name, tuple(overrides)) for name, overrides in TOGETHER.items())]


def may_do(needs: Needs, task: Task) -> bool:
    """Whether a method may be for the task, as far as its decisions tell. Its recipe tells whether they have turns."""
    return task.decision in decisions_of(replace(needs, offers=needs.offers - {"turns"}))


@dataclass(frozen=True)
class Bench:
    """runs: the folder of all runs. shared: overrides of every run."""

    task: Task
    runs: Path
    seeds: int
    shared: list[str]

    def overrides(self, arm: Arm) -> list[str]:
        return [*self.shared, *arm.setting.overrides, *arm.overrides]

    def tried(self, arm: Arm) -> Arm:
        """With what the configuration says against it."""
        if arm.refused:
            return arm
        more = ("algorithm.baseline=none", "algorithm.scale=none")  # for transforms that give advantages
        tried = [arm, *([replace(arm, overrides=(*arm.overrides, *more))] if arm.name.startswith("transform") else [])]
        refused = [self.refusal(one) for one in tried]
        return next(
            (one for one, told in zip(tried, refused, strict=True) if not told), replace(arm, refused=refused[0])
        )

    def refusal(self, arm: Arm) -> str:
        """Why its configuration is refused; nothing where it is not."""
        try:
            load(ROOT / self.recipe(), [f"run_dir={self.runs}", *self.overrides(arm)])
        except UserError as error:
            return str(error).partition(": ")[2]
        return ""

    def row(self, arm: Arm) -> str:
        """A row of the table; runs that are missing are made."""
        found = [self.finished(arm, seed) for seed in range(self.seeds)]
        plainly = [self.finished(Arm(PLAIN, setting=arm.setting), seed) for seed in range(self.seeds)]
        accuracy = [accuracy_of(run) for run in found]
        gains = [100 * (a - accuracy_of(b)) for a, b in zip(accuracy, plainly, strict=True)]
        cost = sum(map(spent_in, found)) / sum(map(spent_in, plainly))
        gain = "" if arm.name == PLAIN else f"{statistics.mean(gains):+.1f} {interval(gains)}"
        return f"| {arm.label} | {statistics.mean(accuracy):.3f} | {gain} | {cost:.2f} |"

    def finished(self, arm: Arm, seed: int) -> Path:
        """A run, which is made now if it does not exist."""
        run = self.runs / f"{arm.folder}-{seed}"
        model = [f"model.path={self.base()}", "model.warm_start=null"]
        train(self.recipe(), run, [f"seed={seed}", *model, *self.overrides(arm)])
        return run

    def base(self) -> Path:
        """What all of them start from."""
        folder = self.runs / "base"
        train(self.recipe("_warm_start"), folder, ["threads=1"])
        return folder / "final"

    def recipe(self, part: str = "") -> str:
        return str(recipes.file(f"{self.task.recipe}{part}"))


def train(recipe: str, run: Path, overrides: list[str]) -> None:
    """Trains, unless the folder holds the finished run of the same configuration."""
    told = json.dumps(plain(load(ROOT / recipe, [f"run_dir={run}", *overrides])), sort_keys=True, default=str)
    known = run / "bench.json"
    if (run / "final").is_dir() and known.is_file() and known.read_text() == told:
        return
    shutil.rmtree(run, ignore_errors=True)
    spent = forked(["train", recipe, f"run_dir={run}", *overrides])
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    (run / SPENT).write_text(str(spent))
    known.write_text(told)


def forked(command: list[str]) -> float:
    """Runs an mmrl command in a process of its own; the processor's seconds that it took. Raises RuntimeError where it
    fails."""
    child = os.fork()
    if child == 0:
        code = 1  # of whatever goes wrong; nothing of this process may go on as its parent does
        try:
            os.dup2(2, 1)
            cli.main(command)
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            sys.stderr.flush()
            os._exit(code)
    _, status, used = os.wait4(child, 0)
    if status:
        raise RuntimeError(f"mmrl {' '.join(command)} ended with {os.waitstatus_to_exitcode(status)}")
    return used.ru_utime + used.ru_stime


def accuracy_of(run: Path) -> float:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return float([row for row in rows if "evaluation/accuracy" in row][-1]["evaluation/accuracy"])


def spent_in(run: Path) -> float:
    return float((run / SPENT).read_text())


# The quantile 0.975 of Student's t by degrees of freedom; beyond them the normal distribution's is near.
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def interval(values: list[float]) -> str:
    """The interval of 95 % of their mean."""
    if len(values) < 2:
        return "(one seed)"
    half = STUDENT.get(len(values) - 1, 2.0) * statistics.stdev(values) / math.sqrt(len(values))
    middle = statistics.mean(values)
    return f"({middle - half:+.1f} .. {middle + half:+.1f})"


if __name__ == "__main__":
    main()
