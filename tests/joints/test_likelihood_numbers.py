"""Likelihoods and distillation beside the code that people run: numbers that public functions gave.

`likelihood_numbers.json` holds, by repository, the commit and the files, and for each function its inputs and what it
returned. Networks are replaced by tables of these inputs; random masks and matrices are those of the seed here."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mmrl.algorithms.algorithm import Algorithm
from mmrl.algorithms.recorded.recorded import RETURNS
from mmrl.measurements.teachers import TeacherDistributions, TeacherLikelihoods
from mmrl.policies.discrete_diffusion.settings import MaskedLikelihood
from mmrl.policies.vla.heads.flow import ExpertHead, FlowHead, grid
from mmrl.policies.vla.heads.gaussian import NormalHead, SquashedGaussianHead
from mmrl.policies.vla.settings import ActionLikelihood
from mmrl.protocols.choices import WholeVocabulary
from mmrl.rollouts import ALTERNATIVES, Column, DecisionColumn, Replay
from mmrl.settings import choose
from tests.joints.parts import Table, close
from tests.joints.public_cases import INPUTS
from tests.policies.discrete_diffusion.parts import PROMPT, forget_end, policy_of

PUBLIC = json.loads((Path(__file__).parent / "likelihood_numbers.json").read_text())["repositories"]
# The methods that this shows, by title of the choice and name, with the repositories.
SHOWN = {
    ("action head", "gaussian"): {"vwxyzjn/cleanrl"},
    ("algorithm", "advantage_weighted"): {"irom-princeton/dppo"},
    ("algorithm", "distillation"): {"huggingface/trl"},
    ("algorithm", "grpo"): {"xingzhejun/GCPO"},
    ("algorithm", "matching"): {"akanazawa/fpo"},
    ("estimator of distillation", "full"): {"huggingface/trl"},
    ("likelihood", "learned"): {"ReinFlow/ReinFlow"},
    ("likelihood", "matching"): {"akanazawa/fpo"},
    ("likelihood of a masked response", "coupled"): {"apple/ml-diffucoder"},
    ("likelihood of a masked response", "elbo"): {"ML-GSAI/LLaDA"},
    ("likelihood of a masked response", "one_step"): {"dllm-reasoning/d1"},
    ("order of unmasking", "confidence"): {"ML-GSAI/LLaDA"},
}
DIFFERENT = {
    ("action head", "squashed_gaussian"): {"vwxyzjn/cleanrl"},
    ("estimator of distillation", "sampled"): {"modelscope/ms-swift"},
}


def functions(repository, *begins):
    """Cases for `parametrize`: inputs and results of a repository's functions whose names begin so."""
    numbers = PUBLIC[repository]["numbers"]
    return [pytest.param(numbers[name], id=name) for name in numbers if name.startswith(begins)]


def tensor(values):
    return torch.tensor(values, dtype=torch.float32)


# --- masked responses ---


def of_states(options, expected, prompt=0):
    """The states of a likelihood for a response of four, and the log-likelihood of each token where the model says the
    logits, [state, position, token]."""
    likelihood = choose(MaskedLikelihood, options)
    states = likelihood.states(expected["seed"], prompt, torch.zeros(4, dtype=torch.long), 4)
    logp = tensor(expected["logits"]).log_softmax(-1)
    logp = logp.expand(len(states.masked), -1, -1)[:, range(4), expected["response"]]
    return states, (states.weight * logp).sum(0)


@pytest.mark.parametrize("expected", functions("dllm-reasoning/d1", "_get_per_token_logps"))
def test_a_response_in_one_state_with_hidden_tokens_of_the_prompt(expected):
    options = {"type": "one_step", "prompt_mask": expected["probability"]}
    states, logp = of_states(options, expected, expected["prompt"])
    close(torch.cat([states.prompt_masked, states.masked], 1)[0], [flag == 1 for flag in expected["masked"]])
    close(logp, expected["logp"])


@pytest.mark.parametrize("expected", functions("apple/ml-diffucoder", "selective_log_softmax"))
def test_a_response_in_states_with_complementary_masks(expected):
    states, logp = of_states({"type": "coupled", "pairs": 1, "levels": [0.2, 0.8]}, expected)
    close(states.masked.long(), expected["masked"])
    close(logp, expected["logp"])


@pytest.mark.parametrize("expected", functions("ML-GSAI/LLaDA", "get_log_likelihood"))
def test_the_evidence_lower_bound(expected):
    states, logp = of_states({"type": "elbo", "draws": len(expected["masked"])}, expected)
    close(states.masked.long(), expected["masked"])
    close(logp.sum(), expected["logp"], atol=5e-6)


