"""PPO by hand: a critic, two episodes of two steps and one."""

import math

import pytest
import torch

from mmrl.config import load
from mmrl.errors import UserError
from mmrl.rollouts import Turns
from tests.joints.parts import GARBAGE, Table, close, steps

# gamma = lam = 1/2. Episode 0 earns 1 at its end: delta_1 = 1 - 0.4, A_1 = 0.6; delta_0 = 0.5 x 0.4 - 0.2 = 0, and so
# A_0 = 0 + 0.25 x 0.6. Episode 1 earns nothing: A = -0.1. Returns A + V: 0.35, 1 and 0.
PPO = "algorithm={type: ppo, gamma: 0.5, lam: 0.5"
VALUES = [[0.2, 0.4], [0.1]]
ADVANTAGES = [0.15, 0.6, -0.1]
MEAN = sum(ADVANTAGES) / 3
STD = math.sqrt(sum((a - MEAN) ** 2 for a in ADVANTAGES) / 2)
STANDARD = [(a - MEAN) / STD for a in ADVANTAGES]


def critic(given, options="", *, ends=(1.0, 1.0), bootstrap=(0.0, 0.0), rewards=((0.0, 0.0), (0.0,)), move=None):
    table = Table([[-1.0, -1.0], [-1.0]], group=[0, 1], rewards=[1.0, 0.0], value=VALUES)
    made = given(table, "rollout={prompts: 2}", f"{PPO}{options}}}")
    rollouts = table.rollouts()
    known = {"terminated": [[0.0, ends[0]], [ends[1]]], "bootstrap": [[0.0, bootstrap[0]], [bootstrap[1]]]}
    rollouts.extras["steps"] = steps(table, values=VALUES, rewards=[list(row) for row in rewards], **known)
    if move is not None:
        made.move(value=move)
    made.prepare(rollouts)
    return made, rollouts


def returns(rollouts):
    return rollouts.extras["steps"].returns.where(rollouts.mask, 0)


def test_advantages_and_returns(given):
    made, rollouts = critic(given)
    close(rollouts.advantages, [STANDARD[:2], [STANDARD[2], 0]], atol=1e-5)
    close(returns(rollouts), [[0.35, 1.0], [0.0, 0.0]])
    made.learn()
    close(made.gradient(), [[-STANDARD[0] / 3, -STANDARD[1] / 3], [-STANDARD[2] / 3, 0]], atol=1e-5)
    found = made.metrics.result()
    close(found["critic/value"], 0.7 / 3)
    close(found["critic/return"], 1.35 / 3)


@pytest.mark.parametrize("coefficient", [0.5, 2.0])
def test_the_critics_loss(given, coefficient):
    # (0.2 - 0.35)^2 + (0.4 - 1)^2 + 0.1^2 = 0.3925, over three steps; the surrogate's mean is 0.
    made, _ = critic(given, f", value_coefficient: {coefficient}")
    close(made.learn(), coefficient * 0.3925 / 3, atol=1e-5)
    slopes = [2 * coefficient * error / 3 for error in (-0.15, -0.6, 0.1)]
    close(made.gradient("value"), [slopes[:2], [slopes[2], 0]])
    close(made.metrics.result()["critic/error"], 0.3925 / 3)


def test_a_clipped_value(given):
    # The second value moved from 0.4 to 0.7, kept to 0.45: (0.45 - 1)^2 is worse than (0.7 - 1)^2, and has no gradient.
    made, _ = critic(given, ", value_clip: 0.05", move=[[0.0, 0.3], [0.0]])
    close(made.learn(), 0.5 * (0.0225 + 0.3025 + 0.01) / 3, atol=1e-5)
    close(made.gradient("value"), [[-0.05, 0], [0.1 / 3, 0]])


def test_a_decision_pays_for_its_divergence_in_the_reward(given):
    # Half of 0.2, -0.4 and 1: rewards -0.1, 1 + 0.2 and -0.5. A_1 = 0.8, A_0 = -0.1 + 0.2 - 0.2 + 0.25 x 0.8 = 0.1, and
    # of episode 1 -0.6. The critic is trained towards what is left of the reward.
    table = Table([[-1.0, -1.0], [-1.0]], group=[0, 1], rewards=[1.0, 0.0], value=VALUES)
    options = "reward_kl: {coefficient: 0.5}, standardise: minibatch"
    made = given(table, "rollout={prompts: 2}", f"{PPO}, {options}}}")
    made.move(logp=[[0.2, -0.4], [1.0]])
    rollouts = table.rollouts()
    rollouts.extras["steps"] = steps(table, values=VALUES, terminated=[[0.0, 1.0], [1.0]])
    made.prepare(rollouts)
    close(rollouts.advantages.where(rollouts.mask, 0), [[0.1, 0.8], [-0.6, 0.0]])
    close(returns(rollouts), [[0.3, 1.2], [-0.5, 0.0]])
    made.learn()
    close(made.metrics.result()["reward_kl"], 0.8 / 3)


