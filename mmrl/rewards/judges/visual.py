"""A vision-language model as judge of one image (RewardDance), or of two images against each other (Pref-GRPO).

A judge gets a question that one word answers, and the probabilities of the two possible answers are read. It is an
endpoint with OpenAI's protocol (vLLM, SGLang, a hosted model), or a model in this process.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal, TypeVar

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
Answer = TypeVar("Answer")
MAX_TOP_LOGPROBS = 20  # most alternatives of a token that OpenAI's protocol returns


@dataclass(frozen=True)
class JudgeQuestion:
    """A question to a judge, with the images that it is about."""

    images: tuple[Image.Image, ...]
    text: str


class Endpoint:
    """A judge behind POST {base_url}/chat/completions. An answer that is not among the most probable first tokens has
    probability 0.

    deadline_s, retries: see `mmrl.rewards.services.http.post`, which raises UserError. api_key_env: name of the
    environment variable that holds the key. concurrency: the largest number of requests at a time. think_tokens: tokens
    that the judge may generate first; its verdict is then the last token that is one of the answers.
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
        check_address("base_url", base_url, deadline_s, retries)
        if concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, not {concurrency}")
        if think_tokens < 0:
            raise ValueError(f"think_tokens must not be negative, not {think_tokens}")
        self.think_tokens = think_tokens
        if api_key_env is not None and api_key_env not in os.environ:
            raise ValueError(
                f"api_key_env: the environment variable {api_key_env} is not set; set it to the endpoint's key"
            )
        self.url, self.model = f"{base_url.rstrip('/')}/chat/completions", model
        self.deadline_s, self.retries, self.api_key_env, self.concurrency = (
            deadline_s,
            retries,
            api_key_env,
            concurrency,
        )

    def ask(self, questions: Sequence[JudgeQuestion], answers: tuple[str, str]) -> list[tuple[float, float]]:
        """Returns for each question the probabilities that the response begins with each of the two answers. Tokens are
        compared without case and white space."""
        return self._concurrently(lambda question: self._ask(question, answers), questions)

    def write(self, questions: Sequence[JudgeQuestion], max_tokens: int) -> list[str]:
        """Returns the answers of at most `max_tokens` tokens. Raises UserError for a server that gives none."""
        return self._concurrently(lambda question: self._write(question, max_tokens), questions)

    def _concurrently(
        self, function: Callable[[JudgeQuestion], Answer], questions: Sequence[JudgeQuestion]
    ) -> list[Answer]:
        """Returns the function's value for each question, computed in threads."""
        with ThreadPoolExecutor(self.concurrency) as pool:
            futures = [pool.submit(function, question) for question in questions]
            try:
                return [future.result() for future in futures]
            except UserError:
                pool.shutdown(wait=False, cancel_futures=True)  # the other requests would only wait for the same outage
                raise

    def _ask(self, question: JudgeQuestion, answers: tuple[str, str]) -> tuple[float, float]:
        """Sends one question and returns the probabilities of the two answers at the verdict: the first token, or with
        `think_tokens` the last one that is an answer; 0 for both without a verdict."""
        answer = self._post(question, max_tokens=self.think_tokens + 1, logprobs=True, top_logprobs=MAX_TOP_LOGPROBS)
        try:
            content_tokens = answer["choices"][0]["logprobs"]["content"]
            position = _verdict_position(content_tokens, answers) if self.think_tokens else 0
            if position is None:
                return 0.0, 0.0
            tokens = content_tokens[position]["top_logprobs"]
            alternatives = [(str(token["token"]), math.exp(token["logprob"])) for token in tokens]
        except (KeyError, IndexError, TypeError) as error:
            raise UserError(
                f"judge {self.url} answered without choices[0].logprobs.content[0].top_logprobs ({error!r}); "
                f"choose a server and a model ({self.model}) that return log-probabilities"
            ) from None
        first, second = (sum(p for token, p in alternatives if _is_word(token, word)) for word in answers)
        return first, second

    def _write(self, question: JudgeQuestion, max_tokens: int) -> str:
        """Sends one question and returns the text of the answer."""
        answer = self._post(question, max_tokens=max_tokens)
        try:
            return str(answer["choices"][0]["message"]["content"])
        except (KeyError, IndexError, TypeError) as error:
            raise UserError(
                f"judge {self.url} answered without choices[0].message.content ({error!r}); choose a server of "
                "OpenAI's chat API"
            ) from None

    def _post(self, question: JudgeQuestion, **settings: Any) -> Any:
        """Sends one question and returns the server's JSON. settings: further keys of the request."""
        headers = {"Content-Type": "application/json"}
        if self.api_key_env is not None:
            headers["Authorization"] = f"Bearer {os.environ[self.api_key_env]}"
        urls = [f"data:image/png;base64,{png_base64(image)}" for image in question.images]
        content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        request = {
            "model": self.model,
            "messages": [{"role": "user", "content": [*content, {"type": "text", "text": question.text}]}],
            "temperature": 0,
            **settings,
        }
        body = json.dumps(request).encode()
        return post(self.url, body, headers, deadline_s=self.deadline_s, retries=self.retries)


