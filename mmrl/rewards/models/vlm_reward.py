"""Reward models that are a vision-language model with a head on the hidden states of special tokens: HPSv3, VideoAlign,
EditReward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor, nn

from mmrl.errors import UserError
from mmrl.rewards.models.weights import linear_chain, read_weights, with_prefix
from mmrl.rewards.types import Score, as_pil, device_of, image_of, video_of
from mmrl.rollouts import Sample
from mmrl.runtime.template_limits import render_template

PLACEHOLDER = "{text_prompt}"  # replaced by the prompt in an instruction
BATCH_SIZE = 8  # samples that are scored at once
Normal = tuple[float, float]  # mean and std


class VlmReward:
    """The sum over `tokens` of weight x (head(hidden state of the token) - mean) / std, for an image or a video and an
    instruction that contains the prompt and the tokens. Models of this type:

    HPSv3 (arXiv:2508.03789)        Qwen2-VL, one token <|Reward|>, whose head gives a mean and a spread
    VideoAlign (arXiv:2501.13918)   Qwen2-VL, tokens <|VQ_reward|>, <|MQ_reward|>, <|TA_reward|>, each with `normal`
    EditReward (arXiv:2509.26346)   Qwen2.5-VL, source and result, one head for each instruction

    model        folder of the base model: configuration, processor and weights
    weights      the published file: the head, `rm_head.*` or `rm_heads.NAME.*`, and the trained model; if it has no
                 model weights, those of `model` are used
    instruction  file of the text, with {text_prompt} and the tokens; for several heads, a file for each, by name. The
                 score is the mean over heads
    tokens       weights by token, in the published order, in which missing ones are added to the vocabulary. If the
                 head has as many outputs as there are tokens, output i belongs to token i; else the first is used
    normal       mean and std by token
    source       whether the prompt's first image comes before the generated one
    min_pixels, max_pixels   bounds of an image's size for the processor

    None for an image or a video with NaN or inf. Raises ValueError if model and weights do not fit.
    """

    scope: Literal["sample"] = "sample"

    def __init__(
        self,
        *,
        model: str,
        weights: str,
        instruction: str | Mapping[str, str],
        tokens: Mapping[str, float],
        normal: Mapping[str, Normal] | None = None,
        source: bool = False,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        dtype: Literal["float32", "bfloat16"] = "float32",
        device: str | None = None,
    ) -> None:
        self.tokens, self.normal = _check_tokens(tokens, normal or {}), dict(normal or {})
        self.source, self.device = source, device
        state = read_weights(weights)
        # instructions by name of their head; "" for a single head
        named = {"": instruction} if isinstance(instruction, str) else dict(instruction)
        self.instructions = {name: _instruction(path, self.tokens) for name, path in named.items()}
        self.heads = {name: _head(state, name, weights) for name in named}
        self.processor = _processor(model, self.tokens, min_pixels, max_pixels)
        self.token_ids = [self.processor.tokenizer.convert_tokens_to_ids(token) for token in self.tokens]
        self.model = _model(model, state, len(self.processor.tokenizer), dtype)

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Scores samples, BATCH_SIZE at once; None for an image or video with NaN or inf. Raises UserError for a sample
        without an image or a video, or without the source image if `source` is set."""
        scores: list[Score] = [None] * len(samples)
        finite = [row for row, sample in enumerate(samples) if bool(_generated(sample).isfinite().all())]
        for first in range(0, len(finite), BATCH_SIZE):
            rows = finite[first : first + BATCH_SIZE]
            for row, value in zip(rows, self._score([samples[row] for row in rows]), strict=True):
                scores[row] = value
        return scores

    def _score(self, samples: list[Sample]) -> list[float]:
        """Returns the score of each sample, the mean over heads."""
        values = [self._head_scores(name, samples) for name in self.instructions]
        mean: list[float] = torch.stack(values).mean(0).tolist()
        return mean

    @torch.no_grad()
    def _head_scores(self, name: str, samples: list[Sample]) -> Tensor:
        """Returns the scores [rollout] fp32 of one head, with its instruction."""
        device = device_of(self.device)
        inputs = self._inputs(self.instructions[name], samples).to(device)
        hidden = self.model.to(device).model(**inputs).last_hidden_state
        scores = torch.zeros(len(samples))
        for i, (token, weight) in enumerate(self.tokens.items()):
            is_token = inputs["input_ids"] == self.token_ids[i]
            for sample, count in zip(samples, is_token.sum(1).tolist(), strict=True):
                if count != 1:
                    raise UserError(
                        f"prompt {sample.prompt.id!r} and its instruction have the token {token} {count} times "
                        "together; the instruction must have it once, and no prompt may have it"
                    )
            outputs = self.heads[name].to(device)(hidden[is_token].float())
            # a head with one output for each token: output i; otherwise the first output
            value = outputs[:, i if outputs.shape[1] == len(self.tokens) > 1 else 0].cpu()
            mean, std = self.normal.get(token, (0.0, 1.0))
            scores += weight * (value - mean) / std
        return scores

    def _inputs(self, instruction: str, samples: list[Sample]) -> Any:
        """Returns the model's inputs: the samples' chats with their images and videos. Raises UserError for a prompt
        without the image that `source` needs."""
        images: list[Image.Image] = []
        videos: list[list[Image.Image]] = []
        texts = []
        for sample in samples:
            media = []
            if self.source:
                if not sample.prompt.images:
                    raise UserError(
                        f"prompt {sample.prompt.id!r} has no image, which source: true needs; add one to its row"
                    )
                images.append(sample.prompt.images[0].convert("RGB"))
                media.append("image")
            if sample.frames is None:
                images.append(as_pil(image_of(sample)))
                media.append("image")
            else:
                videos.append([as_pil(frame) for frame in video_of(sample)])
                media.append("video")
            text = {"type": "text", "text": instruction.replace(PLACEHOLDER, sample.prompt.text)}
            turn = {"role": "user", "content": [*({"type": medium} for medium in media), text]}
            name = str(self.processor.tokenizer.name_or_path)
            texts.append(render_template(name, self.processor, [turn]))
        return self.processor(
            text=texts,
            images=images or None,
            videos=videos or None,
            padding=True,
            return_tensors="pt",
            do_sample_frames=False,
        )


