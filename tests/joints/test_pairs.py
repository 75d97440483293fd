"""Preferences decision by decision, from their keys to the loss and its gradient: stepwise_preference and
offline_preference, of StepwisePreference and OfflinePreference."""

import math

import pytest
import torch

from mmrl.algorithms.preference.pairs import OfflinePreference, StepwisePreference
from mmrl.errors import UserError
from mmrl.rollouts import Prompt, Replay
from mmrl.schedules.schedule import constant
from tests.joints.parts import Table, close


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def softplus(x):
    return math.log1p(math.exp(x))


STEPWISE = "algorithm={type: stepwise_preference, beta: 0.5}"


def moved(given, algorithm, *overrides, **columns):
    """Three rollouts, of which the last is the best, the first the worst; moved from the reference by these."""
    table = Table([[-1.0, -2.0], [-1.0, -1.0], [-3.0, -1.0]], rewards=[0.0, 1.0, 2.0], **columns)
    made = given(table, "rollout.prompts=1", "rollout.group_size=3", algorithm, *overrides)
    made.move(logp=[[0.2, -0.4], [0.3, 0.1], [0.5, 0.1]])
    made.prepare()
    return made


def test_each_decision_is_a_comparison_of_its_own(given):
    # Margins 0.5 x (0.5 - 0.2) = 0.15 and 0.5 x (0.1 + 0.4) = 0.25, and their mean loss.
    made = moved(given, STEPWISE)
    close(made.learn(), (softplus(-0.15) + softplus(-0.25)) / 2)
    one, two = (0.5 * sigmoid(-m) / 2 for m in (0.15, 0.25))
    close(made.gradient(), [[one, two], [0, 0], [-one, -two]])
    found = made.metrics.result()
    close(found["preference/margin"], 0.2)
    close(found["preference/right"], 1.0)


def test_a_flat_group_has_no_part_and_pairs_are_counted_over_all(given):
    table = Table([[-1.0]] * 6, group=[0, 0, 1, 1, 2, 2], rewards=[1.0, 0.0, 3.0, 3.0, 0.0, 4.0])
    for size in (64, 2):
        made = given(
            table, "algorithm={type: stepwise_preference, beta: 3}", f"engine.micro_batch={size}", "rollout.prompts=3"
        )
        made.prepare()
        close(made.learn(), math.log(2))
        close(made.gradient()[:, 0], torch.tensor([-1, 1, 0, 0, 1, -1]) * 3 / 4)


def test_offline_pairs_are_in_the_order_in_which_they_are_shown(given):
    """The first of two is preferred, whatever rewards there may be; of level decision and sequence."""
    table = Table([[-1.0, -2.0], [-3.0, -1.0]])
    loss = {
        "decision": (softplus(-0.15) + softplus(-0.25)) / 2,  # 0.5 x (0.5 - 0.2), 0.5 x (0.1 + 0.4)
        "sequence": softplus(-0.4),
    }
    for level, expected in loss.items():
        made = given(
            table, f"algorithm={{type: offline_preference, beta: 0.5, level: {level}}}", "rollout={prompts: 1}"
        )
        made.move(logp=[[0.5, 0.1], [0.2, -0.4]])
        rollouts = table.rollouts()
        rollouts.rewards = None
        made.prepare(rollouts)
        close(made.learn(), expected)
        assert (made.gradient()[0] < 0).all() and (made.gradient()[1] > 0).all()


