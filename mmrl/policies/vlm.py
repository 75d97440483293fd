"""Vision-language models as policies: any transformers image-text model, one decision a response token."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import peft
import torch
from einops import rearrange
from PIL import Image
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer
from transformers.core_model_loading import Transpose, WeightConverter
from transformers.modeling_layers import GradientCheckpointingLayer

from mmrl.errors import UserError
from mmrl.generation.sampling import Sampling, shape_logits
from mmrl.generation.transformers import Prefix, generate, generate_groups
from mmrl.generation.vllm import Answering, Request
from mmrl.kernels import hidden_logprob, token_logprob
from mmrl.policies.drafts import Draft
from mmrl.policies.prompts import Tokens, chat_texts, collate, encode
from mmrl.policies.routing import Routing, collate_routes
from mmrl.rollouts import Prompt, Replay, Rollouts, Sample

# Names of modules, as path components of parameter names, over the families of transformers.
CONNECTORS = {"merger", "deepstack_merger_list", "connector", "multi_modal_projector", "projector", "image_newline"}
VISION_TOWERS = {"visual", "vision_model", "vision_tower", "vision_backbone"}
# Families (model_type) whose prompts are read once for all of their responses.
PREFIX_SHARING = {"qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "idefics3", "llava_onevision", "internvl"}
# Keys of a model's configuration whose token stands for pixels and so can not be an answer.
PLACEHOLDER_KEYS = (
    "image_token_id",
    "image_token_index",
    "video_token_id",
    "video_token_index",
    "vision_start_token_id",
    "vision_end_token_id",
    "vision_token_id",
)


@dataclass(frozen=True)
class Continuations:
    """What follows prompts that are read once: `prompt` [response] says which, `ids` and `mask` [response, token] are
    the responses without their last token, padded on the right."""

    prompt: Tensor
    ids: Tensor
    mask: Tensor


class TokenScorer(nn.Module):
    """Log-probability and entropy of chosen tokens; this is the module the engine wraps.

    The vocabulary is only ever looked at in chunks of `chunk` decisions, recomputed in the backward pass, so the
    logits of a whole batch never exist.
    """

    def __init__(self, model: nn.Module, sampling: Sampling, chunk: int) -> None:
        super().__init__()
        self.model = model
        self.sampling = sampling
        self.chunk = chunk
        self.register_buffer("suppressed", torch.tensor(sampling.suppressed, dtype=torch.int64), persistent=False)

    def forward(
        self,
        inputs: dict[str, Tensor],
        continuations: Continuations | None,
        row: Tensor,
        column: Tensor,
        targets: Tensor,
        chunks: int | None,
    ) -> tuple[Tensor, Tensor]:
        """inputs: the model's own, with input_ids [row, length]. row, column, targets: [decision], the token targets[i]
        is predicted at position column[i] of row row[i]. Returns logp, entropy: [decision] fp32.

        With `continuations` the inputs are prompts; rows are then responses, and columns count from a prompt's end.
        `chunks` is the number of passes through the output layer, which under ZeRO-3 must be the same on every rank;
        None: the whole layer is here.
        """
        core = transformers_model(self.model)
        if continuations is None:
            states = core.base_model(**inputs, use_cache=False).last_hidden_state
        else:
            states = self._continued(core, inputs, continuations)
        hidden = states[row, column]
        head = core.get_output_embeddings()
        truncated = self.sampling.top_k > 0 or self.sampling.top_p < 1
        if chunks is None and type(head) is nn.Linear and head.bias is None and not truncated:
            found = hidden_logprob(
                hidden,
                head.weight,
                targets,
                temperature=self.sampling.temperature or 1.0,
                excluded=self.suppressed if len(self.suppressed) else None,
                chunk=self.chunk,
            )
            return found.logp, found.entropy
        chunks = -(-len(targets) // self.chunk) if chunks is None else chunks
        parts = [
            checkpoint(self._score, head, h, t, use_reentrant=False)
            for h, t in zip(hidden.tensor_split(chunks), targets.tensor_split(chunks), strict=True)
        ]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    def _continued(self, core: PreTrainedModel, inputs: dict[str, Tensor], after: Continuations) -> Tensor:
        """Hidden states [response, 1 + token, hidden]: of the prompt's last token, and of the response's."""
        prefix = Prefix(core, inputs).select(after.prompt)
        last = rearrange(prefix.last, "b h -> b 1 h")
        return last if after.ids.shape[1] == 0 else torch.cat([last, prefix.extend(after.ids, after.mask)], 1)

    def _score(self, head: nn.Module, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = shape_logits(head(hidden), self.sampling, keep=targets)
        if len(targets) == 0:  # a pass that only keeps step with other ranks
            return logits.sum(-1), logits.sum(-1)
        found = token_logprob(logits, targets)
        return found.logp, found.entropy


class VisionLanguagePolicy:
    """Turns prompts into rollouts and rollouts into log-probabilities.

    Token in, token out: the ids a rollout was sampled with are the ids it is replayed with; text is decoded for
    rewards only.
    """

    def __init__(
        self,
        model: nn.Module,
        processor: Any,
        *,
        sampling: Sampling | None = None,
        max_prompt_length: int = 1024,
        max_response_length: int = 256,
        logp_chunk: int = 1024,
        reference: nn.Module | None = None,
        evaluation_temperature: float = 0.0,
    ) -> None:
        core = transformers_model(model)
        self.processor = processor
        self.tokenizer = processor.tokenizer
        self.eos = end_tokens(core.generation_config, self.tokenizer)
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token_id = self.eos[0]
        self.pad = self.tokenizer.pad_token_id
        # A checkpoint's own generation defaults (repetition penalty, top_k) would silently change the sampler.
        core.generation_config = GenerationConfig(eos_token_id=list(self.eos), pad_token_id=self.pad)
        suppressed = never_sampled(core, self.tokenizer, self.eos)
        self.sampling = replace(sampling or Sampling(), suppressed=suppressed)
        self.max_prompt_length = max_prompt_length
        self.max_response_length = self.max_decisions = max_response_length
        self.evaluation_temperature = evaluation_temperature
        self.module = TokenScorer(model, self.sampling, logp_chunk)
        self.module.eval()  # dropout would make replay differ from sampling
        self._recompute(True)
        self.frozen = None if reference is None else TokenScorer(reference, self.sampling, logp_chunk).eval()
        self.lockstep: Lockstep | None = None
        # Generates instead of the model; whoever sets it keeps its weights current
        self.engine: Answering | None = None
        self.routing: Routing | None = None

    def replay_routing(self) -> None:
        """From now on engines have to tell the experts they routed tokens to, and replay repeats their choice.

        Raises UserError as `Routing` does."""
        self.routing = Routing(transformers_model(self.module.model))

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def _recompute(self, on: bool) -> None:
        """Layers recompute their activations only in training mode, and then ignore the key-value cache."""
        for layer in self.module.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.training = on

    def shares_prompts(self, *, training: bool) -> bool:
        """Whether a prompt is read once for all of its responses, and these then continue from its cache.

        Not in a family for which it was not tested, nor where a layer remembers less than all keys and values; nor
        under ZeRO-3, where ranks would make different numbers of passes; nor in training if activations are
        recomputed, which does without a cache.
        """
        core = transformers_model(self.module.model)
        layers = DynamicCache(config=core.config.get_text_config()).layers
        return (
            core.config.model_type in PREFIX_SHARING
            and all(type(layer) is DynamicLayer for layer in layers)
            and self.lockstep is None
            and not (training and core.is_gradient_checkpointing)
        )

    # --- prompts to rollouts ---

    def encode(self, prompts: Sequence[Prompt]) -> list[Tokens]:
        """The prompts with empty responses; see `mmrl.policies.prompts.encode`."""
        return encode(self.processor, prompts, self.max_prompt_length)

    def rollout(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        seeds: Sequence[int],
        *,
        step: int = 0,
        temperature: float | None = None,
        max_response_length: int | None = None,
    ) -> Rollouts:
        """Sample `group_size` responses a prompt. seeds: one a rollout, prompt by prompt. group: the prompt's place.

        Sampling is the same at every `step` of training. Where there is an engine, it generates; see `ask`."""
        sampling = self.sampling if temperature is None else replace(self.sampling, temperature=temperature)
        limit = max_response_length or self.max_response_length
        if self.engine is not None:
            return self.ask(self.engine, prompts, group_size, seeds, sampling=sampling, limit=limit)
        encoded = self.encode(prompts)
        repeated = [tokens for tokens in encoded for _ in range(group_size)]
        each = [prompt for prompt in prompts for _ in range(group_size)]
        core = transformers_model(self.module.model)
        limits: dict[str, Any] = {"eos": self.eos, "max_new_tokens": limit}
        self._recompute(False)
        if self.shares_prompts(training=False):
            inputs = self.collate(encoded, padding_side="left")
            responses = generate_groups(
                core, inputs, group_size=group_size, sampling=sampling, seeds=list(seeds), **limits
            )
        else:
            rows = self._with_ballast(repeated)
            responses = generate(
                core,
                self.collate(rows, padding_side="left"),
                sampling=sampling,
                seeds=[*seeds, *[0] * (len(rows) - len(repeated))],
                pad=self.pad,
                synced=self.lockstep is not None,
                **limits,
            )
        self._recompute(True)
        answered = [replace(t, response=r) for t, r in zip(repeated, responses, strict=False)]
        return self._rollouts(each, answered, group_size)

    def ask(
        self,
        engine: Answering,
        prompts: Sequence[Prompt],
        group_size: int,
        seeds: Sequence[int],
        *,
        limit: int,
        sampling: Sampling | None = None,
    ) -> Rollouts:
        """`rollout` by an engine, whose likelihoods are kept as behaviour_logp. The model has no part in it."""
        drafts = self.draft(prompts, group_size, seeds, limit=limit)
        self.extend(engine, drafts, limit, sampling=sampling)
        return self.complete(drafts, group_size)

    def draft(
        self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], *, limit: int | None = None
    ) -> list[Draft]:
        """Responses of no tokens yet, `group_size` a prompt. A group is drawn with the first of its seeds and those
        that follow it, by which an engine takes it as one request."""
        encoded = self.encode(prompts)
        marked = self.tokenizer(chat_texts(self.processor, prompts)).input_ids
        limit, found = limit or self.max_response_length, []
        for prompt, ids, tokens, seed in zip(prompts, marked, encoded, seeds[::group_size], strict=True):
            first = Request(prompt.id, ids, prompt.images, tokens.prompt, seed, limit)
            group = [replace(first, seed=seed + i) for i in range(group_size)]
            found += [Draft(prompt, request, tokens, torch.zeros(0)) for request in group]
        return found

    def extend(
        self, engine: Answering, drafts: Sequence[Draft], count: int, *, sampling: Sampling | None = None
    ) -> None:
        """Gives each draft that is not finished up to `count` tokens more. What is drawn depends on the draft's seed,
        its tokens so far and the engine's weights; not on when that is."""
        drafts = [draft for draft in drafts if not draft.finished(self.eos)]
        requests = [draft.next(count) for draft in drafts]
        drawn = engine.generate(requests, sampling=sampling or self.sampling, eos=self.eos)
        for draft, request, answer in zip(drafts, requests, drawn, strict=True):
            experts = None
            if self.routing is not None:
                length = len(request.ids) + len(answer.ids) - 1
                experts = self.routing.check(request.name, length, answer.experts)
            draft.grow(answer.ids, answer.logp, experts)

    def complete(self, drafts: Sequence[Draft], group_size: int) -> Rollouts:
        """Finished drafts as rollouts, `group_size` a prompt."""
        rollouts = self._rollouts([draft.prompt for draft in drafts], [draft.tokens for draft in drafts], group_size)
        rollouts.behaviour_logp = nn.utils.rnn.pad_sequence([draft.logp for draft in drafts], batch_first=True)
        return rollouts

    def respond(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Sample]:
        """One response a prompt at the temperature of evaluation."""
        return self.rollout(prompts, 1, seeds, temperature=self.evaluation_temperature).samples

    def demonstrate(self, prompts: Sequence[Prompt], seeds: Sequence[int] = ()) -> Rollouts:
        """The prompts with their known answers as responses, for supervised learning; nothing here is random."""
        answers = []
        for prompt in prompts:
            text = prompt.metadata.get("demonstration", prompt.answer)
            ids = self.tokenizer(str(text), add_special_tokens=False).input_ids + [self.eos[0]]
            if len(ids) > self.max_response_length:
                raise UserError(
                    f"the demonstration of prompt {prompt.id} has {len(ids)} tokens, more than "
                    f"rollout.max_response_length={self.max_response_length}"
                )
            if impossible := set(ids) & set(self.sampling.suppressed):
                raise UserError(
                    f"the demonstration of prompt {prompt.id} holds {self.tokenizer.decode(list(impossible))}, which "
                    "the policy never samples"
                )
            answers.append(torch.tensor(ids))
        rows = [replace(t, response=ids) for t, ids in zip(self.encode(prompts), answers, strict=True)]
        return self._rollouts(list(prompts), rows, 1)

    def _rollouts(self, prompts: list[Prompt], rows: list[Tokens], group_size: int) -> Rollouts:
        lengths = torch.tensor([len(r.response) for r in rows])
        texts = self.tokenizer.batch_decode([r.response for r in rows], skip_special_tokens=True)
        samples = [
            Sample(
                prompt=prompt,
                response=text,
                response_length=len(row.response),
                truncated=int(row.response[-1]) not in self.eos,
                max_response_length=self.max_response_length,
            )
            for prompt, row, text in zip(prompts, rows, texts, strict=True)
        ]
        return Rollouts(
            samples=samples,
            inputs=rows,
            group=torch.arange(len(rows)) // group_size,
            mask=torch.arange(int(lengths.max())) < rearrange(lengths, "b -> b 1"),
        )

    # --- rollouts to log-probabilities ---

    def replay(self, rollouts: Rollouts, model: nn.Module, *, padding_side: str = "right") -> Replay:
        """logp and entropy [rollout, decision] of the responses under `model`: `self.module`, the engine around it, or
        the reference. Decisions that do not count hold 0.

        Tokens with a record of their experts go to these again; such rows read their prompts each for itself."""
        rows: list[Tokens] = rollouts.inputs
        answers = [tokens.response for tokens in rows]
        targets = torch.cat(answers).to(self.device)
        places = [(number, t) for number, answer in enumerate(answers) for t in range(len(answer))]
        row, decision = torch.tensor(places, device=self.device).unbind(1)
        routes = None if self.routing is None else collate_routes(self._with_ballast(rows), padding_side, self.device)
        prompts, which = distinct_prompts(rows)
        if routes is None and len(prompts) < len(rows) and self.shares_prompts(training=True):
            inputs = self.collate(prompts, padding_side=padding_side)
            ids = [answer[:-1] for answer in answers]
            continuations = Continuations(
                prompt=torch.tensor(which, device=self.device),
                ids=nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=self.pad).to(self.device),
                mask=nn.utils.rnn.pad_sequence([torch.ones_like(i) for i in ids], batch_first=True).to(self.device),
            )
            column = decision
        else:
            inputs = self.collate(self._with_ballast(rows), padding_side=padding_side)
            continuations = None
            length = inputs["input_ids"].shape[1]
            first = [length - len(t.response) if padding_side == "left" else len(t.prompt) for t in rows]
            column = torch.tensor(first, device=self.device)[row] + decision - 1
        chunks = None if self.lockstep is None else self.lockstep.max(-(-len(targets) // self.module.chunk))
        with nullcontext() if self.routing is None else self.routing.replayed(routes):
            logp, entropy = model(inputs, continuations, row, column, targets, chunks)
        blank = torch.zeros(rollouts.mask.shape, device=self.device)
        place = (row, decision)
        found = Replay(logp=blank.index_put(place, logp), entropy=blank.index_put(place, entropy))
        if self.routing is not None and routes is not None:
            differing = self.routing.differences().view(routes.shape[:2])[row, column]
            found.routing_differs = blank.index_put(place, differing)
        return found

    @torch.no_grad()
    def reference(self, rollouts: Rollouts) -> Replay:
        """Replay by the reference policy: with LoRA the model without its adapters, else the copy made at the start.

        It routes tokens by itself, as it would if it were used: what is likely with experts that it did not choose says
        nothing of it, and a trained router could move away unseen."""
        bare = [replace(tokens, experts=None) for tokens in rollouts.inputs]
        rollouts = replace(rollouts, inputs=bare)
        if isinstance(self.module.model, peft.PeftModel):
            trained = [parameter.requires_grad for parameter in self.module.parameters()]
            with self.module.model.disable_adapter():
                replayed = self.replay(rollouts, self.module)
            # Leaving it, peft makes every adapter trainable, those of frozen parts too.
            for parameter, was in zip(self.module.parameters(), trained, strict=True):
                parameter.requires_grad_(was)
            return replayed
        assert self.frozen is not None
        return self.replay(rollouts, self.frozen.to(self.device))

    def collate(self, rows: Sequence[Tokens], *, padding_side: str) -> dict[str, Tensor]:
        return collate(rows, pad=self.pad, padding_side=padding_side, device=self.device)

    def _with_ballast(self, rows: list[Tokens]) -> list[Tokens]:
        """Under ZeRO-3 a rank whose batch holds no picture would skip the vision tower, whose parameters the others
        wait for. It gets one more row with a picture; nothing of that row is ever counted."""
        if self.lockstep is None or any(r.pictures for r in rows):
            return rows
        if self.lockstep.ballast is None:
            blank = Prompt("ballast", "<image>", (Image.new("RGB", (64, 64)),))
            self.lockstep.ballast = replace(self.encode([blank])[0], response=torch.tensor(self.eos[:1]))
        return [*rows, self.lockstep.ballast]

    # --- files ---

    def counts(self) -> dict[str, float]:
        return {}

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Write model (or adapter) and processor in transformers' own format. state: of `self.module`."""
        weights = {name.removeprefix("model."): value for name, value in state.items()}
        model: Any = self.module.model
        model.save_pretrained(folder, state_dict=weights)
        self.processor.save_pretrained(folder)


@dataclass
class Lockstep:
    """What keeps ranks doing the same collectives under ZeRO-3. `max` is the maximum of a number over the ranks."""

    max: Any
    ballast: Tokens | None = None


def load(
    path: str, *, activation_checkpointing: bool = False, reference: bool = False, **options: Any
) -> VisionLanguagePolicy:
    """A policy from a folder or a hub name. `options` go to `load_model` and to VisionLanguagePolicy.

    Raises UserError as `load_model` does.
    """
    given = {k: options.pop(k) for k in ("dtype", "attention", "freeze", "lora", "processor") if k in options}
    model, processor = load_model(path, **given)
    adapted = isinstance(model, peft.PeftModel)
    frozen_copy = copy.deepcopy(model).requires_grad_(False) if reference and not adapted else None
    if activation_checkpointing:
        recompute_activations(model)
    return VisionLanguagePolicy(model, processor, reference=frozen_copy, **options)


def load_model(
    path: str,
    *,
    dtype: str = "float32",
    attention: str = "sdpa",
    freeze: Sequence[str] = (),
    lora: dict[str, Any] | None = None,
    processor: dict[str, Any] | None = None,
) -> tuple[nn.Module, Any]:
    """An image-text model and its processor, with its LoRA if `path` is one or a new one if `lora` is given.

    Raises UserError if there is no model at `path` or it is not one that reads images and writes text.
    """
    base = base_of(path)
    try:
        config = AutoConfig.from_pretrained(base)
    except (OSError, ValueError) as error:
        raise UserError(f"model.path={path}: {str(error).splitlines()[0]}") from None
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise UserError(f"model.path={path} is a {config.model_type} model, which does not read images and write text")
    model: Any = AutoModelForImageTextToText.from_pretrained(base, dtype=dtype, attn_implementation=attention)
    write_as_published(model)
    model = adapt(model, path, freeze=freeze, lora=lora)
    return model, AutoProcessor.from_pretrained(path, **(processor or {}))


def write_as_published(model: Any) -> None:
    """Has transformers write all weights in the layout of the published checkpoint, which is what other libraries read.

    Where experts lie transposed in it, transformers reads both layouts, told apart by their shape; but by the same rule
    it finds that what it writes need not be transposed back, unless ZeRO-3 has emptied the parameter it compares with.
    """
    for conversion in model._weight_conversions:
        if isinstance(conversion, WeightConverter):
            for operation in conversion.operations:
                if isinstance(operation, Transpose):
                    operation.check_dims = False


def base_of(path: str) -> str:
    """What `path` is a LoRA of, or itself."""
    if (Path(path) / "adapter_config.json").is_file():
        return str(peft.PeftConfig.from_pretrained(path).base_model_name_or_path)
    return path


def adapt(model: Any, path: str, *, freeze: Sequence[str], lora: dict[str, Any] | None) -> Any:
    """`model` with the LoRA at `path` if there is one, or a new one if `lora` is given; parts in `freeze` stay."""
    if (Path(path) / "adapter_config.json").is_file():
        model = peft.PeftModel.from_pretrained(model, path, is_trainable=True)
    elif lora is not None:
        options = {"r": lora["rank"], "lora_alpha": lora["alpha"], "target_modules": lora["targets"]}
        model = peft.get_peft_model(model, peft.LoraConfig(**options))
    for parameter_name, parameter in model.named_parameters():  # adapters too
        if part_of(parameter_name) in freeze:
            parameter.requires_grad_(False)
    return model


def recompute_activations(model: Any) -> None:
    """Layers keep only their inputs for the backward pass."""
    transformers_model(model).gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()


def transformers_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model itself, out of its LoRA wrapper if it has one."""
    core = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    assert isinstance(core, PreTrainedModel)
    return core


def part_of(parameter: str) -> str:
    """Which part a parameter belongs to, by its name: vision, connector or language."""
    names = set(parameter.split("."))
    if names & CONNECTORS:
        return "connector"
    return "vision" if names & VISION_TOWERS else "language"


def end_tokens(generation: GenerationConfig, tokenizer: Any) -> tuple[int, ...]:
    """All ids that end a response, the model's own first."""
    declared = generation.eos_token_id
    ids = declared if isinstance(declared, list) else [declared]
    found = [i for i in dict.fromkeys([*ids, tokenizer.eos_token_id]) if i is not None]
    if not found:
        raise UserError("the model declares no end token: set eos_token_id in its generation_config.json")
    return tuple(found)


def never_sampled(model: PreTrainedModel, tokenizer: Any, eos: tuple[int, ...]) -> tuple[int, ...]:
    """Ids that can not be part of an answer: placeholders of pictures and videos, special tokens that do not end a
    response, and rows of the output matrix beyond the tokenizer's last id."""
    declared = model.config.to_dict()
    placeholders = {declared[key] for key in PLACEHOLDER_KEYS if declared.get(key) is not None}
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    beyond = set(range(len(tokenizer), model.get_output_embeddings().weight.shape[0]))
    return tuple(sorted((placeholders | special | beyond) - set(eos)))


def distinct_prompts(rows: Sequence[Tokens]) -> tuple[list[Tokens], list[int]]:
    """Each prompt once, without a response, and for each row its prompt's place. Rollouts of one `rollout` call hold
    the same tensor; equal prompts that were encoded apart stay apart."""
    place: dict[int, int] = {}
    which = [place.setdefault(id(tokens.prompt), len(place)) for tokens in rows]
    firsts = [rows[which.index(number)] for number in range(len(place))]
    return [replace(tokens, response=tokens.response[:0]) for tokens in firsts], which
