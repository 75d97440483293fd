"""Every loss term, advantage shaper and mask from its key to the number."""

import math

import pytest
import torch

from mmrl.errors import UserError
from mmrl.preflight.quick import probe_quickly
from mmrl.rollouts import OBJECTIVE, DecisionColumn
from mmrl.terms.term import Term
from tests.joints.parts import Table, close

ONE = ["rollout.prompts=1", "algorithm.scale=none"]


def still(given, table, *overrides):
    """Rewards are equal, so advantages are 0 and the loss is that of the term alone."""
    return given(table, *ONE, *overrides)


# --- terms ---


def moved_from_reference(given, term, **columns):
    """d = logp - ref_logp = 0.5, -0.5 and 1."""
    made = still(given, Table([[-1.0, -2.0], [-3.0]], **columns), f"algorithm.terms=[{{type: kl, {term}}}]")
    made.move(logp=[[0.5, -0.5], [1.0]])  # the reference is what the run started from
    rollouts = made.prepare()
    close(rollouts.ref_logp.where(rollouts.mask, 0), [[-1.0, -2.0], [-3.0, 0.0]])
    return made


class Anchor(Term):
    """A term of a user, whose `needs` forget the reference that it reads."""

    def values(self, micro, replay):
        return replay.logp - micro.ref_logp, {}


def test_a_column_that_a_term_did_not_ask_for_is_told_with_the_columns_there(given):
    made = still(given, Table([[-1.0, -2.0], [-3.0]]), "algorithm.terms=['tests.joints.test_terms:Anchor']")
    made.prepare()
    with pytest.raises(TypeError) as caught:
        made.learn()
    (note,) = caught.value.__notes__
    assert note.startswith("raised in algorithm.terms.0 (tests.joints.test_terms:Anchor). micro has samples, ")
    assert "replay has logp" in note and "Needs(reference=Reference()) gives ref_logp, " in note


def test_the_reference_is_asked_as_the_reference(given):
    """A policy may have to leave out what belongs to the rollouts' own policy, such as its choice of experts."""
    made = still(given, Table([[-1.0, -2.0], [-3.0]]), "algorithm.terms=[kl]", "algorithm.epochs=2")
    policy, told = made.trainer.policy, []
    replay = policy.replay

    def told_replay(rollouts, model, *, reference=False):
        told.append(reference)
        return replay(rollouts, model, reference=reference)

    policy.replay = told_replay
    made.prepare()
    made.learn()
    assert told == [False, True, False]  # the old policy's word, the reference's, and the update's


ESTIMATORS = [
    ("k1", 0.5 - 0.5 + 1, [1, 1, 1]),
    ("k2", (0.25 + 0.25 + 1) / 2, [0.5, -0.5, 1]),
    ("k3", 0.106531 + 0.148721 + 0.367879, [0.393469, -0.648721, 0.632121]),  # exp(-d) - 1 + d; 1 - exp(-d)
]


@pytest.mark.parametrize(("estimator", "total", "slopes"), ESTIMATORS)
def test_kl(given, estimator, total, slopes):
    made = moved_from_reference(given, f"estimator: {estimator}, coefficient: 0.3")
    close(made.learn(), 0.3 * total / 3)
    close(made.gradient(), [[0.1 * slopes[0], 0.1 * slopes[1]], [0.1 * slopes[2], 0]])
    close(made.metrics.result()["kl"], total / 3)


def test_kl_is_by_default_k3_with_a_coefficient_of_a_hundredth(given):
    made = moved_from_reference(given, "against: {reset_every: null}")
    close(made.learn(), 0.01 * 0.623131 / 3)


