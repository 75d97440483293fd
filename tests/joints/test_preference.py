"""Losses over pairs and groups, from their keys to the loss and its gradient by every decision."""

import math

import pytest
import torch

from mmrl.errors import UserError
from tests.joints.parts import Table, close


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def three(**columns):
    """Best is the last rollout, worst the first; the one between has no part."""
    return Table([[-1.0, -2.0], [-1.0], [-3.0]], rewards=[0.0, 1.0, 2.0], **columns)


def moved(given, algorithm, *overrides, table=None):
    """Moved from the reference by 0.2 - 0.4, 0.3 and 0.5."""
    made = given(table or three(), "rollout.prompts=1", "rollout.group_size=3", f"algorithm={algorithm}", *overrides)
    made.move(logp=[[0.2, -0.4], [0.3], [0.5]])
    made.prepare()
    return made


def test_preference(given):
    # m = 0.5 x (0.5 - (-0.2)) = 0.35: loss log(1 + e^-0.35); slope -sigmoid(-0.35) x 0.5, by every token of the pair.
    made = moved(given, "{type: preference, beta: 0.5}")
    close(made.learn(), math.log1p(math.exp(-0.35)))
    slope = 0.5 * sigmoid(-0.35)
    close(made.gradient(), [[slope, slope], [0, 0], [-slope, 0]])
    found = made.metrics.result()
    close(found["preference/margin"], 0.35)
    close(found["preference/right"], 1.0)


def test_pairs_are_of_each_group_and_counted_over_all(given):
    """Two groups of two with a pair, one that is flat, one whose second rollout could not be scored."""
    table = Table([[-1.0]] * 8, group=[0, 0, 1, 1, 2, 2, 3, 3], rewards=[1.0, 0.0, 0.0, 4.0, 1.0, 1.0, 2.0, math.nan])
    for size in (64, 2):  # however it is cut
        made = given(table, "algorithm={type: preference, beta: 1}", f"engine.micro_batch={size}", "rollout.prompts=4")
        made.prepare()
        assert len(made.minibatches[0]) == (4 if size == 2 else 1)
        close(made.learn(), math.log(2))
        close(made.gradient()[:, 0], torch.tensor([-1, 1, 1, -1, 0, 0, 0, 0]) / 4)


def test_terms_are_added_to_a_preference(given):
    table = three(entropy=[[1.0, 2.0], [3.0], [4.0]])
    made = moved(given, "{type: preference, beta: 0.5, terms: [{type: entropy, coefficient: 0.1}]}", table=table)
    close(made.learn(), math.log1p(math.exp(-0.35)) - 0.1 * 10 / 4)


def test_mixed_preference(given):
    # c = 0.25, b = -0.1; against 0.05: log(1 + e^-0.2) + log(1 + e^-0.15). The best said logp -2.5.
    algorithm = "{type: mixed_preference, beta: 0.5, preference: 0.8, quality: 0.3, generation: 0.2, shift: 0.05}"
    made = moved(given, algorithm)
    pair, alone = math.log1p(math.exp(-0.35)), math.log1p(math.exp(-0.2)) + math.log1p(math.exp(-0.15))
    close(made.learn(), 0.8 * pair + 0.3 * alone + 0.2 * 2.5)
    best = -0.5 * (0.8 * sigmoid(-0.35) + 0.3 * sigmoid(-0.2)) - 0.2
    worst = 0.5 * (0.8 * sigmoid(-0.35) + 0.3 * sigmoid(-0.15))
    close(made.gradient(), [[worst, worst], [0, 0], [best, 0]])


def test_the_likelihood_of_the_best_is_a_mean_over_its_tokens(given):
    table = Table([[-1.0, -2.0], [-3.0]], rewards=[1.0, 0.0])
    made = given(table, "rollout.prompts=1", "algorithm={type: mixed_preference, preference: 0, quality: 0}")
    made.prepare()
    close(made.learn(), 1.5)
    close(made.gradient(), [[-0.5, -0.5], [0, 0]])


def told(given, algorithm, *overrides):
    """Two right rollouts with mean log-likelihoods -1.5 and -1, two wrong ones with -2 and -3."""
    table = Table([[-1.0, -2.0], [-1.0], [-2.0], [-3.0]], rewards=[1.0, 1.0, 0.0, 0.0])
    made = given(table, "rollout.prompts=1", "rollout.group_size=4", f"algorithm={algorithm}", *overrides)
    made.prepare()
    return made


