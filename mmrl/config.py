"""The whole typed configuration tree, and how YAML files and dotted overrides become one.

Only `cli` and `trainer` see `Config`; every other room gets plain arguments or its own section.
"""

from __future__ import annotations

import difflib
import math
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from yaml import YAMLError

from mmrl.errors import UserError
from mmrl.policies.vla.settings import Actions
from mmrl.samplers.settings import Denoising
from mmrl.sections import UNKNOWN, follow


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LoraConfig(Section):
    rank: int = Field(default=16, ge=1)
    alpha: float = 32.0
    dropout: float = 0.0  # must be 0: dropout would make replay differ from sampling
    targets: str | list[str] = "all-linear"

    @model_validator(mode="after")
    def _no_dropout(self) -> LoraConfig:
        if self.dropout != 0.0:
            raise ValueError("dropout must be 0: with dropout the replayed ratio is not 1 before the first update")
        return self


class ModelConfig(Section):
    kind: Literal["vision_language", "diffusion", "vision_language_action"] = "vision_language"
    path: str | None = None  # a folder or a hub name; or `build`
    build: str | None = None  # "package.module:function" called with (folder, seed=...), writes a model made in code
    warm_start: str | None = None  # a configuration beside this one; start from what its run ended with
    dtype: Literal["float32", "bfloat16"] = "float32"
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    freeze: list[Literal["vision", "connector", "language"]] = []
    lora: LoraConfig | None = None
    activation_checkpointing: bool = False
    processor: dict[str, Any] = {}  # keyword arguments of AutoProcessor.from_pretrained, for example max_pixels

    @model_validator(mode="after")
    def _one_origin(self) -> ModelConfig:
        named = [key for key in ("path", "build", "warm_start") if self.__dict__[key] is not None]
        if len(named) > 1:
            raise ValueError(f"{' and '.join(named)} are both set; a model comes from one of them (set one to null)")
        return self


