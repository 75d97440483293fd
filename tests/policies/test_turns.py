"""Conversations of a vision-language policy with environments: what is scored, what it is conditioned on, and that the
tokens are those of the whole conversation through the chat template; for every family of tiny models."""

import copy
from dataclasses import replace

import pytest
import torch
from PIL import Image

from mmrl.errors import UserError
from mmrl.generation.sampling import Sampling
from mmrl.generation.vllm.responses import Answer
from mmrl.policies.vlm import prompts
from mmrl.rollouts import Message, Prompt
from mmrl.settings import option
from mmrl.sims.turns.environment import Environment, Reply
from mmrl.sims.turns.settings import EnvironmentSettings, Isolation, TurnLimits
from tests.policies.conftest import PROMPTS, loaded
from tests.sims.hostile_turns import Hostile, HostileSettings

TURNS = 3
# Reads an image in tiles where it is the only one it is given, and as one view where there are several. Turns are read
# as they come, so that an image that comes alone is seen in tiles, unlike in the whole conversation in one go.
COUNTS_IMAGES = {"llava_onevision"}


class Echo(Environment):
    """Answers with an image, of another grey in each turn, and a text; ends after so many turns. Turn t is worth t."""

    def __init__(self, turns, shade):
        self.turns, self.shade, self.count = turns, shade, 0

    def start(self, prompt):
        return prompt.messages

    def step(self, response):
        self.count += 1
        if self.count == self.turns:
            return Reply(end=True, reward=float(self.count))
        shown = Image.new("RGB", (32, 32), (self.shade + 9 * self.count,) * 3)
        text = f"The sum is {len(response) % 10}."
        return Reply([Message("user", (shown, text))], reward=float(self.count))


class EchoSettings(EnvironmentSettings):
    type: str = "tests.policies.test_turns:EchoSettings"
    turns: int = option(TURNS, "responses")
    shade: int = option(128, "of the image")

    def make(self):
        return Echo(self.turns, self.shade)


def favour_end(policy, by=6.0):
    """Raise the logit of the end token, so that random models end their turns."""

    def hook(module, args, out):
        bias = torch.zeros(out.shape[-1])
        bias[list(policy.eos)] = by
        return out + bias

    policy.module.model.get_output_embeddings().register_forward_hook(hook)


def conversing(folder, *, end=6.0, length=200, **settings):
    policy = loaded(folder, sampling=Sampling(temperature=0.7), max_response_length=length, logp_chunk=4)
    limits = TurnLimits(turn_tokens=6)
    policy.drafter.converse(EchoSettings(**({"limits": limits} | settings)))
    favour_end(policy, end)
    return policy


@pytest.fixture
def talks(family, folders):
    """A policy and its conversations: six rollouts, two a prompt, of different lengths."""
    policy = conversing(folders[family])
    return policy, policy.rollout(PROMPTS, 2, [1, 2, 3, 4, 5, 6])


def replay(policy, rollouts, **options):
    return policy.replay(rollouts, policy.module, **options)


def close(got, want, tolerance=1e-5):
    torch.testing.assert_close(got, want, atol=tolerance, rtol=0)


def whole(policy, sample, responses):
    """The whole conversation through the chat template and the processor, in one go: ids and the processor's inputs.
    responses: texts that stand for the sampled ones."""
    record = sample.conversation
    said = list(record.messages)
    for turn, text in zip(record.turns, responses, strict=True):
        said += [Message("assistant", (text,)), *turn.observation]
    text = policy.tokens.processor.apply_chat_template([prompts.as_template(m) for m in said], tokenize=False)
    images = [image for message in said for image in message.images]
    given = {"images": [images]} if images else {}
    return policy.tokens.processor(text=[text], return_tensors="pt", **given)


