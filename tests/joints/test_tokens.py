"""Keys of a vision-language job, from the configuration to the numbers of the real policy."""

from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from mmrl import build
from mmrl.config import load
from mmrl.errors import UserError
from mmrl.policies.vlm.responses import runner as module
from mmrl.schedules.schedule import Schedules

TINY = Path(__file__).parent / "tiny.yaml"


def policy_of(tmp_path, *overrides):
    config = load(TINY, [f"run_dir={tmp_path}", *overrides])
    task = build.build_task(config)
    return config, task, build.build_policy(config, task)


@contextmanager
def watched(monkeypatch):
    """The sampling of every call of the generator."""
    seen = []
    for name in ("generate_groups", "generate"):
        original = vars(module)[name]

        def record(*args, original=original, **kwargs):
            limit = max(kwargs["limits"]) if "limits" in kwargs else kwargs["max_new_tokens"]
            seen.append((kwargs["sampling"].temperature, limit))
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, record)
    yield seen


def prompts(task):
    return [task.train[0], task.train[1]]


def test_evaluation_samples_at_its_own_temperature(tmp_path, monkeypatch):
    _, task, policy = policy_of(tmp_path, "rollout.temperature=1.5", "evaluation.temperature=0.3")
    with watched(monkeypatch) as seen:
        policy.rollout(prompts(task), 2, [1, 2, 3, 4], step=0)
        policy.respond(prompts(task), [1, 2])
    assert [heat for heat, _ in seen] == [1.5, 0.3]


def test_evaluation_is_by_default_greedy(tmp_path):
    _, task, policy = policy_of(tmp_path)
    answers = [[s.response for s in policy.respond(prompts(task), seeds)] for seeds in ([1, 2], [3, 4])]
    assert answers[0] == answers[1]


def logits(policy, rollouts, i):
    """Of the response's tokens, by transformers alone."""
    tokens = rollouts.inputs[i]
    inputs = policy.runner.collate([tokens], padding_side="right")
    with torch.no_grad():
        found = policy.module.model(**inputs).logits[0]
    return found[len(tokens.prompt) - 1 : len(tokens.prompt) + len(tokens.response) - 1].double()


@pytest.mark.parametrize("heat", [0.5, 1.0, 2.0])
def test_replay_is_the_distribution_at_the_temperature_of_the_rollout(tmp_path, heat):
    _, task, policy = policy_of(tmp_path, f"rollout.temperature={heat}", "evaluation.temperature=0.3")
    rollouts = policy.rollout(prompts(task), 2, [1, 2, 3, 4], step=0)
    replay = policy.replay(rollouts, policy.module)
    for i, tokens in enumerate(rollouts.inputs):
        scores = logits(policy, rollouts, i) / heat
        scores[:, list(policy.tokens.suppressed)] = -torch.inf
        distribution = torch.distributions.Categorical(logits=scores)
        n = len(tokens.response)
        close = {"atol": 1e-4, "rtol": 0, "check_dtype": False}
        torch.testing.assert_close(replay.logp[i, :n].detach(), distribution.log_prob(tokens.response), **close)
        p = distribution.probs
        entropy = -torch.xlogy(p, p).sum(-1)
        torch.testing.assert_close(replay.entropy[i, :n].detach(), entropy, **close)
        torch.testing.assert_close(replay.square_sum[i, :n].detach(), p.square().sum(-1), **close)


def test_a_schedule_of_the_temperature_acts_on_what_is_sampled_and_replayed(tmp_path, monkeypatch):
    schedule = "rollout.temperature={type: linear, start: 2, end: 1, steps: 2}"
    config, task, policy = policy_of(tmp_path, schedule)
    controls, heats = Schedules(config), []
    with watched(monkeypatch) as seen:
        for step in range(3):
            made = policy.rollout(prompts(task), 2, [1, 2, 3, 4], step=step)
            heats.append({tokens.temperature for tokens in made.inputs})
            controls.update(step + 1, {})
    assert [heat for heat, _ in seen] == [2.0, 1.5, 1.0]
    assert heats == [{2.0}, {1.5}, {1.0}]


def test_the_limit_of_responses_and_the_length_of_reduce_constant(tmp_path, monkeypatch):
    """The longest response grows from 2 to 3 tokens; `constant` divides by the 3 of the whole run from the first step
    on, so that a loss means the same in all of them."""
    schedule = "rollout.max_response_length={type: stages, starts: [0, 1], values: [2, 3]}"
    config, task, policy = policy_of(tmp_path, schedule)
    controls = Schedules(config)
    with watched(monkeypatch) as seen:
        for step in range(2):
            policy.rollout(prompts(task), 2, [1, 2, 3, 4], step=step)
            assert policy.max_decisions == 3
            controls.update(step + 1, {})
    assert [limit for _, limit in seen] == [2, 3]


def test_another_view_replays_the_same_response_to_a_changed_prompt(tmp_path):
    """The view's likelihoods are those of the response behind the changed prompt, with their gradient."""
    term = "algorithm.terms=[{type: kl, against: {type: view, gradient: true, view: {type: masked_patches, share: 1}}}]"
    config, task, policy = policy_of(tmp_path, term)
    rollouts = policy.rollout(prompts(task), 2, [1, 2, 3, 4], step=0)
    change = config.needs.replayed[0].view.change
    seen = policy.view(rollouts, change)
    found = policy.replay(seen, policy.module)
    blind = [change(prompt) for prompt in prompts(task)]
    assert all(max(image.getdata()) == (0, 0, 0) for prompt in blind for image in prompt.images)
    for i, tokens in enumerate(seen.inputs):
        assert torch.equal(tokens.response, rollouts.inputs[i].response)
        scores = logits(policy, seen, i)
        scores[:, list(policy.tokens.suppressed)] = -torch.inf
        expected = torch.distributions.Categorical(logits=scores).log_prob(tokens.response)
        close = {"atol": 1e-4, "rtol": 0, "check_dtype": False}
        torch.testing.assert_close(found.logp[i, : len(expected)].detach(), expected, **close)
    apart = (found.logp - policy.replay(rollouts, policy.module).logp).abs().max()
    assert float(apart) > 1e-4 and found.logp.requires_grad


def test_the_numbers_of_decisions_are_the_tokens_of_the_responses(tmp_path):
    _, task, policy = policy_of(tmp_path)
    rollouts = policy.rollout(prompts(task), 2, [1, 2, 3, 4], step=0)
    rollouts.mask[1] = False
    found = policy.decision_ids(rollouts)
    assert found.shape == rollouts.mask.shape and (found[1] == -1).all()
    for row in (0, 2, 3):
        response = rollouts.inputs[row].response.tolist()
        assert found[row].tolist() == response + [-1] * (found.shape[1] - len(response))


def test_segments_of_a_response(tmp_path):
    _, task, policy = policy_of(tmp_path, "rollout.segment=2", "algorithm.level=segment")
    rollouts = policy.rollout(prompts(task), 2, [1, 2, 3, 4], step=0)
    found = policy.replay(rollouts, policy.module).extras["segments"]
    assert torch.equal(policy.segments(rollouts), found)
    assert found.tolist() == [[0, 0, 1][: rollouts.mask.shape[1]]] * 4
    assert policy_of(tmp_path)[2].replay(rollouts, policy.module).extras == {}
    with pytest.raises(UserError, match="algorithm.type=grpo needs decisions in segments"):
        policy_of(tmp_path, "algorithm.level=segment")