def _verdict_position(tokens: Sequence[Any], answers: tuple[str, str]) -> int | None:
    """Returns the position of the last token that is one of the answers; None if there is none."""
    positions = [i for i, token in enumerate(tokens) if any(_is_word(str(token["token"]), word) for word in answers)]
    return positions[-1] if positions else None


class LocalJudge:
    """A judge in this process: an image-text model of transformers, from a folder or a hub name. It answers
    `batch_size` questions in one forward pass. Raises ValueError if it cannot be loaded, and if it has no token for an
    answer."""

    def __init__(self, path: str, answers: Sequence[str], batch_size: int, dtype: str, device: str | None):
        from transformers import AutoModelForImageTextToText, AutoProcessor

        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        try:
            self.processor = AutoProcessor.from_pretrained(path, padding_side="left", trust_remote_code=False)
            model = AutoModelForImageTextToText.from_pretrained(path, dtype=dtype, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ValueError(f"judge {path!r} cannot be loaded: {error}") from error
        self.model: Any = model.eval().requires_grad_(False)
        self.path, self.batch_size, self.device = path, batch_size, device
        tokenizer = self.processor.tokenizer
        self._tokens: list[str] = tokenizer.batch_decode([[number] for number in range(len(tokenizer))])
        self._ids: dict[str, list[int]] = {}
        for word in answers:
            self._token_ids(word)  # raises ValueError if no token is this word

    @torch.no_grad()
    def ask(self, questions: Sequence[JudgeQuestion], answers: tuple[str, str]) -> list[tuple[float, float]]:
        """Returns the same as `Endpoint.ask`. Raises ValueError for an answer that is not one token of the judge."""
        ids, result = [self._token_ids(word) for word in answers], list[tuple[float, float]]()
        for inputs in self._batches(questions):
            logits = self.model(**inputs, logits_to_keep=1).logits[:, -1].float()
            probabilities = logits.softmax(-1).cpu()
            columns = (probabilities[:, word_ids].sum(1).tolist() for word_ids in ids)
            result += zip(*columns, strict=True)
        return result

    @torch.no_grad()
    def write(self, questions: Sequence[JudgeQuestion], max_tokens: int) -> list[str]:
        """Returns the answers by greedy decoding, of at most `max_tokens` tokens."""
        texts: list[str] = []
        for inputs in self._batches(questions):
            tokens = self.model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
            answers = tokens[:, inputs["input_ids"].shape[1] :]
            texts += self.processor.tokenizer.batch_decode(answers, skip_special_tokens=True)
        return texts

    def _batches(self, questions: Sequence[JudgeQuestion]) -> Iterator[Any]:
        """Yields the model's inputs for `batch_size` questions at a time, on the model's device."""
        device = device_of(self.device)
        self.model.to(device)
        for first in range(0, len(questions), self.batch_size):
            part = questions[first : first + self.batch_size]
            yield self.processor(
                text=[self._chat(question) for question in part],
                images=[list(question.images) for question in part],
                padding=True,
                return_tensors="pt",
            ).to(device)

    def _token_ids(self, word: str) -> list[int]:
        """Returns the ids of the tokens that are `word`. Raises ValueError if there are none."""
        if word not in self._ids:
            self._ids[word] = [i for i, token in enumerate(self._tokens) if _is_word(token, word)]
        if not self._ids[word]:
            raise ValueError(f"judge {self.path!r}: {word!r} is not one token of its tokenizer; choose other answers")
        return self._ids[word]

    def _chat(self, question: JudgeQuestion) -> str:
        """Returns the question in the model's chat template."""
        content = [*({"type": "image"} for _ in question.images), {"type": "text", "text": question.text}]
        name = str(self.processor.tokenizer.name_or_path)
        return render_template(name, self.processor, [{"role": "user", "content": content}])


def _is_word(token: str, word: str) -> bool:
    """Returns whether a token is `word`, ignoring case and white space."""
    return token.strip().lower() == word.lower()


class JudgeReward:
    """The base class of rewards by a judge, with their common options.

    The judge is an endpoint, given by `base_url` and `model` (see `Endpoint`), or a model in this process, given by
    `path` (see `LocalJudge`). `deadline_s`, `retries`, `concurrency` and `api_key_env` are for an endpoint;
    `batch_size`, `dtype` and `device` for a model in this process. A subclass may set `answers`, words that must be
    tokens of the judge, and `think_tokens` before it calls the constructor.
    """

    answers: tuple[str, ...] = ()
    think_tokens: int = 0

    def __init__(
        self,
        *,
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
    ):
        if self.think_tokens and path is not None:
            raise ValueError(
                "think_tokens is for an endpoint, since a model in this process answers with one word; remove it"
            )
        self.judge: Endpoint | LocalJudge
        if base_url is not None and model is not None and path is None:
            self.judge = Endpoint(base_url, model, deadline_s, retries, api_key_env, concurrency, self.think_tokens)
        elif path is not None and base_url is None and model is None:
            self.judge = LocalJudge(path, self.answers, batch_size, dtype, device)
        else:
            keys = [
                key for key, value in (("base_url", base_url), ("model", model), ("path", path)) if value is not None
            ]
            raise ValueError(
                "give base_url and model for an endpoint, or path for a model in this process; given: "
                f"{', '.join(keys) or 'none of them'}"
            )


class TwoWordJudgeReward(JudgeReward):
    """The base class of rewards by a judge that answers with one of two words. think_tokens: see `Endpoint`. The other
    options are those of `JudgeReward`."""

    answers: tuple[str, str]

    def __init__(self, *, question: str, answers: Sequence[str], think_tokens: int = 0, **judge: Any):
        if len(answers) != 2 or len({answer.lower() for answer in answers}) != 2:
            raise ValueError(f"answers must be two different words, not {list(answers)}")
        if "{prompt}" not in question:
            raise ValueError("question must contain {prompt}, which the prompt's text replaces")
        self.question, self.answers, self.think_tokens = question, (answers[0], answers[1]), think_tokens
        super().__init__(**judge)

    def _question(self, sample: Sample, *images: Image.Image) -> JudgeQuestion:
        return JudgeQuestion(images, self.question.replace("{prompt}", sample.prompt.text))


class VlmJudge(TwoWordJudgeReward):
    """P(yes) / (P(yes) + P(no)), 0 to 1, of a judge that is asked whether the image is good.

    normalise: False gives P(yes), the reward of RewardDance (Wu et al. 2025, arXiv:2509.08826). answers: the words for
    yes and no. None if the judge gives neither word any probability, and for an image with NaN or inf. The other
    options are those of `TwoWordJudgeReward`.
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

    def _build_question(self, sample: Sample) -> JudgeQuestion:
        """Returns the question about a sample; subclasses add images."""
        return self._question(sample, as_pil(image_of(sample)))

    def _score(self, samples: list[Sample]) -> list[Score]:
        """Returns P(yes) / (P(yes) + P(no)) for each sample, or P(yes) if `normalise` is False; None if the judge gives
        neither word any probability."""
        questions = [self._build_question(sample) for sample in samples]
        result: list[Score] = []
        for yes, no in self.judge.ask(questions, self.answers):
            total = yes + no if self.normalise else 1.0
            result.append(yes / total if yes + no > 0 else None)
        return result


class VlmPreference(TwoWordJudgeReward):
    """The share of pairwise comparisons that an image wins in its group, 0 to 1 (Pref-GRPO, Wang et al. 2025,
    arXiv:2508.20751).

    The judge sees each of the n (n - 1) / 2 pairs of a group and names the better image, by the more probable of the
    two `answers` (for the first and the second image). A win counts 1, a tie 0.5. orders: "both" asks each pair in both
    orders and averages, so that a judge that always prefers the first image produces ties. "random" asks once, in an
    order that depends on `seed`, the prompt's id and the pair.

    A pair is left out if the judge gives neither answer any probability. None for an image without pairs, for one that
    is alone in its group, and for one with NaN or inf. The other options are those of
    `TwoWordJudgeReward`.
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
        """Returns for each image of a group the mean of its comparisons with the others: 1 for a win, 0.5 for a tie, 0
        for a loss; None without comparisons."""
        images = [as_pil(image_of(sample)) for sample in samples]
        pairs = [order for pair in combinations(range(len(samples)), 2) for order in self._orders(samples[0], pair)]
        questions = [self._question(samples[i], images[i], images[j]) for i, j in pairs]
        wins: list[list[float]] = [[] for _ in samples]
        for (i, j), (first, second) in zip(pairs, self.judge.ask(questions, self.answers), strict=True):
            if first + second > 0:
                win = 0.5 if first == second else float(first > second)
                wins[i].append(win)
                wins[j].append(1 - win)
        return [sum(row) / len(row) if row else None for row in wins]

    def _orders(self, sample: Sample, pair: tuple[int, int]) -> list[tuple[int, int]]:
        """Returns the orders in which the judge sees a pair of rows: (i, j) and (j, i), or with orders="random" one of
        these, by the seed, the prompt's id and the pair."""
        i, j = pair
        if self.orders == "both":
            return [(i, j), (j, i)]
        swap = random.Random(f"{self.seed} {sample.prompt.id} {i} {j}").random() < 0.5
        return [(j, i) if swap else (i, j)]
