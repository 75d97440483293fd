"""Rollouts of mixed origin on the real model and engine: replays and demonstrations go on exactly, on one rank and on
two."""

import shutil

import pytest
import torch

from tests.whole_runs.parts import call, distance, final, make, metrics, timeless, train

REPLAYED = [
    "rollout.extras=[{type: success_replay, accuracy: 0, keep: 2}, {type: guided_groups, groups: failed},"
    " {type: self_imitation, accuracy: 0, count: 2, likelihoods: present}, {type: demonstrations, prompts: 2}]",
    "algorithm={type: grpo, surrogate: guided, epochs: 2, terms: [{type: likelihood, of: replayed}]}",
    "task.data.train_size=8",
]
# Under ZeRO-3 ranks generate together: here only one of them may have something to ask.
ASKED_AGAIN = [
    "rollout.extras=[{type: extra_rollouts, count: 3}, {type: guided_prefixes, groups: all, low: 0.5}]",
    "algorithm={type: grpo, shaping: [{type: segment_values, every: 1, count: 2}]}",
    "engine.zero_stage=3",
]
KINDS = {"replayed": REPLAYED, "asked again": ASKED_AGAIN}


def whole(folder, kind):
    train(folder, *KINDS[kind], "checkpoint.every=2")


def rest(folder, kind):
    train(folder, *KINDS[kind], "checkpoint.every=2", resume=True)


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("replayed", 1),
        pytest.param("replayed", 2, marks=pytest.mark.slow),
        pytest.param("asked again", 2, marks=pytest.mark.slow),
    ],
)
def test_they_go_on_exactly(tmp_path, kind, ranks):
    one, other = tmp_path / "whole", tmp_path / "cut"
    call(whole, one, kind, log=tmp_path / "whole.log", ranks=ranks)
    other.mkdir()
    shutil.copytree(one / "checkpoints" / "step-000002", other / "checkpoints" / "step-000002")
    shutil.copy(one / "metrics.jsonl", other)
    call(rest, other, kind, log=tmp_path / "cut.log", ranks=ranks)
    assert distance(final(one), final(other)) == 0
    rows = [row for row in timeless(metrics(one)) if "loss" in row]
    assert [row for row in timeless(metrics(other)) if "loss" in row] == rows and len(rows) == 4
    if kind == "replayed":
        assert ["likelihood" in row for row in rows] == [False, True, True, True]  # something was replayed


@pytest.mark.usefixtures("alone")
def test_a_rollout_that_was_put_away_is_made_again(tmp_path):
    """With the same tokens and likelihoods, in the same words."""
    made = make(tmp_path / "run", "rollout.temperature=1.5")
    policy, prompts = made.policy, [made.task.train[i] for i in (0, 1)]
    fresh = policy.rollout(prompts, 2, [1, 2, 3, 4], step=0)
    again = policy.deserialize([prompts[0], prompts[1]], [policy.serialize(fresh)[i] for i in (1, 2)])
    assert [s.response for s in again.samples] == [fresh.samples[i].response for i in (1, 2)]
    with torch.no_grad():
        one, two = policy.replay(fresh, policy.module), policy.replay(again, policy.module)
    for i, row in enumerate((1, 2)):
        count = int(again.mask[i].sum())
        assert count == int(fresh.mask[row].sum())
        torch.testing.assert_close(two.logp[i, :count], one.logp[row, :count], atol=1e-5, rtol=0)


@pytest.mark.usefixtures("alone")
def test_a_response_goes_on_from_inside(tmp_path):
    """It keeps its beginning, and does not depend on what else is asked."""
    made = make(tmp_path / "run", "rollout.max_response_length=6")
    policy, prompts = made.policy, [made.task.train[i] for i in (0, 1)]
    fresh = policy.rollout(prompts, 1, [1, 2], step=0, temperature=0.0)
    lengths = [min(2, len(row.response) - 1) for row in fresh.inputs]
    both = policy.continue_from(fresh, lengths, [5, 6])
    alone = policy.continue_from(fresh.select(torch.tensor([1])), lengths[1:], [6])
    for row, length in enumerate(lengths):
        assert torch.equal(both.inputs[row].response[:length], fresh.inputs[row].response[:length])
        assert len(both.inputs[row].response) <= 6
    assert torch.equal(alone.inputs[0].response, both.inputs[1].response)
    assert not torch.equal(policy.continue_from(fresh, lengths, [7, 8]).inputs[1].response, both.inputs[1].response)


@pytest.mark.usefixtures("alone")
def test_two_responses_become_one(tmp_path):
    """Only the second one's tokens count, each as likely as after all that comes before it."""
    made = make(tmp_path / "run", "rollout.max_response_length=20")
    policy, prompt = made.policy, made.task.train[0]
    fresh = policy.rollout([prompt], 2, [1, 2], step=0)
    both = policy.join_responses(fresh.select(torch.tensor([0])), fresh.select(torch.tensor([1])), " or")
    one, other, whole = *(row.response for row in fresh.inputs), both.inputs[0].response
    begun = one[:-1] if int(one[-1]) in policy.eos else one
    count = len(other)
    assert torch.equal(whole[: len(begun)], begun) and torch.equal(whole[-count:], other)
    between = policy.tokens.tokenizer(" or", add_special_tokens=False).input_ids
    assert whole[len(begun) : -count].tolist() == between != []
    assert both.mask[0].tolist() == [False] * (len(whole) - count) + [True] * count
    with torch.no_grad():
        found = policy.replay(both, policy.module).logp[0]
        plain = policy.replay(
            policy.deserialize([prompt], [{"response": whole.tolist(), "temperature": 1.0}]), policy.module
        )
    torch.testing.assert_close(found[-count:], plain.logp[0, -count:], atol=1e-5, rtol=0)
    assert not found[:-count].any() and both.samples[0].response_length == len(whole)
