"""Every surrogate, level, ratio and reduction from its key to the loss and its gradient by every decision."""

import math

import pytest
import torch

from tests.joints.parts import Table, close

# Two rollouts of one group, rewards 2 and 0: with scale=none their advantages are 1 and -1. The old policy is asked
# because there are two epochs; then the policy moves, until the ratios are these.
RATIOS = [[1.1, 1.5, 0.5], [0.5, 1.5]]
BOUNDS = ["algorithm.surrogate.low=0.1", "algorithm.surrogate.high=0.3"]  # [0.9, 1.3]
ONE = ["rollout.prompts=1", "algorithm.scale=none"]


def pair(**columns):
    return Table([[-1.0, -1.0, -1.0], [-1.0, -1.0]], rewards=[2.0, 0.0], **columns)


def moved(given, *overrides, table=None, ratios=RATIOS):
    made = given(table or pair(), *ONE, "algorithm.epochs=2", *overrides)
    made.prepare()
    made.move(logp=[[math.log(ratio) for ratio in row] for row in ratios])
    return made


def check(made, loss, first, second, decisions=5):
    """Gradients are given times the number of decisions."""
    close(made.learn(), loss)
    close(made.gradient() * decisions, [[*row, *[0.0] * (3 - len(row))] for row in (first, second)])


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_clip(given, backend):
    # -min(r A, clamp(r) A): -1.1, -1.3 (bound: no gradient), -0.5; 0.9 (bound), 1.5. Sum -0.5. Gradient -r A.
    made = moved(given, *BOUNDS, f"kernels.backend={backend}")
    check(made, -0.5 / 5, [-1.1, 0, -0.5], [0, 1.5])


def test_clip_with_its_default_bounds(given):
    # [0.8, 1.28] now: -1.28 in the place of -1.3, and 0.8 in that of 0.9.
    made = moved(given)
    check(made, (-1.1 - 1.28 - 0.5 + 0.8 + 1.5) / 5, [-1.1, 0, -0.5], [0, 1.5])


@pytest.mark.parametrize("kind", ["clip", "dual_clip", "cispo"])
def test_each_bound_is_that_of_its_side(given, kind):
    """Only the upper bound acts, then only the lower one."""
    for ratios, loss in (([1.5, 1.0, 1.0], -1.3 - 2 + 2), ([1.0, 1.0, 1.0], -3 + 0.9 + 1)):
        second = [1.0, 1.0] if ratios[0] > 1 else [0.5, 1.0]
        made = moved(given, f"algorithm.surrogate.type={kind}", *BOUNDS, ratios=[ratios, second])
        close(made.learn(), loss / 5)


def test_dual_clip(given):
    # As clip, but a negative advantage costs at most 1.4: the last decision loses its gradient.
    made = moved(given, "algorithm.surrogate.type=dual_clip", *BOUNDS, "algorithm.surrogate.cap=1.4")
    check(made, (-1.1 - 1.3 - 0.5 + 0.9 + 1.4) / 5, [-1.1, 0, -0.5], [0, 0])


def test_cispo(given):
    # The clamped ratio is a weight: 1.1, 1.3, 0.9; 0.9, 1.3. Every decision has a gradient.
    made = moved(given, "algorithm.surrogate.type=cispo", *BOUNDS)
    check(made, (-3.3 + 2.2) / 5, [-1.1, -1.3, -0.9], [0.9, 1.3])


def test_soft(given):
    # tau 1 where A > 0: -4 s(r - 1) = -4 x 0.524979, 0.622459, 0.377541; tau 2 where A < 0: 2 s(2 (r - 1)) =
    # 2 x 0.268941, 0.731059. Gradients -4 s (1 - s) r and 4 s (1 - s) r with s (1 - s) = 0.249376, 0.235004, 0.196612.
    taus = ["algorithm.surrogate.tau_positive=1", "algorithm.surrogate.tau_negative=2"]
    made = moved(given, "algorithm.surrogate.type=soft", *taus)
    check(made, -4.099917 / 5, [-1.097254, -1.410022, -0.470007], [0.393224, 1.179671])


def test_divergence_mask_by_total_variation(given):
    # q = exp(-1) = 0.368; |p - q| = q |r - 1| = 0.037, 0.184, 0.184. Past 0.1 and moving away: 1.5 up with A > 0, 0.5
    # down with A < 0. The others move back or are near.
    made = moved(given, "algorithm.surrogate.type=divergence_mask", "algorithm.surrogate.bound=0.1")
    check(made, (-1.1 - 0.5 + 1.5) / 5, [-1.1, 0, -0.5], [0, 1.5])


