"""A vision-language model as judge: of one image (RewardDance), or of two against each other (Pref-GRPO).

A judge gets a question that is answered by one word, and the probabilities of the two possible answers are read: from
an endpoint with OpenAI's protocol (vLLM, SGLang, a hosted model), or from a model in this process.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal, Protocol

import torch
from PIL import Image

from mmrl.errors import UserError
from mmrl.rewards.services.http import check_address, png_base64, post
from mmrl.rewards.types import Score, as_pil, device_of, image_of, score_finite
from mmrl.rollouts import Sample
from mmrl.runtime.template_limits import render_template

IS_IT_GOOD = 'Does this image show "{prompt}", correctly and in good quality? Answer with one word, yes or no.'
WHICH_IS_BETTER = (
    'Which of these two images shows "{prompt}" more correctly and in better quality? '
    "Answer with one digit, 1 for the first or 2 for the second."
)
TOP = 20  # the most alternatives that OpenAI's protocol gives


@dataclass(frozen=True)
class JudgeQuestion:
    images: tuple[Image.Image, ...]
    text: str


class Judge(Protocol):
    def ask(self, questions: Sequence[JudgeQuestion], answers: tuple[str, str]) -> list[tuple[float, float]]:
        """Returns for each question the probabilities that the response begins with each of the two answers: sums over
        tokens that equal the answer but for case and white space."""
        ...


class Endpoint:
    """A model behind POST {base_url}/chat/completions. An answer that is not among the TOP first tokens has probability
    0.

    `api_key_env` names the environment variable that holds the key. At most `concurrency` requests are under way; each
    has `deadline_s` and `retries` as `mmrl.rewards.services.http.post`, and raises UserError as it does. With
    `think_tokens` the judge may generate so many tokens first: its verdict is the last token that is one of the
    answers, if any.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        deadline_s: float,
        retries: int,
        api_key_env: str | None,
        concurrency: int,
        think_tokens: int = 0,
    ):
        check_address(base_url, deadline_s, retries)
        if concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, not {concurrency}")
        if think_tokens < 0:
            raise ValueError(f"think_tokens must not be negative, not {think_tokens}")
        self.think_tokens = think_tokens
        if api_key_env is not None and api_key_env not in os.environ:
            raise ValueError(f"api_key_env: the environment has no {api_key_env}")
        self.url, self.model = f"{base_url.rstrip('/')}/chat/completions", model
        self.deadline_s, self.retries, self.api_key_env, self.concurrency = (
            deadline_s,
            retries,
            api_key_env,
            concurrency,
        )

    def ask(self, questions: Sequence[JudgeQuestion], answers: tuple[str, str]) -> list[tuple[float, float]]:
        with ThreadPoolExecutor(self.concurrency) as pool:
            futures = [pool.submit(self._ask, question, answers) for question in questions]
            try:
                return [future.result() for future in futures]
            except UserError:
                pool.shutdown(wait=False, cancel_futures=True)  # the others would only wait for the same outage
                raise

    def _ask(self, question: JudgeQuestion, answers: tuple[str, str]) -> tuple[float, float]:
        headers = {"Content-Type": "application/json"}
        if self.api_key_env is not None:
            headers["Authorization"] = f"Bearer {os.environ[self.api_key_env]}"
        urls = [f"data:image/png;base64,{png_base64(image)}" for image in question.images]
        content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        request = {
            "model": self.model,
            "messages": [{"role": "user", "content": [*content, {"type": "text", "text": question.text}]}],
            "max_tokens": self.think_tokens + 1,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": TOP,
        }
        body = json.dumps(request).encode()
        answer = post(self.url, body, headers, deadline_s=self.deadline_s, retries=self.retries)
        try:
            content_tokens = answer["choices"][0]["logprobs"]["content"]
            position = _verdict(content_tokens, answers) if self.think_tokens else 0
            if position is None:
                return 0.0, 0.0
            tokens = content_tokens[position]["top_logprobs"]
            alternatives = [(str(token["token"]), math.exp(token["logprob"])) for token in tokens]
        except (KeyError, IndexError, TypeError) as error:
            raise UserError(
                f"judge {self.url} answered without choices[0].logprobs.content[0].top_logprobs ({error!r}); "
                f"does {self.model} give log-probabilities?"
            ) from None
        first, second = (sum(p for token, p in alternatives if _is_word(token, word)) for word in answers)
        return first, second


