"""Methods beside the code that people run: numbers that public functions gave, through the trainer's own path.

`public_numbers.json` holds, by repository, the commit and file, the inputs, and what its functions returned for them:
advantages, or a loss and its gradient by the new log-probabilities; of decisions that count alone."""

import pytest
import torch
import yaml

from mmrl.cli.methods import describe_methods, is_reconstructed, methods
from mmrl.cli.not_compared import PARTS, REASONS, reason_of
from mmrl.cli.public_code import REPOSITORIES, compared_with, differs_from
from mmrl.core.credit import divergence_in_group, scale_within_group
from mmrl.core.turns import softmin_weighted
from mmrl.policies.discrete_diffusion.likelihoods import trace
from mmrl.rollouts import DEMONSTRATION
from mmrl.samplers.score import chain_likelihood, matching_likelihood
from mmrl.samplers.settings import DenoisingTransition, Window
from mmrl.samplers.transitions import Coefficients
from mmrl.settings import choose
from tests.joints import test_credit_numbers as credit
from tests.joints import test_likelihood_numbers as likelihoods
from tests.joints import test_robot_numbers as robots
from tests.joints.parts import Table, close, steps
from tests.joints.public_cases import (
    CONFIGURATIONS,
    DIFFERENT,
    EQUAL,
    GRADIENT_ALONE,
    INPUTS,
    PUBLIC,
    SHOWN_OTHERWISE,
    STEPS,
    STEPS_UP_TO_CONSTANTS,
)

OTHERS = (credit, likelihoods)  # tests with numbers of their own, by repository
CASES = [
    (repository, function, ours)
    for table in (EQUAL, DIFFERENT)
    for repository, functions in table.items()
    for function, ours in functions.items()
]
MARKS = [f"{repository} {function}".replace("/", ":") for repository, function, _ in CASES]


def agree(found, rows, mask):
    padded = [[*row, *[0.0] * (mask.shape[1] - len(row))] for row in rows]
    found, expected = found.where(mask, 0.0).double(), torch.tensor(padded).double()
    return torch.allclose(found, expected, atol=2e-5, rtol=0)


def rollout_of(ours, group):
    """The options of the rollouts that a configuration of ours needs; group [rollout]."""
    if ours == "dft":  # demonstrations
        return "rollout={prompts: 6}"
    groups = len(group) if ours == "ppo" else len(set(group))
    return f"rollout={{prompts: {groups}, group_size: {len(group) // groups}}}"


def prepared(given, ours, numbers):
    """The job of a configuration of ours before its first update, and its rollouts. numbers: the shared inputs, with
    rewards [rollout] or [rollout][reward], rows that are demonstrations, and entropies of some functions alone."""
    option, _ = CONFIGURATIONS[ours]
    logp = numbers["old_logp"]
    columns = {"view": logp} | ({"value": INPUTS["values"]} if logp is INPUTS["old_logp"] else {})
    columns |= {"entropy": numbers["entropy"]} if "entropy" in numbers else {}
    columns |= {"prediction": logp} if "nft" in ours else {}
    columns |= {"truncated": numbers["truncated"]} if "truncated" in numbers else {}
    table = Table(logp, group=numbers["group"], rewards=numbers["rewards"], **columns)
    two = ["task.names=[mark, form]", "task.weights=[1.0, 0.5]"] if table.rewards.shape[1] == 2 else []
    made = given(table, rollout_of(ours, numbers["group"]), option, "algorithm.epochs=2", *two)
    rollouts = table.rollouts()
    if ours == "ppo":
        last = [[float(t == len(row) - 1) for t in range(len(row))] for row in logp]
        rollouts.extras["steps"] = steps(table, values=INPUTS["values"], terminated=last)
    demonstrated = numbers.get("demonstrated", ())
    rollouts.origin = torch.tensor([DEMONSTRATION * (row in demonstrated) for row in range(len(rollouts))])
    if ours.startswith(("kl ", "preference", "stepwise")):  # of the reference, the policy that the run begins with
        made.move(logp=numbers["moved"])
    made.prepare(rollouts)
    return made, rollouts


@pytest.mark.parametrize(("repository", "function", "ours"), CASES, ids=MARKS)
def test_numbers(given, repository, function, ours):
    expected = PUBLIC[repository]["numbers"][function]
    numbers = INPUTS | expected  # some have rewards or log-probabilities of their own
    if ours.startswith(("kl k", "kl absolute")) or ours == "view":
        numbers |= {"rewards": [0.0] * 6}
    made, rollouts = prepared(given, ours, numbers)
    mask, is_equal = made.table.mask, function in EQUAL.get(repository, {})
    if "advantages" in expected:
        assert agree(rollouts.advantages.expand(mask.shape), expected["advantages"], mask) is is_equal
        if "returns" in expected:
            assert agree(rollouts.extras["steps"].returns, expected["returns"], mask)
        return
    moved = "prediction" if "nft" in ours else "logp"
    made.move(**{moved: numbers["moved"]})
    loss = made.learn()
    assert agree(made.gradient(moved), expected["gradient"], mask) is is_equal
    if is_equal and ours not in GRADIENT_ALONE:
        assert float(loss) == pytest.approx(expected["loss"], abs=2e-5)


