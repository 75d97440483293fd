"""The vision-language policy: sampling and replay are one distribution, for every family of tiny models."""

import copy
import json
import shutil
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from mmrl import kernels
from mmrl.engine.snapshot import Snapshot
from mmrl.errors import UserError
from mmrl.generation import transformers as generation
from mmrl.generation.sampling import Sampling
from mmrl.kernels import ops
from mmrl.policies.settings import LoRA
from mmrl.policies.vlm import loading, prompts
from mmrl.policies.vlm import policy as vlm
from mmrl.policies.vlm import prompts as chats
from mmrl.policies.vlm.responses import runner
from mmrl.policies.vlm.responses.tokens import end_tokens
from mmrl.protocols.choices import TeacherChoices
from mmrl.rollouts import ALTERNATIVES, Prompt, Rollouts
from tests.policies.conftest import LENGTH, PROMPTS, image, loaded, mixed

CONNECTORS = (
    "model.visual.merger.",
    "model.visual.deepstack_merger_list.",
    "model.connector.",
    "model.multi_modal_projector.",
    "model.image_newline",
)
VISION = ("model.visual.", "model.vision_model.", "model.vision_tower.")
LANGUAGE = ("model.language_model.", "model.text_model.", "lm_head.")
# Made by the model and then left out of its forward pass: the norm after the layer that the features come from.
UNUSED = {"llava_onevision": "model.vision_tower.post_layernorm."}


def part(name):
    if name.startswith(CONNECTORS):
        return "connector"
    assert name.startswith(VISION + LANGUAGE), name
    return "vision" if name.startswith(VISION) else "language"


def forbidden(policy):
    """What no answer may hold, from the tokenizer alone."""
    tok = policy.tokens.tokenizer
    special = {number for number, token in tok.added_tokens_decoder.items() if token.special}
    assert {policy.tokens.processor.image_token_id, tok.pad_token_id} <= special
    rows = policy.module.model.get_output_embeddings().weight.shape[0]
    return sorted(special - {tok.eos_token_id}) + list(range(len(tok), rows))


