"""Replaying the experts that an engine routed tokens to, on the tiny mixture of experts: two of eight in two layers."""

import base64
import io
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from mmrl import build
from mmrl.collection.partial_rollouts import Pool
from mmrl.config import load as load_config
from mmrl.config import to_yaml
from mmrl.errors import UserError
from mmrl.generation.settings import Partial, VLLMColocated
from mmrl.generation.vllm import engine as vllm
from mmrl.generation.vllm import processes
from mmrl.generation.vllm import responses as answers
from mmrl.policies.vlm import engines
from mmrl.policies.vlm import policy as vlm
from mmrl.policies.vlm.routing import Routing, renormalised_softmax
from mmrl.policies.vlm.synced import Synced
from mmrl.report.run import Run
from mmrl.trainer import Trainer
from tests.policies.conftest import LENGTH, PROMPTS, mixed
from tests.policies.second import Copy, moved
from tests.whole_runs.parts import TINY, Fixed, metrics, release, spread

FAMILY, LAYERS, EXPERTS, K = "qwen3_vl_moe", 2, 8, 2


@pytest.fixture
def policy(load):
    made = load(FAMILY)
    made.runner.replay_routing()
    return made


@pytest.fixture
def rollouts(load):
    return mixed(load(FAMILY))


def layers(policy):
    return vlm.transformers_model(policy.module.model).get_decoder().layers


def replay(policy, rollouts, **options):
    return policy.replay(rollouts, policy.module, **options)


def with_records(rollouts, record):
    """record: of the tokens of a rollout."""
    inputs = [replace(tokens, experts=record(tokens)) for tokens in rollouts.inputs]
    return replace(rollouts, inputs=inputs)


def elsewhere(tokens):
    """Two experts by chance for each token and layer."""
    length = len(tokens.prompt) + len(tokens.response) - 1
    generator = torch.Generator().manual_seed(length)
    return torch.rand(length, LAYERS, EXPERTS, generator=generator).topk(K).indices.to(torch.int16)


def own_choice(model, tokens):
    """What the routers of a model choose for a row alone."""
    ids = torch.cat([tokens.prompt, tokens.response])[None]
    sequence = {
        key: torch.cat([value, torch.zeros_like(tokens.response)])[None] for key, value in tokens.sequence.items()
    }
    chosen = []
    gates = [layer.mlp.gate for layer in model.get_decoder().layers]
    handles = [gate.register_forward_hook(lambda module, args, out: chosen.append(out[2])) for gate in gates]
    with torch.no_grad():
        model(input_ids=ids, attention_mask=torch.ones_like(ids), **sequence, **tokens.images)
    for handle in handles:
        handle.remove()
    return torch.stack(chosen, 1)[:-1].to(torch.int16)


class Recording(Copy):
    """An engine that tells its routing as vLLM does, and may choose the second and third best experts."""

    def __init__(self, policy, prompts, *, second_best=False):
        super().__init__(policy, prompts)
        if second_best:
            for layer in layers(self.own):
                layer.mlp.gate.register_forward_hook(self._second_best)

    @staticmethod
    def _second_best(gate, args, output):
        experts = output[0].topk(K + 1).indices[:, 1:]
        return output[0], renormalised_softmax(output[0], experts), experts

    def generate(self, requests, **options):
        answers = super().generate(requests, **options)
        return [replace(a, experts=self.record(r, a)) for r, a in zip(requests, answers, strict=True)]

    def record(self, request, answer):
        (tokens,) = self.own.tokens.encode([self.prompts[request.name]])
        response = torch.cat([request.ids[len(tokens.prompt) :], answer.ids])
        return own_choice(self.own.module.model, replace(tokens, response=response))


# --- the choice and its weights ---


def test_weights_of_chosen_experts_are_their_share_among_them():
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).log()
    got = renormalised_softmax(logits, torch.tensor([[3, 1]]))
    torch.testing.assert_close(got, torch.tensor([[4 / 6, 2 / 6]]))


