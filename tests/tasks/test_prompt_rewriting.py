"""Prompts that are written anew for a frozen generator: what is asked, what is drawn, what it earns."""

import pytest
import torch

from mmrl import build
from mmrl.config import validate
from mmrl.errors import UserError
from mmrl.policies.diffusion.loading import load
from mmrl.policies.diffusion.policy import DiffusionPolicy
from mmrl.policies.diffusion.settings import Denoising, DiffusionModel
from mmrl.rollouts import Prompt, Sample
from mmrl.tasks.image_generation.tiny import model as tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    tiny_model.build_digits(str(folder), seed=0)
    return folder


def brightness(sample):
    """Of the image, times the digit that was asked for."""
    return float(sample.image.mean()) * sample.prompt.answer


def config_of(folder, model=None, **task):
    return validate(
        {
            "run_dir": "unset",
            "model": model or {"type": "vision_language", "build": "mmrl.tasks.visual_qa.tiny.model:build"},
            "task": {
                "type": "prompt_rewriting",
                "generator": {"path": str(folder), "steps": 3},
                "rewards": [{"name": "tests.tasks.test_prompt_rewriting:brightness"}],
                **task,
            },
            "rollout": {"prompts": 1, "group_size": 2, "max_response_length": 6},
        },
        "test",
    )


def answers(task, texts):
    prompt = task.train[7]
    return [Sample(prompt, response=text, response_length=len(text)) for text in texts]


def test_the_rewriter_is_asked_with_the_prompt(folder):
    task = build.build_task(config_of(folder, template="Better: {}!"))
    asked, original = task.train[7], task.image_task.train[7]
    assert asked.text == f"Better: {original.text}!" and asked.metadata["original"].id == original.id
    assert (asked.answer, asked.metadata["demonstration"]) == (7, original.text)
    assert len(task.evaluation) == 500 and task.evaluation[3].text.startswith("Better: ")


def test_a_demonstration_is_the_prompt_or_what_the_data_say_of_the_image(folder):
    """ "draw a 3" is shown as "the digit three"; careless data name another digit, which RL has to undo."""
    plain = build.build_task(config_of(folder, data={"type": "digits", "reasoning": True}))
    assert plain.train[13].metadata["demonstration"] == "the digit three"
    careless = build.build_task(config_of(folder, data={"type": "digits", "reasoning": True, "careless": 1.0}))
    assert careless.train[13].metadata["demonstration"] != "the digit three"
    assert careless.train[13].answer == 3


def test_what_is_written_is_drawn_and_earns_for_the_prompt_that_was_asked(folder):
    """By the generator's own policy, from the noise of the prompt, whatever was written."""
    task = build.build_task(config_of(folder))
    found = task.score(answers(task, ["draw a seven", " draw a one "]), torch.tensor([0, 0]))
    import zlib

    policy = DiffusionPolicy(load(str(folder), DiffusionModel()), Denoising(steps=3, evaluation_steps=3))
    seed = zlib.crc32(f"{task.train[7].id} 0".encode())
    drawn = [policy.respond([Prompt("x", text)], [seed])[0].image for text in ("draw a seven", "draw a one")]
    torch.testing.assert_close(found[:, 0], torch.stack([7 * image.mean() for image in drawn]), rtol=0, atol=1e-5)
    assert abs(float(found[0, 0] - found[1, 0])) > 1e-4
    assert not any(p.requires_grad for p in task.generator.policy.module.parameters())


def test_several_images_are_averaged_and_each_is_drawn_once(folder):
    task = build.build_task(config_of(folder, images=3, generator={"path": str(folder), "steps": 2, "at_once": 2}))
    samples, seen = answers(task, ["draw a seven", "draw a one", "draw a one"]), []
    draw = task.generator.generate
    task.generator.generate = lambda texts, seeds: seen.append((list(texts), list(seeds))) or draw(texts, seeds)
    found = task.score(samples, torch.zeros(3, dtype=torch.long))
    assert task.accuracy(samples).shape == (3,) and set(task.measures(samples)) >= {
        "guard/sharpness",
        "response/length",
    }
    texts = [text for call in seen for text in call[0]]
    assert texts == ["draw a seven"] * 3 + ["draw a one"] * 3 and len(set(seen[0][1])) == 3
    assert seen[0][1][:3] == seen[0][1][3:]  # the same noises for all texts of a prompt
    images = torch.stack(draw(texts[:3], seen[0][1][:3]))
    torch.testing.assert_close(found[0, 0], 7 * images.mean(), rtol=0, atol=1e-5)
    assert found[1, 0] == found[2, 0]


def test_words_that_a_small_generator_does_not_know_are_left_out(folder):
    draw = build.build_task(config_of(folder)).generator.generate
    one, other, none = draw(["draw a seven", "Draw, zebra a seven", "zebra"], [1, 1, 1])
    assert torch.equal(one, other) and not torch.equal(one, none) and none.isfinite().all()
    draw(["draw " * 50], [1])  # no more than it takes


def test_reasoning_before_a_tag_is_not_drawn(folder):
    task = build.build_task(config_of(folder, tag="prompt"))
    assert task.extract_prompt("it is a seven <prompt> draw\na seven </prompt> ok") == "draw\na seven"
    assert (
        task.extract_prompt("<prompt>a</prompt><prompt>b</prompt>") == "b" and task.extract_prompt("draw a seven") == ""
    )


def test_a_rewriter_trains_on_what_its_images_earn(folder, tmp_path):
    """From the YAML keys through the batch of the trainer: rewards are those of the rollouts' own texts."""
    from mmrl.collection.collector import Collector
    from mmrl.engine import Ranks
    from mmrl.training.metrics import Metrics

    config = config_of(folder)
    task = build.build_task(config)
    policy, ranks = build.build_policy(config, task), Ranks()
    batch = Collector(config, policy, task, ranks, None).next(0, Metrics(ranks))
    texts = [sample.response for sample in batch.samples]
    again = task.score([Sample(batch.samples[0].prompt, response=text) for text in texts], batch.group)
    assert torch.equal(batch.rewards, again) and batch.rewards.isfinite().all()
    now = policy.replay(batch, policy.module)
    assert now.logp.shape[0] == 2 and now.logp.requires_grad


def test_what_does_not_fit_is_one_line(folder, tmp_path):
    with pytest.raises(UserError, match=r"task.generator.* missing|task.generator"):
        validate({"run_dir": "x", "task": {"type": "prompt_rewriting"}}, "test")
    with pytest.raises(UserError, match="template must hold {} exactly once"):
        config_of(folder, template="again")
    with pytest.raises(UserError, match=r"^(task: )?task\.generator\.path=.*none") as refused:
        build.build_task(config_of(tmp_path / "none"))
    assert "model.path" not in str(refused.value)
