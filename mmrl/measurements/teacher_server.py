"""Client of a teacher model on vLLM's OpenAI-compatible server: it asks for the log-probabilities of given tokens.

A request posts lists of token ids to /v1/completions with `prompt_logprobs`. Each choice of the reply has a list with
one entry per token of its prompt. The first entry is null; each other one is an object {token id: {"logprob", "rank",
"decoded_token"}} of the token itself and of the most likely ones at its position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmrl.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from mmrl.protocols.choices import TeacherChoices
    from mmrl.rollouts import Rollouts

# text with digits, accents, tags and white space, which tokenizers split in different ways
PROBE = "The sum of 12 and 345 is 357; naïve façade, <answer>\n\tx² ≠ y</answer>."
Likelihoods = dict[int, float]  # token id -> log-probability, at one position
Tokens = list[tuple[list[int], list[int]]]  # the prompt's and the response's token ids of each rollout


@dataclass(frozen=True)
class TeacherServer:
    """A vLLM server and the name of its model."""

    address: str
    model: str
    batch_size: int  # responses per request
    deadline: float  # seconds until the reply is complete
    retries: int  # requests after a failed one

    def check(self, tokenize: Callable[[str], list[int]]) -> None:
        """Checks that the server replies and has the student's vocabulary.

        tokenize: the student's tokenizer. Raises UserError if the server does not reply, or splits a test string into
        other tokens.
        """
        reply = self._post("tokenize", {"model": self.model, "prompt": PROBE, "add_special_tokens": False})
        teacher_ids, student_ids = reply.get("tokens") or [], tokenize(PROBE)
        if teacher_ids != student_ids:
            pairs = enumerate(zip(teacher_ids, student_ids, strict=False))
            position = next((i for i, (teacher_id, own_id) in pairs if teacher_id != own_id), len(teacher_ids))
            raise UserError(
                f"teacher {self.address} has another vocabulary than the model: it splits a string of "
                f"{len(student_ids)} tokens into {len(teacher_ids)}, which differ from token {position} on; serve a "
                "model with the tokenizer of model.path"
            )

    def likelihoods(self, rollouts: Rollouts, rows: Sequence[int], tokens: Tokens) -> Tensor:
        """Returns the teacher's log-probability of each decision, [rollout, decision].

        rows: the rollouts to compute; all others are NaN. tokens: the token ids of the prompt and of the response of
        each rollout.
        """
        import torch

        logp = torch.full(rollouts.mask.shape, torch.nan)
        for row, entries in self._entries(rows, tokens, count=0):
            _, response = tokens[row]
            for position, (token, entry) in enumerate(zip(response, entries, strict=True)):
                logp[row, position] = entry[token]
        return logp

    def top_k(
        self, rollouts: Rollouts, rows: Sequence[int], tokens: Tokens, count: int, allowed: set[int]
    ) -> TeacherChoices:
        """Returns the `count` most likely tokens at each decision, with their log-probabilities.

        allowed: the ids of tokens that the student may sample; others are left out. Other arguments as in
        `likelihoods`.
        """
        import torch

        from mmrl.protocols.choices import TeacherChoices

        ids = torch.zeros(*rollouts.mask.shape, count, dtype=torch.int64)
        logp = torch.full((*rollouts.mask.shape, count), torch.nan)
        for row, entries in self._entries(rows, tokens, count):
            for position, entry in enumerate(entries):
                best = sorted(allowed & entry.keys(), key=entry.__getitem__, reverse=True)[:count]
                ids[row, position, : len(best)] = torch.tensor(best, dtype=torch.int64)
                logp[row, position, : len(best)] = torch.tensor([entry[token] for token in best])
        return TeacherChoices(ids, logp)

    def _entries(self, rows: Sequence[int], tokens: Tokens, count: int) -> Iterator[tuple[int, list[Likelihoods]]]:
        """Yields each row with the log-probabilities at each token of its response: of this token and of the `count`
        most likely ones. Rows may come in another order than in `rows`."""
        for start in range(0, len(rows), self.batch_size):
            batch = rows[start : start + self.batch_size]
            pairs = [tokens[row] for row in batch]  # token ids of prompt and response
            choices = self._choices([[*prompt, *response] for prompt, response in pairs], count)
            for choice in choices:
                row = batch[choice["index"]]
                prompt, response = tokens[row]
                yield row, self._parse(choice.get("prompt_logprobs"), prompt, response, count)

    def _choices(self, prompts: list[list[int]], count: int) -> list[dict[str, Any]]:
        """Requests the log-probabilities of prompts' tokens. Returns the choices of the reply, one per prompt.

        prompts: token ids. count: number of the likeliest alternatives to report at each position. Raises UserError if
        choices are missing.
        """
        # only prompt_logprobs is used, not the one token that is generated
        body = {"model": self.model, "prompt": prompts, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": count}
        choices = self._post("v1/completions", body).get("choices")
        indices = [choice.get("index") for choice in choices] if isinstance(choices, list) else []
        if not isinstance(choices, list) or sorted(indices) != list(range(len(prompts))):
            raise UserError(
                f"teacher {self.address} answered {len(indices)} of {len(prompts)} prompts; look at the server's log"
            )
        return choices

    def _parse(self, entries: Any, prompt: list[int], response: list[int], count: int) -> list[Likelihoods]:
        """Returns the log-probabilities at each token of a response.

        entries: the reply's `prompt_logprobs`. Raises UserError if its length is wrong or tokens are missing.
        """
        length = len(prompt) + len(response)
        if not isinstance(entries, list) or len(entries) != length:
            received = f"{len(entries)} entries" if isinstance(entries, list) else repr(entries)[:60]
            raise UserError(
                f"teacher {self.address} answered {received} as prompt_logprobs of {length} tokens; it must be a vLLM "
                "server whose model has the student's vocabulary"
            )
        positions = entries[len(prompt) :]
        parsed = [{int(token): float(value["logprob"]) for token, value in entry.items()} for entry in positions]
        for token, entry in zip(response, parsed, strict=True):
            if token not in entry or len(entry) < count:
                raise UserError(
                    f"teacher {self.address} listed {len(entry)} tokens, not token {token} and the {count} "
                    "most likely ones; start the server with a larger --max-logprobs"
                )
        return parsed

    def _post(self, endpoint: str, body: dict[str, Any]) -> dict[str, Any]:
        """Posts JSON to the server and returns its reply. Raises UserError if all tries fail or the deadline passes."""
        import json

        from mmrl.rewards.services.http import post

        url, headers = f"{self.address.rstrip('/')}/{endpoint}", {"Content-Type": "application/json"}
        try:
            return post(url, json.dumps(body).encode(), headers, deadline_s=self.deadline, retries=self.retries)
        except UserError as error:
            raise UserError(str(error).replace("reward server", "teacher")) from None
