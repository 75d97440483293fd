"""Settings that all types of models share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import model_validator

from mmrl.protocols.requirements import Capabilities
from mmrl.settings import Choice, Section, option

if TYPE_CHECKING:
    from mmrl.engine.memory import MemoryModel
    from mmrl.protocols.job import JobConfig
    from mmrl.protocols.parts import Policy

Collects = Literal["groups", "rollouts", "demonstrations"]
Sections = dict[str, type[Section]]  # by name; an alias, because inside a Choice `type` is a field


class LoRA(Section):
    """Low-rank adapters that are trained in place of the weights (arXiv 2106.09685)."""

    rank: int = option(16, "rank of the weight update", ge=1)
    alpha: float = option(32.0, "the weight update is scaled by alpha / rank", gt=0)
    dropout: float = option(0.0, "must be 0: with dropout the replayed ratio is not 1 before the first update")
    targets: str | list[str] = option("all-linear", "names of the modules that get adapters")

    init: Literal["zero", "orthogonal"] = option(
        "zero",
        "initial weights, which leave the model's output as it is: one factor 0, or both random with orthogonal rows, "
        "so that both are trained from the first step (LoRA-RLPO's orthonormal factors, reconstructed with peft's)",
    )

    @property
    def peft_init(self) -> Literal[True, "orthogonal"]:
        """The value of peft's init_lora_weights that means `init`."""
        return True if self.init == "zero" else "orthogonal"

    @model_validator(mode="after")
    def _rank_is_even(self) -> LoRA:
        if self.init == "orthogonal" and self.rank % 2:
            raise ValueError(f"rank={self.rank} is odd, but init=orthogonal needs an even one")
        return self

    @model_validator(mode="after")
    def _no_dropout(self) -> LoRA:
        """Raises ValueError for a dropout other than 0."""
        if self.dropout != 0.0:
            raise ValueError(
                f"dropout={self.dropout} must be 0: with dropout a replay does not give the probabilities of sampling, "
                "so the ratio is not 1 before the first update"
            )
        return self


class ModelSettings(Choice):
    """The section `model`: where the model comes from, which sections its jobs have, and what its decisions
    support."""

    title: ClassVar[str] = "model"
    kinds: ClassVar[dict[str, str]] = {
        "vision_language": "mmrl.policies.vlm.settings:VisionLanguageModel",
        "diffusion": "mmrl.policies.diffusion.settings:DiffusionModel",
        "vision_language_action": "mmrl.policies.vla.settings:VisionLanguageActionModel",
        "few_step_diffusion": "mmrl.policies.few_step_diffusion.settings:FewStepModel",
        "prompt_rewriting": "mmrl.policies.prompt_rewriting.settings:PromptRewritingModel",
        "autoregressive_image": "mmrl.policies.autoregressive_image.settings:AutoregressiveImageModel",
        "discrete_diffusion": "mmrl.policies.discrete_diffusion.settings:MaskedModel",
        "uniform_diffusion": "mmrl.policies.discrete_diffusion.uniform_settings:UniformModel",
    }
    type: str = "vision_language"
    path: str | None = option(None, "folder or hub name of the model; alternatives: `build`, `warm_start`")
    build: str | None = option(
        None, "package.module:function that is called with (folder, seed=...) and writes a model built in code"
    )
    warm_start: str | None = option(
        None, "configuration file in the same folder; the run starts from the final weights of that configuration's run"
    )
    dtype: Literal["float32", "bfloat16"] = option(
        "float32", "number format of the weights; the optimizer keeps fp32 weights"
    )

    @model_validator(mode="after")
    def _one_origin(self) -> ModelSettings:
        """Raises ValueError if more than one of path, build and warm_start is set."""
        keys = [key for key in ("path", "build", "warm_start") if vars(self)[key] is not None]
        if len(keys) > 1:
            raise ValueError(
                f"{' and '.join(keys)} are set, but a model comes from only one of them; set the others to null"
            )
        return self

    @classmethod
    @abstractmethod
    def sections(cls, tree: Mapping[str, Any], collects: Collects) -> Sections:
        """Returns the sections that jobs with this type of model add or extend, as classes by the section's name.

        tree: the configuration as the user wrote it, before validation. collects: what the algorithm learns from."""

    @abstractmethod
    def capabilities(self, config: JobConfig) -> Capabilities:
        """Returns the abilities of this job's decisions, such as an entropy, which algorithms and terms may require."""

    @abstractmethod
    def load(self, config: JobConfig, task: object, path: str) -> Policy:
        """Loads the policy whose weights are at `path`. Raises UserError, OSError, ImportError or ValueError if it
        cannot be loaded."""

    @property
    def frozen(self) -> ModelSettings:
        """The settings of a teacher model of the same type, which is not trained."""
        return self

    def load_teacher(self, config: JobConfig, task: object, path: str) -> Policy:
        """Loads a teacher for distillation, whose weights are at `path`. Raises as `load`."""
        return self.frozen.load(config, task, path)

    def memory_model(self, config: JobConfig, path: str) -> MemoryModel | None:
        """Returns the network at `path` on the meta device and what this job computes with it, for the memory estimate.
        Returns None for networks too small to need one. Raises UserError if the sizes are not known without weights."""
        return None

    def check(self, config: JobConfig) -> None:
        """Raises ValueError for settings of other sections that this model does not support."""
