"""Trials of an image-text model: what sampling, scoring, learning and saving need of it.

Each returns its line, or raises FailedTrial with the reason."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mmrl.generation.sampling import Sampling
from mmrl.policies.tokenizers import Processor
from mmrl.policies.vlm import loading
from mmrl.policies.vlm.policy import VisionLanguagePolicy
from mmrl.policies.vlm.prompts import RESPONSE, RolloutTokens, encode
from mmrl.policies.vlm.responses.tokens import end_tokens
from mmrl.policies.vlm.scorer import transformers_model
from mmrl.policies.vlm.settings import VisionLanguageModel
from mmrl.policies.vlm.templates import MARK, forms_of, rendered
from mmrl.rollouts import Message, Prompt, Rollouts

TOKENS = 6  # of a response
LONGEST = 1 << 15  # tokens of a prompt
GAP = 1e-3  # between two log-probabilities of one token in float32
FINITE = 1e3  # times the language model's gradient a token, above which a first step is not a step


class FailedTrial(Exception):
    """A reason, in one line, why a trial fails."""


def noise(width: int, height: int) -> Image.Image:
    """Returns an image that no other size shares: noise of its width as a seed."""
    return Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8))


ONE = Prompt("one image", "What is in the image?", (noise(64, 48),))
PROMPTS = (
    ONE,
    Prompt("two images", "Which is larger, <image> or <image>, and by how much?", (noise(40, 24), noise(80, 64))),
    Prompt("no image", "What is two and three?", system="Answer with one number."),
)


# --- text ---


def template_line(processor: Processor) -> str:
    forms = forms_of(processor)
    if "image" not in forms.media:
        rendered(processor, [Message("user", (*ONE.images, ONE.text))])  # raises, with the reason
    system = "no system role: system texts stand before the first question" if forms.system is None else "system role"
    return f"content as {'a list of parts' if forms.user == 'parts' else 'one string'}, {system}"


def image_token_of(config: Any) -> int:
    declared = config.to_dict()
    ids = [declared[key] for key in ("image_token_id", "image_token_index") if declared.get(key) is not None]
    if not ids:
        raise FailedTrial("its config.json has neither image_token_id nor image_token_index")
    return int(ids[0])


def placeholder_line(processor: Processor, path: str) -> str:
    """Counts the image tokens of prompts with one, two and no images, and returns a line on them. Raises FailedTrial
    where they do not fit."""
    token = image_token_of(loading.load_config(path))
    counts = []
    for prompt in PROMPTS:
        (tokens,) = encode(processor, [prompt], LONGEST)
        counts.append(int((tokens.prompt == token).sum()))
    if counts[0] == 0 or counts[1] == 0:
        raise FailedTrial(
            f"an image becomes {counts[0]} of the tokens {token} that config.json names as the image's: its processor "
            "and its model do not belong together"
        )
    if counts[2]:
        raise FailedTrial(f"a question without an image contains {counts[2]} image tokens")
    return f"an image of 64 x 48 pixels becomes {counts[0]} tokens, two others {counts[1]}"


def end_line(processor: Processor, model: Any) -> str:
    """Compares the tokens that end a response with the one by which the template closes it."""
    tokenizer = processor.tokenizer
    ends = end_tokens(model.generation_config, tokenizer)
    question, answer = Message("user", (MARK,)), Message("assistant", (RESPONSE,))
    rest = rendered(processor, [question, answer, question]).partition(RESPONSE)[2]
    first = tokenizer(rest, add_special_tokens=False).input_ids[:1]
    names = ", ".join(repr(tokenizer.decode([end])) for end in ends)
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    if first and first[0] in special and first[0] not in ends:
        raise FailedTrial(
            f"its template closes a response with {tokenizer.decode(first)!r}, which does not end one: the ends are "
            f"{names}; add {first[0]} to eos_token_id in generation_config.json"
        )
    return names


# --- numbers ---


def policy_of(model: Any, processor: Processor) -> VisionLanguagePolicy:
    return VisionLanguagePolicy(
        model, processor, sampling=Sampling(), max_prompt_length=LONGEST, max_response_length=TOKENS, logp_chunk=4
    )


def sampled(policy: VisionLanguagePolicy, temperature: float = 1.0) -> Rollouts:
    """Returns responses to all prompts, drawn in one batch."""
    return policy.rollout(PROMPTS, 1, [1, 2, 3], temperature=temperature)


def plain(policy: VisionLanguagePolicy, tokens: RolloutTokens) -> Tensor:
    """Returns log-probabilities [response token, vocabulary] by the model's own forward pass over one row: without
    padding, caches and shared prompts."""
    ids = torch.cat([tokens.prompt, tokens.response])[None]
    zeros = torch.zeros_like(tokens.response)
    sequence = {key: torch.cat([value, zeros])[None] for key, value in tokens.sequence.items()}
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **sequence, **tokens.images}
    with torch.no_grad():
        logits = transformers_model(policy.module.model)(**inputs).logits[0, len(tokens.prompt) - 1 : -1].float()
    logits[:, policy.module.suppressed] = -torch.inf
    return logits.log_softmax(-1)


def largest(one: Tensor, other: Tensor, what: str) -> str:
    gap = float((one - other).abs().max())
    if not gap <= GAP:
        raise FailedTrial(f"{what} differ by up to {gap:.2g}, more than {GAP:g}")
    return f"largest difference {gap:.1e}"


def images_line(policy: VisionLanguagePolicy) -> str:
    """Compares a response's likelihood behind two images: as many features as tokens, and the images count."""
    rollouts = policy.rollout([ONE], 1, [1], temperature=1.0)
    other = policy.view(
        rollouts,
        lambda prompt: Prompt(prompt.id, prompt.text, (noise(64, 48).transpose(Image.Transpose.FLIP_TOP_BOTTOM),)),
    )
    with torch.no_grad():
        first, second = (policy.replay(batch, policy.module).logp for batch in (rollouts, other))
    gap = float((first - second).abs().max())
    if not gap > 0:
        raise FailedTrial("another image changes nothing: the model does not read it")
    return f"as many features as tokens; another image moves log-probabilities by {gap:.1e}"


