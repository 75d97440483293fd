"""A set of rewards. Each has a name and a column; weights are applied later, by the advantage."""

from __future__ import annotations

import math
import threading
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmrl.errors import UserError
from mmrl.rewards.guarded import GuardedReward
from mmrl.rewards.registry import LOWEST, NEEDS_OWN_PYTHON, build, is_custom
from mmrl.rewards.services.failures import Failures
from mmrl.rewards.services.interpreter import RewardProcess
from mmrl.rewards.services.isolated import IsolatedReward
from mmrl.rewards.services.spans import store_spans
from mmrl.rewards.settings import RewardSpec
from mmrl.rewards.turns import is_lost
from mmrl.rewards.types import BatchReward, Reward, SavingReward, Score, StatefulReward
from mmrl.rollouts import Prompt, Sample

MAX_SHOWN = 120  # characters of an answer in a message
SAMPLE_S, BATCH_S = 60.0, 600.0  # default deadlines of a custom reward in this process, in seconds
MAX_TIMEOUTS, MAX_TIMEOUTS_IN_PROCESS = 32, 4  # calls of a batch that may time out, isolated or in this process


def build_reward(spec: RewardSpec) -> GuardedReward | IsolatedReward:
    """Builds a reward inside a guard, so that its faults cost samples and not the run.

    Raises ValueError like `mmrl.rewards.build`, and for a deadline that cannot be enforced, a batch size of a reward
    that scores no batches, a reward that needs another interpreter while its `python` is not set, and one with `state`
    but no `load`.
    """
    timeout_score = LOWEST.get(spec.name, 0.0) if spec.on_timeout == "lowest" else None
    failures = Failures(spec.column, timeout_score)
    if spec.python is not None:
        return _build_under_interpreter(spec, spec.python, failures)
    if spec.name in NEEDS_OWN_PYTHON:
        raise ValueError(
            f"reward {spec.name!r} needs python: the interpreter of an environment of its own; run mmrl rewards "
            f"install {spec.name}, which makes it and prints the lines to write"
        )
    reward = build(
        spec.name,
        spec.options,
        isolated=spec.isolated,
        deadline_s=spec.deadline_s,
        workers=spec.workers,
        limits=spec.limits,
        failures=failures,
        signature=spec.signature,
    )
    _check_deadline(spec, reward)
    _check_batch_size(spec, reward)
    if isinstance(reward, SavingReward) and not isinstance(reward, StatefulReward):
        raise ValueError(
            f"reward {spec.name!r} has a method state() but no load(state), so a resumed run could not restore it; "
            "define load(state), too, or rename state()"
        )
    if isinstance(reward, IsolatedReward):
        failures.max_timeouts = spec.max_timeouts or MAX_TIMEOUTS
        return reward
    failures.max_timeouts = spec.max_timeouts or MAX_TIMEOUTS_IN_PROCESS
    default_s = BATCH_S if isinstance(reward, BatchReward) else SAMPLE_S
    # in this process only custom rewards run with a deadline
    return GuardedReward(reward, failures, (spec.deadline_s or default_s) if is_custom(spec.name) else None)


def _build_under_interpreter(spec: RewardSpec, python: str, failures: Failures) -> GuardedReward:
    """Builds a reward that runs under another interpreter. python: the path of that interpreter. Raises ValueError like
    `RewardProcess` and `_check_batch_size`, and for settings that only isolated rewards have."""
    if spec.isolated or spec.workers is not None or spec.limits is not None:
        raise ValueError(
            f"reward {spec.name!r}: with python it runs in one process of its own; leave out isolated, workers and "
            "limits"
        )
    failures.max_timeouts = spec.max_timeouts or MAX_TIMEOUTS_IN_PROCESS
    reward = RewardProcess(
        spec.name, spec.options, python, spec.deadline_s or BATCH_S, failures, signature=spec.signature
    )
    _check_batch_size(spec, reward)
    return GuardedReward(reward, failures, None)  # None: the reward itself enforces its deadline


def _check_deadline(spec: RewardSpec, reward: Reward | BatchReward) -> None:
    """Raises ValueError for a deadline that is not positive, and for a time limit of a reward of mmrl that runs in this
    process, where it cannot be stopped."""
    if spec.deadline_s is not None and spec.deadline_s <= 0:
        raise ValueError(f"reward {spec.name!r}: deadline_s must be positive, not {spec.deadline_s}")
    if is_custom(spec.name) or isinstance(reward, IsolatedReward):
        return
    option = "on_timeout" if spec.on_timeout != "unscored" else "deadline_s" if spec.deadline_s is not None else None
    if option is not None:
        raise ValueError(f"reward {spec.name!r}: {option} needs isolated: true, which runs the reward in processes")