def test_a_step_pays_the_penalties_of_all_its_decisions(given):
    # Two decisions a step, of 0.4 - 0.2, -0.3 - 0.1 and 0.6 + 0.4: the sums, and so all else, are those above.
    table = Table([[-1.0] * 4, [-1.0] * 2], group=[0, 1], rewards=[1.0, 0.0], value=[[0.2, 0.4], [0.1]])
    by_step = Table([[-1.0, -1.0], [-1.0]])
    made = given(table, "rollout={prompts: 2}", f"{PPO}, reward_kl: {{coefficient: 0.5}}, standardise: minibatch}}")
    made.move(logp=[[0.4, -0.2, -0.3, -0.1], [0.6, 0.4]])
    rollouts = table.rollouts()
    rollouts.extras["steps"] = steps(by_step, values=VALUES, terminated=[[0.0, 1.0], [1.0]])
    made.prepare(rollouts)
    close(rollouts.advantages.where(rollouts.mask, 0), [[0.1, 0.1, 0.8, 0.8], [-0.6, -0.6, 0, 0]])
    close(rollouts.extras["steps"].returns, [[0.3, 1.2], [-0.5, 0.0]])


def test_the_simulators_own_reward(given):
    # 0.1 x 1 and 0.1 x 2 more: A_0 = 0.1 + 0.15, A of episode 1 = 0.2 - 0.1.
    _, rollouts = critic(given, ", simulator_reward: 0.1", rewards=((1.0, 0.0), (2.0,)))
    close(returns(rollouts), [[0.25 + 0.2, 1.0], [0.2, 0.0]])


def test_by_default_the_simulators_reward_weighs_nothing(given):
    _, rollouts = critic(given, rewards=((1.0, 0.0), (2.0,)))
    close(returns(rollouts), [[0.35, 1.0], [0.0, 0.0]])


def test_an_episode_that_the_limit_cut_goes_on_in_the_critics_word(given):
    # Episode 0: delta_1 = 1 + 0.5 x 0.8 - 0.4 = 1, A_0 = 0.25. Episode 1: delta = 0.5 x 0.6 - 0.1.
    _, rollouts = critic(given, ends=(0.0, 0.0), bootstrap=(0.8, 0.6))
    close(returns(rollouts), [[0.45, 1.4], [0.3, 0.0]])


def test_steps_of_all_ranks_are_standardised_together(given):
    """Two equal ranks have the same mean; the unbiased std of six numbers is another than that of three."""
    table = Table([[-1.0, -1.0], [-1.0]], group=[0, 1], rewards=[1.0, 0.0], value=VALUES)
    made = given(table, "rollout={prompts: 2}", f"{PPO}}}", world=2, rank=1)
    rollouts = table.rollouts()
    rollouts.extras["steps"] = steps(table, values=VALUES, terminated=[[0.0, 1.0], [1.0]])
    made.prepare(rollouts)
    wide = [a * math.sqrt(5 / 4) for a in STANDARD]  # 2 / 3 x 2 of the squares, over 5 in the place of 2
    close(rollouts.advantages, [wide[:2], [wide[2], 0]], atol=1e-5)


def test_micro_batches_share_the_denominator_of_steps(given):
    table = Table([[-1.0, -1.0], [-1.0]], group=[0, 1], rewards=[1.0, 0.0], value=VALUES)
    made = given(table, "rollout={prompts: 2}", f"{PPO}}}", "engine.micro_batch=1")
    rollouts = table.rollouts()
    rollouts.extras["steps"] = steps(table, values=VALUES, terminated=[[0.0, 1.0], [1.0]])
    made.prepare(rollouts)
    close(made.learn(), 0.5 * 0.3925 / 3, atol=1e-5)


