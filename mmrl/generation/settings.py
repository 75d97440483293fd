"""Settings of the engines that sample tokens."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import model_validator

from mmrl.protocols.offers import Offer
from mmrl.protocols.requirements import Needs
from mmrl.schedules.schedule import Constant, Schedule
from mmrl.settings import Choice, Section, option

Level = Literal["token", "sequence", "geometric"]


class ImportanceWeight(Section):
    """Truncated importance sampling: min(pi_old / pi_generator, cap)."""

    level: Level = option(
        "token", "what the ratio is of: each token, the whole response, or the geometric mean over its tokens"
    )
    cap: float = option(2.0, "largest weight", ge=1)


class Rejection(Section):
    """Tokens whose pi_old / pi_generator lies outside [low, high] leave the loss."""

    level: Level = option(
        "token", "what the ratio is of: each token, the whole response, or the geometric mean over its tokens"
    )
    low: float = option(0.5, "smallest ratio", ge=0, le=1)
    high: float = option(2.0, "largest ratio", ge=1)


class Correction(Section):
    """The correction for tokens whose likelihood in the generator differs from that in the trained model."""

    weight: ImportanceWeight | None = option(
        ImportanceWeight(), "importance weight of these tokens in the loss; null: 1"
    )
    reject: Rejection | None = option(None, "which of these tokens leave the loss; null: none")
    max_gap: float = option(
        0.5, "largest mean |log pi_old - log pi_generator| of a step; above it the run stops", unit="nats", gt=0
    )


class Partial(Section):
    """Partial rollouts (arXiv 2501.12599): a step does not wait for its longest responses. They continue in the next
    step, after the tokens that they have and with its weights."""

    oversample: int = option(
        description="prompts that are answered at a time beyond those that a step needs, over all ranks; a step takes "
        "the first finished ones, and the others continue in the next step",
        ge=1,
    )
    segment: int = option(
        256, "tokens by which responses grow between two checks for finished ones", unit="tokens", ge=1
    )
    max_staleness: int = option(
        4,
        "maximum staleness of a rollout's first token: a step waits for rollouts that would exceed it in the next step",
        unit="steps",
        ge=1,
    )


class GeneratorSettings(Choice):
    """The engine that samples tokens."""

    where: ClassVar[str] = "rollout.generator"  # the key of these settings
    instead: ClassVar[str] = "rollout.generator=transformers"  # the setting to use instead, for messages
    title: ClassVar[str] = "generator"
    kinds: ClassVar[dict[str, str]] = {
        "transformers": "mmrl.generation.settings:TransformersGenerator",
        "vllm_colocated": "mmrl.generation.settings:VLLMColocated",
        "vllm_server": "mmrl.generation.settings:VLLMServer",
    }

    @property
    def steps_ahead(self) -> int:
        """The number of batches that are sampled while an earlier one is trained on."""
        return 0

    @property
    def unfinished(self) -> Partial | None:
        return None


class TransformersGenerator(GeneratorSettings):
    """The trained model itself, with transformers' forward pass."""

    type: str = "transformers"
    test: ClassVar[str] = "tests/generation/test_sampling.py"
    gather: bool = option(
        True,
        "under engine.zero_stage=3 gather all weights on each rank for generation; false: gather them layer by layer "
        "for every token, which needs less memory and takes far longer",
    )


class VLLMGenerator(GeneratorSettings):
    """Options that all vLLM engines share."""

    memory: float = option(0.4, "share of a GPU's memory for weights, activations and the key-value cache", gt=0, lt=1)
    cache_gib: float | None = option(
        None,
        "size of the key-value cache; default: what weights and activations leave of `memory`; 1 on a CPU",
        unit="GiB",
        gt=0,
    )
    max_sequences: int = option(256, "maximum number of responses that an engine samples at a time", ge=1)
    images: int = option(1, "maximum number of images in a prompt", ge=0)
    videos: int = option(0, "maximum number of videos in a prompt", ge=0)
    lora: Literal["merged", "adapter"] = option(
        "merged",
        "how engines get a LoRA. merged: added to the weights; adapter: by itself, which is faster to transfer and "
        "slower to compute with, and only for the language model",
    )
    routing_replay: bool = option(
        False, "replay with the experts to which the engines routed the tokens (R3, arXiv 2510.11370); needs GPUs"
    )
    eager: bool = option(False, "without CUDA graphs: a faster start and slower generation; always true on a CPU")
    probes: int = option(4, "prompts that are answered after each synchronisation of weights, to check it", ge=1)
    checksums: bool = option(
        True, "after each synchronisation compare the checksum of every tensor in the engines with that in the trainer"
    )
    probe_limit: float | None = option(
        None,
        "largest mean difference between the log-probabilities of the probes' tokens in the engines and in the trained "
        "model; default: four times the difference at the start, at least 1e-3 (0.04 in bfloat16)",
        unit="nats",
        gt=0,
    )
    correction: Correction = option(
        Correction(), "correction for the difference between the likelihoods in the engines and in the trained model"
    )
    partial: Partial | None = option(None, "continue long responses in the next step; null: do not")

    @property
    def unfinished(self) -> Partial | None:
        return self.partial


class VLLMColocated(VLLMGenerator):
    """A vLLM engine in the process of each rank. On a GPU the engine sleeps while the rank trains; on a CPU it always
    holds its own copy of the weights."""

    type: str = "vllm_colocated"
    test: ClassVar[str] = "tests/whole_runs/test_vllm.py"


