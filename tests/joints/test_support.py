"""The reference policy as a teacher, and the penalty on probability outside its support (APO): from the YAML keys to
numbers that transformers' own logits give."""

import math

import pytest
import torch

from mmrl.core.regularizers import log_support
from mmrl.training.metrics import Metrics
from tests.joints.parts import close
from tests.whole_runs.parts import gradient, make, metrics, release, train, under
from tests.whole_runs.test_teachers import QUIET, distribution, slope

pytestmark = pytest.mark.usefixtures("alone")
SPREAD = "task.rewards=[{name: 'tests.whole_runs.parts:spread', weight: 1.0}]"


def test_the_support_is_what_the_reference_finds_likely():
    """Of four tokens with reference 0.5, 0.3, 0.15, 0.05 those of at least 0.1 have 0.2 + 0.1 + 0.3 of the policy."""
    reference, policy = torch.tensor([0.5, 0.3, 0.15, 0.05]).log(), torch.tensor([0.2, 0.1, 0.3, 0.4]).log()
    close(log_support(policy, reference, 0.1), math.log(0.6))
    close(log_support(policy, reference, 0.0), 0.0)
    close(log_support(policy, reference, 0.9), math.log(0.2))  # the likeliest token always belongs to it


def moved(folder, *overrides):
    """A trainer whose policy has left its reference, its prepared micro-batches, and log p of the reference and of the
    policy for all decisions, [decision, token], by transformers' own logits."""
    trainer = make(folder, *overrides)
    policy = trainer.policy
    rollouts = trainer.collector.next(0, Metrics(trainer.engine))
    with torch.no_grad():
        reference = [distribution(policy, policy.module.model, row) for row in rollouts.inputs]
        for parameter in policy.module.parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
            parameter += 0.3 * parameter.std().nan_to_num() * noise
    rows = {id(tokens): values for tokens, values in zip(rollouts.inputs, reference, strict=True)}
    shuffle = torch.Generator().manual_seed(0)
    parts, _ = trainer.preparation.minibatches(rollouts, 0, shuffle, Metrics(trainer.engine))
    micro = parts[0][0]
    theirs = torch.cat([rows[id(tokens)] for tokens in micro.inputs])
    ours = torch.cat([distribution(policy, policy.module.model, tokens) for tokens in micro.inputs])
    assert (ours.argmax(1) != theirs.argmax(1)).any()
    return trainer, micro, ours, theirs


@pytest.mark.parametrize("least,of", [(0.0, "negative"), (0.02, "all")])
def test_the_penalty_is_that_of_an_exact_computation(tmp_path, least, of):
    term = f"{{type: support_coverage, coefficient: 0.5, k: 4, min_probability: {least}, of: {of}}}"
    trainer, micro, ours, theirs = moved(tmp_path, SPREAD, f"algorithm={{type: grpo, terms: [{term}]}}")
    best = theirs.topk(4, 1)
    likely = best.values.exp() >= least
    likely[:, 0] = True
    assert least == 0 or 0 < int(likely.sum()) < likely.numel()
    mass = (ours.gather(1, best.indices).exp() * likely).sum(1)
    negative = micro.advantages[micro.mask] < 0
    assert 0 < int(negative.sum()) < len(negative)
    selected = negative if of == "negative" else torch.ones_like(negative)
    expected = -0.5 * mass.log() * selected
    losses, statistics = trainer.losses(micro, trainer.algorithm.denominators(micro))
    close(statistics["support"][micro.mask], mass.detach(), atol=1e-5)
    close(losses["algorithm.terms.0 (support_coverage)"].detach(), expected.mean().detach(), atol=1e-5)
    assert mass.max() < 0.999
    release(trainer)


def test_the_reference_teaches_with_its_own_likeliest_tokens(tmp_path):
    """Top-k divergence from the reference: which tokens are listed, and their probabilities, are the reference's."""
    teacher = "algorithm={type: distillation, teacher: reference, estimator: {type: top_k, k: 3}, direction: forward}"
    trainer, micro, ours, theirs = moved(tmp_path, QUIET, teacher)
    best = theirs.topk(3, 1).indices
    ours_listed, theirs_listed = (
        torch.cat([p.gather(1, best), (1 - p.exp().gather(1, best).sum(1, keepdim=True)).log()], 1)
        for p in (ours, theirs)
    )
    expected = (theirs_listed.exp() * (theirs_listed - ours_listed)).sum(1)
    assert expected.mean() > 0.01
    losses, _ = trainer.losses(micro, trainer.algorithm.denominators(micro))
    close(sum(losses.values()).detach(), expected.mean().detach(), atol=1e-5)
    right = slope(expected.mean(), trainer.policy)
    close(gradient(under(trainer, trainer.config), micro), right, atol=1e-4 * float(right.norm()))
    release(trainer)


def test_a_policy_keeps_to_the_support_that_the_penalty_guards(tmp_path):
    """Rewards count nothing. With the penalty alone the support of two tokens gains probability."""
    term = "{type: support_coverage, coefficient: 1.0, k: 2, of: all}"
    train(tmp_path, QUIET, "steps=8", f"algorithm={{type: grpo, terms: [{term}]}}")
    support = [row["support"] for row in metrics(tmp_path) if "support" in row]
    assert support[-1] > support[0] + 0.05 and support[0] < 0.9
