"""Settings that every task shares."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from mmrl.settings import Choice

if TYPE_CHECKING:
    from mmrl.protocols.parts import Task


class TaskSettings(Choice):
    """A task: prompts to train on, prompts held out, what a rollout earns, and what counts as success."""

    title: ClassVar[str] = "task"
    kinds: ClassVar[dict[str, str]] = {
        "visual_qa": "mmrl.tasks.visual_qa.settings:VisualQASettings",
        "visual_games": "mmrl.tasks.visual_games.settings:VisualGamesSettings",
        "image_generation": "mmrl.tasks.image_generation.settings:ImageGenerationSettings",
        "prompt_rewriting": "mmrl.tasks.image_generation.rewriting_settings:PromptRewritingSettings",
        "video_generation": "mmrl.tasks.video_generation.settings:VideoGenerationSettings",
        "text_sums": "mmrl.tasks.text_sums.settings:TextSumsSettings",
        "manipulation": "mmrl.tasks.manipulation.settings:ManipulationSettings",
    }
    type: str = "visual_qa"

    @property
    def shows_held_out(self) -> bool:
        """Returns whether a base is trained on what RL holds out from it later, as a key of the data says."""
        return False

    @abstractmethod
    def build(self, seed: int) -> Task:
        """Builds the task; seed: of the prompts to train on. Raises ValueError, OSError or ImportError in one line, and
        UserError."""