def test_tokens_are_those_of_the_whole_conversation(family, folders):
    """Responses whose text goes through the tokenizer and back unchanged: then rendering everything anew gives the very
    ids, images and further inputs that the conversation was made of. In `COUNTS_IMAGES` all but the number of the
    images' tokens."""
    policy = conversing(folders[family])
    asked = [replace(p, metadata={"demonstration": ["The sum", "is 3", "left"]}) for p in PROMPTS]
    rollouts = policy.demonstrate(asked)
    for tokens, sample in zip(rollouts.inputs, rollouts.samples, strict=True):
        want = whole(policy, sample, ["The sum", "is 3", "left"])
        ids = torch.cat([tokens.prompt, tokens.response])
        full = want["input_ids"][0]
        if family in COUNTS_IMAGES:
            image = policy.tokens.processor.image_token_id
            full = full[full != image]
            assert ids[ids != image].tolist() == full[: int((ids != image).sum())].tolist()
            continue
        assert ids.tolist() == full[: len(ids)].tolist()
        rest = policy.tokens.tokenizer.decode(full[len(ids) :])
        assert rest.strip() == ""  # what the template puts behind the last response
        with torch.no_grad():  # images and further inputs: families lay several images out in their own ways
            got = policy.module.model(**policy.runner.collate([tokens], padding_side="right")).logits[0]
            close(got, policy.module.model(**want).logits[0, : len(ids)], 1e-4)
        chosen = policy.tokens.tokenizer.decode(tokens.response[tokens.decision_mask])
        end = policy.tokens.tokenizer.decode(policy.eos[:1])
        assert chosen == f"The sum{end}is 3{end}left{end}"


def test_ratio_is_exactly_one_over_turns(talks):
    policy, rollouts = talks
    assert max(len(s.conversation.turns) for s in rollouts.samples) == TURNS
    with torch.no_grad():
        old = replay(policy, rollouts).logp
    new = replay(policy, rollouts).logp
    assert new.requires_grad and torch.equal(old, new)
    assert (old[rollouts.mask] < 0).all() and (old[~rollouts.mask] == 0).all()


def test_decided_tokens_have_the_likelihoods_of_a_full_forward(talks):
    """One plain forward of each whole sequence, in float64, without padding or cache."""
    policy, rollouts = talks
    got = replay(policy, rollouts).logp
    model = copy.deepcopy(policy.module.model).double()
    model.set_experts_implementation("eager")
    model.get_output_embeddings()._forward_hooks.clear()  # of `favour_end`, which is for sampling alone
    never = list(policy.tokens.suppressed)
    for row, tokens in enumerate(rollouts.inputs):
        inputs = policy.runner.collate([tokens], padding_side="right")
        inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
        with torch.no_grad():
            logits = model(**inputs).logits[0, len(tokens.prompt) - 1 : -1]
        logits[:, never] = -torch.inf
        logp = (logits / 0.7).log_softmax(-1)[torch.arange(len(tokens.response)), tokens.response]
        want = torch.where(tokens.decision_mask, logp, 0.0).float()
        close(got[row, : len(want)], want, 1e-4)


def test_what_is_sampled_is_drawn_from_the_replayed_distribution(talks):
    """Greedy conversations: every decided token is the most likely one in the replay's forward."""
    policy, _ = talks
    rollouts = policy.rollout(PROMPTS, 1, [7, 8, 9], temperature=0.0)
    for tokens in rollouts.inputs:
        with torch.no_grad():
            logits = policy.module.model(**policy.runner.collate([tokens], padding_side="right")).logits[0]
        logits[:, list(policy.tokens.suppressed)] = -torch.inf
        best = logits[len(tokens.prompt) - 1 : -1].argmax(-1)
        assert torch.equal(best[tokens.decision_mask], tokens.response[tokens.decision_mask])


def test_observations_are_read_but_never_scored(talks):
    """Other tokens in an observation leave what was decided before them as it was, and move what came after."""
    policy, rollouts = talks
    want = replay(policy, rollouts).logp
    changed = []
    for tokens in rollouts.inputs:
        spot = int((~tokens.decision_mask).nonzero()[-3])  # text of the last observation or of the template after it
        response = tokens.response.clone()
        response[spot] = policy.tokens.tokenizer("9").input_ids[-1]
        changed.append((spot, replace(tokens, response=response)))
    got = replay(policy, replace(rollouts, inputs=[tokens for _, tokens in changed])).logp
    for row, (spot, _) in enumerate(changed):
        close(got[row, :spot], want[row, :spot])
        assert (got[row, spot:] - want[row, spot:]).abs().max() > 1e-4


