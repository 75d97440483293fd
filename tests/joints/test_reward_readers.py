"""Rewards and the model that they speak of: the processor's sizes, templates that open the thoughts, and why nothing
was scored."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2VLImageProcessor

from mmrl.build import build_policy, build_task
from mmrl.config import load
from mmrl.errors import UserError
from mmrl.evaluation.evaluate import evaluate
from mmrl.policies.resizing import resize_options
from mmrl.rewards import RewardSet, RewardSpec
from mmrl.rewards.visual.coordinates import Resize
from mmrl.rollouts import Prompt, Sample
from tests.evaluation.test_evaluation import Alone
from tests.helpers.command_line import GRPO, TINY, WARM_START, mmrl

WIDTH, HEIGHT = 120, 80


def questions(folder, answer):
    pixels = np.random.default_rng(0).integers(0, 255, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "image.png")
    rows = [{"images": ["image.png"], "problem": f"Where is it, {i}?", "answer": answer} for i in range(8)]
    path = folder / "boxes.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def job(folder, *overrides, answer=(60, 20, 120, 80), options="{coordinates: resized}"):
    data = f"task.data={{type: files, train: '{questions(folder, answer)}', eval: '{folder / 'boxes.jsonl'}'}}"
    rewards = f"task.rewards=[{{name: box_iou, options: {options}}}]"
    accuracy = f"task.accuracy={{name: box_iou, options: {options}}}"
    small = [name for name in TINY if not name.startswith("task.data")]
    arguments = [*small, *GRPO, data, rewards, accuracy, "run_dir=unused", *overrides]
    config = load(WARM_START, arguments)
    task = build_task(config)
    return config, task, build_policy(config, task)


def size_of(policy, prompt):
    """Width and height that the model sees, of the inputs that its own processor makes."""
    (row,) = policy.tokens.encode([prompt])
    _, rows, columns = row.images["image_grid_thw"][0].tolist()
    patch = policy.tokens.processor.image_processor.patch_size
    return columns * patch, rows * patch


@pytest.mark.parametrize("limit", [None, 6 * 784, 4 * 784])
def test_resized_coordinates_are_those_of_the_runs_own_processor(tmp_path, limit):
    """The right half of the image's lower part, in the pixels that the model sees."""
    overrides = [] if limit is None else [f"model.processor={{max_pixels: {limit}}}"]
    config, task, policy = job(tmp_path, *overrides)
    prompt = task.evaluation[0]
    width, height = size_of(policy, prompt)
    assert limit is None or width * height <= limit
    box = [width / 2, height / 4, width, height]
    respond = policy.respond

    def answers(prompts, seeds):
        return [replace(sample, response=str(box)) for sample in respond(prompts, seeds)]

    policy.respond = answers
    result, samples, _ = evaluate(policy, task, Alone(), 4, config)
    assert result["evaluation/accuracy"] == pytest.approx(1.0)
    assert task.score(samples)[:, 0].tolist() == pytest.approx([1.0] * 4)


def test_a_resize_that_is_not_the_processors_is_told(tmp_path):
    options = "{coordinates: resized, resize: {max_pixels: 6272}}"
    with pytest.raises(UserError, match=r"reward 'box_iou': its resize differs .*\(max_pixels 6272, not 4704\)"):
        job(tmp_path, "model.processor={max_pixels: 4704}", options=options)
    job(tmp_path, "model.processor={max_pixels: 6272}", options=options)  # the same: nothing to say


def test_a_processor_that_resizes_otherwise_is_told():
    rewards = RewardSet([RewardSpec(name="box_iou", options={"coordinates": "resized"})])
    with pytest.raises(UserError, match="set coordinates to pixels, thousandths or unit"):
        rewards.use_resize(None)
    RewardSet([RewardSpec(name="box_iou")]).use_resize(None)


@pytest.mark.parametrize(("width", "height"), [(2000, 1500), (640, 480), (40, 30), (31, 500)])
@pytest.mark.parametrize("bounds", [{}, {"min_pixels": 50176, "max_pixels": 802816}])
def test_sizes_are_those_that_the_image_processor_makes(width, height, bounds):
    """The image processor of Qwen2.5-VL as published: patches of 14 pixels, merged by 2."""
    part = Qwen2VLImageProcessor(patch_size=14, merge_size=2, **bounds)
    resize = resize_options(SimpleNamespace(image_processor=part))
    assert resize["factor"] == 28
    grid = part(images=[Image.new("RGB", (width, height))], return_tensors="pt")["image_grid_thw"][0]
    assert Resize(**resize).size(width, height) == (14 * int(grid[2]), 14 * int(grid[1]))


