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

    level: Level = option("token", "of the ratio: of the token, of the whole response, or its geometric mean")
    cap: float = option(2.0, "largest weight", ge=1)


class Rejection(Section):
    """Tokens whose pi_old / pi_generator lies outside [low, high] leave the loss."""

    level: Level = option("token", "of the ratio: of the token, of the whole response, or its geometric mean")
    low: float = option(0.5, "smallest ratio", ge=0, le=1)
    high: float = option(2.0, "largest ratio", ge=1)


class Correction(Section):
    """The treatment of tokens whose likelihood in the generator is not that in the trained model."""

    weight: ImportanceWeight | None = option(ImportanceWeight(), "their weight in the loss; null: 1")
    reject: Rejection | None = option(None, "which of them leave the loss; null: none")
    max_gap: float = option(
        0.5, "mean |log pi_old - log pi_generator| of a step above which the run stops", unit="nats", gt=0
    )


class Partial(Section):
    """A step need not wait for its longest responses: they continue in the next one, from the tokens they have and with
    its weights (partial rollouts, arXiv 2501.12599)."""

    oversample: int = option(
        description="prompts in the making beyond those that a step needs, over all ranks; a step takes the first that "
        "are finished, and the others stay",
        ge=1,
    )
    segment: int = option(
        256, "tokens that responses grow by between two checks for finished ones", unit="tokens", ge=1
    )
    max_staleness: int = option(
        4,
        "maximum staleness of a rollout's first token: a step waits for rollouts that would be older in the next one",
        unit="steps",
        ge=1,
    )


class GeneratorSettings(Choice):
    """The engine that samples tokens."""

    where: ClassVar[str] = "rollout.generator"  # the key that holds it
    instead: ClassVar[str] = "rollout.generator=transformers"  # the setting without it
    title: ClassVar[str] = "generator"
    kinds: ClassVar[dict[str, str]] = {
        "transformers": "mmrl.generation.settings:TransformersGenerator",
        "vllm_colocated": "mmrl.generation.settings:VLLMColocated",
        "vllm_server": "mmrl.generation.settings:VLLMServer",
    }

    @property
    def steps_ahead(self) -> int:
        """The number of batches that are made while an earlier one is trained on."""
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
        "under engine.zero_stage=3 a rank has all weights while it generates; false: they come layer by layer for "
        "every token, which needs less memory and takes far longer",
    )


class VLLMGenerator(GeneratorSettings):
    """Options that all of vLLM's engines share, wherever they run."""

    memory: float = option(0.4, "share of a GPU's memory, for weights, activations and cache", gt=0, lt=1)
    cache_gib: float | None = option(
        None, "cache of keys and values; default: the rest of `memory`, on a CPU 1", unit="GiB", gt=0
    )
    max_sequences: int = option(256, "responses in the making at the same time", ge=1)
    images: int = option(1, "the most images that one prompt holds", ge=0)
    videos: int = option(0, "the most videos that one prompt holds", ge=0)
    lora: Literal["merged", "adapter"] = option(
        "merged",
        "how a LoRA gets to the engines: added to all weights, or alone as an adapter, which is quicker to hand over "
        "and slower to compute with; of the language model only",
    )
    routing_replay: bool = option(
        False, "replay with the experts that the engines routed tokens to (R3, arXiv 2510.11370); for experts on GPUs"
    )
    eager: bool = option(False, "no CUDA graphs: a quicker start and slower tokens; always so on a CPU")
    probes: int = option(4, "prompts that are answered after each synchronisation to prove it", ge=1)
    checksums: bool = option(
        True, "compare every tensor's checksum in the engines with the trained one's after each synchronisation"
    )
    probe_limit: float | None = option(
        None,
        "the most that the engines' log-probabilities of the probes' tokens may differ from the trained model's in the "
        "mean; default: four times what they differ by at the start, 1e-3 at least, in bfloat16 0.04",
        unit="nats",
        gt=0,
    )
    correction: Correction = option(Correction(), "for the difference between both likelihoods")
    partial: Partial | None = option(None, "let long responses continue in the next step; null: do not")

    @property
    def unfinished(self) -> Partial | None:
        return self.partial


