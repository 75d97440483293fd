"""Autoregressive image models as policies: one decision an image token, and one a token of text before the image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from mmrl.engine.flops import CallMeter, PolicyWork, Tally
from mmrl.errors import UserError
from mmrl.policies.autoregressive_image.prompts import NO_TEXT, ImageTokenPrompts, ImageTokenRecord
from mmrl.policies.autoregressive_image.sampling import ImageTokenSampler
from mmrl.policies.autoregressive_image.scorer import ImageTokenScorer, positions
from mmrl.policies.autoregressive_image.settings import ImageTokenDemonstrations, ImageTokenDrawing
from mmrl.policies.models import Scorer, TrainingEngine, write_model
from mmrl.policies.tokenizers import Tokenizer
from mmrl.policies.vlm.scorer import recompute, transformers_model
from mmrl.rollouts import PARTS, SEGMENTS, DecisionColumn, Prompt, Replay, Rollouts, Sample, text_image_parts
from mmrl.runtime.files import use_default_mode
from mmrl.schedules.schedule import Schedule


class ImageTokenPolicy:
    """Writes images token by token, and computes their likelihoods; guidance is the same in both.

    The first `reasoning_length` decisions of a rollout are its text, padded behind its end; the image tokens follow.
    """

    def __init__(
        self,
        scorer: ImageTokenScorer,
        tokenizer: Tokenizer,
        drawing: ImageTokenDrawing,
        *,
        max_prompt_length: int,
        temperature: Schedule,
        evaluation_temperature: float,
        reasoning_length: int = 0,
    ) -> None:
        self.module, self.tokenizer, self.writer, self.drawing = scorer, tokenizer, scorer.writer, drawing
        self.prompts = ImageTokenPrompts(
            scorer, tokenizer, drawing, max_prompt_length=max_prompt_length, reasoning_length=reasoning_length
        )
        self.sampler = ImageTokenSampler(self.prompts)
        self.temperature, self.evaluation_temperature = temperature, evaluation_temperature
        self.reasoning_length = reasoning_length
        tally = Tally()
        self.work = PolicyWork([tally], lambda rollouts: {"images": len(rollouts)})
        for network in (scorer, *transformers_model(scorer.model).children()):
            CallMeter(network, tally)
        self.module.eval()  # dropout would make replay differ from sampling
        recompute(self.module, True)

    @property
    def device(self) -> torch.device:
        return self.prompts.device

    @property
    def max_decisions(self) -> int:
        return self.reasoning_length + self.writer.tokens_per_image

    # --- prompts to images ---

    def rollout(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], *, step: int = 0) -> Rollouts:
        """Samples `group_size` images a prompt. seeds: one a rollout, prompt by prompt."""
        each = [prompt for prompt in prompts for _ in range(group_size)]
        records = self.sampler.draw(each, seeds, self.temperature.value, self.drawing.guidance)
        return self._rollouts(each, records, group_size)

    def respond(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Sample]:
        """Samples one image a prompt, at the temperature and with the guidance of evaluation."""
        evaluation_guidance = self.drawing.evaluation_guidance
        guidance = self.drawing.guidance if evaluation_guidance is None else evaluation_guidance
        records = self.sampler.draw(prompts, seeds, self.evaluation_temperature, guidance)
        return self._rollouts(list(prompts), records, 1).samples

    def demonstrate(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> Rollouts:
        """Returns the images that prompts carry in metadata["target"] as rollouts; some of them without their prompt.
        Text before them comes from metadata["reasoning"]."""
        dropout = self.drawing.prompt_dropout if isinstance(self.drawing, ImageTokenDemonstrations) else 0.0
        for key, kind in (("target", "image"), ("reasoning", "text")):
            missing = next((p.id for p in prompts if key not in p.metadata), None)
            if missing is not None and (key == "target" or self.reasoning_length):
                raise UserError(f"prompt {missing} has no {kind} to learn from: metadata[{key!r}] is missing")
        tokens = self.writer.tokens(self.module.model, torch.stack([p.metadata["target"] for p in prompts]))
        records = []
        for prompt, seed, image in zip(prompts, seeds, tokens, strict=True):
            unprompted = torch.rand((), generator=torch.Generator().manual_seed(int(seed))) < dropout
            prompt_ids = self.prompts.encode(
                self.drawing.negative_prompt if unprompted else self.prompts.request(prompt)
            )
            text = self.prompts.reasoning(prompt) if self.reasoning_length else NO_TEXT
            records.append(ImageTokenRecord(prompt_ids, image, self.temperature.value, text))
        return self._rollouts(list(prompts), records, 1)

    def _rollouts(self, prompts: list[Prompt], records: list[ImageTokenRecord], group_size: int) -> Rollouts:
        """Decodes image tokens and returns the rollouts. Decisions are the text's positions, then the image's; those
        behind the text's end are masked."""
        images = self.writer.images(self.module.model, torch.stack([record.tokens for record in records]))
        samples = [self._sample(*row) for row in zip(prompts, records, images, strict=True)]
        lengths = torch.tensor([len(record.text) for record in records])
        decision = torch.arange(self.max_decisions)
        mask = (decision >= self.reasoning_length) | (decision < lengths[:, None])
        rollouts = Rollouts(samples, records, torch.arange(len(records)) // group_size, mask)
        if self.reasoning_length:
            rollouts.extras[PARTS] = DecisionColumn(
                text_image_parts(len(records), self.reasoning_length, self.max_decisions)
            )
        return rollouts

    def _sample(self, prompt: Prompt, record: ImageTokenRecord, image: Tensor) -> Sample:
        """Returns one sample: the image [channel, height, width], and the text before it where the model reasons."""
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
        """Returns logp, entropy and sum of squared probabilities of each image token under `model` (`self.module` or
        the engine around it), with the guidance of rollouts, and of each text token, which has none. One forward
        computes all; its unconditional half has its gradient too. Demonstrations are scored without guidance."""
        records: list[ImageTokenRecord] = rollouts.inputs
        guidance = 1.0 if isinstance(self.drawing, ImageTokenDemonstrations) else self.drawing.guidance
        tokens = torch.stack([record.tokens for record in records])
        prefixes = self.prompts.prefixes([record.prompt for record in records], [record.text for record in records])
        ids, mask = self.prompts.collate(
            self.prompts.with_unconditional(prefixes, guidance, [row[:-1] for row in tokens])
        )
        text, text_columns = self.prompts.text_targets(records, ids.shape[1])
        temperature = torch.tensor([record.temperature for record in records], device=self.device)
        logp, entropy, square_sum = model(ids, mask, tokens.to(self.device), temperature, guidance, text, text_columns)
        extras = {SEGMENTS.name: self.segments(rollouts).to(self.device)} if self.reasoning_length else {}
        return Replay(logp, entropy, square_sum, extras=extras)

    def segments(self, rollouts: Rollouts) -> Tensor:
        """Returns the part of each decision, text or image, [rollout, decision] int64."""
        return text_image_parts(len(rollouts), self.reasoning_length, self.max_decisions)

    @torch.no_grad()
    def prompt_logp(self, rollouts: Rollouts) -> Tensor:
        """Returns the mean log-likelihood of each prompt's text behind its image and the question, [rollout], without
        temperature. Raises UserError for a prompt without text."""
        records: list[ImageTokenRecord] = rollouts.inputs
        question = torch.tensor(self.prompts.ids(self.drawing.question), dtype=torch.long)
        texts = [torch.tensor(self.prompts.ids(sample.prompt.text), dtype=torch.long) for sample in rollouts.samples]
        if missing := [s.prompt.id for s, text in zip(rollouts.samples, texts, strict=True) if not len(text)]:
            raise UserError(f"prompt {missing[0]} has no text, whose likelihood inverse_likelihood needs")
        image_inputs = [self.writer.image_input(record.tokens, self.tokenizer) for record in records]
        ids, mask = self.prompts.collate(
            [torch.cat([a, question, b]) for a, b in zip(image_inputs, texts, strict=True)]
        )
        images = torch.stack([s.image for s in rollouts.samples if s.image is not None]).to(self.device)
        recompute(self.module, False)
        hidden = self.writer.hidden_with_images(
            self.module.model, ids, mask.long(), images, position_ids=positions(mask), use_cache=False
        )
        recompute(self.module, True)
        likelihoods = []
        for i, text in enumerate(texts):
            logp = self.module.text_logits(hidden[i, -len(text) - 1 : -1]).log_softmax(-1)
            likelihoods.append(logp.gather(-1, text.to(self.device)[:, None]).mean())
        return torch.stack(likelihoods).cpu()

    def view(self, rollouts: Rollouts, change: Callable[[Prompt], Prompt]) -> Rollouts:
        """Returns the same images under changed prompts."""
        inputs = [
            replace(record, prompt=self.prompts.read(change(sample.prompt)))
            for sample, record in zip(rollouts.samples, rollouts.inputs, strict=True)
        ]
        return replace(rollouts, inputs=inputs)

    def decision_ids(self, rollouts: Rollouts) -> Tensor:
        """Returns the id of each written token, [rollout, decision] int64; -1 where there is none."""
        records: list[ImageTokenRecord] = rollouts.inputs
        text, _ = self.prompts.text_targets(records, 10**6)
        return torch.cat([text.cpu(), torch.stack([r.tokens for r in records])], 1).where(rollouts.mask, -1)

    # --- the rest of a policy ---

    def set_engine(self, engine: TrainingEngine) -> None:
        """Has texts written to their limit under ZeRO-3, so that every rank makes as many passes."""
        self.sampler.in_step = engine.zero_stage == 3

    def counts(self) -> dict[str, float]:
        return {}

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Saves model (or adapter) and tokenizer in transformers' own format, and the files that belong to image
        tokens. state: the weights of `self.module`."""
        write_model(self.module.model, folder, state)
        self.tokenizer.save_pretrained(folder)
        self.writer.save(folder)
        use_default_mode(folder)
