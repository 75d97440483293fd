"""Advantage shapers, from their keys to the advantages of decisions, and to the gradient that follows."""

import math
import statistics

import pytest
import torch

from mmrl.errors import UserError
from tests.joints.parts import Table, close

ONE = ["rollout.prompts=1", "algorithm.scale=none"]


def shaped(given, table, shaper, *overrides):
    size = int((table.group == 0).sum())
    options = [f"rollout.group_size={size}", "algorithm.surrogate=reinforce", f"algorithm.shaping=[{shaper}]"]
    made = given(table, *ONE, *options, *overrides)
    rollouts = made.prepare()
    made.learn()
    counted = rollouts.mask
    close(made.gradient()[counted], -rollouts.advantages[counted] / int(counted.sum()), atol=1e-5)
    return rollouts.advantages.where(counted, 0)


# --- stratified ---


def test_stratified(given):
    # Plain: 0, 2, 4, 8, 1 less 3. Within the strata: 0, 2 around 1 over sqrt 2; 4, 8 around 6 over sqrt 8; 1 alone.
    table = Table([[-1.0] * length for length in (1, 1, 2, 2, 3)], rewards=[0.0, 2.0, 4.0, 8.0, 1.0])
    half = math.sqrt(0.5)
    found = shaped(given, table, "{type: stratified, by: length, alpha: 0.25}")
    within, plain = [-half, half, -half, half, 0], [-3, -1, 1, 5, -2]
    close(found[:, 0], [0.25 * w + 0.75 * p for w, p in zip(within, plain, strict=True)], atol=5e-6)


def test_a_stratum_is_of_one_group(given):
    # Of either group, the rollouts of stratum 0 differ; with all four of it together the second would be flat.
    table = Table([[-1.0]] * 4, group=[0, 0, 1, 1], rewards=[0.0, 2.0, 5.0, 9.0])
    half = math.sqrt(0.5)
    found = shaped(given, table, "{type: stratified, by: length, alpha: 1}", "rollout.prompts=2")
    close(found[:, 0], [-half, half, -half, half], atol=5e-6)


# --- set diversity ---


def test_set_diversity(given):
    # Single characters: "aa" and "a" are alike (cosine 1), "b" is like neither. I + K has a block [[2, 1], [1, 2]] and
    # a 2: its logdet is log 3 + log 2; without "aa" or "a" log 4, without "b" log 3. Gains log 6/4, log 6/4, log 2.
    table = Table([[-1.0]] * 3, rewards=[1.0, 1.0, 1.0], responses=["aa", "a", "b"])
    found = shaped(given, table, "{type: set_diversity, weight: 0.5, n: 1}")
    gains = [math.log(1.5), math.log(1.5), math.log(2)]
    close(found[:, 0], [0.5 * (g - statistics.mean(gains)) for g in gains])


def test_set_diversity_scales_its_kernel_and_may_be_for_right_answers_alone(given):
    # Among the first and the third alone: no kernel between them, gains alike; tau shows in nothing but the first two.
    table = Table([[-1.0]] * 3, rewards=[1.0, 0.0, 1.0], responses=["aa", "a", "b"])
    found = shaped(given, table, "{type: set_diversity, weight: 0.5, n: 1, threshold: 0.5}")
    close(found[:, 0], [1 / 3, -2 / 3, 1 / 3])
    # With tau 0.5 the block is [[3, 2], [2, 3]] and a 3: without one of the block log 9, without "b" log 5.
    table = Table([[-1.0]] * 3, rewards=[1.0, 1.0, 1.0], responses=["aa", "a", "b"])
    found = shaped(given, table, "{type: set_diversity, weight: 1, n: 1, tau: 0.5}")
    gains = [math.log(15 / 9), math.log(15 / 9), math.log(3)]
    close(found[:, 0], [g - statistics.mean(gains) for g in gains])


# --- entropy redistribution ---

REDISTRIBUTED = "{type: entropy_redistribution, alpha: 1, beta: 0.1, low: 0.1, high: 0.5"