def near(found, numbers):
    return torch.allclose(found.detach(), torch.tensor(numbers), atol=5e-5, rtol=2e-4)


CHAINS = [
    (repository, function, option, table is STEPS)
    for table in (STEPS, STEPS_UP_TO_CONSTANTS)
    for repository, functions in table.items()
    for function, option in functions.items()
]


@pytest.mark.parametrize(
    ("repository", "function", "option", "constants"), CHAINS, ids=[f"{c[0]} {c[1]}" for c in CHAINS]
)
def test_steps_of_a_chain(repository, function, option, constants):
    """A step of the chain by its key, replayed: its log-likelihood, and the gradient by the prediction."""
    inputs, sigmas = INPUTS["steps"], torch.tensor(INPUTS["steps"]["sigmas"])
    transition = choose(DenoisingTransition, yaml.safe_load(option))
    for expected in PUBLIC[repository]["numbers"][function]:
        x, prediction, x_next = (torch.tensor(inputs[name])[:, None] for name in ("x", "velocity", "x_next"))
        prediction.requires_grad_()
        if "alphas" in expected:
            level, next_level = (1 - torch.tensor(expected["alphas"], dtype=torch.float64)).sqrt()
        else:
            level, next_level = sigmas[expected["step"]], sigmas[expected["step"] + 1]
        at = Coefficients(*(part.expand(2, 1) for part in transition.step(level, next_level, sigmas[1])))
        logp = chain_likelihood(prediction, x, x_next, at, unscaled=transition.unscaled).logp[:, 0]
        (gradient,) = torch.autograd.grad(logp.sum(), prediction)
        assert near(logp, expected["logp"]) is constants
        assert near(gradient[:, 0], expected["gradient"])


@pytest.mark.parametrize(("weighting", "power"), [("Uniform", 0), ("t", 1), ("t**2", 2)])
def test_matching_errors(weighting, power):
    """The log-likelihood of predictions at two noise levels, weighted by a power of the level."""
    function = f"compute_log_prob_awm weighting={weighting}"
    inputs, expected = INPUTS["steps"], PUBLIC["scxue/advantage_weighted_matching"]["numbers"][function]
    data, prediction, noise = (torch.tensor(inputs[name])[:, None] for name in ("x", "velocity", "x_next"))
    prediction.requires_grad_()
    weight = torch.tensor(expected["levels"])[:, None] ** power
    logp = matching_likelihood(prediction, noise - data, weight).logp[:, 0]
    (gradient,) = torch.autograd.grad(logp.sum(), prediction)
    assert near(logp, expected["logp"])
    assert near(gradient[:, 0], expected["gradient"])


def test_sliding_windows():
    """Of two steps out of six, for five training steps at first: 17 in a row are the same."""
    theirs = PUBLIC["Tencent-Hunyuan/MixGRPO"]["numbers"]["GRPOTrainingStates exp_decay"]
    window = choose(Window, {"type": "sliding", "size": 2, "every": 5, "decay": 0.35, "threshold": 2})
    ours = [window.start(6, 7, iteration, 0) for iteration in range(len(theirs))]
    assert ours[:21] == theirs[:21] and ours[21] != theirs[21]


def numbers_of(repository):
    return PUBLIC[repository]["numbers"].values()


def test_weights_by_the_divergence_of_a_group():
    for expected in numbers_of("longmalongma/TW-GRPO"):
        logp, mask = torch.tensor(expected["probabilities"]).log(), torch.tensor(expected["mask"]) == 1
        scaled = scale_within_group(divergence_in_group(logp, mask, torch.zeros(2), 3), mask, torch.zeros(2))
        close((1 + 0.4 * scaled).where(mask, 0.0), expected["weights"])


def test_process_rewards_weighted_by_a_soft_minimum():
    for expected in numbers_of("CJReinforce/PURE"):
        weighted = softmin_weighted(torch.tensor(expected["values"]), expected["temperature"])
        close(weighted, expected["weighted"])


def test_merged_steps_of_filling_in_tokens():
    """Tokens are scored in one state if and only if the public code gives their steps one number."""
    for function, expected in PUBLIC["Gen-Verse/dLLM-RL"]["numbers"].items():
        steps_of_tokens = torch.tensor(expected["steps"])
        states = trace(steps_of_tokens, 13, int(function.rpartition("=")[2]))
        ours = states.weight.argmax(0)
        merged = torch.tensor(expected["merged"])
        assert ((ours[:, None] == ours) == (merged[:, None] == merged)).all()


def test_gains_over_the_reference_policy(given):
    """The table's last rows are the reference policy's responses to the two prompts."""
    for expected in numbers_of("JianxXiong/AAPO"):
        rewards = [*expected["rewards"], *expected["of_reference"]]
        table = Table([[-1.0]] * 6, group=[0, 0, 1, 1, 2, 3], rewards=rewards)
        made = given(table, "algorithm={type: grpo, scale: none, surrogate: reinforce, shaping: [advantage_momentum]}")
        made.prepare(made.next())
        made.learn()
        close(made.gradient()[:4, 0], expected["gradient"])