class TaskConfig(BaseModel):
    """`name` picks the task (a folder under tasks/, or "package.module:build"); the rest is the task's own section."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str = "visual_qa"

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class DynamicSamplingConfig(Section):
    """Resample until the batch is full of informative groups (DAPO, arXiv 2503.14476)."""

    enabled: bool = False
    max_rounds: int = Field(default=4, ge=1)  # rounds of generation a step may cost before it goes on with what it has
    low: float | None = None  # keep groups whose mean accuracy lies in [low, high]
    high: float | None = None


class VLLMConfig(Section):
    """The engines of rollout.engine=vllm."""

    # colocated: in the training process, one on every rank; it sleeps on a GPU while that trains, a CPU's holds its own
    # copy of the weights all the time. server: in processes of their own.
    placement: Literal["colocated", "server"] = "colocated"
    memory: float = Field(default=0.4, gt=0, lt=1)  # share of a GPU's memory, for weights, activations and cache
    cache_gib: float | None = Field(default=None, gt=0)  # of keys and values; default: the rest of `memory`, on a CPU 1
    max_sequences: int = Field(default=256, ge=1)  # answered at the same time
    images: int = Field(default=1, ge=0)  # the most that one prompt holds
    # How a LoRA gets to the engines. merged: all weights, the LoRA added to them. adapter: the weights once, and then
    # the LoRA alone, which is quicker to hand over and slower to compute with; of the language model only.
    lora: Literal["merged", "adapter"] = "merged"
    # Replay with the experts that the engines routed tokens to (R3, arXiv 2510.11370); for a mixture of experts on GPUs
    routing_replay: bool = False
    eager: bool = False  # no CUDA graphs: a quicker start and slower tokens; always so on a CPU
    probes: int = Field(default=4, ge=1)  # prompts that are answered after each synchronisation to prove it
    # The most their log-probabilities may differ from the trained model's; default: 1e-3, in bfloat16 0.3
    probe_limit: float | None = Field(default=None, gt=0)
    # Of placement=server only:
    servers: int = Field(default=1, ge=1)  # engines that are started, each a replica
    tensor_parallel: int = Field(default=1, ge=1)  # GPUs of each
    first_device: int = Field(default=0, ge=0)  # the first of their GPUs; those before it are for training
    host: str = "127.0.0.1"  # where they listen; with ranks on several hosts a name that all of them know
    addresses: list[str] = []  # of engines that were started elsewhere, http://host:port; none is started then
    # Address of a Ray cluster, HOST:PORT of its head, or auto: Ray starts the engines, on hosts that have the GPUs free
    ray: str | None = None
    exchange: str | None = None  # folder for weights that all engines can read; default RUN/engines; /dev/shm is fast
    in_flight: int = Field(default=32, ge=1)  # prompts, with their groups, that a rank leaves with one engine at a time
    timeout: float = Field(default=600, gt=0)  # seconds that a start, new weights or a response may take

    @model_validator(mode="after")
    def _one_process_has_one_gpu(self) -> VLLMConfig:
        if self.placement == "colocated":
            if self.addresses or self.tensor_parallel > 1 or self.servers > 1 or self.ray:
                raise ValueError(
                    "rollout.vllm.addresses, servers, tensor_parallel and ray are for rollout.vllm.placement=server"
                )
        elif self.ray and self.addresses:
            raise ValueError(
                f"rollout.vllm.ray={self.ray} starts engines, and rollout.vllm.addresses names some; keep one"
            )
        elif wrong := [address for address in self.addresses if not address.startswith(("http://", "https://"))]:
            raise ValueError(f"rollout.vllm.addresses: {wrong[0]!r} is no address; write http://HOST:PORT")
        return self


class PartialConfig(Section):
    """A step need not wait for its longest responses: they go on in the next one, from the tokens they have and with
    its weights (partial rollouts, arXiv 2501.12599)."""

    # Prompts in the making beyond those that a step needs, over all ranks; 0: off. A step takes the first that are
    # finished, and the others stay.
    extra: int = Field(default=0, ge=0)
    segment: int = Field(default=256, ge=1)  # tokens that responses grow by between two looks at who is finished


class CorrectionConfig(Section):
    """What becomes of tokens whose likelihood in the engine that sampled them is not that in the trained model."""

    # Level of truncated importance sampling, min(pi_old / pi_engine, cap); None: none
    weight: Literal["token", "sequence", "geometric"] | None = "token"
    cap: float = Field(default=2.0, ge=1)
    # Level at which pi_old / pi_engine outside [low, high] takes a token out of the loss; None: none
    reject: Literal["token", "sequence", "geometric"] | None = None
    low: float = Field(default=0.5, ge=0)
    high: float = Field(default=2.0, gt=0)
    max_gap: float = Field(default=0.5, gt=0)  # mean |log pi_old - log pi_engine| of a step above which the run stops

    @model_validator(mode="after")
    def _bounds_hold_one(self) -> CorrectionConfig:
        if not self.low <= 1 <= self.high:
            raise ValueError(
                f"rollout.correction.low={self.low} and high={self.high} leave out 1, where both engines agree"
            )
        return self


class RolloutConfig(Section):
    engine: Literal["transformers", "vllm"] = "transformers"  # who generates; vllm: for model.kind=vision_language
    vllm: VLLMConfig = VLLMConfig()
    # Batches that engines make while an earlier one is trained on, with weights one step old (rollout.correction
    # weighs that); 1 needs rollout.vllm.placement=server
    ahead: int = Field(default=0, ge=0, le=1)
    partial: PartialConfig = PartialConfig()  # for rollout.engine=vllm
    # Finished steps between the weights that drew a rollout's first token and those it trains, at most: with
    # rollout.partial a step waits for rollouts that would be older in the next one
    max_staleness: int = Field(default=4, ge=1)
    correction: CorrectionConfig = CorrectionConfig()
    prompts: int = Field(default=16, ge=1)  # prompts a step, over all ranks
    group_size: int = Field(default=8, ge=1)  # rollouts a prompt
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)  # 0: off
    allow_truncated_sampling: bool = False  # top_p and top_k bias the gradient; they are refused unless this is set
    max_prompt_length: int = Field(default=1024, ge=1)  # tokens, image tokens included
    max_response_length: int = Field(default=256, ge=1)  # tokens
    micro_batch: int | None = Field(default=None, ge=1)  # rollouts generated at once on a rank; default: all of them
    score_in_background: bool = False  # score one micro-batch while the next is generated
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()

    @model_validator(mode="after")
    def _partial_rollouts_have_where_to_go(self) -> RolloutConfig:
        partial = self.partial
        if not partial.extra:
            return self
        if self.engine != "vllm":
            raise ValueError("rollout.partial.extra needs rollout.engine=vllm; set it to 0")
        if partial.extra > self.prompts:
            raise ValueError(
                f"rollout.partial.extra={partial.extra} is more than rollout.prompts={self.prompts}: steps could not "
                "take what gets too old; lower it"
            )
        if partial.segment >= self.max_response_length:
            raise ValueError(
                f"rollout.partial.segment={partial.segment} does not divide responses of at most "
                f"rollout.max_response_length={self.max_response_length} tokens; lower it"
            )
        if self.max_staleness <= self.ahead:
            raise ValueError(
                f"rollout.max_staleness={self.max_staleness} leaves no step for rollout.partial with rollout.ahead="
                f"{self.ahead}; raise it"
            )
        if self.micro_batch is not None:
            raise ValueError("rollout.partial keeps all of its prompts in the making; set rollout.micro_batch=null")
        return self

    @model_validator(mode="after")
    def _truncation_by_name(self) -> RolloutConfig:
        if (self.top_p < 1 or self.top_k > 0) and not self.allow_truncated_sampling:
            raise ValueError(
                "top_p and top_k truncate the policy; set rollout.allow_truncated_sampling=true to mean it"
            )
        return self


class KLConfig(Section):
    coefficient: float = Field(default=0.0, ge=0)  # 0: no reference model is loaded
    kind: Literal["k1", "k2", "k3", "exact", "velocity"] = "k3"  # tokens: k1, k2, k3; denoising: exact, velocity


class SamplingPolicyConfig(Section):
    """Rollouts come from an average of the weights, whose decay grows as slope x (step - start), up to `most`
    (DiffusionNFT, arXiv 2509.16117)."""

    slope: float = Field(default=0.001, ge=0)
    most: float = Field(default=0.5, ge=0, lt=1)
    start: int = Field(default=0, ge=0)


class PPOConfig(Section):
    """What algorithm.method=ppo adds: a critic, and advantages by generalised advantage estimation (arXiv 1707.06347,
    1506.02438). Time passes by looks at the scene: one chunk of actions is one step."""

    gamma: float = Field(default=0.99, gt=0, le=1)
    lam: float = Field(default=0.95, ge=0, le=1)
    value_coefficient: float = Field(default=0.5, gt=0)
    value_clip: float | None = Field(default=None, gt=0)  # how far a value may move from what it was; None: as it likes
    simulator_reward: float = Field(default=0.0, ge=0)  # weight of the simulator's own reward, beside task.rewards


class AlgorithmConfig(Section):
    method: Literal["grpo", "ppo", "supervised"] = "grpo"
    baseline: Literal["mean", "leave_one_out", "length_weighted", "shrinkage", "none"] = "mean"
    scale: Literal["group_std", "batch_std", "none"] = "group_std"
    components: Literal["sum", "normalise_each", "gated"] = "sum"
    level: Literal["decision", "segment", "sequence"] = "decision"
    ratio: Literal["plain", "normalised"] = "plain"  # normalised: GRPO-Guard's, for Gaussian steps
    surrogate: Literal[
        "clip", "dual_clip", "cispo", "soft", "divergence_mask", "gaussian_weight", "reinforce", "contrast"
    ] = "clip"
    clip_low: float = Field(default=0.2, ge=0)
    clip_high: float = Field(default=0.28, ge=0)
    surrogate_options: dict[str, float] = {}
    reduce: Literal["token_mean", "sequence_mean", "sequence_sum", "constant"] = "token_mean"
    ppo: PPOConfig = PPOConfig()
    kl: KLConfig = KLConfig()
    entropy_coefficient: float = 0.0  # subtracted from the loss; a constant, not adapted
    epochs: int = Field(default=1, ge=1)
    minibatches: int = Field(default=1, ge=1)  # optimizer steps an epoch
    mask_truncated: bool = False  # leave out rollouts cut at max_response_length (overlong filtering, DAPO)
    sampling_policy: SamplingPolicyConfig | None = None  # roll out with a slower average of the weights


class OptimConfig(Section):
    lr: float = Field(default=1e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0)  # optimizer steps of linear warm-up
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    clip_grad_norm: float = Field(default=1.0, ge=0)  # 0: off
    ema: float | None = Field(default=None, gt=0, lt=1)  # decay of averaged weights: evaluated, and written at the end


class EngineConfig(Section):
    """How DeepSpeed runs the job."""

    zero_stage: Literal[0, 1, 2, 3] = 0
    offload: Literal["none", "optimizer", "all"] = "none"  # to the CPU; `all` adds the parameters and needs stage 3
    micro_batch: int = Field(default=8, ge=1)  # rollouts replayed at once on a rank
    logp_chunk: int = Field(default=1024, ge=1)  # decisions whose full-vocabulary logits exist at the same time
    max_bad_steps: int = Field(default=3, ge=1)  # non-finite losses or gradients in a row before the run stops

    @model_validator(mode="after")
    def _offload_needs_zero(self) -> EngineConfig:
        if self.offload == "all" and self.zero_stage != 3:
            raise ValueError("offload=all moves the parameters and needs engine.zero_stage=3")
        if self.offload == "optimizer" and self.zero_stage == 0:
            raise ValueError("offload=optimizer needs engine.zero_stage of 1, 2 or 3")
        return self


class EvaluationConfig(Section):
    every: int = Field(default=50, ge=0)  # steps; 0: only before and after training
    prompts: int = Field(default=256, ge=1)  # the first N held-out prompts
    temperature: float = Field(default=0.0, ge=0)  # 0: greedy
    before: bool = True
    micro_batch: int = Field(default=256, ge=1)


class CheckpointConfig(Section):
    every: int = Field(default=0, ge=0)  # steps; 0: none but the final weights
    keep: int = Field(default=2, ge=1)  # finished checkpoints kept; the best one is kept besides
    best: bool = True
    resume: bool = False  # go on from the newest finished checkpoint of run_dir


class KernelsConfig(Section):
    """Who computes the fused operators (mmrl.kernels). The choices agree to rounding."""

    # auto: the compiled kernels of each tensor's device, where they can be built; torch: plain PyTorch
    backend: Literal["auto", "cuda", "cpu", "torch"] = "auto"


class LogConfig(Section):
    samples_every: int = Field(default=50, ge=0)
    samples: int = Field(default=8, ge=1)
    wandb: str | None = None  # project name


class Config(Section):
    run_dir: str
    seed: int = Field(default=0, ge=0)
    steps: int = Field(default=100, ge=1)  # batches of rollouts (or of demonstrations)
    threads: int | None = Field(default=None, ge=1)  # CPU threads of torch, a process
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    rollout: RolloutConfig = RolloutConfig()
    denoising: Denoising = Denoising()
    action: Actions = Actions()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optim: OptimConfig = OptimConfig()
    engine: EngineConfig = EngineConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    kernels: KernelsConfig = KernelsConfig()

    @model_validator(mode="after")
    def _group_baseline_needs_a_group(self) -> Config:
        grouped = self.algorithm.method == "grpo" and self.algorithm.baseline != "none"
        if grouped and self.rollout.group_size < 2:
            raise ValueError(
                f"rollout.group_size=1 with algorithm.baseline={self.algorithm.baseline}: a group of one has no "
                "baseline and learns nothing; raise group_size or set algorithm.baseline=none"
            )
        return self

    @model_validator(mode="after")
    def _engine_fits_the_job(self) -> Config:
        if self.rollout.engine == "vllm":
            if self.model.kind != "vision_language":
                raise ValueError(
                    f"rollout.engine=vllm is for model.kind=vision_language, not {self.model.kind}; set it to "
                    "transformers"
                )
            if self.rollout.temperature > 2:
                raise ValueError(f"rollout.temperature={self.rollout.temperature:g}: vLLM takes at most 2")
            if self.algorithm.method == "supervised":
                raise ValueError("algorithm.method=supervised generates nothing; set rollout.engine=transformers")
        if self.rollout.ahead and (self.rollout.engine, self.rollout.vllm.placement) != ("vllm", "server"):
            raise ValueError("rollout.ahead needs rollout.engine=vllm and rollout.vllm.placement=server; set it to 0")
        return self

    @model_validator(mode="after")
    def _half_precision_needs_master_weights(self) -> Config:
        if self.model.dtype == "bfloat16" and self.engine.zero_stage == 0:
            raise ValueError(
                "model.dtype=bfloat16 with engine.zero_stage=0 keeps no fp32 copy of the weights, and small updates "
                "round to nothing; set engine.zero_stage=1 or higher"
            )
        return self

    @model_validator(mode="after")
    def _options_fit_the_kind_of_decision(self) -> Config:
        """An option of tokens means nothing for Gaussian steps, and the other way round."""
        diffusion, algorithm, denoising = self.model.kind == "diffusion", self.algorithm, self.denoising
        if diffusion and algorithm.entropy_coefficient != 0:
            raise ValueError(
                "algorithm.entropy_coefficient: a denoising step has constant entropy, so it changes nothing; remove it"
            )
        if algorithm.kl.coefficient > 0 and diffusion != (algorithm.kl.kind in ("exact", "velocity")):
            raise ValueError(
                f"algorithm.kl.kind={algorithm.kl.kind} is not for model.kind={self.model.kind}; use "
                f"{'exact or velocity' if diffusion else 'k1, k2 or k3'}"
            )
        contrast = diffusion and denoising.likelihood == "contrast"
        if algorithm.method == "grpo" and contrast != (algorithm.surrogate == "contrast"):
            raise ValueError("algorithm.surrogate=contrast and denoising.likelihood=contrast go together")
        chain = diffusion and denoising.likelihood == "chain"
        if algorithm.ratio == "normalised" and not chain:
            raise ValueError("algorithm.ratio=normalised is for denoising chains (denoising.likelihood=chain)")
        if algorithm.level == "segment" and not (chain and denoising.chunks):
            raise ValueError("algorithm.level=segment needs a denoising chain and denoising.chunks")
        if algorithm.kl.coefficient > 0 and algorithm.kl.kind == "exact" and not chain:
            raise ValueError("algorithm.kl.kind=exact needs denoising.likelihood=chain; use velocity")
        shared = (algorithm.baseline, algorithm.components)
        if diffusion and denoising.branching and (shared != ("mean", "sum") or algorithm.scale == "batch_std"):
            raise ValueError(
                "denoising.branching compares nodes of a tree: set algorithm.baseline=mean, algorithm.components=sum "
                "and algorithm.scale=group_std or none"
            )
        leaves = math.prod(denoising.branching)
        if diffusion and denoising.branching and leaves != self.rollout.group_size:
            raise ValueError(
                f"denoising.branching={list(denoising.branching)} makes {leaves} leaves a tree; "
                f"set rollout.group_size={leaves}"
            )
        return self

    @model_validator(mode="after")
    def _options_fit_robots(self) -> Config:
        robot, method = self.model.kind == "vision_language_action", self.algorithm.method
        if method == "ppo" and not robot:
            raise ValueError("algorithm.method=ppo needs the critic of model.kind=vision_language_action; use grpo")
        if not robot:
            return self
        if self.engine.zero_stage == 3:
            raise ValueError(
                "engine.zero_stage=3 gathers weights in every forward pass, but ranks play episodes of different "
                "lengths; set engine.zero_stage to 0, 1 or 2"
            )
        if self.model.activation_checkpointing:
            raise ValueError(
                "model.activation_checkpointing: layers that recompute keep no prompt, and a robot's policy reads its "
                "prompt once; remove it"
            )
        constant = self.action.head == "flow" and self.action.spread == "sampler"
        if constant and self.algorithm.entropy_coefficient != 0:
            raise ValueError("algorithm.entropy_coefficient: steps of a flow have constant entropy; remove it")
        return self

    @property
    def group_size(self) -> int:
        return 1 if self.algorithm.method == "supervised" else self.rollout.group_size

    @property
    def rollouts_per_step(self) -> int:
        return self.rollout.prompts * self.group_size

    @property
    def total_updates(self) -> int:
        return self.steps * self.algorithm.epochs * self.algorithm.minibatches


def load(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read a YAML file, follow its `extends`, apply dotted overrides such as `optim.lr=1e-5`, and validate.

    Raises UserError with one line that names the key, its nearest valid name where there is one, and the file.
    """
    tree = _read_yaml(Path(path))
    for override in overrides or []:
        if "=" not in override:
            raise UserError(f"override {override!r} is not of the form key.subkey=value")
        try:
            extra = OmegaConf.from_dotlist([override])
        except YAMLError as error:
            raise UserError(f"override {override!r}: not valid YAML: {_one_line(error)}") from None
        tree = _merge(tree, extra, f"override {override!r}")
    try:
        plain = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:  # ${...} that leads nowhere, or ??? left to be filled
        raise UserError(f"{path}: {_one_line(error)}") from None
    assert isinstance(plain, dict)
    model = plain.get("model")
    if isinstance(model, dict) and isinstance(model.get("warm_start"), str):
        model["warm_start"] = str(Path(path).parent / model["warm_start"])
    return validate(Config, {str(key): value for key, value in plain.items()}, str(path))


