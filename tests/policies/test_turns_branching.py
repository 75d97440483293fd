"""Conversations that branch after a tool's answer, as ARPO has them: where, what branches share, and how likely they
are."""

import pytest
import torch
from PIL import Image

from mmrl.collection.branches.points import ToolAnswers
from mmrl.collection.branches.source import Branches
from mmrl.collection.extra_sources import SourceContext
from mmrl.rollouts import FRESH, Conversation, Message, Prompt, Rollouts, Sample, Turn, Turns
from mmrl.sims.turns.environment import Environment, Reply
from mmrl.sims.turns.settings import EnvironmentSettings, TurnLimits
from tests.helpers.tiny_models import FAMILIES
from tests.policies.test_turns import conversing, replay
from tests.whole_runs.parts import Fixed, metrics, spread, train

HERE = "tests.policies.test_turns_branching"


class Looking(Environment):
    """The first response looks through a tool, the second calls none and is told so, the third ends it."""

    def __init__(self):
        self.count = 0

    def start(self, prompt):
        return prompt.messages

    def step(self, response):
        self.count += 1
        if self.count == 3:
            return Reply(end=True)
        seen = Image.new("RGB", (32, 32), (40 * self.count + len(response) % 7,) * 3)
        tool = "look" if self.count == 1 else None
        return Reply([Message("user", (seen, f"{len(response) % 10} left."))], tool=tool)


class LookingSettings(EnvironmentSettings):
    type: str = f"{HERE}:LookingSettings"

    def make(self):
        return Looking()


def talked(policy):
    """Two groups of two conversations, scored."""
    asked = [Prompt("a", "What is it?", images=(Image.new("RGB", (64, 64)),)), Prompt("b", "How many?")]
    fresh = policy.rollout(asked, 2, [1, 2, 3, 4])
    fresh.prompt, fresh.origin = fresh.group.clone(), torch.full((len(fresh),), FRESH)
    task = Fixed(spread)
    fresh.rewards, fresh.accuracy = task.score(fresh.samples), task.accuracy(fresh.samples)
    return fresh, task


def grown(policy, fresh, task, **options):
    source = Branches(**({"count": 3} | options))
    source.start(SourceContext(policy, task.train, task, 0, (0, 1), int, None, 1))
    return source.make(fresh)


def full_forward(policy, rollouts):
    """The log-probability of each decision, each conversation read whole and alone, without a cache."""
    found = torch.zeros(rollouts.mask.shape)
    for number, row in enumerate(rollouts.inputs):
        core, inputs = policy.runner.core, policy.runner.collate([row], padding_side="right")
        with torch.no_grad():  # without what makes random models end their turns
            logits = (
                core.base_model(**inputs, use_cache=False).last_hidden_state[0] @ core.get_output_embeddings().weight.T
            )
        logits[:, list(policy.tokens.suppressed)] = -torch.inf
        logp = (logits / row.temperature).log_softmax(-1)
        for t in row.decision_mask.nonzero().flatten().tolist():
            found[number, t] = logp[len(row.prompt) + t - 1, row.response[t]]
    return found


