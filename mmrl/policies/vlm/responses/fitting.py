"""Encodes single prompts, and finds those that the model can not read."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from mmrl.errors import UserError
from mmrl.policies.tokenizers import Processor
from mmrl.policies.vlm.prompts import RolloutTokens, chat, encode
from mmrl.rollouts import Prompt

MARKERS = ("<image>", "<video>")  # of mmrl's own prompts, which are counted against their images


class PromptEncoder:
    """Encodes one prompt as `encode` does, also in another process.

    What a check has encoded is cached for as long as its prompt lives, and handed out once, so that a prompt that is
    checked is encoded no more often than one that is not.
    """

    def __init__(self, processor: Processor, max_length: int, placeholders: Iterable[str] = ()) -> None:
        """placeholders: tokens that stand for images and videos, which a string can not hold."""
        self.processor, self.max_length = processor, max_length
        self.placeholders = tuple(token for token in placeholders if token not in MARKERS)
        self._cached: dict[int, tuple[weakref.ref[Prompt], RolloutTokens]] = {}

    def __call__(self, prompt: Prompt) -> RolloutTokens:
        cached = self.take(prompt)
        return encode(self.processor, [prompt], self.max_length)[0] if cached is None else cached

    def take(self, prompt: Prompt) -> RolloutTokens | None:
        """Returns the encoding of this very prompt, if a check has it, and forgets it."""
        cached = self._cached.pop(id(prompt), None)
        return None if cached is None or cached[0]() is not prompt else cached[1]

    def prompt_problem(self, prompt: Prompt) -> str | None:
        """Returns why the model can not read a prompt: a placeholder in its text, too many tokens, images that the
        processor does not take; None where it can."""
        try:
            text = "".join(message.text for message in chat(prompt))
            for token in self.placeholders:
                if token in text:
                    return f"its text holds {token}, which stands for an image or a video in this model; take it out"
            tokens = encode(self.processor, [prompt], self.max_length)[0]
        except UserError as error:
            return str(error).replace(f"prompt {prompt.id}", "the prompt", 1)
        key = id(prompt)
        self._cached[key] = (weakref.ref(prompt, lambda _: self._cached.pop(key, None)), tokens)
        return None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cached": {}}