class VLLMColocated(VLLMGenerator):
    """A vLLM engine in every rank's process. On a GPU it sleeps while that trains; on a CPU it holds its own copy of
    the weights all the time."""

    type: str = "vllm_colocated"
    test: ClassVar[str] = "tests/whole_runs/test_vllm.py"


class VLLMServer(VLLMGenerator):
    """vLLM engines in processes of their own."""

    type: str = "vllm_server"
    test: ClassVar[str] = "tests/whole_runs/test_vllm_servers.py"
    servers: int = option(1, "engines that are started, each a replica", ge=1)
    tensor_parallel: int = option(1, "GPUs of each", ge=1)
    first_device: int = option(0, "the first of their GPUs; those before it are for training", ge=0)
    host: str = option("127.0.0.1", "where they listen; with ranks on several hosts a name that all of them know")
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
        "GPUs, else gloo), for which that keeps a copy of them in its host's memory",
    )
    in_flight: int = option(32, "prompts, with their groups, that a rank leaves with one engine at a time", ge=1)
    timeout: float = option(600.0, "the longest that a start, new weights or a response may take", unit="s", gt=0)
    async_steps: int = option(
        0,
        "batches that engines make one after the other while earlier ones are trained on; they get new weights when "
        "the last one is taken, so that rollouts are at most so many steps old",
        unit="steps",
        ge=0,
    )

    @property
    def steps_ahead(self) -> int:
        return self.async_steps

    @model_validator(mode="after")
    def _addresses_are_addresses(self) -> VLLMServer:
        """Raises ValueError for addresses without http, addresses beside Ray, and partial rollouts that can not go with
        async_steps."""
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
    """Processes that make rollouts, and answers of evaluation while training, in place of the training process. Each
    builds the same policy, gets the trained weights before every batch, and has simulators of its own."""

    where: ClassVar[str] = "rollout.workers"
    instead: ClassVar[str] = "rollout.workers.async_steps=0"

    count: int = option(1, "workers of a rank, which share the prompts that it samples at once", ge=1)
    ray: str | None = option(
        None, "address of a Ray cluster, HOST:PORT of its head, or auto: Ray places the workers; null: they start here"
    )
    first_device: int = option(
        1, "the first of the workers' GPUs, one each, where there are GPUs; those before it are for training", ge=1
    )
    exchange: str | None = option(
        None, "folder for weights that all workers can read; default: RUN/workers; /dev/shm is fast"
    )
    timeout: float = option(1800.0, "the longest that a start, new weights or a batch may take", unit="s", gt=0)
    async_steps: int = option(
        0,
        "batches that workers make one after the other while earlier ones are trained on; they get new weights when "
        "the last one is taken, so that rollouts are at most so many steps old",
        unit="steps",
        ge=0,
    )
    correction: Correction = option(Correction(), "for weights that are some steps old")

    def check(self, needs: Needs, offers: frozenset[Offer], temperature: Schedule | None = None) -> None:
        """Checks that batches may be made ahead of training. offers: those of the policy's decisions.

        Raises ValueError in one line that names the key."""
        ahead = f"rollout.workers.async_steps={self.async_steps}"
        if not self.async_steps:
            return
        if offers & {"matching", "contrast", "image_gradient"}:
            raise ValueError(
                f"{ahead} needs the log-probability of each decision to correct for older weights, which this job's "
                "likelihood does not give; set its type to chain, or set async_steps to 0"
            )
        bound = next((measurement for measurement in needs.measurements if measurement.needs_sampling_weights), None)
        if bound is not None:
            raise ValueError(
                f"{ahead}: the algorithm needs {bound.cost}, computed with the weights that sampled the rollouts, but "
                "these weights have changed by then; set async_steps to 0"
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
    """The processes that make rollouts."""

    workers: RolloutWorkers | None = option(
        None, "processes that sample rollouts; null: the training process samples them"
    )

    @property
    def producer(self) -> RolloutWorkers | None:
        return self.workers