def test_a_finite_horizon_divides_by_the_weights_that_there_are(given):
    # Episode 0, step 0: over one step 0.5 x 0.4 - 0.2 = 0, over two 0.25 x 0 + 0.5 x 1 - 0.2 = 0.3; weighted 1 and 0.5:
    # 0.1. The last steps have one estimate each.
    _, rollouts = critic(given, ", horizon: finite")
    close(returns(rollouts), [[0.3, 1.0], [0.0, 0.0]])
    # Cut with 0.8 to come: over two steps 0.5 + 0.25 x 0.8 - 0.2 = 0.5, so A_0 = 0.5 x 0.5 / 1.5.
    _, rollouts = critic(given, ", horizon: finite", ends=(0.0, 0.0), bootstrap=(0.8, 0.6))
    close(returns(rollouts), [[0.2 + 0.25 / 1.5, 1.4], [0.3, 0.0]])


def test_every_end_may_be_one_that_the_critic_looks_behind(given):
    """As if the limit had cut them."""
    _, rollouts = critic(given, ", bootstrap: every_end", bootstrap=(0.8, 0.6))
    close(returns(rollouts), [[0.45, 1.4], [0.3, 0.0]])
    _, rollouts = critic(given, bootstrap=(0.8, 0.6))  # by default an end is an end
    close(returns(rollouts), [[0.35, 1.0], [0.0, 0.0]])


def test_advantages_of_a_minibatch_are_standardised_alone(given):
    """One has 0.15 and 0.6, whose mean is 0.375 and whose std is 0.225 x sqrt(2); the other a single advantage."""
    made, _ = critic(given, ", standardise: minibatch, minibatches: 2")
    found = sorted((part[0].advantages[part[0].mask].tolist() for part in made.minibatches), key=len)
    close(found[0], [0.0])
    close(found[1], [-1 / math.sqrt(2), 1 / math.sqrt(2)], atol=1e-5)


def test_micro_batches_and_ranks_of_a_minibatch_are_standardised_together(given):
    table = Table([[-1.0, -1.0], [-1.0]], group=[0, 1], rewards=[1.0, 0.0], value=VALUES)
    options = ("rollout={prompts: 2}", f"{PPO}, standardise: minibatch}}", "engine.micro_batch=1")
    for world, wide in ((1, 1.0), (2, math.sqrt(5 / 4))):  # as in the test of all ranks above
        made = given(table, *options, world=world, rank=world - 1)
        rollouts = table.rollouts()
        rollouts.extras["steps"] = steps(table, values=VALUES, terminated=[[0.0, 1.0], [1.0]])
        made.prepare(rollouts)
        (parts,) = made.minibatches
        found = sorted((part.advantages[part.mask].tolist() for part in parts), key=len)
        close(found[1], [wide * a for a in STANDARD[:2]], atol=1e-5)
        close(found[0], [wide * STANDARD[2]], atol=1e-5)


def test_a_step_ends_where_the_policy_has_gone_far_enough(given):
    """r - 1 - log r of a log-ratio of 0.2 is 0.0214; over two decisions at 0.2 and one at 0 it is 0.0143 on average."""
    far = 2 * (math.exp(0.2) - 1.2) / 3
    for limit, stops in ((far + 1e-4, False), (far - 1e-4, True)):
        made, _ = critic(given, f", epochs: 3, target_kl: {limit}")
        made.move(logp=[[0.2, 0.2], [0.0]])  # the policy is another one now than that which made the rollouts
        with torch.no_grad():
            made.module.logp[1, 1] = 0.5  # where no decision counts
        means = made.trainer.update(made.minibatches[0], made.metrics)
        close(means["surrogate/old_kl"], far, atol=1e-5)
        assert made.trainer.algorithm.ends_epochs(means) == stops
        assert made.trainer.engine.losses and made.metrics.result()["updates"] == 1


@pytest.mark.parametrize("rows", [1, 2])
def test_how_far_the_policy_has_gone_is_the_mean_over_all_micro_batches(given, rows):
    """Row 0 alone would be further on average, row 1 alone not at all."""
    table = Table([[-1.0, -1.0], [-1.0]], group=[0, 1], rewards=[1.0, 0.0], value=VALUES)
    made = given(table, "rollout={prompts: 2}", f"{PPO}, epochs: 3, target_kl: 1.0}}", f"engine.micro_batch={rows}")
    rollouts = table.rollouts()
    rollouts.extras["steps"] = steps(table, values=VALUES, terminated=[[0.0, 1.0], [1.0]])
    made.prepare(rollouts)
    made.move(logp=[[0.2, 0.2], [0.0]])
    assert len(made.minibatches[0]) == 2 // rows
    close(made.trainer.update(made.minibatches[0], made.metrics)["surrogate/old_kl"], 2 * (math.exp(0.2) - 1.2) / 3)


