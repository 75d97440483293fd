"""Estimates the memory of training and sampling diffusers pipelines, by running network and VAE on the meta device."""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline
from torch import Tensor

from mmrl.engine.memory import MemoryModel, on_meta
from mmrl.errors import UserError
from mmrl.policies.diffusion.families.pipeline import Pipeline
from mmrl.policies.diffusion.pipelines import add_lora, base_of, family_of
from mmrl.policies.diffusion.settings import Denoising, DiffusionModel, ImageChain, ImageEngine
from mmrl.settings import plain

if TYPE_CHECKING:
    from mmrl.protocols.job import JobConfig

# Configurations of AutoencoderKL (KL16: with 16 latent channels, as in SD3 and FLUX) and of FLUX's transformer
KL = {"in_channels": 3, "out_channels": 3, "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2}
KL |= {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
KL16 = {**KL, "latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False}
FLUX = {"in_channels": 64, "num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128}
FLUX |= {"num_attention_heads": 24, "joint_attention_dim": 4096, "pooled_projection_dim": 768, "guidance_embeds": True}
T5, CLIP_L, CLIP_G = 4.762e9, 0.123e9, 0.695e9  # numbers of parameters
# Sizes of published pipelines, so that they need no download: class of the pipeline, class and configuration of network
# and VAE, and number of parameters of the text encoders.
PUBLISHED: dict[str, tuple[str, dict[str, tuple[str, dict[str, Any]]], dict[str, float]]] = {
    "stabilityai/stable-diffusion-3.5-medium": (
        "StableDiffusion3Pipeline",
        {
            "transformer": (
                "SD3Transformer2DModel",
                {
                    "sample_size": 128,
                    "patch_size": 2,
                    "in_channels": 16,
                    "out_channels": 16,
                    "num_layers": 24,
                    "attention_head_dim": 64,
                    "num_attention_heads": 24,
                    "joint_attention_dim": 4096,
                    "caption_projection_dim": 1536,
                    "pooled_projection_dim": 2048,
                    "pos_embed_max_size": 384,
                    "dual_attention_layers": tuple(range(13)),
                    "qk_norm": "rms_norm",
                },
            ),
            "vae": ("AutoencoderKL", KL16),
        },
        {"T5-XXL": T5, "CLIP-L": CLIP_L, "CLIP-G": CLIP_G},
    ),
    "black-forest-labs/FLUX.1-dev": (
        "FluxPipeline",
        {"transformer": ("FluxTransformer2DModel", FLUX), "vae": ("AutoencoderKL", KL16)},
        {"T5-XXL": T5, "CLIP-L": CLIP_L},
    ),
    "black-forest-labs/FLUX.1-Kontext-dev": (
        "FluxKontextPipeline",
        {"transformer": ("FluxTransformer2DModel", FLUX), "vae": ("AutoencoderKL", KL16)},
        {"T5-XXL": T5, "CLIP-L": CLIP_L},
    ),
    "black-forest-labs/FLUX.2-klein-4B": (
        "Flux2KleinPipeline",
        {
            "transformer": (
                "Flux2Transformer2DModel",
                {
                    "in_channels": 128,
                    "num_layers": 5,
                    "num_single_layers": 20,
                    "attention_head_dim": 128,
                    "num_attention_heads": 24,
                    "joint_attention_dim": 7680,
                    "guidance_embeds": False,
                },
            ),
            "vae": ("AutoencoderKLFlux2", {}),
        },
        {"Qwen3-4B": 4.022e9},
    ),
    "Tongyi-MAI/Z-Image-Turbo": (
        "ZImagePipeline",
        {"transformer": ("ZImageTransformer2DModel", {}), "vae": ("AutoencoderKL", KL16)},
        {"Qwen3-4B": 4.022e9},
    ),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": (
        "WanPipeline",
        {
            "transformer": ("WanTransformer3DModel", {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}),
            "vae": ("AutoencoderKLWan", {}),
        },
        {"UMT5-XXL": 5.681e9},
    ),
}


def parts(
    path: str, base: str | None = None, own_class: str | None = None
) -> tuple[str, dict[str, tuple[str, dict[str, Any]]], dict[str, float]]:
    """Returns the class name of a pipeline, class name and configuration of its network and VAE, and the number of
    parameters of its text encoders by name.

    path: model.path. base: model.base, the pipeline of a LoRA whose files do not name it. own_class: model.family.
    Raises UserError if there is no supported pipeline at `path`.
    """
    base = base_of(path, base)
    if base in PUBLISHED:
        return PUBLISHED[base]
    try:
        index = DiffusionPipeline.load_config(base)
    except OSError as error:
        raise UserError(
            f"model.path={path} is not a diffusers pipeline ({str(error).strip().splitlines()[0]}); name a folder or "
            "hub name of one"
        ) from None
    name = index.get("_class_name")
    family = family_of(name, own_class, f"model.path={path}")
    components = {}
    for part in (family.trained, "vae"):
        # diffusers imports its classes when they are first used; until then they are not in vars()
        component = vars(diffusers).get(index[part][1]) or diffusers.__getattr__(index[part][1])
        config = component.load_config(base, subfolder=part)
        components[part] = (index[part][1], {key: value for key, value in config.items() if not key.startswith("_")})
    # without encoders that the pipeline lacks: the index has no entry for them, or [None, None]
    encoders = {
        part: float(_parameters(base, part, index[part][1])) for part in family.encoders if index.get(part, [None])[0]
    }
    return name, components, encoders


def _parameters(base: str, part: str, name: str) -> int:
    """Returns the number of parameters of a text encoder. part: its subfolder; name: its class in transformers."""
    config = transformers.AutoConfig.from_pretrained(base, subfolder=part, trust_remote_code=False)
    with on_meta("bfloat16"):
        encoder = transformers.__getattr__(name)(config)
    return sum(p.numel() for p in encoder.parameters())


def family(path: str, settings: DiffusionModel) -> tuple[Pipeline, dict[str, float]]:
    """Builds the pipeline that `pipelines.load` would load, on the meta device, without weights. Returns it with the
    number of parameters of its text encoders by name."""
    name, components, encoders = parts(path, settings.base, settings.family)
    family_class = family_of(name, settings.family, f"model.path={path}")
    with on_meta(settings.dtype):
        network_class, network_config = components[family_class.trained]
        network = diffusers.__getattr__(network_class)(**network_config)
    with on_meta("float32"):
        vae = diffusers.__getattr__(components["vae"][0])(**components["vae"][1])
    pipeline_class = family_class.pipeline_class or diffusers.__getattr__(name)
    # required arguments, the components that are not built (encoders, tokenizers, the scheduler), are None
    defaults = {k: p.default for k, p in inspect.signature(pipeline_class.__init__).parameters.items() if k != "self"}
    arguments = {k: (None if default is inspect.Parameter.empty else default) for k, default in defaults.items()}
    pipe: Any = pipeline_class(**{**arguments, family_class.trained: network, "vae": vae})
    vae.requires_grad_(False)
    if settings.decoding != "whole":
        vae.enable_slicing()
    if settings.decoding == "tiled":
        vae.enable_tiling()
    if settings.lora is not None:
        add_lora(network, settings.lora)
        torch.nn.Module.to(network, getattr(torch, settings.dtype))  # as DeepSpeed does
    for parameter_name, parameter in network.named_parameters():
        parameter.requires_grad_("lora_" in parameter_name or settings.lora is None)
    if settings.activation_checkpointing:
        network.enable_gradient_checkpointing()
    network.train()
    return family_class(pipe, path, lora=settings.lora is not None, text_tokens=settings.text_tokens), encoders


def memory_model(settings: DiffusionModel, config: JobConfig, path: str) -> MemoryModel:
    """Returns the network of a pipeline and the passes whose memory is estimated. Raises UserError as `parts` does, and
    for an image size that the pipeline does not support."""
    denoising = config.section("denoising")
    pipeline, encoders = family(path, settings)
    shape = pipeline.latent_shape(denoising.resolution, denoising.frames)
    condition = pipeline.meta_condition(shape)
    steps = rows_per_rollout(config)
    engine: ImageEngine = config.engine
    micro = config.engine.micro_batch
    max_rows = engine.steps_at_once or micro * steps  # further rows are recomputed in the backward pass
    at_once = min(config.rollouts_per_step, config.rollout.generated_at_once or config.rollouts_per_step)

    def predict(rows: int) -> Tensor:
        """Runs the network on `rows` latents."""
        x = torch.empty(rows, *shape, device="meta")
        return pipeline.predict(
            pipeline.module, x, torch.empty(rows, device="meta"), [condition] * rows, denoising.embedded_guidance
        )

    def sample() -> None:
        """Runs one denoising step of the images that are sampled together, and decodes them as `settings` says."""
        predict(at_once)
        pipeline.autoencoder.decode_on_device(
            torch.empty(1 if settings.decoding != "whole" else at_once, *shape, device="meta")
        )

    bytes_per_number = torch.empty(0, dtype=getattr(torch, settings.dtype)).element_size()
    encoder_bytes = {f"encoder {name}": count * bytes_per_number for name, count in encoders.items()}
    vae_bytes = sum(p.numel() for p in pipeline.pipe.vae.parameters()) * 4  # fp32
    encoders_stay = settings.encoders == "stay"
    tokens = math.prod(shape[1:]) // pipeline.patch**2
    return MemoryModel(
        pipeline.module,
        lambda rows: predict(min(rows * steps, max_rows)),
        sample=sample,
        sampling_parts={"VAE": float(vae_bytes), **encoder_bytes},
        training_parts=dict(encoder_bytes) if encoders_stay else {},
        notes=[
            f"a micro-batch is {micro} x {steps} denoising steps = "
            f"{micro * steps} rows of {'x'.join(map(str, shape))} latents, {tokens} tokens each"
        ],
    )


def rows_per_rollout(config: JobConfig) -> int:
    """Returns the number of rows (denoising steps or noise levels) that one rollout adds to the batch of a replay."""
    denoising = config.section("denoising")
    if not isinstance(denoising, Denoising):
        return int(denoising.draws)
    likelihood = denoising.likelihood
    if isinstance(likelihood, ImageChain):
        window = likelihood.window
        # a window without a size holds all steps
        return int(plain(window).get("size") or denoising.steps)
    fields = plain(likelihood)  # draws: noise levels of a rollout; steps: the last denoising steps
    return int(fields.get("draws") or fields.get("steps") or 1)
