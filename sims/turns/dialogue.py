"""A conversation from the environment's side: its turns, checks of replies, and limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from PIL import Image

from mmrl.errors import UserError, describe_error
from mmrl.rollouts import Conversation, Message, Prompt, Turn, Video
from mmrl.sims.turns.environment import Environment, Reply
from mmrl.sims.turns.settings import TurnLimits

ROLES = ("system", "user", "assistant", "tool")


class Fault(Exception):
    """Raised if an environment breaks a rule, so that the rollout is lost. The message says what is wrong."""


class Dialogue:
    """Runs the environment of a conversation and checks its replies. If the environment raises, gives an invalid reply
    or exceeds the limits, the conversation ends and is lost.

    prompt: the prompt of the rollout, with the first messages of the conversation. end: why the conversation has ended
    (see `Conversation`); None while it continues.
    """

    def __init__(self, environment: Environment, prompt: Prompt, limits: TurnLimits) -> None:
        """Starts the environment, whose messages and tools go into `prompt`. If it fails, the conversation is lost."""
        self.limits, self._environment = limits, environment
        self.turns: list[Turn] = []
        self.end: str | None = None
        self.problem = ""
        self._images = self._pixels = 0
        self.prompt = prompt
        try:
            messages = _checked(environment.start(prompt))
            tools = tuple(environment.tools())
            self.prompt = replace(prompt, messages=messages, tools=tools, before_start=prompt)
        except UserError:
            raise
        except Exception as error:
            self._lose(str(error) if isinstance(error, Fault) else describe_error(error))

    def answer(self, response: str) -> tuple[Message, ...]:
        """Passes a response to the environment. Returns its observation; () if the conversation has ended."""
        assert self.end is None
        try:
            reply = self._environment.step(response)
            observation = self._inspected(reply)
        except UserError:
            raise
        except Exception as error:
            self.turns.append(Turn(response))
            self._lose(str(error) if isinstance(error, Fault) else describe_error(error))
            return ()
        over = reply.end or len(self.turns) + 1 >= self.limits.max_turns
        shown = () if over else observation
        self.turns.append(Turn(response, shown, float(reply.reward), reply.tool, reply.error, dict(reply.facts)))
        if over:
            self.finish("environment" if reply.end else "turns")
        return shown

    def cut(self, response: str) -> None:
        """Ends the conversation with a response that was truncated at the length limit. The environment does not get
        it."""
        self.turns.append(Turn(response))
        self.finish("length")

    def finish(self, end: str) -> None:
        """Ends the conversation and closes the environment. end: the reason, see `Conversation`."""
        self.end = end
        try:
            self._environment.close()
        except Exception as error:  # it is recorded, but loses no rollout: the conversation is over
            self.problem = self.problem or (str(error) if isinstance(error, Fault) else describe_error(error))

    def join(self, first: Prompt) -> None:
        """Takes over the prompt of another rollout of the group, so that they share it. If its messages differ, the
        conversation is lost."""
        if first is not self.prompt and not _alike(first.messages, self.prompt.messages):
            self._lose(
                "start() returned other messages for another rollout of this prompt; make it depend on the prompt only"
            )
        self.prompt = first

    @property
    def record(self) -> Conversation:
        """The whole conversation, after its end."""
        assert self.end is not None
        return Conversation(self.prompt.messages, tuple(self.turns), self.end, self.problem)

    def _lose(self, why: str) -> None:
        """Ends the conversation as lost: its rollout is not trained on."""
        self.problem = why
        self.finish("lost")

    def _inspected(self, reply: Reply) -> tuple[Message, ...]:
        """Returns the messages of a reply and counts their images. Raises Fault if the reply is invalid, or exceeds the
        limits."""
        if not isinstance(reply, Reply):
            raise Fault(f"step() of the environment must return a Reply, not {type(reply).__name__}")
        if (
            not isinstance(reply.reward, int | float)
            or reply.reward != reply.reward  # NaN
            or abs(reply.reward) == float("inf")
        ):
            raise Fault(f"the environment's reward must be a finite number, not {reply.reward!r:.40}")
        if reply.end:
            return ()
        messages = _checked(reply.messages)
        within(messages, self.limits, self._images, self._pixels)
        self._images += sum(len(message.images) for message in messages)
        self._pixels += sum(image.width * image.height for message in messages for image in message.images)
        return messages


def within(messages: Sequence[Message], limits: TurnLimits, images: int = 0, pixels: int = 0) -> None:
    """Raises Fault if an observation exceeds a limit. images, pixels: how many earlier observations had, which count
    too."""
    if any(message.videos for message in messages):
        raise Fault("an observation may hold only text and images, but has a video; show its frames as images")
    text = sum(len(message.text) for message in messages)
    added = [image for message in messages for image in message.images]
    images, pixels = images + len(added), pixels + sum(image.width * image.height for image in added)
    if text > limits.max_text:
        raise Fault(f"an observation has {text} characters, more than limits.max_text={limits.max_text}")
    if images > limits.max_images:
        raise Fault(f"observations have {images} images, more than limits.max_images={limits.max_images}")
    if pixels > limits.max_pixels:
        raise Fault(f"observations have {pixels} pixels, more than limits.max_pixels={limits.max_pixels}")


def _checked(messages: object) -> tuple[Message, ...]:
    """Returns messages as a tuple. Raises Fault if it is not a list of valid messages."""
    sequence = tuple(messages) if isinstance(messages, list | tuple) else ()
    if not sequence or not all(isinstance(m, Message) and m.role in ROLES and m.parts for m in sequence):
        raise Fault("the environment must return a list of Message, each with a role and parts")
    if not all(map(_is_part, (part for message in sequence for part in message.parts))):
        raise Fault("the environment gave a message with a part that is neither text, an image nor a video")
    return sequence


def _is_part(part: object) -> bool:
    if isinstance(part, Video):
        return len(part.frames) > 0 and all(isinstance(frame, Image.Image) and _is_part(frame) for frame in part.frames)
    return isinstance(part, str) or (isinstance(part, Image.Image) and min(part.size) > 0)


def _alike(one: tuple[Message, ...], other: tuple[Message, ...]) -> bool:
    """Returns whether two lists of messages are equal, pixels included."""

    def comparable(part: str | Image.Image | Video) -> object:
        """Returns a value that is equal for equal parts."""
        if isinstance(part, Video):
            return [part.fps, *map(comparable, part.frames)]
        return part if isinstance(part, str) else (part.size, part.tobytes())

    def content(messages: tuple[Message, ...]) -> list[object]:
        """Returns role and comparable parts of each message."""
        return [(m.role, [comparable(part) for part in m.parts]) for m in messages]

    return content(one) == content(other)
