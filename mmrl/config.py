"""The configuration of a job, from a YAML file and dotted overrides.

`model.type` and `algorithm.type` decide which sections and keys there are: a type of model adds its own sections, and
the algorithm selects the class of the section `rollout`. So an option that has no effect in the job is an unknown key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import create_model

from mmrl.algorithms.algorithm import Algorithm
from mmrl.algorithms.grpo import GRPO
from mmrl.checkpoints.settings import Checkpoint
from mmrl.collection.checks import check_sources
from mmrl.collection.settings import Demonstrations, Groups
from mmrl.engine.settings import AdamW, EngineSettings, Kernels, Optim
from mmrl.errors import UserError
from mmrl.evaluation.search import SampleSettings
from mmrl.evaluation.settings import Evaluation
from mmrl.generation.settings import Correction, GeneratorSettings, RolloutWorkers, VLLMGenerator
from mmrl.monitors.guards import Guard
from mmrl.policies.settings import ModelSettings
from mmrl.policies.vlm.settings import VisionLanguageModel
from mmrl.protocols.requirements import Capabilities, Needs, check, merge_needs
from mmrl.report.settings import Log
from mmrl.settings import Section, SettingsError, kind_of, make, option, plain, recipes
from mmrl.settings import overrides as layering
from mmrl.settings.tree import TreeError, Whole, read_overrides, read_yaml
from mmrl.tasks.settings import TaskSettings
from mmrl.tasks.visual_qa.settings import VisualQASettings


class Config(Section):
    """The sections that every job has. The configuration of a job is a subclass with further sections, see `job`."""

    run_dir: str = option(
        description="the run directory; by default runs/KIND/NAME for configs/KIND/NAME.yaml, else runs/NAME"
    )
    seed: int = option(0, "seed of all random numbers", ge=0)
    steps: int = option(100, "batches of rollouts, or of demonstrations", unit="steps", ge=1)
    threads: int | None = option(None, "CPU threads of torch in each process", ge=1)
    model: ModelSettings = option(VisionLanguageModel(), "the model that is trained")
    task: TaskSettings = option(VisualQASettings(), "prompts, rewards and evaluation")
    rollout: Demonstrations = option(Groups(), "the rollouts or demonstrations of a step")
    algorithm: Algorithm = option(GRPO(), "advantages and loss")
    optim: Optim = option(AdamW(), "the optimizer")
    engine: EngineSettings = option(EngineSettings(), "training with DeepSpeed")
    evaluation: Evaluation = option(Evaluation(), "evaluation on held-out prompts")
    checkpoint: Checkpoint = option(Checkpoint(), "saving and resuming")
    log: Log = option(Log(), "output about the run")
    sample: SampleSettings = option(SampleSettings(), "search for answers after training")
    guards: list[Guard] = option([], "bounds of metrics, and actions when a metric leaves them")
    kernels: Kernels = option(Kernels(), "backend of the fused operators")

    def section(self, name: str) -> Any:
        """Returns the section `name` that only some types of model have, such as "denoising"."""
        return vars(self)[name]

    @property
    def generator(self) -> GeneratorSettings | RolloutWorkers | None:
        """Settings of the engine or the workers that sample in place of the policy; None if it samples."""
        return self.rollout.producer

    @property
    def correction(self) -> Correction:
        """Settings of the importance-sampling correction for log-probabilities of the generator that differ from the
        trained model's."""
        assert isinstance(self.generator, VLLMGenerator | RolloutWorkers)
        return self.generator.correction

    @property
    def group_size(self) -> int:
        return self.rollout.rollouts_per_prompt

    @property
    def rollouts_per_step(self) -> int:
        return self.rollout.prompts * self.group_size

    @property
    def total_updates(self) -> int:
        return self.steps * self.algorithm.updates

    @property
    def needs(self) -> Needs:
        return merge_needs(needs for _, needs in self._parts())

    def _parts(self) -> list[tuple[str, Needs]]:
        """Returns the key and the needs of each part of the algorithm and of each source of `rollout.extras`."""
        sources = self.rollout.extra_sources
        return [
            *self.algorithm.parts(),
            *((f"rollout.extras.{i} ({source.type})", source.needs) for i, source in enumerate(sources)),
        ]

    @property
    def offered(self) -> Capabilities:
        """Returns the capabilities of the job's model, and what sources of `rollout.extras` add to them."""
        offered = self.model.capabilities(self)
        added = [source.offers for source in self.rollout.extra_sources]
        return replace(offered, offers=offered.offers.union(*added))

    def check(self) -> None:
        """Checks that sections fit one another: above all that the model offers what the algorithm and its parts need.
        Raises ValueError with the key."""
        offered = self.offered
        check(self._parts(), offered)
        check_sources(self)
        self.algorithm.check(self, offered)
        if self.sample.search is not None:
            self.sample.search.check(offered)
        self.model.check(self)
        if self.engine.zero_stage not in offered.zero_stages:
            stages = ", ".join(map(str, offered.zero_stages))
            raise ValueError(
                f"engine.zero_stage={self.engine.zero_stage} does not go with {offered.source}; use one of {stages}"
            )
        copying = [key for key, needs in self._parts() if any(measured.trains_copy for measured in needs.measurements)]
        if self.engine.zero_stage == 3 and copying:
            raise ValueError(
                f"engine.zero_stage=3 shards the weights over the ranks, but {copying[0]} trains a full copy of the "
                "policy on each rank; use 0, 1 or 2"
            )
        for name in self.optim.groups:
            if name not in offered.groups or (name == "critic" and not self.needs.critic):
                has = ", ".join(group for group in offered.groups if group != "critic" or self.needs.critic) or "none"
                raise ValueError(
                    f"optim.groups.{name}: this job's model has no such group of parameters (it has {has}); remove it"
                )
        if self.model.dtype == "bfloat16" and self.engine.zero_stage == 0:
            raise ValueError(
                "model.dtype=bfloat16 does not go with engine.zero_stage=0, in which DeepSpeed makes a first step "
                "without gradient that decays the weights; set engine.zero_stage=1 or higher"
            )


