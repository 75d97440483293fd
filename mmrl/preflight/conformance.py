"""`mmrl check --model`: checks whether an image-text model can be sampled, scored, trained and saved."""

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
    """The result of one trial. passed: None if it was not run because an earlier one failed. text: one line."""

    name: str
    passed: bool | None
    text: str


@dataclass
class ModelCheck:
    """The check of one model. path: a folder or hub name. random: build it from its configuration with random weights.
    trials: results so far."""

    path: str
    random: bool = False
    trials: list[Trial] = field(default_factory=list)

    def run(self) -> list[Trial]:
        """Runs all trials, the quick ones first, and returns their results. A trial that raises has failed."""
        processor: Processor | None = None
        model: Any = None
        policy: VisionLanguagePolicy | None = None
        if self._run_trial("configuration", self._configuration):
            processor = self._run_trial("processor", self._processor)
        if processor is not None and self._run_trial("template", lambda: trials.check_template(processor)):
            self._run_trial("placeholders", lambda: trials.check_image_tokens(processor, self.path))
            model = self._run_trial("weights", self._model)
        if model is not None and processor is not None:
            self._run_trial("end tokens", lambda: trials.check_end_tokens(processor, model))
            policy = self._run_trial("policy", lambda: trials.policy_of(model, processor))
        policy_trials: dict[str, Callable[[VisionLanguagePolicy], Any]] = {
            "images": trials.check_images,
            "sampling": trials.check_sampling,
            "padding": trials.check_padding,
            "positions": trials.check_positions,
            "gradient": trials.check_gradient,
            "save and load": trials.check_saving,
            "LoRA": trials.check_lora,
        }
        for name, trial in policy_trials.items():
            if policy is None:
                self.trials.append(Trial(name, None, "not tried: see above"))
            else:
                self._run_trial(name, lambda trial=trial: trial(policy))  # type: ignore[misc]
        return self.trials

    @property
    def failed(self) -> bool:
        """Returns whether a trial has failed, or was not run."""
        return any(not trial.passed for trial in self.trials)

    def _run_trial(self, name: str, trial: Callable[[], Any]) -> Any:
        """Runs a trial and adds its result. Returns what the trial returned, or None if it raised."""
        try:
            result = trial()
        except (UserError, trials.FailedTrial) as error:
            self.trials.append(Trial(name, False, one_line(str(error))))
            return None
        except Exception as error:  # a model's own code may raise anything
            self.trials.append(Trial(name, False, one_line(f"{type(error).__name__}: {error}")))
            return None
        self.trials.append(Trial(name, True, result if isinstance(result, str) else type(result).__name__))
        return result

    def _configuration(self) -> str:
        """Returns type and maximum length of the model. Raises FailedTrial if it does not read images."""
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
                if parameter.dim() > 1 and not parameter.any():  # Gemma 3 starts its image projection at 0
                    torch.nn.init.normal_(parameter, std=0.02)
        if (Path(self.path) / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(self.path)
        return model


def table(trials: Sequence[Trial]) -> list[str]:
    """Returns one line for each trial, and a last one that says whether the model can be trained."""
    status_words = {True: "passed", False: "failed", None: "not tried"}
    width = max(len(trial.name) for trial in trials)
    failed = [trial.name for trial in trials if not trial.passed]
    summary = "it passes: it can be trained" if not failed else f"it does not pass: {', '.join(failed)}"
    return [*(f"{status_words[trial.passed]:<9}  {trial.name:<{width}}  {trial.text}" for trial in trials), summary]
