"""A writer of prompts and a generator as one policy: what is drawn, what counts, how likely it is, what is saved."""

import json
from dataclasses import replace

import pytest
import torch

from mmrl.build import build_policy, build_task
from mmrl.config import validate
from mmrl.errors import UserError
from mmrl.policies.diffusion.policy import DiffusionPolicy
from mmrl.policies.diffusion.small import SmallDiffusionConfig, create
from mmrl.policies.prompt_rewriting.settings import GENERATOR, WRITER
from mmrl.rollouts import IMAGE, TEXT, Rollouts, part_mask
from mmrl.tasks.image_generation.data import digits
from mmrl.tasks.image_generation.tiny import rewriter

WORDS, STEPS, GROUP = 6, 3, 4  # the last of four denoising steps is not drawn


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewritten")
    create(folder / "generator", SmallDiffusionConfig(words=tuple(digits.words()), width=32, depth=2), 0)
    rewriter.build(folder / "writer", 0)
    return folder


def config_of(folders, *, writer=None, rollout=None, denoising=None, **more):
    return validate(
        {
            "run_dir": str(folders / "run"),
            "model": {
                "type": "prompt_rewriting",
                "path": str(folders / "generator"),
                "writer": {"path": str(folders / "writer"), "template": "Draw: {}", **(writer or {})},
            },
            "task": {"type": "image_generation", "data": {"type": "digits"}},
            "rollout": {"prompts": 2, "group_size": GROUP, "max_response_length": WORDS, **(rollout or {})},
            "denoising": {
                "steps": STEPS + 1,
                "evaluation_steps": STEPS + 1,
                "likelihood": {"transition": {"type": "flow_sde", "noise": 0.7}},
                **(denoising or {}),
            },
            **more,
        },
        "test",
    )


def made(folders, **options):
    config = config_of(folders, **options)
    task = build_task(config)
    return build_policy(config, task), task


def close(one, other):
    """Batches of another size round differently."""
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def rolled(policy, task, count=2, step=0):
    prompts = [task.train[i] for i in range(count)]
    return policy.rollout(prompts, GROUP, list(range(10, 10 + count * GROUP)), step=step)


def test_the_generator_draws_what_the_writer_wrote(folders):
    """The same images as the generator makes of these texts by itself, and the same texts as the writer's own."""
    policy, task = made(folders)
    batch = rolled(policy, task)
    prompts = [task.train[i] for i in range(2)]
    texts = [sample.response for sample in batch.samples]
    asked = [replace(prompt, text=f"Draw: {prompt.text}") for prompt in prompts]
    alone = policy.writer.rollout(asked, GROUP, list(range(10, 18)))
    assert texts == [sample.response for sample in alone.samples] and len(set(texts)) > 1
    told = policy._generator_prompts([prompt for prompt in prompts for _ in range(GROUP)], texts)
    drawn = policy.generator.rollout(told, 1, list(range(10, 18)))
    for sample, other, prompt in zip(
        batch.samples, drawn.samples, [p for p in prompts for _ in range(GROUP)], strict=True
    ):
        close(sample.image, other.image)
        assert sample.prompt.text == prompt.text  # which rewards compare the image with, not the text
    assert batch.group.tolist() == [0] * GROUP + [1] * GROUP


def test_words_come_first_and_steps_behind_them(folders):
    policy, task = made(folders)
    batch = rolled(policy, task)
    assert policy.max_decisions == WORDS + STEPS == batch.mask.shape[1]
    lengths = [sample.response_length for sample in batch.samples]
    for row, length in zip(batch.mask, lengths, strict=True):
        assert row.tolist() == [i < length for i in range(WORDS)] + [True] * STEPS
    assert torch.equal(part_mask(batch, TEXT), (torch.arange(WORDS + STEPS) < WORDS).expand(8, -1))
    assert torch.equal(part_mask(batch, IMAGE), ~part_mask(batch, TEXT))


def test_likelihoods_are_those_of_the_two_policies(folders):
    policy, task = made(folders)
    batch = rolled(policy, task)
    with torch.no_grad():
        replay = policy.replay(batch, policy.module)
        text = Rollouts(batch.samples, [r.text for r in batch.inputs], batch.group, batch.mask[:, :WORDS])
        steps = Rollouts(batch.samples, [r.image for r in batch.inputs], batch.group, batch.mask[:, WORDS:])
        words = policy.writer.replay(text, policy.writer.module).logp
        drawn = policy.generator.replay(steps, policy.generator.module).logp
    torch.testing.assert_close(replay.logp, torch.cat([words, drawn], 1), rtol=0, atol=0)
    again = policy.replay(batch, policy.module)
    assert torch.equal((again.logp.detach() - replay.logp).exp(), torch.ones_like(replay.logp))
    part = batch.select(torch.tensor([5, 2]))
    torch.testing.assert_close(policy.replay(part, policy.module).logp, replay.logp[[5, 2]], rtol=0, atol=2e-5)


def test_weights_of_denoising_steps_leave_those_of_words_at_1(folders):
    weighted = {"likelihood": {"transition": {"type": "flow_sde", "noise": 0.7}, "step_weight": "std"}}
    policy, task = made(folders, denoising=weighted)
    batch = rolled(policy, task)
    with torch.no_grad():
        weight = policy.replay(batch, policy.module).weight
        steps = Rollouts(batch.samples, [r.image for r in batch.inputs], batch.group, batch.mask[:, WORDS:])
        expected = policy.generator.replay(steps, policy.generator.module).weight
    assert (
        torch.equal(weight, torch.cat([torch.ones(len(batch), WORDS), expected], 1)) and expected.unique().numel() > 1
    )