def test_order_padding_and_neighbours_change_nothing(talks):
    policy, rollouts = talks
    want = replay(policy, rollouts).logp
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    close(replay(policy, rollouts.select(order)).logp, want[order])
    close(replay(policy, rollouts, padding_side="left").logp, want)
    for row in range(len(rollouts)):
        alone = replay(policy, rollouts.select(torch.tensor([row]))).logp
        width = len(rollouts.inputs[row].response)
        close(alone[0, :width], want[row, :width])


def test_the_same_seed_gives_the_same_conversation_whatever_the_batch(talks):
    policy, rollouts = talks
    again = policy.rollout(PROMPTS[1:2], 2, [3, 4])
    for one, other in zip(again.inputs, rollouts.inputs[2:4], strict=True):
        assert torch.equal(one.response, other.response) and torch.equal(one.decision_mask, other.decision_mask)


def test_gradients_equal_finite_differences_over_turns(folders):
    policy = conversing(folders["qwen2_5_vl"])
    rollouts = policy.rollout(PROMPTS[:1], 2, [1, 2])
    weight = policy.module.model.model.language_model.layers[0].mlp.down_proj.weight
    replay(policy, rollouts).logp.sum().backward()
    place = divmod(int(weight.grad.abs().argmax()), weight.shape[1])
    slope, step = weight.grad[place].item(), 1e-2
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            weight[place] += sign * step
            values.append(replay(policy, rollouts).logp.sum().item())
            weight[place] -= sign * step
    assert slope == pytest.approx((values[0] - values[1]) / (2 * step), rel=2e-2)


def test_turns_and_their_rewards_by_decision(folders):
    policy = conversing(folders["qwen2_5_vl"], turns=2)
    said = replace(PROMPTS[1], metadata={"demonstration": ["left", "right"]})
    rollouts = policy.demonstrate([said])
    turns = rollouts.extras["turns"]
    assert turns.rewards.tolist() == [[1.0, 2.0]] and turns.mask.tolist() == [[True, True]]
    chosen = rollouts.inputs[0].decision_mask
    numbers = turns.number[0, : len(chosen)][chosen]
    first = len(policy.tokens.tokenizer("left").input_ids) + 1
    assert numbers.tolist() == [0] * first + [1] * (len(numbers) - first)
    assert [turn.response for turn in rollouts.samples[0].conversation.turns] == ["left", "right"]


def test_limits_end_a_conversation(folders):
    def ends(**options):
        policy = conversing(folders["qwen2_5_vl"], **options)
        return [s.conversation for s in policy.rollout(PROMPTS, 1, [1, 2, 3]).samples]

    assert {talk.end for talk in ends(end=50.0)} == {"environment"}
    over = ends(end=50.0, limits=TurnLimits(max_turns=2))
    assert [(talk.end, len(talk.turns)) for talk in over] == [("turns", 2)] * 3
    assert {talk.end for talk in ends(end=-50.0, limits=TurnLimits(turn_tokens=4))} == {"length"}
    short = conversing(folders["qwen2_5_vl"], end=50.0, length=10)
    rollouts = short.rollout(PROMPTS, 1, [1, 2, 3])
    assert {s.conversation.end for s in rollouts.samples} == {"length"}
    assert all(len(tokens.response) <= 10 for tokens in rollouts.inputs)
    assert all(s.truncated for s in rollouts.samples)


def test_a_policy_without_environments_is_as_it_was(folders):
    plain = loaded(folders["qwen2_5_vl"], sampling=Sampling(temperature=0.7), max_response_length=6)
    one = conversing(folders["qwen2_5_vl"], end=0.0, turns=1)
    got, want = one.rollout(PROMPTS, 2, [1, 2, 3, 4, 5, 6]), plain.rollout(PROMPTS, 2, [1, 2, 3, 4, 5, 6])
    assert [t.response.tolist() for t in got.inputs] == [t.response.tolist() for t in want.inputs]
    close(replay(one, got).logp, replay(plain, want).logp)