def logits_alone(model, tokens, **dtype):
    """[response token, vocabulary]: plain logits of one row run alone, without padding."""
    ids = torch.cat([tokens.prompt, tokens.response])[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for key, value in tokens.sequence.items():
        inputs[key] = torch.cat([value, torch.zeros_like(tokens.response)])[None]
    for key, value in tokens.images.items():
        inputs[key] = value.to(**dtype) if value.is_floating_point() else value
    with torch.no_grad():
        return model(**inputs).logits[0, len(tokens.prompt) - 1 : -1]


def brute_force(policy, rollouts, temperature):
    """logp and entropy of every rollout, each alone, in float64."""
    model = copy.deepcopy(policy.module.model).double()
    model.set_experts_implementation("eager")  # the grouped multiplication knows no float64
    logp, entropy = torch.zeros(rollouts.mask.shape), torch.zeros(rollouts.mask.shape)
    for row, tokens in enumerate(rollouts.inputs):
        logits = logits_alone(model, tokens, dtype=torch.float64).double()
        logits[:, forbidden(policy)] = -torch.inf
        p = (logits / temperature).softmax(-1)
        n = len(tokens.response)
        logp[row, :n] = p[torch.arange(n), tokens.response].log()
        entropy[row, :n] = -torch.xlogy(p, p).sum(-1)
    return logp, entropy


def replay(policy, rollouts, **options):
    return policy.replay(rollouts, policy.module, **options)


def close(got, want, tolerance=1e-5):
    torch.testing.assert_close(got, want, atol=tolerance, rtol=0)


def ids(rollouts):
    return [tokens.response.tolist() for tokens in rollouts.inputs]


def favour(model, tokens, by):
    """Raise the logits of `tokens`. A hook, because the output matrix may be tied to the input's."""

    def hook(module, args, out):
        bias = torch.zeros(out.shape[-1])
        bias[tokens] = by
        return out + bias

    model.get_output_embeddings().register_forward_hook(hook)


# --- replay ---


def test_ratio_is_exactly_one_before_any_update(shared):
    policy, rollouts = shared
    with torch.no_grad():
        old = replay(policy, rollouts).logp
    new = replay(policy, rollouts).logp
    assert new.requires_grad and not old.requires_grad
    assert torch.equal(old, new)
    assert (torch.exp(new - old) - 1).abs().max() == 0
    assert (old[rollouts.mask] < 0).all() and (old[~rollouts.mask] == 0).all() and (~rollouts.mask).any()


def test_replay_equals_brute_force(shared):
    policy, rollouts = shared
    got = replay(policy, rollouts)
    logp, entropy = brute_force(policy, rollouts, temperature=0.7)
    close(got.logp, logp, 1e-4)
    close(got.entropy, entropy, 1e-4)
    other, _ = brute_force(policy, rollouts, temperature=1.0)
    assert (got.logp - other).abs().max() > 1e-2


def test_rollouts_of_several_temperatures_are_replayed_each_at_its_own(shared):
    policy, rollouts = shared
    temperatures = [(0.7, 1.5)[row % 2] for row in range(len(rollouts))]
    rows = [replace(tokens, temperature=t) for tokens, t in zip(rollouts.inputs, temperatures, strict=True)]
    got = replay(policy, replace(rollouts, inputs=rows)).logp
    by_temperature = {t: brute_force(policy, rollouts, temperature=t)[0] for t in set(temperatures)}
    close(got, torch.stack([by_temperature[t][row] for row, t in enumerate(temperatures)]), 1e-4)


def test_alternatives_have_the_temperature_of_their_rollout(shared):
    """The tokens that were sampled, listed beside another one, have the likelihood that they have as decisions."""
    policy, rollouts = shared
    ids = torch.stack([policy.decision_ids(rollouts).clamp(min=0), torch.full(rollouts.mask.shape, 7)], -1)
    listed = replace(rollouts, extras={**rollouts.extras, ALTERNATIVES.name: TeacherChoices(ids)})
    for temperature in (0.7, 1.5):
        rows = [replace(tokens, temperature=temperature) for tokens in listed.inputs]
        got = replay(policy, replace(listed, inputs=rows))
        close(got.extras[ALTERNATIVES.name][..., 0], got.logp, 1e-4)


def test_replay_depends_neither_on_padding_nor_on_the_batch_nor_on_the_chunk(shared):
    policy, rollouts = shared
    want = replay(policy, rollouts)
    left = replay(policy, rollouts, padding_side="left")
    close(left.logp, want.logp)
    close(left.entropy, want.entropy)
    for row in range(len(rollouts)):
        alone = replay(policy, rollouts.select(torch.tensor([row])))
        close(alone.logp, want.logp[row : row + 1])
    turned = torch.tensor([3, 2, 1, 0])
    close(replay(policy, rollouts.select(turned)).logp, want.logp[turned])
    for chunk in (1, 3, 1000):
        policy.module.chunk, kept = chunk, policy.module.chunk
        try:
            got = replay(policy, rollouts)
        finally:
            policy.module.chunk = kept
        close(got.logp, want.logp)
        close(got.entropy, want.entropy)


def test_images_matter(shared):
    policy, rollouts = shared
    for row, prompt in enumerate(PROMPTS):
        if prompt.images:
            swapped = replace(prompt, images=tuple(i.transpose(0).point(lambda v: 255 - v) for i in prompt.images))
            other = rollouts.select(torch.tensor([row]))
            other.inputs = [replace(policy.tokens.encode([swapped])[0], response=rollouts.inputs[row].response)]
            change = (
                (replay(policy, other).logp - replay(policy, rollouts.select(torch.tensor([row]))).logp).abs().max()
            )
            assert change > 1e-3


@pytest.mark.parametrize("lockstep", [False, True], ids=["alone", "in step"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "through the layer"])
def test_logits_of_a_batch_never_exist(shared, fused, lockstep, monkeypatch):
    policy, rollouts = shared
    seen, made = [], ops._chunks

    def watched(*args):
        for part, logits in made(*args):
            seen.append(logits.shape)
            yield part, logits

    head = policy.module.model.get_output_embeddings()
    through = []

    def watch(module, arguments, out):
        through.append(True)
        seen.append(out.shape)

    handle = head.register_forward_hook(watch)
    monkeypatch.setattr(ops, "_chunks", watched)
    if lockstep:
        monkeypatch.setattr(policy.runner, "lockstep", vlm.Lockstep(lambda chunks: chunks, nullcontext))
    if not fused:
        monkeypatch.setitem(policy.module._modules, "fused", None)
    kernels.use("cpu")
    got = replay(policy, rollouts)
    forward = len(seen)
    (got.logp.sum() + got.entropy.sum()).backward()
    policy.module.zero_grad()
    kernels.use("auto")
    policy.runner.lockstep = None
    assert bool(through) == (not fused)
    seen_by_replay, seen[:] = list(seen), []
    policy.rollout(PROMPTS, 1, [1, 2, 3])
    handle.remove()
    decisions, vocabulary = int(rollouts.mask.sum()), len(policy.tokens.tokenizer)
    assert decisions > 3 * policy.module.chunk
    assert all(shape == (shape[0], vocabulary) and shape[0] <= 4 for shape in seen_by_replay)
    assert sum(shape[0] for shape in seen_by_replay[:forward]) == decisions
    assert sum(shape[0] for shape in seen_by_replay[forward:]) == decisions  # recomputed, so not kept
    assert seen and all(shape.numel() <= len(PROMPTS) * vocabulary for shape in seen)


def test_ids_are_replayed_as_sampled(shared):
    policy, rollouts = shared
    tok = policy.tokens.tokenizer
    whole = tok("hundred").input_ids
    pieces = [tok.convert_tokens_to_ids(c) for c in "hundred"]
    assert len(pieces) > len(whole) and tok.decode(pieces) == "hundred"
    index = torch.tensor([0, 1])
    split, joined = rollouts.select(index), rollouts.select(index)
    split.inputs = [replace(t, response=torch.tensor(pieces)) for t in split.inputs]
    joined.inputs = [replace(t, response=torch.tensor(whole)) for t in joined.inputs]
    split.mask = torch.ones(2, len(pieces), dtype=torch.bool)
    joined.mask = torch.ones(2, len(whole), dtype=torch.bool)
    logp, _ = brute_force(policy, split, temperature=0.7)
    assert logp.shape[1] == 7
    close(replay(policy, split).logp, logp, 1e-4)
    assert replay(policy, joined).logp.shape == (2, len(whole))


# --- prompts that are shared by a group ---


def grouped(policy) -> Rollouts:
    """Rollouts of PROMPTS in groups of 1, 4 and 2, of unequal lengths, shuffled so that no group is together."""
    rollouts = policy.rollout(PROMPTS, 4, range(12))
    chosen = rollouts.select(torch.tensor([0, 4, 5, 6, 7, 8, 9])[torch.tensor([5, 1, 0, 3, 6, 2, 4])])
    for number, tokens in enumerate(chosen.inputs):
        kept = max(1, len(tokens.response) - number)
        chosen.inputs[number] = replace(tokens, response=tokens.response[:kept])
        chosen.mask[number] = torch.arange(chosen.mask.shape[1]) < kept
    return chosen


def apart(rollouts) -> Rollouts:
    """The same rollouts, each with a prompt of its own."""
    copies = [replace(tokens, prompt=tokens.prompt.clone()) for tokens in rollouts.inputs]
    return replace(rollouts, inputs=copies)


def gradients(policy, rollouts, **options):
    """logp, entropy and the gradient of a sum in which every decision has its own weight; how often decoder layers
    ran."""
    calls = []
    layers = vlm.transformers_model(policy.module.model).get_decoder().layers
    handles = [layer.register_forward_pre_hook(lambda *_: calls.append(1)) for layer in layers]
    policy.module.zero_grad()
    got = replay(policy, rollouts, **options)
    weight = torch.randn(got.logp.shape, generator=torch.Generator().manual_seed(0))
    (weight * (got.logp + 0.3 * got.entropy)).sum().backward()
    for handle in handles:
        handle.remove()
    grads = {n: p.grad.clone() for n, p in policy.module.named_parameters() if p.grad is not None}
    return got, grads, len(calls) / len(layers)


@pytest.mark.parametrize("padding_side", ["right", "left"])
def test_sharing_prompts_changes_neither_logp_nor_gradient(family, load, padding_side):
    policy = load(family)
    rollouts = grouped(policy)
    assert sorted(len(t.response) for t in rollouts.inputs)[0] == 1  # such a row has nothing to continue with
    got, grads, passes = gradients(policy, rollouts, padding_side=padding_side)
    want, expected, once = gradients(policy, apart(rollouts), padding_side=padding_side)
    assert (passes, once) == (2, 1)  # prompts, then responses; or all in one
    close(got.logp, want.logp, 2e-6)
    close(got.entropy, want.entropy, 2e-6)
    assert grads.keys() == expected.keys()
    flat, other = (torch.cat([g.flatten() for g in found.values()]) for found in (grads, expected))
    assert (flat - other).norm() < 1e-5 * other.norm()
    for part_ in ("vision", "connector", "language"):
        names = [n for n in grads if part(n.removeprefix("model.")) == part_]
        square = sum(float(expected[n].square().sum()) for n in names)
        assert sum(float((grads[n] - expected[n]).square().sum()) for n in names) < 1e-10 * square


def test_a_shared_prompt_gives_a_ratio_of_exactly_one(family, load):
    policy = load(family)
    rollouts = grouped(policy)
    with torch.no_grad():
        old = replay(policy, rollouts).logp
    assert torch.equal(replay(policy, rollouts).logp.detach(), old)


@pytest.mark.parametrize("length", [1, 2])
def test_the_shortest_responses_can_be_shared(load, length):
    policy = load("qwen2_5_vl", max_response_length=length)
    rollouts = policy.rollout(PROMPTS, 2, range(6))
    assert rollouts.mask.shape[1] == length
    close(replay(policy, rollouts).logp, replay(policy, apart(rollouts)).logp, 2e-6)


def test_the_vision_tower_sees_every_image_once(family, load):
    policy = load(family)
    tower = next(m for n, m in policy.module.named_modules() if n.split(".")[-1] in loading.VISION_TOWERS)
    seen = []
    tower.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((args or tuple(kwargs.values()))[0].numel()), with_kwargs=True
    )
    rollouts = policy.rollout(PROMPTS, 4, range(12))
    replay(policy, rollouts)
    replay(policy, rollouts.select(torch.tensor([0, 4, 8])))
    replay(policy, apart(rollouts))
    sampled, shared, single, unshared = seen
    assert sampled == shared == single and unshared == 4 * single