def test_discriminative(given):
    # -(-1.25) + 2 log((e^-1 + e^-1.5) / 2); the wrong ones share a slope of 1 by e^(s / 2).
    made = told(given, "{type: discriminative, tau: 2}")
    high, low = math.exp(-1), math.exp(-1.5)
    close(made.learn(), 1.25 + 2 * math.log((high + low) / 2))
    close(made.gradient(), [[-0.25, -0.25], [-0.5, 0], [high / (high + low), 0], [low / (high + low), 0]])
    close(made.metrics.result()["preference/margin"], -1.25 + 2.5)


def test_discriminative_without_the_weight_of_the_worst(given):
    made = told(given, "{type: discriminative, tau: null}")
    close(made.learn(), 1.25 - 2.5)
    close(made.gradient(), [[-0.25, -0.25], [-0.5, 0], [0.5, 0], [0.5, 0]])


def test_discriminative_is_divided_by_all_prompts(given):
    """compute_policy_loss_disco_logL of DisCO at bd2b078, executed on these rows: of three prompts one has both sides;
    a prompt without any score is none."""
    table = Table([[-1.0, -2.0], [-0.5], [-1.0], [-3.0], [-2.0], [-1.0], [-1.0], [-1.0]],
                  group=[0, 0, 1, 1, 2, 2, 3, 3], rewards=[1.0, 0.0, 1.0, 1.0, 0.0, 0.0, *[math.nan] * 2])  # fmt: skip
    for divisor, factor in (("", 1), (", divisor: contrasting", 3)):
        for size in (64, 2):
            made = given(table, f"algorithm={{type: discriminative, tau: 2{divisor}}}", "rollout.prompts=4",
                         f"engine.micro_batch={size}")  # fmt: skip
            made.prepare()
            made.learn()
            close(made.gradient()[:2] * 3 / factor, [[-0.5, -0.5], [1.0, 0.0]])
            close(made.gradient()[2:], torch.zeros(6, 2))


def test_discriminative_by_ratios(given):
    made = told(given, "{type: discriminative, tau: null, score: ratio, epochs: 2}")
    made.move(logp=[[0.1, 0.3], [0.0], [0.2], [-0.4]])
    right = ((math.exp(0.1) + math.exp(0.3)) / 2 + 1) / 2
    close(made.learn(), (math.exp(0.2) + math.exp(-0.4)) / 2 - right)
    expected = [[-math.exp(0.1) / 4, -math.exp(0.3) / 4], [-0.5, 0], [math.exp(0.2) / 2, 0], [math.exp(-0.4) / 2, 0]]
    close(made.gradient(), expected)


def test_the_bar_between_right_and_wrong(given):
    made = told(given, "{type: discriminative, tau: null, threshold: 1.5}")
    close(made.learn(), 0.0)  # nothing is right
    close(made.gradient(), torch.zeros(4, 2))


def test_reweighted_supervised(given):
    # -p logp, with the slope -p.
    table = Table([[-1.0, -2.0, -3.0], [-4.0]])
    made = given(table, "algorithm={type: reweighted_supervised}", "rollout={prompts: 2}")
    made.prepare(made.next())
    weights = [math.exp(-x) for x in (1, 2, 3, 4)]
    close(made.learn(), sum(w * x for w, x in zip(weights, (1, 2, 3, 4), strict=True)) / 4)
    close(made.gradient(), [[-w / 4 for w in weights[:3]], [-weights[3] / 4, 0, 0]])


@pytest.mark.parametrize("kind", ["preference", "mixed_preference", "discriminative"])
def test_groups_are_needed(given, kind):
    with pytest.raises(UserError, match="set it to at least 2"):
        given(three(), f"algorithm={{type: {kind}}}", "rollout.group_size=1")
    with pytest.raises(UserError, match="engine.micro_batch=2 splits groups of 3"):
        given(three(), f"algorithm={{type: {kind}}}", "rollout.group_size=3", "engine.micro_batch=2")


def test_dynamic_sampling_knows_which_groups_have_a_pair(given):
    table = Table([[-1.0]] * 4, group=[0, 0, 1, 1], rewards=[1.0, 1.0, 0.0, 2.0])
    sampling = ["rollout.dynamic_sampling={max_rounds: 2}", "rollout.prompts=1"]
    made = given(table, "algorithm={type: preference}", *sampling)
    close(made.next().rewards[:, 0], [0.0, 2.0])  # the first round's group is flat
