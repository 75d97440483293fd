"""Settings of environments of turns, of their limits, and of tools."""

from __future__ import annotations

from abc import abstractmethod
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from mmrl.children.limits import Limits
from mmrl.settings import Choice, Section, locate, option

if TYPE_CHECKING:
    from mmrl.sims.turns.environment import Environment
    from mmrl.sims.turns.tools import Tool


class TurnLimits(Section):
    """Limits of a conversation. If the policy reaches a limit, the conversation ends there. If the environment exceeds
    one, its rollout is lost: it has no reward and is not trained on."""

    max_turns: int = option(8, "responses of a conversation", ge=1)
    turn_tokens: int | None = option(
        None, "tokens of one response; default: what is left of rollout.max_response_length", unit="tokens", ge=1
    )
    max_text: int = option(4000, "text of one observation", unit="characters", ge=1)
    max_images: int = option(16, "images that a conversation's observations hold together", ge=0)
    max_pixels: int = option(4_000_000, "pixels of all these images together", unit="pixels", ge=0)


class Isolation(Section):
    """Settings of environments in worker processes, which step while the policy generates for other rollouts."""

    deadline_s: float = option(10.0, "the longest that an environment may take for a start or a step", unit="s", gt=0)
    at_once: int = option(16, "environments that are started or stepped at the same time", ge=1)
    limits: Limits | None = option(None, "limits of each process")


class EnvironmentSettings(Choice):
    """An environment that replies to the policy's responses."""

    title: ClassVar[str] = "environment"
    kinds: ClassVar[dict[str, str]] = {
        "tools": "mmrl.sims.turns.settings:ToolsSettings",
        "recorded": "mmrl.sims.turns.settings:RecordedSettings",
    }
    test: ClassVar[str] = "tests/sims/test_environments.py"
    limits: TurnLimits = option(TurnLimits(), "limits of a conversation")
    isolated: Isolation | None = option(
        None,
        "run environments in processes of their own, so that one that hangs or ends its process costs its own rollout; "
        "null: in this process, one after another, which is faster if they are fast and trusted",
    )
    deadline_s: float = option(
        60.0,
        "the longest that an environment in this process may take for a start or a step; one that takes longer loses "
        "its rollout. For isolated environments isolated.deadline_s counts instead",
        unit="s",
        gt=0,
    )

    @property
    def pays_turns(self) -> bool:
        """Returns whether turns may have rewards."""
        return True

    def check(self) -> None:  # noqa: B027 - most need nothing
        """Raises ValueError for packages that are not installed. Called once, before a model is loaded."""

    @abstractmethod
    def make(self) -> Environment:
        """Makes an environment for one conversation."""


class ToolSettings(Choice):
    """Settings of a tool: a function that the policy may call before it answers."""

    title: ClassVar[str] = "tool"
    kinds: ClassVar[dict[str, str]] = {
        "zoom": "mmrl.sims.turns.settings:Zoom",
        "unrelated_zoom": "mmrl.sims.turns.settings:UnrelatedZoom",
        "rotate": "mmrl.sims.turns.settings:Rotate",
        "flip": "mmrl.sims.turns.settings:Flip",
        "mark": "mmrl.sims.turns.settings:Mark",
        "ocr": "mmrl.sims.turns.settings:Ocr",
        "calculator": "mmrl.sims.turns.settings:Calculator",
        "function": "mmrl.sims.turns.settings:Function",
    }
    test: ClassVar[str] = "tests/sims/test_tools.py"
    reward: float = option(0.0, "reward of a turn whose call succeeded, for credit by turn such as turn_returns")

    @classmethod
    def expand(cls, value: Any) -> Any:
        """Expands the short form `package.module:function` to the settings of a function as a tool."""
        if isinstance(value, str) and ":" in value:
            return {"type": "function", "target": value}
        return super().expand(value)

    def check(self) -> None:  # noqa: B027 - most need nothing
        """Raises ValueError for packages that are not installed."""

    @abstractmethod
    def make(self) -> Tool: ...


class Zoom(ToolSettings):
    """Returns a crop of an image, taken from the original image, and reduced only if it has more than `pixels`
    pixels."""

    type: str = "zoom"
    pixels: int = option(1_000_000, "largest number of pixels of a result", unit="pixels", ge=1)

    def make(self) -> Tool:
        from mmrl.sims.turns.images import zoom

        return zoom(self.pixels)


class UnrelatedZoom(Zoom):
    """A control for `zoom`: returns a crop of the same size from another place of the image than requested."""

    type: str = "unrelated_zoom"

    def make(self) -> Tool:
        from mmrl.sims.turns.images import zoom

        return zoom(self.pixels, related=False)