def test_ratios_of_steps_are_in_their_exact_form(folders):
    """After an update of 1e-6 the difference of two log-probabilities is rounding; those of the generator alone are
    exact, and the ratios of words are differences as ever."""
    policy, task = made(folders)
    batch = rolled(policy, task)
    with torch.no_grad():
        old = policy.replay(batch, policy.module)
        batch.old_logp, batch.old_prediction = old.logp, old.prediction
        batch.ref_logp, batch.ref_prediction = old.logp, old.prediction
        same = policy.replay(batch, policy.module)
        for parameter in policy.module.parameters():
            parameter += 1e-6
        now = policy.replay(batch, policy.module)
        steps = Rollouts(batch.samples, [r.image for r in batch.inputs], batch.group, batch.mask[:, WORDS:])
        steps.old_prediction = old.prediction
        alone = policy.generator.replay(steps, policy.generator.module)
    assert not same.log_ratio.any() and not same.extras["reference_log_ratio"].any()
    assert torch.equal(now.log_ratio[:, WORDS:], alone.log_ratio) and bool(alone.log_ratio.any())
    assert torch.equal(now.log_ratio[:, :WORDS], now.logp[:, :WORDS] - old.logp[:, :WORDS])
    assert torch.equal(now.extras["reference_log_ratio"], now.log_ratio)


def test_both_networks_get_their_gradient(folders):
    """That of the sum over words falls on the writer alone, that over steps on the generator alone."""
    policy, task = made(folders)
    batch = rolled(policy, task)
    for columns, touched, other in ((slice(0, WORDS), WRITER, GENERATOR), (slice(WORDS, None), GENERATOR, WRITER)):
        policy.module.zero_grad()
        policy.replay(batch, policy.module).logp[:, columns][batch.mask[:, columns]].sum().backward()

        def norm(name):
            parameters = policy.module.parts[name].parameters()
            return sum(float(p.grad.abs().sum()) for p in parameters if p.grad is not None)

        assert norm(touched) > 0 and norm(other) == 0


def test_some_of_a_group_are_drawn_from_the_prompt_as_it_is(folders):
    policy, task = made(folders, writer={"originals": 1})
    batch = rolled(policy, task)
    prompts = [task.train[i] for i in range(2)]
    plain = policy.generator.rollout(prompts, 1, [10, 14])
    for row, (prompt, image) in zip((0, GROUP), zip(prompts, plain.samples, strict=True), strict=True):
        sample = batch.samples[row]
        close(sample.image, image.image)
        assert (sample.response, sample.response_length) == (prompt.text, 0)
        assert batch.mask[row].tolist() == [False] * WORDS + [True] * STEPS
    assert batch.mask[[1, 2, 3, 5, 6, 7], 0].all()


def test_evaluation_asks_both(folders):
    """The likeliest text of each prompt, and the image of it without noise."""
    policy, task = made(folders, evaluation={"temperature": 0.0})
    prompts = [task.evaluation[i] for i in range(3)]
    found = policy.respond(prompts, [1, 2, 3])
    texts = [s.response for s in policy.writer.respond([policy._writer_prompt(p) for p in prompts], [7, 8, 9])]
    assert [sample.response for sample in found] == texts
    drawn = policy.generator.respond(policy._generator_prompts(prompts, texts), [1, 2, 3])
    for a, b in zip(found, drawn, strict=True):
        close(a.image, b.image)
    assert [sample.prompt for sample in found] == prompts


def test_what_is_saved_loads_as_one_and_as_two(folders, tmp_path):
    policy, task = made(folders)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.add_(0.01)
    policy.save(tmp_path / "final", policy.module.state_dict())
    config = config_of(folders, writer={"path": None})
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(tmp_path / "final")})})
    again = build_policy(config, task)
    for name, parameter in again.module.state_dict().items():
        assert torch.equal(parameter, policy.module.state_dict()[name]), name
    assert json.loads((tmp_path / "final" / WRITER / "config.json").read_text())["model_type"]
    alone = DiffusionPolicy(policy.generator.family, policy.generator.denoising)
    assert torch.equal(
        alone.respond([task.evaluation[0]], [3])[0].image,
        again.generator.respond([task.evaluation[0]], [3])[0].image,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"writer": {"originals": GROUP}}, r"model.writer.originals=4 leaves no rollout of rollout.group_size=4"),
        ({"writer": {"template": "no place"}}, r"template must hold \{\} exactly once"),
        ({"denoising": {"likelihood": {"type": "contrast"}}}, r"denoising.likelihood"),
        ({"denoising": {"likelihood": {"shared_states": True}}}, r"branching, shared_states and chunks"),
        ({"rollout": {"generator": {"type": "vllm_colocated"}}}, r"rollout.generator.type=vllm_colocated"),
        ({"algorithm": {"type": "supervised"}}, r"unknown key rollout.group_size"),
        ({"algorithm": {"terms": [{"type": "entropy", "coefficient": 0.1}]}}, r"needs an entropy of each decision"),
    ],
)
def test_what_can_not_be_is_refused_before_anything_is_loaded(folders, options, message):
    with pytest.raises(UserError, match=message):
        config_of(folders, **options)


def test_a_generator_without_a_writer_is_refused(folders):
    config = config_of(folders, writer={"path": None})
    with pytest.raises(
        UserError, match=r"model.writer.path is missing: .*generator holds an image generator, but no language"
    ):
        build_policy(config, build_task(config))
