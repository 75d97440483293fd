"""Partial rollouts: responses that are not finished when a step has its batch go on in the next one. The engine is a
copy of the model (tests/policies/second.py); tests/engine/test_vllm.py does the same with vLLM."""

import copy
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mmrl import build
from mmrl.config import load, to_yaml
from mmrl.errors import UserError
from mmrl.policies import vlm
from mmrl.policies.synced import Synced
from mmrl.report.run import Run
from mmrl.rollouts import Rollouts
from mmrl.trainer import Trainer, check_batch
from tests.engine.parts import TINY, Fixed, final, metrics, model_folder, release, spread, timeless
from tests.policies.conftest import PROMPTS
from tests.policies.second import Copy

pytestmark = pytest.mark.usefixtures("alone")
SEGMENT, LIMIT = 3, 9
PARTIAL = [
    "rollout.engine=vllm",
    "rollout.group_size=2",
    "rollout.prompts=2",
    "rollout.partial.extra=2",
    f"rollout.partial.segment={SEGMENT}",
    f"rollout.max_response_length={LIMIT}",
    "steps=6",
    "optim.lr=2e-4",
    "engine.micro_batch=4",
    "evaluation.prompts=1",
]
SERVER = ["rollout.vllm.placement=server", "rollout.ahead=1"]


@pytest.fixture
def policy():
    made = vlm.load(model_folder(), max_response_length=7)
    made.eos = tuple(range(0, 512, 9))  # so that an untrained model ends its responses somewhere
    return made


def moved(policy):
    """The same policy with other weights."""
    other = copy.deepcopy(policy)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in other.module.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return other


def responses(drafts):
    return [draft.tokens.response.tolist() for draft in drafts]


def unfinished(policy, drafts):
    return [draft for draft in drafts if not draft.finished(policy.eos)]


def replayed(policy, drafts):
    with torch.no_grad():
        return policy.replay(policy.complete(drafts, 1), policy.module).logp


def test_the_likeliest_response_is_the_same_in_segments(policy):
    engine, greedy = Copy(policy, PROMPTS), vlm.replace(policy.sampling, temperature=0.0)
    whole, parts = (policy.draft(PROMPTS, 1, [1, 2, 3]) for _ in range(2))
    policy.eos = policy.eos[:1]
    policy.extend(engine, whole, 7, sampling=greedy)
    for count in (2, 1, 3, 3):
        assert {len(r) for r in responses(parts)} != {7}
        policy.extend(engine, parts, count, sampling=greedy)
    assert responses(parts) == responses(whole) and {len(r) for r in responses(parts)} == {7}
    assert {draft.finished(policy.eos) for draft in parts} == {True}


def test_a_segment_does_not_depend_on_when_it_is_drawn_or_beside_whom(policy):
    engine = Copy(policy, PROMPTS)
    together = policy.draft(PROMPTS, 4, range(12))
    while unfinished(policy, together):
        policy.extend(engine, together, 2)
    alone = policy.draft(PROMPTS[1:2], 4, range(4, 8))
    for draft in alone:
        while unfinished(policy, [draft]):
            policy.extend(engine, [draft], 2)
    assert responses(alone) == responses(together)[4:8]
    lengths = Counter(map(len, responses(together)))
    assert len(lengths) > 3 and max(lengths) == 7
    assert all(r[-1] in policy.eos or len(r) == 7 for r in responses(together))
    assert not any(token in policy.eos for r in responses(together) for token in r[:-1])


def test_segments_do_not_draw_the_same_noise_again(policy):
    """Of a model that finds all tokens alike the noise alone decides."""
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.zero_()
    policy.eos = (0,)
    engine, drafts = Copy(policy, PROMPTS), policy.draft(PROMPTS[1:2], 1, [5])
    for _ in range(3):
        policy.extend(engine, drafts, 2)
    tokens = responses(drafts)[0]
    assert len({tuple(tokens[i : i + 2]) for i in (0, 2, 4)}) == 3


def test_each_token_keeps_the_likelihood_of_the_weights_that_drew_it(policy):
    policy.eos = policy.eos[:1]
    later, drafts = moved(policy), policy.draft(PROMPTS, 2, range(6))
    policy.extend(Copy(policy, PROMPTS), drafts, 3)
    policy.extend(Copy(later, PROMPTS), drafts, 4)
    old, new = replayed(policy, drafts), replayed(later, drafts)
    found = policy.complete(drafts, 2).behaviour_logp
    torch.testing.assert_close(found[:, :3], old[:, :3], atol=1e-5, rtol=0)
    torch.testing.assert_close(found[:, 3:], new[:, 3:], atol=1e-5, rtol=0)
    assert (old - new).abs().amin(0).max() > 1e-2


# --- a run ---


def start(folder, *overrides, prompts=12) -> SimpleNamespace:
    """A trainer, and what it trains on: batches by step, and the weights that each step began with."""
    config = load(TINY, [f"run_dir={folder}", *PARTIAL, *overrides])
    torch.manual_seed(config.seed)
    task = Fixed(spread, image=False, size=prompts)
    policy = build.build_policy(config, task)
    policy.eos = tuple(range(0, 512, 9))
    engine = build.build_engine(config, policy)
    generator = Synced(policy, Copy(policy, task.train), task.train[:1], limit=1e-3, gather=engine.gather)
    trainer = Trainer(config, policy, task, engine, Run(Path(folder), to_yaml(config), writes=True), generator)
    kept = SimpleNamespace(trainer=trainer, batches=[], weights=[])
    collect, log = trainer.batches.collect, trainer.log

    def collected(step, metrics):
        if not kept.weights:
            kept.weights.append(copy.deepcopy(policy.module.state_dict()))
        kept.batches.append(collect(step, metrics))
        return kept.batches[-1]

    def logged(*arguments):
        log(*arguments)
        kept.weights.append(copy.deepcopy(policy.module.state_dict()))

    trainer.batches.collect, trainer.log = collected, logged
    return kept