def doubtful():
    """Two right rollouts of two and one tokens, two wrong ones."""
    return Table(
        [[-1.0, -1.0], [-1.0], [-1.0, -1.0], [-1.0, -1.0]],
        rewards=[1.0, 1.0, 0.0, 0.0],
        entropy=[[0.3, 9.0], [0.1], [0.2, 0.4], [0.4, 0.01]],
    )


def test_entropy_redistribution(given):
    # Token 0, right: 2 x 0.3 / 0.4 and 2 x 0.1 / 0.4; token 1: one right rollout has it all. Wrong, token 0:
    # reciprocals 5, 2.5: 2 x 2/3 and 2 x 1/3; token 1: 2.5 and 10 (0.01 counts as 0.1): 2 x 0.2 and 2 x 0.8.
    found = shaped(given, doubtful(), REDISTRIBUTED + "}")
    close(found, [[1.15, 1.1], [1.05, 0], [-1 - 0.4 / 3, -1.04], [-1 - 0.2 / 3, -1.16]], atol=1e-5)


def test_what_is_redistributed_is_conserved(given):
    # At each place (alpha + beta) times the rollouts that reach it, whatever the entropies.
    found = shaped(given, doubtful(), REDISTRIBUTED + "}")
    close(found[:2].sum(0), [2.2, 1.1], atol=1e-5)
    close(found[2:].sum(0), [-2.2, -2.2], atol=1e-5)


def test_entropy_redistribution_standardised(given):
    right, wrong = [1.15, 1.1, 1.05], [-1 - 0.4 / 3, -1.04, -1 - 0.2 / 3, -1.16]
    found = shaped(given, doubtful(), REDISTRIBUTED + ", standardise: true}")
    one = [(r - 1.1) / 0.05 for r in right]
    two = [(w + 1.1) / statistics.stdev(wrong) for w in wrong]
    expected = [[one[0], one[1]], [one[2], 0], two[:2], two[2:]]
    close(found, expected, atol=2e-3)
    # what could not be scored is neither right nor wrong
    logp, entropy = [[-1.0, -1.0], [-1.0], *[[-1.0, -1.0]] * 3], [[0.3, 9.0], [0.1], [0.2, 0.4], [0.4, 0.01], [0.3] * 2]
    table = Table(logp, rewards=[1.0, 1.0, 0.0, 0.0, math.nan], entropy=entropy)
    close(shaped(given, table, REDISTRIBUTED + ", standardise: true}"), [*expected, [0, 0]], atol=2e-3)


# --- factors and bonuses by entropy ---


def test_advantages_by_entropy_centred(given):
    # Advantages 1, 1 and -1. H = 0.2, 1.0, 0.6 become 0, 1, 1/2. With k = 2 weights 1, e^-2, e^-1 over their mean;
    # bonus of the first decision alone, 0.1 e^(-3 x 1).
    table = Table([[-1.0, -1.0], [-1.0]], rewards=[2.0, 0.0], entropy=[[0.2, 1.0], [0.6]])
    bonus = "{type: clarity, k: 3, zeta: 0.1}"
    found = shaped(given, table, f"{{type: entropy, sure: {{k: 2}}, bonus: {bonus}, centred: true}}")
    mean = (1 + math.exp(-2) + math.exp(-1)) / 3
    raw = [1 / mean + 0.1 * math.exp(-3), math.exp(-2) / mean, -math.exp(-1) / mean]
    raw = [r - statistics.mean(raw) for r in raw]
    close(found, [raw[:2], [raw[2], 0]], atol=1e-5)


def test_sure_decisions_count_more(given):
    # As above without bonus and mean: e^-2 and e^-1 over the mean of the three; what does not count is left alone.
    table = Table([[-1.0, -1.0], [-1.0]], rewards=[2.0, 0.0], entropy=[[0.2, 1.0], [0.6]])
    mean = (1 + math.exp(-2) + math.exp(-1)) / 3
    found = shaped(given, table, "{type: entropy, sure: {k: 2}, bonus: null}")
    close(found, [[1 / mean, math.exp(-2) / mean], [-math.exp(-1) / mean, 0]], atol=1e-5)