def test_rollouts_are_what_the_plain_forward_pass_and_the_seeds_say(family, load):
    """Each token is the argmax of the logits of a full forward pass of its row alone, plus the noise of its seed."""
    policy = load(family)
    for temperature in (0.7, 0.0):
        rollouts = policy.rollout(PROMPTS, 4, range(50, 62), temperature=temperature)
        lengths = set()
        for seed, tokens in zip(range(50, 62), rollouts.inputs, strict=True):
            logits = logits_alone(policy.module.model, tokens)
            logits[:, forbidden(policy)] = -torch.inf
            generator = torch.Generator().manual_seed(seed)
            for t, row in enumerate(logits):
                noise = torch.empty_like(row).exponential_(generator=generator).log()
                score = row if temperature == 0 else row / temperature - noise
                assert score.argmax() == tokens.response[t]
            lengths.add(len(tokens.response))
        if temperature:
            assert len({tuple(row) for row in ids(rollouts)}) > 6 and rollouts.group.unique().tolist() == [0, 1, 2]


def test_a_groups_rollouts_do_not_depend_on_the_other_prompts(family, load):
    policy = load(family)
    want = policy.rollout(PROMPTS, 3, range(9))
    for number, prompt in enumerate(PROMPTS):
        seeds = range(3 * number, 3 * number + 3)
        alone = policy.rollout([prompt], 3, seeds)
        assert ids(alone) == ids(want)[3 * number : 3 * number + 3]
    turned = policy.rollout(PROMPTS[::-1], 3, [6, 7, 8, 3, 4, 5, 0, 1, 2])
    assert ids(turned) == ids(want)[6:] + ids(want)[3:6] + ids(want)[:3]