def sampling_line(policy: VisionLanguagePolicy) -> str:
    """Compares each token of greedy decoding, in a padded batch with a cache, with the likeliest one by a plain
    forward."""
    rollouts = sampled(policy, 0.0)
    worst = 0.0
    for tokens in rollouts.inputs:
        logp = plain(policy, tokens)
        drawn = logp.gather(1, tokens.response[:, None])[:, 0]
        worst = max(worst, float((logp.max(1).values - drawn).max()))
    if not worst <= GAP:
        raise FailedTrial(
            f"greedy decoding draws tokens that are less likely than others, by {worst:.2g} in log-probability"
        )
    with torch.no_grad():
        old = policy.replay(rollouts, policy.module).logp
    gap = float((policy.replay(rollouts, policy.module).logp.detach() - old).abs().max())
    if gap > GAP:
        raise FailedTrial(f"the ratio before any update is not 1: log-probabilities differ by up to {gap:.2g}")
    return f"greedy tokens are the likeliest ones, within {worst:.1e}; log-ratio before any update {gap:.1e}"


def padding_line(policy: VisionLanguagePolicy) -> str:
    rollouts = sampled(policy)
    with torch.no_grad():
        right = policy.replay(rollouts, policy.module).logp
        left = policy.replay(rollouts, policy.module, padding_side="left").logp
        alone = [policy.replay(rollouts.select(torch.tensor([row])), policy.module) for row in range(len(rollouts))]
    largest(right, left, "log-probabilities with padding on the left and on the right")
    rows = torch.stack([torch.nn.functional.pad(one.logp[0], (0, right.shape[1] - one.logp.shape[1])) for one in alone])
    return largest(right, rows, "log-probabilities in a batch and alone")


def positions_line(policy: VisionLanguagePolicy) -> str:
    """Compares likelihoods of a padded batch with the model's own forward pass over each row."""
    rollouts = sampled(policy)
    with torch.no_grad():
        scored = policy.replay(rollouts, policy.module).logp
    rows = torch.zeros_like(scored)
    for row, tokens in enumerate(rollouts.inputs):
        rows[row, : len(tokens.response)] = plain(policy, tokens).gather(1, tokens.response[:, None])[:, 0]
    return largest(scored, rows, "log-probabilities of a padded batch and of a plain forward")


def gradient_line(policy: VisionLanguagePolicy) -> str:
    """Has a likelihood's gradient reach every part, frozen ones aside."""
    policy.module.zero_grad()
    rollouts = sampled(policy)
    policy.replay(rollouts, policy.module).logp[rollouts.mask].mean().backward()
    norms: dict[str, float] = {}
    for name, parameter in policy.module.named_parameters():
        if parameter.grad is not None:
            if not parameter.grad.isfinite().all():
                raise FailedTrial(f"the gradient of {name} is not finite")
            part = loading.part_of(name)
            norms[part] = norms.get(part, 0.0) + float(parameter.grad.square().sum())
    policy.module.zero_grad()
    if missing := [part for part in ("language", "vision") if not norms.get(part)]:
        raise FailedTrial(f"no gradient reaches the {' and the '.join(missing)} part")
    text = ", ".join(f"{part} {norm**0.5:.2g}" for part, norm in norms.items())
    if max(norms.values()) ** 0.5 > FINITE:
        raise FailedTrial(f"the gradient of a mean log-probability has norms of {text}: no step is small enough")
    return f"norms: {text}"


# --- files ---


def saved_line(policy: VisionLanguagePolicy) -> str:
    """Saves and reloads the model and returns a line on the largest difference of log-probabilities. Raises FailedTrial
    where the processor changed."""
    rollouts = sampled(policy)
    with tempfile.TemporaryDirectory(prefix="mmrl-check-") as folder:
        policy.save(Path(folder), policy.module.state_dict())
        model, processor = loading.load_model(folder, VisionLanguageModel(path=folder))
        again = policy_of(model, processor)
        with torch.no_grad():
            first, second = (one.replay(rollouts, one.module).logp for one in (policy, again))
        line = largest(first, second, "log-probabilities before saving and after loading")
        if [t.prompt.tolist() for t in again.tokens.encode(PROMPTS)] != [t.prompt.tolist() for t in rollouts.inputs]:
            raise FailedTrial("the processor that was saved reads prompts in another way")
    return line


def lora_line(policy: VisionLanguagePolicy) -> str:
    """Adds adapters to all linear layers: they reach the language model and get a gradient. Changes the model."""
    import peft  # takes a second

    core: Any = policy.module.model
    if isinstance(core, peft.PeftModel):
        return "it has its own"
    peft.get_peft_model(core, peft.LoraConfig(r=2, target_modules="all-linear"))
    names = [name for name, _ in core.named_parameters() if "lora_B" in name]
    parts = {part: sum(loading.part_of(name) == part for name in names) for part in ("language", "vision", "connector")}
    if not parts["language"]:
        raise FailedTrial("model.lora.targets=all-linear finds no layer of the language model")
    return "all-linear adapts " + ", ".join(f"{count} layers of {part}" for part, count in parts.items() if count)
