"""Conversations made from others: under a view, stored and made again, and gone on with from inside."""

import json

import pytest
import torch
from PIL import Image, ImageOps

from mmrl.errors import UserError
from mmrl.prompts.views import NoText, View
from mmrl.rollouts import Message, Prompt
from mmrl.schedules.schedule import constant
from mmrl.settings import option
from mmrl.sims.turns.environment import Environment, Reply
from mmrl.sims.turns.settings import EnvironmentSettings, TurnLimits
from tests.helpers.tiny_models import FAMILIES
from tests.policies.test_turns import conversing, replay


def shade(level, inverted):
    image = Image.new("RGB", (32, 32), (level, 255 - level, 40))
    image.paste((level, level, level), (0, 0, 16, 32))
    return ImageOps.invert(image) if inverted else image


class Steps(Environment):
    """Shows another image in each turn; three turns. `beside` is a text that it puts before the prompt, once."""

    def __init__(self, settings):
        self.settings, self.count = settings, 0

    def start(self, prompt):
        first, *rest = prompt.messages
        return [Message(first.role, ("Look.", *first.parts)), *rest]

    def step(self, response):
        self.count += 1
        reward = float(self.count)
        if self.count == 3:
            return Reply(end=True, reward=reward)
        images = [shade(60 * self.count + more, self.settings.inverted) for more in (0, 30)]
        text = f"{(len(response) + self.settings.fickle) % 10}"
        return Reply([Message("user", (*images, text))], reward=reward, error="none of it")


class StepsSettings(EnvironmentSettings):
    type: str = "tests.policies.test_turns_reused:StepsSettings"
    inverted: bool = option(False, "its images are negatives")
    fickle: bool = option(False, "it counts one more")

    def make(self):
        return Steps(self)


class Negative(View):
    type: str = "tests.policies.test_turns_reused:Negative"

    def change(self, prompt):
        return prompt.map_images(ImageOps.invert)


class Cropped(View):
    type: str = "tests.policies.test_turns_reused:Cropped"

    def change(self, prompt):
        return prompt.map_images(lambda image: image if image.width > 32 else image.crop((0, 0, 16, 16)))


def prompts(inverted=False):
    first = ImageOps.invert(shade(20, False)) if inverted else shade(20, False)
    big = first.resize((64, 64))
    return [Prompt("a", "What is it?", images=(big,)), Prompt("b", "How many?", images=(big.rotate(90),))]


def talking(folder, **settings):
    policy = conversing(folder, length=300, end=5.0)
    policy.drafter.converse(StepsSettings(limits=TurnLimits(turn_tokens=6), **settings))
    return policy


@pytest.fixture
def policy(folders):
    return talking(folders["qwen2_5_vl"])


@pytest.fixture
def talks(policy):
    rollouts = policy.rollout(prompts(), 2, [1, 2, 3, 4])
    assert max(len(sample.conversation.turns) for sample in rollouts.samples) > 1
    return rollouts


@pytest.mark.parametrize("name", FAMILIES)
def test_a_view_changes_the_images_of_observations_too(folders, name):
    """The same responses to negatives, in a world that shows negatives, have the likelihoods of the view."""
    policy = talking(folders[name])
    texts = ["The sum", "is 3", "left"]
    asked = [Prompt(p.id, p.text, images=p.images, metadata={"demonstration": texts}) for p in prompts()]
    rollouts = policy.demonstrate(asked)
    viewed = policy.view(rollouts, Negative().changed)
    dark = talking(folders[name], inverted=True)
    changed = [Prompt(p.id, p.text, images=p.images, metadata={"demonstration": texts}) for p in prompts(inverted=True)]
    want = dark.demonstrate(changed)
    with torch.no_grad():
        got, expected, plain = (replay(policy, each).logp for each in (viewed, want, rollouts))
    assert torch.equal(got, expected) and not torch.equal(got, plain)
    for one, other in zip(viewed.inputs, want.inputs, strict=True):
        assert torch.equal(one.response, other.response)
        assert all(torch.equal(one.observed_images[key], other.observed_images[key]) for key in other.observed_images)


def test_a_view_without_text_keeps_what_observations_say(policy, talks):
    viewed = policy.view(talks, NoText().changed)
    for one, other in zip(viewed.inputs, talks.inputs, strict=True):
        assert len(one.prompt) < len(other.prompt) and torch.equal(one.response, other.response)


def test_a_view_that_changes_the_size_of_what_was_observed_is_refused(policy, talks):
    with pytest.raises(
        UserError, match="a view changed the number or the size of images in the conversation of prompt a"
    ):
        policy.view(talks, Cropped().changed)


