"""Estimates whether a job fits into the memory of given GPUs, and with which settings it would. Weights are not
read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mmrl.config import Config
from mmrl.doctor.time_estimate import update_lines
from mmrl.engine.memory import GIB, MemoryModel, accumulates_in_fp32, peak_activations, static_memory
from mmrl.errors import UserError
from mmrl.generation.settings import TransformersGenerator, VLLMColocated
from mmrl.measurements.teachers import PathTeacher
from mmrl.settings import plain, sections_in

MAX_FILL = 0.9  # share of a GPU that a job may fill; the rest is for fragmentation and everything not estimated
CUDA_CONTEXT = 1.0 * GIB  # of CUDA, its libraries and NCCL
BUCKET_ELEMENTS = 5e8  # elements of DeepSpeed's reduction buffer
MAX_GATHERED = 1e9  # maximum number of weights that ZeRO-3 keeps gathered
RENDERER = 0.2 * GIB  # an EGL context and its buffers, for each worker
PHYSX = 2.0 * GIB  # of ManiSkill's physics and renderer on the GPU, without its cameras
GPUS = {  # GiB by name, as nvidia-smi shows them
    "t4": 15.0,
    "v100": 31.7,
    "rtx3090": 24.0,
    "rtx4090": 24.0,
    "l4": 22.5,
    "a10": 22.5,
    "rtx5090": 31.8,
    "a6000": 48.0,
    "l40s": 45.0,
    "a100-40": 39.6,
    "a100": 79.3,
    "h100": 79.6,
    "h200": 139.8,
    "b200": 178.4,
}


@dataclass(frozen=True)
class Gpu:
    """A type of GPU. size: its memory in bytes."""

    name: str
    size: float

    @classmethod
    def parse(cls, text: str) -> Gpu:
        """Returns the GPU for a name in GPUS or a number of GiB. Raises UserError for any other text."""
        name = text.strip().lower()
        if name in GPUS:
            return cls(name, GPUS[name] * GIB)
        try:
            size = float(name)
        except ValueError:
            size = 0.0
        if not 0 < size < 10_000:
            raise UserError(
                f"--gpu={text} is not known; give the GPU's memory in GiB, such as 80, or one of {', '.join(GPUS)}"
            )
        return cls(f"{size:g} GiB", size * GIB)


@dataclass(frozen=True)
class Plan:
    """The memory of one rank's GPU in bytes, by what uses it, while it trains and while it samples rollouts.

    notes: lines below the table.
    """

    training: dict[str, float]
    sampling: dict[str, float]
    notes: tuple[str, ...]

    @property
    def max_bytes(self) -> float:
        """The memory of the larger phase."""
        return max(sum(self.training.values()), sum(self.sampling.values()))

    def fits(self, gpu: Gpu) -> bool:
        return self.max_bytes <= MAX_FILL * gpu.size

    def lines(self) -> list[str]:
        """Returns the plan as a text table in GiB, one line for each use."""
        names = [name for name in {**self.training, **self.sampling} if max(self._phase_bytes(name)) >= 0.005 * GIB]
        lines = [f"{'GiB of a rank':<28} {'training':>9} {'rollouts':>9}"]
        lines += [
            f"{name:<28} {self._phase_bytes(name)[0] / GIB:>9.2f} {self._phase_bytes(name)[1] / GIB:>9.2f}"
            for name in names
        ]
        sums = [sum(phase.values()) / GIB for phase in (self.training, self.sampling)]
        return [*lines, f"{'sum':<28} {sums[0]:>9.2f} {sums[1]:>9.2f}", *self.notes]

    def _phase_bytes(self, name: str) -> tuple[float, float]:
        return self.training.get(name, 0.0), self.sampling.get(name, 0.0)


class Peaks:
    """A cache of the activation peaks of one network in training and in sampling, since most overrides change only one
    of the two."""

    def __init__(self) -> None:
        self._computed: dict[str, float] = {}

    def compute(self, config: Config, memory: MemoryModel, *, trains: bool) -> float:
        """Returns the peak of activations in bytes, while the network trains or while it samples."""
        # the key of the cache holds only settings that change the peak
        relevant = plain(config)
        engine = relevant.pop("engine")
        relevant.pop("optim")
        if trains:
            relevant["engine"] = {k: v for k, v in engine.items() if k not in ("zero_stage", "offload")}
            # An update depends on the lengths of prompts and responses only, not on how many are sampled at once.
            if "max_prompt_length" in relevant["rollout"]:
                relevant["rollout"].pop("micro_batch", 0)
            else:
                relevant.pop("rollout")
        else:
            relevant["engine"] = engine["zero_stage"] == 3
            relevant["model"].pop("activation_checkpointing", None)
        key = f"{trains} {relevant}"
        if key not in self._computed:
            compute = (lambda: memory.train(config.engine.micro_batch)) if trains else memory.sample
            self._computed[key] = 0.0 if compute is None else peak_activations(memory.module, compute, trains=trains)
        return self._computed[key]


def compute_plan(config: Config, memory: MemoryModel, ranks: int, gpu: Gpu, peaks: Peaks) -> Plan:
    """Returns the memory plan of one rank of `ranks`. gpu: its size determines the memory of a colocated vLLM.

    memory: the network without weights. peaks: the cache of its activation peaks.
    """
    engine, dtype = config.engine, config.model.dtype
    bytes_of_states = static_memory(memory.module, engine.zero_stage, ranks, dtype, len(config.optim.moments))
    num_trained = sum(p.numel() for p in memory.module.parameters() if p.requires_grad)
    num_weights = sum(p.numel() for p in memory.module.parameters())
    bytes_per_weight = 2 if dtype == "bfloat16" else 4
    num_local, num_sharded = (
        num_trained / (ranks if engine.zero_stage == 3 else 1),
        num_trained / (ranks if engine.zero_stage else 1),
    )
    both_phases = {"weights": bytes_of_states["weights"], "optimizer": bytes_of_states["optimizer"]}
    if engine.offload != "none":
        both_phases["optimizer"] = 0.0
    if engine.offload == "all":
        both_phases["weights"] = 0.0
    if engine.zero_stage == 3:
        both_phases["gathered weights"] = min(MAX_GATHERED, num_weights) * bytes_per_weight
    num_averages = (config.optim.ema is not None) + (config.algorithm.slow_sampling is not None)
    both_phases["averages"] = (
        num_averages * num_local * (4 + bytes_per_weight)
    )  # in fp32; and while they are in use, a copy of the weights
    # the reference's weights, and while they are in use, a copy of the policy's
    both_phases["reference"] = 2 * num_local * bytes_per_weight if config.needs.reference else 0.0
    both_phases["teachers"] = teacher_weights(config) * bytes_per_weight
    num_copies = sum(measurement.trains_copy for measurement in config.needs.measurements)
    both_phases["trained copies"] = num_copies * trained_copy_bytes(num_weights, num_trained, bytes_per_weight)
    both_phases["simulators"] = simulator_bytes(config)
    both_phases["context and reduction"] = CUDA_CONTEXT + (
        min(BUCKET_ELEMENTS, num_trained) * bytes_per_weight if engine.zero_stage in (1, 2) else 0.0
    )
    on_gpu = engine.zero_stage and engine.offload == "none"
    training = {
        **both_phases,
        "gradients": bytes_of_states["gradients"],
        "fp32 gradients of a step": flat_gradient_bytes(engine.zero_stage, dtype) * num_sharded if on_gpu else 0.0,
        "activations": peaks.compute(config, memory, trains=True),
        "logits chunk": memory.logits,
        **memory.training_parts,
    }
    sampling = {**both_phases, **memory.sampling_parts, "keys and values": memory.cache}
    sampling["activations"] = peaks.compute(config, memory, trains=False)
    if engine.zero_stage == 3 and isinstance(config.generator, TransformersGenerator) and config.generator.gather:
        sampling["gathered weights"] = num_weights * bytes_per_weight
    if isinstance(config.generator, VLLMColocated):
        sampling["vLLM's share"] = config.generator.memory * gpu.size
    return Plan(training, sampling, tuple(memory.notes))


def teacher_weights(config: Config) -> int:
    """Returns the number of weights of all teachers that are named by path. Teachers from recipes are small, and not
    counted. Raises UserError if the size of a teacher is unknown."""
    loaded = {teacher.path for _, teacher in sections_in(config.algorithm, PathTeacher) if teacher.path is not None}
    return sum(count_weights(config, path) for path in sorted(loaded))


def trained_copy_bytes(num_weights: int, num_trained: int, bytes_per_weight: int) -> int:
    """Returns the bytes of a second network of the policy's size that is trained beside it.

    It has all weights; each trained one has a gradient, two fp32 moments and, if weights are bfloat16, an fp32 copy
    with its gradient. num_weights: the number of weights of the policy. num_trained: of these, the number of trained
    ones.
    """
    return num_weights * bytes_per_weight + num_trained * (bytes_per_weight + 8 + (8 if bytes_per_weight < 4 else 0))


def count_weights(config: Config, path: str) -> int:
    """Returns the number of weights of another model of the policy's type. Raises UserError if it is unknown."""
    memory = config.model.frozen.memory_model(config, path)
    if memory is None:
        raise UserError(f"teacher {path} is one of mmrl's small networks; its memory is not estimated")
    return sum(p.numel() for p in memory.module.parameters())


