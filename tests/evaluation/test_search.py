"""Search at inference: best_of (BestOf) and particles (Particles), from the key to the image that is kept."""

import json
import math

import pytest
import torch

from mmrl import build
from mmrl.cli import main as cli
from mmrl.config import load, validate
from mmrl.errors import UserError
from mmrl.evaluation.search import BestOf, Particles
from mmrl.policies.diffusion.family import ModelNotes, Shape
from mmrl.policies.diffusion.steering import Steering, particles, resampled, steered
from mmrl.rollouts import Prompt
from mmrl.samplers.chain import derive_seed
from mmrl.samplers.settings import DDIM, FlowSDE
from mmrl.tasks.image_generation.tiny import model as tiny_model
from tests.joints.parts import Table, job


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    tiny_model.build_digits(str(folder), seed=0)
    return folder


def parts(folder, *, likelihood="chain", search=None, steps=6):
    config = validate(
        {
            "run_dir": "unset",
            "model": {"type": "diffusion", "path": str(folder)},
            "task": {"type": "image_generation", "data": {"type": "digits"}},
            "denoising": {"likelihood": likelihood, "evaluation_steps": steps},
            "algorithm": {"type": "matching" if likelihood == "matching" else "grpo"},
            "sample": {"search": search},
        },
        "test",
    )
    task = build.build_task(config)
    return config, task, build.build_policy(config, task)


def test_the_best_of_several_seeds_is_kept(folder):
    _, task, policy = parts(folder)
    prompts, seeds = [task.evaluation[i] for i in range(3)], [11, 12, 13]
    found = BestOf(count=4).respond(policy, task, prompts, seeds)
    for prompt, seed, kept in zip(prompts, seeds, found, strict=True):
        each = policy.respond([prompt] * 4, [derive_seed(seed, n) % 2**32 for n in range(4)])
        marks = task.score(each, torch.zeros(4, dtype=torch.long))[:, 0]
        torch.testing.assert_close(kept.image, each[int(marks.argmax())].image, rtol=0, atol=1e-5)
        assert marks.max() > marks.min()


def test_what_can_not_be_scored_is_not_kept(tmp_path):
    """By weights of several rewards: 1 x first - 2 x second, so -1 is the best that is known."""
    rewards = [[-1.0, 0.0], [3.0, 2.5], [math.nan, 0.0]]
    made = job(tmp_path, Table([[-1.0]] * 3, rewards=rewards), "task.names=[a, b]", "task.weights=[1, -2]")
    task, policy = made.trainer.task, made.trainer.policy
    policy.respond = lambda prompts, seeds: [made.table.sample(row, prompts[0]) for row in range(3)]
    assert BestOf(count=3).respond(policy, task, [Prompt("p", "?")], [0])[0].response == "0"
    made.close()


def test_shares_become_copies():
    same = torch.zeros(5)
    assert all(torch.equal(resampled(same, seed), torch.arange(5)) for seed in range(20))
    assert resampled(torch.tensor([0.0, 50.0, 0.0]), 1).tolist() == [1, 1, 1]
    logits = torch.tensor([0.5, 0.25, 0.25, 0.0]).log()
    counts = torch.stack([torch.bincount(resampled(logits, seed), minlength=4) for seed in range(200)])
    assert (counts == torch.tensor([2, 1, 1, 0])).all()
    half = torch.stack(
        [torch.bincount(resampled(torch.tensor([0.375, 0.625]).log(), s), minlength=2) for s in range(400)]
    )
    assert abs(float(half[:, 0].float().mean()) - 0.75) < 0.07
    nothing = torch.tensor([-math.inf, -math.inf, math.nan])
    assert resampled(nothing, 3).tolist() == [0, 1, 2]
    assert 0 not in resampled(torch.tensor([-math.inf, 0.0, 0.0]), 3).tolist()


class Exact:
    """Data of one number that is standard normal: what the velocity is, is known. Images are the numbers."""

    space = "velocity"
    norm_patch = None
    notes = ModelNotes()

    def __init__(self, family):
        self.family, self.module = family, family.module

    def latent_shape(self, resolution, frames=None) -> Shape:
        return (1, 1, 1)

    def grid(self, steps, shape):
        return self.family.grid(steps, shape)

    def encode(self, asked, shape=()):
        return [{} for _ in asked]

    def truncated_tokens(self, text):
        return 0

    def predict(self, model, x, time, conditions, guidance):
        s = time.view(-1, 1, 1, 1).to(x)
        return (2 * s - 1) * x / ((1 - s) ** 2 + s**2)

    def decode(self, latents):
        return latents


