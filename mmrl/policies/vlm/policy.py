"""Vision-language models as policies: any transformers image-text model, one decision a response token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from PIL import Image
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer

from mmrl.errors import UserError
from mmrl.generation.sampling import Sampling
from mmrl.generation.transformers import generate, generate_groups
from mmrl.generation.vllm.engine import Answering, Request
from mmrl.policies.vlm.critic import critic_of, write_critic
from mmrl.policies.vlm.drafts import Draft
from mmrl.policies.vlm.prompts import (
    PromptEncoder,
    RolloutTokens,
    chat_texts,
    clips_of,
    collate,
    encode,
    pictures_of,
    save_processor,
)
from mmrl.policies.vlm.routing import Routing, collate_routes
from mmrl.policies.vlm.scorer import PrefixContinuations, TokenScorer, transformers_model
from mmrl.policies.vlm.turns import Conversations, conversing, demonstrated
from mmrl.protocols.critic import CriticSettings
from mmrl.protocols.parts import PromptReader
from mmrl.rollouts import Prompt, Replay, Rollouts, Sample
from mmrl.runtime.files import share
from mmrl.schedules.schedule import Schedule, constant
from mmrl.sims.turns.settings import EnvironmentSettings

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
        temperature: Schedule | None = None,
        max_prompt_length: int = 1024,
        max_response_length: int | Schedule = 256,
        logp_chunk: int = 1024,
        evaluation_temperature: float = 0.0,
        segment: int | None = None,
        gathers: bool = True,
    ) -> None:
        """temperature: of rollouts, where it is not that of `sampling`. segment: tokens of a segment of a response.
        gathers: see `own_weights`."""
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
        sampling = sampling or Sampling()
        self.temperature = constant(sampling.temperature) if temperature is None else temperature
        vocabulary = core.get_output_embeddings().weight.shape[0]
        # Temperature 1: it is a factor that changes from rollout to rollout
        self.sampling = replace(sampling, temperature=1.0, suppressed=suppressed, vocabulary=vocabulary)
        self.max_prompt_length = max_prompt_length
        longest = max_response_length
        self.response_limit = longest if isinstance(longest, Schedule) else constant(longest)
        self.evaluation_temperature, self.segment = evaluation_temperature, segment
        self.module = TokenScorer(model, self.sampling, logp_chunk)
        self.module.eval()  # dropout would make replay differ from sampling
        self._recompute(True)
        self.lockstep: Lockstep | None = None
        self.gathers = gathers
        # Generates instead of the model; whoever sets it keeps its weights current
        self.engine: Answering | None = None
        self.routing: Routing | None = None
        self.conversations: Conversations | None = None  # where an environment answers its responses
        self.reader: PromptReader | None = None

    def judge(self, settings: CriticSettings, folder: Path) -> None:
        """From now on replay gives the value of what came before each decision. folder: where a critic may lie, which
        else begins anew. Raises UserError as `read_critic`."""
        self.module.critic = critic_of(transformers_model(self.module.model), settings, folder)

    def converse(self, settings: EnvironmentSettings) -> None:
        """From now on responses are answered by environments, and rollouts are conversations."""
        self.conversations = Conversations(settings, self.processor, self.eos)

    @property
    def max_response_length(self) -> int:
        """Tokens of the longest response that is sampled now."""
        return int(self.response_limit.value)

    @property
    def max_decisions(self) -> int:
        """Tokens of the longest response of the whole run."""
        return int(self.response_limit.extremes[1])

    def trained_by(self, engine: Any) -> None:
        """Under ZeRO-3 ranks have to make the same number of passes as those of `engine`."""
        if engine.zero_stage == 3:
            self.lockstep = Lockstep(engine.max, engine.whole)

    @contextmanager
    def own_weights(self) -> Iterator[None]:
        """Inside it this rank generates without the others, also under ZeRO-3, which gathers all weights for that long:
        otherwise every token would gather them layer by layer. A collective at both ends."""
        lockstep = self.lockstep
        if lockstep is None or not self.gathers:
            yield
            return
        with lockstep.whole():
            self.lockstep = None
            try:
                yield
            finally:
                self.lockstep = lockstep

    def replay_routing(self) -> None:
        """From now on engines have to tell the experts they routed tokens to, and replay repeats their choice.

        Raises UserError as `Routing` does."""
        self.routing = Routing(transformers_model(self.module.model))

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def anywhere(self, count: int) -> bool:
        """Whether it is more than 0; under ZeRO-3, on any rank."""
        return (count if self.lockstep is None else self.lockstep.max(count)) > 0

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

    def encode(self, prompts: Sequence[Prompt]) -> list[RolloutTokens]:
        """The prompts with empty responses; see `mmrl.policies.vlm.prompts.encode`."""
        made = [None if self.reader is None else self.reader.encoded(prompt) for prompt in prompts]
        rest = [prompt for prompt, known in zip(prompts, made, strict=True) if known is None]
        encoded = iter(encode(self.processor, rest, self.max_prompt_length))
        return [next(encoded) if known is None else known for known in made]

    def encoder(self) -> PromptEncoder | None:
        """None where environments make other prompts of those of a source."""
        return None if self.conversations is not None else PromptEncoder(self.processor, self.max_prompt_length)

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
        sampling = replace(self.sampling, temperature=self.temperature.value if temperature is None else temperature)
        limit = max_response_length or self.max_response_length
        if self.engine is not None:
            return self.ask(self.engine, prompts, group_size, seeds, sampling=sampling, limit=limit)
        if self.conversations is not None:
            drafts = self.draft(prompts, group_size, seeds, limit=limit, temperature=sampling.temperature)
            self.extend(None, drafts, limit)
            return self.complete(drafts, group_size, drawn_here=True)
        rows = [tokens for tokens in self.encode(prompts) for _ in range(group_size)]
        each = [prompt for prompt in prompts for _ in range(group_size)]
        with self.own_weights():
            responses = self.generate(rows, seeds, sampling, limit)
        heat = sampling.temperature or 1.0  # greedy responses are replayed as they are
        answered = [replace(t, response=r, temperature=heat) for t, r in zip(rows, responses, strict=True)]
        return self._rollouts(each, answered, group_size)

    def generate(self, rows: list[RolloutTokens], seeds: Sequence[int], sampling: Sampling, limit: int) -> list[Tensor]:
        """The model's own continuations of `rows`, of at most `limit` tokens: [token] int64 each."""
        core = transformers_model(self.module.model)
        limits: dict[str, Any] = {"eos": self.eos, "max_new_tokens": limit}
        self._recompute(False)
        if self.shares_prompts(training=False):
            distinct, which = distinct_rows(rows)
            inputs = self.collate(distinct, padding_side="left")
            responses = generate_groups(
                core, inputs, rows=torch.tensor(which), sampling=sampling, seeds=list(seeds), **limits
            )
        else:
            padded = self._with_ballast(rows)
            responses = generate(
                core,
                self.collate(padded, padding_side="left"),
                sampling=sampling,
                seeds=[*seeds, *[0] * (len(padded) - len(rows))],
                pad=self.pad,
                synced=self.lockstep is not None,
                **limits,
            )
        self._recompute(True)
        return responses[: len(rows)]

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
        temperature = None if sampling is None else sampling.temperature
        drafts = self.draft(prompts, group_size, seeds, limit=limit, temperature=temperature)
        self.extend(engine, drafts, limit)
        return self.complete(drafts, group_size)

    def draft(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        seeds: Sequence[int],
        *,
        limit: int | None = None,
        temperature: float | None = None,
    ) -> list[Draft]:
        """Responses of no tokens yet, `group_size` a prompt. A group is drawn with the first of its seeds and those
        that follow it, by which an engine takes it as one request. All of a draft is sampled at one temperature, by
        default that of now."""
        heat = self.temperature.value if temperature is None else temperature
        talks = None if self.conversations is None else self.conversations.open(prompts, group_size)
        if talks is not None:
            prompts = [dialogue.prompt for dialogue in talks[::group_size]]
        encoded = [replace(tokens, temperature=heat) for tokens in self.encode(prompts)]
        marked = self.tokenizer(chat_texts(self.processor, prompts)).input_ids
        limit, found = limit or self.max_response_length, []
        for prompt, ids, tokens, seed in zip(prompts, marked, encoded, seeds[::group_size], strict=True):
            first = Request(prompt.id, ids, pictures_of(prompt), tokens.prompt, seed, limit, clips=clips_of(prompt))
            group = [replace(first, seed=seed + i) for i in range(group_size)]
            found += [Draft(prompt, request, tokens, torch.zeros(0)) for request in group]
        return found if talks is None else conversing(found, talks)

    def extend(self, engine: Answering | None, drafts: Sequence[Draft], count: int) -> None:
        """Gives each draft that is not finished up to `count` tokens more. What is drawn depends on the draft's seed
        and temperature, its tokens so far and the weights; not on when that is. Without an engine the model draws."""
        with self.own_weights() if engine is None else nullcontext():
            if self.conversations is not None:
                self.conversations.extend(self, engine, drafts, count)  # type: ignore[arg-type]
                return
            unfinished = [draft for draft in drafts if not draft.finished(self.eos)]
            self.continue_all(engine, [(draft, draft.next(count)) for draft in unfinished])

    def continue_all(self, engine: Answering | None, asked: Sequence[tuple[Draft, Request]]) -> None:
        """Has each draft grow by the answer to its request; those of one temperature go together."""
        for heat in dict.fromkeys(draft.tokens.temperature for draft, _ in asked):
            self._continue(engine, [pair for pair in asked if pair[0].tokens.temperature == heat], heat)

    def _continue(self, engine: Answering | None, asked: list[tuple[Draft, Request]], temperature: float) -> None:
        drafts, requests = [draft for draft, _ in asked], [request for _, request in asked]
        sampling = replace(self.sampling, temperature=temperature)
        if engine is None:
            longest = max(request.limit for request in requests)
            rows, seeds = [draft.tokens for draft in drafts], [request.seed for request in requests]
            answers = self.generate(rows, seeds, sampling, longest)
            for draft, request, ids in zip(drafts, requests, answers, strict=True):
                draft.grow(ids[: request.limit], torch.zeros(min(len(ids), request.limit)), None)
            return
        drawn = engine.generate(requests, sampling=sampling, eos=self.eos)
        for draft, request, answer in zip(drafts, requests, drawn, strict=True):
            experts = None
            if self.routing is not None:
                length = len(request.ids) + len(answer.ids) - 1
                experts = self.routing.check(request.name, length, answer.experts)
            draft.grow(answer.ids, answer.logp, experts)

    def restore(self, drafts: Sequence[Draft], states: Sequence[dict[str, Any]]) -> None:
        """Makes new drafts those that once had these states. Raises UserError where an environment does not repeat what
        it did."""
        for draft, state in zip(drafts, states, strict=True):
            if self.conversations is not None:
                self.conversations.restore(draft, state)  # type: ignore[arg-type]
            else:
                draft.grow(state["response"], state["logp"], state["experts"])

    def complete(self, drafts: Sequence[Draft], group_size: int, *, drawn_here: bool = False) -> Rollouts:
        """Finished drafts as rollouts, `group_size` a prompt. drawn_here: by the model itself, so that the generator's
        likelihoods are none of their own."""
        rows = [replace(draft.tokens, temperature=draft.tokens.temperature or 1.0) for draft in drafts]
        if self.conversations is not None:
            rollouts = self.conversations.rollouts(drafts, rows, group_size, self)  # type: ignore[arg-type]
        else:
            rollouts = self._rollouts([draft.prompt for draft in drafts], rows, group_size)
        if not drawn_here:
            rollouts.behaviour_logp = nn.utils.rnn.pad_sequence([draft.logp for draft in drafts], batch_first=True)
        return rollouts

    def stored(self, rollouts: Rollouts) -> list[dict[str, Any]]:
        """What `recalled` needs of each rollout beside its prompt."""
        return [{"response": row.response.tolist(), "temperature": row.temperature} for row in rollouts.inputs]

    def recalled(self, prompts: Sequence[Prompt], states: Sequence[dict[str, Any]]) -> Rollouts:
        """Rollouts as they were stored, not scored; their experts are chosen anew."""
        rows = [
            replace(tokens, response=torch.tensor(state["response"]), temperature=state["temperature"])
            for tokens, state in zip(self.encode(prompts), states, strict=True)
        ]
        return self._rollouts(list(prompts), rows, 1)

    def continued(self, rollouts: Rollouts, lengths: Sequence[int], seeds: Sequence[int]) -> Rollouts:
        """Of each response the first so many tokens, and what is sampled after them; not scored."""
        prompts = {id(sample.prompt): sample.prompt for sample in rollouts.samples}
        opened = dict(zip(prompts, self.draft(list(prompts.values()), 1, [0] * len(prompts)), strict=True))
        drafts = []
        for sample, row, length, seed in zip(rollouts.samples, rollouts.inputs, lengths, seeds, strict=True):
            draft = opened[id(sample.prompt)]
            draft = replace(draft, request=replace(draft.request, seed=seed))
            draft.grow(row.response[:length], torch.zeros(length), None)
            drafts.append(draft)
        self.extend(self.engine, drafts, self.max_response_length)
        return self.complete(drafts, 1, drawn_here=self.engine is None)

    def recombined(self, first: Rollouts, second: Rollouts, text: str) -> Rollouts:
        """Responses that are one of `first` without its end token, the text, and one of `second`, whose tokens alone
        are decisions; not scored."""
        between, rows = torch.tensor(self.tokenizer(text, add_special_tokens=False).input_ids), []
        for one, other in zip(first.inputs, second.inputs, strict=True):
            begun = one.response[:-1] if int(one.response[-1]) in self.eos else one.response
            read = replace(one.asked(), temperature=other.temperature, experts=None).followed(
                torch.cat([begun, between]), decided=False
            )
            rows.append(read.followed(other.response, decided=True))
        made = self._rollouts([sample.prompt for sample in first.samples], rows, 1)
        chosen = nn.utils.rnn.pad_sequence([row.chosen for row in rows], batch_first=True)
        return replace(made, mask=made.mask & chosen)

    def respond(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Sample]:
        """One response a prompt at the temperature of evaluation."""
        return self.rollout(prompts, 1, seeds, temperature=self.evaluation_temperature).samples

    def demonstrate(self, prompts: Sequence[Prompt], seeds: Sequence[int] = ()) -> Rollouts:
        """The prompts with their known answers as responses, for supervised learning; nothing here is random."""
        if self.conversations is not None:
            return self.conversations.demonstrate(self, prompts)
        answers = []
        for prompt in prompts:
            texts = demonstrated(prompt)
            if len(texts) != 1:
                raise UserError(
                    f"the demonstration of prompt {prompt.id} has {len(texts)} responses; set task.environment, which "
                    "answers them"
                )
            answers.append(self.demonstrated_ids(prompt, texts[0]))
        heat = self.temperature.value  # the policy that is trained is the one that is sampled from
        rows = [replace(t, response=a, temperature=heat) for t, a in zip(self.encode(prompts), answers, strict=True)]
        return self._rollouts(list(prompts), rows, 1)

    def demonstrated_ids(self, prompt: Prompt, text: str) -> Tensor:
        """[token] of a response that ends. Raises UserError for one that the policy could not give."""
        ids = self.tokenizer(text, add_special_tokens=False).input_ids + [self.eos[0]]
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
        return torch.tensor(ids)

    def _rollouts(self, prompts: list[Prompt], rows: list[RolloutTokens], group_size: int) -> Rollouts:
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

    def replay(self, rollouts: Rollouts, model: Any, *, reference: bool = False, padding_side: str = "right") -> Replay:
        """logp, entropy and sum of squared probabilities [rollout, decision] of the responses under `model`:
        `self.module`, or the engine around it. Decisions that do not count hold 0.

        Tokens with a record of their experts go to these again; such rows read their prompts each for itself. The
        reference routes tokens by itself, as it would if it were used: what is likely with experts that it did not
        choose says nothing of it, and a trained router could move away unseen."""
        rows: list[RolloutTokens] = rollouts.inputs
        if reference:
            rows = [replace(tokens, experts=None) for tokens in rows]
        answers = [tokens.response for tokens in rows]
        targets = torch.cat([tokens.response[tokens.chosen] for tokens in rows]).to(self.device)
        chosen = nn.utils.rnn.pad_sequence([tokens.chosen for tokens in rows], batch_first=True).to(self.device)
        row, decision = chosen.nonzero().unbind(1)
        routes = None if self.routing is None else collate_routes(self._with_ballast(rows), padding_side, self.device)
        prompts, which = distinct_prompts(rows)
        shared = len(prompts) < len(rows) and not any(tokens.read_pictures for tokens in rows)
        if routes is None and shared and self.shares_prompts(training=True):
            inputs = self.collate(prompts, padding_side=padding_side)
            ids = [answer[:-1] for answer in answers]
            continuations = PrefixContinuations(
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
        each = self.lockstep is not None and self.module.fused is None  # ranks gather the output layer for each chunk
        chunks = self.lockstep.max(-(-len(targets) // self.module.chunk)) if self.lockstep and each else None
        heats = [tokens.temperature for tokens in rows]
        heat: float | Tensor = heats[0] if len(set(heats)) == 1 else torch.tensor(heats, device=self.device)[row]
        with nullcontext() if self.routing is None else self.routing.replayed(routes):
            scored = model(inputs, continuations, row, column, targets, chunks, heat)
        blank = torch.zeros(rollouts.mask.shape, device=self.device)
        place = (row, decision)
        logp, entropy, square_sum, *value = (blank.index_put(place, values) for values in scored)
        found = Replay(logp, entropy, square_sum, value=value[0] if value else None)
        if self.segment is not None:
            places = torch.arange(rollouts.mask.shape[1], device=self.device) // self.segment
            found.segments = places.expand(rollouts.mask.shape)
        if self.routing is not None and routes is not None:
            differing = self.routing.differences().view(routes.shape[:2])[row, column]
            found.routing_differs = blank.index_put(place, differing)
        return found

    def lengths(self, rollouts: Rollouts) -> Tensor:
        """[rollout] int64: tokens of prompt and response."""
        return torch.tensor([len(tokens.prompt) + len(tokens.response) for tokens in rollouts.inputs])

    def view(self, rollouts: Rollouts, change: Callable[[Prompt], Prompt]) -> Rollouts:
        """The same responses to changed prompts. A prompt is changed and encoded once for its whole group."""
        prompts = {id(sample.prompt): sample.prompt for sample in rollouts.samples}
        encoded = dict(zip(prompts, self.encode([change(prompt) for prompt in prompts.values()]), strict=True))
        inputs = [
            tokens.answering(encoded[id(sample.prompt)])
            for sample, tokens in zip(rollouts.samples, rollouts.inputs, strict=True)
        ]
        return replace(rollouts, inputs=inputs)

    def collate(self, rows: Sequence[RolloutTokens], *, padding_side: str) -> dict[str, Tensor]:
        return collate(rows, pad=self.pad, padding_side=padding_side, device=self.device)

    def _with_ballast(self, rows: list[RolloutTokens]) -> list[RolloutTokens]:
        """Under ZeRO-3 a rank whose batch holds no picture would skip the vision tower, whose parameters the others
        wait for. It gets one more row with a picture; nothing of that row is ever counted."""
        if self.lockstep is None or any(r.pictures for r in rows):
            return rows
        if self.lockstep.ballast is None:
            blank = Prompt("ballast", "<image>", (Image.new("RGB", (64, 64)),))
            self.lockstep.ballast = replace(self.encode([blank])[0], response=torch.tensor(self.eos[:1]))
        return [*rows, self.lockstep.ballast]

    def numbers(self, rollouts: Rollouts) -> Tensor:
        """[rollout, decision] int64, which token was decided; -1 where no decision counts."""
        found = torch.full(rollouts.mask.shape, -1)
        for row, tokens in enumerate(rollouts.inputs):
            found[row, : len(tokens.response)] = tokens.response.cpu()
        return found.where(rollouts.mask, -1)

    # --- files ---

    def counts(self) -> dict[str, float]:
        return {} if self.conversations is None else self.conversations.counts()

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Write model (or adapter) and processor in transformers' own format, and a critic beside them. state: of
        `self.module`."""
        weights = {n.removeprefix("model."): value for n, value in state.items() if n.startswith("model.")}
        model: Any = self.module.model
        model.save_pretrained(folder, state_dict=weights)
        save_processor(self.processor, folder)
        if self.module.critic is not None:
            write_critic(folder, state)
        share(folder)


@dataclass
class Lockstep:
    """What keeps ranks doing the same collectives under ZeRO-3. `max` is the maximum of a number over the ranks; inside
    `whole` passes of the network are no collectives."""

    max: Any
    whole: Any
    ballast: RolloutTokens | None = None


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


def distinct_prompts(rows: Sequence[RolloutTokens]) -> tuple[list[RolloutTokens], list[int]]:
    """Each prompt once, without a response, and for each row its prompt's place. Rollouts of one `rollout` call hold
    the same tensor; equal prompts that were encoded apart stay apart."""
    place: dict[int, int] = {}
    which = [place.setdefault(id(tokens.prompt), len(place)) for tokens in rows]
    firsts = [rows[which.index(number)] for number in range(len(place))]
    return [tokens.asked() for tokens in firsts], which


def distinct_rows(rows: Sequence[RolloutTokens]) -> tuple[list[RolloutTokens], list[int]]:
    """What is to be continued, each once: prompts without a response are shared by their group. And for each row its
    place among them."""
    place: dict[tuple[int, int], int] = {}
    keys = [(id(t.prompt), -1 if len(t.response) == 0 else number) for number, t in enumerate(rows)]
    which = [place.setdefault(key, len(place)) for key in keys]
    return [rows[which.index(number)] for number in range(len(place))], which
