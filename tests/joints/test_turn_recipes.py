"""Recipes over turns: what the algorithm section of each makes of rewards worked out by hand."""

import json
from dataclasses import replace

import pytest
import torch
import yaml

from mmrl.build import build_task
from mmrl.config import load
from mmrl.policies.vlm.prompts import chat
from mmrl.rollouts import REPLAYED, Prompt
from mmrl.training.metrics import Metrics
from tests.joints.parts import close
from tests.joints.test_turn_credit import gradient
from tests.whole_runs.parts import release
from tests.whole_runs.test_turns_run import ZOOM, made

RECIPES = "configs/vlm/visual_qa_zoom_{}.yaml"


def section(name, key):
    with open(RECIPES.format(name)) as file:
        return f"{key}={json.dumps(yaml.safe_load(file)[key])}"


def test_a_turn_earns_its_tool_s_reward_beside_that_of_the_answer(given):
    """Outcomes 1, 0, 1: 1/3, -2/3, 1/3. First turns 0.2, 0, 0.2: 0.0667, -0.1333, 0.0667. Last turns earn nothing."""
    earned = [[0.2, 0.0], [0.0, 0.0], [0.2, 0.0]]
    made = gradient(given, section("turns", "algorithm"), rewards=(1.0, 0.0, 1.0), earned=earned)
    want = [[0.4, 0.4, 1 / 3], [-0.8, -2 / 3, 0.0], [0.4, 0.4, 0.0]]
    close(made.gradient(), [[-a / 7 for a in row] for row in want])


def test_the_tool_of_the_recipe_pays_a_zoom_that_was_carried_out():
    config = load(RECIPES.format("turns"), ["run_dir=unset", *ZOOM])
    prompt: Prompt = build_task(config).train[0]
    paid = []
    for call in ("zoom(0, 0, 2, 2)", "zoom(0, 0)"):
        environment = config.task.environment.make()
        environment.start(replace(prompt, messages=chat(prompt)))
        reply = environment.step(call)
        paid.append((reply.reward, reply.error is None))
    assert paid == [(0.2, True), (0.0, False)]


def steps(trainer, count):
    trainer.train()
    lines = [json.loads(line) for line in (trainer.run.folder / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if "loss" in line]
    release(trainer)
    assert len(found) == count and all(line["surrogate/ratio_gap_max"] == 0 for line in found)
    return found


def recipe(folder, name, *overrides):
    with open(RECIPES.format(name)) as file:
        tree = yaml.safe_load(file)
    options = [f"{key}={json.dumps(tree[key])}" for key in ("algorithm", "rollout") if key in tree]
    return made(folder, *options, "rollout.prompts=4", "steps=2", *overrides)


@pytest.mark.timeout(200)
def test_turns_have_a_critic_in_their_recipe(tmp_path):
    trainer = recipe(tmp_path, "ppo", "rollout.group_size=1", "rollout.prompts=8", "optim.lr=1e-9")
    assert steps(trainer, 2)[0]["critic/value"] == 0  # it begins at 0
    assert trainer.config.algorithm.time_step == "turn" and trainer.policy.module.critic is not None


@pytest.mark.timeout(200)
def test_masked_images_make_a_conversation_less_likely_in_its_recipe(tmp_path):
    trainer = recipe(tmp_path, "papo")
    first = steps(trainer, 2)[0]
    assert first["view_kl"] != 0 and first["grad_norm"] > 0


@pytest.mark.timeout(200)
def test_a_conversation_of_an_earlier_step_joins_a_group_that_failed(tmp_path):
    """All of the first step are right, all of the second are wrong but the one that joins them: mean 0.2, std
    sqrt(0.8 / 4), so that it is worth 0.8 / 0.4472 and the others -0.2 / 0.4472."""
    trainer = recipe(tmp_path, "replay", "task.data.train_size=4", "rollout.group_size=4", "algorithm.scale=group_std")
    outcome = [1.0]
    trainer.task.score = lambda samples, group=None: torch.tensor([outcome] * len(samples))
    trainer.task.accuracy = lambda samples: torch.tensor(outcome * len(samples))
    batches = []
    for step in range(2):
        outcome[0] = 1.0 - step
        metrics = Metrics(trainer.engine)
        rollouts = trainer.collector.next(step, metrics)
        _, batch = trainer.preparation.minibatches(rollouts, step, torch.Generator().manual_seed(0), metrics)
        trainer.collector.observe(batch)
        batches.append(batch.rollouts)
    release(trainer)
    first, second = batches
    joined = (second.origin == REPLAYED) & second.mask.any(1)
    assert first.mask.any(1).sum() == 16 and joined.sum() == 4 and (~joined & second.mask.any(1)).sum() == 16
    before = {tuple(row.response.tolist()) for row in first.inputs}
    for index in joined.nonzero().flatten().tolist():
        row = second.inputs[index]
        assert tuple(row.response.tolist()) in before and second.samples[index].conversation.turns
        close(
            second.advantages[index][second.mask[index]],
            torch.full((int(second.mask[index].sum()),), 0.8 / 0.4472136),
            atol=1e-5,
        )
    others = second.advantages[~joined][second.mask[~joined]]
    close(others, torch.full_like(others, -0.2 / 0.4472136), atol=1e-5)