def test_divergence_mask_by_kl(given):
    # q log(q / p) + (1 - q) log((1 - q) / (1 - p)) = 0.0028, 0.0682, 0.0935 at r = 1.1, 1.5, 0.5. Past 0.08: 0.5.
    options = ["algorithm.surrogate.bound=0.08", "algorithm.surrogate.estimate=kl"]
    made = moved(given, "algorithm.surrogate.type=divergence_mask", *options)
    check(made, (-1.1 - 1.5 - 0.5 + 1.5) / 5, [-1.1, -1.5, -0.5], [0, 1.5])


def test_divergence_mask_by_an_exact_divergence(given):
    # Where the policy has the divergence of its Gaussian steps it is taken: (0.4)^2 / 2 = 0.08, 0.125 with 0.5.
    table = pair(prediction=[[0.0, 0.0, 0.0], [0.0, 0.0]])
    made = moved(given, "algorithm.surrogate.type=divergence_mask", "algorithm.surrogate.bound=0.1", table=table)
    logp = [[math.log(ratio) for ratio in row] for row in RATIOS]
    made.move(logp=logp, prediction=[[0.5, 0.4, 0.5], [0.4, 0.5]])
    # Dropped: 1.1 (0.125, away). Kept: 1.5 (0.08), 0.5 (back); 0.5 (0.08), 1.5 (back).
    check(made, (-1.5 - 0.5 + 0.5 + 1.5) / 5, [0, -1.5, -0.5], [0.5, 1.5])


def test_gaussian_weight(given):
    # w = exp(-log(r)^2 / (2 x 0.25)) = 0.981996, 0.719784, 0.382546 at r = 1.1, 1.5, 0.5; values -w r A, gradients too.
    made = moved(given, "algorithm.surrogate.type=gaussian_weight", "algorithm.surrogate.sigma=0.5")
    check(made, (-2.351145 + 1.270949) / 5, [-1.080196, -1.079676, -0.191273], [0.191273, 1.079676])


def test_reinforce(given):
    made = moved(given, "algorithm.surrogate.type=reinforce")
    check(made, -1 / 5, [-1, -1, -1], [1, 1])


def test_a_ratio_that_the_policy_gives_is_taken(given):
    # The policy has a more exact form of log r than a difference of two numbers: here log 1.2 everywhere.
    table = pair(log_ratio=[[math.log(1.2)] * 3, [math.log(1.2)] * 2])
    made = moved(given, table=table, ratios=[[1.0] * 3, [1.0] * 2])
    check(made, (-3 * 1.2 + 2 * 1.2) / 5, [-1.2] * 3, [1.2] * 2)


def test_the_first_ratio_is_exactly_one(given):
    for options in ([], ["algorithm.epochs=2"]):
        made = given(pair(), *ONE, *options)
        rollouts = made.prepare()
        assert (rollouts.old_logp is None) == (not options)  # with one update it costs no pass
        made.learn()
        assert made.metrics.result()["surrogate/ratio_gap_max"] == 0.0
        check(made.prepare() and made, -1 / 5, [-1, -1, -1], [1, 1])


# --- level and ratio ---


def test_level_sequence(given):
    # Row 0: (log 1.1 + log 1.5 + log 0.5) / 3 = log 0.825 / 3, r = 0.937889, inside the bounds: value -r, three times,
    # and each decision moves all three by a third. Row 1: log 0.75 / 2, r = 0.866 < 0.9: value 0.9, no gradient.
    made = moved(given, "algorithm.level=sequence", "algorithm.reduce=token_mean", *BOUNDS)
    check(made, (-3 * 0.937889 + 2 * 0.9) / 5, [-0.937889] * 3, [0, 0])


def test_level_sequence_counts_rollouts_alike(given):
    """GSPO's loss: a mean over rollouts, whatever their lengths (seq-mean-token-mean of verl)."""
    made = moved(given, "algorithm.level=sequence", *BOUNDS)
    close(made.learn(), (-0.937889 + 0.9) / 2)
    close(made.gradient() * 6, [[-0.937889] * 3, [0, 0, 0]])


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        (["algorithm.level=sequence"], "sequence_mean"),
        (["algorithm.surrogate=geometric"], "sequence_mean"),
        (["algorithm.surrogate=group_expectation"], "sequence_mean"),
        (["algorithm.level=sequence", "algorithm.reduce=token_mean"], "token_mean"),
        (["algorithm.level=sequence", "algorithm.reduce=sequence_sum"], "sequence_sum"),
        ([], "token_mean"),
    ],
)
def test_one_weight_a_rollout_makes_rollouts_count_alike(given, options, mode):
    assert given(pair(), *ONE, *options).trainer.algorithm.reduce_mode == mode


def test_unclipped(given):
    # -r A, however far: 1.5 has its gradient with A = 1, and 0.5 with A = -1.
    check(moved(given, "algorithm.surrogate=unclipped"), (-3.1 + 2.0) / 5, [-1.1, -1.5, -0.5], [0.5, 1.5])