def test_responses_that_have_ended_leave_and_the_others_are_what_they_were(load, monkeypatch):
    """A tenth of the vocabulary ends a response. With LEAVING = 0 nobody leaves."""
    policy, found = load("qwen2_5_vl", max_response_length=24), {}
    policy.tokens.eos = tuple(range(0, policy.module.model.config.get_text_config().vocab_size, 10))
    for leaving in (0, 4, 1_000_000):
        monkeypatch.setattr(generation, "LEAVING", leaving)
        rows = []
        head = policy.module.model.get_output_embeddings()
        hook = head.register_forward_pre_hook(lambda module, given, rows=rows: rows.append(len(given[0])))
        found[leaving] = ids(policy.rollout(PROMPTS, 8, range(24))), rows
        hook.remove()
    assert found[0][0] == found[4][0] == found[1_000_000][0]
    lengths = [len(row) for row in found[0][0]]
    assert len(set(lengths)) > 4 and set(found[0][1]) == {24}
    going = [sum(length > step for length in lengths) for step in range(max(lengths))]
    assert found[1_000_000][1] == going  # all at once, whoever has ended
    assert all(most >= some > 0.75 * most - 1 for some, most in zip(going, found[4][1], strict=True))


def test_a_family_that_is_not_known_to_share_reads_prompts_for_each_row(family, load, monkeypatch):
    policy = load(family)
    want = policy.rollout(PROMPTS, 4, range(12))
    shared = replay(policy, want).logp
    assert policy.runner.shares_prompts(training=True)
    monkeypatch.setattr(runner, "FAMILIES", set())
    assert not policy.runner.shares_prompts(training=False)
    assert ids(policy.rollout(PROMPTS, 4, range(12))) == ids(want)
    got, _, passes = gradients(policy, want)
    assert passes == 1
    close(got.logp, shared, 2e-6)


def test_recomputed_activations_zero_3_and_sliding_windows_do_not_share(load):
    policy = load("qwen2_5_vl", activation_checkpointing=True)
    assert policy.runner.shares_prompts(training=False) and not policy.runner.shares_prompts(training=True)
    rollouts = policy.rollout(PROMPTS, 4, range(12))
    got, grads, _ = gradients(policy, rollouts)
    want, expected, _ = gradients(load("qwen2_5_vl"), rollouts)
    close(got.logp, want.logp, 2e-6)
    assert all((grads[n] - expected[n]).norm() <= 1e-5 * expected[n].norm() + 1e-6 for n in expected)
    policy = load("qwen2_5_vl")
    config = policy.module.model.config.get_text_config()
    policy.runner.lockstep = vlm.Lockstep(lambda chunks: chunks, nullcontext)
    assert not policy.runner.shares_prompts(training=False) and gradients(policy, rollouts)[2] == 1
    policy.runner.lockstep = None
    assert policy.runner.shares_prompts(training=True)
    config.sliding_window, config.layer_types = 8, ["full_attention", "sliding_attention"]
    assert not policy.runner.shares_prompts(training=False)


# --- sampling ---


