"""LoRA weights to start from: those that mmrl or diffusers wrote, and those of peft, as flow_grpo saves them."""

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
SINGLE_FILES = (".ckpt", ".gguf")  # never LoRA weights
PEFT_PREFIX = "base_model.model."
DIFFUSERS_WEIGHTS = "pytorch_lora_weights.safetensors"
OF_ENCODERS = ("text_encoder", "lora_te")  # how names of a text encoder's weights begin


@dataclass(frozen=True)
class Adapter:
    """LoRA weights in a file, and the pipeline that they change."""

    path: str  # model.path
    file: Path
    form: Literal["peft", "diffusers"]
    base: str

    def load(self, pipe: DiffusersPipeline, component: str) -> Any:
        """Loads the LoRA weights as adapter "default" of a component of the pipeline, such as "transformer", and
        returns its peft configuration. Raises UserError where the file also changes a text encoder or modules that
        the component does not have (they would be ignored), and where it does not change the component."""
        network = pipe.components[component]
        names = _names(self.file)
        encoder = next((name for name in names if name.startswith(OF_ENCODERS)), None)
        if encoder is not None:
            raise UserError(
                f"model.path={self.path}: {self.file.name} changes a text encoder too ({encoder}), and mmrl trains the "
                f"{component} alone; merge that part into the pipeline first"
            )
        try:
            if self.form == "peft":
                self._load_peft(network)
            else:
                self._check_names(names, network, component)
                pipe.load_lora_weights(self.file.parent, weight_name=self.file.name, adapter_name="default")
        except (ValueError, RuntimeError, KeyError) as error:
            first = str(error).strip().splitlines()[0]
            raise UserError(f"model.path={self.path} does not fit the pipeline {self.base}: {first}") from None
        if not network._hf_peft_config_loaded:
            raise UserError(f"model.path={self.path}: {self.file.name} has no LoRA weights of the {component}")
        return network.peft_config["default"]

    def _check_names(self, names: list[str], network: Any, component: str) -> None:
        """Raises UserError for weights in diffusers' own names of a module that the network has not; diffusers itself
        only warns of them."""
        modules = {name for name, _ in network.named_modules()}
        prefix = f"{component}."
        own = {name.removeprefix(prefix).split(".lora")[0] for name in names if name.startswith(prefix)}
        self._refuse(sorted(own - modules))

    def _refuse(self, foreign: list[str]) -> None:
        if foreign:
            more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
            raise UserError(
                f"model.path={self.path}: {self.file.name} changes {foreign[0]}{more}, which the network of "
                f"{self.base} has not; set model.base to the pipeline that it was trained on"
            )

    def _load_peft(self, network: Any) -> None:
        """Loads LoRA weights in peft's format into the network, as adapter "default". Raises UserError for weights that
        are missing or do not fit."""
        from peft import LoraConfig, PeftConfig, set_peft_model_state_dict  # takes a second to import

        config = PeftConfig.from_pretrained(str(self.file.parent))
        if not isinstance(config, LoraConfig):
            raise UserError(f"model.path={self.path} holds a {config.peft_type} of peft; only LoRA is supported")
        config.inference_mode, config.lora_dropout = False, 0.0  # with dropout replay would differ from sampling
        network.add_adapter(config, adapter_name="default")
        state = {name.removeprefix(PEFT_PREFIX): value for name, value in load_file(self.file).items()}
        result: Any = set_peft_model_state_dict(network, state, adapter_name="default")
        self._refuse(sorted(result.unexpected_keys))
        missing = [name for name in result.missing_keys if "lora_" in name]
        if missing:
            raise UserError(f"model.path={self.path}: {self.file.name} has no weights of {missing[0]}")


def adapter_at(path: str, base: str | None) -> Adapter | None:
    """Returns the LoRA weights at `path`, a folder or a file; None where a whole pipeline or nothing is there. base:
    the pipeline that they change; None: the one that they name.

    Raises UserError where nothing says which pipeline they change, and for a `base` beside a whole pipeline."""
    weights = _weights_at(Path(path))
    if weights is None:
        if base is not None:
            raise UserError(
                f"model.base={base} names the pipeline that LoRA weights at model.path change, and no LoRA weights are "
                f"at {path} ({DIFFUSERS_WEIGHTS}, or {PEFT_CONFIG} and {PEFT_WEIGHTS}); leave it out"
            )
        return None
    file, form = weights
    named = base or _named_base(file.parent, form)
    if named is None:
        raise UserError(
            f"model.path={path} holds LoRA weights that do not name their pipeline; set model.base to its folder or "
            "hub name"
        )
    return Adapter(path, file, form, named)


def single_file(path: Path) -> UserError:
    """Returns the refusal of a whole model in one file, with the line that makes a folder of it."""
    if path.suffix == ".gguf":
        return UserError(
            f"model.path={path} holds quantised weights, which are not trained; name the unquantised model"
        )
    folder = path.with_suffix("")
    return UserError(
        f"model.path={path} is a whole model in one file; make a folder of it with diffusers, and name that: "
        f"PIPELINE.from_single_file('{path}').save_pretrained('{folder}'), where PIPELINE is the model's class, such "
        "as StableDiffusion3Pipeline"
    )


def _weights_at(path: Path) -> tuple[Path, Literal["peft", "diffusers"]] | None:
    """Returns the file with LoRA weights at `path` and its format; None where there is another kind of model. Raises
    UserError for a single-file checkpoint and an ambiguous folder."""
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
                raise UserError(f"model.path={path} has a {PEFT_CONFIG} and no {PEFT_WEIGHTS} beside it")
            return folder / PEFT_WEIGHTS, "peft"
    if not path.is_dir() or (path / "model_index.json").is_file():
        return None
    files = sorted(path.glob("*.safetensors"))
    usual = path / DIFFUSERS_WEIGHTS
    if usual not in files and len(files) > 1:
        raise UserError(f"model.path={path} holds {', '.join(f.name for f in files)}; name one of these files")
    chosen = usual if usual in files else files[0] if files else None
    return None if chosen is None or not any("lora" in name for name in _names(chosen)) else (chosen, "diffusers")


def _named_base(folder: Path, form: str) -> str | None:
    """Returns the pipeline that the files in a folder name, absolute where it is a folder."""
    if (folder / BASE_FILE).is_file():
        return str(json.loads((folder / BASE_FILE).read_text())["base"])
    if form != "peft":
        return None
    named = json.loads((folder / PEFT_CONFIG).read_text()).get("base_model_name_or_path")
    if not named:
        return None
    for part in ("/transformer", "/unet"):  # peft saw the network alone
        named = named.removesuffix(part)
    return str(named)


def _names(file: Path) -> list[str]:
    with safe_open(file, "pt") as weights:
        return list(weights.keys())