class VLLMServer(VLLMGenerator):
    """vLLM engines in processes of their own."""

    type: str = "vllm_server"
    test: ClassVar[str] = "tests/whole_runs/test_vllm_servers.py"
    servers: int = option(1, "engines that are started, each a replica of the model", ge=1)
    tensor_parallel: int = option(1, "GPUs of each engine", ge=1)
    first_device: int = option(0, "index of the first GPU of the engines; GPUs before it are for training", ge=0)
    host: str = option(
        "127.0.0.1",
        "host name on which the engines listen; with ranks on several hosts, a name that all of them can resolve",
    )
    addresses: list[str] = option([], "addresses of running vLLM servers, http://host:port; then mmrl starts none")
    ray: str | None = option(
        None, "address of a Ray cluster, HOST:PORT of its head, or auto: Ray places the engines on hosts with free GPUs"
    )
    exchange: str | None = option(
        None, "folder for weights that all engines can read; default: RUN/engines; /dev/shm is fast"
    )
    transfer: Literal["folder", "broadcast"] = option(
        "folder",
        "how weights get to the engines: as files in `exchange`, or from rank 0 through a process group (NCCL between "
        "GPUs, else gloo), for which rank 0 keeps a copy of them in its host's memory",
    )
    in_flight: int = option(
        32, "prompts, each with all responses of its group, that a rank sends to one engine at a time", ge=1
    )
    timeout: float = option(
        600.0, "time limit of an engine's start, of a transfer of weights and of a response", unit="s", gt=0
    )
    async_steps: int = option(
        0,
        "batches that engines sample ahead, while earlier ones are trained on; they get new weights when the last of "
        "these is taken, so that rollouts are at most so many steps old",
        unit="steps",
        ge=0,
    )

    @property
    def steps_ahead(self) -> int:
        return self.async_steps

    @model_validator(mode="after")
    def _check_addresses(self) -> VLLMServer:
        """Raises ValueError for addresses without http, for addresses together with Ray, and for partial rollouts that
        do not fit async_steps."""
        if self.ray and self.addresses:
            raise ValueError(
                f"ray={self.ray} starts engines, but addresses names running ones; remove one of these keys"
            )
        if wrong := [address for address in self.addresses if not address.startswith(("http://", "https://"))]:
            raise ValueError(f"addresses: {wrong[0]!r} is not an address; write http://HOST:PORT")
        if self.partial is not None and self.async_steps > 1:
            raise ValueError(
                f"async_steps={self.async_steps} samples several batches with the same weights, but with partial a "
                "response continues with newer weights; set async_steps to 1, or partial to null"
            )
        if self.partial is not None and self.partial.max_staleness <= self.async_steps:
            raise ValueError(
                f"partial.max_staleness={self.partial.max_staleness} must be more than async_steps={self.async_steps}, "
                "since every response is that many steps old already; raise partial.max_staleness"
            )
        return self


class RolloutWorkers(Section):
    """Processes that sample rollouts, and evaluation during training, in place of the training process. Each builds the
    same policy, gets the trained weights before every batch, and has its own simulators."""

    where: ClassVar[str] = "rollout.workers"
    instead: ClassVar[str] = "rollout.workers.async_steps=0"

    count: int = option(1, "workers of a rank, which share the prompts of a batch", ge=1)
    ray: str | None = option(
        None, "address of a Ray cluster, HOST:PORT of its head, or auto: Ray places the workers; null: they start here"
    )
    first_device: int = option(
        1, "index of the first GPU of the workers, which get one GPU each; GPUs before it are for training", ge=1
    )
    exchange: str | None = option(
        None, "folder for weights that all workers can read; default: RUN/workers; /dev/shm is fast"
    )
    timeout: float = option(
        1800.0, "time limit of a worker's start, of a transfer of weights and of a batch", unit="s", gt=0
    )
    async_steps: int = option(
        0,
        "batches that workers sample ahead, while earlier ones are trained on; they get new weights when the last of "
        "these is taken, so that rollouts are at most so many steps old",
        unit="steps",
        ge=0,
    )
    correction: Correction = option(
        Correction(), "correction for rollouts that were sampled with weights of earlier steps"
    )

    def check(self, needs: Needs, offers: frozenset[Offer], temperature: Schedule | None = None) -> None:
        """Checks that batches may be sampled ahead of training. needs: of the algorithm; offers: of the policy's
        likelihood.

        Raises ValueError, with a message that names the key."""
        ahead = f"rollout.workers.async_steps={self.async_steps}"
        if not self.async_steps:
            return
        if offers & {"matching", "contrast", "image_gradient"}:
            raise ValueError(
                f"{ahead} needs the log-probability of each decision to correct for older weights, which this job's "
                "likelihood does not give; set the type of the likelihood to chain, or async_steps to 0"
            )
        unsuited = next((measurement for measurement in needs.measurements if measurement.needs_sampling_weights), None)
        if unsuited is not None:
            raise ValueError(
                f"{ahead}: the algorithm needs {unsuited.cost}, computed with the weights that sampled the rollouts, "
                "but these weights have changed by then; set async_steps to 0"
            )
        if temperature is not None and not isinstance(temperature, Constant):
            raise ValueError(
                f"rollout.temperature follows a schedule, but with {ahead} rollouts are sampled during earlier steps; "
                "set async_steps to 0, or rollout.temperature to a number"
            )

    @property
    def steps_ahead(self) -> int:
        return self.async_steps

    @property
    def unfinished(self) -> Partial | None:
        return None


class WorkerSampling(Section):
    """The processes that sample rollouts."""

    workers: RolloutWorkers | None = option(
        None, "processes that sample rollouts; null: the training process samples them"
    )

    @property
    def producer(self) -> RolloutWorkers | None:
        return self.workers