class Rotate(ToolSettings):
    """Returns an image rotated by a multiple of 90 degrees."""

    type: str = "rotate"

    def make(self) -> Tool:
        from mmrl.sims.turns.images import rotate

        return rotate()


class Flip(ToolSettings):
    """Returns a mirrored image."""

    type: str = "flip"

    def make(self) -> Tool:
        from mmrl.sims.turns.images import flip

        return flip()


class Mark(ToolSettings):
    """Returns an image with a rectangle drawn into it."""

    type: str = "mark"

    def make(self) -> Tool:
        from mmrl.sims.turns.images import mark

        return mark()


class Ocr(ToolSettings):
    """Returns the text in an image, or in a box of it as for `zoom`, read from the original image by RapidOCR on the
    CPU (the extra `ocr`)."""

    type: str = "ocr"
    pixels: int = option(
        500_000,
        "larger images are reduced to this before reading; half a million takes some seconds",
        unit="pixels",
        ge=1,
    )
    characters: int = option(1000, "largest number of characters of a result", unit="characters", ge=1)
    threads: int = option(1, "threads of the CPU that read", ge=1)

    def check(self) -> None:
        from mmrl.rewards.reading import check_engine

        check_engine()

    def make(self) -> Tool:
        from mmrl.sims.turns.images import ocr

        return ocr(self.pixels, self.characters, self.threads)


class Calculator(ToolSettings):
    """Evaluates an arithmetic expression."""

    type: str = "calculator"

    def make(self) -> Tool:
        from mmrl.sims.turns.calculator import calculator

        return calculator()


class Function(ToolSettings):
    """A function of your own as a tool; its parameters must have type annotations."""

    type: str = "function"
    target: str = option(description="package.module:function")
    name: str | None = option(None, "name of the tool; default: the function's")

    def make(self) -> Tool:
        from mmrl.sims.turns.tools import Tool

        return Tool.of(locate(self.target, "task.environment.tools.target"), self.name)


class ToolsSettings(EnvironmentSettings):
    """An environment with tools. A response that calls a tool gets its result; any other response is the answer, and
    ends the conversation."""

    type: str = "tools"
    tools: list[ToolSettings] = option([Zoom()], "tools that the policy may call", min_length=1)
    calls: Literal["json", "python"] = option(
        "json",
        'how tools are called. json: <tool_call>{"name": ..., "arguments": {...}}</tool_call>; python: an expression '
        "such as zoom(1, 2, 3, 4) at the end of the response",
    )
    described: Literal["template", "system", "no"] = option(
        "system", "where tools are described: by the chat template, in the system message, or nowhere"
    )
    coordinates: float | None = option(
        None, "boxes and points run from 0 to this along each side of an image; default: pixels as shown", gt=0
    )
    shown_pixels: int | None = option(
        None,
        "largest number of pixels of a prompt's image as the policy sees it; tools get the full image",
        unit="pixels",
        ge=1,
    )

    @property
    def pays_turns(self) -> bool:
        return any(tool.reward for tool in self.tools)

    def check(self) -> None:
        """Raises ValueError if a tool needs a package that is not installed."""
        for tool in self.tools:
            try:
                tool.check()
            except ValueError as error:
                raise ValueError(f"task.environment.tools: {error}") from None

    def make(self) -> Environment:
        """Makes an environment for one conversation; the tools, which have no state, are shared."""
        from mmrl.sims.turns.tools import ToolEnvironment

        tools = [(shared_tool(settings), settings.reward) for settings in self.tools]
        return ToolEnvironment(
            [tool for tool, _ in tools],
            rewards={tool.name: reward for tool, reward in tools},
            calls=self.calls,
            described=self.described,
            coordinates=self.coordinates,
            shown_pixels=self.shown_pixels,
        )


class RecordedSettings(EnvironmentSettings):
    """Replays the recorded observations of conversations in files, whatever the policy responds, for supervised
    training. In an evaluation only the last response counts."""

    test: ClassVar[str] = "tests/tasks/test_conversations.py"
    type: str = "recorded"
    limits: TurnLimits = option(
        TurnLimits(max_turns=1000, max_text=10_000_000, max_images=10_000, max_pixels=1_000_000_000),
        "how far a conversation may go",
    )

    @property
    def pays_turns(self) -> bool:
        return False

    def make(self) -> Environment:
        from mmrl.sims.turns.recorded import RecordedEnvironment

        return RecordedEnvironment()


@lru_cache
def shared_tool(settings: ToolSettings) -> Tool:
    """Makes a tool once; all environments share it, since it has no state."""
    return settings.make()
