"""Rewards of single policy steps: from a judge of observations, which a real server answers, to advantages, by hand."""

import json

import numpy as np
import pytest
import torch

from mmrl.errors import UserError
from mmrl.rollouts import Spans
from mmrl.tasks.manipulation.judged import ProgressJudge
from mmrl.training.metrics import Metrics
from tests.joints.parts import close
from tests.rewards.http_servers import scripted
from tests.rewards.test_judges import completion, levels
from tests.sims.line_simulator import Line
from tests.tasks.test_success_judge import episode, sample
from tests.whole_runs.parts import ROBOTS, make, release

pytestmark = pytest.mark.usefixtures("alone")
HERE = __name__
SUCCESS = "{name: 'mmrl.tasks.manipulation.rewards:success', label: success}"
PPO = "algorithm={type: ppo, gamma: 0.5, lam: 1.0, standardise: minibatch, step_rewards: {reward: judge, weight: 2.0}}"


class Shown(Line):
    """The line, whose images are as bright as the position."""

    def reset(self, rows, seeds, tasks):
        return self.shown(super().reset(rows, seeds, tasks), rows)

    def step(self, rows, actions):
        return self.shown(super().step(rows, actions), rows)

    def shown(self, out, rows):
        for i, row in enumerate(rows):
            out.images[i] = np.clip(self.position[row], 0, 1) * 255
        return out


def by_brightness(handler, body):
    (level,) = levels(body)
    return 200, json.dumps(completion(yes=0.8 * level, no=0.8 * (1 - level), perhaps=0.2)).encode()


def judge(server):
    options = f"{{base_url: '{server.url}/v1', model: judge-7b}}"
    return f"{{name: 'mmrl.tasks.manipulation.judged:ProgressJudge', label: judge, weight: 0, options: {options}}}"


def options(*rewards, algorithm=PPO, rollout="{prompts: 6, group_size: 1}", std=0.4):
    return [
        f"task.simulator={HERE}:Shown",
        "task.train_size=60",  # starts below 0.6
        f"task.rewards=[{', '.join(rewards)}]",
        f"action.head={{type: gaussian, layers: 0, std: {std}}}",
        "action.chunk=2",
        f"rollout={rollout}",
        algorithm,
    ]


def prepared(folder, *settings):
    trainer = make(folder, *settings, base=ROBOTS)
    rollouts = trainer.collector.next(0, Metrics(trainer.engine))
    trainer.preparation.minibatches(rollouts, 0, torch.Generator().manual_seed(0), Metrics(trainer.engine))
    return trainer, rollouts


def seen(rollouts, row):
    """How bright each observation of an episode was."""
    frames = rollouts.samples[row].episode.frames
    return [float(frame.mean()) / 255 for frame in frames]


def by_decision(values, rollouts, row):
    """Values of policy steps at their executed decisions; a chunk has two."""
    mask = rollouts.mask[row]
    return torch.tensor(values, dtype=torch.float64).repeat_interleave(2)[mask[: 2 * len(values)]]


def test_a_judge_of_observations_reaches_the_advantages_of_ppo(tmp_path):
    """A step earns twice what P(yes) rises by, the last one also 1 for success; gamma is 0.5 and lambda 1."""
    with scripted(by_brightness) as server:
        trainer, rollouts = prepared(tmp_path, *options(judge(server), SUCCESS))
    steps, lengths = rollouts.extras["steps"], set()
    for row, rollout in enumerate(rollouts.samples):
        done = seen(rollouts, row)
        rises = [2 * (after - before) for before, after in zip(done, done[1:], strict=False)]
        assert len(rises) == len(rollouts.inputs[row]) and max(map(abs, rises)) > 0.01
        expected, following = [], 0.0 if bool(steps.terminated[row].any()) else float(steps.bootstrap[row].sum())
        for t in reversed(range(len(rises))):
            last = t == len(rises) - 1
            following = rises[t] + (float(rollout.episode.success) if last else 0.0) + 0.5 * following
            expected.insert(0, following - float(steps.values[row, t]))
        found = rollouts.advantages[row][rollouts.mask[row]].double()
        close(found, by_decision(expected, rollouts, row), atol=1e-5)
        lengths.add(len(rises))
    assert len(lengths) > 1 and any(rollout.episode.success for rollout in rollouts.samples)
    release(trainer)


