"""Where sources, samplers and bookkeeping of a step meet: what is counted, kept and restored."""

from dataclasses import replace

import pytest
import torch
from pydantic import PrivateAttr

from mmrl.collection.extra_sources import ExtraSource, failed_groups, masked_copies, pad_to_all_ranks
from mmrl.rollouts import DEMONSTRATION, EXTRA, FRESH, REPLAYED
from mmrl.training.metrics import Metrics
from tests.joints.parts import Table

HERE = "tests.joints.test_meeting_points"
LOGP = [[-1.0], [-1.0], [-1.0], [-1.0]]


class Ring(ExtraSource):
    """Makes nothing, and keeps what each rank saw."""

    type: str = f"{HERE}:Ring"
    _seen: int = PrivateAttr(0)

    @property
    def rollouts(self):
        return 0

    def start(self, context):
        self._context = context

    def make(self, fresh):
        return pad_to_all_ranks([], fresh, self._context)

    def observe(self, batch):
        self._seen += len(batch.rollouts)

    def rank_state(self):
        return {"seen": self._seen}

    def load_rank(self, state):
        self._seen = state["seen"]


def collector(given):
    table = Table(LOGP, group=[0, 0, 1, 1], rewards=[1.0, 0.0, 1.0, 0.0])
    made = given(table, "rollout={prompts: 2, group_size: 2}", f"rollout.extras=[{{type: '{HERE}:Ring'}}]")
    return made, table


def test_a_rank_s_own_state_is_restored(given):
    made, _ = collector(given)
    made.prepare()
    shared, of_rank = made.trainer.collector.state()
    made.trainer.collector.load(shared, {**of_rank, "extras": [{"seen": 7}]})
    assert made.trainer.collector.state()[1]["extras"] == [{"seen": 7}]


def test_sources_observe_scored_steps_alone(given):
    made, table = collector(given)
    made.prepare()
    rollouts = table.rollouts()
    for rewards, seen in ((None, 0), (rollouts.rewards, 4)):
        batch = type("Step", (), {"rollouts": replace(rollouts, rewards=rewards)})()
        made.trainer.collector.load(made.trainer.collector.state()[0], {"rounds": {}, "extras": [{"seen": 0}]})
        made.trainer.collector.observe(batch)
        assert made.trainer.collector.state()[1]["extras"] == [{"seen": seen}]


def test_the_age_of_a_step_is_that_of_its_fresh_rollouts(given):
    """Fresh ones of steps 2 and 4 before step 5: 3 and 1; what joined them has none."""
    made, table = collector(given)
    rollouts = table.rollouts()
    rollouts.version = torch.tensor([2, 4, -1, -1])
    rollouts.origin = torch.tensor([FRESH, FRESH, EXTRA, DEMONSTRATION])
    metrics = Metrics(made.trainer.engine)
    made.trainer.collector._log_staleness(rollouts, 5, metrics)
    assert metrics.result()["generation/staleness"] == 2.0


def test_a_group_that_nobody_could_judge_has_not_failed():
    rollouts = Table(LOGP, group=[0, 0, 1, 1]).rollouts()
    rollouts.accuracy = torch.tensor([torch.nan, torch.nan, 0.0, torch.nan])
    assert failed_groups(rollouts, 1.0) == ([1], [1])


@pytest.mark.parametrize("count", [0, 3])
def test_blanks_are_not_fresh(count):
    blank = masked_copies(Table(LOGP).rollouts(), count)
    assert blank.origin.tolist() == [REPLAYED] * count and not blank.mask.any() and blank.rewards.isnan().all()
    assert len(set(blank.group.tolist())) == count and (blank.group < 0).all()
