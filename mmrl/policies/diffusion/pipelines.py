"""Loads diffusers pipelines from folders and hub names, each as the family of its class."""

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
    """Loads a family from a pipeline's folder or hub name, or from a folder with LoRA weights that `save` wrote.

    Only the transformer or U-Net is trained: all of it, or with model.lora adapters on it, which have its dtype. The
    VAE runs in fp32.

    Raises UserError if there is no usable pipeline at `path`, or a setting does not apply to it.
    """
    if model.attention != "sdpa":
        raise UserError(f"model.attention={model.attention}: diffusion pipelines run with sdpa")
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
    adapted = adapter is not None or model.lora is not None
    if model.embeddings is not None and not adapted:
        raise UserError(
            f"model.embeddings={model.embeddings} leaves the encoders out, without which a whole pipeline can not be "
            "saved; set model.lora"
        )
    if adapter is not None:
        _same_adapter(path, adapter.load(pipe, family.trained), model.lora)
    elif model.lora is not None:
        add_lora(network, model.lora)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_("lora_" in name or not adapted)
    if model.activation_checkpointing:
        network.enable_gradient_checkpointing()
    pipeline = family(pipe, base, lora=adapted, text_tokens=model.text_tokens, encoders_stay=model.encoders == "stay")
    if model.embeddings is not None:
        pipeline.embeddings = Embeddings(model.embeddings, type(pipe).__name__, pipeline.text_tokens)
    return pipeline


def base_of(path: str, named: str | None = None) -> str:
    """Returns the pipeline to load for `path`, absolute if it is a folder. named: that of LoRA weights which name none
    themselves."""
    adapter = adapter_at(path, named)
    base = path if adapter is None else adapter.base
    return str(Path(base).resolve()) if Path(base).is_dir() else base


def family_of(name: object, named: str | None, where: str) -> type[Pipeline]:
    """Returns the class of a pipeline's family. name: of the pipeline's class, as its folder has it. named:
    package.module:Class, in its place (model.family). where: for messages. Raises UserError where there is none."""
    if named is not None:
        return own_family(named)
    if not isinstance(name, str) or name not in CLASSES:
        raise UserError(
            f"{where} is a {name}; supported are {', '.join(CLASSES)}, and others by model.family=package.module:Class"
        )
    return CLASSES[name]


def own_family(named: str) -> type[Pipeline]:
    """Returns the class at package.module:Class. Raises UserError where that is not a family."""
    try:
        kind = load_attribute(named)
    except (ImportError, KeyError, ValueError) as error:
        raise UserError(f"model.family={named} cannot be imported: {describe_error(error)}") from None
    if not (isinstance(kind, type) and issubclass(kind, Pipeline)):
        raise UserError(f"model.family={named} is not a subclass of {Pipeline.__module__}:Pipeline")
    return kind


def _pipeline(
    path: str, base: str, dtype: str, named: str | None, *, encoders: bool = True
) -> tuple[DiffusersPipeline, type[Pipeline]]:
    """Loads a pipeline, without text encoders if `encoders` is false, and returns it with its family's class."""
    where = f"model.path={path}" if path == base else f"model.path={path}, whose base is {base}"
    try:
        index = DiffusionPipeline.load_config(base)
    except OSError as error:
        raise UserError(f"{where}: no diffusers pipeline there ({_first_line(error)})") from None
    name = index.get("_class_name")
    family = family_of(name, named, where)
    absent: dict[str, None] = {part: None for part, source in index.items() if source == [None, None]}
    needed = family.encoders if encoders else ()
    absent |= {part: None for part in family.encoders if not encoders and part in index}
    tokenizers = [encoder.replace("text_encoder", "tokenizer") for encoder in needed]
    for part in (family.trained, "vae", "scheduler", *needed, *tokenizers):
        present = part in index and part not in absent and (not Path(base).is_dir() or (Path(base) / part).is_dir())
        if not present and part.replace("tokenizer", "text_encoder") not in family.optional:
            raise UserError(f"{where} has no {part}, which {name} needs")
    _check_scheduler(where, base, index["scheduler"][1], family, name)
    kind = getattr(torch, dtype)
    try:
        pipe = (family.pipeline_class or DiffusionPipeline).from_pretrained(
            base, dtype={"default": kind, "vae": torch.float32}, use_safetensors=True, **absent
        )
    except (OSError, ValueError) as error:
        raise UserError(f"{where} can not be loaded: {_first_line(error)}") from None
    return pipe, family


def _check_scheduler(where: str, base: str, name: str, family: type[Pipeline], pipeline: str) -> None:
    """Raises UserError for a scheduler whose noise levels the family does not read."""
    config: Mapping[str, Any] = {}
    if name in family.schedules.kinds:
        kind: Any = getattr(diffusers, name)
        try:
            config = kind.from_pretrained(base, subfolder="scheduler").config
        except (OSError, ValueError, NotImplementedError) as error:
            raise UserError(f"{where}: its scheduler can not be loaded: {_first_line(error)}") from None
    fault = family.schedules.fault(name, config)
    if fault is not None:
        raise UserError(f"{where}: the scheduler of this {pipeline} is a {name}: {fault}")


def add_lora(network: Any, lora: LoRA) -> None:
    """Adds a new LoRA adapter to the network. Raises UserError where its targets match no module."""
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
        raise UserError(f"model.lora.targets={targets}: {_first_line(error)}") from None


def _same_adapter(path: str, saved: LoraConfig, lora: LoRA | None) -> None:
    if lora is not None and (lora.rank, lora.alpha) != (saved.r, saved.lora_alpha):
        raise UserError(
            f"model.path={path} holds an adapter of rank {saved.r} and alpha {saved.lora_alpha}; set model.lora to "
            "these or leave it out"
        )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
