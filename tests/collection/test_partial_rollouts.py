"""Partial rollouts: responses that are not finished when a step has its batch go on in the next one. The engine is a
copy of the model (tests/policies/second.py); tests/whole_runs/test_vllm.py does the same with vLLM."""

import copy
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mmrl import build
from mmrl.collection.checks import check_batch
from mmrl.collection.collector import Collector
from mmrl.collection.partial_rollouts import Pool
from mmrl.config import load, to_yaml
from mmrl.errors import UserError
from mmrl.policies.vlm.synced import Synced
from mmrl.prompts.sampler import Permutation
from mmrl.report.run import Run
from mmrl.rollouts import Rollouts
from mmrl.trainer import Trainer
from tests.policies.conftest import PROMPTS, loaded
from tests.policies.second import Copy, moved
from tests.whole_runs.parts import TINY, Fixed, final, metrics, model_folder, release, spread, timeless

pytestmark = pytest.mark.usefixtures("alone")
SEGMENT, LIMIT = 2, 8
PARTIAL = [
    "rollout.group_size=2",
    "rollout.prompts=3",
    "rollout.generator.type=vllm_colocated",
    "rollout.generator.partial.oversample=3",
    f"rollout.generator.partial.segment={SEGMENT}",
    f"rollout.max_response_length={LIMIT}",
    "steps=6",
    "optim.lr=2e-4",
    "engine.micro_batch=6",
    "evaluation.prompts=1",
]
SERVER = [f"rollout.generator={{type: vllm_server, async_steps: 1, partial: {{oversample: 3, segment: {SEGMENT}}}}}"]


@pytest.fixture
def policy():
    made = loaded(model_folder(), max_response_length=7)
    made.tokens.eos = tuple(range(0, 340, 9))  # so that an untrained model ends its responses somewhere
    return made


def responses(drafts):
    return [draft.tokens.response.tolist() for draft in drafts]


def unfinished(policy, drafts):
    return [draft for draft in drafts if not draft.finished(policy.eos)]


def replayed(policy, drafts):
    with torch.no_grad():
        return policy.replay(policy.complete(drafts, 1), policy.module).logp


def test_the_likeliest_response_is_the_same_in_segments(policy):
    engine = Copy(policy, PROMPTS)
    whole, parts = (policy.draft(PROMPTS, 1, [1, 2, 3], temperature=0.0) for _ in range(2))
    policy.tokens.eos = policy.eos[:1]
    policy.extend(engine, whole, 7)
    for count in (2, 1, 3, 3):
        assert {len(r) for r in responses(parts)} != {7}
        policy.extend(engine, parts, count)
    assert responses(parts) == responses(whole) and {len(r) for r in responses(parts)} == {7}
    assert {draft.finished(policy.eos) for draft in parts} == {True}


def test_a_segment_does_not_depend_on_when_it_is_drawn_or_beside_whom(policy):
    engine = Copy(policy, PROMPTS)
    together = policy.draft(PROMPTS[:2], 4, range(8))
    while unfinished(policy, together):
        policy.extend(engine, together, 2)
    alone = policy.draft(PROMPTS[1:2], 2, range(4, 6))
    for draft in alone:
        while unfinished(policy, [draft]):
            policy.extend(engine, [draft], 2)
    assert responses(alone) == responses(together)[4:6]
    lengths = Counter(map(len, responses(together)))
    assert len(lengths) >= 3 and max(lengths) == 7
    assert all(r[-1] in policy.eos or len(r) == 7 for r in responses(together))
    assert not any(token in policy.eos for r in responses(together) for token in r[:-1])


def test_segments_do_not_draw_the_same_noise_again(policy):
    """Of a model that finds all tokens alike the noise alone decides."""
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.zero_()
    policy.tokens.eos = (0,)
    engine, drafts = Copy(policy, PROMPTS), policy.draft(PROMPTS[1:2], 1, [5])
    for _ in range(3):
        policy.extend(engine, drafts, 2)
    tokens = responses(drafts)[0]
    assert len({tuple(tokens[i : i + 2]) for i in (0, 2, 4)}) == 3