def test_a_stored_conversation_is_the_same_again(policy, talks):
    states = json.loads(json.dumps(policy.serialize(talks)))
    policy.counts()
    again = policy.deserialize([prompts()[0], prompts()[0], prompts()[1], prompts()[1]], states)
    assert policy.counts()["environment/tool_errors"] == 0  # they were counted when they came about
    assert torch.equal(again.mask, talks.mask)
    for one, other in zip(again.inputs, talks.inputs, strict=True):
        assert torch.equal(one.prompt, other.prompt) and torch.equal(one.response, other.response)
        assert torch.equal(one.decision_mask, other.decision_mask) and one.temperature == other.temperature == 0.7
        for name in ("observed_images", "observed_sequence"):
            assert all(torch.equal(vars(one)[name][k], v) for k, v in vars(other)[name].items())
    for one, other in zip(again.samples, talks.samples, strict=True):
        assert one.conversation.end == other.conversation.end
        assert [(t.response, t.reward) for t in one.conversation.turns] == [
            (t.response, t.reward) for t in other.conversation.turns
        ]
    for name in ("number", "mask", "rewards"):
        assert torch.equal(vars(again.extras["turns"])[name], vars(talks.extras["turns"])[name])
    with torch.no_grad():
        assert torch.equal(replay(policy, again).logp, replay(policy, talks).logp)


def test_a_world_that_answers_otherwise_is_named(folders, talks, policy):
    states = policy.serialize(talks)
    fickle = talking(folders["qwen2_5_vl"], fickle=True)
    with pytest.raises(UserError, match="the environment did not answer prompt a as it did before"):
        fickle.deserialize([prompts()[0]] * 4, states)


def test_what_ended_at_a_limit_ends_there_again(folders):
    policy = conversing(folders["qwen2_5_vl"], length=60, end=0.0)
    policy.drafter.converse(StepsSettings(limits=TurnLimits(turn_tokens=4)))
    rollouts = policy.rollout(prompts(), 1, [1, 2])
    assert {s.conversation.end for s in rollouts.samples} == {"length"}
    states = policy.serialize(rollouts)
    policy.tokens.response_limit = constant(400)
    again = policy.deserialize(prompts(), states)
    assert [s.conversation.end for s in again.samples] == ["length", "length"]
    assert [t.response.tolist() for t in again.inputs] == [t.response.tolist() for t in rollouts.inputs]


@pytest.mark.parametrize("kept", [0, 1, 3, 5, 100])
def test_a_conversation_goes_on_from_inside(policy, talks, kept):
    """As many tokens of the policy's own stay, with the observations after those turns that are whole; the rest is new,
    in a world of its own."""
    lengths = [kept] * len(talks)
    again = policy.continue_from(talks, lengths, [11, 12, 13, 14])
    for one, other, sample in zip(again.inputs, talks.inputs, again.samples, strict=True):
        mine, theirs = one.response[one.decision_mask][:kept], other.response[other.decision_mask][:kept]
        assert torch.equal(mine, theirs)
        assert len(sample.conversation.messages) == 1 and sample.conversation.messages[0].text.count("Look.") == 1
    assert again.behaviour_logp is None and again.rewards is None
    same = [torch.equal(a.response, b.response) for a, b in zip(again.inputs, talks.inputs, strict=True)]
    whole = [int(row.decision_mask.sum()) <= kept for row in talks.inputs]
    assert all(one for one, ended in zip(same, whole, strict=True) if ended)  # nothing was left to draw
    assert all(whole) if kept == 100 else kept > 1 or not all(same)
    with torch.no_grad():
        logp = replay(policy, again).logp
    assert (logp[again.mask] < 0).all()


def test_further_responses_begin_as_the_first_ones_did(policy, talks):
    """A prompt in which an environment began a conversation begins one anew, not one more."""
    again = policy.rollout([talks.samples[0].prompt], 1, [1])
    assert torch.equal(again.inputs[0].prompt, talks.inputs[0].prompt)


def test_what_ended_by_itself_ends_so_again(policy):
    """A demonstration of one response, after which its world waits for another."""
    (first, *_) = prompts()
    shown = policy.demonstrate([Prompt("a", first.text, images=first.images, metadata={"demonstration": ["is 3"]})])
    assert [sample.conversation.end for sample in shown.samples] == ["demonstration"]
    again = policy.deserialize([first], policy.serialize(shown))
    assert [sample.conversation.end for sample in again.samples] == ["demonstration"]
    assert torch.equal(again.inputs[0].response, shown.inputs[0].response)


def test_further_responses_under_a_view_see_it(policy, talks):
    prompt = talks.samples[0].prompt
    changed = Negative().changed(prompt)
    (sample,) = policy.rollout([changed], 1, [1]).samples
    (shown,), (first,) = (each.messages[0].images for each in (sample.conversation, prompt))
    assert shown.tobytes() == ImageOps.invert(first).tobytes()
