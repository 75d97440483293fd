"""Settings that every task shares."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from mmrl.settings import Choice

if TYPE_CHECKING:
    from mmrl.protocols.parts import Task


class TaskSettings(Choice):
    """A task: training prompts, held-out prompts, the rewards of a rollout, and the measure of success."""

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
        """Returns whether the task trains on the held-out split as well, so that a base model can learn what RL later
        holds out."""
        return False

    @abstractmethod
    def build(self, seed: int) -> Task:
        """Builds the task. seed: the random seed of the training prompts.

        Raises UserError, or a ValueError, OSError or ImportError with a message of one line.
        """


def check_held_out(train: Path | None, evaluation: Path | None, share: float | None) -> None:
    """Raises ValueError unless exactly one of two keys says which prompts are held out: `eval`, a file of them, or
    `heldout`, a share of the file `train`."""
    if evaluation is not None and share is not None:
        raise ValueError(
            f"eval={evaluation} and heldout={share:g} are both set, here or in a file that is extended; set one of "
            "them to null"
        )
    if evaluation is None and share is None:
        raise ValueError("set either eval, a file of held-out prompts, or heldout, a share of train")
    if share is not None and train is None:
        raise ValueError("heldout is a share of train; set train to a file of prompts")
