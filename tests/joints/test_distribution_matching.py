"""algorithm.type=distribution_matching (DMPO), from its keys to the loss and its gradient by every decision."""

import math

import pytest
import torch

from mmrl.errors import UserError
from tests.joints.parts import Table, close

NOW = [[-0.7, -2.4], [-0.9], [-2.5]]  # log-likelihoods when the policy is asked for its loss
SUMS = [-3.1, -0.9, -2.5]


def softmax(*scores):
    total = sum(math.exp(s) for s in scores)
    return [math.exp(s) / total for s in scores]


def three(**columns):
    return Table([[-1.0, -2.0], [-1.0], [-3.0]], rewards=[0.0, 1.0, 2.0], **columns)


def moved(given, baseline, *overrides, table=None, alpha=0.5):
    """The policy has left the reference by 0.2 - 0.4, 0.3 and 0.5 when it is asked for old likelihoods, and moves on by
    0.1, -0.2 and 0."""
    algorithm = f"algorithm={{type: distribution_matching, alpha: {alpha}, weight_baseline: {baseline}}}"
    made = given(table or three(), algorithm, "rollout.prompts=1", "rollout.group_size=3", *overrides)
    made.move(logp=[[0.2, -0.4], [0.3], [0.5]])
    made.prepare()
    made.move(logp=[[0.3, -0.4], [0.1], [0.5]])
    return made


# r / alpha + ref_l - old_l = 0 + 0.2, 2 - 0.3 and 4 - 0.5.
WEIGHTS = softmax(0.2, 1.7, 3.5)
BASELINES = {
    "none": [0.0, 0.0, 0.0],
    "mean": [1 / 3] * 3,
    "present": softmax(0.1, -0.2, 0.0),
    "negative": softmax(0.2, -2.3, -4.5),
}


@pytest.mark.parametrize("baseline", BASELINES)
def test_weights_and_their_baselines(given, baseline):
    made = moved(given, baseline)
    left = [w - b for w, b in zip(WEIGHTS, BASELINES[baseline], strict=True)]
    close(made.learn(), -sum(w * logp for w, logp in zip(left, SUMS, strict=True)))
    close(made.gradient(), [[-left[0], -left[0]], [-left[1], 0], [-left[2], 0]])
    found = made.metrics.result()
    close(found["weights/effective_size"], 1 / (3 * sum(w * w for w in WEIGHTS)))
    close(found["weights/less_baseline"], (2 * left[0] + left[1] + left[2]) / 4)


def test_the_first_update_knows_the_old_policy_as_the_present_one(given):
    """Then the baseline of the present policy is the mean, whatever the reference says."""
    algorithm = "algorithm={type: distribution_matching, alpha: 0.5}"
    made = given(three(), algorithm, "rollout.prompts=1", "rollout.group_size=3")
    made.move(logp=[[0.2, -0.4], [0.3], [0.5]])
    made.prepare()
    made.learn()
    left = [w - 1 / 3 for w in WEIGHTS]
    close(made.gradient(), [[-left[0], -left[0]], [-left[1], 0], [-left[2], 0]])


def test_a_smaller_alpha_trusts_the_reward_more(given):
    made = moved(given, "none", alpha=0.25)
    close(-made.trainer.algorithm.alpha.value, -0.25)
    made.learn()
    close(-made.gradient()[:, 0], softmax(0.2, 3.7, 7.5))


@pytest.mark.parametrize("baseline", ["mean", "present"])
def test_groups_count_alike_and_what_was_not_scored_has_no_part(given, baseline):
    """A group of two, and one of which a rollout could not be scored: however it is cut."""
    table = Table([[-1.0]] * 4, group=[0, 0, 1, 1], rewards=[1.0, 0.0, 5.0, math.nan])
    for size in (64, 2):
        made = given(
            table, f"algorithm={{type: distribution_matching, alpha: 1, weight_baseline: {baseline}}}",
            f"engine.micro_batch={size}",
        )  # fmt: skip
        made.prepare()
        assert len(made.minibatches[0]) == (2 if size == 2 else 1)
        made.learn()
        high = 1 / (1 + math.exp(-1)) - 0.5
        close(made.gradient()[:, 0], [-high / 2, high / 2, 0, 0])


@pytest.mark.parametrize("baseline", ["none", "present"])
def test_what_dynamic_sampling_filled_up_teaches_nothing(given, baseline):
    table = three()
    made = given(
        table, f"algorithm={{type: distribution_matching, weight_baseline: {baseline}}}", "rollout.prompts=1",
        "rollout.group_size=3",
    )  # fmt: skip
    rollouts = table.rollouts()
    rollouts.filler = torch.tensor([True] * 3)
    made.prepare(rollouts)
    made.learn()
    close(made.gradient(), torch.zeros(3, 2))


def test_terms_are_added(given):
    table = three(entropy=[[1.0, 2.0], [3.0], [4.0]])
    plain = moved(given, "none").learn()
    made = moved(given, "none", "algorithm.terms=[{type: entropy, coefficient: 0.1}]", table=table)
    close(made.learn(), plain - 0.1 * 10 / 4)


def test_what_does_not_fit_is_one_line(given):
    for overrides, line in (
        (
            ["rollout.group_size=1"],
            "rollout.group_size=1 is too small for algorithm.type=.*; set it to at least 2",
        ),
        (["rollout.group_size=3", "engine.micro_batch=2"], "engine.micro_batch=2 splits groups of 3"),
        (["algorithm.alpha=0"], "algorithm.alpha"),
    ):
        with pytest.raises(UserError, match=line):
            given(three(), "algorithm={type: distribution_matching}", *overrides)
