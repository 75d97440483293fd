"""Trials of an image-text model: tokens, likelihoods, gradients and files.

Each function returns a line about what it measured, or raises FailedTrial with the reason.
"""

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

RESPONSE_TOKENS = 6
MAX_PROMPT_TOKENS = 1 << 15
MAX_DIFFERENCE = 1e-3  # of two log-probabilities of one token in float32
MAX_GRADIENT_NORM = 1e3  # of the mean log-probability of a token; a step on a larger one is useless


class FailedTrial(Exception):
    """An exception whose text is the reason, in one line, why a trial failed."""


def noise(width: int, height: int) -> Image.Image:
    """Returns an image of `width` x `height` random pixels; the width is the seed."""
    return Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8))


ONE_IMAGE = Prompt("one image", "What is in the image?", (noise(64, 48),))
PROMPTS = (
    ONE_IMAGE,
    Prompt("two images", "Which is larger, <image> or <image>, and by how much?", (noise(40, 24), noise(80, 64))),
    Prompt("no image", "What is two and three?", system="Answer with one number."),
)


# --- text ---


def check_template(processor: Processor) -> str:
    """Returns a line on the form of messages that the chat template takes. Raises UserError if it takes no images."""
    forms = forms_of(processor)
    if "image" not in forms.media:
        rendered(processor, [Message("user", (*ONE_IMAGE.images, ONE_IMAGE.text))])  # raises, with the reason
    system = "no system role: the system text goes before the first question" if forms.system is None else "system role"
    return f"content as {'a list of parts' if forms.user == 'parts' else 'one string'}, {system}"


def image_token_of(config: Any) -> int:
    """Returns the id of the image token that a model's config.json declares. Raises FailedTrial if it declares none."""
    config_dict = config.to_dict()
    ids = [config_dict[key] for key in ("image_token_id", "image_token_index") if config_dict.get(key) is not None]
    if not ids:
        raise FailedTrial("its config.json has neither image_token_id nor image_token_index")
    return int(ids[0])


def check_image_tokens(processor: Processor, path: str) -> str:
    """Returns a line on the number of image tokens in prompts with one, two and no images.

    Raises FailedTrial if images become no image tokens, or a prompt without images has some.
    """
    token = image_token_of(loading.load_config(path))
    num_image_tokens = []
    for prompt in PROMPTS:
        (tokens,) = encode(processor, [prompt], MAX_PROMPT_TOKENS)
        num_image_tokens.append(int((tokens.prompt == token).sum()))
    if num_image_tokens[0] == 0 or num_image_tokens[1] == 0:
        raise FailedTrial(
            f"an image becomes {num_image_tokens[0]} tokens {token}, the image token in config.json: the processor "
            "belongs to another model; take the processor of this one"
        )
    if num_image_tokens[2]:
        raise FailedTrial(f"a question without an image contains {num_image_tokens[2]} image tokens")
    return f"an image of 64 x 48 pixels becomes {num_image_tokens[0]} tokens, two others {num_image_tokens[1]}"


def check_end_tokens(processor: Processor, model: Any) -> str:
    """Returns a line on the tokens that end a response. Raises FailedTrial if the chat template closes responses with a
    special token that is not among them."""
    tokenizer = processor.tokenizer
    end_ids = end_tokens(model.generation_config, tokenizer)
    question, answer = Message("user", (MARK,)), Message("assistant", (RESPONSE,))
    # what the template writes after a response
    rest = rendered(processor, [question, answer, question]).partition(RESPONSE)[2]
    first = tokenizer(rest, add_special_tokens=False).input_ids[:1]
    names = ", ".join(repr(tokenizer.decode([end_id])) for end_id in end_ids)
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    if first and first[0] in special and first[0] not in end_ids:
        raise FailedTrial(
            f"the template closes a response with {tokenizer.decode(first)!r}, but generation stops only at {names}; "
            f"add {first[0]} to eos_token_id in generation_config.json"
        )
    return names


# --- numbers ---