@pytest.mark.parametrize("family", [FAMILIES[0]])
def test_what_comes_after_a_tools_answer_is_said_anew(folders, family):
    policy = conversing(folders[family], length=300, end=5.0)
    policy.drafter.converse(LookingSettings(limits=TurnLimits(turn_tokens=6)))
    fresh, task = talked(policy)
    numbers = fresh.extra("turns", Turns).number
    reached = [
        int(turns.mask.sum()) > 1 for turns in (fresh.extra("turns", Turns).select(torch.tensor([i])) for i in range(4))
    ]
    at = ToolAnswers(threshold=1.0, weight=0.0)
    made = grown(policy, fresh, task, at=at)
    assert made.group.tolist() == [0, 0, 0, 1, 1, 1] and sum(reached) >= 2
    for group in (0, 1):
        parents = [row for row in range(4) if fresh.group[row] == group and reached[row]]
        for place in range(3):
            branch = 3 * group + place
            if place >= len(parents):  # no further point: it begins anew
                assert not torch.isin(made.nodes[branch], torch.arange(4)).any()
                continue
            parent = parents[place]
            begins = int(((numbers[parent] == 1) & fresh.mask[parent]).nonzero()[0])
            one, other = made.inputs[branch].response, fresh.inputs[parent].response
            assert torch.equal(one[:begins], other[:begins])  # the tool's answer as well
            assert (made.nodes[branch, :begins] == parent).all()
            assert not (made.nodes[branch, begins:] == parent).any()
            turns = made.samples[branch].conversation.turns
            assert turns[0].response == fresh.samples[parent].conversation.turns[0].response and turns[0].tool == "look"
    with torch.no_grad():
        likelihoods = replay(policy, made).logp
    torch.testing.assert_close(likelihoods, full_forward(policy, made), atol=2e-5, rtol=0)
    again = grown(policy, fresh, task, at=at)
    assert all(torch.equal(a.response, b.response) for a, b in zip(again.inputs, made.inputs, strict=True))


class Numbers:
    """Chance that gives these."""

    def __init__(self, *values):
        self.values = list(values)

    def random(self):
        return self.values.pop(0)


def spoken(tools):
    """Two conversations of three turns with two decisions each, and an observation of one token after each turn."""
    mask = torch.tensor([[True, True, False, True, True, False, True, True]] * 2)
    number = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2]] * 2)
    turns = tuple(Turn("r", tool=tool) for tool in tools)
    sample = Sample(Prompt("a", "?"), conversation=Conversation((), turns, "environment"))
    record = Turns(number, torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 3))
    return Rollouts([sample] * 2, [0, 1], torch.zeros(2, dtype=torch.int64), mask, extras={"turns": record})


def test_a_rise_of_the_entropy_makes_a_branch_likelier():
    """ln 8 = 2.08: with U = 0.6 a rise of 1.04 is needed, for 0.6 - 0.2 x 1.04 / 2.08 = 0.5. The opening's entropy is
    1; in row 0 the second turn's is 2.5 and the third's 1.5, in row 1 it is 1.5 and then 2.5. What was read has 99."""
    entropy = torch.tensor([[0.5, 1.5, 99, 1.0, 4.0, 99, 1.0, 2.0], [0.5, 1.5, 99, 1.0, 2.0, 99, 2.0, 3.0]])
    members, at = spoken(["look", "look", None]), ToolAnswers(first=2, vocabulary=8)
    assert at.rank_points(members, entropy, Numbers(0.6, 0.6, 0.6, 0.6)) == [(0, 2), (1, 4)]
    assert at.rank_points(members, entropy, Numbers(0.45, 0.45, 0.45, 0.45)) == [(0, 2), (1, 2), (0, 4), (1, 4)]
    assert at.rank_points(spoken(["look", None, None]), entropy, Numbers(0.6, 0.6)) == [(0, 2)]
    # Of the first decision alone: that rises by a half in row 0, and by one and a half in row 1's third turn
    assert ToolAnswers(first=1, vocabulary=8).rank_points(members, entropy, Numbers(*[0.6] * 4)) == [(1, 4)]


@pytest.mark.usefixtures("alone")
def test_conversations_that_branch_train(tmp_path):
    """From the keys to updates, with the mean of its branches for what they share."""
    options = [
        f"task.environment={{type: '{HERE}:LookingSettings', limits: {{turn_tokens: 3}}}}",
        "rollout.extras=[{type: branches, count: 2, at: {type: tool_answers, threshold: 1}}]",
        "algorithm.shaping=[prefix_mean]",
        "rollout.max_response_length=120",
        "rollout.prompts=2",
        "rollout.group_size=2",
        "steps=2",
    ]
    train(tmp_path, *options)
    rows = [row for row in metrics(tmp_path) if "loss" in row]
    assert len(rows) == 2 and all(row["grad_norm"] > 0 and row["updates_skipped"] == 0 for row in rows)
