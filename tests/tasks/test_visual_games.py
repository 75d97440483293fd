"""The task of games over turns: seeds that never meet, an expert's careless responses, rewards and success."""

import pytest

from mmrl.config import load
from mmrl.rollouts import Conversation, Message, Sample, Turn

CONFIG = "configs/vlm/visual_games.yaml"


@pytest.fixture(scope="module")
def task():
    return load(CONFIG).task.build(3)


def test_training_and_evaluation_never_play_the_same_seed(task):
    other = load(CONFIG).task.build(4)
    seeds = [{source[i].metadata["seed"] for i in (0, len(source) - 1)} for source in (task.train, task.evaluation)]
    assert seeds[0] == {4_000_000, 4_099_999} and seeds[1] == {0, 499}
    assert other.evaluation[0].id == task.evaluation[0].id and other.train[0].id != task.train[0].id


def test_demonstrations_are_as_careless_as_asked():
    made = load("configs/warm_starts/vlm/visual_games_warm_start.yaml", ["task.careless=0.6"]).task.build(0)
    wrong = total = 0
    for i in range(200):
        prompt = made.train[i]
        right = made.environment.demonstration(prompt)
        said = prompt.metadata["demonstration"]()
        assert said == prompt.metadata["demonstration"]()
        wrong += sum(a != b for a, b in zip(right, said, strict=True))
        total += len(said)
    assert 0.2 < wrong / total < 0.4  # 0.6 of any of its three, of which one is the same, and others may be
    exact = made.evaluation[0]
    assert exact.metadata["demonstration"]() == made.environment.demonstration(exact)


def game(task, *rewards, end="environment", success=0.0):
    last = len(rewards) - 1
    turns = [Turn("1", reward=r, facts={"success": success if n == last else 0.0}) for n, r in enumerate(rewards)]
    return Sample(task.train[0], conversation=Conversation((Message("user", ("?",)),), tuple(turns), end))


def test_rewards_and_success(task):
    samples = [game(task, 0.5, 0.5, success=1.0), game(task, 0.5, 0.0), game(task, 0.5, end="lost")]
    rewards = task.score(samples)
    assert rewards[:2, 0].tolist() == [1.0, 0.5] and rewards[2].isnan().all()
    accuracy = task.accuracy(samples)
    assert accuracy[:2].tolist() == [1.0, 0.0] and accuracy[2].isnan()