@pytest.mark.parametrize(("estimator", "value", "slope"), [("exact", 0.25 / 0.5, 0.5 / 0.25), ("velocity", 0.25, 1.0)])
def test_kl_of_denoising_steps(given, estimator, value, slope):
    """The mean moved by 0.5 from the reference, at a std of 0.5."""
    table = Table([[-1.0], [-1.0]], prediction=[[0.3], [0.7]], std=[[0.5], [0.5]])
    made = still(given, table, f"algorithm.terms=[{{type: kl, estimator: {estimator}, coefficient: 0.2}}]")
    made.move(prediction=[[0.5], [-0.5]])
    made.prepare()
    close(made.learn(), 0.2 * value)
    close(made.gradient("prediction"), [[0.2 * slope / 2], [-0.2 * slope / 2]])
    close(made.gradient(), [[0.0], [0.0]])


def test_entropy(given):
    """A bonus: loss -0.3 H."""
    table = Table([[-1.0, -2.0], [-3.0]], entropy=[[1.0, 2.0], [4.0]])
    made = still(given, table, "algorithm.terms=[{type: entropy, coefficient: 0.3}]")
    made.prepare()
    close(made.learn(), -0.3 * 7 / 3)
    close(made.gradient("entropy"), [[-0.1, -0.1], [-0.1, 0]])
    close(made.gradient(), torch.zeros(2, 2))
    close(made.metrics.result()["entropy"], 7 / 3)


def test_likelihood_of_positive_rollouts(given):
    # Advantages 1 and -1. Surrogate: -1, -1 and 1. Term: 0.3 x (1 + 2) of the good rollout alone.
    table = Table([[-1.0, -2.0], [-3.0]], rewards=[2.0, 0.0])
    made = given(table, *ONE, "algorithm.terms=[{type: likelihood, of: positive, coefficient: 0.3}]")
    made.prepare()
    close(made.learn(), (-1 + 0.9) / 3)
    close(made.gradient(), [[-1.3 / 3, -1.3 / 3], [1 / 3, 0]])


def test_terms_of_one_kind_have_metrics_of_their_own(given):
    # Of the good rollout -1 and -2, of all -1, -2 and -3.
    table = Table([[-1.0, -2.0], [-3.0]], rewards=[2.0, 0.0])
    terms = "algorithm.terms=[{type: likelihood, of: positive}, {type: likelihood, of: all}]"
    made = given(table, *ONE, terms)
    made.prepare()
    made.learn()
    values = made.metrics.result()
    close(values["likelihood"], -1.5)
    close(values["likelihood/1"], -2.0)


@pytest.mark.parametrize(("of", "source"), [("demonstrations", "demonstrations"), ("replayed", "stored_steps")])
@pytest.mark.parametrize("extras", ["[]", "[{type: extra_rollouts, count: 1}]"])
def test_likelihood_of_rollouts_that_no_source_makes_is_refused(given, of, source, extras):
    table = Table([[-1.0, -2.0], [-3.0]])
    message = rf"algorithm.terms.0 \(likelihood\) learns from .* no source of such rollouts; add one of .*{source}"
    with pytest.raises(UserError, match=message):
        given(table, f"algorithm.terms=[{{type: likelihood, of: {of}}}]", f"rollout.extras={extras}")


def test_kl_against_a_view(given):
    """With `gradient` both forwards get one, of opposite signs; none where the divergence is past the bound."""
    # d = 0.5, -0.5, 2: k3 0.106531, 0.148721, 1.135335, the last at most 1.
    table = Table([[-1.0, -1.0], [-1.0]], view=[[-1.5, -0.5], [-3.0]])
    for gradient in (1, 0):
        against = f"against: {{type: view, bound: 1, view: {{type: no_text}}, gradient: {bool(gradient)}}}"
        made = still(given, table, f"algorithm.terms=[{{type: kl, {against}, coefficient: 0.3}}]")
        made.prepare()
        close(made.learn(), -0.1 * (0.106531 + 0.148721 + 1))
        close(made.gradient(), [[-0.1 * 0.393469, 0.1 * 0.648721], [0, 0]])
        close(made.gradient("view"), [[gradient * 0.1 * 0.393469, -gradient * 0.1 * 0.648721], [0, 0]])
    close(made.metrics.result()["view_kl"], (0.106531 + 0.148721 + 1.135335) / 3)  # before the bound


