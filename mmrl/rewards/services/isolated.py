"""Rewards in worker processes, which a fork server starts (see `mmrl.children.fork_server`)."""

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
from mmrl.rewards.services.spans import check_values, validate_spans
from mmrl.rewards.types import Reward, Score, load_object, to_scores
from mmrl.rollouts import Sample, Spans

WORKERS = 2  # default number of processes
SCORER = "mmrl.rewards.services.isolated:scorer"


class IsolatedReward:
    """A reward of the registry, built by `name` and `options`, that runs in `workers` processes. Failed samples are
    counted in `failures`.

    Workers start at the first call and stay. If a verifier takes more than `deadline_s` seconds or ends its process,
    its sample has no score, and the next sample gets a new worker. Each worker leads its own process group, stays
    within `limits` and has no credentials in its environment. Processes that it started are ended after each answer;
    workers end with this process. images: whether a worker gets the prompt's images.

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
        self._free_workers = threading.Semaphore(workers)

    def score(self, samples: Sequence[Sample]) -> list[Score | Spans]:
        self.failures.start_batch()
        with ThreadPoolExecutor(self.workers, "isolated-reward") as pool:
            return list(pool.map(self._score, samples))

    def close(self) -> None:
        """Ends all workers and their fork server; a later call starts others."""
        self._fork_server.close()

    def _score(self, sample: Sample) -> Score | Spans:
        """Scores a sample. A failure is recorded and becomes its score."""
        if (failure := self.failures.skipped()) is not None:
            return self.failures.record(sample, failure)
        if self.images:
            stripped = sample
        else:  # without images, and without the prompt before an environment began the conversation
            stripped = replace(sample, prompt=replace(sample.prompt, images=(), before_start=None))
        with self._free_workers:
            answer = self._call_worker(stripped)
        if isinstance(answer, Failure):
            return self.failures.record(sample, answer)
        return check_values([answer], [sample], self.failures)[0]

    def _call_worker(self, sample: Sample) -> Score | Spans | Failure:
        """Scores a sample in a worker. Returns a Failure if the reward raises or takes too long, or if the worker
        ends."""
        try:
            worker = self._fork_server.acquire()
            answer = worker.call(sample, self.deadline_s)
        except TimeoutError:
            return self.failures.record_timeout(self.deadline_s)
        except ConnectionError as error:
            return Failure("crash", str(error))
        worker.release()
        return _parse_answer(answer)


def _parse_answer(answer: dict[str, Any]) -> Score | Spans | Failure:
    """Converts a worker's answer to a score, spans or a failure. Raises UserError for a value that is not a number, and
    again for a UserError that the reward raised in the worker."""
    if "refused" in answer:
        raise UserError(str(answer["refused"]))
    if "raised" in answer:
        return Failure("error", str(answer["raised"]))
    if "spans" in answer:
        return Spans(answer["spans"], answer.get("total"), answer.get("of", ""))
    return to_scores([answer.get("value")], 1)[0]


def scorer(name: str, options: dict[str, Any]) -> ForkedService:
    """Builds a reward of the registry as a service of a worker, which scores one sample per request. Raises ValueError
    if it cannot be built."""
    try:
        reward: Reward = load_object("mmrl.rewards.registry:build")(name, options, isolated=False)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"reward {name!r} cannot be built: {describe_error(error)}") from error

    def score(sample: Sample) -> dict[str, Any]:
        answer = _score_to_answer(reward, sample)
        end_descendants()  # processes that the reward started must not outlive the sample
        return answer

    return score


def _score_to_answer(reward: Reward, sample: Sample) -> dict[str, Any]:
    """Scores a sample. Returns the value, its spans or the error, as plain Python values."""
    try:
        value = reward(sample)
        if isinstance(value, Spans):
            spans = validate_spans(value)
            return {"spans": [list(span) for span in spans.values], "total": spans.total, "of": spans.unit}
        return {"value": to_scores([value], 1)[0]}
    except UserError as error:
        return {"refused": str(error)}
    except BaseException as error:  # any fault of a verifier costs this sample only
        return {"raised": describe_error(error)}
