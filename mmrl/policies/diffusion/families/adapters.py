"""Loads LoRA weights to start from: in the format of diffusers, as mmrl saves them, or of PEFT, as flow_grpo does."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import safe_open
from safetensors.torch import load_file

from mmrl.errors import UserError
from mmrl.policies.diffusion.families.components import BASE_FILE, DiffusersPipeline

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SINGLE_FILES = (".ckpt", ".gguf")  # formats of full models, never of LoRA weights
PEFT_PREFIX = "base_model.model."
DIFFUSERS_WEIGHTS = "pytorch_lora_weights.safetensors"
ENCODER_PREFIXES = ("text_encoder", "lora_te")  # of the names of weights of text encoders


@dataclass(frozen=True)
class Adapter:
    """A file of LoRA weights, and the pipeline that they belong to."""

    path: str  # model.path
    file: Path
    form: Literal["peft", "diffusers"]  # format of the file
    base: str  # folder or hub name of the pipeline

    def load(self, pipe: DiffusersPipeline, component: str) -> Any:
        """Loads the LoRA weights as adapter "default" of a component, such as "transformer". Returns the PEFT
        configuration.

        Raises UserError if the file also has weights for a text encoder, or for modules that the component does not
        have (they would be ignored), or none for the component.
        """
        network = pipe.components[component]
        names = _names(self.file)
        encoder = next((name for name in names if name.startswith(ENCODER_PREFIXES)), None)
        if encoder is not None:
            raise UserError(
                f"model.path={self.path}: {self.file.name} has LoRA weights for a text encoder too ({encoder}), but "
                f"mmrl trains only the {component}; merge that part into the pipeline first"
            )
        try:
            if self.form == "peft":
                self._load_peft(network)
            else:
                self._check_names(names, network, component)
                pipe.load_lora_weights(self.file.parent, weight_name=self.file.name, adapter_name="default")
        except (ValueError, RuntimeError, KeyError) as error:
            first_line = str(error).strip().splitlines()[0]
            raise UserError(
                f"model.path={self.path} does not fit the pipeline {self.base}: {first_line}; set model.base to the "
                "pipeline that the LoRA was trained on"
            ) from None
        if not network._hf_peft_config_loaded:
            raise UserError(
                f"model.path={self.path}: {self.file.name} has no LoRA weights for the {component}; name another file"
            )
        return network.peft_config["default"]

    def _check_names(self, names: list[str], network: Any, component: str) -> None:
        """Raises UserError for weights with the names of diffusers whose module the network does not have; diffusers
        would only log a warning. names: the names of the weights in the file."""
        modules = {name for name, _ in network.named_modules()}
        prefix = f"{component}."
        changed_modules = {name.removeprefix(prefix).split(".lora")[0] for name in names if name.startswith(prefix)}
        self._refuse(sorted(changed_modules - modules))

    def _refuse(self, unknown_names: list[str]) -> None:
        """Raises UserError if there are any names of weights or modules that the network does not have."""
        if unknown_names:
            more = f" and {len(unknown_names) - 1} more" if len(unknown_names) > 1 else ""
            raise UserError(
                f"model.path={self.path}: {self.file.name} has weights for {unknown_names[0]}{more}, which the "
                f"network of {self.base} does not have; set model.base to the pipeline that the LoRA was trained on"
            )

    def _load_peft(self, network: Any) -> None:
        """Loads LoRA weights in PEFT's format as adapter "default" of the network. Raises UserError for missing and
        unknown weights."""
        from peft import LoraConfig, PeftConfig, set_peft_model_state_dict  # takes a second to import

        config = PeftConfig.from_pretrained(str(self.file.parent))
        if not isinstance(config, LoraConfig):
            raise UserError(
                f"model.path={self.path} is a PEFT adapter of type {config.peft_type}, but only LoRA is supported"
            )
        config.inference_mode, config.lora_dropout = False, 0.0  # with dropout replay would differ from sampling
        network.add_adapter(config, adapter_name="default")
        state = {name.removeprefix(PEFT_PREFIX): value for name, value in load_file(self.file).items()}
        result: Any = set_peft_model_state_dict(network, state, adapter_name="default")
        self._refuse(sorted(result.unexpected_keys))
        missing = [name for name in result.missing_keys if "lora_" in name]
        if missing:
            raise UserError(
                f"model.path={self.path}: {self.file.name} lacks the weights of {missing[0]}; take a complete file"
            )


def adapter_at(path: str, base: str | None) -> Adapter | None:
    """Returns the LoRA weights at `path`, a folder or file; None if a full pipeline or nothing is there.

    base: model.base, the pipeline that they belong to; None: the one that their files name. Raises UserError if no
    pipeline is known, and if `base` is given but there are no LoRA weights.
    """
    weights = _weights_at(Path(path))
    if weights is None:
        if base is not None:
            raise UserError(
                f"model.base={base} is the base pipeline of a LoRA, but model.path={path} has no LoRA weights "
                f"({DIFFUSERS_WEIGHTS}, or {PEFT_CONFIG} and {PEFT_WEIGHTS}); leave model.base out"
            )
        return None
    file, form = weights
    pipeline = base or _named_base(file.parent, form)
    if pipeline is None:
        raise UserError(
            f"model.path={path} has LoRA weights that do not name their base pipeline; set model.base to its folder or "
            "hub name"
        )
    return Adapter(path, file, form, pipeline)


def single_file(path: Path) -> UserError:
    """Returns the error for a full model in a single file, with the command that converts it to a folder."""
    if path.suffix == ".gguf":
        return UserError(
            f"model.path={path} has quantised weights, which cannot be trained; name the unquantised model"
        )
    folder = path.with_suffix("")
    return UserError(
        f"model.path={path} is a full model in a single file; convert it to a folder with diffusers "
        "and set model.path to that: "
        f"PIPELINE.from_single_file('{path}').save_pretrained('{folder}'), where PIPELINE is the model's class, such "
        "as StableDiffusion3Pipeline"
    )


def _weights_at(path: Path) -> tuple[Path, Literal["peft", "diffusers"]] | None:
    """Returns the file with LoRA weights at `path` and its format; None if there are none. Raises UserError for a full
    model in a single file, and for a folder with several files."""
    if path.is_file() and path.suffix in SINGLE_FILES:
        raise single_file(path)
    if path.is_file() and path.suffix == ".safetensors":
        if path.name == PEFT_WEIGHTS:
            return path, "peft"
        if not any("lora" in name for name in _names(path)):
            raise single_file(path)
        return path, "diffusers"
    for folder in (path, path / "lora"):  # flow_grpo's checkpoints have a folder of this name
        if (folder / PEFT_CONFIG).is_file():
            if not (folder / PEFT_WEIGHTS).is_file():
                raise UserError(f"model.path={path} has a {PEFT_CONFIG} but no {PEFT_WEIGHTS}; add it")
            return folder / PEFT_WEIGHTS, "peft"
    if not path.is_dir() or (path / "model_index.json").is_file():
        return None
    files = sorted(path.glob("*.safetensors"))
    usual = path / DIFFUSERS_WEIGHTS
    if usual not in files and len(files) > 1:
        raise UserError(f"model.path={path} holds {', '.join(f.name for f in files)}; set model.path to one of them")
    file = usual if usual in files else files[0] if files else None
    if file is None or not any("lora" in name for name in _names(file)):
        return None
    return file, "diffusers"


def _named_base(folder: Path, form: str) -> str | None:
    """Returns the base pipeline that the files of a LoRA name; None if they do not name it. form: peft or diffusers."""
    if (folder / BASE_FILE).is_file():
        return str(json.loads((folder / BASE_FILE).read_text())["base"])
    if form != "peft":
        return None
    named = json.loads((folder / PEFT_CONFIG).read_text()).get("base_model_name_or_path")
    if not named:
        return None
    for part in ("/transformer", "/unet"):  # PEFT recorded the folder of the network
        named = named.removesuffix(part)
    return str(named)


def _names(file: Path) -> list[str]:
    """Returns the names of the tensors in a safetensors file."""
    with safe_open(file, "pt") as weights:
        return list(weights.keys())