def _check_batch_size(spec: RewardSpec, reward: Reward | BatchReward) -> None:
    """Raises ValueError for a batch_size below 1, and for a reward with a batch_size that does not score batches of
    samples."""
    if spec.batch_size is None:
        return
    if not isinstance(reward, BatchReward) or isinstance(reward, IsolatedReward) or reward.scope != "sample":
        raise ValueError(
            f"reward {spec.name!r} does not accept batch_size, because it does not score batches of samples; remove "
            "batch_size"
        )
    if spec.batch_size < 1:
        raise ValueError(f"reward {spec.name!r}: batch_size must be at least 1, not {spec.batch_size}")


class RewardSet:
    """The rewards of a task, K components with `names` and `weights`. `score` computes them for samples.

    Raises ValueError for an empty list, for two components with the same name, and like `build_reward`.
    """

    def __init__(self, specs: Iterable[RewardSpec]):
        self.specs = tuple(specs)
        self.names = tuple(spec.column for spec in self.specs)
        self.weights = tuple(float(spec.weight) for spec in self.specs)
        if not self.specs:
            raise ValueError("rewards: the list is empty; give at least one reward")
        duplicate = next((name for name in self.names if self.names.count(name) > 1), None)
        if duplicate is not None:
            raise ValueError(f"rewards: two components are named {duplicate!r}; give one of them a label")
        self.components = tuple(build_reward(spec) for spec in self.specs)
        self.reasons: dict[str, str] = {}  # by name: why the first unscored sample of the latest call was not scored
        self._lock = threading.Lock()  # models and worker processes serve one caller

    def score(
        self, samples: Sequence[Sample], group: Tensor | None = None, *, only: Container[str] | None = None
    ) -> Tensor:
        """Computes unweighted components [rollout, component], float32; NaN where a component could not be scored.

        group: [rollout] integers, the index of the prompt that a rollout answers; needed only by rewards that compare
        the rollouts of a group. only: names of the components to compute; the others are NaN. A score of None, NaN or
        infinity becomes NaN, never 0. Samples on which a reward raises, ends its process or takes too long get NaN,
        too; they are counted, and a warning is logged. Conversations whose environment failed get NaN. A prompt that a
        component does not apply to gets its `elsewhere`, 0 by default. Of a reward that returns `Spans`, each sample
        keeps them, and its score is their `total`. Afterwards `reasons[name]` says why the first unscored sample has no
        score of component `name`.

        Raises UserError, which names the reward, for a wrong number of values, a value that is not a number, a missing
        group, a reward server that is down, and a sample of the wrong kind.
        """
        if group is not None and group.shape != (len(samples),):
            raise ValueError(
                f"group must have shape ({len(samples)},), one number per sample, not {tuple(group.shape)}"
            )
        scores = torch.full((len(samples), len(self.components)), math.nan)
        lost = [row for row, sample in enumerate(samples) if is_lost(sample)]
        with self._lock:
            for column, (name, spec, reward) in enumerate(zip(self.names, self.specs, self.components, strict=True)):
                if only is not None and name not in only:
                    continue
                rows = [row for row, sample in enumerate(samples) if applies(spec, sample.prompt)]
                skipped = [row for row in range(len(samples)) if row not in set(rows)]
                scores[skipped, column] = spec.elsewhere or 0.0
                reward.failures.start_batch()
                try:
                    for indices in _split_into_calls(reward, spec.batch_size, rows, group):
                        part = [samples[row] for row in indices]
                        values = store_spans(reward.score(part), part, name, spec.total)
                        scores[indices, column] = _column(values)
                except UserError as error:
                    raise UserError(f"reward {name!r}: {error}") from error
                unscored = next((samples[row] for row in rows if scores[row, column].isnan()), None)
                if unscored is not None:
                    self.reasons[name] = reward.failures.reason or _unscored_reason(unscored)
        scores[lost] = math.nan
        if lost:
            self.reasons.update(
                dict.fromkeys(self.names, f"the environment of prompt {samples[lost[0]].prompt.id} failed")
            )
        return scores

    def replace(self, name: str, reward: Reward | BatchReward) -> None:
        """Replaces the component `name` by another reward, from the next call on: any function of a sample, or object
        that scores batches.

        Raises UserError if there is no such component, or if the old one is isolated.
        """
        if name not in self.names:
            raise UserError(f"there is no reward {name!r}; there are {', '.join(self.names)}")
        column = self.names.index(name)
        previous = self.components[column]
        if isinstance(previous, IsolatedReward):
            raise UserError(
                f"reward {name!r} is isolated and cannot be replaced by an object of this process; set isolated: false"
            )
        deadline_s = previous.deadline_s or (BATCH_S if isinstance(reward, BatchReward) else SAMPLE_S)
        replacement = GuardedReward(reward, previous.failures, deadline_s)
        self.components = (*self.components[:column], replacement, *self.components[column + 1 :])

    def state(self) -> dict[str, Any]:
        """Returns the states of stateful rewards, by name, for a checkpoint. Raises UserError for a state that a
        checkpoint cannot hold."""
        states = {name: dict(reward.state()) for name, reward in self._stateful()}
        for name, state in states.items():
            check_serializable(f"reward {name!r}: its state", state)
        return states

    def load(self, states: Mapping[str, Any]) -> None:
        """Restores the states that `state` returned. Raises UserError if a reward had a state in the checkpoint and has
        none now."""
        stateful = dict(self._stateful())
        if missing := next((name for name in states if name not in stateful), None):
            raise UserError(
                f"the checkpoint holds a state of reward {missing!r}, which now has no method load(); define load(), "
                "or start a new run"
            )
        for name, state in states.items():
            stateful[name].load(state)

    def _stateful(self) -> list[tuple[str, StatefulReward]]:
        """Returns (name, reward) of each component that has a state."""
        stateful: list[tuple[str, StatefulReward]] = []
        for name, component in zip(self.names, self.components, strict=True):
            if isinstance(component, GuardedReward) and isinstance(component.reward, StatefulReward):
                stateful.append((name, component.reward))
        return stateful

    def use_resize(self, resize: Mapping[str, int] | None) -> None:
        """Sets the option `resize` of rewards with coordinates 'resized' to the numbers of the model's image processor.

        resize: factor, min_pixels and max_pixels; None if the processor does not resize images as Qwen2-VL's does.
        Raises UserError if a reward's own `resize` differs, or if it has none and `resize` is None.
        """
        specs = [_with_resize(spec, resize) for spec in self.specs]
        self.components = tuple(
            reward if new is old else build_reward(new)
            for reward, new, old in zip(self.components, specs, self.specs, strict=True)
        )
        self.specs = tuple(specs)