def policy_of(model: Any, processor: Processor) -> VisionLanguagePolicy:
    """Builds a policy that samples responses of RESPONSE_TOKENS tokens."""
    return VisionLanguagePolicy(
        model,
        processor,
        sampling=Sampling(),
        max_prompt_length=MAX_PROMPT_TOKENS,
        max_response_length=RESPONSE_TOKENS,
        logp_chunk=4,
    )


def sample_responses(policy: VisionLanguagePolicy, temperature: float = 1.0) -> Rollouts:
    """Samples a response to each of PROMPTS, in one batch."""
    return policy.rollout(PROMPTS, 1, [1, 2, 3], temperature=temperature)


def unpadded_logprobs(policy: VisionLanguagePolicy, tokens: RolloutTokens) -> Tensor:
    """Returns log-probabilities [response token, vocabulary] of one rollout, by the model's forward pass without
    padding, cache and shared prompts."""
    ids = torch.cat([tokens.prompt, tokens.response])[None]
    zeros = torch.zeros_like(tokens.response)
    sequence = {key: torch.cat([value, zeros])[None] for key, value in tokens.sequence.items()}
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **sequence, **tokens.images}
    with torch.no_grad():
        logits = transformers_model(policy.module.model)(**inputs).logits[0, len(tokens.prompt) - 1 : -1].float()
    logits[:, policy.module.suppressed] = -torch.inf
    return logits.log_softmax(-1)


def max_difference(values: Tensor, other: Tensor, quantities: str) -> str:
    """Returns a line on the largest difference of two tensors. quantities: their names, for messages. Raises
    FailedTrial if it is above MAX_DIFFERENCE."""
    difference = float((values - other).abs().max())
    if not difference <= MAX_DIFFERENCE:  # true for NaN, too
        raise FailedTrial(f"{quantities} differ by up to {difference:.2g}, more than {MAX_DIFFERENCE:g}")
    return f"largest difference {difference:.1e}"


def check_images(policy: VisionLanguagePolicy) -> str:
    """Compares the log-probabilities of a response after two different images. Raises FailedTrial if they are equal."""
    rollouts = policy.rollout([ONE_IMAGE], 1, [1], temperature=1.0)
    other = policy.view(
        rollouts,
        lambda prompt: Prompt(prompt.id, prompt.text, (noise(64, 48).transpose(Image.Transpose.FLIP_TOP_BOTTOM),)),
    )
    with torch.no_grad():
        first, second = (policy.replay(batch, policy.module).logp for batch in (rollouts, other))
    difference = float((first - second).abs().max())
    if not difference > 0:  # true for NaN, too
        raise FailedTrial("another image does not change log-probabilities: the model does not read images")
    return f"as many features as tokens; another image changes log-probabilities by {difference:.1e}"


def check_sampling(policy: VisionLanguagePolicy) -> str:
    """Compares greedy decoding, in a padded batch with a cache, with the likeliest tokens of unpadded forward passes.

    Raises FailedTrial if a decoded token is less likely than another, or the importance ratio before any update is not
    1.
    """
    rollouts = sample_responses(policy, 0.0)
    largest_gap = 0.0
    for tokens in rollouts.inputs:
        logp = unpadded_logprobs(policy, tokens)
        sampled_logp = logp.gather(1, tokens.response[:, None])[:, 0]
        largest_gap = max(largest_gap, float((logp.max(1).values - sampled_logp).max()))
    if not largest_gap <= MAX_DIFFERENCE:  # true for NaN, too
        raise FailedTrial(
            f"greedy decoding takes tokens that are less likely than others, by {largest_gap:.2g} in log-probability"
        )
    with torch.no_grad():
        old = policy.replay(rollouts, policy.module).logp
    difference = float((policy.replay(rollouts, policy.module).logp.detach() - old).abs().max())
    if difference > MAX_DIFFERENCE:
        raise FailedTrial(f"the ratio before any update is not 1: log-probabilities differ by up to {difference:.2g}")
    return (
        f"greedy tokens are the likeliest ones, within {largest_gap:.1e}; log-ratio before any update {difference:.1e}"
    )


