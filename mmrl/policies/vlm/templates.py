"""Chat templates: finds out which messages the template of a model accepts, and renders messages with it."""

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

MARK = "\u2402text\u2403"  # a text to look for in rendered messages; no template contains it
QUESTION = "\u2402question\u2403"  # the same, for messages of the user
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError)  # that rendering can raise
FILE = "chat_template.jinja"
# The tokens that a model family's template puts around the placeholder of an image or a video.
AROUND = {
    "<|image_pad|>": ("<|vision_start|>", "<|vision_end|>"),
    "<|video_pad|>": ("<|vision_start|>", "<|vision_end|>"),
    "<|image|>": ("<|begin_of_image|>", "<|end_of_image|>"),
    "<|video|>": ("<|begin_of_video|>", "<|end_of_video|>"),
}

Form = Literal["parts", "text"]  # content as a list of parts, or as one string
TemplateMessage = dict[str, Any]  # a message in the format of `apply_chat_template`: role and content


@dataclass(frozen=True)
class TemplateForms:
    """The form in which a chat template accepts the content of each role."""

    user: Form
    system: Form | None  # None: the template has no such role
    assistant: Form
    media: frozenset[str]  # "image", "video": those that the template renders

    def for_role(self, role: str) -> Form:
        """Returns the form of a role. Other roles, and a missing system role, have the form of the user."""
        by_role = {"system": self.system, "assistant": self.assistant}
        return by_role.get(role, self.user) or self.user


def name_of(processor: Processor) -> str:
    """Returns "model.path=PATH", with the path of the processor, for error messages."""
    return f"model.path={processor.tokenizer.name_or_path}"


def forms_of(processor: Processor) -> TemplateForms:
    """Returns the forms that the chat template of a processor accepts. Raises UserError if there is no template, or if
    it does not render the text of a question."""
    template = processor.chat_template
    if template is None:
        template = processor.tokenizer.chat_template
    if template is None:
        raise UserError(
            f"{name_of(processor)}: the model has no chat template; add the {FILE} of its instruction-tuned version"
        )
    return _find_forms(processor, repr(template))


@lru_cache(maxsize=8)
def _find_forms(processor: Processor, template: str) -> TemplateForms:
    """Returns the forms that the chat template accepts, by rendering test messages. template: its text, which is part
    of the cache key because the template of a processor can be changed."""
    user = _form(processor, "user", [])
    if user is None:
        raise UserError(
            f"{name_of(processor)}: its chat template ({FILE}) renders the text of a question neither from a list of "
            f"parts nor from a string{_reason(processor)}; correct it, or take that of the instruction-tuned model"
        )
    question = _content(processor, user, QUESTION)
    system = _form(processor, "system", [], [{"role": "user", "content": question}])
    messages = [{"role": "user", "content": question}]
    assistant = _form(processor, "assistant", messages, [{"role": "user", "content": question}])
    # in a string mmrl itself writes the placeholders of images and videos
    media = {medium for medium in ("image", "video") if user == "text" or _renders(processor, medium)}
    return TemplateForms(user, system, assistant or user, frozenset(media))


def _form(
    processor: Processor, role: str, before: Sequence[TemplateMessage], after: Sequence[TemplateMessage] = ()
) -> Form | None:
    """Returns the form in which the template renders a message of `role`: parts if both forms work, None if none does.

    before, after: messages before and after it, which must be rendered too.
    """
    forms: tuple[Form, ...] = ("parts", "text")
    for form in forms:
        try:
            text = _apply(processor, [*before, {"role": role, "content": _content(processor, form, MARK)}, *after])
        except TEMPLATE_ERRORS:
            continue
        # A template for strings prints a list of parts as Python code, in which the key "text" stands in quotes
        as_code = any(f"{quote}text{quote}" in text for quote in "'\"")
        complete = all(QUESTION in text for message in (*before, *after) if QUESTION in repr(message["content"]))
        if MARK in text and complete and not as_code:
            return form
    return None


def _renders(processor: Processor, medium: str) -> bool:
    """Returns whether the template renders a part of type `medium` (image or video), not only the text beside it."""
    part = {"type": "text", "text": MARK}
    try:
        contents = ([{"type": medium}, part], [part])
        with_medium, without = (_apply(processor, [{"role": "user", "content": content}]) for content in contents)
    except TEMPLATE_ERRORS:
        return False
    return MARK in with_medium and with_medium != without


def _reason(processor: Processor) -> str:
    """Returns the error of rendering a question as a string, in brackets, for a message; "" if there is no error."""
    try:
        _apply(processor, [{"role": "user", "content": MARK}])
    except TEMPLATE_ERRORS as error:
        return f" ({type(error).__name__}: {' '.join(str(error).split())})"
    return ""


