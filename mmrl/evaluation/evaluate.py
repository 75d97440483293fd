"""Measuring a policy on held-out prompts."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from mmrl.checkpoints.settings import Checkpoint
from mmrl.engine import Ranks
from mmrl.errors import UserError
from mmrl.protocols.job import JobConfig
from mmrl.protocols.parts import Responding, Task
from mmrl.rollouts import Episode, Prompt, Sample
from mmrl.runtime.progress import display
from mmrl.runtime.seeds import rollout_seeds


class Journal:
    """Episodes of an evaluation that were played, in a file, so that one that was stopped can go on.

    A line is a part that was played at once. One that was made under another `digest`, that is, under another protocol
    or with other weights, is left aside, and so is a last line that was not written to its end.
    """

    def __init__(self, file: Path, digest: str) -> None:
        self.file, self.digest = file, digest
        self.parts: dict[tuple[int, ...], list[dict[str, Any]]] = {}
        whole = ""
        for line in file.read_text().splitlines(keepends=True) if file.is_file() else []:
            if not line.endswith("\n"):
                continue
            part = json.loads(line)
            if part["digest"] == digest:
                self.parts[tuple(part["indices"])] = part["episodes"]
                whole += line
        file.write_text(whole)

    @property
    def episodes(self) -> int:
        """The number of episodes that it holds."""
        return sum(map(len, self.parts.values()))

    def find(self, indices: Sequence[int], prompts: Sequence[Prompt]) -> list[Sample] | None:
        """Returns the samples of a part that was played before, or None."""
        if tuple(indices) not in self.parts:
            return None
        episodes = self.parts[tuple(indices)]
        return [
            Sample(p, response=e["response"], episode=Episode(**e["episode"]))
            for p, e in zip(prompts, episodes, strict=True)
        ]

    def add(self, indices: Sequence[int], samples: Sequence[Sample]) -> None:
        records = []
        for sample in samples:
            assert sample.episode is not None
            records.append({"response": sample.response, "episode": asdict(replace(sample.episode, frames=None))})
        with self.file.open("a") as out:
            out.write(json.dumps({"digest": self.digest, "indices": list(indices), "episodes": records}) + "\n")


def evaluate(
    policy: Responding, task: Task, ranks: Ranks, count: int, config: JobConfig, journal: Journal | None = None
) -> tuple[dict[str, float], list[Sample], list[float]]:
    """Held-out accuracy with its standard error and the task's measures; this rank's samples, and the accuracy of each.
    journal: of episodes that were played before, and of those that are played now.

    Every rank takes every world-th prompt. What could not be scored counts for nothing, and its share is reported.

    Raises UserError if more than evaluation.max_unscored could not be scored.
    """
    settings = config.evaluation
    count = min(count, len(task.evaluation))
    share = -(-count // ranks.world)  # equal on all ranks, as ZeRO-3 needs; the surplus is not counted
    indices = [min(ranks.rank + i * ranks.world, count - 1) for i in range(share)]
    samples: list[Sample] = []
    with display.work("evaluation", share) as work:
        for start in range(0, share, settings.micro_batch):
            part = indices[start : start + settings.micro_batch]
            prompts = [task.evaluation[i] for i in part]
            answers = None if journal is None else journal.find(part, prompts)
            if answers is None:
                answers = policy.respond(prompts, rollout_seeds(config.seed + 1, part, 1))
                if journal is not None:
                    journal.add(part, answers)
            samples += answers
            work.advance(len(part))
    columns = {"accuracy": task.accuracy(samples), **task.measures(samples, torch.tensor(indices))}
    rows = [{name: float(values[i]) for name, values in columns.items()} for i in range(share)]
    kinds = [str(s.prompt.metadata.get("kind", "")) for s in samples]
    gathered = ranks.gather(list(zip(indices, rows, kinds, strict=True)))
    by_index = {index: (row, kind) for rank in gathered for index, row, kind in rank}
    result = summarised(list(by_index.values()), list(columns))
    for name, wrong in policy.counts().items():
        result[f"evaluation/{name}"] = float(ranks.sum(torch.tensor(wrong)))
    if result["evaluation/unscored"] > settings.max_unscored:
        raise UserError(
            f"{result['evaluation/unscored']:.0%} of {len(by_index)} held-out rollouts could not be scored, more than "
            f"evaluation.max_unscored={settings.max_unscored:g}: the accuracy of the others says little"
        )
    return result, samples, [row["accuracy"] for row in rows]


def summarised(rows: list[tuple[dict[str, float], str]], columns: list[str]) -> dict[str, float]:
    """Means of the measured numbers, also by kind of prompt. rows: numbers by column (NaN: not measured), and a
    kind."""
    result = {}
    for name in columns:
        if values := _not_nan([row[name] for row, _ in rows]):
            result[f"evaluation/{name}"] = sum(values) / len(values)
    for kind in sorted({kind for _, kind in rows} - {""}):
        if values := _not_nan([row["accuracy"] for row, k in rows if k == kind]):
            result[f"evaluation/accuracy/{kind}"] = sum(values) / len(values)
    marks = torch.tensor(_not_nan([row["accuracy"] for row, _ in rows]))
    result["evaluation/n"] = float(len(marks))
    result["evaluation/unscored"] = 1 - len(marks) / len(rows)
    result["evaluation/standard_error"] = float(marks.std() / len(marks) ** 0.5) if len(marks) > 1 else 0.0
    return result


def _not_nan(values: list[Any]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def checkpoint_value(result: dict[str, float], checkpoint: Checkpoint) -> float:
    """The number by which the best weights are chosen, the higher the better; -inf where nothing could be measured.
    Raises UserError for a metric that does not exist."""
    if checkpoint.best_by not in result and checkpoint.best_by != "evaluation/accuracy":
        raise UserError(
            f"checkpoint.best_by={checkpoint.best_by} is not a metric of this evaluation; it has "
            f"{', '.join(sorted(result))}"
        )
    if checkpoint.best_by not in result:
        return -math.inf
    return (1 if checkpoint.best_is == "highest" else -1) * result[checkpoint.best_by]