def test_likelihoods_under_a_view_are_by_default_those_of_the_policy_that_sampled(given):
    """As in the released code of PAPO: what moves under the view in a step's updates is not looked at again."""
    table = Table([[-1.0]], view=[[-1.5]])
    for gradient, apart in (("", 0.5), (", gradient: true", 0.3)):
        term = (
            f"{{type: kl, against: {{type: view, view: {{type: no_text}}{gradient}}}, coefficient: 1, estimator: k1}}"
        )
        made = still(given, table, f"algorithm.terms=[{term}]", "algorithm.epochs=2", "algorithm.baseline=none",
                     "rollout.group_size=1")  # fmt: skip
        made.prepare()
        made.move(view=[[0.2]])
        close(made.learn(), -apart)


K1 = "estimator=k1 has an expected gradient of 0 in a loss"


@pytest.mark.parametrize(
    ("term", "told"),
    [
        ("{type: kl, estimator: k1}", True),
        ("{type: kl, estimator: k1, against: ema}", True),
        ("{type: of_part, part: text, term: {type: kl, estimator: k1}}", True),
        ("{type: kl, estimator: k1, weighting: difficulty}", False),
        ("kl", False),
        ("{type: kl, estimator: k2}", False),
    ],
)
def test_k1_in_the_loss_is_told_before_the_start(given, term, told):
    """Over the policy's own samples E[grad logp] is 0: there is no gradient that could hold it near the reference."""
    made = given(Table([[-1.0], [-1.0]]), f"algorithm.terms=[{term}]")
    trainer = made.trainer
    remarks = [alarm.text for alarm in probe_quickly(trainer.config, trainer.task)]
    assert len(remarks) == told
    assert all(text.startswith("algorithm.terms.0 (") and K1 in text for text in remarks)


def test_terms_add_up_with_the_surrogate(given):
    table = Table([[-1.0], [-1.0]], rewards=[2.0, 0.0], entropy=[[3.0], [3.0]])
    terms = "[{type: kl, estimator: k1, coefficient: 0.1}, {type: entropy, coefficient: 0.2}]"
    made = given(table, *ONE, f"algorithm.terms={terms}")
    made.move(logp=[[0.5], [1.0]])
    made.prepare()
    close(made.learn(), 0.0 + 0.1 * 0.75 - 0.2 * 3)
    close(made.gradient(), [[(-1 + 0.1) / 2], [(1 + 0.1) / 2]])


def test_a_term_is_reduced_as_the_loss_is(given):
    table = Table([[-1.0, -2.0, -1.0], [-3.0]], entropy=[[1.0, 2.0, 3.0], [4.0]])
    made = still(given, table, "algorithm.terms=[{type: entropy, coefficient: 1}]", "algorithm.reduce=sequence_mean")
    made.prepare()
    close(made.learn(), -(2 + 4) / 2)


# --- shapers ---


def shaped(given, table, shaper, *overrides):
    made = given(table, *ONE, "algorithm.surrogate=reinforce", f"algorithm.shaping=[{shaper}]", *overrides)
    return made, made.prepare()


def test_advantages_gain_by_entropy(given):
    # A = 1, -1; A + min(0.4 H, |A| / 2): min(0.4, 0.5), min(0.8, 0.5), min(1.2, 0.5).
    table = Table([[-1.0, -2.0], [-3.0]], rewards=[2.0, 0.0], entropy=[[1.0, 2.0], [3.0]])
    made, rollouts = shaped(given, table, "entropy")
    close(rollouts.advantages.where(rollouts.mask, 0), [[1.4, 1.5], [-0.5, 0]])
    close(made.learn(), (-1.4 - 1.5 + 0.5) / 3)
    close(made.gradient(), [[-1.4 / 3, -1.5 / 3], [0.5 / 3, 0]])
    close(made.gradient("entropy"), torch.zeros(2, 2))


