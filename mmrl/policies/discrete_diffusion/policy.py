"""Masked diffusion models as policies: empty places are filled step by step, one decision a token of the response."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mmrl.errors import UserError
from mmrl.generation.sampling import draw
from mmrl.kernels import token_logprob
from mmrl.policies import codebook
from mmrl.policies.codebook import Codebook
from mmrl.policies.discrete_diffusion.likelihoods import States, by_blocks, moments
from mmrl.policies.discrete_diffusion.schedule import in_parts
from mmrl.policies.discrete_diffusion.settings import MaskedLikelihood, Unmasking
from mmrl.policies.vlm.critic import TokenCritic, critic_of, write_critic
from mmrl.policies.vlm.scorer import transformers_model
from mmrl.protocols.critic import CriticSettings
from mmrl.rollouts import PARTS, DecisionColumn, Prompt, Replay, Rollouts, Sample, text_and_picture
from mmrl.runtime.files import share
from mmrl.schedules.schedule import Schedule


@dataclass(frozen=True)
class MaskedRecord:
    """A prompt and its response, on the CPU."""

    prompt: Tensor  # [token] int64
    response: Tensor  # [place] int64
    steps: Tensor  # [place] int64, in which step of its rollout a place was filled; 0 where none is known
    seed: int  # of the states in which it is scored
    temperature: float


@dataclass(frozen=True)
class Vocabulary:
    """What tokens mean to a policy."""

    mask: int  # stands in empty places
    pad: int
    end: int | None  # ends a response; None: responses fill all of their places
    suppressed: Tensor  # [n] int64, ids that are never drawn
    outside: Tensor | None = None  # [n] int64, ids that are never drawn as codes, where text comes before these


class MaskScorer(nn.Module):
    """What a model says of chosen places; this is the module that the engine wraps."""

    def __init__(self, model: nn.Module, vocabulary: Vocabulary, *, causal: bool, shifted: bool) -> None:
        """causal: the model would look at earlier tokens only, and is made to look at all. shifted: see
        `MaskedModel`."""
        super().__init__()
        self.model, self.causal, self.shifted = model, causal, shifted
        self.critic: TokenCritic | None = None  # whoever sets it does so before the engine wraps this
        self.register_buffer("suppressed", vocabulary.suppressed, persistent=False)
        nothing = torch.zeros(0, dtype=torch.long)
        self.register_buffer("outside", nothing if vocabulary.outside is None else vocabulary.outside, persistent=False)

    def logits(
        self,
        ids: Tensor,
        there: Tensor,
        row: Tensor,
        column: Tensor,
        positions: Tensor | None = None,
        codes: Tensor | None = None,
    ) -> Tensor:
        """[place, vocabulary] fp32, at position column[i] of row row[i]. ids, there: [row, token], what is read and
        where there is anything to read; or there: [row, token, token], which tokens each of them sees, with positions
        [row, token]. codes: [place] bool, which places are of codes, where others are of text."""
        return self._read(ids, there, row, column, positions, codes, states=False)[0]

    def _read(
        self,
        ids: Tensor,
        there: Tensor,
        row: Tensor,
        column: Tensor,
        positions: Tensor | None,
        codes: Tensor | None,
        *,
        states: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """`logits`, and with `states` what the model made of the places that they are said at, [place, width]."""
        options: dict[str, Any] = {"output_hidden_states": True} if states else {}
        if positions is not None:
            options |= {"attention_mask": there[:, None], "position_ids": positions}
        elif self.causal:
            seen = there[:, None, None, :].expand(-1, 1, ids.shape[1], -1)
            options["attention_mask"] = seen.bool()
        else:
            options["attention_mask"] = there.long()
        found = self.model(input_ids=ids, **options)
        place = (row, column - 1 if self.shifted else column)
        said = found.logits[place].float()
        logits = said.index_fill(-1, self.suppressed, -torch.inf)
        if codes is not None:
            logits = said.index_fill(-1, self.outside, -torch.inf).where(codes[:, None], logits)
        return logits, found.hidden_states[-1][place] if states else None

    def forward(
        self,
        ids: Tensor,
        there: Tensor,
        row: Tensor,
        column: Tensor,
        targets: Tensor,
        temperature: Tensor,
        whole: bool = False,
        old: Tensor | None = None,
        positions: Tensor | None = None,
        codes: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """logp, entropy and sum of squared probabilities of tokens `targets`, [place] fp32 each. temperature: [place]
        too. whole: the logarithms of all probabilities besides, [place, vocabulary] without gradient. old: those of
        another policy; then the cross-entropy to it besides, [place]. Where there is a critic, the value of the state
        comes last, [place]."""
        said, hidden = self._read(ids, there, row, column, positions, codes, states=self.critic is not None)
        known = self._known(said / temperature[:, None], targets, whole, old)
        return known if self.critic is None or hidden is None else (*known, self.critic(hidden))

    def _known(self, logits: Tensor, targets: Tensor, whole: bool, old: Tensor | None) -> tuple[Tensor, ...]:
        found = token_logprob(logits, targets)
        known = (found.logp, found.entropy, found.square_sum)
        if not whole:
            return known
        logp = logits.log_softmax(-1)
        if old is None:
            return *known, logp.detach()
        possible = old > -torch.inf
        cross = -(old.exp() * logp.where(possible, 0.0)).sum(-1)
        return *known, logp.detach(), cross


class DiscreteDiffusionPolicy(ABC):
    """What policies share that make a response of tokens out of noise: it is replayed from states that its seed (and
    its trace) decide, in one forward."""

    kind: ClassVar[str]  # as `model.type` has it

    def __init__(
        self,
        scorer: MaskScorer,
        tokenizer: Any,
        vocabulary: Vocabulary,
        *,
        length: int,
        max_prompt_length: int,
        temperature: Schedule,
        evaluation_temperature: float,
        codes: Codebook | None = None,
        reasoning_length: int = 0,
        keeps_distributions: bool = False,
    ) -> None:
        """length: places of a response. codes: of a model that writes pictures; None: it writes text. reasoning_length:
        so many of the places of a model that writes pictures are text before the codes. keeps_distributions: replays
        say the whole distribution of every decision in every state, which takes as much memory as the logits."""
        self.module, self.tokenizer, self.vocabulary = scorer, tokenizer, vocabulary
        self.length, self.codebook, self.keeps_distributions = length, codes, keeps_distributions
        self.text_length = length if codes is None else reasoning_length  # places of text; codes come behind them
        self.max_prompt_length, self.temperature = max_prompt_length, temperature
        self.evaluation_temperature = evaluation_temperature
        self.module.eval()  # dropout would make replay differ from sampling

    @property
    def in_parts(self) -> bool:
        """Whether a response has text and codes."""
        return 0 < self.text_length < self.length

    def codes_at(self, place: Tensor) -> Tensor | None:
        """[n] bool, which of the places [n] are of codes; None where all are alike."""
        return place >= self.text_length if self.in_parts else None

    @abstractmethod
    def _draw(self, prompts: list[Tensor], seeds: Sequence[int], temperature: float) -> list[MaskedRecord]:
        """One response a prompt, from its seed alone. temperature: 0 for the most likely token each time."""

    @abstractmethod
    def states_of(self, record: MaskedRecord) -> States:
        """In which a response is replayed."""

    @abstractmethod
    def _shown(self, record: MaskedRecord, states: States, state: int) -> Tensor:
        """[place] the response as it is read in a state."""

    def judge(self, settings: CriticSettings, folder: Path) -> None:
        """From now on replay gives the value of the state that each place was filled in. folder: where a critic may
        lie, which else begins anew. Raises UserError as `read_critic`."""
        self.module.critic = critic_of(transformers_model(self.module.model), settings, folder)

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def max_decisions(self) -> int:
        return self.length

    # --- prompts to responses ---

    def encode(self, prompt: Prompt) -> Tensor:
        """[token] int64. Raises UserError for pictures, and for a prompt that is too long."""
        if prompt.images or prompt.videos or prompt.messages:
            raise UserError(f"prompt {prompt.id}: model.type={self.kind} reads a single text without pictures")
        if self.tokenizer.chat_template is not None:
            said = [{"role": "system", "content": prompt.system}] if prompt.system else []
            said.append({"role": "user", "content": prompt.text})
            ids = self.tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
        else:
            ids = self.tokenizer(f"{prompt.system or ''}{prompt.text}", add_special_tokens=False).input_ids
        if not 0 < len(ids) <= self.max_prompt_length:
            raise UserError(
                f"prompt {prompt.id} has {len(ids)} tokens; rollout.max_prompt_length={self.max_prompt_length}, and at "
                "least one is needed"
            )
        return torch.tensor(ids)

    @torch.no_grad()
    def rollout(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], *, step: int = 0) -> Rollouts:
        """`group_size` responses a prompt. seeds: one a rollout, prompt by prompt."""
        each = [prompt for prompt in prompts for _ in range(group_size)]
        ids = [row for row in map(self.encode, prompts) for _ in range(group_size)]
        return self._rollouts(each, self._draw(ids, seeds, self.temperature.value), group_size)

    @torch.no_grad()
    def respond(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Sample]:
        """One response a prompt at the temperature of evaluation."""
        ids = [self.encode(prompt) for prompt in prompts]
        return self._rollouts(list(prompts), self._draw(ids, seeds, self.evaluation_temperature), 1).samples

    def demonstrate(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> Rollouts:
        """The prompts with the responses that they carry in metadata["demonstration"], or with their answers; places
        behind the end are filled with end tokens. Of a model that writes pictures: with those in metadata["target"],
        and with the text in metadata["reasoning"] before them."""
        heat = self.temperature.value
        records = [
            MaskedRecord(
                self.encode(p), self._demonstrated(p), torch.zeros(self.length, dtype=torch.long), int(s), heat
            )
            for p, s in zip(prompts, seeds, strict=True)
        ]
        return self._rollouts(list(prompts), records, 1)

    def _demonstrated(self, prompt: Prompt) -> Tensor:
        if self.codebook is None:
            return self._words(prompt, str(prompt.metadata.get("demonstration", prompt.answer)), "response_length")
        for key, what in (("target", "picture"), ("reasoning", "text")):
            if key not in prompt.metadata and (key == "target" or self.text_length):
                raise UserError(f"prompt {prompt.id} has no {what} to learn from: metadata[{key!r}] is missing")
        codes = self.codebook.tokens(prompt.metadata["target"][None])[0]
        if not self.text_length:
            return codes
        return torch.cat([self._words(prompt, str(prompt.metadata["reasoning"]), "reasoning_length"), codes])

    def _words(self, prompt: Prompt, text: str, limit: str) -> Tensor:
        """[place] of a text, filled up with end tokens. limit: the key of its length."""
        end = self.vocabulary.end
        assert end is not None
        ids = self.tokenizer(text, add_special_tokens=False).input_ids
        if len(ids) > self.text_length:
            raise UserError(
                f"the demonstration of prompt {prompt.id} has {len(ids)} tokens, more than "
                f"rollout.{limit}={self.text_length}"
            )
        if impossible := set(ids) & set(self.vocabulary.suppressed.tolist()):
            raise UserError(
                f"the demonstration of prompt {prompt.id} holds {self.tokenizer.decode(list(impossible))}, which the "
                "policy never writes"
            )
        return torch.tensor(ids + [end] * (self.text_length - len(ids)))

    def _collate(self, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Tokens [row, token], padded behind, and where there is any."""
        ids = pad_sequence(list(rows), batch_first=True, padding_value=self.vocabulary.pad)
        lengths = torch.tensor([len(row) for row in rows])
        there = torch.arange(ids.shape[1]) < lengths[:, None]
        return ids.to(self.device), there.to(self.device)

    def _rollouts(self, prompts: list[Prompt], records: list[MaskedRecord], group_size: int) -> Rollouts:
        responses = torch.stack([record.response for record in records])
        mask = torch.ones_like(responses, dtype=torch.bool)
        if self.vocabulary.end is not None:
            ends = (responses[:, : self.text_length] == self.vocabulary.end).long()
            mask[:, : self.text_length] = ends.cumsum(1) - ends == 0  # up to the first end token, and it too
        samples = [self._sample(*row) for row in zip(prompts, records, mask, strict=True)]
        made = Rollouts(samples, records, torch.arange(len(records)) // group_size, mask)
        if self.in_parts:
            made.extras[PARTS] = DecisionColumn(text_and_picture(len(records), self.text_length, self.length))
        return made

    def _sample(self, prompt: Prompt, record: MaskedRecord, mask: Tensor) -> Sample:
        image = None
        if self.codebook is not None:
            image = self.codebook.pictures(record.response[None, self.text_length :])[0]
        if not self.text_length:
            return Sample(prompt, image=image)
        said = record.response[: self.text_length][mask[: self.text_length]]
        return Sample(
            prompt,
            image=image,
            response=self.tokenizer.decode(said, skip_special_tokens=True),
            response_length=len(said),
            truncated=self.vocabulary.end is not None and int(said[-1]) != self.vocabulary.end,
            max_response_length=self.text_length,
            forwards=self._forwards(record),
        )

    def _forwards(self, record: MaskedRecord) -> int:
        """Times that the model had to be asked for a response."""
        return len(record.steps.unique())

    # --- responses to likelihoods ---

    def replay(self, rollouts: Rollouts, model: Any, *, reference: bool = False) -> Replay:
        """What `model` (`self.module` or the engine around it) says of every token, weighted over the states in which
        the likelihood asks about it; entropies and squares are means with the same weights. One forward for all."""
        records: list[MaskedRecord] = rollouts.inputs
        found = [self.states_of(record) for record in records]
        weight = torch.stack([states.weight for states in found])
        rollout, state, place = weight.nonzero().unbind(1)
        responses = torch.stack([record.response for record in records])
        first = torch.tensor([len(record.prompt) for record in records])
        options: dict[str, Any] = {"whole": True} if self.keeps_distributions else {}
        if found[0].order is not None:
            ids, there, options["positions"] = self._in_one_pass(records, found)
            first = first + self.length  # mask tokens stand behind the response
        elif found[0].blocks is not None:
            ids, there, options["positions"] = self._in_blocks(records, found)
            first = first + self.length
        else:
            rows = [
                torch.cat([self._hidden(record, states, s), self._shown(record, states, s)])
                for record, states in zip(records, found, strict=True)
                for s in range(len(states.weight))
            ]
            ids, there = self._collate(rows)
        heat = torch.tensor([record.temperature for record in records])[rollout]
        row, column = rollout * weight.shape[1] + state, first[rollout] + place
        asked = [row, column, responses[rollout, place], heat]
        if (codes := self.codes_at(place)) is not None:
            options["codes"] = codes.to(self.device)
        if self.keeps_distributions and rollouts.old_prediction is not None:
            options["old"] = rollouts.old_prediction[rollout, place, state].to(self.device)
        scored = model(ids, there, *(part.to(self.device) for part in asked), **options)
        w = weight[rollout, state, place].to(self.device)
        total = weight.sum(1)[rollout, place].to(self.device)
        where = (rollout.to(self.device), place.to(self.device))
        blank = torch.zeros(len(records), self.length, device=self.device)
        logp, entropy, square_sum = (
            blank.index_put(where, values * share_of, accumulate=True)
            for values, share_of in zip(scored[:3], (w, w / total, w / total), strict=True)
        )
        told = Replay(logp, entropy, square_sum)
        if self.in_parts:
            told.segments = text_and_picture(len(records), self.text_length, self.length).to(self.device)
        if self.module.critic is not None:
            told.value = blank.index_put(where, scored[-1] * (w / total), accumulate=True)
            told.moment = torch.stack([moments(states) for states in found])
        if self.keeps_distributions:
            kept = torch.zeros(len(records), self.length, weight.shape[1], scored[3].shape[-1])
            kept[rollout, place, state] = scored[3].cpu()
            told.prediction = kept
        if "old" in options:
            told.old_cross_entropy = blank.index_put(where, scored[4] * w, accumulate=True)
        return told

    def _in_one_pass(self, records: list[MaskedRecord], found: list[States]) -> tuple[Tensor, Tensor, Tensor]:
        """Prompts, responses and as many mask tokens [row, token]; which tokens each of them sees [row, token, token];
        their positions [row, token]. A prompt sees itself, a token of a response the prompt and all that were filled
        no later, a mask token the prompt, all that were filled earlier, and itself."""
        blank = torch.full((self.length,), self.vocabulary.mask)
        ids, there = self._collate([torch.cat([record.prompt, record.response, blank]) for record in records])
        seen = torch.eye(ids.shape[1], dtype=torch.bool).repeat(len(records), 1, 1)
        positions = torch.zeros(ids.shape, dtype=torch.long)
        for row, (record, states) in enumerate(zip(records, found, strict=True)):
            assert states.order is not None
            prompt, n = len(record.prompt), self.length
            earlier = states.order[None, :] < states.order[:, None]  # [place, place]
            seen[row, : prompt + 2 * n, :prompt] = True
            seen[row, prompt : prompt + n, prompt : prompt + n] = ~earlier.T
            seen[row, prompt + n : prompt + 2 * n, prompt : prompt + n] = earlier
            places = torch.arange(prompt, prompt + n)
            positions[row, : prompt + 2 * n] = torch.cat([torch.arange(prompt), places, places])
        return ids, seen.to(self.device), positions.to(self.device)

    def _in_blocks(self, records: list[MaskedRecord], found: list[States]) -> tuple[Tensor, Tensor, Tensor]:
        """Prompts, responses and responses with empty places [row, token], one row a state; which tokens each of them
        sees [row, token, token]; their positions [row, token]. See `by_blocks`."""
        rows = [
            torch.cat([record.prompt, record.response, self._shown(record, states, s)])
            for record, states in zip(records, found, strict=True)
            for s in range(len(states.weight))
        ]
        blocks = found[0].blocks
        assert blocks is not None
        lengths = [len(record.prompt) for record in records for _ in range(len(found[0].weight))]
        return self._stepped(rows, lengths, blocks, noised=True)

    def _stepped(
        self, rows: list[Tensor], prompts: list[int], blocks: Tensor, *, noised: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rows [row, token], what they see and their positions, as `by_blocks` has them. prompts: tokens of each."""
        ids, _ = self._collate(rows)
        known = [by_blocks(length, blocks, ids.shape[1], noised=noised) for length in prompts]
        seen, positions = (torch.stack(part).to(self.device) for part in zip(*known, strict=True))
        return ids, seen, positions

    def _hidden(self, record: MaskedRecord, states: States, state: int) -> Tensor:
        """[token] the prompt as it is read in a state."""
        if states.prompt_empty is None:
            return record.prompt
        return record.prompt.masked_fill(states.prompt_empty[state], self.vocabulary.mask)

    def view(self, rollouts: Rollouts, change: Callable[[Prompt], Prompt]) -> Rollouts:
        """The same responses to changed prompts."""
        inputs = [
            replace(record, prompt=self.encode(change(sample.prompt)))
            for sample, record in zip(rollouts.samples, rollouts.inputs, strict=True)
        ]
        return replace(rollouts, inputs=inputs)

    def numbers(self, rollouts: Rollouts) -> Tensor:
        """[rollout, decision] int64, which token was decided; -1 where no decision counts."""
        return torch.stack([record.response for record in rollouts.inputs]).where(rollouts.mask, -1)

    # --- the rest of a policy ---

    def trained_by(self, engine: Any) -> None:  # noqa: B027
        """It has nothing to keep step with: every replay is one forward, and every rank takes as many steps."""

    def counts(self) -> dict[str, float]:
        return {}

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Write model (or adapter) and tokenizer in transformers' own format, and a critic beside them. state: of
        `self.module`."""
        weights = {n.removeprefix("model."): value for n, value in state.items() if n.startswith("model.")}
        model: Any = self.module.model
        model.save_pretrained(folder, state_dict=weights)
        self.tokenizer.save_pretrained(folder)
        if self.module.critic is not None:
            write_critic(folder, state)
        if self.codebook is not None:
            codebook.write(folder, self.codebook)
        share(folder)


class MaskedPolicy(DiscreteDiffusionPolicy):
    """Fills the places of a response step by step, and says how likely responses are by a named estimate."""

    kind: ClassVar[str] = "masked_diffusion"

    def __init__(
        self,
        scorer: MaskScorer,
        tokenizer: Any,
        vocabulary: Vocabulary,
        unmasking: Unmasking,
        likelihood: MaskedLikelihood,
        **shared: Any,
    ) -> None:
        """shared: as `DiscreteDiffusionPolicy` has it."""
        super().__init__(scorer, tokenizer, vocabulary, **shared)
        self.unmasking, self.likelihood = unmasking, likelihood
        text = self.text_length if self.in_parts else 0
        own, steps, block = unmasking.reasoning_steps, unmasking.steps, unmasking.block
        self.steps = in_parts(text, self.length - text, own, steps, block)
        starts = torch.tensor(sorted({step.start for step in self.steps}))
        self.blocks = torch.searchsorted(starts, torch.arange(self.length), right=True) - 1  # [place]

    def _draw(self, prompts: list[Tensor], seeds: Sequence[int], temperature: float) -> list[MaskedRecord]:
        """One response a prompt, from its seed alone. temperature: 0 for the most likely token each time."""
        generators = [torch.Generator(self.device).manual_seed(int(seed)) for seed in seeds]
        response = torch.full((len(prompts), self.length), self.vocabulary.mask)
        filled = torch.zeros_like(response)
        rows = torch.arange(len(prompts)).repeat_interleave(self.length).to(self.device)
        place = torch.arange(self.length).repeat(len(prompts)).to(self.device)
        first = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        codes = self.codes_at(place)
        for turn, step in enumerate(self.steps):
            ids, there, positions = self._begun(prompts, response)
            logits = self.module.logits(ids, there, rows, first[rows] + place, positions, codes)
            logits = logits.view(len(prompts), self.length, -1) / (temperature or 1.0)
            noisy = draw(logits, generators) if temperature else logits
            tokens = noisy.argmax(-1)
            logp = logits.log_softmax(-1)
            chosen = logp.gather(-1, tokens[..., None])[..., 0].cpu()
            entropy = -(logp.exp() * logp.clamp(min=-1e9)).sum(-1).cpu()
            chance = torch.stack([torch.rand(self.length, generator=g, device=self.device) for g in generators]).cpu()
            open_ = torch.zeros_like(response, dtype=torch.bool)
            open_[:, step.start : step.stop] = response[:, step.start : step.stop] == self.vocabulary.mask
            scores = self.unmasking.order.scores(chosen, entropy, chance).masked_fill(~open_, -torch.inf)
            now = torch.zeros_like(open_).scatter(1, scores.topk(step.number, -1).indices, True)
            if self.unmasking.threshold is not None:
                now |= chosen.exp() >= self.unmasking.threshold
            now &= open_  # a response that is done keeps what it has
            response = torch.where(now, tokens.cpu(), response)
            filled = filled.masked_fill(now, turn)
        heat = temperature or 1.0  # responses of the most likely tokens are replayed as they are
        return [MaskedRecord(prompt, response[i], filled[i], int(seeds[i]), heat) for i, prompt in enumerate(prompts)]

    def _begun(self, prompts: list[Tensor], response: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Responses in the making as `MaskScorer.logits` reads them."""
        rows = [torch.cat(pair) for pair in zip(prompts, response, strict=True)]
        if not self.unmasking.causal_blocks:
            return *self._collate(rows), None
        return self._stepped(rows, [len(prompt) for prompt in prompts], self.blocks, noised=False)

    def states_of(self, record: MaskedRecord) -> States:
        return self.likelihood.states_in_blocks(
            record.seed, len(record.prompt), record.steps, len(self.steps), self.blocks
        )

    def _shown(self, record: MaskedRecord, states: States, state: int) -> Tensor:
        return record.response.masked_fill(states.empty[state], self.vocabulary.mask)
