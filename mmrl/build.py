"""The parts of a job, made from its configuration."""

from __future__ import annotations

import importlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from pydantic import ValidationError

from mmrl import kernels
from mmrl.config import Config
from mmrl.engine import Engine, Ranks
from mmrl.errors import UserError

if TYPE_CHECKING:  # each is imported where it is built: an image run shall not wait for the language models' libraries
    from mmrl.generation.vllm import Generator
    from mmrl.policies.diffusion import DiffusionPolicy
    from mmrl.policies.synced import Synced
    from mmrl.policies.vla.policy import VisionLanguageActionPolicy
    from mmrl.policies.vlm import VisionLanguagePolicy
    from sims import VectorSim

BUILT_IN_TASKS = {
    "visual_qa": "tasks.visual_qa:build",
    "image_generation": "tasks.image_generation:build",
    "manipulation": "tasks.manipulation:build",
}


@runtime_checkable
class SimulatedTask(Protocol):
    """A task whose prompts are start states of episodes."""

    simulator_rows: int  # environments that may exist at once on a rank

    def make_simulator(self, rows: int) -> VectorSim: ...


def build_task(config: Config) -> Any:
    name = config.task.name
    target = BUILT_IN_TASKS.get(name, name)
    if ":" not in target:
        known = ", ".join(BUILT_IN_TASKS)
        raise UserError(f"task.name={name} is unknown; use one of {known}, or package.module:function")
    try:
        return locate(target, "task.name")(config.task.options, config.seed)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"task.{'.'.join(str(p) for p in first['loc'])}: {first['msg']}") from None
    except (ValueError, OSError, ImportError) as error:
        raise UserError(f"task: {error}") from None


def build_policy(config: Config, task: Any) -> Any:
    choose_kernels(config)
    model = config.model
    if model.build is None:
        if model.path is None:
            raise UserError("model.path is not set: give a folder or a hub name, such as Qwen/Qwen2.5-VL-3B-Instruct")
        return load_policy(config, task, model.path)
    # Each rank writes its own copy: the function is deterministic and ranks may not share a disk.
    folder = tempfile.mkdtemp(prefix="mmrl-model-")
    try:
        locate(model.build, "model.build")(folder, seed=config.seed)
        return load_policy(config, task, folder)
    finally:
        shutil.rmtree(folder)


def choose_kernels(config: Config) -> None:
    """Raises UserError if the kernels asked for by name can not be had."""
    try:
        kernels.use(config.kernels.backend)
    except kernels.KernelError as error:
        raise UserError(str(error)) from None


def load_policy(config: Config, task: Any, path: str) -> Any:
    try:
        if config.model.kind == "vision_language_action":
            return vision_language_action(config, task, path)
        load = {"vision_language": vision_language, "diffusion": diffusion_model}[config.model.kind]
        return load(config, path)
    except (OSError, ImportError, ValueError) as error:  # no weights, no processor, no flash attention, no such layer
        raise UserError(f"model {path} can not be loaded: {error}") from None


def vision_language(config: Config, path: str) -> VisionLanguagePolicy:
    from mmrl.generation.sampling import Sampling
    from mmrl.policies import vlm

    model, rollout = config.model, config.rollout
    return vlm.load(
        path,
        **model_options(config),
        freeze=model.freeze,
        processor=model.processor,
        activation_checkpointing=model.activation_checkpointing,
        sampling=Sampling(rollout.temperature, rollout.top_p, rollout.top_k),
        evaluation_temperature=config.evaluation.temperature,
        max_prompt_length=rollout.max_prompt_length,
        max_response_length=rollout.max_response_length,
        logp_chunk=config.engine.logp_chunk,
    )


def diffusion_model(config: Config, path: str) -> DiffusionPolicy:
    from mmrl.policies import diffusion

    model = config.model
    if model.freeze or model.processor:
        raise UserError("model.freeze and model.processor are for model.kind=vision_language; remove them")
    family = diffusion.load(path, **model_options(config), activation_checkpointing=model.activation_checkpointing)
    supervised = config.algorithm.method == "supervised"
    return diffusion.DiffusionPolicy(family, config.denoising, kl=config.algorithm.kl.kind, supervised=supervised)