def flat_gradient_bytes(zero_stage: int, dtype: str) -> int:
    """Returns the bytes that DeepSpeed's flat gradients take for each trained weight: 4 in fp32, and 2 more if they are
    summed in bfloat16 first."""
    return 6 if dtype == "bfloat16" and not accumulates_in_fp32(zero_stage, dtype) else 4


def simulator_bytes(config: Config) -> float:
    """Returns a rough estimate of the bytes that a rank's simulators take on its GPU for rendering and physics."""
    task = plain(config.task)
    options = task.get("options") or {}
    if "simulator" not in task:
        return 0.0
    # 224 x 224 pixels if the simulator has no option for the size of its images
    images = 224**2 if not options.get("image_size") else options["image_size"] ** 2
    cameras = task["rows"] * images * (4 + 4 + 4)  # color, depth and segmentation, 4 bytes each
    if options.get("sim_backend") == "physx_cuda":
        return PHYSX + cameras
    return (task.get("workers") or 1) * RENDERER if task["simulator"] != "tabletop" else 0.0


LoadConfig = Callable[[Sequence[str]], Config]  # returns the configuration with further overrides


def memory_saving_overrides(config: Config, ranks: int) -> list[str]:
    """Returns overrides that would lower the memory of a job, in the order of the time that they cost."""
    model, engine = plain(config.model), plain(config.engine)
    overrides = []
    if model.get("activation_checkpointing") is False:
        overrides.append("model.activation_checkpointing=true")
    if model["dtype"] == "float32" and ranks >= 1 and engine["zero_stage"] > 0:
        overrides.append("model.dtype=bfloat16")
    if engine["zero_stage"] < 2 and ranks > 1:
        overrides.append("engine.zero_stage=2")
    steps = engine.get("steps_at_once")
    if steps is not None and steps > 1:
        overrides.append(f"engine.steps_at_once={steps // 2}")
    if (engine.get("micro_tokens") or 1) > 1:
        overrides.append(f"engine.micro_tokens={engine['micro_tokens'] // 2}")
    if engine["micro_batch"] > 1:
        overrides.append(f"engine.micro_batch={engine['micro_batch'] // 2}")
    if "steps_at_once" in engine and steps is None:
        overrides.append("engine.steps_at_once=4")
    if engine.get("steps_at_once", 1) is None and engine["micro_batch"] == 1:
        overrides.append("engine.steps_at_once=1")
    if engine.get("logp_chunk", 0) > 256:
        overrides.append(f"engine.logp_chunk={engine['logp_chunk'] // 2}")
    if isinstance(config.generator, VLLMColocated) and config.generator.memory > 0.15:
        overrides.append(f"rollout.generator.memory={config.generator.memory - 0.1:.2g}")
    rows = plain(config.rollout).get("micro_batch", 1) or config.rollouts_per_step
    if "micro_batch" in plain(config.rollout) and rows > 1:
        overrides.append(f"rollout.micro_batch={rows // 2}")
    if engine["zero_stage"] < 3 and ranks > 1:
        overrides.append("engine.zero_stage=3")
    if engine["zero_stage"] == 3 and isinstance(config.generator, TransformersGenerator) and config.generator.gather:
        overrides.append("rollout.generator={type: transformers, gather: false}")
    if "lora" in model and model["lora"] is None:
        overrides.append("model.lora={rank: 32, alpha: 64}")
    if engine["offload"] == "none" and engine["zero_stage"] > 0:
        overrides.append("engine.offload=optimizer")
    return overrides