@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(1.3, top_p=0.8, top_k=9)], ids=["all", "truncated"])
def test_sampler_and_replay_are_one_distribution(family, load, monkeypatch, sampling):
    """What the decoding loop drew from, step by step with its cache and left padding, is what replay scores."""
    policy = load(family, sampling=sampling)
    steps = []

    def spy(*args, **options):
        steps.append(shape_logits(*args, **options))
        return steps[-1]

    shape_logits = generation.shape_logits
    monkeypatch.setattr(generation, "shape_logits", spy)
    rollouts = policy.rollout(PROMPTS, 2, range(6))
    drawn = torch.stack(steps, 1).log_softmax(-1)  # [rollout, step, vocabulary]
    got = replay(policy, rollouts)
    for row, tokens in enumerate(rollouts.inputs):
        n = len(tokens.response)
        want = drawn[row, :n].gather(-1, tokens.response[:, None])[:, 0]
        assert want.isfinite().all()  # inside the set that was drawn from
        close(got.logp[row, :n], want, 1e-4)
        p = drawn[row, :n].exp()
        close(got.entropy[row, :n], -torch.xlogy(p, p).sum(-1), 1e-4)
    if sampling.top_k:
        possible = drawn.isfinite().sum(-1)
        assert possible.max() <= 9 and possible.min() >= 1
    else:
        assert (drawn.isfinite().sum(-1) == len(policy.tokens.tokenizer) - len(forbidden(policy))).all()


def test_replay_keeps_a_token_that_fell_out(family, load):
    policy = load(family, sampling=Sampling(top_p=0.5, top_k=3))
    rollouts = mixed(policy)
    with torch.no_grad():
        head = policy.module.model.get_output_embeddings().weight
        head.copy_(head[torch.randperm(len(head), generator=torch.Generator().manual_seed(0))])
    got = replay(policy, rollouts)
    outside = 0
    for tokens in rollouts.inputs:
        logits = logits_alone(policy.module.model, tokens)
        logits[:, forbidden(policy)] = -torch.inf
        outside += (logits.topk(3).indices != tokens.response[:, None]).all(-1).sum()
    assert outside > 5
    assert got.logp.isfinite().all() and got.entropy.isfinite().all()
    (got.logp.sum() + got.entropy.sum()).backward()
    assert all(p.grad.isfinite().all() for p in policy.module.parameters() if p.grad is not None)


def test_forbidden_tokens_are_never_sampled(family, load):
    """All that may not be sampled, a padded output matrix included, is made near certain; none comes."""
    policy = load(family)
    model = policy.module.model
    model.resize_token_embeddings(len(policy.tokens.tokenizer) + 16)
    policy = vlm.VisionLanguagePolicy(model, policy.tokens.processor, max_response_length=LENGTH)
    banned = forbidden(policy)
    assert len(banned) >= 16 + 4
    favour(model, banned, 50.0)
    for temperature in (1.0, 5.0, 0.0):
        rollouts = policy.rollout(PROMPTS, 3, range(9), temperature=temperature)
        sampled = {token for row in ids(rollouts) for token in row}
        assert not sampled & set(banned) and max(sampled) < len(policy.tokens.tokenizer)
    assert replay(policy, rollouts).logp.isfinite().all()
    policy.drafter.sampling = replace(policy.drafter.sampling, suppressed=())  # the bias does what it should
    sampled = {token for row in ids(policy.rollout(PROMPTS, 1, range(3))) for token in row}
    assert sampled & set(banned)


def test_a_rollout_depends_on_its_own_seed_only(load):
    policy = load("qwen2_5_vl")
    seeds = [11, 12, 13, 14, 15, 16]
    want = ids(policy.rollout(PROMPTS, 2, seeds))
    assert len({tuple(row) for row in want}) == 6
    assert ids(policy.rollout(PROMPTS, 2, seeds)) == want
    turned = ids(policy.rollout(PROMPTS[::-1], 2, [15, 16, 13, 14, 11, 12]))
    assert turned == want[4:] + want[2:4] + want[:2]
    for number, prompt in enumerate(PROMPTS):
        for member in range(2):
            assert ids(policy.rollout([prompt], 1, [seeds[2 * number + member]])) == [want[2 * number + member]]
    assert ids(policy.rollout(PROMPTS, 2, [*seeds[:5], 99]))[:5] == want[:5]
    torch.manual_seed(123)  # nor on the global generator
    assert ids(policy.rollout(PROMPTS, 2, seeds)) == want


def test_a_checkpoints_own_generation_defaults_do_not_matter(family, load, folders, tmp_path):
    want = ids(load(family).rollout(PROMPTS, 2, range(6)))
    folder = tmp_path / "model"
    shutil.copytree(folders[family], folder)
    defaults = json.loads((folder / "generation_config.json").read_text())
    defaults |= {
        "do_sample": True,
        "temperature": 0.01,
        "top_k": 1,
        "repetition_penalty": 9.0,
        "no_repeat_ngram_size": 1,
        "min_new_tokens": 20,
        "num_beams": 2,
    }
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    assert ids(load(folder).rollout(PROMPTS, 2, range(6))) == want