def test_sizes_of_processors(tmp_path):
    _, _, policy = job(tmp_path, "model.processor={min_pixels: 3136, max_pixels: 4704}")
    assert resize_options(policy.tokens.processor)["min_pixels"] == 3136
    assert resize_options(policy.tokens.processor)["max_pixels"] == 4704
    assert resize_options(policy.tokens.tokenizer) is None


@pytest.mark.parametrize(("tail", "opened"), [("<think>\n", True), ("<think>\n\n</think>\n\n", False), ("", False)])
def test_templates_that_open_the_thoughts(tmp_path, tail, opened):
    _, task, policy = job(tmp_path)
    template = policy.tokens.processor.chat_template
    policy.tokens.processor.chat_template = template + (f"{{{{ {json.dumps(tail)} }}}}" if tail else "")
    samples = policy.respond([task.evaluation[0]], [1])
    assert [sample.prompt_opens_think for sample in samples] == [opened] * len(samples)


@pytest.mark.parametrize(
    ("response", "opened", "think_answer", "sections", "answer"),
    [
        ("a</think><answer>7</answer>", True, 1, 1, 1),
        ("a</think><answer>7</answer>", False, 0, 0, 1),
        ("a</think><answer>7</answer>", None, 1, 1, 1),
        ("<think>a</think><answer>7</answer>", False, 1, 1, 1),
        ("<think>a</think><answer>7</answer>", None, 1, 1, 1),
        ("<answer>7</answer>", True, 0, 0, 0),  # a thought that never ended
        ("7", True, 0, 0, 0),
        ("7", False, 0, 0, 1),
        ("7", None, 0, 0, 1),
    ],
)
def test_thoughts_that_the_prompt_opened(response, opened, think_answer, sections, answer):
    specs = [RewardSpec(name="think_answer"), RewardSpec(name="exact_match")]
    specs.insert(1, RewardSpec(name="sections", options={"tags": ["think", "answer"]}))
    sample = Sample(Prompt("p", "question", answer="7"), response, prompt_opens_think=opened)
    assert RewardSet(specs).score([sample])[0].tolist() == [think_answer, sections, answer]


def test_a_run_in_which_nothing_is_scored_says_why_where_it_ends(tmp_path):
    path = questions(tmp_path, [300, 200, 100, 100])
    data = f"task.data={{type: files, train: '{path}', eval: '{path}'}}"
    small = [name for name in TINY if not name.startswith("task.data")]
    more = ["steps=5", "rollout.max_unscored_steps=1", "evaluation.before=false", "evaluation.prompts=2"]
    rewards = "task.rewards=[{name: box_iou}]"
    result = mmrl(tmp_path, "train", WARM_START, *small, *GRPO, *more, data, rewards, f"run_dir={tmp_path / 'run'}")
    assert result.code == 2 and "Traceback" not in result.out + result.err
    (line,) = [line for line in result.err.splitlines() if line.startswith("mmrl: ")]
    assert "box_iou: it gave no finite number on prompt" in line and "whose answer is [300, 200, 100, 100]" in line


def test_reasons_of_rewards_that_fail():
    rewards = RewardSet([RewardSpec(name="tests.rewards.hostile:by_word", label="own"), RewardSpec(name="numeric")])
    prompts = [Prompt(name, "question", answer=answer) for name, answer in (("a", "7"), ("b", "many"), ("c", "few"))]
    scores = rewards.score([Sample(p, word) for p, word in zip(prompts, ("fine", "raise", "exit"), strict=True)])
    assert scores.isnan().tolist() == [[False, False], [True, True], [True, True]]
    assert "failed on prompt b: KeyError" in rewards.reasons["own"]
    assert rewards.reasons["numeric"] == "it gave no finite number on prompt b, whose answer is 'many'"


def test_an_answer_of_nothing_is_an_answer(tmp_path):
    _, task, _ = job(tmp_path, answer=[])
    prompt = task.evaluation[0]
    assert prompt.answer == [] and len(task.evaluation) == 8
    assert task.score([Sample(prompt, "[]"), Sample(prompt, "[1, 2, 3, 4]")], torch.tensor([0, 0])).tolist() == [
        [1],
        [0],
    ]
