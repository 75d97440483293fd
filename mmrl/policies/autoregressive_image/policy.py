"""Autoregressive image models as policies. Each image token, and each token of the text before it, is one decision."""

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
from mmrl.policies.vlm.scorer import set_checkpointing, transformers_model, without_checkpointing
from mmrl.rollouts import PARTS, SEGMENTS, DecisionColumn, Prompt, Replay, Rollouts, Sample, text_image_parts
from mmrl.runtime.files import use_default_permissions
from mmrl.schedules.schedule import Schedule


class ImageTokenPolicy:
    """Samples images token by token, and computes their log-probabilities, with the same guidance in both.

    The first `reasoning_length` decisions of a rollout are its text, padded after its end; the image tokens follow.
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
        """max_prompt_length: in tokens. reasoning_length: maximum tokens of the text before an image; 0: no text."""
        self.module, self.tokenizer, self.writer, self.drawing = scorer, tokenizer, scorer.writer, drawing
        self.prompts = ImageTokenPrompts(
            scorer, tokenizer, drawing, max_prompt_length=max_prompt_length, reasoning_length=reasoning_length
        )
        self.sampler = ImageTokenSampler(self.prompts)
        self.temperature, self.evaluation_temperature = temperature, evaluation_temperature
        self.reasoning_length = reasoning_length
        tally = Tally()
        self.work = PolicyWork([tally], lambda rollouts: {"images": len(rollouts)})
        # A meter hooks itself into its network and adds the operations of calls to the tally. Parts of the model are
        # also called alone, so each has a meter; of nested calls only the outermost one counts.
        for network in (scorer, *transformers_model(scorer.model).children()):
            CallMeter(network, tally)
        self.module.eval()  # dropout would make replay differ from sampling
        set_checkpointing(self.module, True)

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.prompts.device

    @property
    def max_decisions(self) -> int:
        """The number of decisions of a rollout: text tokens, padding included, and image tokens."""
        return self.reasoning_length + self.writer.tokens_per_image

    # --- prompts to images ---

    def rollout(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], *, step: int = 0) -> Rollouts:
        """Samples `group_size` images per prompt. seeds: one per rollout, prompt by prompt. step: not used."""
        row_prompts = [prompt for prompt in prompts for _ in range(group_size)]
        records = self.sampler.sample(row_prompts, seeds, self.temperature.value, self.drawing.guidance)
        return self._rollouts(row_prompts, records, group_size)

    def respond(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Sample]:
        """Samples one image per prompt, with the temperature and guidance of evaluation."""
        evaluation_guidance = self.drawing.evaluation_guidance
        guidance = self.drawing.guidance if evaluation_guidance is None else evaluation_guidance
        records = self.sampler.sample(prompts, seeds, self.evaluation_temperature, guidance)
        return self._rollouts(list(prompts), records, 1).samples

    def demonstrate(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> Rollouts:
        """Returns rollouts of the images in metadata["target"] of prompts, for supervised fine-tuning.

        The text before an image is metadata["reasoning"]. With probability `drawing.prompt_dropout` the prompt is
        replaced by the negative prompt. seeds: one per prompt, for this random choice. Raises UserError for missing
        metadata.
        """
        dropout = self.drawing.prompt_dropout if isinstance(self.drawing, ImageTokenDemonstrations) else 0.0
        for key, kind in (("target", "image"), ("reasoning", "text")):
            missing = next((p.id for p in prompts if key not in p.metadata), None)
            if missing is not None and (key == "target" or self.reasoning_length):
                raise UserError(f"prompt {missing} has no {kind} to learn from; set its metadata[{key!r}]")
        tokens = self.writer.tokens(self.module.model, torch.stack([p.metadata["target"] for p in prompts]))
        records = []
        for prompt, seed, image in zip(prompts, seeds, tokens, strict=True):
            drop_prompt = torch.rand((), generator=torch.Generator().manual_seed(int(seed))) < dropout
            prompt_ids = self.prompts.encode(
                self.drawing.negative_prompt if drop_prompt else self.prompts.request(prompt)
            )
            text = self.prompts.reasoning(prompt) if self.reasoning_length else NO_TEXT
            records.append(ImageTokenRecord(prompt_ids, image, self.temperature.value, text))
        return self._rollouts(list(prompts), records, 1)

    def _rollouts(self, prompts: list[Prompt], records: list[ImageTokenRecord], group_size: int) -> Rollouts:
        """Decodes image tokens and builds rollouts. prompts, records: one per rollout, `group_size` adjacent ones per
        prompt. The padding after a text is masked."""
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
        """Returns the sample that rewards score: the image [channel, height, width], and the text before it, if any."""
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
        """Returns logp, entropy and sum of squared probabilities of text tokens, then image tokens, [rollout,
        decision].

        model: `self.module`, or the engine that wraps it; called once. Image tokens are scored with the guidance of
        rollouts, with a gradient through the unconditional pass too; text tokens and demonstrations without guidance.
        Rollouts with text also get the index of each decision's segment, text or image.
        """
        records: list[ImageTokenRecord] = rollouts.inputs
        guidance = 1.0 if isinstance(self.drawing, ImageTokenDemonstrations) else self.drawing.guidance
        tokens = torch.stack([record.tokens for record in records])
        prefixes = self.prompts.prefixes([record.prompt for record in records], [record.text for record in records])
        # no token is predicted from the last one, so the model does not get it
        ids, mask = self.prompts.collate(
            self.prompts.with_unconditional(prefixes, guidance, [row[:-1] for row in tokens])
        )
        text, text_columns = self.prompts.text_targets(records, ids.shape[1])
        temperature = torch.tensor([record.temperature for record in records], device=self.device)
        logp, entropy, square_sum = model(ids, mask, tokens.to(self.device), temperature, guidance, text, text_columns)
        extras = {SEGMENTS.name: self.segments(rollouts).to(self.device)} if self.reasoning_length else {}
        return Replay(logp, entropy, square_sum, extras=extras)

    def segments(self, rollouts: Rollouts) -> Tensor:
        """Returns the part of each decision, [rollout, decision] int64: 0 for text, 1 for the image."""
        return text_image_parts(len(rollouts), self.reasoning_length, self.max_decisions)

    @torch.no_grad()
    def prompt_logp(self, rollouts: Rollouts) -> Tensor:
        """Returns the mean log-probability per token of each prompt's text, given its image and `drawing.question`,
        [rollout], at temperature 1. Raises UserError for a prompt without text."""
        records: list[ImageTokenRecord] = rollouts.inputs
        question = torch.tensor(self.prompts.ids(self.drawing.question), dtype=torch.long)
        texts = [torch.tensor(self.prompts.ids(sample.prompt.text), dtype=torch.long) for sample in rollouts.samples]
        if missing := [s.prompt.id for s, text in zip(rollouts.samples, texts, strict=True) if not len(text)]:
            raise UserError(
                f"prompt {missing[0]} has no text, but inverse_likelihood computes the likelihood of texts of prompts; "
                "add one to its row"
            )
        image_inputs = [self.writer.image_input(record.tokens, self.tokenizer) for record in records]
        ids, mask = self.prompts.collate(
            [torch.cat([image, question, text]) for image, text in zip(image_inputs, texts, strict=True)]
        )
        images = torch.stack([s.image for s in rollouts.samples if s.image is not None]).to(self.device)
        with without_checkpointing(self.module):
            hidden = self.writer.hidden_with_images(
                self.module.model, ids, mask.long(), images, position_ids=positions(mask), use_cache=False
            )
        likelihoods = []
        for i, text in enumerate(texts):
            # rows are padded on the left, so the text ends each row; a token is predicted from the one before it
            logp = self.module.text_logits(hidden[i, -len(text) - 1 : -1]).log_softmax(-1)
            likelihoods.append(logp.gather(-1, text.to(self.device)[:, None]).mean())
        return torch.stack(likelihoods).cpu()

    def view(self, rollouts: Rollouts, change: Callable[[Prompt], Prompt]) -> Rollouts:
        """Returns the same images under changed prompts."""
        inputs = [
            replace(record, prompt=self.prompts.encode_prompt(change(sample.prompt)))
            for sample, record in zip(rollouts.samples, rollouts.inputs, strict=True)
        ]
        return replace(rollouts, inputs=inputs)

    def decision_ids(self, rollouts: Rollouts) -> Tensor:
        """Returns the token id of each decision, [rollout, decision] int64; -1 where the mask is false."""
        records: list[ImageTokenRecord] = rollouts.inputs
        text, _ = self.prompts.text_targets(records, 10**6)  # any width: the columns are not used
        return torch.cat([text.cpu(), torch.stack([r.tokens for r in records])], 1).where(rollouts.mask, -1)

    # --- other methods of a policy ---

    def set_engine(self, engine: TrainingEngine) -> None:
        """Makes all ranks sample texts up to the maximum length under ZeRO-3, so that they make the same number of
        forward passes."""
        self.sampler.lockstep = engine.zero_stage == 3

    def counts(self) -> dict[str, float]:
        """Returns no metrics."""
        return {}

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Saves the model (or its LoRA) and tokenizer with `save_pretrained`, and the files of image tokens, such as
        the codebook. state: the gathered state dict of `self.module`."""
        write_model(self.module.model, folder, state)
        self.tokenizer.save_pretrained(folder)
        self.writer.save(folder)
        use_default_permissions(folder)
