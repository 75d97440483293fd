"""Chat templates: which messages a model's own template takes, and messages rendered by it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from jinja2 import TemplateError
from PIL import Image

from mmrl.errors import UserError
from mmrl.policies.tokenizers import Processor
from mmrl.rollouts import Message, Video
from mmrl.runtime.template_limits import render_template

_log = logging.getLogger(__name__)

MARK = "\u2402text\u2403"  # no template contains it
QUESTION = "\u2402question\u2403"
LANGUAGE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError)  # that a template can end with
FILE = "chat_template.jinja"
# Tokens that templates of a family write around the placeholder of an image or a video, which its processor expands.
AROUND = {
    "<|image_pad|>": ("<|vision_start|>", "<|vision_end|>"),
    "<|video_pad|>": ("<|vision_start|>", "<|vision_end|>"),
    "<|image|>": ("<|begin_of_image|>", "<|end_of_image|>"),
    "<|video|>": ("<|begin_of_video|>", "<|end_of_video|>"),
}

Form = Literal["parts", "text"]  # content as a list of parts, or as one string
Rendered = dict[str, Any]  # a message as chat templates take it


@dataclass(frozen=True)
class TemplateForms:
    """The form in which a template takes the content of each role. system: None where it has no such role. shown: kinds
    of parts that leave a mark in its text: image, video."""

    user: Form
    system: Form | None
    assistant: Form
    shown: frozenset[str]

    def of(self, role: str) -> Form:
        by_role = {"system": self.system, "assistant": self.assistant}
        return by_role.get(role, self.user) or self.user


def name_of(processor: Processor) -> str:
    """Returns the key and the folder of a processor, for messages."""
    return f"model.path={processor.tokenizer.name_or_path}"


def forms_of(processor: Processor) -> TemplateForms:
    """Returns the forms that a processor's template takes. Raises UserError for a template that is absent, or that
    shows no text."""
    template = processor.chat_template
    if template is None:
        template = processor.tokenizer.chat_template
    if template is None:
        raise UserError(
            f"{name_of(processor)}: it has no chat template, so questions cannot be put to it; add the {FILE} of its "
            "instruction-tuned version"
        )
    return _probed(processor, repr(template))


@lru_cache(maxsize=8)
def _probed(processor: Processor, template: str) -> TemplateForms:
    """template: its text, which is part of the key because it can be set."""
    user = _form(processor, "user", [])
    if user is None:
        raise UserError(
            f"{name_of(processor)}: its chat template ({FILE}) shows the text of a question neither as a list of parts "
            f"nor as a string{_reason(processor)}; mend it, or take that of its instruction-tuned version"
        )
    question = _content(processor, user, QUESTION)
    system = _form(processor, "system", [], [{"role": "user", "content": question}])
    answered = [{"role": "user", "content": question}]
    assistant = _form(processor, "assistant", answered, [{"role": "user", "content": question}])
    shown = {kind for kind in ("image", "video") if user == "text" or _renders(processor, kind)}
    return TemplateForms(user, system, assistant or user, frozenset(shown))


def _form(processor: Processor, role: str, before: Sequence[Rendered], after: Sequence[Rendered] = ()) -> Form | None:
    """Returns the form in which the template shows a string of this role, parts first; None for neither."""
    forms: tuple[Form, ...] = ("parts", "text")
    for form in forms:
        try:
            text = _apply(processor, [*before, {"role": role, "content": _content(processor, form, MARK)}, *after])
        except LANGUAGE_ERRORS:
            continue
        # A list that is written as it stands holds the mark too, among the names of its keys
        as_list = any(f"{quote}text{quote}" in text for quote in "'\"")
        whole = all(QUESTION in text for message in (*before, *after) if QUESTION in repr(message["content"]))
        if MARK in text and whole and not as_list:
            return form
    return None


def _renders(processor: Processor, kind: str) -> bool:
    """Returns whether the template writes anything for a part of this kind (image or video) beside the question's
    text."""
    part = {"type": "text", "text": MARK}
    try:
        with_it, without = ([{"type": kind}, part], [part])
        texts = [_apply(processor, [{"role": "user", "content": content}]) for content in (with_it, without)]
    except LANGUAGE_ERRORS:
        return False
    return MARK in texts[0] and texts[0] != texts[1]


def _reason(processor: Processor) -> str:
    try:
        _apply(processor, [{"role": "user", "content": MARK}])
    except LANGUAGE_ERRORS as error:
        return f" ({type(error).__name__}: {' '.join(str(error).split())})"
    return ""


def _content(processor: Processor, form: Form, *parts: str | Image.Image | Video) -> Any:
    if form == "parts":
        return [as_part(part) for part in parts]
    return "".join(part if isinstance(part, str) else placeholder(processor, part) for part in parts)


def as_part(part: str | Image.Image | Video) -> dict[str, str]:
    """Returns a part of a message as chat templates take it."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "video" if isinstance(part, Video) else "image"}