def test_the_loop_ends_a_step_early(given):
    """Its updates are far: with a learning rate of 1 the second one sees how far the first one went."""
    table = Table([[-1.0, -1.0], [-1.0]], group=[0, 1], rewards=[1.0, 0.0], value=VALUES)
    for limit, updates in ((1e-3, 2), (1e3, 4)):
        made = given(table, "rollout={prompts: 2}", f"{PPO}, epochs: 4, target_kl: {limit}}}", "steps=1")
        rollouts = table.rollouts()
        rollouts.extras["steps"] = steps(table, values=VALUES, terminated=[[0.0, 1.0], [1.0]])
        made.trainer.collector.next = lambda step, metrics, given=rollouts: given
        made.trainer.loop()
        assert len(made.trainer.engine.losses) == updates and made.trainer.run.rows[0]["updates"] == updates


def test_single_steps_are_for_policies_that_have_them(given):
    with pytest.raises(UserError, match="needs steps of an episode that can be learned from one by one"):
        critic(given, ", shuffle: steps")


# --- responses: every token is a step, and the critic is asked before the updates ---


def response(given, algorithm, *options, **moved):
    table = Table([[-1.0, -1.0], [-1.0]], group=[0, 1], rewards=[1.0, 0.0], value=VALUES)
    made = given(table, "rollout={prompts: 2}", algorithm, *options)
    made.move(**moved)
    rollouts = table.rollouts()
    made.prepare(rollouts)
    return made, rollouts


def test_a_critic_that_did_not_speak_is_asked(given):
    """It gives the numbers of the first test, whatever it says once it has learned."""
    made, rollouts = response(given, f"{PPO}}}")
    close(rollouts.advantages, [STANDARD[:2], [STANDARD[2], 0]], atol=1e-5)
    close(returns(rollouts), [[0.35, 1.0], [0.0, 0.0]])
    close(made.learn(), 0.5 * 0.3925 / 3, atol=1e-5)
    close(made.gradient(), [[-STANDARD[0] / 3, -STANDARD[1] / 3], [-STANDARD[2] / 3, 0]], atol=1e-5)
    made.close()
    made, rollouts = response(given, f"{PPO}}}", value=[[0.0, 0.2], [0.0]])  # 0.2 and 0.6 now
    close(returns(rollouts)[0], [0.2 + (0.5 * 0.6 - 0.2) + 0.25 * 0.4, 1.0])


DECOUPLED = "gamma: 1, value_lam: 1, lam: {type: by_length, scale: %s}"
# gamma = 1: delta_1 = 1 - 0.4 and delta_0 = 0.4 - 0.2; A_0 = 0.2 + lam x 0.6.
LAMBDAS = [
    (DECOUPLED % 1, [0.5, 0.6, -0.1], [1.0, 1.0, 0.0]),  # two steps: lam = 1/2; one step: 0
    (DECOUPLED % 2, [0.65, 0.6, -0.1], [1.0, 1.0, 0.0]),  # 3/4; 1/2
    ("gamma: 1, value_lam: 1, lam: by_length", [0.2, 0.6, -0.1], [1.0, 1.0, 0.0]),  # scale 0.05: below 0 is 0
    ("gamma: 1, value_lam: 1, lam: 0.25", [0.35, 0.6, -0.1], [1.0, 1.0, 0.0]),
    ("gamma: 1, value_lam: 0.5, lam: {type: by_length, scale: 1}", [0.5, 0.6, -0.1], [0.7, 1.0, 0.0]),
    ("gamma: 1, value_lam: 0, lam: {type: by_length, scale: 1}", [0.5, 0.6, -0.1], [0.4, 1.0, 0.0]),  # the next value
    ("gamma: 1, lam: {type: by_length, scale: 2}", [0.65, 0.6, -0.1], [0.85, 1.0, 0.0]),  # targets by the same lambdas
    # delta_0 = 0; 0.5 x 0.5 x 0.6
    ("gamma: 0.5, value_lam: 1, lam: {type: by_length, scale: 1}", [0.15, 0.6, -0.1], [0.5, 1.0, 0.0]),
]