def test_the_options_of_a_bonus_for_doubt(given):
    # alpha 0.1, kappa 4: min(0.1, 0.25), min(0.2, 0.25), min(0.3, 0.25).
    table = Table([[-1.0, -2.0], [-3.0]], rewards=[2.0, 0.0], entropy=[[1.0, 2.0], [3.0]])
    _, rollouts = shaped(given, table, "{type: entropy, bonus: {alpha: 0.1, kappa: 4}}")
    close(rollouts.advantages.where(rollouts.mask, 0), [[1.1, 1.2], [-0.75, 0]])


def test_token_baseline(given):
    # Weights of the first two rollouts: 1 - 2 x 0.5 + 0.5 = 0.5, then 0.5 + 1 - 1 + 0.25 = 0.75; 1 - 0.5 + 0.5 = 1.
    # Token 0: baseline (0.5 x 1 + 1 x 0) / 1.5 = 1/3. Token 1 has one rollout: its own reward is the baseline.
    # The second group is the same with rewards 0 and 4: baseline (0.5 x 0 + 1 x 4) / 1.5 = 8/3.
    half, quarter = math.log(0.5), math.log(0.25)
    table = Table(
        [[half, half], [quarter], [half, half], [quarter]],
        group=[0, 0, 1, 1],
        rewards=[1.0, 0.0, 0.0, 4.0],
        square_sum=[[0.5, 0.25], [0.5]] * 2,
    )
    made, rollouts = shaped(given, table, "token_baseline", "algorithm.baseline=none", "rollout.prompts=2")
    close(rollouts.advantages, [[2 / 3, 0], [-1 / 3, 0], [-8 / 3, 0], [4 / 3, 0]])
    close(made.learn(), -(2 / 3 - 1 / 3 - 8 / 3 + 4 / 3) / 6)
    close(made.gradient()[:, 0], torch.tensor([-2, 1, 8, -4]) / 18)


def test_token_baseline_weighs_by_all_tokens_so_far(given):
    # Weights 0.5, 0.5 + 0.25 and 1, 1 + 1: at the second token the baseline is 0.75 x 1 / 2.75.
    half, quarter = math.log(0.5), math.log(0.25)
    table = Table([[half, half], [quarter, quarter]], rewards=[1.0, 0.0], square_sum=[[0.5, 0.25], [0.5, 0.5]])
    _, rollouts = shaped(given, table, "token_baseline", "algorithm.baseline=none")
    close(rollouts.advantages, [[2 / 3, 2 / 2.75], [-1 / 3, -0.75 / 2.75]])


def test_an_unscored_rollout_is_in_no_token_baseline(given):
    # Weights 0.5 and 1 of rewards 1 and 0: the baseline is 1/3. With a reward of 0 the third would make it 0.5 / 2.5.
    half, quarter = math.log(0.5), math.log(0.25)
    table = Table([[half], [quarter], [quarter]], rewards=[1.0, 0.0, math.nan], square_sum=[[0.5]] * 3)
    options = ["algorithm.baseline=none", "rollout.group_size=3"]
    _, rollouts = shaped(given, table, "token_baseline", *options)
    close(rollouts.advantages[:, 0], [2 / 3, -1 / 3, 0.0])


# --- masks ---


def test_truncated_rollouts_leave_the_loss_and_the_statistics(given):
    # Of the rewards 3 and 1 alone: advantages 1 and -1, over three decisions.
    table = Table([[-1.0, -1.0], [-1.0], [-1.0, -1.0]], rewards=[3.0, 1.0, 100.0], truncated=[False, False, True])
    made = given(table, *ONE, "rollout.group_size=3", "algorithm.masks=[truncated]")
    rollouts = made.prepare()
    close(rollouts.advantages[:, 0], [1.0, -1.0, 0.0])
    close(made.learn(), (-2 + 1) / 3)
    close(made.gradient(), [[-1 / 3, -1 / 3], [1 / 3, 0], [0, 0]])
    found = made.metrics.result()
    close(found["advantages/reward_mean"], 2.0)
    close(found["advantages/reward_std"], math.sqrt(2))


