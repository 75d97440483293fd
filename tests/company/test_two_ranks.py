"""What each part of a method makes of a step is the same on two ranks as on one: the ranks are threads of this process,
each with a policy of its own, and their collectives are handed over in memory."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mmrl import build
from mmrl.errors import UserError
from mmrl.terms.term import Shaper
from mmrl.trainer import Trainer
from mmrl.training.metrics import Metrics
from tests.company import test_declared
from tests.company.test_composition import CHANCE
from tests.company.test_declared import ENTRIES, Alone, Entry, drawn, move, settings, trained
from tests.policies.test_turns import favour_end

HERE = "tests.company.test_two_ranks"
DRAWN = CHANCE  # who draw by the place in a rank's batch
STEPS = 2


class Meeting:
    """Where two threads hand over what a collective carries."""

    def __init__(self):
        self.barrier, self.held = threading.Barrier(2, timeout=100), [None, None]

    def trade(self, rank, value):
        self.held[rank] = copy.deepcopy(value)
        self.barrier.wait()
        both = list(self.held)
        self.barrier.wait()
        return both


class OfTwo(Alone):
    """One of two ranks."""

    rank, world = 0, 2

    def __init__(self, module, meeting, rank):
        super().__init__(module)
        self.meeting, self.rank = meeting, rank

    def sum(self, value):
        return sum(self.meeting.trade(self.rank, value.detach()))

    def max(self, value):
        return max(self.meeting.trade(self.rank, int(value)))

    def gather(self, value):
        return self.meeting.trade(self.rank, value)

    def exchange(self, values, instead):
        return [values_of[self.rank] for values_of in self.meeting.trade(self.rank, values)]

    def barrier(self):
        self.meeting.trade(self.rank, None)


class ByRank(Shaper):
    """Compares with the rollouts of its own rank alone."""

    def shape(self, advantages, batch):
        return advantages - batch.rollouts.rewards.nan_to_num(0.0).mean()


def trainer_of(config, engine_of, brief):
    torch.manual_seed(0)
    task = build.build_task(config)
    policy = build.build_policy(config, task)
    if brief:
        favour_end(policy, 3.0)
    start = [p.detach().clone() for p in trained(policy)]
    run = SimpleNamespace(folder=Path(config.run_dir), line=lambda text: None, writes=False)
    trainer = Trainer(config, policy, task, engine_of(policy.module), run)
    move(policy, start, 0.02)
    return trainer


def steps(trainer):
    """By step: rows of (group, prompt, response, mask, advantages) of this rank, and the gradient of its losses."""
    found = []
    for step in range(STEPS):
        trainer.step = step
        metrics = Metrics(trainer.engine)
        rollouts = trainer.collector.next(step, metrics)
        ((minibatch,), batch) = trainer.preparation.minibatches(
            rollouts, step, torch.Generator().manual_seed(step), metrics
        )
        trainer.collector.observe(batch)
        kept = batch.rollouts
        values = zip(kept.group.tolist(), kept.samples, kept.mask.tolist(), kept.advantages.tolist(), strict=True)
        rows = [
            (group, s.prompt.id, s.response, [a for a, m in zip(advantages, mask, strict=True) if m])
            for group, s, mask, advantages in values
            if any(mask)
        ]
        parts = [trainer.algorithm.denominators(micro) for micro in minibatch]
        totals = {name: trainer.engine.sum(torch.stack([part[name] for part in parts]).sum()) for name in parts[0]}
        losses = [sum(trainer.losses(micro, totals)[0].values()) for micro in minibatch]
        gradient = torch.autograd.grad(sum(losses), trained(trainer.policy), allow_unused=True)
        flat = torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten()
                          for g, p in zip(gradient, trained(trainer.policy), strict=True)])  # fmt: skip
        found.append((rows, flat))
    return found


def on_two(config, brief):
    meeting = Meeting()
    trainers = [trainer_of(config, lambda module, r=rank: OfTwo(module, meeting, r), brief) for rank in range(2)]

    def run(trainer):
        try:
            return steps(trainer)
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, trainers))


def judged(entry):
    """refused, equal, or what is not."""
    brief = entry.name in test_declared.BRIEF
    try:
        config = settings(entry, (), without=False)
        one = steps(trainer_of(config, Alone, brief))
        ranks = on_two(config, brief)
    except UserError as error:
        return "refused" if "\n" not in str(error) else f"refused in several lines: {error}"
    for step, (rows, gradient) in enumerate(one):
        both = sorted([row for rank in ranks for row in rank[step][0]], key=repr_of)
        alone = sorted(rows, key=repr_of)
        if [row[:3] for row in both] != [row[:3] for row in alone]:
            return f"other rollouts in step {step}"
        for got, want in zip(both, alone, strict=True):
            if not torch.allclose(torch.tensor(got[3]), torch.tensor(want[3]), atol=1e-5, rtol=1e-4):
                return f"other advantages in step {step}"
        together = sum(rank[step][1] for rank in ranks)
        if not torch.allclose(together, gradient, atol=1e-6, rtol=1e-3):
            return f"another gradient in step {step}"
    return "equal"


def repr_of(row):
    return row[0], row[1], row[2], [round(value, 3) for value in row[3]]


WHOLE = [(entry, ()) for entry in ENTRIES if entry.name not in DRAWN]


@pytest.mark.parametrize(("entry", "factors"), test_declared.marked(drawn(1, WHOLE)))
def test_a_drawn_part_is_the_same_on_two_ranks(entry, factors):
    assert judged(entry) in ("equal", "refused")


@pytest.mark.slow
@pytest.mark.parametrize(("entry", "factors"), test_declared.marked(WHOLE))
def test_a_part_is_the_same_on_two_ranks(entry, factors):
    assert judged(entry) in ("equal", "refused")


def test_a_part_that_sees_its_rank_alone_is_found_out():
    assert judged(Entry(Shaper, f"{HERE}:ByRank")) == "other advantages in step 0"
