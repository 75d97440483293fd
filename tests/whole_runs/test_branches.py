"""Trees of text on the real model and engine: what branches share, their likelihoods, and that a seed repeats them.
tests/whole_runs/test_vllm.py does the same with vLLM."""

from pathlib import Path

import pytest
import torch

from mmrl import build
from mmrl.config import load, to_yaml
from mmrl.generation.correction import apply_correction
from mmrl.policies.vlm.synced import Synced
from mmrl.report.run import Run
from mmrl.trainer import Trainer
from mmrl.training.metrics import Metrics
from tests.policies.second import Copy
from tests.whole_runs.parts import TINY, Fixed, make, metrics, release, spread, train

pytestmark = pytest.mark.usefixtures("alone")
TREES = [
    "rollout.extras=[{type: branches, count: 3, rounds: 2}]",
    "rollout.prompts=2",
    "rollout.group_size=2",
    "rollout.max_response_length=9",
    "rollout.temperature=0.8",
    "algorithm.scale=none",
    "algorithm.minibatches=2",
    "engine.micro_batch=4",
]


def full_forward(policy, rollouts):
    """The log-probability of each token, each rollout read whole, alone and without a cache, [rollout, decision]."""
    found = torch.zeros(rollouts.mask.shape)
    core = policy.runner.core
    for number, row in enumerate(rollouts.inputs):
        with torch.no_grad():
            logits = core(**policy.runner.collate([row], padding_side="right"), use_cache=False).logits[0].float()
        logits[:, list(policy.tokens.suppressed)] = -torch.inf
        logp = (logits / row.temperature).log_softmax(-1)
        for t, token in enumerate(row.response.tolist()):
            found[number, t] = logp[len(row.prompt) + t - 1, token]
    return found.where(rollouts.mask, 0.0)


def shared(rollouts, one, other):
    """How many tokens two responses share by their nodes."""
    same = (rollouts.nodes[one] == rollouts.nodes[other]) & rollouts.mask[one] & rollouts.mask[other]
    return int(same.sum())


def check_tree(rollouts):
    """Nodes are shared from the first token on, tokens are equal there, and branches differ from all others behind it.
    Returns how many of the tree's tokens were drawn once for several."""
    spared = 0
    assert rollouts.origin.tolist() == [0] * 4 + [3] * 6 and rollouts.group.bincount().tolist() == [5, 5]
    for branch in range(4, 10):
        others = [row for row in range(branch) if rollouts.group[row] == rollouts.group[branch]]
        counts = [shared(rollouts, branch, other) for other in others]
        for other, count in zip(others, counts, strict=True):
            mine, theirs = rollouts.inputs[branch].response, rollouts.inputs[other].response
            assert torch.equal(mine[:count], theirs[:count])
        assert 1 <= max(counts) < len(rollouts.inputs[branch].response)
        spared += max(counts)
    return spared


def test_branches_are_as_likely_as_in_a_full_forward_and_their_ratio_is_one(tmp_path):
    made = make(tmp_path / "run", *TREES)
    rollouts = made.collector.next(0, Metrics(made.engine))
    assert check_tree(rollouts) >= 6
    expected = full_forward(made.policy, rollouts)
    seen = Metrics(made.engine)
    minibatches, batch = made.preparation.minibatches(rollouts, 0, torch.Generator().manual_seed(0), seen)
    assert batch.rollouts.old_logp[4:][batch.rollouts.mask[4:]].isfinite().any()
    for minibatch in minibatches:
        for micro in minibatch:
            rows = [next(i for i, row in enumerate(rollouts.inputs) if row is own) for own in micro.inputs]
            width = micro.mask.shape[1]
            replay = made.policy.replay(micro, made.policy.module)
            torch.testing.assert_close(replay.logp.detach(), expected[rows, :width], atol=2e-5, rtol=0)
            if micro.old_logp is not None:
                assert torch.equal(micro.old_logp, replay.logp.detach())  # the ratio is 1 to the bit
    # A decision that several share is worth the same to all of them
    nodes, advantages = rollouts.nodes, rollouts.advantages
    for one in range(10):
        for other in range(one):
            same = (nodes[one] == nodes[other]) & (rollouts.group[one] == rollouts.group[other])
            assert torch.equal(advantages[one][same], advantages[other][same])
    assert len(advantages[rollouts.mask].unique()) > 4
    release(made)