def _content(processor: Processor, form: Form, *parts: str | Image.Image | Video) -> Any:
    """Returns the content of a message as a list of parts or as one string, by `form`."""
    if form == "parts":
        return [as_part(part) for part in parts]
    return "".join(part if isinstance(part, str) else placeholder(processor, part) for part in parts)


def as_part(part: str | Image.Image | Video) -> dict[str, str]:
    """Returns a part of a message in the format of `apply_chat_template`."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "video" if isinstance(part, Video) else "image"}


def placeholder(processor: Processor, part: Image.Image | Video) -> str:
    """Returns the placeholder text of an image or a video, which the processor expands to its tokens, with the tokens
    that the model family puts around it."""
    token = processor.video_token if isinstance(part, Video) else processor.image_token
    before, after = AROUND.get(token, ("", ""))
    vocabulary = processor.tokenizer.get_vocab()
    return f"{before}{token}{after}" if before in vocabulary and after in vocabulary else token


def _apply(processor: Processor, messages: Sequence[TemplateMessage], **options: object) -> str:
    """Renders messages with the chat template, with limits on time and size."""
    if processor.chat_template is None:  # AutoProcessor loads a template of the tokenizer only into the tokenizer
        options["chat_template"] = processor.tokenizer.chat_template
    return render_template(name_of(processor), processor, list(messages), **options)


def rendered(processor: Processor, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> str:
    """Renders messages with the chat template, up to where the next response of the policy begins.

    For a template without a system role the system text is put in front of the next question. For a template that
    accepts only strings, the processor's placeholders stand for images and videos. tools: JSON schemas of functions
    that the policy may call. Raises UserError if the template refuses the messages or leaves out images or videos.
    """
    forms = forms_of(processor)
    if forms.system is None:
        messages = without_system(messages)
    _check_media(processor, forms, messages)
    options = {"tools": list(tools)} if tools else {}
    conversation = [
        {"role": message.role, "content": _content(processor, forms.for_role(message.role), *message.parts)}
        for message in messages
    ]
    try:
        return _apply(processor, conversation, **options)
    except TEMPLATE_ERRORS as error:
        roles = ", ".join(message.role for message in messages)
        raise UserError(
            f"{name_of(processor)}: its chat template ({FILE}) refuses messages of these roles ({roles}): "
            f"{' '.join(str(error).split())}; change the messages, or the template"
        ) from error


def _check_media(processor: Processor, forms: TemplateForms, messages: Sequence[Message]) -> None:
    """Raises UserError if messages have images or videos that the chat template does not render."""
    present = {
        "image": any(message.images for message in messages),
        "video": any(message.videos for message in messages),
    }
    for medium, is_present in present.items():
        if is_present and medium not in forms.media:
            raise UserError(
                f"{name_of(processor)}: its chat template ({FILE}) drops {medium}s, so the model would answer without "
                f"them; take the template of a version that reads {medium}s"
            )


def without_system(messages: Sequence[Message]) -> list[Message]:
    """Returns messages without the system role: each system text is put in front of the next user message, with an
    empty line between."""
    result: list[Message] = []
    system_parts: tuple[Any, ...] = ()
    for message in messages:
        if message.role == "system":
            system_parts = (*system_parts, *message.parts, "\n\n")
        elif message.role == "user" and system_parts:
            result.append(Message("user", (*_joined(system_parts, message.parts),)))
            system_parts = ()
        else:
            result.append(message)
    if system_parts:
        result.append(Message("user", system_parts[:-1]))
    return result


def _joined(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """Joins two lists of parts. Adjacent texts become one text, since a template may strip texts, or put separators
    between them."""
    parts: list[Any] = []
    for part in (*first, *second):
        if parts and isinstance(part, str) and isinstance(parts[-1], str):
            parts[-1] += part
        else:
            parts.append(part)
    return parts


def system_is_moved(processor: Processor, messages: Sequence[Message]) -> str | None:
    """Returns a warning if the system text is rendered in front of the first question, because the template has no
    system role; else None."""
    if all(message.role != "system" for message in messages) or forms_of(processor).system is not None:
        return None
    return (
        f"task.system: the chat template of {name_of(processor)} has no system role; the system text is put in front "
        "of the first question instead"
    )


def check_template(processor: Processor, conversations: Sequence[Sequence[Message]]) -> None:
    """Tries the chat template with conversations, before weights are loaded. Raises UserError if it refuses one. Logs a
    warning if it has no system role, but a conversation has a system text."""
    forms_of(processor)  # raises UserError for a template that cannot be used at all
    for messages in conversations:
        rendered(processor, messages)
    warnings = [system_is_moved(processor, messages) for messages in conversations]
    first_warning = next((warning for warning in warnings if warning), None)
    if first_warning:
        _log.warning(first_warning)
