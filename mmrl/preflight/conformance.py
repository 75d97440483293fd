"""A check of one image-text model: whether it samples, scores, learns and is saved as training needs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForImageTextToText,
    AutoProcessor,
    GenerationConfig,
)

from mmrl.errors import UserError
from mmrl.policies.tokenizers import Processor
from mmrl.policies.vlm import loading
from mmrl.policies.vlm.policy import VisionLanguagePolicy
from mmrl.policies.vlm.settings import VisionLanguageModel
from mmrl.preflight import model_trials as trials
from mmrl.preflight.alarms import one_line


@dataclass(frozen=True)
class Trial:
    """One line of the table. passed: None where it was not tried, because another one failed."""

    name: str
    passed: bool | None
    text: str


@dataclass
class ModelCheck:
    """The check of the model at a path. random: gives it random weights, where only its configuration is there."""

    path: str
    random: bool = False
    trials: list[Trial] = field(default_factory=list)

    def run(self) -> list[Trial]:
        """Runs all trials, the quick ones first; what one raises is its reason."""
        processor: Processor | None = None
        model: Any = None
        policy: VisionLanguagePolicy | None = None
        if self._try("configuration", self._configuration):
            processor = self._try("processor", self._processor)
        if processor is not None and self._try("template", lambda: trials.template_line(processor)):
            self._try("placeholders", lambda: trials.placeholder_line(processor, self.path))
            model = self._try("weights", self._model)
        if model is not None and processor is not None:
            self._try("end tokens", lambda: trials.end_line(processor, model))
            policy = self._try("policy", lambda: trials.policy_of(model, processor))
        on_policy: dict[str, Callable[[VisionLanguagePolicy], Any]] = {
            "images": trials.images_line,
            "sampling": trials.sampling_line,
            "padding": trials.padding_line,
            "positions": trials.positions_line,
            "gradient": trials.gradient_line,
            "save and load": trials.saved_line,
            "LoRA": trials.lora_line,
        }
        for name, trial in on_policy.items():
            if policy is None:
                self.trials.append(Trial(name, None, "not tried: see above"))
            else:
                self._try(name, lambda trial=trial: trial(policy))  # type: ignore[misc]
        return self.trials

    @property
    def failed(self) -> bool:
        return any(not trial.passed for trial in self.trials)

    def _try(self, name: str, trial: Callable[[], Any]) -> Any:
        """Adds a line; returns what the trial returned, None where it raised."""
        try:
            result = trial()
        except (UserError, trials.FailedTrial) as error:
            self.trials.append(Trial(name, False, one_line(str(error))))
            return None
        except Exception as error:  # whatever a model's own code raises
            self.trials.append(Trial(name, False, one_line(f"{type(error).__name__}: {error}")))
            return None
        self.trials.append(Trial(name, True, result if isinstance(result, str) else type(result).__name__))
        return result

    def _configuration(self) -> str:
        config = loading.load_config(self.path)
        if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
            raise trials.FailedTrial(
                f"model.path={self.path} is a {config.model_type} model, which does not read images"
            )
        return f"{config.model_type}, {config.get_text_config().max_position_embeddings} tokens at most"

    def _processor(self) -> Any:
        return AutoProcessor.from_pretrained(self.path, trust_remote_code=False)

    def _model(self) -> Any:
        """Loads the model, or builds it from its config.json with random weights (seed 0)."""
        if not self.random:
            return loading.load_model(self.path, VisionLanguageModel(path=self.path))[0]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForImageTextToText.from_config(loading.load_config(self.path), dtype=torch.float32)
            for parameter in model.parameters():
                if parameter.dim() > 1 and not parameter.any():  # Gemma 3's projection of images: none would count
                    torch.nn.init.normal_(parameter, std=0.02)
        if (Path(self.path) / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(self.path)
        return model


def table(trials: Sequence[Trial]) -> list[str]:
    """Returns a line a trial, and one that says whether the model can be trained."""
    words = {True: "passed", False: "failed", None: "not tried"}
    width = max(len(trial.name) for trial in trials)
    failed = [trial.name for trial in trials if not trial.passed]
    end = "it passes: it can be trained" if not failed else f"it does not pass: {', '.join(failed)}"
    return [*(f"{words[trial.passed]:<9}  {trial.name:<{width}}  {trial.text}" for trial in trials), end]