def test_replaying_its_own_routes_changes_nothing(policy, rollouts):
    want = replay(policy, rollouts)
    (want.logp.sum() + want.entropy.sum()).backward()
    grads = {n: p.grad.clone() for n, p in policy.module.named_parameters() if p.grad is not None}
    policy.module.zero_grad()
    model = policy.module.model
    got = replay(policy, with_records(rollouts, lambda tokens: own_choice(model, tokens)))
    (got.logp.sum() + got.entropy.sum()).backward()
    assert torch.equal(got.logp, want.logp) and torch.equal(got.entropy, want.entropy)
    assert all(torch.equal(policy.module.get_parameter(name).grad, grad) for name, grad in grads.items())
    assert "routing_differs" not in want.extras and (got.extras["routing_differs"][rollouts.mask] == 0).all()


def by_hand(mlp, hidden, experts):
    """float64 [token, hidden] of a layer whose token goes to `experts`."""
    gate_up, down = mlp.experts.gate_up_proj.detach().double(), mlp.experts.down_proj.detach().double()
    found = torch.zeros_like(hidden, dtype=torch.float64)
    for token, (x, chosen) in enumerate(zip(hidden.double(), experts.tolist(), strict=True)):
        scores = (mlp.gate.weight.detach().double() @ x)[chosen]
        for weight, expert in zip(scores.exp() / scores.exp().sum(), chosen, strict=True):
            gate, up = (gate_up[expert] @ x).chunk(2)
            found[token] += weight * (down[expert] @ (gate / (1 + (-gate).exp()) * up))
    return found


@pytest.mark.parametrize("padding_side", ["right", "left"])
def test_recorded_experts_are_used_where_they_belong(policy, rollouts, padding_side):
    """Each layer of each token by hand; tokens without a record, one row of them, go to the best experts."""
    recorded = with_records(rollouts, elsewhere)
    recorded.inputs[1] = replace(recorded.inputs[1], experts=None)
    seen = {}
    for number, layer in enumerate(layers(policy)):
        layer.mlp.register_forward_hook(
            lambda mlp, args, out, number=number: seen.update({number: (mlp, args[0], out)})
        )
    got = replay(policy, recorded, padding_side=padding_side)
    for number, (mlp, hidden, out) in seen.items():
        best = (hidden @ mlp.gate.weight.T).topk(K).indices
        for row, tokens in enumerate(recorded.inputs):
            length = len(tokens.prompt) + len(tokens.response)
            place = slice(length) if padding_side == "right" else slice(hidden.shape[1] - length, None)
            experts = best[row, place].clone()
            if tokens.experts is not None:
                experts[:-1] = tokens.experts[:, number]
            want = by_hand(mlp, hidden[row, place].detach(), experts)
            torch.testing.assert_close(out[row, place].double(), want, atol=1e-6, rtol=1e-5)
    assert got.extras["routing_differs"][1].isnan()[rollouts.mask[1]].all()
    assert (got.extras["routing_differs"][[0, 2, 3]][rollouts.mask[[0, 2, 3]]] > 0).float().mean() > 0.5


def test_rows_with_recorded_experts_stay_padded(policy, rollouts, monkeypatch):
    """Records lie by row and token of padded rows."""
    recorded = with_records(rollouts, elsewhere)
    usual = replay(policy, recorded).logp
    monkeypatch.setattr(policy.runner, "should_pack", lambda lengths: True)
    torch.testing.assert_close(replay(policy, recorded).logp, usual)