def placeholder(processor: Processor, part: Image.Image | Video) -> str:
    """Returns the text that a processor expands to an image or a video, with the tokens that its family has around
    it."""
    token = processor.video_token if isinstance(part, Video) else processor.image_token
    before, after = AROUND.get(token, ("", ""))
    vocabulary = processor.tokenizer.get_vocab()
    return f"{before}{token}{after}" if before in vocabulary and after in vocabulary else token


def _apply(processor: Processor, messages: Sequence[Rendered], **options: object) -> str:
    if processor.chat_template is None:  # AutoProcessor reads the tokenizer's own into the tokenizer alone
        options["chat_template"] = processor.tokenizer.chat_template
    return render_template(name_of(processor), processor.apply_chat_template, list(messages), **options)


def rendered(processor: Processor, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> str:
    """Renders messages by the chat template, up to where the policy's next response begins, in the form that the
    template takes. Raises UserError where it takes none, or drops images.

    Without a system role, a system text stands before the next question. Where content is one string, the processor's
    own placeholder stands for an image.
    """
    forms = forms_of(processor)
    if forms.system is None:
        messages = without_system(messages)
    _check_shown(processor, forms, messages)
    options = {"tools": list(tools)} if tools else {}
    conversation = [
        {"role": message.role, "content": _content(processor, forms.of(message.role), *message.parts)}
        for message in messages
    ]
    try:
        return _apply(processor, conversation, **options)
    except LANGUAGE_ERRORS as error:
        roles = ", ".join(message.role for message in messages)
        raise UserError(
            f"{name_of(processor)}: its chat template ({FILE}) refuses messages of these roles ({roles}): "
            f"{' '.join(str(error).split())}"
        ) from error


def _check_shown(processor: Processor, forms: TemplateForms, messages: Sequence[Message]) -> None:
    """Raises UserError where messages have images or videos that the chat template drops."""
    present = {
        "image": any(message.images for message in messages),
        "video": any(message.videos for message in messages),
    }
    for kind, is_present in present.items():
        if is_present and kind not in forms.shown:
            raise UserError(
                f"{name_of(processor)}: its chat template ({FILE}) drops {kind}s, so the model would answer without "
                f"them; take the template of a version that reads {kind}s"
            )


def without_system(messages: Sequence[Message]) -> list[Message]:
    """Puts the parts of each system message in front of the next question, with an empty line between."""
    result: list[Message] = []
    waiting: tuple[Any, ...] = ()
    for message in messages:
        if message.role == "system":
            waiting = (*waiting, *message.parts, "\n\n")
        elif message.role == "user" and waiting:
            result.append(Message("user", (*_joined(waiting, message.parts),)))
            waiting = ()
        else:
            result.append(message)
    if waiting:
        result.append(Message("user", waiting[:-1]))
    return result


def _joined(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """Joins two lists of parts, with neighbouring texts as one: templates may strip or separate texts."""
    parts: list[Any] = []
    for part in (*first, *second):
        if parts and isinstance(part, str) and isinstance(parts[-1], str):
            parts[-1] += part
        else:
            parts.append(part)
    return parts


def system_is_moved(processor: Processor, messages: Sequence[Message]) -> str | None:
    """Returns a line where a system text stands elsewhere than where it was put; None where it does not."""
    if all(message.role != "system" for message in messages) or forms_of(processor).system is not None:
        return None
    return (
        f"task.system: the chat template of {name_of(processor)} has no system role; the system text stands in front "
        "of the first question instead"
    )


def check_template(processor: Processor, conversations: Sequence[Sequence[Message]]) -> None:
    """Renders conversations as rollouts do, before weights are read. Raises UserError where the template does not take
    them, and logs once where a system text is moved."""
    forms_of(processor)
    for messages in conversations:
        rendered(processor, messages)
    lines = [line for messages in conversations if (line := system_is_moved(processor, messages))]
    if lines:
        _log.warning(lines[0])
