"""Rewards in separate worker processes of a fork server (see `mmrl.children.fork_server`)."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal

from mmrl.children.fork_server import ForkServer
from mmrl.children.forked import ForkedService
from mmrl.children.limits import Limits, end_descendants
from mmrl.errors import UserError, describe_error
from mmrl.rewards.services.failures import Failure, Failures
from mmrl.rewards.services.spans import checked, plain
from mmrl.rewards.types import Reward, Score, load_object, numbers
from mmrl.rollouts import Sample, Spans

WORKERS = 2
SCORER = "mmrl.rewards.services.isolated:scorer"


class IsolatedReward:
    """The reward `name(options)` of the registry, evaluated by `workers` processes; where that fails the sample is
    counted in `failures`.

    Workers start at the first call and stay. One sample may take `deadline_s` seconds: a verifier that hangs, or ends
    its process, costs its sample, and the next one gets a new worker. Each worker leads its own process group, uses no
    more than `limits` allow and has no credentials in its environment; processes that it started are ended after each
    answer, and all end with this process. A worker gets the prompt without its images unless `images=True`.

    score() raises UserError if the reward cannot be built in the worker, if the worker does not start, and for a value
    that is not a number.
    """

    scope: Literal["sample"] = "sample"

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        deadline_s: float,
        *,
        failures: Failures | None = None,
        workers: int = WORKERS,
        limits: Limits | None = None,
        images: bool = False,
    ):
        self.name, self.deadline_s, self.images = name, deadline_s, images
        self.failures, self.workers = failures or Failures(name), workers
        self.limits = limits or Limits()
        self._fork_server = ForkServer(SCORER, (name, dict(options)), self.limits)
        self._room = threading.Semaphore(workers)

    def score(self, samples: Sequence[Sample]) -> list[Score | Spans]:
        self.failures.begin()
        with ThreadPoolExecutor(self.workers, "isolated-reward") as pool:
            return list(pool.map(self._score, samples))

    def close(self) -> None:
        """Ends all workers and their fork server; a later call starts others."""
        self._fork_server.close()

    def _score(self, sample: Sample) -> Score | Spans:
        if (skipped := self.failures.skips()) is not None:
            return self.failures.lost(sample, skipped)
        stripped = (
            sample if self.images else replace(sample, prompt=replace(sample.prompt, images=(), before_start=None))
        )
        with self._room:
            answer = self._answer(stripped)
        if isinstance(answer, Failure):
            return self.failures.lost(sample, answer)
        return checked([answer], [sample], self.failures)[0]

    def _answer(self, sample: Sample) -> Score | Spans | Failure:
        try:
            worker = self._fork_server.acquire()
            answer = worker.call(sample, self.deadline_s)
        except TimeoutError:
            return self.failures.waited(self.deadline_s)
        except ConnectionError as error:
            return Failure("crash", str(error))
        worker.release()
        return _read(answer)


def _read(answer: dict[str, Any]) -> Score | Spans | Failure:
    """Reads a worker's answer. Raises UserError for a value that is not a number, and where the reward raised one."""
    if "refused" in answer:
        raise UserError(str(answer["refused"]))
    if "raised" in answer:
        return Failure("error", str(answer["raised"]))
    if "spans" in answer:
        return Spans(answer["spans"], answer.get("total"), answer.get("of", ""))
    return numbers([answer.get("value")], 1)[0]


def scorer(name: str, options: dict[str, Any]) -> ForkedService:
    """Builds the reward `name(options)` of the registry as a service for samples. Raises ValueError where it can not be
    built."""
    try:
        reward: Reward = load_object("mmrl.rewards.registry:build")(name, options, isolated=False)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"reward {name!r}: {describe_error(error)}") from error

    def score(sample: Sample) -> dict[str, Any]:
        answer = _scored(reward, sample)
        end_descendants()  # what the reward started serves this sample only
        return answer

    return score


def _scored(reward: Reward, sample: Sample) -> dict[str, Any]:
    """Scores a sample and returns the value, its spans, or the error, as plain values."""
    try:
        value = reward(sample)
        if isinstance(value, Spans):
            spans = plain(value)
            return {"spans": [list(span) for span in spans.values], "total": spans.total, "of": spans.unit}
        return {"value": numbers([value], 1)[0]}
    except UserError as error:
        return {"refused": str(error)}
    except BaseException as error:  # any fault of a verifier costs this sample only
        return {"raised": describe_error(error)}