def test_an_error_in_a_pass_leaves_routers_to_themselves(policy, rollouts):
    """The pass after it must not get the routes of the rows of the one that failed."""
    handle = layers(policy)[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        replay(policy, with_records(rollouts, elsewhere))
    assert policy.runner.routing.routes is None
    handle.remove()


def test_the_metric_counts_experts_that_the_router_would_not_choose(policy, rollouts):
    """One of the two in the first layer is replaced, of the token before the first decision of the first rollout."""
    model, place = policy.module.model, len(rollouts.inputs[0].prompt) - 1

    def record(tokens):
        experts = own_choice(model, tokens)
        if tokens is rollouts.inputs[0]:
            free = [e for e in range(EXPERTS) if e not in experts[place, 0].tolist()]
            experts[place, 0, 1] = free[0]
        return experts.flip(-1)  # the order says nothing

    differs = replay(policy, with_records(rollouts, record)).extras["routing_differs"]
    assert differs[0, 0] == 0.25  # of two experts in two layers


def test_routers_learn_with_experts_they_did_not_choose(policy, rollouts):
    """And experts that no token was sent to do not."""
    two = torch.tensor([[[3, 5]]], dtype=torch.int16)

    def record(tokens):
        return two.expand(len(tokens.prompt) + len(tokens.response) - 1, LAYERS, K)

    recorded = with_records(rollouts, record).select(torch.tensor([0]))
    replay(policy, recorded).logp.sum().backward()
    for layer in layers(policy):
        router, experts = layer.mlp.gate.weight.grad, layer.mlp.experts.gate_up_proj.grad
        assert router[[3, 5]].abs().amax(1).min() > 1e-3
        assert experts[[3, 5]].abs().amax((1, 2)).min() > 0
    others = [0, 1, 2, 4, 6, 7]  # in the last layer: of tokens without a record there none is scored
    assert experts[others].abs().max() == 0
    assert router[others].abs().max() < 1e-6


# --- geometry, recomputation, other inputs ---


@pytest.mark.parametrize("padding_side", ["right", "left"])
def test_ratio_is_exactly_one_with_records_from_elsewhere(policy, rollouts, padding_side):
    recorded = with_records(rollouts, elsewhere)
    whole = replay(policy, recorded).logp.detach()
    assert (whole - replay(policy, rollouts).logp).abs().max() > 1e-2
    for size in (1, 2, 3, 4):
        for order in (torch.arange(4), torch.tensor([3, 1, 0, 2])):
            for index in order.split(size):
                micro = recorded.select(index)
                with torch.no_grad():
                    old = replay(policy, micro, padding_side=padding_side).logp
                new = replay(policy, micro, padding_side=padding_side).logp
                assert new.requires_grad and torch.equal(old, new.detach())
                torch.testing.assert_close(old, whole[index], atol=1e-5, rtol=0)


def test_recomputed_layers_get_the_experts_of_their_own_pass(policy, load, rollouts):
    """Two passes, then their backward passes in the other order."""
    recomputed = load(FAMILY, activation_checkpointing=True)
    recomputed.runner.replay_routing()
    recorded = with_records(rollouts, elsewhere)
    parts = [recorded.select(torch.tensor(index)) for index in ([0, 1], [2, 3])]
    grads = []
    for made in (policy, recomputed):
        calls = []
        layers(made)[0].self_attn.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        logps = [replay(made, part).logp for part in parts]
        for logp in reversed(logps):
            logp.sum().backward()
        grads.append({n: p.grad for n, p in made.module.named_parameters() if p.grad is not None})
        grads[-1]["logp"] = torch.cat([logp.detach()[:, :1] for logp in logps])
        assert len(calls) == (2 if made is policy else 4)
    assert grads[0].keys() == grads[1].keys()
    for name, want in grads[0].items():
        torch.testing.assert_close(grads[1][name], want, atol=1e-6, rtol=1e-6)


def test_outside_replay_tokens_are_routed_by_the_model_itself(policy, load, rollouts):
    plain = load(FAMILY)
    replay(policy, with_records(rollouts, elsewhere))
    sampled, want = (made.rollout(PROMPTS, 2, range(6)) for made in (policy, plain))
    assert torch.equal(replay(policy, rollouts).logp, replay(plain, rollouts).logp)
    assert [t.response.tolist() for t in sampled.inputs] == [t.response.tolist() for t in want.inputs]


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8.0, "targets": "all-linear"}], ids=["full", "lora"])
def test_the_reference_routes_tokens_by_itself(load, rollouts, lora):
    policy = load(FAMILY, lora=lora)
    policy.runner.replay_routing()
    recorded = with_records(rollouts, elsewhere)
    want = replay(policy, rollouts).logp.detach()
    torch.testing.assert_close(replay(policy, recorded, reference=True).logp.detach(), want, atol=1e-6, rtol=0)
    assert (replay(policy, recorded).logp - want).abs().max() > 1e-2


def test_an_image_that_keeps_ranks_in_step_has_no_record(policy, rollouts):
    text = with_records(rollouts, elsewhere).select(torch.tensor([1]))
    want = replay(policy, text).logp
    policy.runner.lockstep = vlm.Lockstep(lambda chunks: chunks, nullcontext)
    torch.testing.assert_close(replay(policy, text).logp, want, atol=1e-5, rtol=0)


