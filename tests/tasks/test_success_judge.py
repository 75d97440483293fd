"""Success as a judge sees it: through a real server that speaks OpenAI's protocol."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from mmrl.errors import UserError
from mmrl.rollouts import Episode, Prompt, Sample
from mmrl.tasks.manipulation.judged import evenly_spaced
from tests.rewards.http_servers import scripted
from tests.rewards.test_judges import completion, levels
from tests.tasks.choosing import build


def episode(*brightness, success, lost=False):
    frames = np.stack([np.full((8, 8, 3), level, np.uint8) for level in brightness])
    return Episode("lift the cube", success, success, len(brightness) - 1, 0.0, lost, frames)


def sample(one, id="a"):
    return Sample(Prompt(id, "lift from seed 3"), episode=one)


def likes_how_it_ended(handler, body):
    level = levels(body)[-1]
    return 200, json.dumps(completion(yes=0.8 * level, no=0.8 * (1 - level), perhaps=0.2)).encode()


def watched(server, **options):
    """A task whose only reward is a judge."""
    judge = {"base_url": f"{server.url}/v1", "model": "judge-7b", **options}
    spec = {"name": "mmrl.tasks.manipulation.judged:SuccessJudge", "label": "judge", "options": judge}
    return build("manipulation", {"simulator": "tests.sims.line_simulator:Line", "tasks": ["go"], "rewards": [spec]}, 0)


def text_of(request):
    return json.loads(request[2])["messages"][0]["content"][-1]["text"]


SAMPLES = [
    sample(episode(255, 0, 204, success=True)),  # 0.8: both see a success
    sample(episode(0, 255, 51, success=True)),  # 0.2: the simulator alone
    sample(episode(0, 153, success=False)),  # 0.6: the judge alone
    sample(episode(255, 0, success=False)),  # 0: neither
    sample(replace(episode(255, success=True, lost=True), frames=None)),
]


def test_a_judge_earns_its_probability_and_is_compared_with_the_simulator():
    with scripted(likes_how_it_ended) as server:
        task = watched(server)
        assert task.watched
        scores, measured = task.score(SAMPLES), task.measures(SAMPLES)
        assert len(server.requests) == 4  # once an episode, and none of the lost one
        assert all('"lift the cube"' in text_of(request) for request in server.requests)
        assert {len(levels(request[2])) for request in server.requests} == {2}
    torch.testing.assert_close(scores[:4, 0], torch.tensor([0.8, 0.2, 0.6, 0.0]), atol=1e-4, rtol=0)
    assert scores[4].isnan().all()
    assert measured["episode/judge_success"].tolist()[:4] == [1, 0, 1, 0]
    assert measured["episode/judge_disagreement"].tolist()[:4] == [0, 1, 1, 0]
    assert measured["episode/judge_disagreement"][4].isnan() and measured["episode/judge_success"][4].isnan()


def test_a_threshold_makes_it_a_verdict():
    with scripted(likes_how_it_ended) as server:
        task = watched(server, threshold=0.7)
        assert task.score(SAMPLES)[:4, 0].tolist() == [1, 0, 0, 0]
        assert task.measures(SAMPLES)["episode/judge_disagreement"].tolist()[:4] == [0, 1, 0, 0]


def test_parts_of_a_batch_are_asked_about_once_and_episodes_that_are_gone_are_forgotten():
    """A reward of a batch size, or one that failed, scores a batch in parts; what is measured is the whole."""
    with scripted(likes_how_it_ended) as server:
        task = watched(server)
        (judge,) = task._judges.values()
        own = [sample(episode(0, level, success=True)) for level in (10, 20, 30)]
        task.score(own[:2]), task.score(own[2:]), task.measures(own)
        assert len(server.requests) == 3 and len(judge._scores) == 3
        del own
        task.score(SAMPLES[:1])
        assert len(judge._scores) == 1


def test_another_episode_is_asked_about_anew():
    with scripted(likes_how_it_ended) as server:
        task = watched(server)
        for level, want in ((51, 0.2), (204, 0.8)):
            torch.testing.assert_close(
                task.score([sample(episode(0, level, success=True))]), torch.tensor([[want]]), atol=1e-4, rtol=0
            )


def test_images_are_even_and_the_last_is_always_there():
    frames = np.arange(5)
    for count, want in ((1, [4]), (2, [0, 4]), (3, [0, 2, 4]), (9, [0, 1, 2, 3, 4])):
        assert evenly_spaced(frames, count).tolist() == want


def test_episodes_without_images():
    """As a reward they are a mistake of ours; an evaluation that goes on measures those that it has seen."""
    with scripted(likes_how_it_ended) as server:
        task = watched(server)
        blind = sample(replace(SAMPLES[0].episode, frames=None), "b")
        with pytest.raises(UserError, match="'judge': the episode of prompt 'b' has no images, which its judge needs"):
            task.score([blind])
        measured = task.measures([blind, SAMPLES[1]])
    assert measured["episode/judge_success"].isnan().tolist() == [True, False]
    assert measured["episode/judge_disagreement"][1] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"images": 0}, "images must be at least 1, not 0"),
        ({"threshold": 0}, "threshold must be above 0 and at most 1, not 0"),
        ({"question": "Was it done?"}, "question must contain {prompt}"),
    ],
)
def test_faulty_options(options, message):
    with scripted(likes_how_it_ended) as server, pytest.raises(ValueError, match=message):
        watched(server, **options)


def test_other_rewards_keep_no_images():
    assert not build("manipulation", {"simulator": "tests.sims.line_simulator:Line", "tasks": ["go"]}, 0).watched