def test_a_demonstration_that_does_not_fit_is_named(folders):
    policy = conversing(folders["qwen2_5_vl"], turns=1)
    with pytest.raises(UserError, match="demonstration of prompt one has 2 responses"):
        policy.demonstrate([replace(PROMPTS[2], metadata={"demonstration": ["a", "b"]})])


# --- bit by bit, and by an engine ---


class Own:
    """The policy's model as an engine: what it draws, and with which likelihood."""

    def __init__(self, policy):
        self.policy, self.drafts, self.asked = policy, [], []

    def generate(self, requests, *, sampling, eos):
        self.asked += requests
        rows = []
        for request in requests:
            (row,) = [d for d in self.drafts if len(d.tokens.prompt) + len(d.tokens.response) == len(request.ids)
                      and torch.equal(torch.cat([d.tokens.prompt, d.tokens.response]), request.ids)
                      and d.next_request(request.limit).seed == request.seed]  # fmt: skip
            rows.append(row.tokens)
        longest = max(request.limit for request in requests)
        drawn = self.policy.runner.generate(rows, [r.seed for r in requests], sampling, [longest] * len(rows))
        return [
            Answer(ids[: r.limit], torch.full((min(len(ids), r.limit),), -0.5))
            for ids, r in zip(drawn, requests, strict=True)
        ]


def by_segments(policy, count):
    engine = Own(policy)
    engine.drafts = policy.draft(PROMPTS, 2, [1, 2, 3, 4, 5, 6])
    while any(not draft.finished(policy.eos) for draft in engine.drafts):
        policy.extend(engine, engine.drafts, count)
    return policy.complete(engine.drafts, 2), engine


def test_an_engine_is_asked_for_each_turn_with_all_that_came_before(folders):
    policy = conversing(folders["qwen2_5_vl"])
    want = policy.rollout(PROMPTS, 2, [1, 2, 3, 4, 5, 6])
    made, engine = by_segments(policy, 1000)
    assert [t.response.tolist() for t in made.inputs] == [t.response.tolist() for t in want.inputs]
    assert torch.equal(made.mask, want.mask)
    assert torch.equal(made.behaviour_logp, -0.5 * made.mask)
    markers = policy.tokens.processor.image_token_id
    for request in engine.asked:  # one marker an image for the engine, all of its tokens for the trainer
        assert request.marked.count(markers) == len(request.images)
        assert [i for i in request.marked if i != markers] == [i for i in request.ids.tolist() if i != markers]
        shades = [image.getpixel((0, 0)) for image in request.images if image.size == (32, 32)]
        greys = [red for red, green, blue in shades if red == green == blue]
        assert greys == [128 + 9 * turn for turn in range(1, len(greys) + 1)]  # in the order of the turns
    assert max(len(request.images) for request in engine.asked) == 2 + TURNS - 1


def test_a_conversation_that_is_put_aside_and_restored_goes_on_as_it_was(folders):
    """After some tokens, new drafts of the same prompts and seeds take over their state."""
    policy = conversing(folders["qwen2_5_vl"])
    engine = Own(policy)
    engine.drafts = policy.draft(PROMPTS, 2, [1, 2, 3, 4, 5, 6])
    policy.extend(engine, engine.drafts, 2)
    assert any(draft.dialogue.turns and not draft.finished(policy.eos) for draft in engine.drafts)
    again = Own(policy)
    again.drafts = policy.draft(PROMPTS, 2, [1, 2, 3, 4, 5, 6])
    policy.restore(again.drafts, [draft.state() for draft in engine.drafts])
    for one in (engine, again):
        while any(not draft.finished(policy.eos) for draft in one.drafts):
            policy.extend(one, one.drafts, 3)
    for one, other in zip(engine.drafts, again.drafts, strict=True):
        assert torch.equal(one.tokens.response, other.tokens.response)
        assert torch.equal(one.tokens.decision_mask, other.tokens.decision_mask) and torch.equal(one.logp, other.logp)
        assert [t.reward for t in one.dialogue.turns] == [t.reward for t in other.dialogue.turns]


