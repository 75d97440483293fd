"""Evaluates a policy on held-out prompts."""

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
    """A file with the finished episodes of an evaluation, so that a stopped evaluation can continue.

    A line holds a batch of episodes and a digest (hash) of the protocol and the weights. Lines with another digest than
    `digest` and an incomplete last line are removed.
    """

    def __init__(self, file: Path, digest: str) -> None:
        self.file, self.digest = file, digest
        self.parts: dict[tuple[int, ...], list[dict[str, Any]]] = {}
        complete_lines = ""
        for line in file.read_text().splitlines(keepends=True) if file.is_file() else []:
            if not line.endswith("\n"):
                continue
            batch = json.loads(line)
            if batch["digest"] == digest:
                self.parts[tuple(batch["indices"])] = batch["episodes"]
                complete_lines += line
        file.write_text(complete_lines)

    @property
    def episodes(self) -> int:
        """Returns the number of episodes in the file."""
        return sum(map(len, self.parts.values()))

    def find(self, indices: Sequence[int], prompts: Sequence[Prompt]) -> list[Sample] | None:
        """Returns the samples of a batch if the file has it, else None. indices: the indices of its prompts."""
        if tuple(indices) not in self.parts:
            return None
        episodes = self.parts[tuple(indices)]
        return [
            Sample(p, response=e["response"], episode=Episode(**e["episode"]))
            for p, e in zip(prompts, episodes, strict=True)
        ]

    def add(self, indices: Sequence[int], samples: Sequence[Sample]) -> None:
        """Appends a batch of episodes, without their frames. indices: the indices of its prompts."""
        records = []
        for sample in samples:
            assert sample.episode is not None
            records.append({"response": sample.response, "episode": asdict(replace(sample.episode, frames=None))})
        with self.file.open("a") as out:
            out.write(json.dumps({"digest": self.digest, "indices": list(indices), "episodes": records}) + "\n")


def evaluate(
    policy: Responding, task: Task, ranks: Ranks, count: int, config: JobConfig, journal: Journal | None = None
) -> tuple[dict[str, float], list[Sample], list[float]]:
    """Evaluates a policy on the first `count` held-out prompts, of which each rank takes every world-th.

    Returns the metrics over all ranks, this rank's samples, and the accuracy of each of these (NaN: unscored). Means
    leave out unscored samples. journal: a file with episodes to reuse, to which new ones are added. Raises UserError if
    the share of unscored samples exceeds evaluation.max_unscored.
    """
    settings = config.evaluation
    count = min(count, len(task.evaluation))
    # rounded up, so that all ranks have the same number, as ZeRO-3 needs; `by_index` drops copies of the last prompt
    num_local = -(-count // ranks.world)
    indices = [min(ranks.rank + i * ranks.world, count - 1) for i in range(num_local)]
    samples: list[Sample] = []
    with display.work("evaluation", num_local) as work:
        for start in range(0, num_local, settings.micro_batch):
            batch = indices[start : start + settings.micro_batch]
            prompts = [task.evaluation[i] for i in batch]
            responses = None if journal is None else journal.find(batch, prompts)
            if responses is None:
                responses = policy.respond(prompts, rollout_seeds(config.seed + 1, batch, 1))
                if journal is not None:
                    journal.add(batch, responses)
            samples += responses
            work.advance(len(batch))
    columns = {"accuracy": task.accuracy(samples), **task.measures(samples, torch.tensor(indices))}
    rows = [{name: float(values[i]) for name, values in columns.items()} for i in range(num_local)]
    kinds = [str(s.prompt.metadata.get("kind", "")) for s in samples]
    gathered = ranks.gather(list(zip(indices, rows, kinds, strict=True)))
    by_index = {index: (row, kind) for rank in gathered for index, row, kind in rank}
    result = summarize(list(by_index.values()), list(columns))
    for name, value in policy.counts().items():
        result[f"evaluation/{name}"] = float(ranks.sum(torch.tensor(value)))
    if result["evaluation/unscored"] > settings.max_unscored:
        raise UserError(
            f"{result['evaluation/unscored']:.0%} of {len(by_index)} held-out rollouts could not be scored, more than "
            f"evaluation.max_unscored={settings.max_unscored:g}, so that accuracy would mean little; see the warnings "
            "above for the cause, or raise that key"
        )
    return result, samples, [row["accuracy"] for row in rows]


def summarize(rows: list[tuple[dict[str, float], str]], columns: list[str]) -> dict[str, float]:
    """Returns the mean of each column, the accuracy by kind of prompt, its standard error, and the share of unscored
    samples. rows: for each sample its values by column (NaN: unscored), and the kind of its prompt ("": none)."""
    result = {}
    for name in columns:
        if values := _not_nan([row[name] for row, _ in rows]):
            result[f"evaluation/{name}"] = sum(values) / len(values)
    for kind in sorted({kind for _, kind in rows} - {""}):
        if values := _not_nan([row["accuracy"] for row, row_kind in rows if row_kind == kind]):
            result[f"evaluation/accuracy/{kind}"] = sum(values) / len(values)
    accuracies = torch.tensor(_not_nan([row["accuracy"] for row, _ in rows]))
    result["evaluation/n"] = float(len(accuracies))
    result["evaluation/unscored"] = 1 - len(accuracies) / len(rows)
    result["evaluation/standard_error"] = (
        float(accuracies.std() / len(accuracies) ** 0.5) if len(accuracies) > 1 else 0.0
    )
    return result


def _not_nan(values: list[Any]) -> list[float]:
    """Returns the values that are not NaN."""
    return [value for value in values if not math.isnan(value)]


def checkpoint_score(result: dict[str, float], checkpoint: Checkpoint) -> float:
    """Returns the score by which the best checkpoint is selected, the higher the better; -inf without an accuracy.

    result: metrics of an evaluation. Raises UserError if checkpoint.best_by is none of them.
    """
    if checkpoint.best_by not in result and checkpoint.best_by != "evaluation/accuracy":
        raise UserError(
            f"checkpoint.best_by={checkpoint.best_by} is not a metric of this evaluation; choose one of "
            f"{', '.join(sorted(result))}"
        )
    if checkpoint.best_by not in result:
        return -math.inf
    return (1 if checkpoint.best_is == "highest" else -1) * result[checkpoint.best_by]