def test_level_segment(given):
    # Row 0: sqrt(1.1 x 1.5) = 1.284523 for two, 0.5 for one. Row 1 is one segment: 0.866.
    table = pair(segments=[[0, 0, 1], [0, 0]])
    made = moved(given, "algorithm.level=segment", "algorithm.reduce=token_mean", *BOUNDS, table=table)
    check(made, (-2 * 1.284523 - 0.5 + 2 * 0.9) / 5, [-1.284523, -1.284523, -0.5], [0, 0])


@pytest.mark.parametrize("size", [64, 1])
def test_segments_count_alike_whatever_their_length(given, size):
    """GCPO's train_grpo_flux_clip.py divides the loss of a chunk by the number of chunks: a step of a chunk of two
    weighs half of one of a chunk of one. Three chunks here, however they are cut into micro-batches."""
    table = pair(segments=[[0, 0, 1], [0, 0]])
    made = moved(given, "algorithm.level=segment", f"engine.micro_batch={size}", *BOUNDS, table=table)
    close(made.learn(), (-1.284523 - 0.5 + 0.9) / 3)
    close(made.gradient() * 3, [[-1.284523 / 2, -1.284523 / 2, -0.5], [0, 0, 0]])


@pytest.mark.parametrize("kind", ["clip", "dual_clip"])
def test_the_four_chunks_of_gcpo(given, kind):
    """Gradients by step of chunks of 2, 3 and 3 steps at a ratio of 1: 1, .667 and .667, and of terms likewise."""
    logp, segments = [[-1.0] * 8] * 2, [[0, 0, 1, 1, 1, 2, 2, 2]] * 2
    table = Table(logp, rewards=[2.0, 0.0], segments=segments, entropy=[[1.0] * 8] * 2)
    options = [f"algorithm.surrogate={kind}", "algorithm.terms=[{type: entropy, coefficient: 0.5}]"]
    made = given(table, *ONE, "algorithm.level=segment", "algorithm.scale=none", *options)
    made.prepare()
    close(made.learn(), -0.5)
    weight = torch.tensor([1, 1, 2 / 3, 2 / 3, 2 / 3, 2 / 3, 2 / 3, 2 / 3]) / 2 / 6  # one half by chunk, of six
    close(made.gradient(), torch.stack([-weight, weight]))
    close(made.gradient("entropy"), torch.stack([-0.5 * weight] * 2))


def test_ratio_normalised(given):
    """log r' = (log r + divergence) std, with the gradient of both."""
    # std 0.5, the mean moved by 0.1: divergence 0.01 / 0.5 = 0.02, and its gradient is 0.1 / 0.25 = 0.4.
    # log r = 0.2: r' = exp(0.22 x 0.5) = 1.116278. A = 1: value -r'; gradients -r' 0.5 and -r' 0.5 x 0.4.
    table = Table([[-1.0], [-1.0]], rewards=[2.0, 0.0], prediction=[[0.0], [0.0]], std=[[0.5], [0.5]])
    made = given(table, *ONE, "algorithm.epochs=2", "algorithm.ratio=normalised")
    made.prepare()
    made.move(logp=[[0.2], [0.2]], prediction=[[0.1], [0.1]])
    close(made.learn(), 0.0)
    close(made.gradient() * 2, [[-0.558139], [0.558139]])
    close(made.gradient("prediction") * 2, [[-0.223256], [0.223256]])


# --- reduction ---

# Advantages 3 and -1 of three decisions and one: with reinforce values -3, -3, -3 and 1.
REDUCTIONS = [
    ("token_mean", 10, -8 / 4, -3 / 4, 1 / 4),
    ("sequence_mean", 10, (-3 + 1) / 2, -3 / 3 / 2, 1 / 2),
    ("sequence_sum", 10, (-9 + 1) / 2, -3 / 2, 1 / 2),
    ("constant", 10, -8 / (2 * 10), -3 / 20, 1 / 20),
    ("constant", 5, -8 / (2 * 5), -3 / 10, 1 / 10),  # the length is that of the longest possible rollout
]