def test_without_the_mask_truncated_rollouts_count(given):
    table = Table([[-1.0], [-1.0], [-1.0]], rewards=[3.0, 0.0, 6.0], truncated=[False, False, True])
    made = given(table, *ONE, "rollout.group_size=3")
    close(made.prepare().advantages, [[0.0], [-3.0], [3.0]])


def test_truncated_rollouts_leave_the_terms_too(given):
    table = Table([[-1.0], [-1.0]], entropy=[[1.0], [5.0]], truncated=[False, True])
    made = still(given, table, "algorithm.terms=[{type: entropy, coefficient: 1}]", "algorithm.masks=[truncated]")
    made.prepare()
    close(made.learn(), -1.0)
    close(made.gradient("entropy"), [[-1.0], [0.0]])


ENTROPIES = [("0.5", [[0, 1], [1, 0]]), ("0.75", [[0, 1], [1, 1]]), ("0.2", [[0, 1], [0, 0]])]


@pytest.mark.parametrize(("share", "kept"), ENTROPIES)
def test_entropy_share(given, share, kept):
    """The decisions in doubt alone are learned from; the denominator counts all, as in TRL and the paper."""
    table = Table([[-1.0, -1.0], [-1.0, -1.0]], rewards=[2.0, 0.0], entropy=[[0.1, 0.9], [0.5, 0.3]])
    made = given(table, *ONE, f"algorithm.masks=[{{type: entropy_share, share: {share}}}]")
    made.prepare()
    made.learn()
    kept = torch.tensor(kept)
    close(made.gradient(), torch.tensor([[-1.0], [1.0]]) * kept / 4)


@pytest.mark.parametrize("mask", ["{type: entropy_share, share: 0.5}", "{type: covariance_clip, share: 0.5, low: 0.9}"])
def test_terms_are_of_all_decisions(given, mask):
    """Half of them have no part in the objective. With covariance_clip those on the diagonal go."""
    entropies = [[1.0, 5.0], [4.0, 2.0]]
    table = Table([[0.0, -1.0], [-1.0, -2.0]], rewards=[2.0, 0.0], entropy=entropies)
    term = "algorithm.terms=[{type: entropy, coefficient: 1}]"
    made = given(table, *ONE, f"algorithm.masks=[{mask}]", term)
    made.prepare()
    close(made.learn(), (-1 + 1 - 12) / 4)
    close(made.gradient("entropy"), [[-0.25, -0.25], [-0.25, -0.25]])
    close(made.gradient(), [[0, -0.25], [0.25, 0]])
    close(made.metrics.result()["entropy"], 3.0)


@pytest.mark.parametrize("surrogate", ["clip", "dual_clip", "reinforce", "cispo"])
def test_a_masked_decision_stays_in_its_rollouts_ratio(given, surrogate):
    """The ratio of a sequence is of all its decisions, as in TRL: log 1.2 of 0.8 and -0.4354."""
    table = Table([[-1.0, -1.0], [-1.0, -1.0]], rewards=[2.0, 0.0], entropy=[[0.1, 0.9], [0.5, 0.3]])
    options = ["algorithm.masks=[{type: entropy_share, share: 0.25}]", "algorithm.level=sequence"]
    made = given(table, *ONE, *options, "algorithm.epochs=2", f"algorithm.surrogate={surrogate}")
    made.prepare()
    move = 2 * math.log(1.2) - 0.8
    made.move(logp=[[0.8, move], [0.0, 0.0]])
    made.learn()
    slope = -1.0 if surrogate == "reinforce" else -1.2
    close(made.gradient(), [[slope / 8, slope / 8], [0.0, 0.0]])  # a half of it each, a quarter of the loss