def test_a_bonus_for_doubt_is_bounded_by_what_sureness_left(given):
    # 0.4 x 1.0 is above e^-2 / mean / 2, half of the second advantage; the first is 0.4 x 0.2, the third as the second.
    table = Table([[-1.0, -1.0], [-1.0]], rewards=[2.0, 0.0], entropy=[[0.2, 1.0], [0.6]])
    mean = (1 + math.exp(-2) + math.exp(-1)) / 3
    found = shaped(given, table, "{type: entropy, sure: {k: 2}}")
    left = [1 / mean, math.exp(-2) / mean, -math.exp(-1) / mean]
    close(found, [[left[0] + 0.08, 1.5 * left[1]], [left[2] + 0.24, 0]], atol=1e-5)


def test_entropies_that_do_nothing_are_refused(given):
    table = Table([[-1.0]] * 2, entropy=[[0.2], [0.6]])
    with pytest.raises(UserError, match="algorithm.shaping.0: sure and bonus are both null"):
        shaped(given, table, "{type: entropy, bonus: null}")


# --- self process ---


def test_self_process(given):
    # The policy has moved from the reference by 0.2, 0.4 and -0.6: sums 0.2, 0.6 and -0.6, times beta 0.5.
    # Place 0: 0.1 and -0.3 around -0.1; place 1: one rollout alone, nothing. Advantages 1 and -1.
    table = Table([[-1.0, -1.0], [-1.0]], rewards=[2.0, 0.0])
    options = ["algorithm.surrogate=reinforce", "algorithm.shaping=[{type: self_process, beta: 0.5}]"]
    made = given(table, *ONE, *options)
    made.move(logp=[[0.2, 0.4], [-0.6]])
    rollouts = made.prepare()
    close(rollouts.advantages.where(rollouts.mask, 0), [[1.2, 1.0], [-1.2, 0]])
    made.learn()
    close(made.gradient(), [[-0.4, -1 / 3], [0.4, 0]])


def test_self_process_adds_up_what_came_before(given):
    # 0.2 then 0.6 against -0.6 then -0.4: halves 0.1, 0.3, -0.3, -0.2 around -0.1 and 0.05.
    table = Table([[-1.0, -1.0], [-1.0, -1.0]], rewards=[2.0, 0.0])
    made = given(table, *ONE, "algorithm.shaping=[{type: self_process, beta: 0.5}]")
    made.move(logp=[[0.2, 0.4], [-0.6, 0.2]])
    close(made.prepare().advantages, [[1.2, 1.25], [-1.2, -1.25]])


# --- long wrong ---


def test_long_wrong(given):
    # Lengths 1 (right), 2 (right), 4 and 1 (wrong); the right ones have 1.5. Rewards around 1/2.
    # The long wrong one counts 2 - 2^-2.5 as much.
    table = Table([[-1.0], [-1.0] * 2, [-1.0] * 4, [-1.0]], rewards=[1.0, 1.0, 0.0, 0.0])
    found = shaped(given, table, "{type: long_wrong, base: 2}")
    close(found[:, 0], [0.5, 0.5, -0.5 * (2 - 2**-2.5), -0.5])


def test_a_group_without_a_right_answer_stays_as_it_is(given):
    table = Table([[-1.0], [-1.0] * 4], rewards=[0.4, 0.0])
    close(shaped(given, table, "{type: long_wrong, base: 2}")[:, 0], [0.2, -0.2])


# --- view information ---


def test_view_information(given):
    # Without its words the prompt makes the rollouts less likely by (1 + 2) / 2 and by 3, which counts as 2:
    # around 1.75. Advantages 1 and -1.
    table = Table([[-1.0, -1.0], [-1.0]], rewards=[2.0, 0.0], view=[[-2.0, -3.0], [-4.0]])
    found = shaped(given, table, "{type: view_information, weight: 0.2, bound: 2, view: {type: no_text}}")
    close(found, [[0.95, 0.95], [-0.95, 0]])


