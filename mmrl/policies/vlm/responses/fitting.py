"""Encodes single prompts, and reports prompts that the model cannot read."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from mmrl.errors import UserError
from mmrl.policies.tokenizers import Processor
from mmrl.policies.vlm.prompts import RolloutTokens, chat, encode
from mmrl.rollouts import Prompt

MARKERS = ("<image>", "<video>")  # of mmrl's own prompts; `chat` checks that they match the images and videos


class PromptEncoder:
    """Encodes one prompt as `prompts.encode` does. It can be pickled, for use in another process.

    `prompt_problem` caches the encoding of the prompt that it checks, and the next call for this prompt uses it up, so
    that a checked prompt is encoded only once.
    """

    def __init__(self, processor: Processor, max_length: int, placeholders: Iterable[str] = ()) -> None:
        """max_length: largest number of tokens of a prompt. placeholders: the model's tokens for images and videos,
        which must not be in the text of a prompt."""
        self.processor, self.max_length = processor, max_length
        self.placeholders = tuple(token for token in placeholders if token not in MARKERS)
        self._cached: dict[int, tuple[weakref.ref[Prompt], RolloutTokens]] = {}

    def __call__(self, prompt: Prompt) -> RolloutTokens:
        """Returns the encoded prompt, with an empty response."""
        cached = self.take(prompt)
        return encode(self.processor, [prompt], self.max_length)[0] if cached is None else cached

    def take(self, prompt: Prompt) -> RolloutTokens | None:
        """Removes and returns the encoding of this prompt object that `prompt_problem` cached; None if there is
        none."""
        cached = self._cached.pop(id(prompt), None)
        return None if cached is None or cached[0]() is not prompt else cached[1]

    def prompt_problem(self, prompt: Prompt) -> str | None:
        """Returns why the model cannot read a prompt, as one line, or None if it can; its encoding is then stored for
        `take`.

        Reasons: its text holds a placeholder token, it has too many tokens, or the processor refuses its images.
        """
        try:
            text = "".join(message.text for message in chat(prompt))
            for token in self.placeholders:
                if token in text:
                    return f"its text holds {token}, which stands for an image or a video in this model; remove it"
            tokens = encode(self.processor, [prompt], self.max_length)[0]
        except UserError as error:
            return str(error).replace(f"prompt {prompt.id}", "the prompt", 1)
        key = id(prompt)
        self._cached[key] = (weakref.ref(prompt, lambda _: self._cached.pop(key, None)), tokens)
        return None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cached": {}}
