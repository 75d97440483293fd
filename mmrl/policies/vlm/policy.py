"""Vision-language models as policies: any transformers image-text model; each response token is a decision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from mmrl.engine.flops import PolicyWork
from mmrl.generation.sampling import Sampling
from mmrl.generation.vllm.engine import Answering
from mmrl.policies.models import Scorer, TrainingEngine, write_model
from mmrl.policies.resizing import resize_options
from mmrl.policies.tokenizers import Processor
from mmrl.policies.vlm.critic import write_critic
from mmrl.policies.vlm.drafts import Draft
from mmrl.policies.vlm.prompts import save_processor
from mmrl.policies.vlm.responses import reuse
from mmrl.policies.vlm.responses.demonstrations import demonstrate
from mmrl.policies.vlm.responses.drafting import Drafter
from mmrl.policies.vlm.responses.fitting import PromptEncoder
from mmrl.policies.vlm.responses.flops import token_units
from mmrl.policies.vlm.responses.replay import ResponseReplay, lengths_of
from mmrl.policies.vlm.responses.runner import Lockstep, ModelRunner
from mmrl.policies.vlm.responses.teachers import VisionLanguageTeachers
from mmrl.policies.vlm.responses.tokens import ChatTokenizer
from mmrl.policies.vlm.scorer import TokenScorer, set_checkpointing, transformers_model
from mmrl.protocols.parts import PromptCheck, PromptReader
from mmrl.rollouts import Prompt, Replay, Rollouts, Sample
from mmrl.runtime.files import use_default_permissions
from mmrl.schedules.schedule import Schedule, constant


class VisionLanguagePolicy:
    """Samples rollouts for prompts and computes the log-probabilities of rollouts.

    Replay uses the token ids that were sampled; text is decoded for rewards only. Parts: `tokens` converts between text
    and ids, `runner` runs the model, `drafter` samples responses, `likelihoods` computes their log-probabilities.
    """

    def __init__(
        self,
        model: nn.Module,
        processor: Processor,
        *,
        sampling: Sampling | None = None,
        temperature: Schedule | None = None,
        max_prompt_length: int = 1024,
        max_response_length: int | Schedule = 256,
        logp_chunk: int = 1024,
        evaluation_temperature: float = 0.0,
        segment: int | None = None,
        gathers: bool = True,
        packing: bool = True,
    ) -> None:
        """Builds the policy of a transformers model, with or without LoRA.

        temperature: the sampling temperature in training; None: `sampling.temperature`. max_prompt_length,
        max_response_length: in tokens. logp_chunk: tokens whose logits are in memory at the same time.
        evaluation_temperature: 0 is greedy. segment: tokens of a segment, for ratios by segment; None: no segments.
        gathers, packing: see `ModelRunner`.
        """
        core, sampling = transformers_model(model), sampling or Sampling()
        limit = max_response_length if isinstance(max_response_length, Schedule) else constant(max_response_length)
        self.tokens = tokens = ChatTokenizer(processor, core, max_prompt_length, limit)
        # If an environment changes prompts, the prompt before the change is checked.
        self.prompt_problem: PromptCheck = tokens.encoder.prompt_problem
        self.image_resize = resize_options(processor)
        # The checkpoint's generation config (repetition penalty, top_k) would silently change the sampler.
        core.generation_config = GenerationConfig(eos_token_id=list(tokens.eos), pad_token_id=tokens.pad)
        self.temperature = constant(sampling.temperature) if temperature is None else temperature
        vocabulary = core.get_output_embeddings().weight.shape[0]
        # Temperature 1: `TokenScorer` divides the logits by the temperature of each rollout
        token_sampling = replace(sampling, temperature=1.0, suppressed=tokens.suppressed, vocabulary=vocabulary)
        self.evaluation_temperature = evaluation_temperature
        self.module = TokenScorer(model, token_sampling, logp_chunk)
        self.module.eval()  # dropout would make replay differ from sampling
        self.runner = ModelRunner(self.module, tokens, gathers=gathers, packing=packing)
        self.work = PolicyWork([self.runner.flops.tally], token_units)
        set_checkpointing(self.module, True)
        self.drafter = Drafter(self.runner, token_sampling, self.temperature)
        self.likelihoods = ResponseReplay(self.runner, segment)
        self.segments = self.likelihoods.segments
        self.teachers = VisionLanguageTeachers(self.module, tokens)
        # A vLLM engine that generates in place of the model. `Synced` sets it and sends it the weights of each step.
        self.engine: Answering | None = None

    @property
    def eos(self) -> tuple[int, ...]:
        """The ids of all tokens that end a response."""
        return self.tokens.eos

    def set_prompt_reader(self, reader: PromptReader) -> None:
        """Sets the reader that encodes prompts ahead of time, in another process."""
        self.tokens.reader = reader

    @property
    def max_decisions(self) -> int:
        """The longest response that any step of the run may sample, in tokens."""
        return int(self.tokens.response_limit.extremes[1])

    def set_engine(self, engine: TrainingEngine) -> None:
        """Under ZeRO-3, makes all ranks of `engine` compute equally many forward passes, as its collective calls
        require."""
        if engine.zero_stage == 3:
            self.runner.lockstep = Lockstep(engine.max, engine.gathered_weights)

    # --- prompts to rollouts ---

    def encoder(self) -> PromptEncoder | None:
        """Returns the encoder of prompts; None if an environment changes prompts, which then cannot be encoded
        early."""
        return None if self.drafter.conversations is not None else self.tokens.encoder

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
        """Samples `group_size` responses per prompt; the group of a rollout is the index of its prompt.

        seeds: one per rollout, prompt by prompt. step: not used, sampling is the same at every step. temperature,
        max_response_length (tokens): None for the values of the current step. If `self.engine` is set, it generates.
        """
        sampling_temperature = self.temperature.value if temperature is None else temperature
        limit = max_response_length or self.tokens.max_response_length
        if self.engine is not None:
            return self.drafter.ask(
                self.engine, prompts, group_size, seeds, limit=limit, temperature=sampling_temperature
            )
        return self.drafter.sample(prompts, group_size, seeds, sampling_temperature, limit)

    def respond(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Sample]:
        """Samples one response per prompt at the evaluation temperature."""
        return self.rollout(prompts, 1, seeds, temperature=self.evaluation_temperature).samples

    def draft(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        seeds: Sequence[int],
        *,
        limit: int | None = None,
        temperature: float | None = None,
    ) -> list[Draft]:
        """Returns drafts, responses without tokens yet; see `Drafter.draft`."""
        return self.drafter.draft(prompts, group_size, seeds, limit=limit, temperature=temperature)

    def extend(self, engine: Answering | None, drafts: Sequence[Draft], count: int) -> None:
        """Extends drafts by up to `count` tokens; see `Drafter.extend`."""
        self.drafter.extend(engine, drafts, count)

    def restore(self, drafts: Sequence[Draft], states: Sequence[dict[str, Any]]) -> None:
        """Gives new drafts the tokens that `Draft.state` saved; see `Drafter.restore`."""
        self.drafter.restore(drafts, states)

    def complete(self, drafts: Sequence[Draft], group_size: int) -> Rollouts:
        """Returns finished drafts as rollouts, `group_size` per prompt."""
        return self.drafter.complete(drafts, group_size)

    def demonstrate(self, prompts: Sequence[Prompt], seeds: Sequence[int] = ()) -> Rollouts:
        """Returns the prompts with their reference answers as responses, for supervised fine-tuning. seeds: not used,
        nothing is random."""
        if self.drafter.conversations is not None:
            return self.drafter.conversations.demonstrate(self.drafter, prompts)
        return demonstrate(self.tokens, prompts, self.temperature.value)

    # --- new rollouts from earlier ones ---

    def serialize(self, rollouts: Rollouts) -> list[dict[str, Any]]:
        """Returns the values of each rollout from which `deserialize` rebuilds it, as JSON types."""
        return reuse.serialize(rollouts)

    def deserialize(self, prompts: Sequence[Prompt], states: Sequence[dict[str, Any]]) -> Rollouts:
        """Rebuilds unscored rollouts from the values of `serialize`; a mixture of experts routes their tokens again."""
        return reuse.deserialize(self.drafter, prompts, states)

    def continue_from(self, rollouts: Rollouts, lengths: Sequence[int], seeds: Sequence[int]) -> Rollouts:
        """Keeps the first lengths[i] tokens of response i and samples the rest with seeds[i]; returns unscored
        rollouts."""
        return reuse.continue_from(self.drafter, self.engine, rollouts, lengths, seeds)

    def join_responses(self, first: Rollouts, second: Rollouts, text: str) -> Rollouts:
        """Joins each response of `first`, the text and the response of `second`; only tokens of `second` are trained
        on."""
        return reuse.join_responses(self.tokens, first, second, text)

    def view(self, rollouts: Rollouts, change: Callable[[Prompt], Prompt]) -> Rollouts:
        """Returns the same responses to prompts that `change` has changed, such as by masking their images."""
        return reuse.with_prompts(self.drafter, rollouts, change)

    # --- rollouts to log-probabilities ---

    def replay(
        self, rollouts: Rollouts, model: Scorer, *, reference: bool = False, padding_side: str = "right"
    ) -> Replay:
        """Returns logp, entropy and sum of squared probabilities of the response tokens, [rollout, decision] each; 0
        where the mask is false.

        model: `self.module`, or the engine that wraps it. Tokens whose experts were recorded are routed to the same
        experts. reference: `model` is the reference policy, which always routes by its own router: with the experts of
        the policy, its likelihoods would be wrong, and the KL would miss changes of the router. padding_side: on which
        side rows are padded; it does not change the result.
        """
        return self.likelihoods.replay(rollouts, model, reference=reference, padding_side=padding_side)

    def lengths(self, rollouts: Rollouts) -> Tensor:
        """Returns the number of tokens of prompt and response, [rollout] int64."""
        return torch.tensor(lengths_of(rollouts.inputs))

    def decision_ids(self, rollouts: Rollouts) -> Tensor:
        """Returns the token id of each decision, [rollout, decision] int64; -1 where the mask is false."""
        ids = torch.full(rollouts.mask.shape, -1)
        for row, tokens in enumerate(rollouts.inputs):
            ids[row, : len(tokens.response)] = tokens.response.cpu()
        return ids.where(rollouts.mask, -1)

    def top_k(self, rollouts: Rollouts, model: Scorer, count: int) -> Tensor:
        """Returns the `count` likeliest token ids of each decision, likeliest first, [rollout, decision, count]
        int64."""
        return self.likelihoods.top_k(rollouts, model, count)

    def decision_texts(self, rollouts: Rollouts) -> list[list[str]]:
        """Returns for each rollout the texts that its response tokens add one by one, end token included."""
        return [self.tokens.pieces(tokens.response) for tokens in rollouts.inputs]

    # --- files ---

    def counts(self) -> dict[str, float]:
        """Returns metrics of environments since the last call: conversations that failed, and tool errors."""
        conversations = self.drafter.conversations
        return {} if conversations is None else conversations.counts()

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Saves the model (or its LoRA) and processor with `save_pretrained`, and the critic's weights if there is one.

        state: the gathered state dict of `self.module`.
        """
        write_model(self.module.model, folder, state)
        save_processor(self.tokens.processor, folder)
        if self.module.critic is not None:
            write_critic(folder, state)
        use_default_permissions(folder)