def fit_overrides(load_config: LoadConfig, path: str, ranks: int, gpu: Gpu, peaks: Peaks) -> tuple[list[str], Plan]:
    """Returns overrides with which a job fits `gpu`, or comes closest to it, and the plan with them.

    An override is taken if it lowers the memory of the larger phase by 1 %. Those that make the configuration invalid
    are skipped. path: the model's folder or hub name.
    """
    overrides: list[str] = []
    config = load_config(overrides)
    best_plan = plan_job(config, path, ranks, gpu, peaks)
    rejected: set[str] = set()
    while not best_plan.fits(gpu):
        for override in memory_saving_overrides(config, ranks):
            if override in rejected:
                continue
            candidate_overrides = [*(c for c in overrides if c.split("=")[0] != override.split("=")[0]), override]
            try:
                candidate = load_config(candidate_overrides)
            except UserError:
                rejected.add(override)
                continue
            candidate_plan = plan_job(candidate, path, ranks, gpu, peaks)
            if candidate_plan.max_bytes < 0.99 * best_plan.max_bytes:
                overrides, config, best_plan = candidate_overrides, candidate, candidate_plan
                break
            rejected.add(override)
        else:  # no override lowers the memory any more
            break
    return overrides, best_plan


def plan_job(config: Config, path: str, ranks: int, gpu: Gpu, peaks: Peaks) -> Plan:
    """Returns the plan of a job. path: the model's folder or hub name. Raises UserError if the size of the model is
    unknown without its weights."""
    memory = config.model.memory_model(config, path)
    if memory is None:
        raise UserError(f"model.path={path} is one of mmrl's small networks; its memory is not estimated")
    return compute_plan(config, memory, ranks, gpu, peaks)


