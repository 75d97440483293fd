"""Language models that write images as codes, as policies: one decision a code, and one a token of text before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from mmrl.errors import UserError
from mmrl.policies.autoregressive_image.prompts import NOTHING, CodePrompts, CodeRecord
from mmrl.policies.autoregressive_image.sampling import CodeSampler
from mmrl.policies.autoregressive_image.scorer import CodeScorer, positions
from mmrl.policies.autoregressive_image.settings import CodeDemonstrations, CodeDrawing
from mmrl.policies.models import Scorer, TrainingEngine, write_model
from mmrl.policies.tokenizers import Tokenizer
from mmrl.policies.vlm.scorer import recompute
from mmrl.rollouts import PARTS, SEGMENTS, DecisionColumn, Prompt, Replay, Rollouts, Sample, text_and_image
from mmrl.runtime.files import share
from mmrl.schedules.schedule import Schedule


class CodePolicy:
    """Writes images code by code, and says how likely they were; guidance is the same in both.

    The first `reasoning_length` decisions of a rollout are the words of its text, as many as there are; its codes come
    after them.
    """

    def __init__(
        self,
        scorer: CodeScorer,
        tokenizer: Tokenizer,
        drawing: CodeDrawing,
        *,
        max_prompt_length: int,
        temperature: Schedule,
        evaluation_temperature: float,
        reasoning_length: int = 0,
    ) -> None:
        self.module, self.tokenizer, self.writer, self.drawing = scorer, tokenizer, scorer.writer, drawing
        self.prompts = CodePrompts(
            scorer, tokenizer, drawing, max_prompt_length=max_prompt_length, reasoning_length=reasoning_length
        )
        self.sampler = CodeSampler(self.prompts)
        self.temperature, self.evaluation_temperature = temperature, evaluation_temperature
        self.reasoning_length = reasoning_length
        self.module.eval()  # dropout would make replay differ from sampling
        recompute(self.module, True)

    @property
    def device(self) -> torch.device:
        return self.prompts.device

    @property
    def max_decisions(self) -> int:
        return self.reasoning_length + self.writer.places

    # --- prompts to images ---

    def rollout(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], *, step: int = 0) -> Rollouts:
        """`group_size` images a prompt. seeds: one a rollout, prompt by prompt."""
        each = [prompt for prompt in prompts for _ in range(group_size)]
        records = self.sampler.draw(each, seeds, self.temperature.value, self.drawing.guidance)
        return self._rollouts(each, records, group_size)

    def respond(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Sample]:
        """One image a prompt, at the temperature and with the guidance of evaluation."""
        told = self.drawing.evaluation_guidance
        guidance = self.drawing.guidance if told is None else told
        records = self.sampler.draw(prompts, seeds, self.evaluation_temperature, guidance)
        return self._rollouts(list(prompts), records, 1).samples

    def demonstrate(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> Rollouts:
        """The images that prompts carry in metadata["target"], as codes; some of them without their prompt. Text
        before them is what they carry in metadata["reasoning"]."""
        dropout = self.drawing.prompt_dropout if isinstance(self.drawing, CodeDemonstrations) else 0.0
        for key, what in (("target", "image"), ("reasoning", "text")):
            missing = next((p.id for p in prompts if key not in p.metadata), None)
            if missing is not None and (key == "target" or self.reasoning_length):
                raise UserError(f"prompt {missing} has no {what} to learn from: metadata[{key!r}] is missing")
        tokens = self.writer.tokens(self.module.model, torch.stack([p.metadata["target"] for p in prompts]))
        records = []
        for prompt, seed, image in zip(prompts, seeds, tokens, strict=True):
            dropped = torch.rand((), generator=torch.Generator().manual_seed(int(seed))) < dropout
            told = self.prompts.encode(self.drawing.negative_prompt if dropped else self.prompts.asked(prompt))
            text = self.prompts.demonstrated(prompt) if self.reasoning_length else NOTHING
            records.append(CodeRecord(told, image, self.temperature.value, text))
        return self._rollouts(list(prompts), records, 1)

    def _rollouts(self, prompts: list[Prompt], records: list[CodeRecord], group_size: int) -> Rollouts:
        images = self.writer.images(self.module.model, torch.stack([record.tokens for record in records]))
        samples = [self._sample(*row) for row in zip(prompts, records, images, strict=True)]
        lengths = torch.tensor([len(record.text) for record in records])
        place = torch.arange(self.max_decisions)
        mask = (place >= self.reasoning_length) | (place < lengths[:, None])
        made = Rollouts(samples, records, torch.arange(len(records)) // group_size, mask)
        if self.reasoning_length:
            made.extras[PARTS] = DecisionColumn(text_and_image(len(records), self.reasoning_length, self.max_decisions))
        return made

    def _sample(self, prompt: Prompt, record: CodeRecord, image: Tensor) -> Sample:
        if not self.reasoning_length:
            return Sample(prompt, image=image)
        return Sample(
            prompt,
            image=image,
            response=self.tokenizer.decode(record.text, skip_special_tokens=True),
            response_length=len(record.text),
            truncated=int(record.text[-1]) != self.tokenizer.eos_token_id,
            max_response_length=self.reasoning_length,
        )

    # --- images to likelihoods ---

    def replay(self, rollouts: Rollouts, model: Scorer, *, reference: bool = False) -> Replay:
        """What `model` (`self.module` or the engine around it) says of every code, under the guidance of rollouts, and
        of every word before them, which has none; one forward for all, whose unconditional half has its gradient too.
        Demonstrations are scored without guidance."""
        records: list[CodeRecord] = rollouts.inputs
        guidance = 1.0 if isinstance(self.drawing, CodeDemonstrations) else self.drawing.guidance
        tokens = torch.stack([record.tokens for record in records])
        told = self.prompts.before([record.prompt for record in records], [record.text for record in records])
        ids, there = self.prompts.collate(self.prompts.guided(told, guidance, [row[:-1] for row in tokens]))
        text, before = self.prompts.words(records, ids.shape[1])
        heat = torch.tensor([record.temperature for record in records], device=self.device)
        logp, entropy, square_sum = model(ids, there, tokens.to(self.device), heat, guidance, text, before)
        segments = (
            text_and_image(len(records), self.reasoning_length, self.max_decisions).to(self.device)
            if self.reasoning_length
            else None
        )
        return Replay(logp, entropy, square_sum, extras={} if segments is None else {SEGMENTS.name: segments})

    @torch.no_grad()
    def inverse(self, rollouts: Rollouts) -> Tensor:
        """[rollout] the mean log-likelihood of the words of each prompt behind its image and the question, without
        temperature. Raises UserError for a prompt without words."""
        records: list[CodeRecord] = rollouts.inputs
        question = torch.tensor(self.prompts.ids(self.drawing.question), dtype=torch.long)
        words = [torch.tensor(self.prompts.ids(sample.prompt.text), dtype=torch.long) for sample in rollouts.samples]
        if missing := [s.prompt.id for s, told in zip(rollouts.samples, words, strict=True) if not len(told)]:
            raise UserError(f"prompt {missing[0]} has no words, whose likelihood inverse_likelihood asks for")
        seen = [self.writer.seen(record.tokens, self.tokenizer) for record in records]
        ids, there = self.prompts.collate([torch.cat([a, question, b]) for a, b in zip(seen, words, strict=True)])
        images = torch.stack([s.image for s in rollouts.samples if s.image is not None]).to(self.device)
        recompute(self.module, False)
        hidden = self.writer.reads(
            self.module.model, ids, there.long(), images, position_ids=positions(there), use_cache=False
        )
        recompute(self.module, True)
        found = []
        for i, told in enumerate(words):
            logp = self.module.words(hidden[i, -len(told) - 1 : -1]).log_softmax(-1)
            found.append(logp.gather(-1, told.to(self.device)[:, None]).mean())
        return torch.stack(found).cpu()

    def view(self, rollouts: Rollouts, change: Callable[[Prompt], Prompt]) -> Rollouts:
        """The same images under changed prompts."""
        inputs = [
            replace(record, prompt=self.prompts.read(change(sample.prompt)))
            for sample, record in zip(rollouts.samples, rollouts.inputs, strict=True)
        ]
        return replace(rollouts, inputs=inputs)

    def numbers(self, rollouts: Rollouts) -> Tensor:
        """[rollout, decision] int64, which token was written; -1 where there was none."""
        records: list[CodeRecord] = rollouts.inputs
        text, _ = self.prompts.words(records, 10**6)
        return torch.cat([text.cpu(), torch.stack([r.tokens for r in records])], 1).where(rollouts.mask, -1)

    # --- the rest of a policy ---

    def trained_by(self, engine: TrainingEngine) -> None:
        """Under ZeRO-3 texts are written to their limit, so that every rank makes as many passes."""
        self.sampler.in_step = engine.zero_stage == 3

    def counts(self) -> dict[str, float]:
        return {}

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Write model (or adapter) and tokenizer in transformers' own format, and what belongs to the codes. state: of
        `self.module`."""
        write_model(self.module.model, folder, state)
        self.tokenizer.save_pretrained(folder)
        self.writer.save(folder)
        share(folder)