def test_layers_without_experts_have_a_place_in_the_record(folders, rollouts):
    """vLLM counts all layers."""
    config = AutoConfig.from_pretrained(folders[FAMILY])
    config.text_config.mlp_only_layers = [0]
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    policy = vlm.VisionLanguagePolicy(model, AutoProcessor.from_pretrained(folders[FAMILY]))
    policy.runner.replay_routing()

    def changed(layer):
        def record(tokens):
            experts = elsewhere(tokens)
            experts[:, layer] = (experts[:, layer] + 1) % EXPERTS
            return experts

        return replay(policy, with_records(rollouts, record)).logp

    want = replay(policy, with_records(rollouts, elsewhere)).logp
    assert torch.equal(changed(0), want) and (changed(1) - want).abs().max() > 1e-2


# --- records of an engine ---


def test_replay_finds_what_an_engine_with_other_routes_found_and_no_other(policy):
    """With its record; without one, or with one that is a token late, likelihoods are far from the engine's."""
    policy.engine = Recording(policy, PROMPTS, second_best=True)
    rollouts = policy.rollout(PROMPTS, 2, range(6))

    def gap(record):
        with torch.no_grad():
            logp = replay(policy, with_records(rollouts, record)).logp
        return float((logp - rollouts.behaviour_logp)[rollouts.mask].abs().max())

    assert gap(lambda tokens: tokens.experts) < 1e-5
    assert gap(lambda tokens: None) > 1e-2
    assert gap(lambda tokens: tokens.experts.roll(1, 0)) > 1e-2
    assert gap(lambda tokens: tokens.experts.flip(1)) > 1e-2  # layers


def in_two_segments(policy, later):
    """Three tokens by one engine, the rest by one with later weights."""
    policy.tokens.eos = policy.eos[:1]
    drafts = policy.draft(PROMPTS, 2, range(6))
    policy.extend(Recording(policy, PROMPTS), drafts, 3)
    policy.extend(Recording(later, PROMPTS), drafts, LENGTH - 3)
    assert any(len(draft.tokens.response) == LENGTH for draft in drafts)
    return drafts


def test_each_token_keeps_the_experts_with_which_the_next_one_was_drawn(policy):
    later, changed = moved(policy), 0
    for draft in in_two_segments(policy, later):
        tokens = draft.tokens
        old, new = (own_choice(made.module.model, tokens) for made in (policy, later))
        first = len(tokens.prompt) + min(3, len(tokens.response)) - 1
        assert torch.equal(tokens.experts[:first], old[:first])
        assert torch.equal(tokens.experts[first:], new[first:])
        changed += int((old != new).sum())
    assert changed > 0


def test_a_checkpoint_of_drafts_keeps_their_records(policy):
    policy.engine = Recording(policy, PROMPTS)
    config = load_config(TINY, ["run_dir=r", "rollout.group_size=2"])
    pools = [Pool(policy, PROMPTS, config.seed, config.rollout.group_size, Partial(oversample=1)) for _ in range(2)]
    pools[0].add([0, 1], [0, 1])
    begun = [draft for group in pools[0].groups for draft in group.drafts][:3]  # the last one has no token yet
    policy.extend(policy.engine, begun, 3)
    buffer = io.BytesIO()
    torch.save(pools[0].state(), buffer)
    buffer.seek(0)
    pools[1].load(torch.load(buffer, weights_only=True))
    one, other = ([draft.tokens.experts for group in pool.groups for draft in group.drafts] for pool in pools)
    assert one[3] is None and other[3] is None
    assert all(torch.equal(a, b) and len(a) > 0 for a, b in zip(one[:3], other[:3], strict=True))


def completion(experts):
    """As vLLM's engine has it."""
    places = [{token: SimpleNamespace(logprob=-1.0)} for token in (5, 6)]
    return SimpleNamespace(token_ids=[5, 6], logprobs=places, routed_experts=experts)


