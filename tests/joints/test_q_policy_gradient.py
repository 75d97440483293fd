"""Chunks that the policy proposes at stored observations: what is sampled, what Q says of it, and the loss."""

import json
import math

import numpy as np
import pytest
import torch

from mmrl.errors import UserError
from mmrl.measurements.q_values import ESTIMATES
from mmrl.rollouts import PROPOSED
from mmrl.training.metrics import Metrics
from tests.joints.parts import Table, close
from tests.whole_runs.parts import ROBOTS, distance, final, make, metrics, release, timeless, train

pytestmark = pytest.mark.usefixtures("alone")
Q = "q: {width: 16, members: 2, lr: 0.01, tau: 0.5}, returns: {gamma: 0.5, simulator_reward: 1.0}"
HEADS = {
    "token": "{type: token, bins: 8}",
    "gaussian": "{type: gaussian, width: 16, layers: 1}",
    "flow": "{type: flow, steps: 3, width: 16, depth: 1}",
}


def options(head="gaussian", coefficient=0.5, more=""):
    return [
        "rollout.extras=[{type: action_proposals, steps: 3, group_size: 4}]",
        f"algorithm.terms=[{{type: q_policy_gradient, coefficient: {coefficient}, {Q}{more}}}]",
        "engine.micro_batch=32",
        "task.train_size=60",
        "action.chunk=2",
        f"action.head={HEADS[head]}",
    ]


def prepared(folder, *settings, steps=2):
    """A trainer after `steps` - 1 whole training steps, and its next batch as it is trained on."""
    trainer = make(folder, *settings, base=ROBOTS)
    for step in range(steps):
        rollouts = trainer.collector.next(step, Metrics(trainer.engine))
        measured = Metrics(trainer.engine)
        minibatches, batch = trainer.preparation.minibatches(
            rollouts, step, torch.Generator().manual_seed(step), measured
        )
        if step < steps - 1:
            trainer.update(minibatches[0], measured)
            trainer.collector.observe(batch)
    return trainer, rollouts, minibatches, batch


def columns(rollouts):
    (values,) = [record.values for name, record in rollouts.extras.items() if name.startswith("q_values")]
    return dict(zip(ESTIMATES, values.unbind(1), strict=True))


@pytest.mark.parametrize("head", HEADS)
def test_several_chunks_are_proposed_at_each_stored_observation(tmp_path, head):
    trainer, rollouts, *_ = prepared(tmp_path, *options(head))
    proposed = rollouts.select(rollouts.origin == PROPOSED)
    assert len(proposed) == 12 and len(proposed.group.unique()) == 3 and (proposed.group < 0).all()
    prompts = [sample.prompt for sample in proposed.samples]
    for group in proposed.group.unique():
        own = [prompts[i] for i in (proposed.group == group).nonzero().flatten().tolist()]
        assert len({prompt.id for prompt in own}) == 1 and len(own) == 4
        chunks = {prompt.metadata["proposal"].tobytes() for prompt in own}
        assert len(chunks) == (4 if head != "token" else len(chunks)) and len(chunks) > 1
    for prompt, (step,) in zip(prompts, proposed.inputs, strict=True):
        assert prompt.metadata["proposal"].shape == (2, prompt.metadata["actions"].shape[1])
        assert np.abs(prompt.metadata["proposal"]).max() <= 1
        assert step.valid.all()
        close(step.state, prompt.metadata["observation"].state[0])
    assert proposed.mask.any(1).all()
    # The second training step's three observations have four seeds each, after those of the first step's.
    assert sorted(prompt.metadata["proposal_seed"] for prompt in prompts) == list(range(12, 24))
    release(trainer)