def _generated(sample: Sample) -> Tensor:
    """Returns the generated image or video."""
    return image_of(sample) if sample.frames is None else video_of(sample)


def _check_tokens(tokens: Mapping[str, float], normal: Mapping[str, Normal]) -> dict[str, float]:
    """Returns the weights of reward tokens as floats. Raises ValueError for bad weights, and for a bad mean or std in
    `normal`."""
    if not tokens or not all(isinstance(weight, int | float) for weight in tokens.values()):
        raise ValueError(f"tokens must be a mapping of special tokens to weights, not {dict(tokens)!r}")
    unknown = next((token for token in normal if token not in tokens), None)
    if unknown is not None:
        raise ValueError(f"normal: {unknown!r} is not one of the tokens, which are {', '.join(tokens)}")
    for token, pair in normal.items():
        if len(pair) != 2 or not pair[1] > 0:
            raise ValueError(f"normal: {token} must have [mean, std] with a std above 0, not {list(pair)}")
    return {token: float(weight) for token, weight in tokens.items()}


def _instruction(path: str, tokens: Mapping[str, float]) -> str:
    """Reads an instruction. Raises ValueError if the file, the placeholder or a token is missing."""
    if not Path(path).is_file():
        raise ValueError(f"instruction: there is no file {path}")
    text = Path(path).read_text()
    missing = [part for part in (PLACEHOLDER, *tokens) if part not in text]
    if missing:
        raise ValueError(f"instruction: the text in {path} must contain {', '.join(missing)}")
    return text


def _head(state: Mapping[str, Tensor], name: str, path: str) -> nn.Sequential:
    """Builds a head: one linear layer, or several with a ReLU between them."""
    prefix = f"rm_heads.{name}." if name else "rm_head."
    return linear_chain(with_prefix(state, prefix), nn.ReLU, f"{path}: {prefix}*")


def _processor(path: str, tokens: Mapping[str, float], min_pixels: int | None, max_pixels: int | None) -> Any:
    """Loads the model's processor, adds the reward tokens and bounds the pixels. Raises ValueError if it cannot be
    loaded."""
    from transformers import AutoProcessor

    bounds = {"min_pixels": min_pixels, "max_pixels": max_pixels}
    try:
        processor = AutoProcessor.from_pretrained(path, **{key: n for key, n in bounds.items() if n is not None})
    except (OSError, ValueError) as error:
        raise ValueError(f"model {path!r} cannot be loaded: {' '.join(str(error).split()):.200}") from None
    processor.tokenizer.padding_side = "right"
    known = processor.tokenizer.get_vocab()
    processor.tokenizer.add_tokens([token for token in tokens if token not in known], special_tokens=True)
    return processor


def _model(path: str, state: Mapping[str, Tensor], vocabulary: int, dtype: str) -> Any:
    """Loads the image-text model of the folder `path`. Its weights are those in `state`, or, if `state` has only heads,
    those of the folder. vocabulary: number of tokens with the reward tokens. Raises ValueError if weights are missing
    or do not fit."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch_dtype: torch.dtype = vars(torch)[dtype]
    trained = {name: value for name, value in state.items() if not name.startswith(("rm_head.", "rm_heads."))}
    try:
        if not trained:
            model: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch_dtype)
            if model.get_input_embeddings().num_embeddings < vocabulary:
                raise ValueError(
                    "weights hold only the reward head, and the model lacks embeddings of the reward tokens; give "
                    "weights of the whole model"
                )
            return model.eval().requires_grad_(False)
        config = AutoConfig.from_pretrained(path)
        rows = next(value.shape[0] for name, value in trained.items() if name.endswith("embed_tokens.weight"))
        config.get_text_config().vocab_size = rows
        # the model's own class, since its weights come from `state` and not from a folder
        model_class: Any = AutoModelForImageTextToText._model_mapping[type(config)]
        model, report = model_class.from_pretrained(
            None, config=config, state_dict=trained, dtype=torch_dtype, output_loading_info=True
        )
    except (KeyError, OSError, RuntimeError, StopIteration) as error:
        raise ValueError(f"model {path!r} cannot be loaded: {' '.join(str(error).split()):.200}") from None
    missing = sorted(set(report["missing_keys"]) - {"lm_head.weight"})  # only hidden states are used
    wrong = [*missing, *sorted(report["unexpected_keys"]), *(str(key) for key in report["mismatched_keys"])]
    if wrong:
        raise ValueError(
            f"weights do not fit the model of {path}: {len(wrong)} parameters differ, the first is {wrong[0]}"
        )
    return model.eval().requires_grad_(False)