def test_each_token_keeps_the_likelihood_of_the_weights_that_drew_it(policy):
    policy.tokens.eos = policy.eos[:1]
    later, drafts = moved(policy), policy.draft(PROMPTS, 2, range(6))
    policy.extend(Copy(policy, PROMPTS), drafts, 3)
    policy.extend(Copy(later, PROMPTS), drafts, 4)
    old, new = replayed(policy, drafts), replayed(later, drafts)
    found = policy.complete(drafts, 2).behaviour_logp
    torch.testing.assert_close(found[:, :3], old[:, :3], atol=1e-5, rtol=0)
    torch.testing.assert_close(found[:, 3:], new[:, 3:], atol=1e-5, rtol=0)
    assert (old - new).abs().amin(0).max() > 1e-2


# --- a run ---


def start(folder, *overrides, prompts=18) -> SimpleNamespace:
    """A trainer, and what it trains on: batches by step, and the weights that each step began with."""
    config = load(TINY, [f"run_dir={folder}", *PARTIAL, *overrides])
    torch.manual_seed(config.seed)
    task = Fixed(spread, image=False, size=prompts)
    policy = build.build_policy(config, task)
    policy.tokens.eos = tuple(range(0, 340, 5))
    engine = build.build_engine(config, policy)
    generator = Synced(policy, Copy(policy, task.train), task.train[:1], limit=1e-3, gather=engine.gather)
    trainer = Trainer(config, policy, task, engine, Run(Path(folder), to_yaml(config), writes=True), generator)
    kept = SimpleNamespace(trainer=trainer, batches=[], weights=[])
    collect, log = trainer.collector.collect, trainer.log

    def collected(step, metrics):
        if not kept.weights:
            kept.weights.append(copy.deepcopy(policy.module.state_dict()))
        kept.batches.append(collect(step, metrics))
        return kept.batches[-1]

    def logged(*arguments):
        log(*arguments)
        kept.weights.append(copy.deepcopy(policy.module.state_dict()))

    trainer.collector.collect, trainer.log = collected, logged
    return kept


def finish(kept):
    kept.trainer.train()
    release(kept.trainer)
    return kept


def stop_after_save(kept):
    """Runs until the first checkpoint is written."""
    save = kept.trainer.save

    def save_and_stop():
        save()
        raise KeyboardInterrupt

    kept.trainer.save = save_and_stop
    with pytest.raises(KeyboardInterrupt):
        kept.trainer.train()
    kept.trainer.collector.pause_prefetch()
    release(kept.trainer)
    return kept


def resumed(folder, *overrides):
    kept = start(folder, *overrides)
    kept.trainer.resume()
    return finish(kept)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, alone):
    """A whole run, and one ahead of time that goes on after three steps in a new trainer."""
    folder = tmp_path_factory.mktemp("partial")
    whole, options = finish(start(folder / "in_time", "checkpoint.every=3")), [*SERVER, "checkpoint.every=3"]
    first, second = stop_after_save(start(folder / "ahead", *options)), resumed(folder / "ahead", *options)
    halves = SimpleNamespace(
        trainer=second.trainer, batches=first.batches + second.batches, weights=first.weights + second.weights[1:]
    )
    return {"in_time": (whole, folder / "in_time"), "ahead": (halves, folder / "ahead")}


KINDS = pytest.mark.parametrize("kind", ["in_time", "ahead"])


@KINDS
def test_every_prompt_is_trained_on_once(runs, kind):
    """`ahead`: although what was in the making at the checkpoint was lost with the process."""
    kept, _ = runs[kind]
    positions = [g for batch in kept.batches for g in batch.group.tolist()]
    assert [len(batch) for batch in kept.batches] == [6] * 6
    assert Counter(positions) == {position: 2 for position in range(18)}
    assert positions != sorted(positions)  # some took longer
    order = Permutation()
    order.start(18, 0)
    prompts = order.draw(18)
    for batch in kept.batches:
        assert batch.prompt.tolist() == [prompts[g] for g in batch.group.tolist()]
        assert [s.prompt.id for s in batch.samples] == [str(prompts[g]) for g in batch.group.tolist()]