def test_a_proposal_has_the_q_value_of_its_own_chunk(tmp_path):
    """Q networks are replaced by the sum of what they read, so that each proposal's value can be added up."""
    trainer, rollouts, *_ = prepared(tmp_path, *options())
    (q,) = [m for name, m in trainer.preparation.modules._modules.items() if name.endswith(" q")]
    q.module.target = lambda pairs: pairs.double() @ torch.arange(1.0, pairs.shape[1] + 1).double()
    trainer.preparation.measure(rollouts, [[torch.arange(len(rollouts))]], 1)
    found, policy = columns(rollouts), trainer.policy
    for row, (sample, origin) in enumerate(zip(rollouts.samples, rollouts.origin.tolist(), strict=True)):
        if origin != PROPOSED:
            assert math.isnan(found["q"][row])
            continue
        metadata = sample.prompt.metadata
        pair = torch.cat(
            [
                policy.off_policy.encode_observations([metadata["observation"]]),
                policy.off_policy.encode_chunks([metadata["proposal"]]),
            ],
            1,
        )[0]
        expected = float(pair.double() @ torch.arange(1.0, len(pair) + 1).double())
        assert float(found["q"][row]) == pytest.approx(expected, abs=1e-3)
    release(trainer)


@pytest.mark.parametrize(("more", "scale"), [("", True), (", scale: none", False)])
def test_the_gradient_by_hand(tmp_path, more, scale):
    """The likelihood of chunks above their group's mean rises: the slope is -coefficient A r at all decisions."""
    trainer, rollouts, minibatches, batch = prepared(tmp_path, *options(more=more))
    (values,) = [record.values for name, record in rollouts.extras.items() if name.startswith("q_values")]
    rows = (rollouts.origin == PROPOSED).nonzero().flatten()
    values[rows, 0] = torch.linspace(0, 1, len(rows)).square()
    trainer.algorithm.prepare(batch)
    term = trainer.algorithm.terms[0]
    advantages = rollouts.extras[term.key].values
    for group in rollouts.group[rows].unique():
        own = rows[rollouts.group[rows] == group]
        centred = values[own, 0] - values[own, 0].mean()
        expected = centred / values[own, 0].std() if scale else centred
        close(advantages[own], expected, atol=1e-3)
    assert advantages[rollouts.origin != PROPOSED].isnan().all()
    replay = trainer.policy.replay(rollouts, trainer.policy.module)
    logp = replay.logp.detach().requires_grad_()
    for shift, clipped in ((0.0, False), (0.5, True)):
        rollouts.old_logp = logp.detach() - shift
        replay.logp, replay.log_ratio, logp.grad = logp * 1.0, None, None
        losses, stats = term.values(rollouts, replay)
        (losses * rollouts.mask).sum().backward()
        ratio = math.exp(shift)
        for row in rows.tolist():
            a = float(advantages[row])
            expected = 0.0 if clipped and a > 0 else -0.5 * a * ratio
            close(logp.grad[row][rollouts.mask[row]], [expected] * int(rollouts.mask[row].sum()), atol=1e-4)
    assert not logp.grad[rollouts.origin != PROPOSED].any()
    release(trainer)


@pytest.mark.parametrize("head", ["gaussian", "flow"])
def test_it_goes_on_exactly(tmp_path, head):
    settings = options(head)
    train(tmp_path / "whole", *settings, "steps=6", base=ROBOTS)
    train(tmp_path / "parts", *settings, "steps=3", "checkpoint.every=3", base=ROBOTS)
    train(tmp_path / "parts", *settings, "steps=6", "checkpoint.every=3", resume=True, base=ROBOTS)
    rows = [[row for row in timeless(metrics(tmp_path / name)) if "loss" in row] for name in ("whole", "parts")]
    assert json.dumps(rows[0]) == json.dumps(rows[1]) and len(rows[0]) == 6
    assert distance(final(tmp_path / "whole"), final(tmp_path / "parts")) == 0
    assert all("q_policy_gradient/ratio" in row for row in rows[0][1:])
    assert rows[0][1]["q_policy_gradient/ratio"] == 1.0


def test_jobs_that_propose_nothing_are_refused(given, tmp_path):
    table = Table([[-1.0]], group=[0], rewards=[0.0])
    with pytest.raises(
        UserError, match=r"algorithm.terms.0 \(q_policy_gradient\) needs stored observations and actions that"
    ):
        given(table, "algorithm.terms=[q_policy_gradient]")
