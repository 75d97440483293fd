"""The client of a teacher behind vLLM's OpenAI-compatible server: log-probabilities of given tokens.

A request posts lists of token ids to /v1/completions with `prompt_logprobs`. In the answer each choice has a list with
an entry a token of its prompt: null for the first, else an object {token id: {"logprob", "rank", "decoded_token"}} of
the token itself and of the likeliest ones at its position.
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

PROBE = "The sum of 12 and 345 is 357; naïve façade, <answer>\n\tx² ≠ y</answer>."
Likelihoods = dict[int, float]  # log-probability by token id
Tokens = list[tuple[list[int], list[int]]]  # of prompt and response


@dataclass(frozen=True)
class TeacherServer:
    """A server at `address` and the name of its model. at_once: responses in a request; deadline: seconds until its
    answer is complete; retries: further requests where there was none."""

    address: str
    model: str
    at_once: int
    deadline: float
    retries: int

    def check(self, spelled: Callable[[str], list[int]]) -> None:
        """Raises UserError where the server does not answer, or splits a string into other tokens than `spelled`, the
        student's tokenizer."""
        theirs = self._post("tokenize", {"model": self.model, "prompt": PROBE, "add_special_tokens": False})
        tokens, ours = theirs.get("tokens") or [], spelled(PROBE)
        if tokens != ours:
            at = next((i for i, pair in enumerate(zip(tokens, ours, strict=False)) if pair[0] != pair[1]), len(tokens))
            raise UserError(
                f"teacher {self.address} has another vocabulary than the model: it reads a string of {len(ours)} "
                f"tokens as {len(tokens)}, which differ from number {at} on; serve a model of the model's own family"
            )

    def likelihoods(self, rollouts: Rollouts, rows: Sequence[int], tokens: Tokens) -> Tensor:
        """Returns the log-probability of each decision, [rollout, decision]. rows: those to compute; the others are
        NaN. tokens: of all rollouts."""
        import torch

        logp = torch.full(rollouts.mask.shape, torch.nan)
        for row, entries in self._entries(rows, tokens, 0):
            for position, (token, entry) in enumerate(zip(tokens[row][1], entries, strict=True)):
                logp[row, position] = entry[token]
        return logp

    def top_k(
        self, rollouts: Rollouts, rows: Sequence[int], tokens: Tokens, count: int, sampled: set[int]
    ) -> TeacherChoices:
        """Returns the likeliest alternatives to each decision with their log-probabilities; see `likelihoods`. sampled:
        the tokens that the student may sample; others are not listed."""
        import torch

        from mmrl.protocols.choices import TeacherChoices

        ids = torch.zeros(*rollouts.mask.shape, count, dtype=torch.int64)
        logp = torch.full((*rollouts.mask.shape, count), torch.nan)
        for row, entries in self._entries(rows, tokens, count):
            for position, entry in enumerate(entries):
                best = sorted(sampled & entry.keys(), key=entry.__getitem__, reverse=True)[:count]
                ids[row, position, : len(best)] = torch.tensor(best, dtype=torch.int64)
                logp[row, position, : len(best)] = torch.tensor([entry[token] for token in best])
        return TeacherChoices(ids, logp)

    def _entries(self, rows: Sequence[int], tokens: Tokens, count: int) -> Iterator[tuple[int, list[Likelihoods]]]:
        """Yields rows, and the log-probabilities at each token of their responses."""
        for start in range(0, len(rows), self.at_once):
            part = rows[start : start + self.at_once]
            choices = self._choices([[*tokens[row][0], *tokens[row][1]] for row in part], count)
            for choice in choices:
                row = part[choice["index"]]
                prompt, response = tokens[row]
                yield row, self._parsed(choice.get("prompt_logprobs"), prompt, response, count)

    def _choices(self, prompts: list[list[int]], count: int) -> list[dict[str, Any]]:
        """Returns the choices of the answer, one a prompt. Raises UserError for an answer without them."""
        body = {"model": self.model, "prompt": prompts, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": count}
        choices = self._post("v1/completions", body).get("choices")
        numbers = [choice.get("index") for choice in choices] if isinstance(choices, list) else []
        if not isinstance(choices, list) or sorted(numbers) != list(range(len(prompts))):
            raise UserError(f"teacher {self.address} answered {len(numbers)} of {len(prompts)} prompts")
        return choices

    def _parsed(self, entries: Any, prompt: list[int], response: list[int], count: int) -> list[Likelihoods]:
        """Returns the log-probabilities at each token of a response. Raises UserError for another shape."""
        length = len(prompt) + len(response)
        if not isinstance(entries, list) or len(entries) != length:
            shape = f"{len(entries)} entries" if isinstance(entries, list) else repr(entries)[:60]
            raise UserError(
                f"teacher {self.address} answered {shape} as prompt_logprobs of {length} tokens; it has to be vLLM's "
                "server, of the model's vocabulary"
            )
        parsed = [{int(token): float(entry["logprob"]) for token, entry in at.items()} for at in entries[len(prompt) :]]
        for token, entry in zip(response, parsed, strict=True):
            if token not in entry or len(entry) < count:
                raise UserError(
                    f"teacher {self.address} answered {len(entry)} tokens in place of token {token} and the {count} "
                    "likeliest; start it with a larger --max-logprobs"
                )
        return parsed

    def _post(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Posts JSON to the server and returns its answer. Raises UserError after the deadline or the retries."""
        import json

        from mmrl.rewards.services.http import post

        url, kind = f"{self.address.rstrip('/')}/{name}", {"Content-Type": "application/json"}
        try:
            return post(url, json.dumps(body).encode(), kind, deadline_s=self.deadline, retries=self.retries)
        except UserError as error:
            raise UserError(str(error).replace("reward server", "teacher")) from None