@KINDS
def test_staleness_counts_from_the_oldest_token(runs, kind):
    kept, folder = runs[kind]
    rows = [row for row in metrics(folder) if "loss" in row]
    largest = []
    for step, (batch, row) in enumerate(zip(kept.batches, rows, strict=True)):
        staleness = step - batch.version
        assert row["generation/staleness"] == pytest.approx(float(staleness.double().mean()))
        assert row["generation/staleness_max"] == staleness.max()
        largest.append(int(staleness.max()))
    assert largest[0] == 0 and max(largest) > kept.trainer.config.generator.steps_ahead


@KINDS
def test_tokens_of_several_versions_are_each_weighed_by_their_own(runs, kind):
    kept, folder = runs[kind]
    policy, of_several = kept.trainer.policy, 0
    rows = [row for row in metrics(folder) if "loss" in row]
    for step, (batch, row) in enumerate(zip(kept.batches, rows, strict=True)):
        now = (
            step if step in (0, 3) else step - kept.trainer.config.generator.steps_ahead
        )  # nothing is ahead at a beginning
        logp = torch.stack([under(policy, weights, batch) for weights in kept.weights[: step + 1]])
        gap = (logp[step] - batch.behaviour_logp).abs()[batch.mask]
        assert row["correction/logp_gap"] == pytest.approx(float(gap.mean()), abs=2e-5)
        for i, version in enumerate(batch.version.tolist()):
            close = (logp[:, i] - batch.behaviour_logp[i]).abs() < 2e-5  # [version, token]
            segments = close[:, : int(batch.mask[i].sum())].split(SEGMENT, 1)
            drawn = [part.all(1).nonzero().flatten().tolist() for part in segments]
            assert [len(versions) for versions in drawn] == [1] * len(segments)
            order = [versions[0] for versions in drawn]
            assert order == sorted(order) and order[0] == version and order[-1] <= now
            of_several += len(set(order)) > 1
    assert of_several >= 4


def under(policy, weights, batch: Rollouts):
    other = copy.deepcopy(policy)
    other.module.load_state_dict(weights)
    with torch.no_grad():
        return other.replay(batch, other.module).logp


def test_a_resumed_run_goes_on_with_what_was_in_the_making(runs, tmp_path):
    folder = runs["in_time"][1]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints/step-000006")
    shutil.rmtree(tmp_path / "final")
    resumed(tmp_path, "checkpoint.every=3")
    whole, halves = final(folder), final(tmp_path)
    assert all(torch.equal(whole[name], halves[name]) for name in whole)
    assert timeless(metrics(folder)) == timeless(metrics(tmp_path))


# --- the pool by itself ---


def make_pool(policy, prompts, **partial):
    overrides = [f"rollout.generator.partial.{name}={value}" for name, value in partial.items()]
    config = load(TINY, ["run_dir=r", *PARTIAL, *overrides])
    return Pool(policy, prompts, config.seed, config.rollout.group_size, config.generator.partial)


def test_as_long_as_weights_stay_a_response_does_not_depend_on_how_many_steps_it_took(policy):
    policy.engine = Copy(policy, PROMPTS)
    found: list = []
    versions: list = []
    for coming in ([[0, 1, 2], [3, 4], [5]], [[0, 1, 2, 3], [4, 5], []]):
        pool, rows = make_pool(policy, PROMPTS * 2), []
        for step, positions in enumerate(coming):
            pool.add(positions, positions)
            batch = pool.take(2, step, step)
            assert torch.equal(batch.prompt, batch.group)
            rows += zip(batch.group.tolist(), [t.response.tolist() for t in batch.inputs], strict=True)
            versions.append(batch.version.tolist())
        assert pool.groups == []
        found.append(sorted(rows))
    assert found[0] == found[1] and versions[:3] != versions[3:]