def test_responses_end_with_any_end_token(load, folders, tmp_path):
    """Both ends of a list end a response; the record says how it ended."""
    folder = tmp_path / "model"
    shutil.copytree(folders["qwen2_5_vl"], folder)
    other = 100
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [other, 2], "pad_token_id": 0}))
    policy = load(folder)
    assert policy.eos == (other, 2)
    favour(policy.module.model, [other, 2], 2.0)
    rollouts = policy.rollout(PROMPTS, 8, range(24))
    lasts = set()
    for row, sample in zip(ids(rollouts), rollouts.samples, strict=True):
        assert not {other, 2} & set(row[:-1]) and sample.response_length == len(row)
        assert sample.truncated == (row[-1] not in (other, 2))
        assert sample.response == policy.tokens.tokenizer.decode(row, skip_special_tokens=True)
        lasts |= {row[-1]}
    assert {other, 2} <= lasts
    assert rollouts.mask.sum(-1).tolist() == [len(row) for row in ids(rollouts)]
    assert rollouts.group.tolist() == [n for n in range(3) for _ in range(8)]
    assert {s.truncated for s in rollouts.samples} == {True, False}


# --- what trains ---


def test_parts_cover_every_parameter(shared):
    policy, _ = shared
    names = [name for name, _ in policy.module.model.named_parameters()]
    assert {name: loading.part_of(name) for name in names} == {name: part(name) for name in names}
    assert {part(name) for name in names} == {"vision", "connector", "language"}


@pytest.mark.parametrize("freeze", [[], ["vision"], ["connector"], ["language"], ["vision", "connector"]], ids="-".join)
def test_frozen_parts_get_no_gradient_and_the_others_do(family, load, freeze):
    policy = load(family, freeze=freeze)
    got = replay(policy, policy.demonstrate(PROMPTS))
    (got.logp.sum() + got.entropy.sum()).backward()
    for name, parameter in policy.module.model.named_parameters():
        frozen = part(name) in freeze
        assert parameter.requires_grad is not frozen
        unused = name.startswith(UNUSED.get(family, "-"))
        assert (parameter.grad is None) is (frozen or unused), name
        if parameter.grad is not None and not name.endswith("bias"):
            assert parameter.grad.abs().max() > 0, name


LORA = {"rank": 4, "alpha": 8.0, "targets": "all-linear"}
FULL_FIRST = pytest.mark.parametrize(
    "lora", [pytest.param(None, id="full"), pytest.param(LORA, id="lora", marks=pytest.mark.slow)]
)
ORTHOGONAL = LORA | {"init": "orthogonal"}


def shake(policy, scale=0.05):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            if parameter.requires_grad:
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def reference(snapshot, policy, rollouts):
    """What the reference policy says, as training asks for it."""
    with torch.no_grad(), snapshot.applied():
        return replay(policy, rollouts, reference=True).logp


def test_lora_trains_adapters_only_and_refers_to_the_base(family, load):
    policy, base = load(family, lora=LORA), load(family)
    rollouts = mixed(base)
    assert ids(mixed(policy)) == ids(rollouts)
    got = replay(policy, rollouts)
    got.logp.sum().backward()
    names = {name for name, p in policy.module.named_parameters() if p.requires_grad}
    assert names and all("lora_" in name for name in names)
    assert {name for name, p in policy.module.named_parameters() if p.grad is not None} <= names
    want = replay(base, rollouts).logp.detach()
    close(got.logp.detach(), want)
    start = Snapshot(policy.module)
    close(reference(start, policy, rollouts), want)
    shake(policy)
    assert torch.equal(reference(start, policy, rollouts), got.logp.detach())
    moved = replay(policy, rollouts).logp
    assert moved.requires_grad and (moved - want).abs().max() > 1e-3
    sampled = policy.rollout(PROMPTS, 2, range(6))  # from the adapted model
    assert ids(sampled) != ids(base.rollout(PROMPTS, 2, range(6)))


def test_a_lora_may_begin_with_orthogonal_factors(load):
    """The model says what it said without it, and both factors learn at once; by default one is at 0, and so the other
    does not learn yet."""
    made, plain, base = load("qwen2_5_vl", lora=ORTHOGONAL), load("qwen2_5_vl", lora=LORA), load("qwen2_5_vl")
    rollouts = mixed(base)
    close(replay(made, rollouts).logp.detach(), replay(base, rollouts).logp.detach())
    for policy, learning in ((made, True), (plain, False)):
        replay(policy, rollouts).logp.sum().backward()
        first = [p for name, p in policy.module.named_parameters() if "lora_A" in name]
        assert any(p.grad is not None and bool(p.grad.any()) for p in first) is learning
    with pytest.raises(ValueError, match="rank=3 is odd"):
        LoRA(rank=3, init="orthogonal")


def test_lora_leaves_frozen_parts_alone(family, load):
    policy = load(family, lora=LORA, freeze=["vision", "connector"])

    def trained():
        return {loading.part_of(name) for name, p in policy.module.named_parameters() if p.requires_grad}

    assert trained() == {"language"}
    reference(Snapshot(policy.module), policy, mixed(policy))
    assert trained() == {"language"}


