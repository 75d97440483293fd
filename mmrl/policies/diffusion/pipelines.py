"""Loads diffusers pipelines from folders or from the hub, each with the `Pipeline` subclass (family) for its class."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from diffusers.utils.logging import disable_progress_bar
from torch import nn

from mmrl.errors import UserError, describe_error
from mmrl.policies.diffusion import sentences  # noqa: F401  diffusers loads its network only from imported modules
from mmrl.policies.diffusion.embeddings import Embeddings
from mmrl.policies.diffusion.families.adapters import adapter_at
from mmrl.policies.diffusion.families.components import DiffusersPipeline
from mmrl.policies.diffusion.families.edits import Flux2Klein, FluxKontext, QwenImageEdit, QwenImageEditPlus
from mmrl.policies.diffusion.families.images import (
    AuraFlow,
    Flux,
    QwenImage,
    StableDiffusion,
    StableDiffusion3,
    StableDiffusionXL,
    ZImage,
)
from mmrl.policies.diffusion.families.pipeline import Pipeline
from mmrl.policies.diffusion.families.videos import HunyuanVideo, LTXVideo, Wan
from mmrl.policies.diffusion.settings import DiffusionModel
from mmrl.policies.settings import LoRA
from mmrl.runtime.logging import bars_shown
from mmrl.settings import load_attribute

if TYPE_CHECKING:
    from peft import LoraConfig

CLASSES: dict[str, type[Pipeline]] = {
    "StableDiffusion3Pipeline": StableDiffusion3,
    "FluxPipeline": Flux,
    "QwenImagePipeline": QwenImage,
    "StableDiffusionPipeline": StableDiffusion,
    "StableDiffusionXLPipeline": StableDiffusionXL,
    "ZImagePipeline": ZImage,
    "AuraFlowPipeline": AuraFlow,
    "WanPipeline": Wan,
    "LTXPipeline": LTXVideo,
    "HunyuanVideoPipeline": HunyuanVideo,
    "FluxKontextPipeline": FluxKontext,
    "QwenImageEditPipeline": QwenImageEdit,
    "QwenImageEditPlusPipeline": QwenImageEditPlus,
    "Flux2KleinPipeline": Flux2Klein,
}


def load(path: str, model: DiffusionModel) -> Pipeline:
    """Loads a pipeline. path: its folder or hub name, or the folder or file of LoRA weights, which name their pipeline.

    Only the transformer or U-Net is trained: all of its weights, or a LoRA (model.lora) of the same dtype. The VAE runs
    in fp32. Raises UserError if there is no supported pipeline at `path`, or if a setting does not apply to it.
    """
    if model.attention != "sdpa":
        raise UserError(f"model.attention={model.attention} is not supported for diffusion pipelines; set it to sdpa")
    if not bars_shown():
        disable_progress_bar()
    adapter = adapter_at(path, model.base)
    base = base_of(path, model.base)
    pipe, family = _pipeline(path, base, model.dtype, model.family, encoders=model.embeddings is None)
    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            part.requires_grad_(False).eval()  # dropout would make replay differ from sampling
    if model.decoding != "whole":
        pipe.vae.enable_slicing()
    if model.decoding == "tiled":
        pipe.vae.enable_tiling()
    network = pipe.components[family.trained]
    has_lora = adapter is not None or model.lora is not None
    if model.embeddings is not None and not has_lora:
        raise UserError(
            f"with model.embeddings={model.embeddings} text encoders are not loaded, so the full pipeline cannot be "
            "saved; set model.lora: then only the LoRA is saved"
        )
    if adapter is not None:
        _check_same_lora(path, adapter.load(pipe, family.trained), model.lora)
    elif model.lora is not None:
        add_lora(network, model.lora)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_("lora_" in name or not has_lora)
    if model.activation_checkpointing:
        network.enable_gradient_checkpointing()
    pipeline = family(pipe, base, lora=has_lora, text_tokens=model.text_tokens, encoders_stay=model.encoders == "stay")
    if model.embeddings is not None:
        pipeline.embeddings = Embeddings(model.embeddings, type(pipe).__name__, pipeline.text_tokens)
    return pipeline


def base_of(path: str, lora_base: str | None = None) -> str:
    """Returns the pipeline to load for `path`: `path` itself, or the base of the LoRA there; an absolute path if it
    is a folder. lora_base: model.base, the base of a LoRA whose files do not name it."""
    adapter = adapter_at(path, lora_base)
    base = path if adapter is None else adapter.base
    return str(Path(base).resolve()) if Path(base).is_dir() else base


def family_of(name: object, own_class: str | None, where: str) -> type[Pipeline]:
    """Returns the `Pipeline` subclass for a pipeline.

    name: the pipeline's class in its model_index.json. own_class: model.family, package.module:Class, which takes
    precedence. where: "model.path=PATH", for messages. Raises UserError if no subclass is known for the pipeline.
    """
    if own_class is not None:
        return own_family(own_class)
    if not isinstance(name, str) or name not in CLASSES:
        raise UserError(
            f"{where} is a {name}, which is not supported; take one of {', '.join(CLASSES)}, or write a "
            f"subclass of {Pipeline.__module__}:Pipeline for it and set model.family=package.module:Class"
        )
    return CLASSES[name]


def own_family(own_class: str) -> type[Pipeline]:
    """Returns the class that model.family names as package.module:Class. Raises UserError if it cannot be imported or
    is no subclass of `Pipeline`."""
    try:
        family = load_attribute(own_class)
    except (ImportError, KeyError, ValueError) as error:
        raise UserError(f"model.family={own_class} cannot be imported: {describe_error(error)}") from None
    if not (isinstance(family, type) and issubclass(family, Pipeline)):
        raise UserError(f"model.family={own_class} is not a subclass of {Pipeline.__module__}:Pipeline; make it one")
    return family


def _pipeline(
    path: str, base: str, dtype: str, own_class: str | None, *, encoders: bool = True
) -> tuple[DiffusersPipeline, type[Pipeline]]:
    """Loads a pipeline, without text encoders if `encoders` is false. Returns it with its `Pipeline` subclass.

    path: model.path. base: the pipeline to load. dtype: the number format of all components except the VAE, such as
    "bfloat16". own_class: model.family. Raises UserError if there is no supported pipeline at `base`, or components of
    it are missing.
    """
    is_base = base == path or Path(base) == Path(path).resolve()
    where = f"model.path={path}" if is_base else f"model.path={path}, whose base is {base},"
    if not Path(base).exists() and "/" not in base:
        raise UserError(
            f"{where}: there is no folder {base}, and a name on the Hugging Face hub has the form user/model"
        )
    try:
        index = DiffusionPipeline.load_config(base)
    except OSError as error:
        raise UserError(
            f"{where} is not a diffusers pipeline ({_first_line(error)}); name a folder or hub name of one"
        ) from None
    name = index.get("_class_name")
    family = family_of(name, own_class, where)
    # Components that are not loaded; model_index.json has [None, None] for those that the pipeline lacks
    absent: dict[str, None] = {part: None for part, source in index.items() if source == [None, None]}
    needed = family.encoders if encoders else ()
    absent |= {part: None for part in family.encoders if not encoders and part in index}
    tokenizers = [encoder.replace("text_encoder", "tokenizer") for encoder in needed]
    for part in (family.trained, "vae", "scheduler", *needed, *tokenizers):
        # whether a component's folder exists can be checked only for a local pipeline
        present = part in index and part not in absent and (not Path(base).is_dir() or (Path(base) / part).is_dir())
        if not present and part.replace("tokenizer", "text_encoder") not in family.optional:
            raise UserError(f"{where} has no {part}, which {name} needs; take a complete pipeline")
    _check_scheduler(where, base, index["scheduler"][1], family, name)
    torch_dtype = getattr(torch, dtype)
    try:
        pipe = (family.pipeline_class or DiffusionPipeline).from_pretrained(
            base, dtype={"default": torch_dtype, "vae": torch.float32}, use_safetensors=True, **absent
        )
    except (OSError, ValueError) as error:
        raise UserError(f"{where} cannot be loaded: {_first_line(error)}") from None
    return pipe, family


def _check_scheduler(where: str, base: str, name: str, family: type[Pipeline], pipeline: str) -> None:
    """Raises UserError if the family does not support the scheduler. name: class name of the scheduler; pipeline: class
    name of the pipeline; where: "model.path=PATH", for messages."""
    config: Mapping[str, Any] = {}
    if name in family.schedules.kinds:
        scheduler_class: Any = getattr(diffusers, name)
        try:
            config = scheduler_class.from_pretrained(base, subfolder="scheduler").config
        except (OSError, ValueError, NotImplementedError) as error:
            raise UserError(f"{where}: its scheduler cannot be loaded: {_first_line(error)}") from None
    problem = family.schedules.problem(name, config)
    if problem is not None:
        raise UserError(f"{where}: the scheduler of this {pipeline} is a {name}: {problem}")


def add_lora(network: Any, lora: LoRA) -> None:
    """Adds a new LoRA to the network. Raises UserError if its targets match no module."""
    from peft import LoraConfig  # takes a second to import

    targets = lora.targets
    if targets == "all-linear":
        targets = [name for name, part in network.named_modules() if isinstance(part, nn.Linear)]
    try:
        network.add_adapter(
            LoraConfig(
                r=lora.rank,
                lora_alpha=lora.alpha,  # type: ignore[arg-type]
                target_modules=targets,
                init_lora_weights=lora.peft_init,
            )
        )
    except ValueError as error:
        raise UserError(
            f"model.lora.targets={targets} matches no module of the network ({_first_line(error)}); name linear "
            "layers, or set all-linear"
        ) from None


def _check_same_lora(path: str, saved: LoraConfig, lora: LoRA | None) -> None:
    """Raises UserError if model.lora differs from the LoRA at model.path in rank or alpha."""
    if lora is not None and (lora.rank, lora.alpha) != (saved.r, saved.lora_alpha):
        raise UserError(
            f"model.lora has rank {lora.rank} and alpha {lora.alpha}, but the LoRA at model.path={path} has rank "
            f"{saved.r} and alpha {saved.lora_alpha}; set model.lora to these, or leave it out"
        )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