def check_padding(policy: VisionLanguagePolicy) -> str:
    """Compares log-probabilities with padding on the right, padding on the left, and without a batch."""
    rollouts = sample_responses(policy)
    with torch.no_grad():
        right = policy.replay(rollouts, policy.module).logp
        left = policy.replay(rollouts, policy.module, padding_side="left").logp
        alone = [policy.replay(rollouts.select(torch.tensor([row])), policy.module) for row in range(len(rollouts))]
    max_difference(right, left, "log-probabilities with padding on the left and on the right")
    rows = torch.stack([torch.nn.functional.pad(one.logp[0], (0, right.shape[1] - one.logp.shape[1])) for one in alone])
    return max_difference(right, rows, "log-probabilities in a batch and alone")


def check_positions(policy: VisionLanguagePolicy) -> str:
    """Compares log-probabilities of a padded batch with the model's unpadded forward pass over each row."""
    rollouts = sample_responses(policy)
    with torch.no_grad():
        scored = policy.replay(rollouts, policy.module).logp
    rows = torch.zeros_like(scored)
    for row, tokens in enumerate(rollouts.inputs):
        rows[row, : len(tokens.response)] = unpadded_logprobs(policy, tokens).gather(1, tokens.response[:, None])[:, 0]
    return max_difference(scored, rows, "log-probabilities of a padded batch and of a plain forward")


def check_gradient(policy: VisionLanguagePolicy) -> str:
    """Returns a line on the gradient norms of the mean log-probability, by part of the model.

    Raises FailedTrial if a gradient is not finite, is too large, or reaches no vision or language weights.
    """
    policy.module.zero_grad()
    rollouts = sample_responses(policy)
    policy.replay(rollouts, policy.module).logp[rollouts.mask].mean().backward()
    norms: dict[str, float] = {}
    for name, parameter in policy.module.named_parameters():
        if parameter.grad is not None:
            if not parameter.grad.isfinite().all():
                raise FailedTrial(f"the gradient of {name} is not finite")
            part = loading.part_of(name)
            norms[part] = norms.get(part, 0.0) + float(parameter.grad.square().sum())
    policy.module.zero_grad()
    if without_gradient := [part for part in ("language", "vision") if not norms.get(part)]:
        raise FailedTrial(f"no gradient reaches the {' and the '.join(without_gradient)} part")
    text = ", ".join(f"{part} {norm**0.5:.2g}" for part, norm in norms.items())
    if max(norms.values()) ** 0.5 > MAX_GRADIENT_NORM:
        raise FailedTrial(f"the gradient of a mean log-probability has norms of {text}: no step is small enough")
    return f"norms: {text}"


# --- files ---


def check_saving(policy: VisionLanguagePolicy) -> str:
    """Saves and reloads the model, and compares log-probabilities. Raises FailedTrial if the reloaded processor encodes
    prompts differently."""
    rollouts = sample_responses(policy)
    with tempfile.TemporaryDirectory(prefix="mmrl-check-") as folder:
        policy.save(Path(folder), policy.module.state_dict())
        model, processor = loading.load_model(folder, VisionLanguageModel(path=folder))
        reloaded = policy_of(model, processor)
        with torch.no_grad():
            first, second = (one.replay(rollouts, one.module).logp for one in (policy, reloaded))
        line = max_difference(first, second, "log-probabilities before saving and after loading")
        if [t.prompt.tolist() for t in reloaded.tokens.encode(PROMPTS)] != [t.prompt.tolist() for t in rollouts.inputs]:
            raise FailedTrial("the saved processor encodes prompts into other tokens than the original one")
    return line


def check_lora(policy: VisionLanguagePolicy) -> str:
    """Adds LoRA adapters to all linear layers, in place, and returns a line on the number of adapted layers by part.

    Raises FailedTrial if no layer of the language model is adapted.
    """
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