def spare_memory_advice(load_config: LoadConfig, path: str, ranks: int, gpu: Gpu, peaks: Peaks) -> str:
    """Returns advice to switch activation checkpointing off if the job then still fits; else "".

    Checkpointing repeats the forward pass, so that an update costs four forward passes instead of three.
    """
    if plain(load_config([]).model).get("activation_checkpointing") is not True:
        return ""
    override = "model.activation_checkpointing=false"
    larger = plan_job(load_config([override]), path, ranks, gpu, peaks)
    if not larger.fits(gpu):
        return ""
    return f"; {override} fits too ({larger.max_bytes / GIB:.1f} GiB) and saves up to a quarter of an update"


def memory_lines(load_config: LoadConfig, ranks: int, gpus: Sequence[Gpu]) -> list[str]:
    """Returns the lines about memory of a dry run: the plan, and for each GPU whether the job fits, or what would make
    it fit. Raises UserError if the model's size is unknown."""
    config = load_config([])
    if config.model.path is None:
        raise UserError("model.path is not set: the size of a model that the job builds is unknown; set model.path")
    path, peaks = config.model.path, Peaks()
    largest = max(gpus, key=lambda gpu: gpu.size)
    largest_plan = plan_job(config, path, ranks, largest, peaks)
    lines = [f"estimated memory of each of {ranks} ranks, computed without weights:", *largest_plan.lines()]
    for gpu in gpus:
        depends_on_gpu = isinstance(config.generator, VLLMColocated)
        gpu_plan = plan_job(config, path, ranks, gpu, peaks) if depends_on_gpu else largest_plan
        usable = MAX_FILL * gpu.size / GIB
        if gpu_plan.fits(gpu):
            fits = f"{gpu.name}: fits ({gpu_plan.max_bytes / GIB:.1f} of {usable:.1f} GiB, a tenth left free)"
            lines.append(fits + spare_memory_advice(load_config, path, ranks, gpu, peaks))
            continue
        overrides, best_plan = fit_overrides(load_config, path, ranks, gpu, peaks)
        short = f"{gpu.name}: does not fit ({gpu_plan.max_bytes / GIB:.1f} of {usable:.1f} GiB, a tenth left free)"
        with_ = " ".join(f"'{c}'" if " " in c else c for c in overrides)
        if best_plan.fits(gpu):
            lines.append(f"{short}; fits with {with_} ({best_plan.max_bytes / GIB:.1f} GiB)")
        else:
            lines.append(
                f"{short}; no known setting makes it fit, the closest is {with_ or 'no change'} "
                f"({best_plan.max_bytes / GIB:.1f} GiB)"
            )
    memory = config.model.memory_model(config, path)
    assert memory is not None  # `plan_job` raised otherwise
    return [*lines, *update_lines(config, memory, ranks, [gpu.name for gpu in gpus])]