def to_yaml(config: Config) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json")))


def validate(model: type[BaseModel], tree: dict[str, Any], origin: str) -> Any:
    """`model(**tree)`, with pydantic's report turned into one line. `origin` names the file or the section."""
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise UserError(f"{origin}: {_explain(model, error)}") from None


def _merge(base: Any, extra: Any, origin: str) -> DictConfig:
    try:
        merged = OmegaConf.merge(base, extra)
    except (OmegaConfBaseException, TypeError, AssertionError) as error:
        raise UserError(f"{origin}: {str(error).splitlines()[0]}") from None
    assert isinstance(merged, DictConfig)
    return merged


def _read_yaml(path: Path, extended_by: tuple[Path, ...] = ()) -> DictConfig:
    if not path.is_file():
        raise UserError(f"no configuration file {path}")
    try:
        tree = OmegaConf.load(path)
    except (YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid YAML: {_one_line(error)}") from None
    except OSError:  # omegaconf's own for a document that is a number
        tree = None
    if not isinstance(tree, DictConfig):
        raise UserError(f"{path}: expected a mapping at the top level")
    base = tree.pop("extends", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise UserError(f"{path}: extends: expected the path of one YAML file (got {base!r})")
    chain = (*extended_by, path.resolve())
    if (path.parent / base).resolve() in chain:
        raise UserError(f"{path}: extends: {base} extends this file in turn")
    return _merge(_read_yaml(path.parent / base, chain), tree, str(path))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _explain(model: type[BaseModel], error: ValidationError) -> str:
    # A misspelt key first: where the key is required, it would else be reported as missing.
    first = min(error.errors(), key=lambda e: e["type"] not in UNKNOWN)
    path, valid = follow(model, first["loc"])
    where = ".".join(path)
    if first["type"] in UNKNOWN:
        near = difflib.get_close_matches(path[-1], valid, n=1, cutoff=0.4)
        prefix = where.rpartition(".")[0]
        hint = f"did you mean {prefix + '.' if prefix else ''}{near[0]}?" if near else f"valid keys: {', '.join(valid)}"
        return f"unknown key {where}; {hint}"
    message = first["msg"].removeprefix("Value error, ")
    given = "" if first["type"] in ("missing", "value_error") else f" (got {first['input']!r})"
    return f"{where}: {message}{given}" if where else message
