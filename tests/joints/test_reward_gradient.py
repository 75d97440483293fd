"""A differentiable reward climbed through the last steps of a chain: reward_gradient (RewardGradient), from the key to
the gradient of the weights."""

import pytest
import torch

from mmrl import build
from mmrl.config import validate
from mmrl.errors import UserError
from mmrl.rewards.visual.images import ClassifierLogp
from mmrl.rollouts import Prompt
from mmrl.tasks.image_generation.tiny import model as tiny_model

CLASSIFIER = {"name": "classifier_logp", "options": {"classifier": "tests.joints.test_reward_gradient:judge"}}


def judge():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))


class Smooth:
    """log p(class) without a border at 0 and 1, so that differences say what its gradient is."""

    scope = "sample"

    def score(self, samples):
        return self.differentiable(torch.stack([s.image for s in samples]), [s.prompt for s in samples]).tolist()

    def differentiable(self, images, prompts):
        logp = judge()(images).log_softmax(-1)
        return torch.stack([row[prompt.answer] for row, prompt in zip(logp, prompts, strict=True)])


class Bright:
    """How light an image is, with its gradient."""

    scope = "sample"

    def score(self, samples):
        return [float(s.image.mean()) for s in samples]

    def differentiable(self, images, prompts):
        return images.flatten(1).mean(1)


SMOOTH = {"name": "tests.joints.test_reward_gradient:Smooth", "weight": 2.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    tiny_model.build_digits(str(folder), seed=0)
    return folder


def parts(folder, *, steps=2, reward=None, likelihood="last_steps", algorithm="reward_gradient", **denoising):
    own = {"type": likelihood, **({"steps": steps} if likelihood == "last_steps" else {})}
    reward = {"reward": reward or CLASSIFIER} if algorithm == "reward_gradient" else {}
    config = validate(
        {
            "run_dir": "unset",
            "model": {"type": "diffusion", "path": str(folder)},
            "task": {"type": "image_generation", "data": {"type": "digits"}},
            "denoising": {"steps": 4, "likelihood": own, **denoising},
            "algorithm": {"type": algorithm, **reward},
        },
        "test",
    )
    policy = build.load_policy(config, None, str(folder))
    return config.algorithm, policy


PROMPTS = [Prompt("a", "a handwritten seven", answer=7), Prompt("b", "draw a two", answer=2)]


@pytest.mark.parametrize("steps", [1, 3])
def test_the_gradient_is_that_of_the_reward_through_as_many_steps(folder, steps):
    """Against finite differences of the loss along a direction, with the latents before the last steps held fixed."""
    algorithm, policy = parts(folder, steps=steps, reward=SMOOTH)
    batch = policy.rollout(PROMPTS, 1, [1, 2])

    def loss():
        values, stats = algorithm.loss(batch, policy.replay(batch, policy.module))
        return values.sum(), stats

    value, stats = loss()
    assert float(value.detach()) == pytest.approx(-2 * sum(Smooth().score(batch.samples)), rel=1e-4)
    assert stats["reward_gradient/reward"].shape == batch.mask.shape == (2, 1)
    weights = list(policy.module.parameters())
    gradient = torch.autograd.grad(value, weights)
    random = torch.Generator().manual_seed(1)
    direction = [torch.randn(w.shape, generator=random) for w in weights]
    slope = sum((g * d).sum() for g, d in zip(gradient, direction, strict=True))
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            for w, d in zip(weights, direction, strict=True):
                w += sign * 1e-4 * d
            ends.append(float(loss()[0]))
            for w, d in zip(weights, direction, strict=True):
                w -= sign * 1e-4 * d
    assert float(slope) == pytest.approx((ends[0] - ends[1]) / 2e-4, rel=0.05) and abs(float(slope)) > 1e-3


def test_more_steps_have_another_gradient_and_the_same_image(folder):
    found = []
    for steps in (1, 4):
        algorithm, policy = parts(folder, steps=steps)
        batch = policy.rollout(PROMPTS, 1, [1, 2])
        now = policy.replay(batch, policy.module)
        torch.testing.assert_close(
            now.extras["images"].detach(), torch.stack([s.image for s in batch.samples]), rtol=0, atol=1e-5
        )
        values, _ = algorithm.loss(batch, now)
        found.append((now.extras["images"].detach(), torch.autograd.grad(values.sum(), policy.module.leave.weight)[0]))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=1e-5)
    assert (found[0][1] - found[1][1]).abs().max() > 1e-4


def test_a_reward_has_the_gradient_of_the_border_outside_it():
    reward = ClassifierLogp(classifier="tests.joints.test_reward_gradient:judge")
    images = torch.full((1, 1, 8, 8), 1.5, requires_grad=True)
    (outside,) = torch.autograd.grad(reward.differentiable(images, PROMPTS[:1]).sum(), images)
    border = torch.ones(1, 1, 8, 8, requires_grad=True)
    (at,) = torch.autograd.grad(reward.differentiable(border, PROMPTS[:1]).sum(), border)
    assert torch.equal(outside, at) and at.abs().max() > 0


def climbed(folder, reward, steps=8):
    """The rewards of so many updates of a tiny model, which is written where there is none."""
    if not any(folder.iterdir()):
        tiny_model.build_digits(str(folder), seed=0)
    algorithm, policy = parts(folder, reward=reward)
    optimizer = torch.optim.Adam(policy.module.parameters(), lr=1e-3)
    rewards = []
    for _ in range(steps):
        batch = policy.rollout(PROMPTS, 1, [1, 2])
        values, stats = algorithm.loss(batch, policy.replay(batch, policy.module))
        rewards.append(float(stats["reward_gradient/reward"].mean()))
        optimizer.zero_grad()
        values.mean().backward()
        optimizer.step()
    return rewards


def test_it_climbs(folder):
    rewards = climbed(folder, None)
    assert rewards[-1] > rewards[0] + 0.02


def test_what_has_no_gradient_is_one_line(folder):
    algorithm, _ = parts(folder, reward={"name": "jpeg_compressibility"})
    with pytest.raises(ValueError, match="algorithm.reward.name=jpeg_compressibility has no gradient"):
        algorithm.check_rewards([])
    with pytest.raises(UserError, match="last_steps gives no likelihood, which algorithm.type=grpo needs"):
        parts(folder, algorithm="grpo")
    with pytest.raises(UserError, match="needs images with their gradient"):
        parts(folder, likelihood="chain")
    with pytest.raises(UserError, match="denoising.likelihood.steps=5 is more than denoising.steps=4"):
        parts(folder, steps=5)