def finish(kept):
    kept.trainer.train()
    release(kept.trainer)
    return kept


def run(folder, *overrides):
    return finish(start(folder, *overrides))


@pytest.fixture(scope="module")
def runs(tmp_path_factory, alone):
    folder = tmp_path_factory.mktemp("partial")
    kinds = {"in_time": [], "ahead": SERVER, "fresh": ["rollout.max_staleness=1"]}
    return {name: (run(folder / name, "checkpoint.every=3", *more), folder / name) for name, more in kinds.items()}


KINDS = pytest.mark.parametrize("kind", ["in_time", "ahead", "fresh"])


@KINDS
def test_every_prompt_is_trained_on_once(runs, kind):
    kept, _ = runs[kind]
    positions = [g for batch in kept.batches for g in batch.group.tolist()]
    assert [len(batch) for batch in kept.batches] == [4] * 6
    assert Counter(positions) == {position: 2 for position in range(12)}
    assert kind == "fresh" or positions != sorted(positions)  # some took longer
    prompts = kept.trainer.batches.prompts
    for batch in kept.batches:
        assert [s.prompt.id for s in batch.samples] == [prompts[g].id for g in batch.group.tolist()]


@KINDS
def test_staleness_counts_from_the_oldest_token_and_has_a_limit(runs, kind):
    kept, folder = runs[kind]
    limit = kept.trainer.config.rollout.max_staleness
    rows = [row for row in metrics(folder) if "loss" in row]
    largest = []
    for step, (batch, row) in enumerate(zip(kept.batches, rows, strict=True)):
        staleness = step - batch.version
        assert row["generation/staleness"] == pytest.approx(float(staleness.double().mean()))
        assert row["generation/staleness_max"] == staleness.max()
        largest.append(int(staleness.max()))
    assert largest[0] == 0 and max(largest) <= limit
    assert max(largest) == {"in_time": 2, "ahead": 3, "fresh": 1}[kind]


@KINDS
def test_tokens_of_several_versions_are_each_weighed_by_their_own(runs, kind):
    kept, folder = runs[kind]
    policy, of_several = kept.trainer.policy, 0
    rows = [row for row in metrics(folder) if "loss" in row]
    for step, (batch, row) in enumerate(zip(kept.batches, rows, strict=True)):
        now = max(0, step - kept.trainer.config.rollout.ahead)
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


def test_as_long_as_weights_stay_a_response_does_not_depend_on_how_many_steps_it_took(tmp_path):
    made = []
    for extra in (1, 2):
        kept = run(tmp_path / str(extra), f"rollout.partial.extra={extra}", "optim.lr=1e-30", "steps=3")
        rows = [
            (group, tokens.response.tolist())
            for batch in kept.batches
            for group, tokens in zip(batch.group.tolist(), batch.inputs, strict=True)
        ]
        made.append(rows)
    assert made[0] != made[1] and sorted(made[0]) == sorted(made[1])


def stopped(folder, *overrides):
    """Half of a run that ends with its first checkpoint, and the other half by another trainer."""
    first = start(folder, "checkpoint.every=3", *overrides)
    save = first.trainer.save

    def save_and_stop():
        save()
        raise KeyboardInterrupt

    first.trainer.save = save_and_stop
    with pytest.raises(KeyboardInterrupt):
        first.trainer.train()
    first.trainer.batches.wait()
    release(first.trainer)
    second = start(folder, "checkpoint.every=3", *overrides)
    second.trainer.resume()
    return [*first.batches, *finish(second).batches]


def test_a_resumed_run_goes_on_with_what_was_in_the_making(runs, tmp_path):
    stopped(tmp_path)
    whole, halves = final(runs["in_time"][1]), final(tmp_path)
    assert all(torch.equal(whole[name], halves[name]) for name in whole)
    assert timeless(metrics(runs["in_time"][1])) == timeless(metrics(tmp_path))


def test_what_was_made_ahead_of_a_checkpoint_is_made_again(tmp_path):
    batches = stopped(tmp_path, *SERVER)
    assert Counter(g for batch in batches for g in batch.group.tolist()) == {position: 2 for position in range(12)}
    assert all((step - batch.version).max() <= 4 for step, batch in enumerate(batches))


def test_what_dynamic_sampling_turns_down_is_made_up_for(tmp_path):
    kept = run(tmp_path, "rollout.dynamic_sampling.enabled=true", "rollout.dynamic_sampling.low=0.2", "steps=3")
    assert [len(batch) for batch in kept.batches] == [4] * 3
    counts = Counter(g for batch in kept.batches for g in batch.group.tolist())
    assert set(counts.values()) == {2}


def test_what_ranks_can_not_share_is_refused():
    config = load(TINY, ["run_dir=r", *PARTIAL, "rollout.partial.extra=3"])
    with pytest.raises(UserError, match="rollout.partial.extra=3 can not be shared by 2 ranks"):
        check_batch(config, 2)