def _verdict(tokens: Sequence[Any], answers: tuple[str, str]) -> int | None:
    """Returns the position of the last token that is one of the answers; None where there is none."""
    positions = [i for i, token in enumerate(tokens) if any(_is_word(str(token["token"]), word) for word in answers)]
    return positions[-1] if positions else None


class LocalModel:
    """An image-text model of transformers from a folder or a hub name, `batch_size` questions in one forward.

    Raises ValueError where it can not be loaded, and where it has no token for an answer.
    """

    def __init__(self, path: str, answers: tuple[str, str], batch_size: int, dtype: str, device: str | None):
        from transformers import AutoModelForImageTextToText, AutoProcessor

        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        try:
            self.processor = AutoProcessor.from_pretrained(path, padding_side="left", trust_remote_code=False)
            model = AutoModelForImageTextToText.from_pretrained(path, dtype=dtype, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ValueError(f"judge {path!r} can not be loaded: {error}") from error
        self.model: Any = model.eval().requires_grad_(False)
        self.batch_size, self.device = batch_size, device
        tokenizer = self.processor.tokenizer
        tokens = tokenizer.batch_decode([[number] for number in range(len(tokenizer))])
        self._ids = {word: [number for number, t in enumerate(tokens) if _is_word(t, word)] for word in answers}
        for word, ids in self._ids.items():
            if not ids:
                raise ValueError(f"judge {path!r} has no token {word!r}; choose other answers")

    @torch.no_grad()
    def ask(self, questions: Sequence[JudgeQuestion], answers: tuple[str, str]) -> list[tuple[float, float]]:
        device, result = device_of(self.device), list[tuple[float, float]]()
        self.model.to(device)
        for first in range(0, len(questions), self.batch_size):
            part = questions[first : first + self.batch_size]
            inputs = self.processor(
                text=[self._chat(question) for question in part],
                images=[list(question.images) for question in part],
                padding=True,
                return_tensors="pt",
            ).to(device)
            logits = self.model(**inputs, logits_to_keep=1).logits[:, -1].float()
            p = logits.softmax(-1).cpu()
            result += zip(*(p[:, self._ids[word]].sum(1).tolist() for word in answers), strict=True)
        return result

    def _chat(self, question: JudgeQuestion) -> str:
        content = [*({"type": "image"} for _ in question.images), {"type": "text", "text": question.text}]
        name = str(self.processor.tokenizer.name_or_path)
        return render_template(name, self.processor.apply_chat_template, [{"role": "user", "content": content}])


def _is_word(token: str, word: str) -> bool:
    return token.strip().lower() == word.lower()


class Judged:
    """A base class of judges with their common options.

    Exactly one of `base_url` with `model` (an endpoint, see `Endpoint`) and `path` (a model in this process, see
    `LocalModel`) says who judges; `deadline_s`, `retries`, `concurrency`, `api_key_env` and `think_tokens` are for the
    first, `batch_size`, `dtype` and `device` for the second.
    """

    def __init__(
        self,
        *,
        question: str,
        answers: Sequence[str],
        base_url: str | None = None,
        model: str | None = None,
        path: str | None = None,
        deadline_s: float = 60.0,
        retries: int = 3,
        concurrency: int = 8,
        api_key_env: str | None = None,
        batch_size: int = 8,
        dtype: str = "auto",
        device: str | None = None,
        think_tokens: int = 0,
    ):
        if think_tokens and path is not None:
            raise ValueError("think_tokens is for an endpoint: a model in this process says one word")
        if (base_url is None) == (path is None) or (base_url is None) != (model is None):
            raise ValueError("give base_url and model for an endpoint, or path for a model in this process")
        if len(answers) != 2 or len({answer.lower() for answer in answers}) != 2:
            raise ValueError(f"answers must be two different words, not {list(answers)}")
        if "{prompt}" not in question:
            raise ValueError("question must hold {prompt}, where the prompt's text belongs")
        self.question, self.answers = question, (answers[0], answers[1])
        self.judge: Judge
        if base_url is not None and model is not None:
            self.judge = Endpoint(base_url, model, deadline_s, retries, api_key_env, concurrency, think_tokens)
        elif path is not None:
            self.judge = LocalModel(path, self.answers, batch_size, dtype, device)

    def _question(self, sample: Sample, *images: Image.Image) -> JudgeQuestion:
        return JudgeQuestion(images, self.question.replace("{prompt}", sample.prompt.text))


class VlmJudge(Judged):
    """P(yes) / (P(yes) + P(no)) of a judge that is asked whether the image is good; 0 to 1.

    With normalise=False it is P(yes), the reward of RewardDance (Wu et al. 2025, arXiv:2509.08826). `answers` are the
    words for yes and no. None where the judge gives neither word any probability, and for an image that holds NaN or
    inf. The other options are those of `Judged`.
    """

    scope: Literal["sample"] = "sample"

    def __init__(
        self,
        *,
        normalise: bool = True,
        question: str = IS_IT_GOOD,
        answers: Sequence[str] = ("yes", "no"),
        **judge: Any,
    ):
        super().__init__(question=question, answers=answers, **judge)
        self.normalise = normalise

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return score_finite(samples, self._score)

    def _question_of(self, sample: Sample) -> JudgeQuestion:
        return self._question(sample, as_pil(image_of(sample)))

    def _score(self, samples: list[Sample]) -> list[Score]:
        questions = [self._question_of(sample) for sample in samples]
        result: list[Score] = []
        for yes, no in self.judge.ask(questions, self.answers):
            certain = yes + no if self.normalise else 1.0
            result.append(yes / certain if yes + no > 0 else None)
        return result


class VlmPreference(Judged):
    """The share of its group that an image beats (Pref-GRPO, Wang et al. 2025, arXiv:2508.20751); 0 to 1.

    Each of the n (n - 1) / 2 pairs of a group is shown to a judge, which has to name the better one: that answer of
    the two `answers` (for the first and for the second image) that is the more probable. A win counts 1, a tie 0.5.
    With orders "both" each pair is asked in both orders and the two outcomes are averaged, so that a judge that always
    prefers one place makes ties; "random" asks once, in an order drawn from `seed`, the prompt's id and the pair. A
    pair for which the judge gives neither answer any probability is left out; None for an image with no pair left, one
    alone in its group, and one that holds NaN or inf. The other options are those of `Judged`.
    """

    scope: Literal["group"] = "group"

    def __init__(
        self,
        *,
        orders: Literal["both", "random"] = "both",
        seed: int = 0,
        question: str = WHICH_IS_BETTER,
        answers: Sequence[str] = ("1", "2"),
        **judge: Any,
    ):
        if orders not in ("both", "random"):
            raise ValueError(f"orders must be both or random, not {orders!r}")
        super().__init__(question=question, answers=answers, **judge)
        self.orders, self.seed = orders, seed

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return score_finite(samples, self._score)

    def _score(self, samples: list[Sample]) -> list[Score]:
        images = [as_pil(image_of(sample)) for sample in samples]
        pairs = [order for pair in combinations(range(len(samples)), 2) for order in self._orders(samples[0], pair)]
        questions = [self._question(samples[i], images[i], images[j]) for i, j in pairs]
        wins: list[list[float]] = [[] for _ in samples]
        for (i, j), (first, second) in zip(pairs, self.judge.ask(questions, self.answers), strict=True):
            if first + second > 0:
                won = 0.5 if first == second else float(first > second)
                wins[i].append(won)
                wins[j].append(1 - won)
        return [sum(row) / len(row) if row else None for row in wins]

    def _orders(self, sample: Sample, pair: tuple[int, int]) -> list[tuple[int, int]]:
        """Returns in which order(s) a pair is shown to the judge: both, or one drawn from seed, prompt and pair."""
        i, j = pair
        if self.orders == "both":
            return [(i, j), (j, i)]
        turned = random.Random(f"{self.seed} {sample.prompt.id} {i} {j}").random() < 0.5
        return [(j, i) if turned else (i, j)]