@pytest.mark.parametrize(("options", "advantages", "targets"), LAMBDAS)
def test_policy_and_critic_look_ahead_differently_far(given, options, advantages, targets):
    _, rollouts = response(given, f"algorithm={{type: ppo, {options}}}")
    found = torch.tensor(advantages)
    standard = ((found - found.mean()) / found.std()).tolist()
    close(rollouts.advantages, [standard[:2], [standard[2], 0]], atol=1e-4)
    close(returns(rollouts), [targets[:2], [targets[2], 0]])


def test_lambda_is_of_each_rollouts_own_length(given):
    """The critic says 0, and the end earns 1: advantages are powers of lambda, 2/3 for three steps and 1/2 for two."""
    table = Table([[-1.0] * 3, [-1.0] * 2], group=[0, 1], rewards=[1.0, 1.0], value=[[0.0] * 3, [0.0] * 2])
    made = given(table, "rollout={prompts: 2}", f"algorithm={{type: ppo, {DECOUPLED % 1}}}")
    rollouts = table.rollouts()
    made.prepare(rollouts)
    found = torch.tensor([4 / 9, 2 / 3, 1.0, 1 / 2, 1.0])
    close(rollouts.advantages[rollouts.mask], (found - found.mean()) / found.std(), atol=1e-4)


# --- unscored rollouts ---

NAN = math.nan
# gamma = lam = 1: advantages r - V of one step each are 0.6 and -0.2, whose mean is 0.2 and whose std is 0.8 / sqrt(2).
APART = [1 / math.sqrt(2), -1 / math.sqrt(2)]


def unscored(given, options="", rewards=(1.0, NAN, 0.0), *, simulated=False):
    values = [[0.4], [0.9], [0.2]]
    table = Table([[-1.0]] * 3, group=[0, 1, 2], rewards=list(rewards), value=values)
    made = given(table, "rollout={prompts: 3}", f"algorithm={{type: ppo, gamma: 1{options or ', lam: 1'}}}")
    rollouts = table.rollouts()
    if simulated:  # a simulator's episodes bring the values of their steps
        rollouts.extras["steps"] = steps(table, values=values, terminated=[[1.0]] * 3)
    made.prepare(rollouts)
    return made, rollouts


def test_an_unscored_rollout_has_no_advantage_and_is_no_target(given):
    """Its value of 0.9 stays as it is: no reward of 0 pulls at it, and the others are standardised without it."""
    made, rollouts = unscored(given)
    close(rollouts.advantages[:, 0], [APART[0], 0.0, APART[1]], atol=1e-5)
    close(made.learn(), 0.5 * (0.36 + 0.04) / 2, atol=1e-5)
    close(made.gradient("value")[:, 0], [0.5 * -0.6, 0.0, 0.5 * 0.2])
    close(made.gradient()[:, 0], [-APART[0] / 3, 0.0, -APART[1] / 3], atol=1e-5)
    found = made.metrics.result()
    close([found["critic/value"], found["critic/return"], found["critic/error"]], [0.3, 0.5, 0.2])


@pytest.mark.parametrize("options", [", lam: 0.5, standardise: minibatch", ", lam: {type: by_length}, value_lam: 1"])
def test_other_estimates_leave_it_out_as_well(given, options):
    """Over one step every lambda gives the same."""
    made, _ = unscored(given, options)
    made.learn()
    close(made.gradient()[:, 0], [-APART[0] / 3, 0.0, -APART[1] / 3], atol=1e-5)
    close(made.gradient("value")[:, 0], [0.5 * -0.6, 0.0, 0.5 * 0.2])


def test_a_step_without_a_score_changes_nothing(given):
    made, rollouts = unscored(given, rewards=(NAN, NAN, NAN))
    assert not rollouts.advantages.any()
    made.learn()
    assert not made.gradient().any() and not made.gradient("value").any()
    assert not {"critic/value", "critic/return"} & made.metrics.result().keys()


def test_an_episode_that_a_mask_excludes_is_no_target(given):
    options = ", lam: 1, masks: [{type: band, fact: reward/mark, low: 0.5}]"
    made, _ = unscored(given, options, (1.0, 0.3, 1.0), simulated=True)
    made.learn()
    close(made.gradient("value")[:, 0], [0.5 * -0.6, 0.0, 0.5 * -0.8])


# --- turns ---

# Conversation 0: two tokens in turn 0, which its environment pays 1, an observation, a token in turn 1; its outcome is
# 1. Conversation 1: a token that earns nothing.
TALK = [[0.2, 0.3, GARBAGE, 0.4], [0.1]]