@pytest.mark.parametrize("expected", functions("ML-GSAI/LLaDA", "generate"))
def test_positions_are_filled_in_the_same_steps(tmp_path, monkeypatch, expected):
    unmasking = {"block": expected["block"], "steps": expected["steps"], "order": "confidence"}
    policy = forget_end(policy_of(tmp_path, length=8, unmasking=unmasking))
    first, told = expected["first"], tensor(expected["logits"])

    def logits(ids, mask, rows, *places, vocabulary=64):
        """What each position says, whatever was filled."""
        table = torch.full((len(rows), vocabulary), -30.0)
        table[:, first : first + told.shape[1]] = told
        return table

    monkeypatch.setattr(policy.module, "logits", logits)
    (record,) = policy._sample([policy.layout.encode(PROMPT)], [0], 0.0)
    assert record.steps.tolist() == expected["filled"] and record.response.tolist() == expected["response"]


# --- chunks of actions ---


@pytest.mark.parametrize(("function", "reduction"), [("", "sum"), (" normalized", "mean")])
def test_chains_whose_noise_is_learned(function, reduction):
    """Time runs from noise to actions there, so velocities have the other sign. tanh bounds the log-variance there, and
    the log of the deviation here. Normalized, the entropy is a mean too; else it is a mean over steps there alone."""
    expected = PUBLIC["ReinFlow/ReinFlow"]["numbers"][f"get_logprobs process_noise{function}"]
    likelihood = choose(ActionLikelihood, {"type": "learned", "range": expected["range"], "reduction": reduction})
    chain, velocity = tensor(expected["chain"]), tensor(expected["velocity"]).requires_grad_()
    n, steps = velocity.shape[:2]
    head = SimpleNamespace(sampler=SimpleNamespace(grid=grid(steps)))

    def run_expert(prefix, state, x, sigma, rows):
        assert sigma.tolist() == pytest.approx([1 - k / steps for k in range(steps)] * n)
        log_variance = tensor(expected["log_variance"]).view_as(velocity)
        return -velocity.flatten(0, 1), log_variance.flatten(0, 1).tanh()

    head._run_expert = run_expert
    head._learned_step = partial(ExpertHead._learned_step, head)
    valid = torch.ones(n, 2, dtype=torch.bool)
    found = ExpertHead._score_learned(head, likelihood, None, None, {"chain": chain}, valid)
    close(found["logp"][:, 0], expected["logp"], atol=2e-4)
    close(found["entropy"][:, 0] / (steps if reduction == "sum" else 1), expected["entropy"], atol=2e-5)
    (gradient,) = torch.autograd.grad(found["logp"].sum(), velocity)
    close(gradient, expected["gradient"], atol=2e-4)


@pytest.mark.parametrize("expected", functions("akanazawa/fpo", "actor_loss"))
def test_ratios_of_flow_matching_errors(expected):
    """At time t there the noise level here is 1 - t, and velocities have the other sign."""
    likelihood = choose(ActionLikelihood, {"type": "matching", "draws": 2})
    velocity = tensor(expected["velocity"]).requires_grad_()
    n = len(velocity)
    head = SimpleNamespace(_executed=lambda latent: latent, _velocity=lambda *inputs: -velocity[:, :, None])
    sampled = {
        "sigma": 1 - tensor(expected["time"]),
        "data": tensor(expected["actions"])[:, None],
        "noise": tensor(expected["noise"])[:, :, None],
    }
    old = -tensor(expected["old_velocity"])[:, None, :, None]
    valid = torch.ones(n, 1, dtype=torch.bool)
    found = FlowHead._score_matching(head, likelihood, None, None, sampled, valid, old, None)
    close(found["log_ratio"][:, 0].exp(), expected["ratio"], atol=5e-6)
    algorithm = choose(Algorithm, {"type": "matching", "surrogate": {"type": "clip", "low": 0.2, "high": 0.2}})
    micro = Table([[-1.0]] * n).rollouts()
    micro.advantages = tensor(expected["advantages"])[:, None]
    loss = algorithm.loss(micro, Replay(found["logp"], log_ratio=found["log_ratio"]))[0].mean()
    loss.backward()
    close(loss.detach(), expected["loss"], atol=5e-6)
    close(velocity.grad, expected["gradient"], atol=5e-6)


class Around(NormalHead):
    """A Gaussian head whose mean and deviations are given, one decision a chunk of one action."""

    decisions = 1

    def __init__(self, log_std):
        torch.nn.Module.__init__(self)
        self.log_std = tensor(log_std)

    def clamped_log_std(self):
        return self.log_std

    def _by_level(self, values, valid):
        return values.sum((1, 2))[:, None]


class SquashedAround(SquashedGaussianHead, Around):
    """The same with tanh."""

    __init__ = Around.__init__
    clamped_log_std, _by_level = Around.clamped_log_std, Around._by_level


def scored_by(head, expected, names):
    """The mean that a head's policy says, and its scores of what was sampled."""
    mean = tensor(expected["mean"])[:, None].requires_grad_()
    sampled = {name: tensor(expected[name])[:, None] for name in names} | {"temperature": torch.ones(3)}
    return mean, head.score_around(mean, sampled, torch.ones(3, 1, dtype=torch.bool), None, None)