def test_an_environment_that_does_not_repeat_itself_is_named(folders):
    policy = conversing(folders["qwen2_5_vl"], end=50.0)
    engine = Own(policy)
    engine.drafts = policy.draft(PROMPTS[:1], 1, [1])
    policy.extend(engine, engine.drafts, 2)
    (draft,) = policy.draft(PROMPTS[:1], 1, [1])
    state = engine.drafts[0].state()
    spot = int((~state["decided"]).nonzero()[-3])
    state["response"][spot] += 1
    with pytest.raises(UserError, match="did not answer prompt two as it did before; make"):
        policy.restore([draft], [state])


def test_environments_elsewhere_give_the_same_conversations(folders):
    here, apart = (conversing(folders["qwen2_5_vl"], **more) for more in ({}, {"isolated": Isolation(at_once=2)}))
    want = here.rollout(PROMPTS, 2, [1, 2, 3, 4, 5, 6])
    got = apart.rollout(PROMPTS, 2, [1, 2, 3, 4, 5, 6])
    assert [t.response.tolist() for t in got.inputs] == [t.response.tolist() for t in want.inputs]
    assert [s.conversation.end for s in got.samples] == [s.conversation.end for s in want.samples]


def test_a_lost_conversation_costs_its_rollout_only(folders):
    """One environment fails at its start; the others go on to their ends."""
    policy = conversing(folders["qwen2_5_vl"], end=50.0)
    policy.drafter.converse(HostileSettings(limits=TurnLimits(max_turns=5)))
    asked = [Prompt("start", "raise"), Prompt("answer", "hello"), Prompt("text", "go on")]
    rollouts = policy.rollout(asked, 1, [1, 2, 3])
    ends = [s.conversation.end for s in rollouts.samples]
    assert ends == ["lost", "environment", "environment"]
    assert rollouts.mask.any(1).tolist() == [False, True, True]
    got = replay(policy, rollouts)
    assert got.logp.isfinite().all() and (got.logp[0] == 0).all()
    assert policy.counts() == {"environment/lost": 1.0, "environment/tool_errors": 4.0}
    assert policy.counts() == {"environment/lost": 0.0, "environment/tool_errors": 0.0}


def test_a_batch_of_lost_conversations_is_replayed_and_told(folders, caplog):
    """Nothing was said in any of them, so there is nothing to score, and a step goes on without them."""
    policy = conversing(folders["qwen2_5_vl"])
    policy.drafter.converse(HostileSettings(limits=TurnLimits(max_turns=5)))
    rollouts = policy.rollout([Prompt(f"p{i}", "raise") for i in range(6)], 2, list(range(12)))
    assert not rollouts.mask.any() and [s.conversation.end for s in rollouts.samples] == ["lost"] * 12
    got = replay(policy, rollouts)
    assert (got.logp == 0).all() and (got.entropy == 0).all()
    got.logp.sum().backward()  # as a rank whose share was lost has to, beside others
    told = [record.getMessage() for record in caplog.records if "failed, so its rollout" in record.getMessage()]
    assert (
        len(told) == 2
        and "the environment of prompt p0 failed" in told[0]
        and ": KeyError" in told[0]
        and "(failure 1 " in told[0]
    )
    assert "(failure 10 of this run)" in told[1]


class FailsLate(Hostile):
    """Fails when it answers for the second time, after a turn that went well."""

    def step(self, response):
        if self.count == 1:
            raise KeyError("no such thing")
        return super().step(response)


class FailsLateSettings(HostileSettings):
    type: str = "tests.policies.test_turns:FailsLateSettings"

    def make(self):
        return FailsLate()


def test_the_turns_before_a_conversation_was_lost_are_not_learned_from(folders):
    policy = conversing(folders["qwen2_5_vl"], end=50.0)
    policy.drafter.converse(FailsLateSettings(limits=TurnLimits(max_turns=5)))
    rollouts = policy.rollout([Prompt("p", "go on")], 2, [1, 2])
    assert [sample.conversation.end for sample in rollouts.samples] == ["lost", "lost"]
    assert all(int(tokens.decision_mask.sum()) > 1 for tokens in rollouts.inputs) and not rollouts.mask.any()