@dataclass
class Planned:
    """A draft of known length."""

    position: int
    length: int
    now: int = 0

    def finished(self, eos):
        return self.now >= self.length

    def state(self):
        return {"now": self.now}


class Lengths:
    """Drafts of many lengths, a few of them very long."""

    engine, eos = None, ()

    def __init__(self):
        self.random = np.random.default_rng(0)

    def draft(self, prompts, group_size, seeds):
        return [Planned(p, int(self.random.pareto(0.7)) + 1) for p in prompts for _ in range(group_size)]

    def extend(self, engine, drafts, count):
        for draft in drafts:
            draft.now += count

    def complete(self, drafts, group_size):
        assert all(draft.finished(()) for draft in drafts)
        return SimpleNamespace(samples=drafts, origin=None)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("limit", [2, 3, 8])
def test_nothing_gets_older_than_the_limit(limit, ahead):
    pool = make_pool(Lengths(), range(1000), max_staleness=limit)
    trained, oldest, coming = Counter(), 0, 0
    for step in range(200):
        more = 6 - len(pool.groups)
        pool.add(range(coming, coming + more), range(coming, coming + more))
        coming += more
        batch = pool.take(3, step, max(0, step - ahead))
        trained.update(batch.group.tolist())
        oldest = max(oldest, int((step - batch.version).max()))
    assert oldest == limit
    assert trained == {p: 2 for p in range(coming) if p not in {group.position for group in pool.groups}}


def test_ranks_share_the_prompts_and_leave_none_in_the_making_at_the_end():
    config = load(
        TINY, ["run_dir=r", *PARTIAL, "rollout.prompts=4", "rollout.generator.partial.oversample=2", "steps=50"]
    )
    task = SimpleNamespace(
        train=range(64),
        score=lambda samples, group: torch.zeros(len(group), 1),
        accuracy=lambda samples: None,
        reward_weights=(1.0,),
        reward_names=("zero",),
    )
    ranks = [Collector(config, Lengths(), task, SimpleNamespace(rank=rank, world=2, max=int), None) for rank in (0, 1)]
    trained: Counter = Counter()
    for step in range(50):
        for collector in ranks:
            batch = collector.rounds.make(step, step)
            assert len(batch.group) == 4 and int(batch.group.max()) < collector.draws.drawn
            trained.update(batch.group.tolist())
        assert ranks[0].draws.drawn == ranks[1].draws.drawn
        # the prompts of the steps so far and the oversample, over both ranks, but no more than the run needs
        assert ranks[0].draws.drawn == min(4 * (step + 1) + 2, 200)
    assert trained == {position: 2 for position in range(200)}


def test_what_a_pool_has_in_the_making_is_not_given_up():
    """It has begun, and grows the same drafts as what would be made in its place."""
    config = load(TINY, ["run_dir=r", *PARTIAL, *SERVER, "steps=50"])
    task = SimpleNamespace(
        train=range(64),
        score=lambda samples, group: torch.zeros(len(group), 1),
        accuracy=lambda samples: torch.zeros(len(samples)),
        reward_weights=(1.0,),
        reward_names=("zero",),
    )
    ranks, generator = (
        SimpleNamespace(rank=0, world=1, max=int, gather=lambda rows: [rows]),
        SimpleNamespace(sync_weights=dict),
    )
    collector = Collector(config, Lengths(), task, ranks, generator)
    collector.next(0, SimpleNamespace(set=lambda values: None, add=lambda *words, **options: None))
    (pending,) = collector.pending.batches
    collector.cancel()
    assert list(collector.pending.batches) == [pending] and len(pending.rollouts.result(10).group) == 6


def test_what_ranks_can_not_share_is_refused():
    config = load(TINY, ["run_dir=r", *PARTIAL, "rollout.prompts=4"])
    with pytest.raises(UserError, match="rollout.generator.partial.oversample=3 cannot be divided over 2 ranks"):
        check_batch(config, 2)