def test_gaussian_actions():
    expected = PUBLIC["vwxyzjn/cleanrl"]["numbers"]["get_action_and_value"]
    mean, found = scored_by(Around(expected["log_std"]), expected, ["actions"])
    close(found["logp"][:, 0], expected["logp"])
    close(found["entropy"][:, 0], expected["entropy"])
    found["logp"].sum().backward()
    close(mean.grad[:, 0], expected["gradient"])


def test_gaussian_actions_after_tanh():
    """1e-6 is added to the slope of tanh there."""
    expected = PUBLIC["vwxyzjn/cleanrl"]["numbers"]["get_action"]
    _, found = scored_by(SquashedAround(expected["log_std"]), expected, ["actions", "before_tanh"])
    close(found["logp"][:, 0], expected["logp"], atol=2e-5)
    assert not torch.allclose(found["logp"][:, 0], tensor(expected["logp"]), atol=1e-6, rtol=0)


def test_imitation_weighted_by_advantages():
    """The log-likelihood of an action is a mean over its numbers there."""
    expected = PUBLIC["irom-princeton/dppo"]["numbers"]["RWR_Gaussian.loss advantages_b_scaled"]
    mean, found = scored_by(Around(expected["log_std"]), expected, ["actions"])
    weights = {"temperature": expected["temperature"], "most": expected["most"]}
    algorithm = choose(Algorithm, {"type": "advantage_weighted", "weights": weights})
    micro = Table([[-1.0]] * 3).rollouts()
    micro.extras[RETURNS] = Column(tensor(expected["advantages"]) + 0.3)
    replay = Replay(found["logp"] / 2, value=torch.full((3, 1), 0.3))
    loss = algorithm.loss(micro, replay)[0].mean()
    loss.backward()
    close(loss.detach(), expected["loss"])
    close(mean.grad[:, 0], expected["gradient"])


# --- chunks of denoising steps ---


@pytest.mark.parametrize("expected", functions("xingzhejun/GCPO", "loss of chunks"))
def test_ratios_of_chunks_of_steps(given, expected):
    segments = [[c for c, size in enumerate(expected["sizes"]) for _ in range(size)]] * 3
    table = Table(expected["old_logp"], rewards=expected["rewards"], segments=segments)
    surrogate = "{type: clip, low: 0.2, high: 0.28}"
    config = f"algorithm={{type: grpo, level: segment, baseline: none, scale: none, surrogate: {surrogate}}}"
    made = given(table, config, "rollout={prompts: 1, group_size: 3}", "algorithm.epochs=2")
    made.prepare()
    made.move(logp=expected["moved"])
    close(made.learn(), expected["loss"])
    close(made.gradient(), expected["gradient"])


# --- distillation ---


@pytest.mark.parametrize("expected", functions("huggingface/trl", "generalized_jsd_loss"))
def test_the_divergence_from_a_teacher_over_the_vocabulary(expected):
    """The mean over the decisions of both responses, of three and of two."""
    options = {"teacher": "reference", "estimator": "full", "direction": expected["direction"]}
    algorithm = choose(Algorithm, {"type": "distillation", **options})
    micro = Table([[-1.0] * length for length in expected["lengths"]]).rollouts()
    teacher = tensor(expected["teacher"]).log_softmax(-1)
    listed = WholeVocabulary.from_ids(torch.arange(4), micro.mask.shape)
    listed.logp = teacher
    micro.extras[TeacherDistributions(algorithm.teacher, None).name] = listed
    student = tensor(expected["student"]).requires_grad_()
    replay = Replay(torch.zeros(micro.mask.shape))
    replay.extras[ALTERNATIVES.name] = student.log_softmax(-1)
    loss = algorithm.loss(micro, replay)[0][micro.mask].mean()
    loss.backward()
    close(loss.detach(), expected["loss"])
    close(student.grad, expected["gradient"])


@pytest.mark.parametrize(("when", "is_equal"), [(" at the first update", True), ("", False)])
def test_the_log_ratio_of_a_teacher_at_sampled_tokens(when, is_equal):
    """There it is an advantage with PPO's clip, of the policy that sampled; here of the present policy, unclipped."""
    name = f"expand_advantage_to_per_token teacher_kl_coef=1{when}"
    expected = PUBLIC["modelscope/ms-swift"]["numbers"][name]
    algorithm = choose(Algorithm, {"type": "distillation", "teacher": "reference"})
    table = Table(INPUTS["old_logp"], teacher=expected["teacher"], moved=INPUTS["moved"])
    micro, old = table.rollouts(), table.columns["logp"]
    micro.old_logp = old
    micro.extras[TeacherLikelihoods(algorithm.teacher).name] = DecisionColumn(table.columns["teacher"])
    logp = (old if is_equal else old + table.columns["moved"]).clone().requires_grad_()
    loss = algorithm.loss(micro, Replay(logp))[0][table.mask].mean()
    loss.backward()
    found = [row[: len(theirs)] for row, theirs in zip(logp.grad, expected["gradient"], strict=True)]
    assert torch.allclose(torch.cat(found), tensor(sum(expected["gradient"], [])), atol=2e-6) is is_equal