def test_a_seed_repeats_the_tree_and_it_trains(tmp_path):
    runs = []
    for name, seed in (("one", 0), ("again", 0), ("other", 1)):
        train(tmp_path / name, *TREES, "steps=2", f"seed={seed}")
        rows = [row for row in metrics(tmp_path / name) if "loss" in row]
        assert len(rows) == 2 and all(row["grad_norm"] > 0 and row["updates_skipped"] == 0 for row in rows)
        runs.append([(row["loss"], row["grad_norm"]) for row in rows])
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("at", ["segment_ends, every: 2", "uncertain_tokens"])
def test_an_engine_goes_on_from_the_beginning_and_keeps_its_likelihoods(tmp_path, at):
    """The log-probabilities that the engine told of a beginning are those of its branches, for the correction of what
    engine and trainer differ in."""
    options = [*TREES, f"rollout.extras=[{{type: branches, count: 3, rounds: 2, at: {{type: {at}}}}}]"]
    config = load(TINY, [f"run_dir={tmp_path}", *options, "rollout.generator.type=vllm_colocated"])
    torch.manual_seed(config.seed)
    task = Fixed(spread)
    policy = build.build_policy(config, task)
    engine = build.build_engine(config, policy)
    generator = Synced(policy, Copy(policy, task.train), task.train[:1], limit=1e-3, gather=engine.gather)
    made = Trainer(config, policy, task, engine, Run(Path(tmp_path), to_yaml(config), writes=True), generator)
    requests, generate = [], generator.engine.generate
    generator.engine.generate = lambda asked, **options: requests.extend(asked) or generate(asked, **options)
    rollouts = made.collector.next(0, Metrics(made.engine))
    assert check_tree(rollouts) >= 6
    told = rollouts.behaviour_logp.where(rollouts.mask, 0.0)
    torch.testing.assert_close(told, full_forward(policy, rollouts), atol=2e-5, rtol=0)
    # The beginning is a part of the request, and only the rest is drawn
    begun = requests[-6:]
    lengths = [len(r.ids) - len(row.prompt) for r, row in zip(begun, rollouts.inputs[4:], strict=True)]
    assert min(lengths) > 0 and all(length + r.limit == 9 for length, r in zip(lengths, begun, strict=True))
    release(made)


def test_a_beginning_that_the_engine_did_not_sample_is_not_corrected(tmp_path):
    """Demonstrated beginnings have no log-probability of the engine's: their weight is 1, and that of what the engine
    sampled is close to it, for it is a copy."""
    prefixes = "{type: guided_prefixes, groups: all, count: 2, low: 0.4, high: 0.6, learned: true}"
    options = [f"rollout.extras=[{prefixes}]", "rollout.prompts=2", "rollout.group_size=2", "algorithm.scale=none"]
    options += ["rollout.max_response_length=9", "engine.micro_batch=4", "rollout.generator.type=vllm_colocated"]
    config = load(TINY, [f"run_dir={tmp_path}", *options])
    torch.manual_seed(config.seed)
    task = build.build_task(config)
    policy = build.build_policy(config, task)
    engine = build.build_engine(config, policy)
    generator = Synced(
        policy, Copy(policy, [task.train[i] for i in range(64)]), [task.train[0]], limit=1e-3, gather=engine.gather
    )
    made = Trainer(config, policy, task, engine, Run(Path(tmp_path), to_yaml(config), writes=True), generator)
    rollouts = made.collector.next(0, Metrics(made.engine))
    assert rollouts.origin.tolist() == [0] * 4 + [3] * 4
    begun = rollouts.behaviour_logp.isnan() & rollouts.mask
    assert begun[:4].sum() == 0 and (begun[4:].sum(1) >= 1).all() and begun[4:, 0].all()
    replay = policy.replay(rollouts, policy.module)
    statistics = apply_correction(rollouts, replay, config.generator.correction)
    weight = replay.weight[rollouts.mask]
    assert (replay.weight[begun] == 1).all()
    torch.testing.assert_close(weight, torch.ones_like(weight), atol=1e-4, rtol=0)
    assert float(statistics["correction/logp_gap"][rollouts.mask].max()) < 1e-4