def test_reference_is_a_copy_of_the_start(load):
    policy = load("internvl")
    start, rollouts = Snapshot(policy.module), mixed(policy)
    want = replay(policy, rollouts).logp.detach()
    assert not reference(start, policy, rollouts).requires_grad
    shake(policy)
    moved = replay(policy, rollouts).logp.detach()
    assert torch.equal(reference(start, policy, rollouts), want) and (moved - want).abs().max() > 1e-3
    assert torch.equal(replay(policy, rollouts).logp.detach(), moved)  # what is trained is back
    start.take()
    assert torch.equal(reference(start, policy, rollouts), moved)
    assert not any(kept.requires_grad for kept in start.copies)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_saved_policy_loads_the_same(family, load, tmp_path, lora):
    policy = load(family, lora=lora)
    start = replay(policy, mixed(policy)).logp.detach()
    shake(policy)
    rollouts = mixed(policy)
    want = replay(policy, rollouts).logp.detach()
    assert want.shape != start.shape or not torch.equal(want, start)
    policy.save(tmp_path, policy.module.state_dict())
    again = load(tmp_path)
    assert ids(mixed(again)) == ids(rollouts)
    assert torch.equal(replay(again, rollouts).logp.detach(), want)
    assert (tmp_path / "adapter_config.json").is_file() is (lora is not None)
    if lora is not None:
        assert not list(tmp_path.glob("model*.safetensors"))
        trained = {n for n, p in policy.module.named_parameters() if p.requires_grad}
        assert {n for n, p in again.module.named_parameters() if p.requires_grad} == trained


@FULL_FIRST
def test_activation_checkpointing_changes_memory_only(family, load, lora):
    torch.manual_seed(0)
    plain = load(family, lora=lora)
    recomputed = load(family, lora=lora, activation_checkpointing=True)
    recomputed.module.load_state_dict(plain.module.state_dict())
    for policy in (plain, recomputed):
        if lora is not None:
            shake(policy)
    rollouts = mixed(plain)
    grads = []
    for policy, times in ((plain, 1), (recomputed, 2)):
        calls = []
        for layer in vlm.transformers_model(policy.module.model).get_decoder().layers:
            layer.self_attn.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        got = replay(policy, rollouts)
        (got.logp.sum() + got.entropy.sum()).backward()
        assert len(calls) == 2 * times
        grads.append({n: p.grad.clone() for n, p in policy.module.named_parameters() if p.grad is not None})
        grads[-1][""] = got.logp.detach()
        assert ids(mixed(policy)) == ids(rollouts)  # with the cache, so that sampling is what replay scores
        calls.clear()
        replay(policy, rollouts).logp.sum().backward()
        assert len(calls) == 2 * times
    assert grads[0].keys() == grads[1].keys()
    for name, want in grads[0].items():
        torch.testing.assert_close(grads[1][name], want, atol=1e-6, rtol=1e-6)


def test_an_error_while_generating_leaves_activation_checkpointing_on(load, monkeypatch):
    policy = load("qwen2_5_vl", activation_checkpointing=True)
    layer = next(m for m in policy.module.modules() if isinstance(m, GradientCheckpointingLayer))
    switched = []

    def fails(*_):
        switched.append(layer.training)
        raise ZeroDivisionError

    for name in ("_generate_shared", "_generate_unshared"):
        monkeypatch.setattr(policy.runner, name, fails)
    with pytest.raises(ZeroDivisionError):
        mixed(policy)
    assert switched == [False] and layer.training


@FULL_FIRST
def test_frozen_parts_run_no_backward(family, load, lora):
    """Also where layers recompute their activations: of a frozen tower nothing asks for a gradient or runs again."""
    policy = load(family, freeze=["vision", "connector"], activation_checkpointing=True, lora=lora)
    policy.module.reuses_features = False  # replay would use the features that sampling computed
    rollouts, seen = mixed(policy), []
    for name, module in policy.module.named_modules():
        if isinstance(module, torch.nn.Linear) and loading.part_of(name) != "language":
            module.register_forward_hook(lambda *call: seen.append(call[-1].requires_grad))
    logp = replay(policy, rollouts).logp
    once = len(seen)
    logp.sum().backward()
    assert once > 10 and len(seen) == once and not any(seen)
    trained = {n for n, p in policy.module.named_parameters() if p.requires_grad}
    assert trained == {n for n, p in policy.module.named_parameters() if p.grad is not None}
    assert {loading.part_of(name) for name in trained} == {"language"}


def test_lockstep_adds_an_image_and_changes_nothing(family, load):
    """A rank without an image runs the vision tower too; the numbers stay."""
    policy = load(family)
    rollouts = policy.demonstrate(PROMPTS[1:2])
    want = replay(policy, rollouts)
    calls = []
    tower = next(m for n, m in policy.module.named_modules() if n.split(".")[-1] in loading.VISION_TOWERS)
    tower.register_forward_hook(lambda *_: calls.append(1))
    replay(policy, rollouts)
    assert not calls
    policy.runner.lockstep = vlm.Lockstep(lambda chunks: chunks + 9, nullcontext)
    got = replay(policy, rollouts)
    assert calls
    close(got.logp, want.logp)
    close(got.entropy, want.entropy)


