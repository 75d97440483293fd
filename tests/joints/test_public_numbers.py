"""Methods beside the code that people run: numbers that public functions gave, through the trainer's own path.

`public_numbers.json` holds, by repository, the commit and file, the inputs, and what its functions returned for them:
advantages, or a loss and its gradient by the new log-probabilities; of decisions that count alone."""

import json
from pathlib import Path

import pytest
import torch

from mmrl.cli.methods import compared_with, methods
from mmrl.samplers.settings import DenoisingTransition
from mmrl.samplers.transitions import gaussian_step
from mmrl.settings import choose
from tests.joints import test_robot_numbers as robots
from tests.joints.parts import Table, steps

PUBLIC = json.loads((Path(__file__).parent / "public_numbers.json").read_text())
VERL = PUBLIC["volcengine_verl"]
INPUTS = VERL["inputs"]
NO_BASELINE = "baseline: none, scale: none"  # advantages are the rewards
KL = "algorithm={{type: grpo, terms: [{{type: kl, coefficient: 1.0, estimator: {}}}]}}"

# The function, the configuration that does the same, and the methods that this shows, by choice and name.
ADVANTAGES = [
    ("compute_grpo_outcome_advantage", "algorithm=grpo", {("algorithm", "grpo"), ("scale of advantages", "group_std")}),
    (
        "compute_grpo_outcome_advantage norm_adv_by_std_in_grpo=False",
        "algorithm={type: grpo, scale: none}",
        {("baseline", "mean"), ("scale of advantages", "none")},
    ),
    (
        "compute_rloo_outcome_advantage",
        "algorithm={type: grpo, baseline: leave_one_out}",
        {("baseline", "leave_one_out")},
    ),
    (
        "compute_opo_outcome_advantage",
        "algorithm={type: grpo, baseline: length_weighted}",
        {("baseline", "length_weighted")},
    ),
    (
        "compute_reinforce_plus_plus_baseline_outcome_advantage",
        "algorithm={type: grpo, scale: none, shaping: [whitening]}",
        {("advantage shaper", "whitening")},
    ),
    (
        "compute_reinforce_plus_plus_outcome_advantage gamma=1",
        f"algorithm={{type: grpo, {NO_BASELINE}, shaping: [whitening]}}",
        {("advantage shaper", "whitening"), ("baseline", "none")},
    ),
    (
        "compute_grpo_passk_outcome_advantage",
        "algorithm={type: grpo, baseline: none, scale: none, transforms: [{type: best_only, divide: false}]}",
        {("transform of rewards", "best_only")},
    ),
    (
        "compute_gae_advantage_return gamma=0.9 lam=0.8",
        "algorithm={type: ppo, gamma: 0.9, lam: 0.8}",
        {("algorithm", "ppo")},
    ),
]
CLIP = "surrogate: {{type: {}, low: 0.2, high: 0.28{}}}"
PLAIN = CLIP.format("clip", "")
VANILLA = "compute_policy_loss_vanilla clip_ratio_c=1e9"
LOSSES = [
    (VANILLA, f"algorithm={{type: grpo, {NO_BASELINE}, {PLAIN}}}", {("surrogate", "clip")}),
    (
        "compute_policy_loss_vanilla clip_ratio_c=1.5",
        f"algorithm={{type: grpo, {NO_BASELINE}, {CLIP.format('dual_clip', ', cap: 1.5')}}}",
        {("surrogate", "dual_clip")},
    ),
    (
        f"{VANILLA} seq-mean-token-mean",
        f"algorithm={{type: grpo, {NO_BASELINE}, {PLAIN}, reduce: sequence_mean}}",
        set(),
    ),
    (f"{VANILLA} seq-mean-token-sum", f"algorithm={{type: grpo, {NO_BASELINE}, {PLAIN}, reduce: sequence_sum}}", set()),
    (
        "compute_policy_loss_gspo",
        f"algorithm={{type: grpo, {NO_BASELINE}, level: sequence, surrogate: {{type: clip, low: 0.03, high: 0.04}}}}",
        {("surrogate", "clip")},
    ),
    (
        "compute_policy_loss_sapo",
        f"algorithm={{type: grpo, {NO_BASELINE}, surrogate: soft, reduce: sequence_mean}}",
        {("surrogate", "soft")},
    ),
    (
        "compute_policy_loss_geo_mean clip_ratio_low=0.4 clip_ratio_high=0.4",
        f"algorithm={{type: grpo, {NO_BASELINE}, surrogate: geometric}}",
        {("surrogate", "geometric")},
    ),
    (
        "compute_policy_loss_cispo",
        f"algorithm={{type: grpo, {NO_BASELINE}, {CLIP.format('cispo', '')}}}",
        {("surrogate", "cispo")},
    ),
    (
        "compute_policy_loss_gpg",
        f"algorithm={{type: grpo, {NO_BASELINE}, surrogate: reinforce}}",
        {("surrogate", "reinforce")},
    ),
    *(
        (f"kl_penalty {public}", KL.format(ours), {("loss term", "kl")})
        for public, ours in (("k1", "k1"), ("abs", "absolute"), ("k2", "k2"), ("k3", "k3"))
    ),
]
# Losses whose value is of another form with the same gradient: minus A sg(r) logp there, minus A sg(r) r / sg(r) here.
GRADIENT_ALONE = {"compute_policy_loss_cispo", "compute_policy_loss_gpg"}