@pytest.mark.parametrize("surrogate", ["clip", "reinforce"])  # in one pass of a kernel, and by values
@pytest.mark.parametrize(("mode", "longest", "loss", "first", "second"), REDUCTIONS)
def test_reduce(given, surrogate, mode, longest, loss, first, second):
    table = Table([[-1.0, -2.0, -1.0], [-1.0]], rewards=[3.0, -1.0])
    options = ["algorithm.baseline=none", f"algorithm.reduce={mode}", f"model.longest={longest}"]
    made = given(table, *ONE, *options, f"algorithm.surrogate={surrogate}")
    made.prepare()
    close(made.learn(), loss)
    close(made.gradient(), [[first] * 3, [second, 0, 0]])


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean", "sequence_sum", "constant"])
def test_denominators_are_of_the_whole_minibatch_on_all_ranks(given, mode):
    table = Table([[-1.0, -2.0, -1.0], [-1.0]], rewards=[3.0, -1.0])
    options = ["algorithm.baseline=none", f"algorithm.reduce={mode}"]
    found = []
    for size, world in ((64, 1), (1, 1), (64, 2)):
        made = given(table, *ONE, *options, f"engine.micro_batch={size}", "rollout.prompts=2", world=world)
        made.prepare()
        found.append((made.learn(), made.gradient()))
        assert len(made.minibatches[0]) == (2 if size == 1 else 1)
    close(found[1][0], found[0][0])
    close(found[1][1], found[0][1])
    close(found[2][0], found[0][0] / 2)  # of two equal ranks each gives its half
    close(found[2][1], found[0][1] / 2)


# --- other algorithms ---


def test_supervised(given):
    # -logp: (1 + 2 + 3 + 4) / 4, gradient -1/4.
    table = Table([[-1.0, -2.0, -3.0], [-4.0]])
    made = given(table, "algorithm={type: supervised}", "rollout={prompts: 2}")
    made.prepare(made.next())
    close(made.learn(), 10 / 4)
    close(made.gradient(), [[-1 / 4] * 3, [-1 / 4, 0, 0]])


def test_matching(given):
    # Its own bounds are 0.005: 1.004 gains, 1.006 is bounded.
    table = Table([[-1.0, -1.0], [-1.0, -1.0]], rewards=[2.0, 0.0])
    made = given(table, "rollout.prompts=1", "algorithm={type: matching, scale: none, epochs: 2}")
    made.prepare()
    made.move(logp=[[math.log(1.004), math.log(1.006)], [math.log(0.996), math.log(0.994)]])
    close(made.learn(), (-1.004 - 1.005 + 0.996 + 0.995) / 4)
    close(made.gradient() * 4, [[-1.004, 0], [0.996, 0]])


def contrast(given, **options):
    # Samples 0 with noise: 1 - p / 2 is left of the sample's error under the prediction p. The old policy says 1.
    table = Table([[0.0], [0.0]], rewards=[2.0, 0.0], prediction=[[1.0], [1.0]])
    named = "".join(f", {name}: {value}" for name, value in options.items())
    made = given(table, "rollout.prompts=1", f"algorithm={{type: contrast, scale: none, epochs: 2{named}}}")
    made.prepare()
    made.move(prediction=[[0.2], [0.2]])  # 1.2 now
    return made


def test_contrast(given):
    # nft_beta 0.5: predictions 1 +- 0.5 x 0.2 = 1.1 and 0.9, errors 0.45 and 0.55 (squared, over their own size).
    # o = A / 10 + 1/2 = 0.6 and 0.4; values 5 / 0.5 x (0.6 x 0.45 + 0.4 x 0.55) = 4.9, and 5.1.
    # The gradient of the errors by the prediction is -1, that of the implicit predictions +-0.5:
    # 10 (0.6 x -0.5 + 0.4 x 0.5) = -1 for the good sample, 1 for the bad one.
    made = contrast(given, nft_beta=0.5)
    close(made.learn(), (4.9 + 5.1) / 2)
    close(made.gradient("prediction") * 2, [[-1.0], [1.0]])
    close(made.gradient(), [[0.0], [0.0]])


def test_the_bound_of_contrast(given):
    # bound 0.5: o = A + 1/2 is cut to 1 and 0. Values 0.5 / 0.5 x 0.45 and 0.55, gradients -0.5 and 0.5.
    made = contrast(given, nft_beta=0.5, bound=0.5)
    close(made.learn(), (0.45 + 0.55) / 2)
    close(made.gradient("prediction") * 2, [[-0.5], [0.5]])


def test_without_an_old_prediction_contrast_pulls_equally(given):
    """Before the first move both implicit policies are the old one; only the gradient tells good from bad."""
    table = Table([[0.0], [0.0]], rewards=[2.0, 0.0], prediction=[[1.0], [1.0]])
    made = given(table, "rollout.prompts=1", "algorithm={type: contrast, scale: none}")
    made.prepare()
    close(made.learn(), 5 * 0.5)
    close(made.gradient("prediction") * 2, [[5 * (-0.6 + 0.4)], [5 * (0.6 - 0.4)]])


def test_advantages_carry_no_gradient(given):
    made = given(pair(), *ONE)
    assert not made.prepare().advantages.requires_grad
    assert made.prepare().advantages[:, 0].tolist() == [1.0, -1.0]