# --- prompts and demonstrations ---


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda p: p.id)
def test_prompts_are_encoded_as_the_processor_itself_does(shared, prompt):
    policy, _ = shared
    conversation = prompts.messages(prompt)
    images = iter(prompt.images)
    for message in conversation:
        for piece in message["content"]:
            if piece["type"] == "image":
                piece["image"] = next(images)
    want = policy.tokens.processor.apply_chat_template(
        conversation, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    got = policy.tokens.encode([prompt])[0]
    assert got.prompt.tolist() == want.pop("input_ids")[0].tolist()
    assert set(want) - {"attention_mask"} == {*got.sequence, *got.images}
    for key, value in got.images.items():
        assert torch.equal(value, want[key])


def test_prompts_are_encoded_together_as_alone(shared, monkeypatch):
    policy, _ = shared
    twin = replace(PROMPTS[2], id="twin", text="Which is the largest?", images=(image(48, 40).transpose(1),))
    brief = replace(PROMPTS[1], id="brief", text="one", system=None)
    prompts = [PROMPTS[0], twin, *PROMPTS[1:], brief, replace(twin, images=(image(40, 48),))]
    processed, calls = chats._encode_same_sizes, []
    with monkeypatch.context() as patch:
        patch.setattr(
            chats, "_encode_same_sizes", lambda p, rows, inside: calls.append(len(rows)) or processed(p, rows, inside)
        )
        encoded = policy.tokens.encode(prompts)
    assert calls == [1, 2, 2, 1]  # one for each set of image sizes
    for prompt, together in zip(prompts, encoded, strict=True):
        (alone,) = policy.tokens.encode([prompt])
        assert together.prompt.tolist() == alone.prompt.tolist() and len(together.response) == 0
        for one, other in ((together.sequence, alone.sequence), (together.images, alone.images)):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key], other[key]) for key in one)


def test_demonstration_is_the_answer_and_the_end(shared):
    policy, _ = shared
    other = Prompt("other", "How many?", answer="8", metadata={"demonstration": "The answer is 8"})
    rollouts = policy.demonstrate([*PROMPTS, other])
    assert [s.response for s in rollouts.samples] == ["9", "12 and", "5", "The answer is 8"]
    for tokens, sample in zip(rollouts.inputs, rollouts.samples, strict=True):
        assert policy.tokens.tokenizer.decode(tokens.response) == sample.response + policy.tokens.tokenizer.eos_token
        assert tokens.response[-1] in policy.eos and not sample.truncated
        assert tokens.response.dtype == tokens.prompt.dtype
    assert rollouts.group.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("family", ["idefics3"])
def test_bad_prompts_and_demonstrations_name_themselves(load, family):
    policy = load(family, max_prompt_length=60, max_response_length=3)
    long = replace(PROMPTS[1], id="row-7", text="sum " * 100)
    with pytest.raises(UserError, match=r"row-7.*rollout\.max_prompt_length=60"):
        policy.tokens.encode([long])
    with pytest.raises(UserError, match=r"two.*rollout\.max_prompt_length=60"):
        policy.rollout(PROMPTS, 1, [1, 2, 3])
    with pytest.raises(UserError, match=r"row-8.*rollout\.max_response_length=3"):
        policy.demonstrate([replace(PROMPTS[1], id="row-8", answer="The answer is 8")])
    with pytest.raises(UserError, match=r"row-9.*<image>"):
        policy.demonstrate([replace(PROMPTS[1], id="row-9", answer="<image>")])
    for text, images in (("<image> <image>", 1), ("<image>", 2), ("<image>", 0)):
        with pytest.raises(UserError, match=rf"row-10 has {text.count('<')} <image> markers but {images} images"):
            policy.tokens.encode([Prompt("row-10", text, (image(16, 16),) * images)])


def test_images_go_where_the_markers_are():
    images = (image(16, 16), image(24, 16))
    text, part = (lambda t: {"type": "text", "text": t}), {"type": "image"}
    user = prompts.messages(Prompt("p", "a <image> b <image>", images))
    assert user == [{"role": "user", "content": [text("a "), part, text(" b "), part]}]
    assert prompts.messages(Prompt("p", "a", images))[0]["content"] == [part, part, text("a")]
    assert prompts.messages(Prompt("p", "a", system="s"))[0] == {"role": "system", "content": [text("s")]}


# --- what is refused ---


def test_a_text_model_is_refused(tmp_path):
    tiny = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=32, num_key_value_heads=2, **tiny)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"model\.path=.*qwen2"):
        loaded(tmp_path)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"model\.path="):
        loaded(tmp_path)


def test_a_model_without_an_end_is_refused(shared):
    policy, _ = shared
    generation_config = type("G", (), {"eos_token_id": None})()
    with pytest.raises(UserError, match="eos_token_id"):
        end_tokens(generation_config, type("T", (), {"eos_token_id": None})())
    generation_config.eos_token_id = [7, 2, 7]
    assert end_tokens(generation_config, policy.tokens.tokenizer) == (7, 2)