def test_information_is_compared_within_the_group(given):
    table = Table([[-1.0]] * 4, group=[0, 0, 1, 1], rewards=[0.0] * 4, view=[[-2.0], [-4.0], [-1.0], [-1.5]])
    shaper = "{type: view_information, weight: 1, view: {type: no_text}}"
    close(shaped(given, table, shaper, "rollout.prompts=2")[:, 0], [-1, 1, -0.25, 0.25])


def test_a_view_that_a_shaper_needs_gets_no_gradient(given):
    table = Table([[-1.0]] * 2, rewards=[2.0, 0.0], view=[[-2.0], [-4.0]])
    made = given(table, *ONE, "algorithm.shaping=[{type: view_information, view: {type: no_text}}]")
    made.prepare()
    made.learn()
    close(made.gradient("view"), torch.zeros(2, 1))


def test_words_are_needed_for_their_diversity():
    from mmrl.config import load
    from tests.joints.parts import GIVEN

    with pytest.raises(UserError, match="set_diversity.* needs responses that are text"):
        load(GIVEN, ["run_dir=x", "model={type: diffusion, path: x}", "task={type: image_generation}",
                     "algorithm.shaping=[set_diversity]"])  # fmt: skip


# --- shared prefix ---


def test_shared_prefix(given):
    # Of the first token 7 there are three, of 7 5 two, of 7 6 one; the fourth rollout shares nothing, and the second
    # group, though it says the same, is another one. Rewards 3, 1, 1, 3 around 2.
    table = Table(
        [[-1.0, -1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0], [-1.0], [-1.0], [-1.0], [-1.0], [-1.0]],
        group=[0, 0, 0, 0, 1, 1, 1, 1],
        rewards=[3.0, 1.0, 1.0, 3.0, 1.0, 1.0, 3.0, 3.0],
        numbers=[[7.0, 5.0, 4.0], [7.0, 5.0], [7.0, 6.0], [9.0], [7.0], [8.0], [6.0], [5.0]],
    )
    found = shaped(given, table, "shared_prefix", "rollout.prompts=2")
    expected = [[1 / 3, 1 / 2, 1], [-1 / 3, -1 / 2, 0], [-1 / 3, -1, 0], [1, 0, 0]]
    close(found, [*expected, [-1, 0, 0], [-1, 0, 0], [1, 0, 0], [1, 0, 0]])


def test_a_prefix_is_shared_from_the_first_token_on(given):
    table = Table([[-1.0, -1.0]] * 2, rewards=[3.0, 1.0], numbers=[[7.0, 5.0], [8.0, 5.0]])
    close(shaped(given, table, "shared_prefix"), [[1, 1], [-1, -1]])


# --- perplexity and position ---


def test_perplexity_weight(given):
    # log PPL 1, 2 and 3: z = -1, 0, 1. Rewards 3, 0, 0 less 1.
    table = Table([[-0.5, -1.5], [-2.0], [-3.0]], rewards=[3.0, 0.0, 0.0])
    found = shaped(given, table, "{type: perplexity_weight, alpha: 0.25}")
    close(found, [[2 * 1.25] * 2, [-1, 0], [-0.75, 0]], atol=5e-6)


def test_perplexity_is_compared_with_that_of_what_is_scored(given):
    # Of log PPL 1 and 2: z = -+ sqrt(1/2); the third, 9, is in no mean.
    table = Table([[-1.0], [-2.0], [-9.0]], rewards=[1.0, 0.0, math.nan])
    half = math.sqrt(0.5)
    close(
        shaped(given, table, "{type: perplexity_weight, alpha: 0.5}")[:, 0],
        [0.5 + half / 4, -0.5 + half / 4, 0],
        atol=5e-6,
    )


def test_position_bonus(given):
    table = Table([[-1.0] * 4, [-1.0] * 2], rewards=[2.0, 0.0])
    found = shaped(given, table, "{type: position_bonus, weight: 0.4}")
    close(found, [[1.1, 1.2, 1.3, 1.4], [-1.2, -1.4, 0, 0]])


def test_position_bonus_of_no_advantage(given):
    table = Table([[-1.0] * 2, [-1.0] * 2], rewards=[1.0, 1.0])
    close(shaped(given, table, "position_bonus"), [[0, 0], [0, 0]])