def table(rewards):
    return Table(INPUTS["old_logp"], group=INPUTS["group"], rewards=rewards, value=INPUTS["values"])


def padded(rows):
    width = max(map(len, INPUTS["old_logp"]))
    return [[*row, *[0.0] * (width - len(row))] for row in rows]


def alike(found, rows, mask):
    torch.testing.assert_close(found.where(mask, 0.0).double(), torch.tensor(padded(rows)).double(), atol=2e-5, rtol=0)


@pytest.mark.parametrize(("function", "option", "shows"), ADVANTAGES, ids=[case[0] for case in ADVANTAGES])
def test_advantages(given, function, option, shows):
    one = table(INPUTS["rewards"])
    made = given(
        one, "rollout={prompts: 6, group_size: 1}" if "ppo" in option else "rollout={prompts: 2, group_size: 3}", option
    )
    rollouts = one.rollouts()
    last = [[float(t == len(row) - 1) for t in range(len(row))] for row in INPUTS["old_logp"]]
    rollouts.extras["steps"] = steps(one, values=INPUTS["values"], terminated=last)
    made.prepare(rollouts)
    alike(rollouts.advantages.expand(one.mask.shape), VERL["numbers"][function]["advantages"], one.mask)
    if "returns" in VERL["numbers"][function]:
        alike(rollouts.extras["steps"].returns, VERL["numbers"][function]["returns"], one.mask)


@pytest.mark.parametrize(("function", "option", "shows"), LOSSES, ids=[case[0] for case in LOSSES])
def test_losses(given, function, option, shows):
    is_kl = function.startswith("kl_penalty")
    one = table([0.0] * 6 if is_kl else INPUTS["rewards"])
    made = given(one, "rollout={prompts: 2, group_size: 3}", option, "algorithm.epochs=2")
    if is_kl:  # the reference is the policy that the run begins with; the KL is taken at the first update
        made.move(logp=INPUTS["moved"])
    made.prepare()
    made.move(logp=INPUTS["moved"])
    loss = made.learn()
    expected = VERL["numbers"][function]
    if function not in GRADIENT_ALONE:
        assert float(loss) == pytest.approx(expected["loss"], abs=2e-5)
    alike(made.gradient(), expected["gradient"], one.mask)


def test_flow_steps():
    """A step of the chain by its key, replayed: its log-likelihood, and the gradient by the predicted velocity."""
    public = PUBLIC["yifan123_flow_grpo"]
    inputs, sigmas = public["inputs"], torch.tensor(public["inputs"]["sigmas"])
    transition = choose(DenoisingTransition, {"type": "flow_sde", "noise": inputs["noise"]})
    for expected in public["numbers"]["sde_step_with_logprob noise_level=0.7"]:
        x, velocity, x_next = (torch.tensor(inputs[name]) for name in ("x", "velocity", "x_next"))
        velocity.requires_grad_()
        step = expected["step"]
        at = transition.coefficients(sigmas[step], sigmas[step + 1], sigmas[1])
        _, logp, _ = gaussian_step(x, velocity, at, x_next=x_next)
        (gradient,) = torch.autograd.grad(logp.sum(), velocity)
        for found, numbers in ((logp, expected["logp"]), (gradient, expected["gradient"])):
            torch.testing.assert_close(found.detach(), torch.tensor(numbers), atol=5e-5, rtol=5e-5)


def test_what_is_said_to_be_compared_is_and_the_other_way_round():
    shown = dict.fromkeys(set().union(*(shows for *_, shows in (*ADVANTAGES, *LOSSES))), "volcengine_verl")
    shown["transition", "flow_sde"] = "yifan123_flow_grpo"
    shown |= robots.SHOWN
    declared = {(base.title, name): compared_with(kind) for base, name, kind in methods()}
    everything = PUBLIC | robots.PUBLIC
    named = {name: f"{public['repository']}@{public['commit'][:8]}" for name, public in everything.items()}
    assert {key: where for key, where in declared.items() if where} == {key: named[by] for key, by in shown.items()}
    assert set(VERL["numbers"]) - {case[0] for case in (*ADVANTAGES, *LOSSES)} == {
        "compute_policy_loss_kl_cov",  # the covariance is of the policy before the step here, of the present one there
        "compute_policy_loss_vanilla clip_ratio_c=1e9 seq-mean-token-sum-norm",  # a sum over rollouts, here their mean
    }