def level(samples, group):
    return torch.stack([sample.image.flatten()[0] for sample in samples])


def test_particles_are_tilted_by_the_reward(folder):
    """Of standard normal data and r(x) = x: weights exp(l E[x_0 | x_s]) move the mean by l Var E[x_0 | x_s], which is l
    (1 - s)^2 / ((1 - s)^2 + s^2) at the last choice; without strength there is no move."""
    policy = type(parts(folder)[2])(Exact(parts(folder)[2].family), parts(folder, steps=40)[0].section("denoising"))
    means = {}
    for strength in (0.0, 0.8):
        steering = Steering(2000, 6, strength, FlowSDE(noise=0.7))
        final, _, _ = particles(policy, [Prompt("p", "a")], [5], steering, level)
        means[strength] = float(final.mean())
        assert abs(float(final.std()) - 1) < 0.1
    s = float(policy.family.grid(40, (1, 1, 1)).sigmas[36])
    expected = 0.8 * (1 - s) ** 2 / ((1 - s) ** 2 + s**2)
    assert abs(means[0.0]) < 0.08 and means[0.8] == pytest.approx(expected, abs=0.12), (means, expected)


def test_a_steered_image_is_the_best_of_its_particles_and_follows_from_its_seed(folder):
    _, task, policy = parts(folder, likelihood="matching")
    search = Particles(count=5, every=2, strength=1.0)
    prompts = [task.evaluation[i] for i in range(2)]
    both = search.respond(policy, task, prompts, [3, 4])
    alone = search.respond(policy, task, prompts[1:], [4])
    torch.testing.assert_close(both[1].image, alone[0].image, rtol=0, atol=1e-4)
    steering = Steering(5, 2, 1.0, search.transition)

    def score(samples, group):
        return task.score(samples, group)[:, 0]

    final, each, group = particles(policy, prompts, [3, 4], steering, score)
    made = [policy.family.decode(one[None])[0] for one in final]
    marks = score([type(both[0])(p, image=m) for p, m in zip(each, made, strict=True)], group)
    assert torch.equal(both[0].image, made[int(marks[:5].argmax())])
    assert torch.equal(steered(policy, prompts, [3, 4], steering, score)[0].image, both[0].image)


def test_particles_need_a_denoiser_and_its_own_transition(folder):
    searched = {"run_dir": "r", "sample": {"search": "particles"}}
    flow = {"model": {"type": "vision_language_action", "path": "p"}, "action": {"head": {"type": "flow"}}}
    few = {
        "model": {"type": "few_step_diffusion", "path": "p"},
        "denoising": {"likelihood": "contrast"},
        "algorithm": {"type": "contrast"},
    }
    for tree, told in (
        ({"model": {"path": "p"}}, "model.type=vision_language"),
        (flow, "action.head.type=flow"),
        (few, "model.type=few_step_diffusion"),
    ):
        with pytest.raises(
            UserError, match=f"is for model.type=diffusion, not for {told}; set sample.search.type=best_of"
        ):
            validate({**searched, **tree}, "test")
    _, task, policy = parts(folder)
    with pytest.raises(
        UserError, match="sample.search.transition.type=ddim does not fit a model that predicts velocity"
    ):
        Particles(transition=DDIM()).respond(policy, task, [task.evaluation[0]], [0])


@pytest.mark.parametrize("command", ["sample", "eval"])
def test_the_command_line_searches(folder, tmp_path, command, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "run_dir: unset\nmodel: {type: diffusion}\ntask: {type: image_generation, data: {type: digits}}\n"
        "denoising: {evaluation_steps: 3}\nevaluation: {prompts: 6}\n"
    )
    assert load(recipe).sample.search is None
    more = ["--count", "6"] if command == "sample" else []
    model = tmp_path / "model"
    tiny_model.build_digits(str(model), seed=0)
    marks = {}
    for search in ("null", "{type: best_of, count: 6}"):
        with pytest.raises(SystemExit) as ended:
            cli.main([command, str(model), str(recipe), f"sample.search={search}", *more])
        assert ended.value.code == 0
        marks[search] = capsys.readouterr().out
    assert marks["null"] != marks["{type: best_of, count: 6}"]
    if command == "eval":
        assert json.loads((model / "evaluation.json").read_text())["protocol"]["sample"]["search"]["count"] == 6