def test_each_step_s_own_reward_is_its_advantage_in_groups(tmp_path):
    with scripted(by_brightness) as server:
        shaping = "{type: span_returns, reward: judge, of: policy_steps, gamma: 0.0, outcome: 0.0, against: none}"
        algorithm = f"algorithm={{type: grpo, scale: none, shaping: [{shaping}]}}"
        trainer, rollouts = prepared(
            tmp_path, *options(judge(server), SUCCESS, algorithm=algorithm, rollout="{prompts: 2, group_size: 3}")
        )
    for row in range(6):
        done = seen(rollouts, row)
        rises = [after - before for before, after in zip(done, done[1:], strict=False)]
        found = rollouts.advantages[row][rollouts.mask[row]].double()
        close(found, by_decision(rises, rollouts, row), atol=1e-5)
    release(trainer)


def two_steps(rollout):
    """A span of the first two policy steps."""
    return Spans([(0, 2, 3.0)], total=0.0, unit="policy_steps")


def test_a_span_of_several_steps_pays_at_its_last(tmp_path):
    rewards = f"{{name: '{HERE}:two_steps', label: judge, weight: 0}}", SUCCESS
    trainer, rollouts = prepared(tmp_path, *options(*rewards, std=0.02))
    steps = rollouts.extras["steps"]
    for row in range(6):
        assert len(rollouts.inputs[row]) >= 2
        without = [float(reward) for reward in (steps.returns - steps.values)[row][steps.mask[row]]]
        found = rollouts.advantages[row][rollouts.mask[row]].double()
        close(found, by_decision(without, rollouts, row), atol=1e-5)
        # the return of the first step has half of 2 x 3, that of the second all
        outcome = float(rollouts.samples[row].episode.success)
        n = len(rollouts.inputs[row])
        end = 0.0 if bool(steps.terminated[row].any()) else float(steps.bootstrap[row].sum()) * 0.5
        last = outcome + end
        assert float(steps.returns[row, 1]) == pytest.approx(6.0 + last * 0.5 ** (n - 2), abs=1e-5)
        assert float(steps.returns[row, 0]) == pytest.approx(3.0 + last * 0.5 ** (n - 1), abs=1e-5)
    release(trainer)


def test_the_judge_s_rewards_of_an_episode():
    samples = [
        sample(episode(0, 51, 204, success=True)),
        sample(episode(255, 0, success=False)),
        sample(episode(255, success=True, lost=True)),
    ]
    with scripted(by_brightness) as server:
        reward = ProgressJudge(base_url=f"{server.url}/v1", model="judge-7b")
        first, second, lost = reward.score(samples)
        assert len(server.requests) == 5
    assert [bounds[:2] for bounds in first.values] == [(0, 1), (1, 2)] and first.unit == "policy_steps"
    assert [value for *_, value in first.values] == pytest.approx([0.2, 0.6], abs=1e-3)
    assert (first.total, second.total, lost) == (pytest.approx(0.8, abs=1e-3), pytest.approx(0, abs=1e-3), None)
    assert [value for *_, value in second.values] == pytest.approx([-1.0], abs=1e-3)

    def silent(handler, body):
        return 200, json.dumps(completion(perhaps=1.0)).encode()

    with scripted(silent) as server:
        assert ProgressJudge(base_url=f"{server.url}/v1", model="judge-7b").score(samples[:1]) == [None]


# --- refusals ---


def far(rollout):
    return Spans([(0, 9, 1.0)], total=0.0, unit="policy_steps")


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([SUCCESS], r"algorithm.step_rewards.reward=judge is not a reward; choose from success"),
        ([SUCCESS.replace("label: success", "label: judge")], "reward 'judge' returned only numbers"),
        (
            [f"{{name: '{HERE}:far', label: judge, weight: 0}}"],
            r"a span that ends at 9, but the rollout has \d policy steps; correct the reward",
        ),
    ],
)
def test_rewards_without_steps_are_refused(tmp_path, rewards, message):
    with pytest.raises(UserError, match=message):
        prepared(tmp_path, *options(*rewards))