def test_records_are_read_as_vllm_writes_them():
    known = np.array([[[7, 255], [0, 1]], [[2, 3], [4, 5]]], np.uint8)
    for experts in (known, known.astype(np.uint16) + 200):
        buffer = io.BytesIO()
        np.save(buffer, experts, allow_pickle=False)
        text = base64.b64encode(buffer.getvalue()).decode()
        choice = {"token_ids": [5, 6], "logprobs": {"content": [{"logprob": -1.0}] * 2}, "routed_experts": text}
        for answer in (vllm._answer(completion(experts)), answers._answer(choice)):
            assert answer.experts.tolist() == experts.tolist() and answer.experts.dtype == torch.int16
    for nothing in ({}, {"routed_experts": None}):
        assert answers._answer({k: v for k, v in choice.items() if k != "routed_experts"} | nothing).experts is None
    assert vllm._answer(completion(None)).experts is None


# --- options and messages ---


def made(policy, monkeypatch, *overrides):
    """The generator of a run with an engine that tells its routing, and what was asked of it."""
    asked = []

    def engine(folder, options):
        asked.append(options)
        return Recording(policy, PROMPTS, second_best=True)

    monkeypatch.setattr(engines, "VLLM", engine)
    monkeypatch.setattr(engines, "check_installed", lambda: None)
    config = load_config(TINY, ["run_dir=r", "rollout.generator=vllm_colocated", *overrides])
    ranks = SimpleNamespace(device=torch.device("cpu"), gather=lambda value: [value])
    return build.build_generator(config, policy, SimpleNamespace(train=PROMPTS), ranks), asked[0]


def test_a_run_asks_for_experts_and_replays_them(load, monkeypatch):
    generator, asked = made(load(FAMILY), monkeypatch, "rollout.generator.routing_replay=true")
    assert asked.settings.routing_replay and generator.sync_weights()["generation/probe_gap"] < 1e-5
    generator, asked = made(load(FAMILY), monkeypatch)
    assert not asked.settings.routing_replay
    with pytest.raises(UserError, match="differ from the trained model's"):  # the engine has routes of its own
        generator.sync_weights()
    with pytest.raises(UserError, match="^rollout.generator.routing_replay supports"):
        made(load("qwen3_vl"), monkeypatch, "rollout.generator.routing_replay=true")


@pytest.mark.usefixtures("alone")
def test_a_run_says_how_much_of_the_routing_is_not_its_own(load, tmp_path):
    policy, task = load(FAMILY), Fixed(spread, image=False, size=8)
    policy.runner.replay_routing()
    overrides = [f"run_dir={tmp_path}", "steps=1", "evaluation.prompts=1", "rollout.generator=vllm_colocated"]
    config = load_config(TINY, overrides)
    engine = build.build_engine(config, policy)
    recording = Recording(policy, task.train, second_best=True)
    generator = Synced(policy, recording, task.train[:1], limit=1e-3, gather=engine.gather)
    trainer = Trainer(config, policy, task, engine, Run(tmp_path, to_yaml(config), writes=True), generator)
    trainer.train()
    release(trainer)
    step = next(row for row in metrics(tmp_path) if "loss" in row)
    assert step["correction/routing_differs"] == 0.5 and step["correction/logp_gap_max"] < 1e-3


def test_engines_are_asked_for_experts_where_they_are_wanted():
    name = "enable_return_routed_experts"
    assert name not in vllm.EngineOptions(context=8).arguments()
    wanted = vllm.EngineOptions(context=8, settings=VLLMColocated(routing_replay=True)).arguments()
    assert wanted[name] is True and "--enable-return-routed-experts" in processes.command_line(wanted)


def test_a_model_without_experts_is_refused(load):
    with pytest.raises(
        UserError, match="^rollout.generator.routing_replay supports .*qwen3_vl_moe, but .* type qwen3_vl; set"
    ):
        load("qwen3_vl").runner.replay_routing()


def test_an_engine_that_tells_no_or_other_experts_is_named(policy):
    policy.engine = Copy(policy, PROMPTS)
    with pytest.raises(UserError, match="routing_replay is set, but vLLM returned no experts"):
        policy.rollout(PROMPTS, 1, [1, 2, 3])
    routing = Routing(vlm.transformers_model(policy.module.model))
    known = torch.zeros(9, LAYERS, K, dtype=torch.int16)
    assert routing.check("p", 9, known) is known
    for tokens, experts in (
        (10, known),
        (9, known[:0]),
        (9, known[:, :1]),
        (9, known[..., :1]),
        (9, known + EXPERTS),
        (9, known - 1),
    ):
        with pytest.raises(UserError, match="for prompt p, but the trained model needs"):
            routing.check("p", tokens, experts)