def talked(given, options, turn_rewards=((1.0, 0.0), (0.0, GARBAGE)), number=((0, 0, 0, 1), (0, 0, 0, 0))):
    logp = [[-1.0] * 4, [-1.0]]
    table = Table(logp, group=[0, 1], rewards=[1.0, 0.0], value=TALK)
    made = given(table, "rollout={prompts: 2}", f"{PPO}, standardise: minibatch, simulator_reward: 1{options}}}")
    rollouts = table.rollouts()
    rollouts.mask = torch.tensor([[True, True, False, True], [True, False, False, False]])
    reached = torch.tensor([[True, True], [True, False]])
    rollouts.extras["turns"] = Turns(torch.tensor(number), reached, torch.tensor(turn_rewards))
    made.prepare(rollouts)
    return made, rollouts


def test_a_turn_is_a_time_step(given):
    """V = 0.2, 0.4; A_1 = 1 - 0.4 = 0.6, A_0 = 1 + 0.5 x 0.4 - 0.2 + 0.25 x 0.6 = 1.15; both tokens of a turn have its
    advantage. Only the first token of a turn has a value to learn."""
    made, rollouts = talked(given, ", time_step: turn")
    close(rollouts.advantages.where(rollouts.mask, 0), [[1.15, 1.15, 0, 0.6], [-0.1, 0, 0, 0]])
    close(rollouts.extras["steps"].returns, [[1.35, 1.0], [0.0, 0.0]])
    made.learn()
    close(made.gradient("value"), [[-1.15 / 3, 0, 0, -0.6 / 3], [0.1 / 3, 0, 0, 0]])
    found = made.metrics.result()
    close(found["critic/value"], 0.7 / 3)
    close(found["critic/error"], (1.15**2 + 0.6**2 + 0.1**2) / 3)


def test_tokens_of_conversations_are_time_steps_across_observations(given):
    """V = 0.2, 0.3, 0.4, the turn's reward is of its second token: A_2 = 0.6, A_1 = 1 + 0.2 - 0.3 + 0.25 x 0.6 = 1.05,
    A_0 = 0.15 - 0.2 + 0.25 x 1.05."""
    made, rollouts = talked(given, "")
    close(rollouts.advantages.where(rollouts.mask, 0), [[0.2125, 1.05, 0, 0.6], [-0.1, 0, 0, 0]])
    made.learn()
    close(made.gradient("value"), [[-0.2125 / 4, -1.05 / 4, 0, -0.6 / 4], [0.1 / 4, 0, 0, 0]])


def test_advantages_of_turns_weigh_by_their_tokens_in_the_standardisation_of_a_minibatch(given):
    made, _ = talked(given, ", time_step: turn")
    counted = torch.tensor([1.15, 1.15, 0.6, -0.1])
    want = (counted - counted.mean()) / counted.std()
    made.learn()
    close(made.gradient(), [[-want[0] / 4, -want[1] / 4, 0, -want[2] / 4], [-want[3] / 4, 0, 0, 0]], atol=1e-5)


def test_divergence_is_paid_by_turns(given):
    """0.5 x (0.2 - 0.4) and 0.5 x 0.6: rewards 1.1 and 0.7, A_1 = 0.3, A_0 = 1.1 + 0.2 - 0.2 + 0.25 x 0.3."""
    logp = [[-1.0] * 4, [-1.0]]
    table = Table(logp, group=[0, 1], rewards=[1.0, 0.0], value=TALK)
    options = "standardise: minibatch, simulator_reward: 1, time_step: turn, reward_kl: {coefficient: 0.5}"
    made = given(table, "rollout={prompts: 2}", f"{PPO}, {options}}}")
    made.move(logp=[[0.2, -0.4, 9.0, 0.6], [0.0]])
    rollouts = table.rollouts()
    rollouts.mask = torch.tensor([[True, True, False, True], [True, False, False, False]])
    number = torch.tensor([[0, 0, 0, 1], [0, 0, 0, 0]])
    rewards = torch.tensor([[1.0, 0.0], [0.0, GARBAGE]])
    rollouts.extras["turns"] = Turns(number, torch.tensor([[True, True], [True, False]]), rewards)
    made.prepare(rollouts)
    close(rollouts.advantages.where(rollouts.mask, 0), [[1.175, 1.175, 0, 0.3], [-0.1, 0, 0, 0]])


def test_turns_are_time_steps_of_conversations_alone():
    with pytest.raises(UserError, match="needs turns of a conversation"):
        load("configs/vlm/visual_qa_digits.yaml", ["algorithm={type: ppo, time_step: turn}"])
