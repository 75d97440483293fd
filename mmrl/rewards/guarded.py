"""Guards rewards that run in this process: a fault of a reward costs its samples, never the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

from mmrl.errors import UserError, describe_error
from mmrl.rewards.services.failures import Failure, Failures
from mmrl.rewards.services.spans import check_values
from mmrl.rewards.types import BatchReward, Reward, Score
from mmrl.rollouts import Sample, Spans
from mmrl.runtime.timed_calls import TimedCalls, TimeLimit

Argument = TypeVar("Argument")
Value = TypeVar("Value")


class GuardedReward:
    """A batched reward around any reward. Samples on which it raises, or that take longer than `deadline_s` seconds,
    are counted in `failures`.

    If a batch raises, its halves are tried, and so on, so that only samples that raise by themselves are lost. A group,
    and a batch that takes too long, is lost as a whole. With a deadline the reward runs in a thread, which is abandoned
    if it does not end; see `TimedCalls`. Only `IsolatedReward` survives a crash and enforces memory limits.

    Raises UserError if the reward raises it, for a wrong number of values, for a value that is not a number, and if too
    many calls still run after their deadline.
    """

    def __init__(self, reward: Reward | BatchReward, failures: Failures, deadline_s: float | None) -> None:
        self.reward, self.failures, self.deadline_s = reward, failures, deadline_s
        self.scope: Literal["sample", "group", "batch"] = reward.scope if isinstance(reward, BatchReward) else "sample"
        self._calls = TimedCalls(f"reward {failures.name!r}", "isolated: true")

    def score(self, samples: Sequence[Sample]) -> list[Score | Spans]:
        if isinstance(self.reward, BatchReward):
            return self._score_batch(self.reward.score, list(samples))
        return [self._score_sample(self.reward, sample) for sample in samples]

    def _score_sample(self, reward: Reward, sample: Sample) -> Score | Spans:
        """Scores one sample. A failure is recorded and becomes its score."""
        value = self._attempt(reward, sample)
        if isinstance(value, Failure):
            return self.failures.record(sample, value)
        return check_values([value], [sample], self.failures)[0]

    def _score_batch(self, score: Callable[[list[Sample]], Any], samples: list[Sample]) -> list[Score | Spans]:
        """Scores samples. If the call fails, it halves them until a failing sample is alone, which is recorded."""
        values = self._attempt(lambda part: _as_list(score(part)), samples)
        if not isinstance(values, Failure):
            return check_values(values, samples, self.failures)
        # Halves would end at the deadline again, and a reward of groups or batches compares the samples of a call.
        if values.cause in ("deadline", "not tried") or self.scope != "sample" or len(samples) == 1:
            return [self.failures.record(sample, values) for sample in samples]
        half = len(samples) // 2
        return [*self._score_batch(score, samples[:half]), *self._score_batch(score, samples[half:])]

    def _attempt(self, function: Callable[[Argument], Value], argument: Argument) -> Value | Failure:
        """Returns function(argument); a Failure if that raises or takes too long. If too many calls of this batch have
        timed out, returns a Failure without a call."""
        if (failure := self.failures.skipped()) is not None:
            return failure
        try:
            return function(argument) if self.deadline_s is None else self._calls(function, argument, self.deadline_s)
        except UserError:
            raise
        except TimeLimit:
            assert self.deadline_s is not None
            return self.failures.record_timeout(self.deadline_s)
        except (Exception, SystemExit) as error:
            return Failure("error", describe_error(error))


def _as_list(values: Any) -> Any:
    """Converts an iterable to a list, so that a generator that raises does so here."""
    return list(values) if isinstance(values, Iterable) else values
