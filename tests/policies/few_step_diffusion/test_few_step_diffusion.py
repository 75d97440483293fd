"""A few-step copy that draws the rollouts of a diffusion model: what it draws, what it learns, what is saved."""

import pytest
import torch

from mmrl.build import build_policy, build_task
from mmrl.config import validate
from mmrl.errors import UserError
from mmrl.policies.diffusion.loading import load
from mmrl.policies.diffusion.policy import DiffusionPolicy
from mmrl.policies.diffusion.small import SmallDiffusionConfig, create
from mmrl.policies.few_step_diffusion.settings import POLICY, SAMPLER
from mmrl.policies.networks import NamedNetwork
from mmrl.rollouts import Replay
from mmrl.samplers import score
from mmrl.samplers.chain import INITIAL, gaussian_noise
from mmrl.tasks.image_generation.data import digits

STEPS, GROUP, DRAWS = 4, 4, 2
TERM = {"type": "sampler_distillation", "coefficient": 3.0, "bound": 2.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("few_step")
    create(folder, SmallDiffusionConfig(words=tuple(digits.words()), width=32, depth=2, shift=2.0), 0)
    return folder


def config_of(folder, *, sampler=None, denoising=None, algorithm=None, path=None):
    return validate(
        {
            "run_dir": "unset",
            "model": {
                "type": "few_step_diffusion",
                "path": str(path or folder),
                "sampler": {"steps": 2, **(sampler or {})},
            },
            "task": {"type": "image_generation", "data": {"type": "digits"}},
            "rollout": {"prompts": 2, "group_size": GROUP},
            "denoising": {
                "steps": STEPS,
                "evaluation_steps": STEPS,
                "likelihood": {"type": "contrast", "draws": DRAWS},
                **(denoising or {}),
            },
            "algorithm": {"type": "contrast", "terms": [TERM], **(algorithm or {})},
        },
        "test",
    )


def made(folder, moved=True, **options):
    """The policy and its task; moved: the copy differs from the model, as after some steps."""
    config = config_of(folder, **options)
    task = build_task(config)
    policy = build_policy(config, task)
    if moved:
        torch.manual_seed(5)
        with torch.no_grad():
            for parameter in policy.module.parts[SAMPLER].parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    return policy, task


def rolled(policy, task, count=2):
    return policy.rollout([task.train[i] for i in range(count)], GROUP, list(range(20, 20 + count * GROUP)))


def close(one, other, atol=1e-5):
    torch.testing.assert_close(one, other, rtol=0, atol=atol)


def test_rollouts_are_drawn_by_the_copy_in_its_steps(folder):
    """Two Euler steps by hand, on every other point of the model's grid, without guidance."""
    policy, task = made(folder, denoising={"guidance": 3.0})
    batch = rolled(policy, task)
    sigmas = policy.policy.sampler.grid.sigmas
    network, family = policy.module.parts[SAMPLER], policy.policy.family
    for row in (0, 5):
        words = family.encode([batch.inputs[row].condition_inputs])[0]["words"][None]
        x = gaussian_noise([20 + row], INITIAL, policy.policy.shape)
        for a, b in ((0, 2), (2, 4)):
            x = x + (sigmas[b] - sigmas[a]) * network(x, sigmas[a][None], words)
        close(batch.inputs[row].data, x[0].detach())
    assert policy.max_decisions == DRAWS == batch.mask.shape[1]


def test_a_copy_with_as_many_steps_is_the_model(folder):
    """Its rollouts are the model's own, and no jump is away from where the model goes."""
    policy, task = made(folder, moved=False, sampler={"steps": STEPS})
    batch = rolled(policy, task)
    own = policy.policy.rollout([task.train[i] for i in range(2)], GROUP, list(range(20, 28)))
    for one, other in zip(batch.inputs, own.inputs, strict=True):
        close(one.data, other.data)
    close(policy.replay(batch, policy.module).extras["sampler_error"], torch.zeros(8, DRAWS), atol=1e-9)


def test_the_error_is_the_distance_from_the_secant_of_the_models_own_steps(folder):
    """By hand for one rollout: noise on the image, two guided steps of the model, the slope between their ends."""
    policy, task = made(folder, denoising={"guidance": 2.0})
    batch = rolled(policy, task)
    found = policy.replay(batch, policy.module).extras["sampler_error"]
    sigmas, family = policy.policy.sampler.grid.sigmas, policy.policy.family
    teacher, student = policy.module.parts[POLICY], policy.module.parts[SAMPLER]
    row = 3
    record = batch.inputs[row]
    words = family.encode([record.condition_inputs])[0]["words"][None]
    nothing = torch.zeros_like(words)
    levels, noises = (
        score.stratified(record.seed + 9101, DRAWS),
        score.draw_noises([record.seed + 9101], DRAWS, (1, 8, 8)),
    )
    for decision in range(DRAWS):
        a = 2 * int(levels[decision] * 2)
        assert a == (0, 2)[decision]  # one jump of each half
        x = start = (1 - sigmas[a]) * record.data[None] + sigmas[a] * noises[0, decision][None]
        for point in (a, a + 1):
            told, untold = (teacher(x, sigmas[point][None], said) for said in (words, nothing))
            x = x + (sigmas[point + 1] - sigmas[point]) * (untold + 2.0 * (told - untold))
        secant = (x - start) / (sigmas[a + 2] - sigmas[a])
        by_hand = (student(start, sigmas[a][None], words) - secant).square().mean()
        close(found[row, decision], by_hand)


def test_each_network_learns_from_its_own_part(folder):
    """The term moves the copy alone, contrast the model alone."""
    policy, task = made(folder)
    batch = rolled(policy, task)
    batch.advantages = torch.ones(8, DRAWS)

    def touched(value):
        policy.module.zero_grad()
        value.sum().backward()
        return {
            name
            for name, network in policy.module.parts.items()
            if any(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in network.parameters())
        }

    config = config_of(folder)
    assert touched(config.algorithm.terms[0].values(batch, policy.replay(batch, policy.module))[0]) == {SAMPLER}
    assert touched(config.algorithm.loss(batch, policy.replay(batch, policy.module))[0]) == {POLICY}
    with torch.no_grad():
        # nobody asks for the old or the reference copy
        assert policy.replay(batch, policy.module).extras.keys() <= {"matching"}


@pytest.mark.parametrize(
    ("options", "weights"),
    [({}, [1.0, 2.0, 0.0, 1.5]), ({"reward_aware": False}, [1.0] * 4)],
)
def test_images_that_earn_more_weigh_more(folder, options, weights):
    """Coefficient 3 and bound 2: A = 0, 2, -7 and 1."""
    (term,) = config_of(folder, algorithm={"terms": [{**TERM, **options}]}).algorithm.terms
    batch = rolled(*made(folder)).select(torch.arange(4))
    batch.advantages = torch.tensor([0.0, 2.0, -7.0, 1.0])[:, None].expand(4, DRAWS)
    error = torch.full((4, DRAWS), 0.5)
    values, stats = term.values(batch, Replay(torch.zeros(4, DRAWS), extras={"sampler_error": error}))
    close(values, 3.0 * 0.5 * torch.tensor(weights)[:, None].expand(4, DRAWS))
    close(stats["sampler_error"], error)


def test_a_share_of_each_group_is_the_copys(folder):
    policy, task = made(folder, sampler={"share": 0.5})
    batch = rolled(policy, task)
    prompts, seeds = [task.train[i] for i in range(2)], list(range(20, 28))
    few = policy.student.rollout(prompts, GROUP, seeds)
    own = policy.policy.rollout(prompts, GROUP, seeds)
    for row in range(8):
        expected = few if row % GROUP < 2 else own
        close(batch.inputs[row].data, expected.inputs[row].data)
        assert batch.samples[row].prompt.id == expected.samples[row].prompt.id
    assert batch.group.tolist() == [0] * GROUP + [1] * GROUP


def test_the_ratio_is_one_whoever_drew(folder):
    """With final images matched (AWM), and in micro-batches."""
    policy, task = made(
        folder,
        denoising={"likelihood": {"type": "matching", "draws": DRAWS}},
        algorithm={"type": "matching"},
    )
    batch = rolled(policy, task)
    with torch.no_grad():
        old = policy.replay(batch, policy.module)
    batch.old_prediction = old.prediction
    again = policy.replay(batch, policy.module)
    assert torch.equal(again.log_ratio.exp(), torch.ones(8, DRAWS))
    part = policy.replay(batch.select(torch.tensor([6, 1])), policy.module)
    close(part.extras["sampler_error"], again.extras["sampler_error"][[6, 1]])


def test_evaluation_is_the_models_or_the_copys(folder):
    policy, task = made(folder, denoising={"guidance": 2.0})
    prompts = [task.evaluation[i] for i in range(2)]
    own = policy.policy.respond(prompts, [4, 5])
    for one, other in zip(policy.respond(prompts, [4, 5]), own, strict=True):
        close(one.image, other.image)
    few, _ = made(folder, denoising={"guidance": 2.0}, sampler={"evaluates": True})
    drawn = few.student.rollout(prompts, 1, [4, 5]).samples
    for one, other, third in zip(few.respond(prompts, [4, 5]), drawn, own, strict=True):
        close(one.image, other.image)
        assert not torch.allclose(one.image, third.image, atol=1e-2)


def test_what_is_saved_is_the_model_with_its_sampler_beside_it(folder, tmp_path):
    policy, task = made(folder)
    policy.save(tmp_path / "final", policy.module.state_dict())
    again, _ = made(folder, moved=False, path=tmp_path / "final")
    for name, value in policy.module.state_dict().items():
        assert torch.equal(again.module.state_dict()[name], value), name
    alone = config_of(folder).model.model_copy(update={"path": str(tmp_path / "final")})
    plain = DiffusionPolicy(load(str(tmp_path / "final"), alone), policy.policy.denoising)
    close(plain.respond([task.evaluation[0]], [1])[0].image, policy.respond([task.evaluation[0]], [1])[0].image)


def test_the_copy_is_reached_through_the_engine(folder):
    """So that what wraps the module sees every forward."""
    policy, task = made(folder)
    batch, asked = rolled(policy, task), []

    def engine(name, *inputs, **options):
        asked.append(name)
        return policy.module(name, *inputs, **options)

    close(
        policy.distillation_errors(batch, NamedNetwork(engine, SAMPLER)),
        policy.replay(batch, policy.module).extras["sampler_error"],
    )
    policy.replay(batch, engine)
    assert asked == [SAMPLER, POLICY, SAMPLER]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": {"steps": 3}}, r"denoising.steps=4 must be a multiple of model.sampler.steps=3"),
        (
            {"denoising": {"likelihood": {"type": "chain"}}, "algorithm": {"type": "grpo"}},
            r"denoising.likelihood.type=chain scores the model.s own denoising steps",
        ),
    ],
)
def test_what_can_not_be_is_refused_before_anything_is_loaded(folder, options, message):
    with pytest.raises(UserError, match=message):
        config_of(folder, **options)


def test_the_term_is_refused_where_there_is_no_sampler():
    tree = {
        "run_dir": "unset",
        "model": {"type": "diffusion", "path": "x"},
        "task": {"type": "image_generation", "data": {"type": "digits"}},
        "denoising": {"likelihood": "contrast"},
        "algorithm": {"type": "contrast", "terms": [TERM]},
    }
    with pytest.raises(UserError, match=r"algorithm.terms.0.* needs a few-step sampler"):
        validate(tree, "test")
