"""Vision-language models as policies: any transformers image-text model, one decision a response token."""

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
from mmrl.policies.vlm.scorer import TokenScorer, recompute, transformers_model
from mmrl.protocols.parts import PromptCheck, PromptReader
from mmrl.rollouts import Prompt, Replay, Rollouts, Sample
from mmrl.runtime.files import use_default_mode
from mmrl.schedules.schedule import Schedule, constant


class VisionLanguagePolicy:
    """Turns prompts into rollouts and rollouts into log-probabilities.

    Token in, token out: the ids a rollout was sampled with are the ids it is replayed with; text is decoded for rewards
    only. Its parts: `tokens` converts text and ids, `runner` runs the model, `drafter` samples responses, `likelihoods`
    replays them.
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
        """temperature: of rollouts, where it is not that of `sampling`. segment: tokens of a segment of a response.
        gathers, packing: see `ModelRunner`."""
        core, sampling = transformers_model(model), sampling or Sampling()
        limit = max_response_length if isinstance(max_response_length, Schedule) else constant(max_response_length)
        self.tokens = tokens = ChatTokenizer(processor, core, max_prompt_length, limit)
        # Where environments change prompts, it checks the prompt before the change.
        self.prompt_problem: PromptCheck = tokens.encoder.prompt_problem
        self.image_resize = resize_options(processor)
        # A checkpoint's own generation defaults (repetition penalty, top_k) would silently change the sampler.
        core.generation_config = GenerationConfig(eos_token_id=list(tokens.eos), pad_token_id=tokens.pad)
        self.temperature = constant(sampling.temperature) if temperature is None else temperature
        vocabulary = core.get_output_embeddings().weight.shape[0]
        # Temperature 1: each rollout has its own
        drawn = replace(sampling, temperature=1.0, suppressed=tokens.suppressed, vocabulary=vocabulary)
        self.evaluation_temperature = evaluation_temperature
        self.module = TokenScorer(model, drawn, logp_chunk)
        self.module.eval()  # dropout would make replay differ from sampling
        self.runner = ModelRunner(self.module, tokens, gathers=gathers, packing=packing)
        self.work = PolicyWork([self.runner.flops.tally], token_units)
        recompute(self.module, True)
        self.drafter = Drafter(self.runner, drawn, self.temperature)
        self.likelihoods = ResponseReplay(self.runner, segment)
        self.segments = self.likelihoods.segments
        self.teachers = VisionLanguageTeachers(self.module, tokens)
        # Generates in place of the model; the code that sets it keeps its weights current
        self.engine: Answering | None = None

    @property
    def eos(self) -> tuple[int, ...]:
        """All ids that end a response."""
        return self.tokens.eos

    def set_prompt_reader(self, reader: PromptReader) -> None:
        """Takes encoded prompts from `reader`, where it has them."""
        self.tokens.reader = reader

    @property
    def max_decisions(self) -> int:
        """Tokens of the longest response of the whole run."""
        return int(self.tokens.response_limit.extremes[1])

    def set_engine(self, engine: TrainingEngine) -> None:
        """Keeps passes in lockstep over the ranks of `engine` under ZeRO-3."""
        if engine.zero_stage == 3:
            self.runner.lockstep = Lockstep(engine.max, engine.gathered_weights)

    # --- prompts to rollouts ---

    def encoder(self) -> PromptEncoder | None:
        """Returns the encoder of prompts; None where environments change the prompts of a source."""
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
        """Samples `group_size` responses a prompt. seeds: one a rollout, prompt by prompt. The group of a rollout is
        the index of its prompt.

        Sampling is the same at every `step` of training. Where there is an engine, it generates; see `Drafter.ask`.
        """
        sampling_temperature = self.temperature.value if temperature is None else temperature
        limit = max_response_length or self.tokens.max_response_length
        if self.engine is not None:
            return self.drafter.ask(
                self.engine, prompts, group_size, seeds, limit=limit, temperature=sampling_temperature
            )
        return self.drafter.sample(prompts, group_size, seeds, sampling_temperature, limit)

    def respond(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Sample]:
        """Samples one response a prompt at the temperature of evaluation."""
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
        """Returns responses without tokens; see `Drafter.draft`."""
        return self.drafter.draft(prompts, group_size, seeds, limit=limit, temperature=temperature)

    def extend(self, engine: Answering | None, drafts: Sequence[Draft], count: int) -> None:
        """Extends drafts by up to `count` tokens; see `Drafter.extend`."""
        self.drafter.extend(engine, drafts, count)

    def restore(self, drafts: Sequence[Draft], states: Sequence[dict[str, Any]]) -> None:
        """Restores the states of drafts; see `Drafter.restore`."""
        self.drafter.restore(drafts, states)

    def complete(self, drafts: Sequence[Draft], group_size: int) -> Rollouts:
        """Returns finished drafts as rollouts, `group_size` a prompt."""
        return self.drafter.complete(drafts, group_size)

    def demonstrate(self, prompts: Sequence[Prompt], seeds: Sequence[int] = ()) -> Rollouts:
        """Returns the prompts with their reference answers as responses, for supervised learning; nothing in it is
        random."""
        if self.drafter.conversations is not None:
            return self.drafter.conversations.demonstrate(self.drafter, prompts)
        return demonstrate(self.tokens, prompts, self.temperature.value)  # the policy that is trained samples at it

    # --- rollouts to rollouts ---

    def serialize(self, rollouts: Rollouts) -> list[dict[str, Any]]:
        """Returns what `deserialize` needs of each rollout besides its prompt."""
        return reuse.serialize(rollouts)

    def deserialize(self, prompts: Sequence[Prompt], states: Sequence[dict[str, Any]]) -> Rollouts:
        """Returns rollouts as they were stored, not scored; their experts are chosen anew."""
        return reuse.deserialize(self.drafter, prompts, states)

    def continue_from(self, rollouts: Rollouts, lengths: Sequence[int], seeds: Sequence[int]) -> Rollouts:
        """Keeps the first lengths[i] tokens of each response and samples the rest; not scored."""
        return reuse.continue_from(self.drafter, self.engine, rollouts, lengths, seeds)

    def join_responses(self, first: Rollouts, second: Rollouts, text: str) -> Rollouts:
        """Returns responses of `first`, the text, and responses of `second`, whose tokens alone are decisions."""
        return reuse.join_responses(self.tokens, first, second, text)

    def view(self, rollouts: Rollouts, change: Callable[[Prompt], Prompt]) -> Rollouts:
        """Returns the same responses to changed prompts."""
        return reuse.with_prompts(self.drafter, rollouts, change)

    # --- rollouts to log-probabilities ---

    def replay(
        self, rollouts: Rollouts, model: Scorer, *, reference: bool = False, padding_side: str = "right"
    ) -> Replay:
        """Returns logp, entropy and sum of squared probabilities [rollout, decision] of the responses under `model`:
        `self.module`, or the engine around it. Decisions that do not count hold 0.

        Tokens with recorded experts go to these again; such rows share no prompts. The reference routes tokens by
        itself, as it would if it were used: likelihoods with experts that it did not choose are not its own, and a
        trained router could move away unseen.
        """
        return self.likelihoods.replay(rollouts, model, reference=reference, padding_side=padding_side)

    def lengths(self, rollouts: Rollouts) -> Tensor:
        """Returns the tokens of prompt and response, [rollout] int64."""
        return torch.tensor(lengths_of(rollouts.inputs))

    def decision_ids(self, rollouts: Rollouts) -> Tensor:
        """Returns the id of each decided token, [rollout, decision] int64; -1 where no decision counts."""
        ids = torch.full(rollouts.mask.shape, -1)
        for row, tokens in enumerate(rollouts.inputs):
            ids[row, : len(tokens.response)] = tokens.response.cpu()
        return ids.where(rollouts.mask, -1)

    def top_k(self, rollouts: Rollouts, model: Scorer, count: int) -> Tensor:
        """Returns the likeliest tokens of each decision under `model`, best first, [rollout, decision, count] int64."""
        return self.likelihoods.top_k(rollouts, model, count)

    def decision_texts(self, rollouts: Rollouts) -> list[list[str]]:
        """Returns the text that each token adds to the response before it, the end token included."""
        return [self.tokens.pieces(tokens.response) for tokens in rollouts.inputs]

    # --- files ---

    def counts(self) -> dict[str, float]:
        conversations = self.drafter.conversations
        return {} if conversations is None else conversations.counts()

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Saves model (or adapter) and processor in transformers' own format, and a critic beside them. state: the
        weights of `self.module`."""
        write_model(self.module.model, folder, state)
        save_processor(self.tokens.processor, folder)
        if self.module.critic is not None:
            write_critic(folder, state)
        use_default_mode(folder)