def vision_language_action(config: Config, task: Any, path: str) -> VisionLanguageActionPolicy:
    from mmrl.policies.vla.files import load

    if not isinstance(task, SimulatedTask):
        raise UserError(
            f"model.kind=vision_language_action needs a task with a simulator; task.name={config.task.name}"
        )
    model, rollout, algorithm = config.model, config.rollout, config.algorithm
    rows = min(rollout.micro_batch or config.rollouts_per_step, task.simulator_rows)
    return load(
        path,
        config.action,
        config.denoising,
        task.make_simulator(rows),
        supervised=algorithm.method == "supervised",
        critic=algorithm.method == "ppo",
        temperature=rollout.temperature,
        evaluation_temperature=config.evaluation.temperature,
        max_prompt_length=rollout.max_prompt_length,
        seed=config.seed,
        **model_options(config),
        freeze=model.freeze,
        processor=model.processor,
    )


def model_options(config: Config) -> dict[str, Any]:
    """What every kind of model is loaded with."""
    model = config.model
    return {
        "dtype": model.dtype,
        "attention": model.attention,
        "lora": None if model.lora is None else model.lora.model_dump(),
        "reference": config.algorithm.kl.coefficient > 0,
    }


def build_engine(config: Config, policy: Any) -> Engine:
    optim = config.optim
    if not any(p.requires_grad for p in policy.module.parameters()):
        raise UserError(f"model.freeze={config.model.freeze} leaves nothing to train")
    engine = Engine(
        policy.module,
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        warmup_steps=optim.warmup_steps,
        schedule=optim.schedule,
        total_steps=config.total_updates,
        clip_grad_norm=optim.clip_grad_norm,
        zero_stage=config.engine.zero_stage,
        offload=config.engine.offload,
        dtype=config.model.dtype,
    )
    if config.engine.zero_stage == 3 and config.model.kind == "vision_language":
        from mmrl.policies.vlm import Lockstep

        policy.lockstep = Lockstep(engine.max)
    return engine


def build_generator(config: Config, policy: Any, task: Any, ranks: Ranks) -> Synced | None:
    """The engines that generate for the policy, where some are asked for."""
    if config.rollout.engine == "transformers":
        return None
    from mmrl.generation.vllm import VLLM, EngineOptions, check_installed
    from mmrl.policies.synced import Synced, adapter_rank, describe
    from mmrl.policies.vlm import transformers_model

    rollout, settings, cuda = config.rollout, config.rollout.vllm, ranks.device.type == "cuda"
    positions = transformers_model(policy.module.model).config.get_text_config().max_position_embeddings
    options = EngineOptions(
        context=min(rollout.max_prompt_length + rollout.max_response_length, positions),
        dtype=config.model.dtype,
        cache_gib=settings.cache_gib if cuda or settings.cache_gib else 1.0,
        memory=settings.memory,
        max_sequences=settings.max_sequences,
        images=settings.images,
        eager=settings.eager,
        seed=config.seed,
        tensor_parallel=settings.tensor_parallel,
        lora_rank=adapter_rank(policy.module.model) if settings.lora == "adapter" else 0,
        return_experts=settings.routing_replay,
    )
    if settings.routing_replay:
        policy.replay_routing()
    if settings.placement == "server":
        from mmrl.generation.servers import Servers

        engine: Generator = Servers(
            Path(settings.exchange or Path(config.run_dir) / "engines").absolute(),  # engines may run elsewhere
            options,
            describe=lambda folder: describe(policy, folder),
            gather=ranks.gather,
            rank=ranks.rank,
            count=settings.servers,
            addresses=settings.addresses,
            host=settings.host,
            first_device=settings.first_device,
            in_flight=settings.in_flight,
            timeout=settings.timeout,
            ray=settings.ray,
        )
    else:
        check_installed()
        with tempfile.TemporaryDirectory(prefix="mmrl-engine-") as folder:
            describe(policy, Path(folder))
            engine = VLLM(Path(folder), options)
    source = task.evaluation if task.train is None else task.train
    probes = [source[i] for i in range(min(settings.probes, len(source)))]
    limit = settings.probe_limit or (1e-3 if config.model.dtype == "float32" else 0.3)
    return Synced(policy, engine, probes, limit=limit, gather=ranks.gather, adapters=settings.lora == "adapter")


def locate(target: str, key: str) -> Callable[..., Any]:
    """The object named by "package.module:name". Raises UserError naming the configuration key."""
    module, _, name = target.partition(":")
    try:
        return vars(importlib.import_module(module))[name]
    except (ImportError, KeyError, ValueError) as error:
        raise UserError(f"{key}={target}: no such function ({error}); expected package.module:function") from None