def job(tree: Mapping[str, Any]) -> type[Config]:
    """Returns the configuration class for the model.type and the algorithm.type of a tree (nested mappings, as in a
    YAML file). Raises SettingsError for an unknown type."""
    model = kind_of(ModelSettings, tree.get("model") or {}, ("model",))
    algorithm = kind_of(Algorithm, tree.get("algorithm") or {}, ("algorithm",))
    sections = model.sections(tree, algorithm.collects)
    model_type = ModelSettings.expand(tree.get("model") or {}).get("type")
    return _config_class(model, model_type or model.model_fields["type"].default, algorithm, tuple(sections.items()))


@cache
def _config_class(
    model: type[ModelSettings],
    model_type: str,
    algorithm: type[Algorithm],
    sections: tuple[tuple[str, type[Section]], ...],
) -> type[Config]:
    """Creates the subclass of `Config` for a job. model_type: the `model.type` that selects `model`. sections: names
    and classes of the sections that this model adds."""
    sections_by_name: dict[str, Any] = {"rollout": algorithm.collection}
    for name, specific in sections:
        shared = sections_by_name.get(name)
        if shared is None and name in Config.model_fields:
            shared = Config.model_fields[name].annotation
        if shared is not None:  # a section that every job has and the model extends: the class has the keys of both
            specific = create_model(
                shared.__name__, __base__=(specific, shared), __module__=specific.__module__, __doc__=shared.__doc__
            )
        sections_by_name[name] = specific
    described = {n: f.description for n, f in Config.model_fields.items()}
    fields: dict[str, Any] = {
        name: (section, option(section(), described.get(name) or section.__doc__ or ""))
        for name, section in sections_by_name.items()
    }
    fields["model"] = (ModelSettings, option(model(type=model_type), described["model"] or ""))
    return create_model("Config", __base__=Config, **fields)


def load(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Reads a YAML file, follows its `extends`, applies dotted overrides such as `optim.lr=1e-5`, and validates.

    path: a file, or the name of a recipe that comes with the package. `run_dir` is runs/KIND/NAME for the recipe
    configs/KIND/NAME.yaml and runs/NAME for another file, unless file or overrides set it.

    Raises UserError with one line that names the key, its nearest valid name where there is one, and the file.
    """
    try:
        files = read_yaml(Path(path))
        path = files[-1][0]
        trees = [_with_warm_start(tree, file.parent) for file, tree in files]
        trees += [_with_warm_start(override, path.parent) for override in read_overrides(overrides or [])]
        tree = {"run_dir": recipes.run_dir(path), **laid_over(*trees)}
        resolved = OmegaConf.to_container(OmegaConf.create(tree), resolve=True, throw_on_missing=True)
    except TreeError as error:
        raise UserError(str(error)) from None
    except (OmegaConfBaseException, yaml.YAMLError) as error:  # an undefined ${...}, or a ??? that is not filled in
        raise UserError(f"{path}: {' '.join(str(error).split())}") from None
    assert isinstance(resolved, dict)
    values: dict[str, Any] = {str(key): value for key, value in resolved.items()}
    if _warm_start(values) != _warm_start(tree):  # it held a ${...}, which is resolved only now
        values = _with_warm_start(values, path.parent)
    return validate(values, str(path))


def _with_warm_start(tree: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Resolves the path of the recipe `model.warm_start` in a tree: paths in a YAML file are relative to its folder.
    Returns the tree with a path that is valid from the working directory."""
    model = tree.get("model")
    keys = model.value if isinstance(model, Whole) else model
    if not isinstance(keys, Mapping) or not isinstance(name := keys.get("warm_start"), str) or "${" in name:
        return tree
    resolved = {**keys, "warm_start": str(recipes.resolve_from(folder, name))}
    return {**tree, "model": Whole(resolved) if isinstance(model, Whole) else resolved}


def _warm_start(tree: Mapping[str, Any]) -> object:
    """Returns `model.warm_start` of a tree, or None."""
    model = tree.get("model")
    return model.get("warm_start") if isinstance(model, Mapping) else None


def configure(tree: Mapping[str, Any], overrides: list[str] | None = None) -> Config:
    """Returns the configuration for nested mappings with the content of a YAML file. Raises UserError as `load`."""
    try:
        merged = laid_over(dict(tree), *read_overrides(overrides or []))
    except TreeError as error:
        raise UserError(str(error)) from None
    return validate(merged, "configuration")


def laid_over(*trees: dict[str, Any]) -> dict[str, Any]:
    """Merges trees; values of later ones win. See `mmrl.settings.overrides.laid_over`. Raises TreeError."""
    return layering.laid_over(job, *trees)


def validate(tree: dict[str, Any], origin: str) -> Config:
    """Builds and checks the configuration from a merged tree. Raises UserError that begins with `origin`, such as the
    path of the YAML file."""
    try:
        config = make(job(tree), tree)
        config.check()
    except (SettingsError, ValueError) as error:
        raise UserError(f"{origin}: {error}") from None
    return config


def to_yaml(config: Config) -> str:
    """Returns the configuration as YAML, without keys that are null or empty."""
    return yaml.safe_dump(plain(config, brief=True), sort_keys=False, default_flow_style=None, width=120)