def shown(table, steps):
    """By title and name of a method, the repositories whose numbers the cases of these tables show it with."""
    found = {}
    for repository, functions in table.items():
        for ours in functions.values():
            for key in CONFIGURATIONS[ours][1]:
                found.setdefault(key, set()).add(repository)
    for repository, functions in steps.items():
        for option in functions.values():
            found.setdefault(("transition", yaml.safe_load(option)["type"]), set()).add(repository)
    return found


def joined(*tables):
    """The repositories of all tables, by title and name of a method."""
    found = {}
    for table in tables:
        for key, repositories in table.items():
            found.setdefault(key, set()).update(repositories)
    return found


def test_what_is_said_to_be_compared_is_and_the_other_way_round():
    equal, differs = {}, {}
    files = [PUBLIC, {name.replace("_", "/", 1): public for name, public in robots.PUBLIC.items()}]
    files += [other.PUBLIC for other in OTHERS]
    for repository, code in REPOSITORIES.items():
        commits = {public[repository]["commit"][:8] for public in files if repository in public}
        assert commits == {code.commit}
        for title, names in code.equal.items():
            for name in names.split():
                equal.setdefault((title, name), set()).add(repository)
        for key in code.differs:
            differs.setdefault(key, set()).add(repository)
    windows = {("window", "sliding"): {"Tencent-Hunyuan/MixGRPO"}}
    tests = [robots, *OTHERS]
    assert equal == joined(shown(EQUAL, STEPS), SHOWN_OTHERWISE, *(test.SHOWN for test in tests))
    of_chains = shown(DIFFERENT, STEPS_UP_TO_CONSTANTS)
    assert differs == joined(of_chains, windows, *(test.DIFFERENT for test in tests))
    assert set(REPOSITORIES) == set().union(*equal.values(), *differs.values()) == set().union(*files)
    assert {*equal, *differs} <= {(base.title, name) for base, name, _ in methods()}


def test_every_number_is_compared():
    compared = {case[:2] for case in (*CASES, *CHAINS)}
    numbers = {(repository, function) for repository, public in PUBLIC.items() for function in public["numbers"]}
    assert compared <= numbers
    elsewhere = set().union(*SHOWN_OTHERWISE.values(), {"Tencent-Hunyuan/MixGRPO"})
    assert {repository for repository, _ in numbers - compared} == elsewhere
    assert len(numbers - compared) == 10


def test_mmrl_methods_names_public_code_and_differences():
    by_covariance = describe_methods("covariance_clip")
    public = "PRIME-RL/Entropy-Mechanism-of-RL@88505792"
    assert f"  equal by value to {public} (tests/joints/test_*_numbers.py)" in by_covariance
    assert any(line.startswith(f"  differs from {public}: equal at the first update") for line in by_covariance)
    sapo = "volcengine/verl@b178a3cd, huggingface/trl@f2cd5771, hiyouga/EasyR1@b44b311b, inclusionAI/AReaL@4aef98d8, "
    others = "modelscope/ms-swift@3602360a, NovaSky-AI/SkyRL@a9564572"
    assert f"  equal by value to {sapo}{others} (tests" in "\n".join(describe_methods("soft"))
    assert not any("equal by value" in line or "differs" in line for line in describe_methods("gaussian_weight"))
    assert "RIPO" not in "".join(describe_methods("clip"))  # it has sqrt_clip alone


def test_each_method_is_compared_or_a_reason_is_given():
    kinds = {(base.title, name): method_class for base, name, method_class in methods()}
    compared = {key for key in kinds if compared_with(*key) or differs_from(*key)}
    written = {key for key, method_class in kinds.items() if is_reconstructed(method_class)}
    reasons = [(title, name) for title, each in REASONS.items() for names in each.values() for name in names.split()]
    assert len(reasons) == len(set(reasons)) and not {*reasons} & {*compared, *written}
    parts = {key for key in kinds if key[0] in PARTS} - compared - written
    assert {*reasons} == {*kinds} - compared - written - parts
    assert {title for title, _ in parts} == {*PARTS}
    assert "  not compared with public code: no public code of it was found" in describe_methods("gaussian_weight")
    assert "  not compared with public code: it was written without the authors' code" in describe_methods("rollback")
    assert not any("not compared" in line for line in describe_methods("clip"))
    assert reason_of("surrogate", "clip", reconstructed=False) is None


def test_the_overview_of_methods_says_as_which_code():
    notes = {line.split()[0]: line.rpartition(" (")[2] for line in describe_methods(None) if " (as " in line}
    assert notes["sqrt_clip"] == "as RIPO)" and notes["geometric"] == "as verl and 2 others)"
    assert notes["divergence_mask"] == "as SkyRL and 1 other)" and "gaussian_weight" not in notes