def test_the_policy_is_shown_both_of_a_pair_with_the_same_seed(given):
    table = Table([[-1.0], [-2.0]])
    made = given(table, "algorithm={type: offline_preference, beta: 1}", "rollout={prompts: 2}")
    source = list(Prompt(str(i), "?", answer="a", metadata={"rejected": f"no {i}"}) for i in range(8))
    made.trainer.collector.draws.source, seen = source, []

    def demonstrate(prompts, seeds):
        seen.append(([(p.id, p.metadata.get("demonstration")) for p in prompts], list(seeds)))
        rollouts = table.rollouts([0, 1, 0, 1])
        rollouts.rewards = None
        return rollouts

    made.trainer.policy.demonstrate = demonstrate
    batch = made.next()
    (shown, seeds), drawn = seen[0], [int(i) for i in dict.fromkeys(s for s, _ in seen[0][0])]
    assert shown == [(str(i), what) for i in drawn for what in (None, f"no {i}")]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
    assert batch.group.tolist()[0] == batch.group.tolist()[1] != batch.group.tolist()[2]
    made.prepare(batch)
    assert made.trainer.config.rollouts_per_step == 4
    assert batch.advantages[:, 0].tolist() == [1, -1, 1, -1]


def test_a_target_is_replaced_by_what_is_rejected():
    prompt = Prompt("p", "?", metadata={"target": 1, "rejected": 2})
    assert [p.metadata["target"] for p in OfflinePreference().prepare_demonstrations([prompt])] == [1, 2]
    with pytest.raises(UserError, match="prompt p has no `rejected` in its metadata"):
        OfflinePreference().prepare_demonstrations([Prompt("p", "?")])


def test_what_does_not_fit_is_one_line(given):
    table = Table([[-1.0], [-2.0]])
    with pytest.raises(UserError, match="set it to at least 2"):
        given(table, STEPWISE, "rollout.group_size=1")
    with pytest.raises(UserError, match="engine.micro_batch=1 splits groups of 2"):
        given(table, "algorithm=offline_preference", "rollout={prompts: 1}", "engine.micro_batch=1")


def test_steps_have_the_weight_that_the_policy_gives_them():
    micro = Table([[-1.0, -2.0], [-3.0, -1.0]]).rollouts()
    micro.ref_logp = torch.tensor([[-1.5, -2.1], [-3.2, -0.6]])
    now = Replay(
        micro.ref_logp + torch.tensor([[0.5, 0.1], [0.2, -0.4]]), weight=torch.tensor([[0.5, 1.5]]).expand(2, 2)
    )
    loss, _ = StepwisePreference(beta=constant(0.5)).group_loss(torch.tensor([0]), torch.tensor([1]), micro, now)
    close(loss, (0.5 * softplus(-0.15) + 1.5 * softplus(-0.25)) / 2)
    exact = Replay(now.logp, extras={"reference_log_ratio": torch.tensor([[1.0, 0.0], [0.0, 0.0]])})
    loss, _ = StepwisePreference(beta=constant(0.5)).group_loss(torch.tensor([0]), torch.tensor([1]), micro, exact)
    close(loss, (softplus(-0.5) + softplus(0.0)) / 2)


@pytest.mark.parametrize(("option", "kept"), [("", 0.1), (", clip: 0.05", 0.05), (", clip: 0", None)])
def test_ratios_of_gaussian_steps_are_clamped_before_their_log(given, option, kept):
    """D3PO's train.py: log(clamp(ratio, 1 - eps, 1 + eps)), each of the two by itself. Of the best +0.5 and +0.1, of
    the worst +0.2 and -0.4."""
    made = moved(given, f"algorithm={{type: stepwise_preference, beta: 0.5{option}}}", std=[[0.5, 0.5]] * 3)
    if kept is None:
        margins, counts = [0.15, 0.25], [[1, 1], [1, 1]]
    else:
        high, low = math.log(1 + kept), math.log(1 - kept)
        margins = [0.0, 0.5 * (min(0.1, high) - low)]
        counts = [[0, high > 0.1], [0, 0]]  # of the best, of the worst: within the bounds
    close(made.learn(), sum(softplus(-m) for m in margins) / 2)
    slopes = [0.5 * sigmoid(-m) / 2 for m in margins]
    best, worst = ([c * s for c, s in zip(row, slopes, strict=True)] for row in counts)
    close(made.gradient(), [worst, [0, 0], [-g for g in best]])


def test_matchings_are_not_clamped_by_default(given):
    made = moved(given, STEPWISE)
    close(made.learn(), (softplus(-0.15) + softplus(-0.25)) / 2)