def check_serializable(name: str, value: object) -> None:
    """Raises UserError for anything except numbers, strings, None, tensors, and lists, tuples and dicts of them. name:
    what the message calls the value."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            check_serializable(f"{name}[{key!r}]", part)
    elif isinstance(value, list | tuple):
        for i, part in enumerate(value):
            check_serializable(f"{name}[{i}]", part)
    elif not (value is None or type(value) in (bool, int, float, str) or isinstance(value, Tensor)):
        raise UserError(
            f"{name} is {type(value).__name__}; a checkpoint holds numbers, strings, tensors, lists and dicts"
        )


def _unscored_reason(sample: Sample) -> str:
    """Returns the reason to show for a sample for which a reward gave no number."""
    answer = repr(sample.prompt.answer)
    answer = answer if len(answer) <= MAX_SHOWN else f"{answer[:MAX_SHOWN]}..."
    return f"it gave no finite number on prompt {sample.prompt.id}, whose answer is {answer}"


def _with_resize(spec: RewardSpec, resize: Mapping[str, int] | None) -> RewardSpec:
    """Returns the settings of a reward; if it uses coordinates 'resized', with `resize` among its options. resize: see
    `RewardSet.use_resize`. Raises UserError if its own `resize` differs, or if it has none and `resize` is None."""
    if is_custom(spec.name) or "resized" not in (spec.options.get("coordinates"), spec.options.get("answers")):
        return spec
    configured = spec.options.get("resize")
    if resize is None:
        if configured is None:
            raise UserError(
                f"reward {spec.column!r}: coordinates 'resized' follow the model's image processor, but this one does "
                "not resize images as Qwen2-VL's does; set coordinates to pixels, thousandths or unit, or give resize"
            )
        return spec
    different = [key for key, value in (configured or {}).items() if key in resize and resize[key] != value]
    if different:
        numbers = ", ".join(f"{key} {(configured or {})[key]}, not {resize[key]}" for key in different)
        raise UserError(
            f"reward {spec.column!r}: its resize differs from the model's image processor ({numbers}); leave resize "
            "out, or set model.processor"
        )
    return spec.model_copy(update={"options": {**spec.options, "resize": dict(resize)}})


def applies(spec: RewardSpec, prompt: Prompt) -> bool:
    """Returns whether the component applies to a prompt."""
    return all(prompt.metadata.get(key) == value for key, value in spec.where.items())


def _split_into_calls(
    reward: GuardedReward | IsolatedReward, batch_size: int | None, rows: list[int], group: Tensor | None
) -> list[list[int]]:
    """Splits `rows`, indices of samples, into calls of the reward: by batch size, by group, or all at once."""
    if reward.scope == "sample":
        size = batch_size or max(1, len(rows))
        return [rows[first : first + size] for first in range(0, len(rows), size)]
    if reward.scope == "batch":
        return [rows] if rows else []
    if group is None:
        raise UserError("it compares the rollouts of a group; call score() with `group`, the group of each sample")
    members: dict[int, list[int]] = {}
    for row in rows:
        members.setdefault(int(group[row]), []).append(row)
    return list(members.values())


def _column(values: Sequence[Score]) -> Tensor:
    """Converts scores to a column [rollout] float32; NaN for None and for numbers that are not finite."""
    column = torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float32)
    return column.where(column.isfinite(), math.nan)  # 1e300 is finite in float64 only
