"""Estimates whether a job fits given GPUs, and the settings with which it would, without its weights."""

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

ROOM = 0.9  # share of a GPU that a job may fill; the rest is for fragmentation and what is not counted
CONTEXT = 1.0 * GIB  # of CUDA, its libraries and NCCL
BUCKET = 5e8  # elements of DeepSpeed's reduction buffer
GATHERED = 1e9  # elements of weights that ZeRO-3 keeps gathered at most
RENDERER = 0.2 * GIB  # an EGL context and its buffers, a worker
PHYSX = 2.0 * GIB  # of ManiSkill's physics and renderer on the GPU, beside its cameras
GPUS = {  # GiB by name, as nvidia-smi says
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
    name: str
    size: float  # bytes

    @classmethod
    def of(cls, text: str) -> Gpu:
        """Returns the GPU of a name or a number of GiB. Raises UserError."""
        name = text.strip().lower()
        if name in GPUS:
            return cls(name, GPUS[name] * GIB)
        try:
            size = float(name)
        except ValueError:
            size = 0.0
        if not 0 < size < 10_000:
            raise UserError(f"--gpu={text}: give GiB, such as 80, or one of {', '.join(GPUS)}")
        return cls(f"{size:g} GiB", size * GIB)


@dataclass(frozen=True)
class Plan:
    """Bytes of a rank's GPU by part, while it trains and while it samples rollouts. notes: lines below the table."""

    training: dict[str, float]
    sampling: dict[str, float]
    notes: tuple[str, ...]

    @property
    def most(self) -> float:
        return max(sum(self.training.values()), sum(self.sampling.values()))

    def fits(self, gpu: Gpu) -> bool:
        return self.most <= ROOM * gpu.size

    def lines(self) -> list[str]:
        """Returns a table in GiB."""
        names = [name for name in {**self.training, **self.sampling} if max(self._both(name)) >= 0.005 * GIB]
        lines = [f"{'GiB of a rank':<28} {'training':>9} {'rollouts':>9}"]
        lines += [f"{name:<28} {self._both(name)[0] / GIB:>9.2f} {self._both(name)[1] / GIB:>9.2f}" for name in names]
        sums = [sum(phase.values()) / GIB for phase in (self.training, self.sampling)]
        return [*lines, f"{'sum':<28} {sums[0]:>9.2f} {sums[1]:>9.2f}", *self.notes]

    def _both(self, name: str) -> tuple[float, float]:
        return self.training.get(name, 0.0), self.sampling.get(name, 0.0)


class Peaks:
    """A cache of activation peaks of one network: most changes of a plan leave one of the two peaks as it was."""

    def __init__(self) -> None:
        self._computed: dict[str, float] = {}

    def of(self, config: Config, memory: MemoryModel, *, trains: bool) -> float:
        relevant = plain(config)
        engine = relevant.pop("engine")
        relevant.pop("optim")
        if trains:
            relevant["engine"] = {k: v for k, v in engine.items() if k not in ("zero_stage", "offload")}
            relevant.pop("rollout") if "max_prompt_length" not in relevant["rollout"] else relevant["rollout"].pop(
                "micro_batch", 0
            )
        else:
            relevant["engine"] = engine["zero_stage"] == 3
            relevant["model"].pop("activation_checkpointing", None)
        key = f"{trains} {relevant}"
        if key not in self._computed:
            compute = (lambda: memory.train(config.engine.micro_batch)) if trains else memory.sample
            self._computed[key] = 0.0 if compute is None else peak_activations(memory.module, compute, trains=trains)
        return self._computed[key]


def plan(config: Config, memory: MemoryModel, ranks: int, gpu: Gpu, peaks: Peaks) -> Plan:
    """Returns the memory plan of one of `ranks` GPUs. gpu: of which a colocated vLLM takes its share."""
    engine, dtype = config.engine, config.model.dtype
    states = static_memory(memory.module, engine.zero_stage, ranks, dtype, len(config.optim.moments))
    trained = sum(p.numel() for p in memory.module.parameters() if p.requires_grad)
    every = sum(p.numel() for p in memory.module.parameters())
    width = 2 if dtype == "bfloat16" else 4
    local, sharded = trained / (ranks if engine.zero_stage == 3 else 1), trained / (ranks if engine.zero_stage else 1)
    both = {"weights": states["weights"], "optimizer": states["optimizer"]}
    if engine.offload != "none":
        both["optimizer"] = 0.0
    if engine.offload == "all":
        both["weights"] = 0.0
    if engine.zero_stage == 3:
        both["gathered weights"] = min(GATHERED, every) * width
    averages = (config.optim.ema is not None) + (config.algorithm.slow_sampling is not None)
    both["averages"] = averages * local * (4 + width)  # fp32, and the weights that they replace meanwhile
    both["reference"] = 2 * local * width if config.needs.reference else 0.0
    both["teachers"] = teachers(config) * width
    copies = sum(measurement.trains_copy for measurement in config.needs.measurements)
    both["trained copies"] = copies * trained_copy(every, trained, width)
    both["simulators"] = simulators(config)
    both["context and reduction"] = CONTEXT + (min(BUCKET, trained) * width if engine.zero_stage in (1, 2) else 0.0)
    on_gpu = engine.zero_stage and engine.offload == "none"
    training = {
        **both,
        "gradients": states["gradients"],
        "fp32 gradients of a step": flat_gradients(engine.zero_stage, dtype) * sharded if on_gpu else 0.0,
        "activations": peaks.of(config, memory, trains=True),
        "logits chunk": memory.logits,
        **memory.training_parts,
    }
    sampling = {**both, **memory.sampling_parts, "keys and values": memory.cache}
    sampling["activations"] = peaks.of(config, memory, trains=False)
    if engine.zero_stage == 3 and isinstance(config.generator, TransformersGenerator) and config.generator.gather:
        sampling["gathered weights"] = every * width
    if isinstance(config.generator, VLLMColocated):
        sampling["vLLM's share"] = config.generator.memory * gpu.size
    return Plan(training, sampling, tuple(memory.notes))


def teachers(config: Config) -> int:
    """Returns the number of weights of all teachers that lie beside the policy; those of recipes, which are small, are
    not counted. Raises UserError where a teacher's size is unknown."""
    loaded = {teacher.path for _, teacher in sections_in(config.algorithm, PathTeacher) if teacher.path is not None}
    return sum(weights_of(config, path) for path in sorted(loaded))


def trained_copy(every: int, trained: int, width: int) -> int:
    """Returns the bytes of a copy of the policy that is trained beside it: all of its weights, and of those that are
    trained a gradient, two moments, and where they are rounded an fp32 copy and its gradient. width: bytes a weight."""
    return every * width + trained * (width + 8 + (8 if width < 4 else 0))


def weights_of(config: Config, path: str) -> int:
    """Returns the number of weights of another model of the job's kind."""
    memory = config.model.frozen.memory_model(config, path)
    if memory is None:
        raise UserError(f"teacher {path} is one of mmrl's small networks; its memory is not estimated")
    return sum(p.numel() for p in memory.module.parameters())


def flat_gradients(zero_stage: int, dtype: str) -> int:
    """Returns the bytes a trained parameter of DeepSpeed's flat fp32 gradient, with the flat one in bf16 that it is
    copied from where gradients are not summed in fp32."""
    return 6 if dtype == "bfloat16" and not accumulates_in_fp32(zero_stage, dtype) else 4


def simulators(config: Config) -> float:
    """Returns the bytes of a rank's simulators on its GPU for rendering and physics, by rule of thumb."""
    task = plain(config.task)
    options = task.get("options") or {}
    if "simulator" not in task:
        return 0.0
    images = 224**2 if not options.get("image_size") else options["image_size"] ** 2
    cameras = task["rows"] * images * (4 + 4 + 4)  # colour, depth and segmentation
    if options.get("sim_backend") == "physx_cuda":
        return PHYSX + cameras
    return (task.get("workers") or 1) * RENDERER if task["simulator"] != "tabletop" else 0.0


Make = Callable[[Sequence[str]], Config]  # a job with further overrides


def moves(config: Config, ranks: int) -> list[str]:
    """Returns overrides that lower memory, those that cost the least time first."""
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


def fitted(make: Make, path: str, ranks: int, gpu: Gpu, peaks: Peaks) -> tuple[list[str], Plan]:
    """Returns overrides with which a job fits, or comes nearest to it, and its plan then. An override is taken if it
    lowers the larger phase by 1 %; those that the configuration refuses are skipped."""
    chosen: list[str] = []
    config = make(chosen)
    best = described(config, path, ranks, gpu, peaks)
    refused: set[str] = set()
    while not best.fits(gpu):
        for move in moves(config, ranks):
            if move in refused:
                continue
            tried = [*(c for c in chosen if c.split("=")[0] != move.split("=")[0]), move]
            try:
                candidate = make(tried)
            except UserError:
                refused.add(move)
                continue
            candidate_plan = described(candidate, path, ranks, gpu, peaks)
            if candidate_plan.most < 0.99 * best.most:
                chosen, config, best = tried, candidate, candidate_plan
                break
            refused.add(move)
        else:
            break
    return chosen, best


def described(config: Config, path: str, ranks: int, gpu: Gpu, peaks: Peaks) -> Plan:
    """Returns the plan of a job. Raises UserError where the model's size is unknown without its weights."""
    memory = config.model.memory_model(config, path)
    if memory is None:
        raise UserError(f"model.path={path} is one of mmrl's small networks; its memory is not estimated")
    return plan(config, memory, ranks, gpu, peaks)


def spare(make: Make, path: str, ranks: int, gpu: Gpu, peaks: Peaks) -> str:
    """Returns advice on what spare memory could save in time; empty where there is none. A backward pass that computes
    activations again takes a forward pass more: three become four."""
    if plain(make([]).model).get("activation_checkpointing") is not True:
        return ""
    override = "model.activation_checkpointing=false"
    larger = described(make([override]), path, ranks, gpu, peaks)
    if not larger.fits(gpu):
        return ""
    return f"; {override} fits too ({larger.most / GIB:.1f} GiB) and saves up to a quarter of an update"


def memory_lines(make: Make, ranks: int, gpus: Sequence[Gpu]) -> list[str]:
    """Returns the lines of a dry run on memory. Raises UserError where the model's size is unknown."""
    config = make([])
    if config.model.path is None:
        raise UserError("model.path is not set: the size of a model that is built or trained first is not known yet")
    path, peaks = config.model.path, Peaks()
    largest = max(gpus, key=lambda gpu: gpu.size)
    largest_plan = described(config, path, ranks, largest, peaks)
    lines = [f"memory of each of {ranks} ranks, computed without weights:", *largest_plan.lines()]
    for gpu in gpus:
        gpu_plan = (
            largest_plan
            if not isinstance(config.generator, VLLMColocated)
            else described(config, path, ranks, gpu, peaks)
        )
        room = ROOM * gpu.size / GIB
        if gpu_plan.fits(gpu):
            fits = f"{gpu.name}: fits ({gpu_plan.most / GIB:.1f} of {room:.1f} GiB, a tenth left free)"
            lines.append(fits + spare(make, path, ranks, gpu, peaks))
            continue
        chosen, best = fitted(make, path, ranks, gpu, peaks)
        short = f"{gpu.name}: does not fit ({gpu_plan.most / GIB:.1f} of {room:.1f} GiB, a tenth left free)"
        with_ = " ".join(f"'{c}'" if " " in c else c for c in chosen)
        if best.fits(gpu):
            lines.append(f"{short}; fits with {with_} ({best.most / GIB:.1f} GiB)")
        else:
            lines.append(
                f"{short}; nothing here makes it fit, nearest is {with_ or 'as it is'} ({best.most / GIB:.1f} GiB)"
            )
    memory = config.model.memory_model(config, path)
    assert memory is not None  # `described` raised otherwise
    return [*lines, *update_lines(config, memory, ranks, [gpu.name for gpu in gpus])]
