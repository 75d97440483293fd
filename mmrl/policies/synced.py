"""Engines that generate for the model that is trained: they get its current weights, and have to prove it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from mmrl.engine import gathered
from mmrl.errors import UserError
from mmrl.generation.vllm import Answering, Generator
from mmrl.policies.vlm import VisionLanguagePolicy, part_of, transformers_model
from mmrl.rollouts import Prompt

PROBE_TOKENS = 16


class Synced:
    """Generation by engines with weights that are known to be the trained ones.

    After each synchronisation every engine answers `probes`, the same prompts with the same seeds every time, and the
    trained model says how likely it finds these answers. A difference above `limit` means that weights, or what is
    remembered of earlier ones, are stale. It shows a change of weights that moves likelihoods by more than `limit`.
    """

    def __init__(
        self,
        policy: VisionLanguagePolicy,
        engine: Generator,
        probes: Sequence[Prompt],
        *,
        limit: float,
        gather: Callable[[Any], list[Any]],
        adapters: bool = False,
    ) -> None:
        """gather: the values of all ranks; every method here but `close` is a collective. adapters: after the first
        time engines get the LoRA alone, see `adapter_rank`."""
        self.adapters, self.has_base = adapters, False
        self.policy, self.engine, self.probes, self.limit, self.gather = policy, engine, list(probes), limit, gather
        policy.engine = engine
        engine.sleep()

    @contextmanager
    def generation(self) -> Iterator[dict[str, float]]:
        """Inside it the engine is awake and computes with the weights the policy has now. Gives metrics."""
        self.engine.wake()
        yield self.synchronise()
        self.engine.sleep()

    def synchronise(self) -> dict[str, float]:
        """Raises UserError, on all ranks, if an engine does not compute with the policy's weights afterwards."""
        started, model = time.perf_counter(), self.policy.module.model
        if not (self.adapters and self.has_base):
            self.engine.load(weights(model, merged=not self.adapters))
            self.has_base = True
        if self.adapters:
            self.engine.adapt(partial(write_adapter, model))
        loaded = time.perf_counter()
        gaps = self.gather([self.probe(engine) for engine in self.engine.replicas])
        gap = float(torch.tensor([found for rank in gaps for found in rank]).max())  # of which NaN is the largest
        if not gap <= self.limit:
            raise UserError(
                f"after giving the weights to vLLM its log-probabilities differ from the trained model's by {gap:.2g}, "
                f"more than rollout.vllm.probe_limit={self.limit:g}: weights or caches are stale; set "
                "rollout.engine=transformers, or a higher limit if model.dtype explains it"
            )
        return {
            "generation/probe_gap": gap,
            "time/synchronise": loaded - started,
            "time/probe": time.perf_counter() - loaded,
            **self.engine.measures(),
        }

    @torch.no_grad()
    def probe(self, engine: Answering) -> float:
        """The largest difference of log-probability between engine and model on its answers to the probes."""
        policy = self.policy
        answers = policy.ask(
            engine, self.probes, 1, range(len(self.probes)), limit=min(PROBE_TOKENS, policy.max_response_length)
        )
        assert answers.behaviour_logp is not None
        difference = policy.replay(answers, policy.module).logp.cpu() - answers.behaviour_logp
        return float(difference[answers.mask].abs().max())

    def close(self) -> None:
        self.engine.close()


def describe(policy: VisionLanguagePolicy, folder: Path) -> None:
    """Writes all that an engine reads of a policy but its weights."""
    core = transformers_model(policy.module.model)
    core.config.save_pretrained(folder)
    core.generation_config.save_pretrained(folder)
    policy.processor.save_pretrained(folder)


def adapter_rank(model: nn.Module) -> int:
    """Of a model whose LoRA can be handed over as such.

    Raises UserError if it has none, or one of more than the language model: vLLM applies that to nothing else.
    """
    if not isinstance(model, peft.PeftModel):
        raise UserError("rollout.vllm.lora=adapter hands over a LoRA, and model.lora is not set; set it, or use merged")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if other := sorted({part_of(name) for name in trained} - {"language"}):
        raise UserError(
            f"rollout.vllm.lora=adapter is for the language model, and the LoRA trains {' and '.join(other)} too; set "
            f"model.freeze=[{', '.join(other)}], or rollout.vllm.lora=merged"
        )
    return max(config.r for config in model.peft_config.values() if isinstance(config, peft.LoraConfig))


def write_adapter(model: Any, folder: Path | None) -> None:
    """The language model's LoRA in peft's format, where there is a folder. Under ZeRO-3 a collective."""
    parts = {
        name: parameter
        for name, parameter in model.named_parameters()
        if "lora_" in name and part_of(name) == "language"
    }
    with gathered(list(parts.values())):
        if folder is not None:
            model.save_pretrained(folder, state_dict=parts, save_embedding_layers=False)


def weights(model: nn.Module, *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of the transformers model by the name and in the layout of its published checkpoint, LoRA merged
    or left out, a tied one under each of its names.

    Under ZeRO-3 one module at a time is gathered, so the peak is one module's weights; a collective then.
    """
    core = transformers_model(model)
    adapted = {path for path, module in core.named_modules() if isinstance(module, LoraLayer)}
    for path, module in core.named_modules():
        if any(path.startswith(f"{above}.") for above in adapted):
            continue  # parts of an adapted layer
        parameters = list(module.parameters(recurse=path in adapted))
        if not parameters:
            continue
        with gathered(parameters):
            layer: Any = module.get_base_layer() if isinstance(module, LoraLayer) else module
            found = {name: value.detach().clone() for name, value in layer.named_parameters(recurse=False)}
            for adapter in module.active_adapters if merged and isinstance(module, LoraLayer) else ():
                found["weight"] += module.get_delta_weight(adapter).detach()
        named = {f"{path}.{name}" if path else name: value for name, value in found.items()}
        yield from revert_weight_conversion(core, named).items()
