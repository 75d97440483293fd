"""Parses and checks responses of vLLM before they are trained on."""

from __future__ import annotations

import base64
import binascii
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmrl.generation.sampling import Sampling

ROUNDING = 1e-3  # largest log-probability; rounding may lift it above 0


@dataclass(frozen=True)
class Answer:
    """A sampled response."""

    ids: Tensor  # [token] int64, the end token included
    logp: Tensor  # [token] fp32
    # [token of prompt and response without the last, layer, k] int16: the experts of a mixture, if they were requested
    experts: Tensor | None = None


class BadAnswer(ValueError):
    """Raised for a response that cannot be used. The message is the reason in a few words."""


def check(answer: Answer, limit: int, sampling: Sampling, eos: tuple[int, ...]) -> None:
    """Checks that a response fits its request: length, vocabulary, suppressed tokens, log-probabilities and end token.

    limit: maximum number of tokens. Raises BadAnswer if it does not fit.
    """
    count, ids, logp = len(answer.ids), answer.ids, answer.logp
    if not 1 <= count <= limit:
        raise BadAnswer(f"a response has {count} tokens, but 1 to {limit} were requested")
    if len(logp) != count:
        raise BadAnswer(f"a response has {len(logp)} log-probabilities for {count} tokens")
    in_vocabulary = (ids >= 0) & ((ids < sampling.vocabulary) if sampling.vocabulary else ids.ge(0))
    if not in_vocabulary.all():
        raise BadAnswer(f"a response holds the token {int(ids[~in_vocabulary][0])}, which is not in the vocabulary")
    allowed = ~torch.isin(ids, torch.tensor(sampling.suppressed, dtype=torch.int64))
    if not allowed.all():
        raise BadAnswer(f"a response holds the token {int(ids[~allowed][0])}, which must not be sampled")
    possible = logp.isfinite() & (logp <= ROUNDING)
    if not possible.all():
        raise BadAnswer(f"a response gives a token the log-probability {float(logp[~possible][0]):g}")
    ends = torch.isin(ids, torch.tensor(eos))
    if ends[:-1].any():
        raise BadAnswer("a response continues after its end token")
    if count < limit and not ends[-1]:
        raise BadAnswer(f"a response ends after {count} of {limit} tokens without an end token")


def read(payload: object, count: int, limit: int, sampling: Sampling, eos: tuple[int, ...]) -> list[Answer]:
    """Parses an answer of /inference/v1/generate with `count` responses of at most `limit` tokens each. Raises
    BadAnswer like `check`, and if the form of the answer or the number of responses is wrong."""
    answers = [_answer(choice) for choice in choices(payload)]
    if len(answers) != count:
        raise BadAnswer(f"it has {len(answers)} responses, but {count} were requested")
    for answer in answers:
        check(answer, limit, sampling, eos)
    return answers


def choices(payload: object) -> list[dict[str, Any]]:
    """Returns the responses in an answer's JSON. Raises BadAnswer if it has none."""
    rows = payload.get("choices") if isinstance(payload, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise BadAnswer("the answer is not a JSON object with a list `choices`")
    return rows


def prompt_ids(payload: dict[str, Any]) -> list[int]:
    """Returns the ids of the prompt's tokens. Raises BadAnswer if the answer lacks them."""
    return _integers(payload.get("prompt_token_ids"), "prompt_token_ids")


def versions(payload: object) -> set[str]:
    """Returns the versions of the weights with which the responses were sampled. Raises BadAnswer if one is missing."""
    try:
        return {part["version"] for choice in choices(payload) for part in choice["weight_versions"]}
    except (KeyError, TypeError):
        raise BadAnswer("a response does not name the version of the weights that sampled it") from None


def _answer(choice: dict[str, Any]) -> Answer:
    """Parses one response. Raises BadAnswer if it is not valid."""
    try:
        logp = [token["logprob"] for token in choice["logprobs"]["content"]]
    except (KeyError, TypeError):
        raise BadAnswer("a response has no log-probabilities") from None
    if not all(type(value) in (int, float) and abs(value) < 1e30 for value in logp):  # False for NaN, too
        raise BadAnswer(f"a response has log-probabilities that are not finite numbers: {str(logp)[:80]}")
    ids = torch.tensor(_integers(choice.get("token_ids"), "token_ids"), dtype=torch.int64)
    return Answer(ids, torch.tensor(logp, dtype=torch.float32), _experts(choice.get("routed_experts")))


def _integers(values: object, name: str) -> list[int]:
    """Returns a list of token ids. name: its key, for the message. Raises BadAnswer if it is not a list of integers."""
    if not isinstance(values, list) or not all(type(value) is int and abs(value) < 2**31 for value in values):
        raise BadAnswer(f"{name} is not a list of tokens: {str(values)[:80]}")
    return values


def _experts(text: Any) -> Tensor | None:
    """Decodes the experts that each token was routed to, from a .npy file in base64; None if the response has none.

    Raises BadAnswer if it is not an array."""
    if text is None:
        return None
    try:
        return experts_tensor(np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False))
    except (ValueError, TypeError, EOFError, OSError, binascii.Error) as error:
        raise BadAnswer(f"routed_experts is not an array: {error}") from None


def experts_tensor(experts: NDArray[Any] | None) -> Tensor | None:
    """Converts vLLM's array of experts, which has the narrowest unsigned dtype, to a tensor."""
    return None if experts is None else torch.from_numpy(experts.astype(np.int16))