def test_a_loss_of_whole_rollouts_leaves_masked_decisions_out(given):
    """The log-ratio of a pair is the sum over the decisions that are kept: m = 0.1 x 0.7."""
    table = Table([[-1.0, -2.0], [-3.0, -1.0]], rewards=[0.0, 2.0], entropy=[[0.1, 0.9], [0.8, 0.3]])
    mask = "masks: [{type: entropy_share, share: 0.5}]"
    made = given(table, "rollout.prompts=1", f"algorithm={{type: preference, beta: 0.1, {mask}}}")
    made.move(logp=[[5.0, -0.4], [0.3, 7.0]])
    made.prepare()
    close(made.learn(), math.log1p(math.exp(-0.07)))


def test_entropy_is_ranked_over_all_ranks_and_only_where_it_counts(given):
    """The third decision is not a decision: its garbage would be the last of all, or the first."""
    table = Table([[-1.0, -1.0, -1.0], [-1.0]], rewards=[2.0, 0.0], entropy=[[0.1, 0.9, 0.2], [0.5]])
    made = given(table, *ONE, "rollout.prompts=2", "algorithm.masks=[{type: entropy_share, share: 0.5}]", world=2)
    made.prepare()
    made.learn()
    assert (made.gradient() != 0).tolist() == [[False, True, False], [True, False, False]]  # 4 of 8, two here


# Deviations of logp 2, -2, 0 (mean -2); of the advantages 2/3, 2/3, -4/3 (mean 1/3): covariances 4/3, -4/3, 0.
COVARIANCES = [("low: 1, high: 5", False), ("low: 1.4, high: 5", True), ("low: 0.1, high: 1.2", True)]


@pytest.mark.parametrize(("bounds", "kept"), COVARIANCES)
def test_covariance_clip(given, bounds, kept):
    table = Table([[0.0, -4.0], [-2.0]], rewards=[2.0, 0.0])
    made = given(table, *ONE, f"algorithm.masks=[{{type: covariance_clip, share: 0.4, {bounds}}}]")
    assert made.prepare().mask.tolist() == [[True, True], [True, False]]
    made.learn()
    close(made.gradient(), [[-kept / 3, -1 / 3], [1 / 3, 0]])  # of all three, also where one is left out


@pytest.mark.parametrize(("share", "dropped"), [("0.3", 1), ("0.5", 2), ("0.9", 2)])
def test_covariance_clip_leaves_out_a_share(given, share, dropped):
    # Deviations 1, 0, 0, -1 and 1, 1, -1, -1: two covariances of 1. Of 4 decisions 1, 2 or 3 may go.
    table = Table([[0.0, -1.0], [-1.0, -2.0]], rewards=[2.0, 0.0])
    made = given(table, *ONE, f"algorithm.masks=[{{type: covariance_clip, share: {share}, low: 0.9}}]")
    made.prepare()
    made.learn()
    learned = made.gradient() != 0
    assert int((~learned).sum()) == dropped
    assert learned[0, 1] and learned[1, 0]


def test_who_is_dropped_is_drawn_anew_each_step_and_seed(given):
    table = Table([[0.0, -1.0], [-1.0, -2.0]], rewards=[2.0, 0.0])
    options = "algorithm.masks=[{type: covariance_clip, share: 0.3, low: 0.9}]"

    def left_out(seed, step):
        made = given(table, *ONE, options, f"seed={seed}")
        return bool(made.prepare(step=step).extra(OBJECTIVE, DecisionColumn).values[0, 0] == 0)

    drawn = [[left_out(seed, step) for step in range(6)] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] and len({True, False} & set(drawn[0])) == 2
    assert drawn[0] != drawn[2]
